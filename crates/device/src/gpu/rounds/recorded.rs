//! A list of launches.

use super::Line;
use std::ops::Range;

/// How one launch is cut, and of which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The driver's number of the kernel.
    pub kernel: u32,
    pub blocks: u32,
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// As [`Tuning::cluster`](crate::gpu::Tuning).
    pub cluster: u32,
    /// Starts while the launch before it still runs.
    pub overlap: bool,
    pub line: Line,
}

impl Cut {
    /// What a graph can't change: the kernel, its clusters and how it follows the launch before it.
    fn fixed(&self) -> (u32, u32, bool, Line) {
        (self.kernel, self.cluster, self.overlap, self.line)
    }
}

/// Launches in their order, with the bytes of their arguments one behind the other.
#[derive(Debug, Default)]
pub struct Recorded {
    launches: Vec<(Cut, Range<usize>)>,
    bytes: Vec<u8>,
    kind: u64,
}

impl Clone for Recorded {
    fn clone(&self) -> Recorded {
        Recorded { launches: self.launches.clone(), bytes: self.bytes.clone(), kind: self.kind }
    }

    fn clone_from(&mut self, from: &Recorded) {
        self.launches.clone_from(&from.launches);
        self.bytes.clone_from(&from.bytes);
        self.kind = from.kind;
    }
}

impl Recorded {
    /// Adds one byte string to the arguments of the launch that the next [`Recorded::push`] ends.
    pub fn argument(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Ends a launch, whose arguments are those since the launch before it.
    pub fn push(&mut self, cut: Cut) {
        let first = self.end();
        self.launches.push((cut, first..self.bytes.len()));
        let (kernel, cluster, overlap, line) = cut.fixed();
        let mut mix = |word: u64| self.kind = (self.kind.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        mix(u64::from(kernel) << 32 | u64::from(cluster) << 3 | (line as u64) << 1 | u64::from(overlap));
        mix((self.bytes.len() - first) as u64);
    }

    fn end(&self) -> usize {
        self.launches.last().map_or(0, |(_, range)| range.end)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.launches.clear();
        self.bytes.clear();
        self.kind = 0;
    }

    /// Launches of the list.
    pub fn len(&self) -> usize {
        self.launches.len()
    }

    /// Whether it has no launch.
    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// A launch and the bytes of its arguments.
    pub fn at(&self, index: usize) -> (&Cut, &[u8]) {
        let (cut, range) = &self.launches[index];
        (cut, &self.bytes[range.clone()])
    }

    /// The launches in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&Cut, &[u8])> {
        self.launches.iter().map(|(cut, range)| (cut, &self.bytes[range.clone()]))
    }

    /// Equal for lists of one kind.
    pub fn kind(&self) -> u64 {
        self.kind
    }

    /// Whether a graph of one can be changed to the other: the same kernels in the same order.
    pub fn is_of_kind(&self, other: &Recorded) -> bool {
        let pairs = || self.launches.iter().zip(&other.launches);
        self.kind == other.kind
            && self.len() == other.len()
            && pairs().all(|((a, of_a), (b, of_b))| a.fixed() == b.fixed() && of_a == of_b)
    }

    /// Whether launch `index` of two lists of a kind is equal.
    pub fn equals_at(&self, other: &Recorded, index: usize) -> bool {
        self.at(index) == other.at(index)
    }

    /// Whether at most `count` launches of two lists of a kind differ.
    pub fn differs_within(&self, other: &Recorded, count: usize) -> bool {
        (0..self.len()).filter(|index| !self.equals_at(other, *index)).nth(count).is_none()
    }
}
