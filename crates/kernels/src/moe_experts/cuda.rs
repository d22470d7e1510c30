//! Launches of the experts on CUDA: the same kernels whatever the routing, which the device alone knows.
//!
//! The chunks of columns are constants ([`UP_CHUNK`], [`DOWN_CHUNK`]), also of the shared expert; the definition of every
//! dot product's bits is [`tf_numerics::fma16`].

use super::few::Few;
use super::pack_cuda::{BLOCK, SLAB};
use super::{Args, Shared};
use crate::linear::Finish;
use crate::linear::cuda::{self, ATOM, Chip, Format, Input, Linear, STAGE, tile_bytes, tile_shared_bytes};
use crate::linear_fp8::Weights as Fp8Weights;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes, Tuning};
use tf_device::{Buffer, LaunchError};

/// Columns of a chunk of `w1` and `w3`, and of `w2`.
pub const UP_CHUNK: usize = 1280;
/// See [`UP_CHUNK`].
pub const DOWN_CHUNK: usize = 576;

static PROGRAM: Program = crate::gpu::program("moe_experts", None, true);
static PIECES: Program = crate::gpu::program("moe_experts.tiles", None, true);

/// Pairs that share one read of the weights: one tile of the tensor core.
const PASS: usize = 8;
/// Bytes of one block in a warp's ring.
pub(super) const SLOT: usize = 640;
/// Passes that one block may meet.
const SPAN_MAX: usize = 48;
/// Bytes of an entry of the list of passes.
const PASS_BYTES: usize = 16;
/// Slabs that a block has in hand at a time.
const TEAMS: usize = 4;
/// Experts whose picks one block of `experts_group` sorts.
const GROUP_EXPERTS: usize = 16;
/// Columns of a block of FP8 and of a quantised input.
const FP8_BLOCK: usize = 32;

/// A tile of many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Of one expert.
    pairs: usize,
    /// That compute, a slab each; a warpgroup beside them fetches.
    warps: usize,
    up: &'static str,
    down: &'static str,
    /// Pairs an expert on average from which on it is taken.
    from: usize,
    shared_bytes: usize,
    /// Of `tiles.cu`: columns go in whole pieces, rows are gathered, and activations come out as the inputs of the next product.
    pieces: bool,
}

impl Tile {
    /// For so many pairs of so many experts, and columns of both products; `None`: in passes.
    fn of(pairs: usize, experts: usize, columns: [usize; 2], chunks: [usize; 2], chip: Chip) -> Option<Tile> {
        const PIECE: usize = 4 * STAGE;
        let whole = columns.iter().chain(&chunks[..1]).all(|columns| columns.is_multiple_of(PIECE));
        let fits = |tile: &&Tile| {
            pairs >= tile.from * experts
                && tile.shared_bytes + TILE_LISTS <= chip.shared_bytes
                && (whole || !tile.pieces)
        };
        TILES.iter().rev().find(fits).copied()
    }
}

/// The last that fits is taken.
const TILES: [Tile; 4] = {
    /// `ring` pieces of a warp's weights, `slots` pieces of inputs.
    const fn pieces(
        pairs: usize,
        [warps, ring, slots]: [usize; 3],
        up: &'static str,
        down: &'static str,
        from: usize,
    ) -> Tile {
        let (inputs, weights) = (4 * pairs * 128, 4 * (512 + 32));
        let (sums, activations) = (pairs / 8 * 512, pairs * 80);
        let shared_bytes = 1024 + slots * inputs + warps * (ring * weights + sums) + warps / 4 * activations;
        Tile { pairs, warps, up, down, from, shared_bytes, pieces: true }
    }
    const fn plain(pairs: usize, up: &'static str, down: &'static str, from: usize) -> Tile {
        let shared_bytes = tile_shared_bytes(pairs, TILE_SLOTS, 8 * TILE_RING_BYTES);
        Tile { pairs, warps: 8, up, down, from, shared_bytes, pieces: false }
    }
    [
        pieces(16, [16, 3, 4], "experts_up_16", "experts_down_16", 6),
        plain(64, "experts_up_tile_64", "experts_down_tile_64", 44),
        pieces(64, [16, 2, 2], "experts_up_64", "experts_down_64", 13),
        plain(128, "experts_up_tile_128", "experts_down_tile_128", 56),
    ]
};
/// Bytes that a kernel of tiles declares beyond what a chip sets aside.
const TILE_LISTS: usize = 8 << 10;
/// Stages of a tile's inputs in shared memory, and bytes of a warp's ring of ten stages of weights.
const TILE_SLOTS: usize = 5;
const TILE_RING_BYTES: usize = 10 * SLOT;

