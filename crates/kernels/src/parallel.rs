//! How many threads a launch is worth. Never changes a bit: threads split rows or outputs, not sums.

/// Multiply-adds below which handing work to another thread costs more than it saves.
const GRAIN: usize = 1 << 16;

/// Most threads for a launch of `work` multiply-adds (or as many other vector operations times 16).
pub(crate) fn threads_for(work: usize) -> usize {
    (work / GRAIN).max(1)
}
