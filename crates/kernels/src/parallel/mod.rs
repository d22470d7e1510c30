//! How a launch shares its work. Never changes a bit: threads split rows or outputs, not sums.

mod cpu;

pub(crate) use cpu::part;

use tf_device::Buffer;
use tf_device::cpu::Parts;

/// Multiply-adds below which handing work to another thread costs more than it saves. Tests share everything.
pub(crate) const GRAIN: usize = if cfg!(test) { 1 } else { 1 << 17 };

/// Most threads for a launch of `work` multiply-adds (or as many other vector operations times 16).
pub(crate) fn threads_for(work: usize) -> usize {
    (work / GRAIN).max(1)
}

/// The first `count` floats of an output that may be left out, for all threads.
pub(crate) fn parts<'a>(out: Option<&'a mut Buffer>, count: usize) -> Option<Parts<'a, f32>> {
    out.map(|out| Parts::new(&mut out.f32_mut()[..count]))
}