/// Where the parts of the working memory lie, in bytes.
pub(super) struct Room {
    active: usize,
    active_count: usize,
    starts: usize,
    counts: usize,
    tile_starts: usize,
    passes: usize,
    pass_count: usize,
    pair_row: usize,
    pair_weight: usize,
    pub(super) pair_of: usize,
    pub(super) between: usize,
    /// Inputs of both passes, one after the other in time; where a kernel gathers, the rows.
    tiles: usize,
    pub(super) out: usize,
    total: usize,
}

/// The figures of a launch.
pub(super) struct Figures {
    pub(super) rows: usize,
    pub(super) picks: usize,
    pub(super) experts: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    /// Pairs at most, with the gaps that tiles leave between experts.
    pub(super) pairs: usize,
    /// `None`: in passes of few pairs.
    pub(super) tile: Option<Tile>,
    pub(super) limit: f32,
    /// [`UP_CHUNK`] and [`DOWN_CHUNK`], but for measurements.
    pub(super) chunks: [usize; 2],
}

impl Figures {
    fn of(args: &Args<'_>, chip: Chip, chunks: [usize; 2]) -> Figures {
        let (hidden, intermediate) = (args.weights.hidden(), args.weights.intermediate());
        let (rows, picks, experts) = (args.rows, args.picks, args.weights.experts().len());
        let pairs = rows * picks;
        let tile = Tile::of(pairs, experts, [hidden, intermediate], chunks, chip).filter(|_| chip.tiles(rows));
        let gaps = if tile.is_some() { (ATOM - 1) * pairs.min(experts) } else { 0 };
        let pairs = (pairs + gaps).next_multiple_of(ATOM);
        let limit = if args.limit == 0.0 { f32::INFINITY } else { args.limit };
        Figures { rows, picks, experts, hidden, intermediate, pairs, tile, limit, chunks }
    }

    fn room(&self) -> Room {
        let Figures { experts, pairs, hidden, intermediate, .. } = *self;
        let mut total = 0;
        let mut next = |bytes: usize| {
            let first = total;
            total += bytes.next_multiple_of(256);
            first
        };
        let tiles = match self.tile {
            Some(tile) if tile.pieces => self.rows * hidden * 2,
            Some(_) => tile_bytes(pairs, 1, hidden).max(tile_bytes(pairs, 1, intermediate)),
            None => 0,
        };
        Room {
            active: next(experts * 4),
            active_count: next(4),
            starts: next((experts + 1) * 4),
            counts: next(experts * 4),
            tile_starts: next((experts + 1) * 4),
            passes: next(pairs * PASS_BYTES),
            pass_count: next(4),
            pair_row: next(pairs * 4),
            pair_weight: next(pairs * 4),
            pair_of: next(self.rows * self.picks * 4),
            // Behind the pairs' activations: those of the shared expert, where one launch makes both.
            between: next((pairs + self.rows) * intermediate * 2),
            tiles: next(tiles),
            out: next(pairs * hidden * 2),
            total,
        }
    }
}

/// Writes the mixture of every row.
///
/// # Errors
/// [`LaunchError`] when the device has no room for working memory, or refuses.
pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    run_in_chunks(queue, args, [UP_CHUNK, DOWN_CHUNK])
}

