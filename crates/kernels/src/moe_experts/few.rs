//! A few rows' mixture in one launch: the whole grid works on gate and up, meets, and works on down.

use super::cuda::{Columns, Figures, Routed, SLOT};
use super::pack_cuda::{BLOCK, SLAB};
use crate::linear::cuda::{Chip, scale_stride};
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes, Tuning};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = crate::gpu::program("moe_experts.few", None, true);

/// Rows from which on passes are quicker, and pairs at most: an expert's pairs are one tile of the tensor core.
const ROWS_MAX: usize = 4;
const PAIRS_MAX: usize = 32;
/// Warps of a block, and the chunks that a team of them may have.
const WARPS: usize = 16;
const CHUNKS_MAX: usize = 4;
/// Bytes of a routed unit to those of a shared one in the second half are 8 to this.
const SHARED_COST: usize = 15;
/// Bytes that the kernel declares beyond what a chip sets aside.
const LISTS: usize = 1024;

/// How a launch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Few {
    kernel: &'static str,
    shared_bytes: usize,
}

impl Few {
    /// `None` where it does not fit.
    pub(super) fn of(figures: &Figures, chip: Chip) -> Option<Few> {
        let Figures { rows, picks, experts, hidden, intermediate, .. } = *figures;
        let pairs = rows * picks;
        let [up, down] = [true, false].map(|up| Columns::of(figures, up));
        let fits = (1..=ROWS_MAX).contains(&rows) && (1..=PAIRS_MAX).contains(&pairs);
        if !fits || up.chunks != down.chunks || up.chunks > CHUNKS_MAX || !intermediate.is_multiple_of(SLAB) {
            return None;
        }
        // Every chunk of both experts in whole turns of the ring, or a ring that is emptied in between.
        let whole = |half: &Columns, columns: usize, depth: usize| {
            half.chunk_blocks.is_multiple_of(depth) && columns == half.chunks * half.chunk_blocks * BLOCK
        };
        let (kernel, depth) = match whole(&up, hidden, 10) && whole(&down, intermediate, 9) {
            true => ("experts_few_10", 10),
            false => ("experts_few_any", 4),
        };
        // The passes that a block meets in the second half, at most; of the first half it holds all rows.
        let passes = pairs.min(experts);
        let cost = (passes * 8 + SHARED_COST) * down.slabs;
        let units = cost.div_ceil(8 * chip.units) + 4;
        let met = (units.div_ceil(down.slabs) + 1).min(passes);
        let staged = (rows * up.blocks).max((rows + (met * rows).min(pairs)) * down.blocks) * 128;
        let shared_bytes = WARPS * (1024 + depth * SLOT) + staged;
        (shared_bytes + LISTS <= chip.shared_bytes).then_some(Few { kernel, shared_bytes })
    }
}

impl Routed<'_> {
    /// Everything but the mixture: the pairs' outputs, and the shared expert's in `shared_out`.
    pub(super) fn few(&self, queue: &mut GpuQueue, few: Few, shared_out: &mut Buffer) -> Result<(), LaunchError> {
        let Figures { rows, picks, experts, hidden, intermediate, limit, .. } = *self.figures;
        let mut shape = ShapeBytes::new().uint(rows).uint(picks).uint(experts).uint(hidden).uint(intermediate);
        for up in [true, false] {
            let half = Columns::of(self.figures, up);
            shape = shape.uint(half.blocks).uint(half.chunk_blocks).uint(half.chunks);
        }
        let shape = shape.uint(scale_stride(hidden)).uint(scale_stride(intermediate)).float(limit);
        let mut arrived = queue.take_counters("experts", 1)?;
        let room = self.room;
        let [up_codes, up_scales] = self.weights(true)?;
        let [down_codes, down_scales] = self.weights(false)?;
        let shared = self.args.weights.shared();
        let mut bindings = vec![up_codes, up_scales, down_codes, down_scales];
        for (codes, scales) in [&shared.w1, &shared.w3, &shared.w2].map(|weights| weights.buffers()) {
            bindings.extend([Binding::Read(codes), Binding::Read(scales)]);
        }
        bindings.extend([self.args.x, self.args.selected, self.args.routing].map(Binding::Read));
        bindings.extend([room.between, room.out, room.pair_of].map(|offset| self.at(offset)));
        bindings.extend([Binding::Write(shared_out), Binding::Write(&mut arrived)]);
        let result = queue.launch_tuned(
            Launch {
                program: &PROGRAM,
                entry: few.kernel,
                bindings: &mut bindings,
                shape: shape.bytes(),
                groups: self.chip.units as u32,
                threads: (WARPS * 32) as u32,
                shared_bytes: few.shared_bytes as u32,
            },
            // The blocks wait for each other between the halves.
            Tuning { cluster: Tuning::WHOLE_GRID, overlap: true },
        );
        drop(bindings);
        queue.keep_counters("experts", arrived);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::super::cuda::{DOWN_CHUNK, UP_CHUNK};
    use super::*;

    const RELEASE: Figures = Figures {
        rows: 1,
        picks: 6,
        experts: 384,
        hidden: 5120,
        intermediate: 2304,
        pairs: 8,
        tile: None,
        limit: 10.0,
        chunks: [UP_CHUNK, DOWN_CHUNK],
    };
    const H200: Chip = Chip { units: 132, shared_bytes: 226 << 10, hopper: true, warpgroups: true };

    #[test]
    fn up_to_four_rows_of_the_release_go_in_one_launch() {
        for rows in 1..=4 {
            let few = Few::of(&Figures { rows, ..RELEASE }, H200).expect("fits");
            assert_eq!(few.kernel, "experts_few_10", "{rows} rows");
            assert!(few.shared_bytes + LISTS <= H200.shared_bytes, "{rows} rows");
        }
    }

    #[test]
    fn what_does_not_fit_goes_in_passes() {
        let refused = [
            ("five rows", Figures { rows: 5, ..RELEASE }, H200),
            ("no picks", Figures { picks: 0, ..RELEASE }, H200),
            ("more pairs than the lists hold", Figures { rows: 4, picks: 17, ..RELEASE }, H200),
            ("halves of different chunks", Figures { intermediate: 576, ..RELEASE }, H200),
            ("little shared memory", RELEASE, Chip { shared_bytes: 98 << 10, ..H200 }),
            ("few multiprocessors, many passes", Figures { rows: 4, ..RELEASE }, Chip { units: 4, ..H200 }),
        ];
        for (what, figures, chip) in refused {
            assert_eq!(Few::of(&figures, chip), None, "{what}");
        }
    }

    #[test]
    fn small_sizes_take_the_kernel_of_any_chunk() {
        for (hidden, intermediate) in [(128, 64), (160, 96), (1376, 608)] {
            let few = Few::of(&Figures { rows: 4, hidden, intermediate, ..RELEASE }, H200).expect("fits");
            assert_eq!(few.kernel, "experts_few_any", "{hidden} columns");
        }
    }
}
