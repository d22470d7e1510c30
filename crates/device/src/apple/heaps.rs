//! Room in a few large heaps: which heap a buffer goes into and where. Pure book-keeping; heaps are made and dropped by whoever
//! asks, as told.
//!
//! A block that is given back while work that uses it may still run keeps its place until that work is done.

use std::collections::BTreeMap;

/// Of a common heap. A block of more than half of it gets a heap of its own.
pub const HEAP_BYTES: u64 = 256 << 20;

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the heap.
    pub heap: usize,
    pub first: u64,
    pub bytes: u64,
}

/// A place, and the heap that has to be made for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    pub place: Place,
    /// Bytes of the new heap `place.heap`. Whoever can't make it calls [`Heaps::release`].
    pub new_heap_bytes: Option<u64>,
}

#[derive(Debug)]
struct Heap {
    bytes: u64,
    /// Free ranges: first byte, then length. No two touch.
    free: BTreeMap<u64, u64>,
}

/// The heaps of one device.
#[derive(Debug)]
pub struct Heaps {
    heap_bytes: u64,
    heaps: BTreeMap<usize, Heap>,
    next: usize,
    /// Given back, but maybe in use by work that is not done.
    waiting: Vec<Place>,
}

impl Default for Heaps {
    fn default() -> Heaps {
        Heaps::new(HEAP_BYTES)
    }
}

impl Heaps {
    /// No heaps yet; common ones will have `heap_bytes` bytes.
    pub fn new(heap_bytes: u64) -> Heaps {
        Heaps { heap_bytes, heaps: BTreeMap::new(), next: 0, waiting: Vec::new() }
    }

    /// Room for `bytes` bytes (more than none) at a multiple of `alignment`: the lowest free place of the oldest heap that has
    /// it, else a new heap.
    pub fn reserve(&mut self, bytes: u64, alignment: u64) -> Reserved {
        let bytes = bytes.next_multiple_of(alignment);
        let place = self.heaps.iter_mut().find_map(|(&heap, room)| {
            let first = room.take(bytes, alignment)?;
            Some(Place { heap, first, bytes })
        });
        if let Some(place) = place {
            return Reserved { place, new_heap_bytes: None };
        }
        let heap_bytes = if bytes > self.heap_bytes / 2 { bytes } else { self.heap_bytes };
        let mut heap = Heap { bytes: heap_bytes, free: BTreeMap::from([(0, heap_bytes)]) };
        let first = heap.take(bytes, alignment).unwrap_or(0);
        let place = Place { heap: self.next, first, bytes };
        self.heaps.insert(self.next, heap);
        self.next += 1;
        Reserved { place, new_heap_bytes: Some(heap_bytes) }
    }

    /// Gives a place back that nothing uses. The number of its heap where that is empty now and has to be dropped.
    ///
    /// # Panics
    /// When it was not reserved, or twice: a bug of the caller.
    pub fn release(&mut self, place: Place) -> Option<usize> {
        let heap = self.heaps.get_mut(&place.heap).expect("a place lies in a heap that is there");
        heap.give(place);
        let is_empty = heap.free.get(&0) == Some(&heap.bytes);
        is_empty.then(|| {
            self.heaps.remove(&place.heap);
            place.heap
        })
    }

    /// Gives a place back that work under way may still use.
    pub fn release_later(&mut self, place: Place) {
        self.waiting.push(place);
    }

    /// Whether [`Heaps::settle`] would free anything.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// All work is done: frees what waited for it. The heaps to be dropped.
    pub fn settle(&mut self) -> Vec<usize> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().filter_map(|place| self.release(place)).collect()
    }

    /// Bytes of all heaps.
    pub fn bytes(&self) -> u64 {
        self.heaps.values().map(|heap| heap.bytes).sum()
    }

    /// Bytes of them that are free.
    pub fn free_bytes(&self) -> u64 {
        self.heaps.values().flat_map(|heap| heap.free.values()).sum()
    }
}

impl Heap {
    /// The lowest place with room.
    fn take(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let fits = |(&start, &length): (&u64, &u64)| {
            let first = start.next_multiple_of(alignment);
            (first - start + bytes <= length).then_some((start, length, first))
        };
        let (start, length, first) = self.free.iter().find_map(fits)?;
        self.free.remove(&start);
        if first > start {
            self.free.insert(start, first - start);
        }
        let end = first + bytes;
        if end < start + length {
            self.free.insert(end, start + length - end);
        }
        Some(first)
    }