/// As [`run`], with other chunks of `w1` and `w3`, and of `w2`.
///
/// # Errors
/// As [`run`].
pub(super) fn run_in_chunks(queue: &mut GpuQueue, args: Args<'_>, chunks: [usize; 2]) -> Result<(), LaunchError> {
    let chip = Chip::of(queue.limits());
    let figures = Figures::of(&args, chip, chunks);
    LaunchError::check_limit("the expert count", figures.experts, crate::moe_route::EXPERTS_MAX)?;
    let room = figures.room();
    let memory = queue.take_scratch("experts", room.total)?;
    let routed = Routed { args: &args, memory: &memory, room: &room, figures: &figures, chip };
    if let Some(few) = Few::of(&figures, chip) {
        let mut shared_out = queue.take_scratch("experts, shared out", figures.rows * figures.hidden * 4)?;
        routed.few(queue, few, &mut shared_out)?;
        combine(queue, args, &figures, [&memory, &shared_out], &room)?;
        queue.keep_scratch("experts, shared out", shared_out);
        queue.keep_scratch("experts", memory);
        return Ok(());
    }
    let cuts = if figures.tile.is_some() { None } else { Some(cuts(&figures, chip)?) };
    if figures.pairs > 0 {
        let pass_rows = cuts.as_ref().map_or(PASS, |[up, _]| up.staged_rows);
        routed.group(queue, figures.tile.map_or(pass_rows, |tile| tile.pairs))?;
    }
    // The shared expert's activation lies between: it lets the routed experts' weights come while it runs.
    let [gate, up] = shared_up(queue, &args, &figures)?;
    let activation = activate(queue, &figures, chip, [&gate, &up])?;
    if figures.pairs > 0 {
        for is_up in [true, false] {
            if let Some([up, down]) = &cuts {
                routed.pass(queue, is_up, if is_up { up } else { down })?;
            }
            match figures.tile {
                Some(tile) if tile.pieces => routed.piece_pass(queue, is_up, tile)?,
                Some(tile) => routed.tile_pass(queue, is_up, tile)?,
                None => {}
            }
        }
    }
    let shared_out = shared_down(queue, args.weights.shared(), &figures, &activation)?;
    combine(queue, args, &figures, [&memory, &shared_out], &room)?;
    queue.keep_scratch("experts, shared out", shared_out);
    queue.keep_scratch("experts, shared activation", activation);
    queue.keep_scratch("experts, shared gate", gate);
    queue.keep_scratch("experts, shared up", up);
    queue.keep_scratch("experts", memory);
    Ok(())
}

/// Adds a row's pairs up, and the shared expert's part.
fn combine(
    queue: &mut GpuQueue,
    args: Args<'_>,
    figures: &Figures,
    [memory, shared]: [&Buffer; 2],
    room: &Room,
) -> Result<(), LaunchError> {
    let shape = ShapeBytes::new().uint(args.rows).uint(args.picks).uint(figures.pairs).uint(figures.hidden);
    let (pairs, pair_of) = (Binding::ReadAt(memory, room.out), Binding::ReadAt(memory, room.pair_of));
    let mut bindings = [pairs, pair_of, Binding::Read(shared), Binding::Write(args.out)];
    simple(queue, "experts_combine", &mut bindings, &shape, figures.rows * figures.hidden / 2)
}

/// The shared expert's gate and up, `[rows, intermediate]` f32, rounded to bf16, in memory of the queue.
fn shared_up(queue: &mut GpuQueue, args: &Args<'_>, figures: &Figures) -> Result<[Buffer; 2], LaunchError> {
    let Figures { rows, hidden, intermediate, .. } = *figures;
    let weights = args.weights.shared();
    let mut gate = queue.take_scratch("experts, shared gate", rows * intermediate * 4)?;
    let mut up = queue.take_scratch("experts, shared up", rows * intermediate * 4)?;
    let input = Input::F32 { buffer: args.x, chosen: None };
    let mut products = [product(&weights.w1, &mut gate), product(&weights.w3, &mut up)];
    fp8(queue, &mut products, hidden, figures.chunks[0], rows, input)?;
    Ok([gate, up])
}

/// The routed experts of a launch. The parts of the working memory are bound as read, whoever writes them: on CUDA a
/// binding is an address.
pub(super) struct Routed<'a> {
    pub(super) args: &'a Args<'a>,
    memory: &'a Buffer,
    pub(super) room: &'a Room,
    pub(super) figures: &'a Figures,
    pub(super) chip: Chip,
}

