//! Memory of the device: blocks in a few heaps, and blocks over host memory that stays where it is.

use super::system::DeviceObject;
use crate::apple::heaps::{Heaps, Place};
use crate::apple::mapping::Terms;
use crate::{HostBytes, Keeper};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCommandQueue, MTLDevice, MTLHazardTrackingMode, MTLHeap, MTLHeapDescriptor,
    MTLHeapType, MTLResidencySet, MTLResidencySetDescriptor, MTLResourceOptions, MTLStorageMode,
};
use std::collections::HashMap;
use std::ptr::NonNull;

pub(super) type BufferObject = Retained<ProtocolObject<dyn MTLBuffer>>;
type HeapObject = Retained<ProtocolObject<dyn MTLHeap>>;

/// Host and device see the same bytes; encoders wait for each other where they touch the same heap.
const OPTIONS: MTLResourceOptions =
    MTLResourceOptions(MTLResourceOptions::StorageModeShared.0 | MTLResourceOptions::HazardTrackingModeTracked.0);

/// All blocks of a device.
pub(super) struct Memory {
    device: DeviceObject,
    heaps: Heaps,
    objects: HashMap<usize, HeapObject>,
    blocks: HashMap<u64, Piece>,
    next: u64,
    /// Given back while work that uses them may run; their heaps' places wait as well.
    dying: Vec<(BufferObject, Option<Keeper>)>,
    residency: Option<Residency>,
    terms: Terms,
}

struct Piece {
    buffer: BufferObject,
    held: Held,
}

/// Where a block's bytes are.
enum Held {
    Heap(Place),
    /// In host memory, which the keeper holds.
    Host(Keeper),
}

/// What the system keeps in reach of the device between command buffers.
struct Residency {
    set: Retained<ProtocolObject<dyn MTLResidencySet>>,
    is_changed: bool,
}