    /// Joins the range with its free neighbours.
    fn give(&mut self, place: Place) {
        let (mut first, mut end) = (place.first, place.first + place.bytes);
        assert!(end <= self.bytes, "a place beyond its heap");
        if let Some((&next, &length)) = self.free.range(first..).next() {
            assert!(next >= end, "a place was given back twice");
            if next == end {
                self.free.remove(&next);
                end += length;
            }
        }
        if let Some((&before, &length)) = self.free.range(..first).next_back() {
            assert!(before + length <= first, "a place was given back twice");
            if before + length == first {
                first = before;
            }
        }
        self.free.insert(first, end - first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_share_a_heap_and_large_ones_have_their_own() {
        let mut heaps = Heaps::new(1000);
        let a = heaps.reserve(100, 16);
        assert_eq!(a, Reserved { place: Place { heap: 0, first: 0, bytes: 112 }, new_heap_bytes: Some(1000) });
        let b = heaps.reserve(100, 256);
        assert_eq!(b, Reserved { place: Place { heap: 0, first: 256, bytes: 256 }, new_heap_bytes: None });
        let large = heaps.reserve(501, 1);
        assert_eq!(large, Reserved { place: Place { heap: 1, first: 0, bytes: 501 }, new_heap_bytes: Some(501) });
        let between = heaps.reserve(144, 16);
        assert_eq!(between.place, Place { heap: 0, first: 112, bytes: 144 }, "the gap before the aligned block");
        assert_eq!((heaps.bytes(), heaps.free_bytes()), (1501, 1000 - 112 - 256 - 144));
        assert_eq!(heaps.release(large.place), Some(1), "its heap goes with it");
        assert_eq!(heaps.release(a.place), None);
        assert_eq!(heaps.release(between.place), None);
        assert_eq!(heaps.release(b.place), Some(0), "the last of a heap");
        assert_eq!(heaps.bytes(), 0);
        assert_eq!(heaps.reserve(1, 1).place.heap, 2, "numbers are not used again");
    }

    #[test]
    fn a_place_that_work_may_use_is_not_given_to_others_before_the_work_is_done() {
        let mut heaps = Heaps::new(100);
        let (a, b) = (heaps.reserve(40, 1).place, heaps.reserve(40, 1).place);
        heaps.release_later(a);
        assert!(heaps.is_waiting());
        assert_eq!(heaps.reserve(40, 1).place.heap, 1, "the waiting place is not free");
        assert_eq!(heaps.settle(), []);
        assert!(!heaps.is_waiting());
        assert_eq!(heaps.reserve(40, 1).place, a);
        heaps.release_later(b);
        heaps.release_later(a);
        assert_eq!(heaps.settle(), [0], "the heap goes with its last block");
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_place_cannot_be_given_back_twice() {
        let mut heaps = Heaps::new(100);
        let (a, _b) = (heaps.reserve(10, 1).place, heaps.reserve(10, 1).place);
        heaps.release(a);
        heaps.release(a);
    }

    #[test]
    fn blocks_never_overlap_and_nothing_is_lost_in_any_order() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let mut heaps = Heaps::new(4096);
        let mut held: Vec<Place> = Vec::new();
        for _ in 0..20_000 {
            if random(5) < 3 && held.len() < 60 {
                let (bytes, alignment) = (1 + random(900), 1 << random(9));
                let place = heaps.reserve(bytes, alignment).place;
                assert!(place.bytes >= bytes && place.first.is_multiple_of(alignment), "{place:?}");
                let overlaps = |other: &&Place| {
                    other.heap == place.heap
                        && other.first < place.first + place.bytes
                        && place.first < other.first + other.bytes
                };
                assert_eq!(held.iter().find(overlaps), None, "{place:?}");
                held.push(place);
            } else if !held.is_empty() {
                heaps.release(held.swap_remove(random(held.len() as u64) as usize));
            }
            let used: u64 = held.iter().map(|place| place.bytes).sum();
            assert_eq!(heaps.bytes(), used + heaps.free_bytes(), "bytes lost or counted twice");
        }
        held.into_iter().for_each(|place| {
            heaps.release(place);
        });
        assert_eq!(heaps.bytes(), 0, "empty heaps go");
    }
}