impl Routed<'_> {
    pub(super) fn at(&self, offset: usize) -> Binding<'_> {
        Binding::ReadAt(self.memory, offset)
    }

    /// Codes and scales of one pass.
    pub(super) fn weights(&self, up: bool) -> Result<[Binding<'_>; 2], LaunchError> {
        let parts = self.args.weights.parts();
        LaunchError::check_shape("the parts of the experts' weights", parts.len(), 4)?;
        Ok(if up { [&parts[0], &parts[1]] } else { [&parts[2], &parts[3]] }.map(Binding::Read))
    }

    /// Sorts the pairs, which go in tiles or passes of `tile`.
    fn group(&self, queue: &mut GpuQueue, tile: usize) -> Result<(), LaunchError> {
        let (room, figures) = (self.room, self.figures);
        let align = if figures.tile.is_some() { ATOM } else { 1 };
        let shape = ShapeBytes::new().uint(figures.rows).uint(figures.picks).uint(figures.experts);
        let shape = shape.uint(align).uint(tile);
        let mut bindings = [
            Binding::Read(self.args.selected),
            Binding::Read(self.args.routing),
            self.at(room.active),
            self.at(room.active_count),
            self.at(room.starts),
            self.at(room.pair_row),
            self.at(room.pair_weight),
            self.at(room.pair_of),
            self.at(room.counts),
            self.at(room.tile_starts),
            self.at(room.passes),
            self.at(room.pass_count),
        ];
        let groups = figures.experts.div_ceil(GROUP_EXPERTS);
        launch(queue, "experts_group", &mut bindings, &shape, [groups, 512, 0])
    }

    /// As [`Routed::pass`], for many rows: inputs as tiles, then the products of `tile.cuh`.
    fn tile_pass(&self, queue: &mut GpuQueue, up: bool, tile: Tile) -> Result<(), LaunchError> {
        let room = self.room;
        let Figures { hidden, intermediate, pairs, .. } = *self.figures;
        let columns = if up { hidden } else { intermediate };
        let (stages, atoms) = (columns.div_ceil(STAGE), pairs / ATOM);
        let shape = ShapeBytes::new().uint(columns).uint(stages).uint(atoms);
        let mut bindings = [
            if up { Binding::Read(self.args.x) } else { self.at(room.between) },
            self.at(room.pair_row),
            self.at(room.starts),
            self.at(room.active_count),
            self.at(room.tiles),
        ];
        let entry = if up { "experts_tiles_up" } else { "experts_tiles_down" };
        let threads = if up { pairs * stages * 8 } else { pairs * stages * 2 * 32 };
        simple(queue, entry, &mut bindings, &shape, threads)?;
        let x = self.at(room.tiles);
        let entry = if up { tile.up } else { tile.down };
        self.tile_products(queue, (&PROGRAM, entry), up, tile, x)
    }

    /// The same by kernels that gather rows, and whose activations are the next product's inputs.
    fn piece_pass(&self, queue: &mut GpuQueue, up: bool, tile: Tile) -> Result<(), LaunchError> {
        let Figures { rows, hidden, .. } = *self.figures;
        if up {
            let shape = ShapeBytes::new().uint(rows).uint(hidden);
            let mut bindings = [Binding::Read(self.args.x), self.at(self.room.tiles)];
            let groups = (rows * hidden / 8).div_ceil(256).min(self.chip.units * 8);
            launch_of(queue, (&PIECES, "experts_rows"), &mut bindings, &shape, [groups, 256, 0])?;
        }
        let x = self.at(if up { self.room.tiles } else { self.room.between });
        let entry = if up { tile.up } else { tile.down };
        self.tile_products(queue, (&PIECES, entry), up, tile, x)
    }

    /// The products of a kernel of tiles.
    fn tile_products(
        &self,
        queue: &mut GpuQueue,
        kernel: (&'static Program, &'static str),
        up: bool,
        tile: Tile,
        x: Binding<'_>,
    ) -> Result<(), LaunchError> {
        let (room, figures) = (self.room, self.figures);
        let Figures { hidden, intermediate, pairs, .. } = *figures;
        let (columns, chunk, slabs, out_stride) = match up {
            true => (hidden, figures.chunks[0], intermediate / 8, intermediate),
            false => (intermediate, figures.chunks[1], hidden / SLAB, hidden),
        };
        let shape = ShapeBytes::new().uint(columns.div_ceil(STAGE)).uint(chunk / STAGE).uint(slabs);
        let shape = shape.uint(pairs / ATOM).uint(out_stride).float(figures.limit);
        let [codes, scales] = self.weights(up)?;
        let mut bindings = vec![
            codes,
            scales,
            x,
            self.at(room.active),
            self.at(room.active_count),
            self.at(room.starts),
            self.at(room.counts),
            self.at(room.tile_starts),
        ];
        if tile.pieces {
            bindings.push(self.at(room.pair_row));
        }
        bindings.extend([room.pair_weight, if up { room.between } else { room.out }].map(|offset| self.at(offset)));
        launch_of(queue, kernel, &mut bindings, &shape, [self.chip.units, (tile.warps + 4) * 32, tile.shared_bytes])
    }

    /// Gate, up and activation, or down.
    fn pass(&self, queue: &mut GpuQueue, up: bool, cut: &Cut) -> Result<(), LaunchError> {
        let (room, chip) = (self.room, self.chip);
        let Columns { columns, slabs, out_stride, blocks, chunk_blocks, chunks, .. } = Columns::of(self.figures, up);
        let shape = ShapeBytes::new()
            .uint(columns)
            .uint(out_stride)
            .uint(slabs)
            .uint(blocks)
            .uint(chunk_blocks)
            .uint(chunks)
            .float(self.figures.limit)
            .uint(cut.staged_rows);
        let [codes, scales] = self.weights(up)?;
        let mut bindings = [
            codes,
            scales,
            if up { Binding::Read(self.args.x) } else { self.at(room.between) },
            self.at(room.passes),
            self.at(room.pass_count),
            self.at(room.pair_row),
            self.at(room.pair_weight),
            self.at(if up { room.between } else { room.out }),
        ];
        launch(queue, cut.kernel, &mut bindings, &shape, [chip.units, cut.warps * 32, cut.shared_bytes])
    }
}

