//! The CPU backend: aligned memory, a pool of threads, and the instruction set that its kernels run on.

mod buffer;
mod parts;
mod pool;
mod scratch;

pub use buffer::CpuBuffer;
pub use parts::Parts;
pub use pool::{Placement, Pool};
pub use scratch::Scratch;

use crate::log::LaunchLog;
use std::ops::Range;
use tf_numerics::lanes::Level;

/// The host's own memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuDevice;

/// A pool, the instruction set of its kernels, and their scratch memory. None of them changes a bit of any result.
#[derive(Debug)]
pub struct CpuQueue {
    pub pool: Pool,
    pub level: Level,
    pub scratch: Scratch,
    pub(crate) launches: LaunchLog,
}

impl CpuQueue {
    /// `threads` threads, the caller being one of them; where there are enough cores, each of the others has its own.
    pub fn new(threads: usize, level: Level) -> CpuQueue {
        CpuQueue::placed(threads, level, Placement::Pinned)
    }

    /// As [`CpuQueue::new`], with a choice of where the threads run.
    pub fn placed(threads: usize, level: Level, placement: Placement) -> CpuQueue {
        CpuQueue {
            pool: Pool::new(threads, placement),
            level,
            scratch: Scratch::default(),
            launches: LaunchLog::default(),
        }
    }
}

/// Part `index` of `[0, total)` cut into `parts` ranges, as equal as multiples of `multiple` allow.
///
/// The ranges are disjoint, ascending and cover everything; some are empty where there is too little to share.
pub fn split(total: usize, parts: usize, index: usize, multiple: usize) -> Range<usize> {
    assert!(multiple > 0);
    assert!(index < parts);
    let units = total.div_ceil(multiple);
    let at = |i: usize| (units / parts * i + (units % parts).min(i)) * multiple;
    at(index).min(total)..at(index + 1).min(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_covers_everything_once_in_order() {
        for total in [0, 1, 2, 7, 32, 33, 100, 1000] {
            for parts in 1..9 {
                for multiple in [1, 2, 16, 64] {
                    let mut next = 0;
                    let mut sizes = Vec::new();
                    for index in 0..parts {
                        let range = split(total, parts, index, multiple);
                        assert_eq!(range.start, next, "{total} in {parts} by {multiple}");
                        assert!(range.start.is_multiple_of(multiple) || range.start == total);
                        next = range.end;
                        sizes.push(range.len().div_ceil(multiple));
                    }
                    assert_eq!(next, total);
                    assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "uneven: {sizes:?}");
                }
            }
        }
    }
}