impl Memory {
    /// Nothing allocated. With `has_residency_sets`, all of it stays resident for `queue`; without, what a launch binds is made
    /// resident by its encoder.
    pub fn new(
        device: DeviceObject,
        queue: &ProtocolObject<dyn MTLCommandQueue>,
        has_residency_sets: bool,
        page_bytes: usize,
    ) -> Memory {
        let residency = has_residency_sets.then(|| {
            let set = device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new()).ok()?;
            queue.addResidencySet(&set);
            Some(Residency { set, is_changed: false })
        });
        let buffer_bytes_max = device.maxBufferLength();
        let terms = Terms { unified: device.hasUnifiedMemory(), page_bytes, buffer_bytes_max };
        Memory {
            device,
            heaps: Heaps::default(),
            objects: HashMap::new(),
            blocks: HashMap::new(),
            next: 0,
            dying: Vec::new(),
            residency: residency.flatten(),
            terms,
        }
    }

    /// Bytes of one buffer at most.
    pub fn buffer_bytes_max(&self) -> usize {
        self.terms.buffer_bytes_max
    }

    /// A block of `bytes` bytes of any content; `None` where the device has no room.
    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let need = self.device.heapBufferSizeAndAlignWithLength_options(bytes, OPTIONS);
        let reserved = self.heaps.reserve(need.size as u64, need.align.max(1) as u64);
        let place = reserved.place;
        let made = reserved.new_heap_bytes.is_none_or(|bytes| self.make_heap(place.heap, bytes));
        let heap = self.objects.get(&place.heap).filter(|_| made);
        // SAFETY: the place lies inside the heap and is aligned as the device asked; no other block lies there.
        let buffer = heap
            .and_then(|heap| unsafe { heap.newBufferWithLength_options_offset(bytes, OPTIONS, place.first as usize) });
        let Some(buffer) = buffer else {
            self.release(place);
            return None;
        };
        Some(self.keep(Piece { buffer, held: Held::Heap(place) }))
    }

    fn make_heap(&mut self, number: usize, bytes: u64) -> bool {
        let descriptor = MTLHeapDescriptor::new();
        descriptor.setType(MTLHeapType::Placement);
        descriptor.setStorageMode(MTLStorageMode::Shared);
        descriptor.setHazardTrackingMode(MTLHazardTrackingMode::Tracked);
        descriptor.setSize(bytes as usize);
        let Some(heap) = self.device.newHeapWithDescriptor(&descriptor) else { return false };
        self.make_resident(ProtocolObject::from_ref(&*heap));
        self.objects.insert(number, heap);
        true
    }

    /// A block over host bytes, and where they start in it; `None` where they have to be copied.
    pub fn map(&mut self, host: &HostBytes<'_>, element_bytes: usize) -> Option<(u64, usize)> {
        let (bytes, keeper) = (host.bytes(), host.keeper()?.clone());
        let pages = self.terms.pages(bytes.as_ptr().addr(), bytes.len(), element_bytes).ok()?;
        let first = NonNull::new(bytes.as_ptr().wrapping_sub(pages.before).cast_mut())?.cast();
        // SAFETY: memory is mapped in whole pages, and these hold bytes that the keeper leaves as they are for as long as it
        // lives; it goes when the block is freed and its work is done. Metal frees nothing here, and no launch writes it.
        let buffer = unsafe {
            self.device.newBufferWithBytesNoCopy_length_options_deallocator(first, pages.bytes, OPTIONS, None)
        }?;
        self.make_resident(ProtocolObject::from_ref(&*buffer));
        Some((self.keep(Piece { buffer, held: Held::Host(keeper) }), pages.before))
    }

    fn keep(&mut self, piece: Piece) -> u64 {
        self.next += 1;
        self.blocks.insert(self.next, piece);
        self.next
    }

    /// The buffer of a block.
    pub fn buffer(&self, block: u64) -> Option<&BufferObject> {
        self.blocks.get(&block).map(|piece| &piece.buffer)
    }

    /// Gives a block back; with `is_busy`, work that uses it may not be done.
    pub fn free(&mut self, block: u64, is_busy: bool) {
        let Some(Piece { buffer, held }) = self.blocks.remove(&block) else { return };
        let keeper = match held {
            Held::Heap(place) if is_busy => {
                self.heaps.release_later(place);
                None
            }
            Held::Heap(place) => {
                self.release(place);
                None
            }
            Held::Host(keeper) => {
                self.end_residency(ProtocolObject::from_ref(&*buffer));
                Some(keeper)
            }
        };
        if is_busy {
            self.dying.push((buffer, keeper));
        }
    }

    /// All work is done: what waited for it goes.
    pub fn settle(&mut self) {
        self.dying.clear();
        for heap in self.heaps.settle() {
            self.drop_heap(heap);
        }
    }

    fn release(&mut self, place: Place) {
        if let Some(heap) = self.heaps.release(place) {
            self.drop_heap(heap);
        }
    }

    fn drop_heap(&mut self, number: usize) {
        if let Some(heap) = self.objects.remove(&number) {
            self.end_residency(ProtocolObject::from_ref(&*heap));
        }
    }

    fn make_resident(&mut self, allocation: &ProtocolObject<dyn MTLAllocation>) {
        if let Some(residency) = &mut self.residency {
            residency.set.addAllocation(allocation);
            residency.is_changed = true;
        }
    }

    fn end_residency(&mut self, allocation: &ProtocolObject<dyn MTLAllocation>) {
        if let Some(residency) = &mut self.residency {
            residency.set.removeAllocation(allocation);
            residency.is_changed = true;
        }
    }

    /// Tells the system what changed since the last time; before a command buffer is committed.
    pub fn commit_residency(&mut self) {
        if let Some(residency) = &mut self.residency
            && std::mem::take(&mut residency.is_changed)
        {
            residency.set.commit();
            residency.set.requestResidency();
        }
    }
}