/// What a pass reads and writes.
pub(super) struct Columns {
    columns: usize,
    pub(super) slabs: usize,
    out_stride: usize,
    pub(super) blocks: usize,
    pub(super) chunk_blocks: usize,
    pub(super) chunks: usize,
}

impl Columns {
    pub(super) fn of(figures: &Figures, up: bool) -> Columns {
        let Figures { hidden, intermediate, .. } = *figures;
        let (columns, chunk, slabs, out_stride) = match up {
            true => (hidden, figures.chunks[0], intermediate / 8, intermediate),
            false => (intermediate, figures.chunks[1], hidden / SLAB, hidden),
        };
        let blocks = columns.div_ceil(BLOCK);
        let chunk_blocks = (chunk / BLOCK).min(blocks);
        Columns { columns, slabs, out_stride, blocks, chunk_blocks, chunks: blocks.div_ceil(chunk_blocks) }
    }

    fn cut(&self, up: bool, rows: usize, room: usize) -> Result<Cut, LaunchError> {
        let last = self.blocks - (self.chunks - 1) * self.chunk_blocks;
        let fits = |depth: usize| self.chunk_blocks.is_multiple_of(depth) && last.is_multiple_of(depth);
        cut(up, self.blocks, self.chunks, rows, room, fits)
    }
}

/// The cuts of both passes, up and down, with equally many staged rows: they follow one list.
fn cuts(figures: &Figures, chip: Chip) -> Result<[Cut; 2], LaunchError> {
    let [up, down] = [true, false].map(|up| Columns::of(figures, up));
    let room = chip.shared_bytes;
    let least = up.cut(true, figures.rows, room)?.staged_rows.min(down.cut(false, figures.rows, room)?.staged_rows);
    let passes = figures.pairs.min(figures.experts + figures.pairs / least);
    LaunchError::check_limit("the passes that a block meets", passes.div_ceil(chip.units) + 1, SPAN_MAX)?;
    Ok([up.cut(true, least, room)?, down.cut(false, least, room)?])
}

