//! Where host bytes of a round stand: equal rounds put equal slices at equal places, and a slice stands once.

use std::collections::HashMap;
use std::ops::Range;

/// Of every slice, so that kernels may read it in vectors.
const ALIGNMENT: usize = 256;
/// Words of a slice that its mark looks at.
const SAMPLES: usize = 8;

/// The order of slices in a block of host memory that is copied to the device up to [`Arena::take_new`].
#[derive(Debug, Default)]
pub struct Arena {
    capacity: usize,
    used: usize,
    /// Bytes that are on their way to the device.
    taken: usize,
    /// The newest slice of each mark.
    known: HashMap<u64, Range<usize>>,
}

impl Arena {
    /// For a block of `capacity` bytes.
    pub fn new(capacity: usize) -> Arena {
        Arena { capacity, ..Arena::default() }
    }

    /// Bytes of the block that slices of these lengths take at most.
    pub fn needed(lengths: impl Iterator<Item = usize>) -> usize {
        lengths.map(|length| length.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Bytes of the block.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether nothing stands in it.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether `needed` bytes more fit.
    pub fn has_room(&self, needed: usize) -> bool {
        needed <= self.capacity - self.used
    }

    /// Starts again at the block's first byte.
    pub fn clear(&mut self) {
        *self = Arena { known: std::mem::take(&mut self.known), ..Arena::new(self.capacity) };
        self.known.clear();
    }

    /// Where the slice stands: where an equal one stood before, else behind the others.
    ///
    /// # Panics
    /// When there is no room, or `host` is shorter than the capacity: a bug of the caller.
    pub fn place(&mut self, host: &mut [u8], slice: &[u8]) -> usize {
        let mark = mark(slice);
        if let Some(range) = self.known.get(&mark)
            && host[range.clone()] == *slice
        {
            return range.start;
        }
        let range = self.append(host, slice);
        let first = range.start;
        self.known.insert(mark, range);
        first
    }

    /// Puts the slice behind the others, for the caller to copy.
    ///
    /// # Panics
    /// As [`Arena::place`].
    pub fn append(&mut self, host: &mut [u8], slice: &[u8]) -> Range<usize> {
        assert!(self.has_room(slice.len().next_multiple_of(ALIGNMENT)), "the arena was asked for room before");
        let range = self.used..self.used + slice.len();
        host[range.clone()].copy_from_slice(slice);
        self.used += slice.len().next_multiple_of(ALIGNMENT);
        range
    }

    /// The bytes placed since the last call, to be copied to the device now.
    pub fn take_new(&mut self) -> Range<usize> {
        let new = self.taken..self.used;
        self.taken = self.used;
        new
    }
}

/// Differs for most slices that differ; reads little of a long one.
fn mark(slice: &[u8]) -> u64 {
    let mut mark = slice.len() as u64;
    let mut mix = |word: u64| mark = (mark.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (words, rest) = slice.as_chunks::<8>();
    let step = words.len().div_ceil(SAMPLES).max(1);
    words.iter().step_by(step).chain(words.last()).for_each(|word| mix(u64::from_le_bytes(*word)));
    rest.iter().for_each(|byte| mix(u64::from(*byte)));
    mark
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rounds_put_equal_slices_at_equal_places() {
        let mut host = vec![0; 4096];
        let mut arena = Arena::new(host.len());
        let mut round = |arena: &mut Arena, slices: &[&[u8]]| {
            slices.iter().map(|slice| arena.place(&mut host, slice)).collect::<Vec<_>>()
        };
        let slices: [&[u8]; 5] = [&[1; 300], &[2; 8], &[1; 300], &[], &[3; 8]];
        let first = round(&mut arena, &slices);
        assert_eq!(first[0], first[2], "a slice stands once");
        assert_eq!([first[0], first[1], first[4]], [0, 512, 768]);
        assert!(first.iter().all(|at| at % ALIGNMENT == 0));
        arena.clear();
        assert!(arena.is_empty());
        assert_eq!(round(&mut arena, &slices), first);
        assert_eq!(host[512..520], [2; 8]);
    }

    #[test]
    fn slices_that_differ_in_one_unsampled_byte_stand_apart() {
        let mut host = vec![0; 1 << 16];
        let mut arena = Arena::new(host.len());
        let one = vec![7_u8; 4000];
        let mut other = one.clone();
        other[9] = 8;
        assert_eq!(mark(&one), mark(&other), "the byte is not sampled, or this shows nothing");
        let (first, second) = (arena.place(&mut host, &one), arena.place(&mut host, &other));
        assert_ne!(first, second);
        assert_eq!(host[first..first + 4000], one);
        assert_eq!(host[second..second + 4000], other);
    }

    #[test]
    fn what_is_new_is_taken_once_and_a_full_arena_says_so() {
        let mut host = vec![0; 1024];
        let mut arena = Arena::new(host.len());
        arena.place(&mut host, &[1; 10]);
        assert_eq!(arena.take_new(), 0..256);
        assert_eq!(arena.take_new(), 256..256);
        arena.place(&mut host, &[1; 10]);
        assert_eq!(arena.take_new(), 256..256, "it is there already");
        assert_eq!(arena.append(&mut host, &[1; 10]), 256..266);
        assert_eq!(Arena::needed([0, 1, 257].into_iter()), 768);
        assert!(arena.has_room(512));
        assert!(!arena.has_room(513));
        assert_eq!(arena.capacity(), 1024);
    }
}
