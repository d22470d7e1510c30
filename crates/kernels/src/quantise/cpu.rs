//! Threads take whole rows.

use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, dispatch};
use tf_numerics::qdq::{self, Format};

/// Values that are worth one more thread.
const THREAD_VALUES: usize = 1 << 13;

/// Rounds `out`, or `x` into `out`; both `[.., columns]` and of equal length.
pub(super) fn run(queue: &mut CpuQueue, x: Option<&[f32]>, out: &mut [f32], columns: usize) {
    let rows = out.len() / columns;
    let threads = (out.len() / THREAD_VALUES).clamp(1, queue.pool.threads());
    let level = queue.level;
    let out = Parts::new(out);
    queue.pool.run_on(threads, |index, count| {
        let rows = split(rows, count, index, 1);
        let range = rows.start * columns..rows.end * columns;
        // SAFETY: the rows of one thread are its own.
        let out = unsafe { out.part(range.clone()) };
        if let Some(x) = x {
            out.copy_from_slice(&x[range]);
        }
        dispatch(level, Rows { values: out, columns });
    });
}

struct Rows<'a> {
    values: &'a mut [f32],
    columns: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for row in self.values.chunks_exact_mut(self.columns) {
            qdq::round_row_lanes::<L>(Format::Fp8, row);
        }
    }
}