/// How a pass is cut.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    kernel: &'static str,
    warps: usize,
    staged_rows: usize,
    shared_bytes: usize,
}

/// The deepest kernel, with the most rows and teams that the shared memory takes.
fn cut(
    up: bool,
    blocks: usize,
    chunks: usize,
    rows: usize,
    room: usize,
    fits: impl Fn(usize) -> bool,
) -> Result<Cut, LaunchError> {
    LaunchError::check_limit("the chunks of an expert's columns", chunks, 15)?;
    let candidates: [(usize, &str); 3] = match up {
        true => [(10, "experts_up_10"), (5, "experts_up_5"), (4, "experts_up_any")],
        false => [(9, "experts_down_9"), (3, "experts_down_3"), (4, "experts_down_any")],
    };
    let mut least = usize::MAX;
    let mut staged_rows = rows.clamp(1, PASS);
    loop {
        // A kernel takes at most 20 warps and 15 teams.
        for teams in (1..=TEAMS.min(20 / chunks).max(1)).rev() {
            let warps = teams * chunks;
            for (depth, kernel) in candidates {
                let shared_bytes = warps * (1024 + depth * SLOT) + blocks * 2 * staged_rows * 64;
                least = least.min(shared_bytes);
                if shared_bytes <= room && (kernel.ends_with("any") || fits(depth)) {
                    return Ok(Cut { kernel, warps, staged_rows, shared_bytes });
                }
            }
        }
        if staged_rows == 1 {
            LaunchError::check_limit("the experts' shared memory", least, room)?;
        }
        staged_rows = (staged_rows / 2).max(1);
    }
}

/// The shared expert's activation, as its last product wants it, in memory of the queue.
fn activate(
    queue: &mut GpuQueue,
    figures: &Figures,
    chip: Chip,
    [gate, up]: [&Buffer; 2],
) -> Result<Buffer, LaunchError> {
    let Figures { rows, intermediate, limit, .. } = *figures;
    // Where the next linear wants tiles, the activation is written as tiles.
    let tiled = chip.tiles(rows);
    let stride = intermediate.next_multiple_of(if tiled { STAGE } else { FP8_BLOCK });
    let (bytes, atoms) = match tiled {
        true => (tile_bytes(rows, 1, intermediate), rows.div_ceil(ATOM)),
        false => (rows * stride * 2, 0),
    };
    let mut activation = queue.take_scratch("experts, shared activation", bytes)?;
    let shape = ShapeBytes::new().uint(rows).uint(intermediate).uint(stride).float(limit).uint(atoms);
    let mut bindings = [Binding::Read(gate), Binding::Read(up), Binding::Write(&mut activation)];
    simple(queue, "experts_activate", &mut bindings, &shape, rows * stride)?;
    Ok(activation)
}

/// The shared expert's last product: `[rows, hidden]` f32, rounded to bf16, in memory of the queue.
fn shared_down(
    queue: &mut GpuQueue,
    weights: &Shared,
    figures: &Figures,
    activation: &Buffer,
) -> Result<Buffer, LaunchError> {
    let Figures { rows, hidden, intermediate, .. } = *figures;
    let mut out = queue.take_scratch("experts, shared out", rows * hidden * 4)?;
    let input = Input::Bf16 { buffer: activation };
    fp8(queue, &mut [product(&weights.w2, &mut out)], intermediate, figures.chunks[1], rows, input)?;
    Ok(out)
}

fn product<'a>(weights: &'a Fp8Weights, out: &'a mut Buffer) -> cuda::Product<'a> {
    let (codes, scales) = weights.buffers();
    cuda::Product { codes, scales: Some(scales), weight_rows: weights.rows(), out, finish: Finish::Bf16 }
}

fn fp8<'a>(
    queue: &mut GpuQueue,
    products: &mut [cuda::Product<'a>],
    columns: usize,
    chunk: usize,
    rows: usize,
    input: Input<'a>,
) -> Result<(), LaunchError> {
    cuda::run(queue, Linear { format: Format::Fp8, columns, groups: 1, chunk, rows, input, products })
}

