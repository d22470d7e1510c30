//! Which launches of a list run beside those behind them.
//!
//! A launch to the side follows everything given before it, and the launches behind it in the main line do not wait for it,
//! until one of them touches what a launch to the side writes, or writes what one reads. That one follows all of them.
//! What launches touch are their buffers' ranges, so that nobody has to say where the lines meet again.

use std::ops::Range;

/// How a launch follows those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Line {
    /// Behind the main line.
    #[default]
    Main,
    /// Behind the main line and the side, for nobody yet.
    Side,
    /// Behind both; nothing is left at the side.
    Joined,
}

/// What the launches at the side touch.
#[derive(Debug, Default)]
pub struct Lines {
    reads: Vec<Range<u64>>,
    writes: Vec<Range<u64>>,
}

impl Lines {
    /// The line of the next launch, which reads and writes these addresses. Bytes that it reads and writes are written.
    pub fn place(&mut self, to_side: bool, reads: &[Range<u64>], writes: &[Range<u64>]) -> Line {
        if to_side {
            self.reads.extend_from_slice(reads);
            self.writes.extend_from_slice(writes);
            return Line::Side;
        }
        let meets = |one: &[Range<u64>], other: &[Range<u64>]| {
            one.iter().any(|one| other.iter().any(|other| one.start < other.end && other.start < one.end))
        };
        if meets(&self.writes, reads) || meets(&self.writes, writes) || meets(&self.reads, writes) {
            self.clear();
            return Line::Joined;
        }
        Line::Main
    }

    /// Nothing is left at the side: a list has ended.
    pub fn clear(&mut self) {
        self.reads.clear();
        self.writes.clear();
    }
}