/// An entry whose blocks of 256 threads stride over `threads` items.
fn simple(
    queue: &mut GpuQueue,
    entry: &'static str,
    bindings: &mut [Binding<'_>],
    shape: &ShapeBytes,
    threads: usize,
) -> Result<(), LaunchError> {
    let groups = threads.div_ceil(256).min(queue.limits().units as usize * 8);
    launch(queue, entry, bindings, shape, [groups, 256, 0])
}

fn launch(
    queue: &mut GpuQueue,
    entry: &'static str,
    bindings: &mut [Binding<'_>],
    shape: &ShapeBytes,
    cut: [usize; 3],
) -> Result<(), LaunchError> {
    launch_of(queue, (&PROGRAM, entry), bindings, shape, cut)
}

fn launch_of(
    queue: &mut GpuQueue,
    (program, entry): (&'static Program, &'static str),
    bindings: &mut [Binding<'_>],
    shape: &ShapeBytes,
    [groups, threads, shared_bytes]: [usize; 3],
) -> Result<(), LaunchError> {
    let (groups, threads, shared_bytes) = (groups as u32, threads as u32, shared_bytes as u32);
    let shape = shape.bytes();
    queue.launch_tuned(
        Launch { program, entry, bindings, shape, groups, threads, shared_bytes },
        Tuning { cluster: 1, overlap: true },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_chosen_by_pairs_and_columns() {
        let chip = Chip { units: 132, shared_bytes: 226 << 10, hopper: true, warpgroups: true };
        let up = |pairs: usize, columns: [usize; 2]| {
            Tile::of(pairs * 384, 384, columns, [UP_CHUNK, DOWN_CHUNK], chip).map(|tile| tile.up)
        };
        let release = [5120, 2304];
        assert_eq!(up(5, release), None);
        assert_eq!(up(8, release), Some("experts_up_16"));
        assert_eq!(up(32, release), Some("experts_up_64"));
        assert_eq!(up(128, release), Some("experts_up_tile_128"));
        // Columns that are no whole pieces.
        assert_eq!(up(32, [1376, 608]), None);
        assert_eq!(up(48, [1376, 608]), Some("experts_up_tile_64"));
        let small = Chip { shared_bytes: 98 << 10, ..chip };
        assert_eq!(Tile::of(32 * 384, 384, release, [UP_CHUNK, DOWN_CHUNK], small), None);
        for tile in TILES {
            assert!(tile.shared_bytes + TILE_LISTS <= chip.shared_bytes, "{tile:?}");
        }
    }

    #[test]
    fn every_size_and_chip_finds_a_kernel_that_fits() {
        let chunk = |blocks: usize, chunk: usize| {
            let most = (chunk / BLOCK).min(blocks);
            (most, blocks.div_ceil(most))
        };
        for room in [98 << 10, 162 << 10, 226 << 10] {
            for (hidden, intermediate) in [(128_usize, 64_usize), (160, 64), (5120, 2304), (192, 128)] {
                for (up, columns, length) in [(true, hidden, UP_CHUNK), (false, intermediate, DOWN_CHUNK)] {
                    let blocks = columns.div_ceil(BLOCK);
                    let (chunk_blocks, chunks) = chunk(blocks, length);
                    let last = blocks - (chunks - 1) * chunk_blocks;
                    let fits = |depth: usize| chunk_blocks.is_multiple_of(depth) && last.is_multiple_of(depth);
                    for rows in [1, 6, 8, 2048] {
                        let cut = cut(up, blocks, chunks, rows, room, fits).expect("there is a way");
                        assert!(cut.shared_bytes <= room && cut.warps <= 20 && cut.warps % chunks == 0, "{cut:?}");
                    }
                }
            }
        }
        assert!(cut(true, 80, 4, 8, 8 << 10, |_| true).is_err());
        let best = cut(true, 80, 4, 8, 226 << 10, |_| true).expect("fits");
        assert_eq!((best.kernel, best.warps, best.staged_rows), ("experts_up_10", 16, 8));
    }
}
