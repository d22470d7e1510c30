//! The stream of work of a GPU.

use super::{Argument, Backend, Binding, Call, Driver, GpuBuffer, GpuDevice, GpuLimits, Launch, Tuning};
use crate::log::LaunchLog;
use crate::{Buffer, Device, LaunchError};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An overlapping move of at most this many pieces goes straight.
const MOVE_PIECES_MAX: usize = 4;

/// The one stream of a [`GpuDevice`]; several queues of a device share it.
#[derive(Debug)]
pub struct GpuQueue {
    driver: Arc<dyn Driver>,
    pub(crate) launches: LaunchLog,
    /// See [`GpuQueue::take_scratch`]; that of launches to the side is apart.
    scratch: BTreeMap<(&'static str, bool), Buffer>,
    /// See [`GpuQueue::take_counters`].
    counters: BTreeMap<(&'static str, bool), Buffer>,
    /// See [`GpuQueue::beside`].
    to_side: bool,
}

impl GpuQueue {
    /// The stream of `device`.
    pub fn new(device: &GpuDevice) -> GpuQueue {
        let (scratch, counters) = (BTreeMap::new(), BTreeMap::new());
        GpuQueue { driver: device.driver().clone(), launches: LaunchLog::default(), scratch, counters, to_side: false }
    }

    /// What `work` launches may run beside the launches behind it: it follows all before it, and a later one waits for it that
    /// touches a buffer which it writes, or writes one which it reads. Only speed depends on it, and only where launches are
    /// collected into rounds. Worth it for what a later launch needs, and not the next.
    pub fn beside<T>(&mut self, work: impl FnOnce(&mut GpuQueue) -> T) -> T {
        let before = self.set_beside(true);
        let done = work(self);
        self.set_beside(before);
        done
    }

    /// Says whether launches go to the side from now on; returns whether they did.
    pub(crate) fn set_beside(&mut self, to_side: bool) -> bool {
        std::mem::replace(&mut self.to_side, to_side)
    }

    /// Whose code it runs.
    pub fn backend(&self) -> Backend {
        self.driver.backend()
    }

    /// What a launch may ask for.
    pub fn limits(&self) -> &GpuLimits {
        self.driver.limits()
    }

    /// What the launches go through.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Working memory of at least `bytes` bytes, of any content, that `name` keeps from launch to launch. Whoever takes it
    /// gives it back with [`GpuQueue::keep_scratch`], so that later launches allocate nothing.
    ///
    /// # Errors
    /// [`LaunchError::DeviceMemory`] where it has to grow and can't.
    pub fn take_scratch(&mut self, name: &'static str, bytes: usize) -> Result<Buffer, LaunchError> {
        take(&mut self.scratch, &self.driver, (name, self.to_side), bytes)
    }

    /// As [`GpuQueue::take_scratch`], `count` words that are zero: every launch that uses them leaves them so. Given back with
    /// [`GpuQueue::keep_counters`].
    ///
    /// # Errors
    /// As [`GpuQueue::take_scratch`].
    pub fn take_counters(&mut self, name: &'static str, count: usize) -> Result<Buffer, LaunchError> {
        take(&mut self.counters, &self.driver, (name, self.to_side), count * 4)
    }

    /// Gives counters back.
    pub fn keep_counters(&mut self, name: &'static str, buffer: Buffer) {
        self.counters.insert((name, self.to_side), buffer);
    }

    /// Gives working memory back.
    pub fn keep_scratch(&mut self, name: &'static str, buffer: Buffer) {
        self.scratch.insert((name, self.to_side), buffer);
    }

    /// The working memory that it keeps.
    pub fn scratch_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.scratch.values_mut()
    }

    /// The refusal of a family that has no code for this backend.
    pub fn unsupported(&self, kernel: &'static str) -> LaunchError {
        LaunchError::NoKernel { program: kernel, entry: kernel, backend: self.backend() }
    }

    /// Puts one launch into the stream. Bindings that share a buffer are the kernel's own affair.
    ///
    /// # Errors
    /// [`LaunchError::Limit`] where the geometry is beyond the device, [`LaunchError::NoKernel`] where the backend has no
    /// such program or entry, [`LaunchError::Device`].
    ///
    /// # Panics
    /// When a bound buffer is not one of this device, or an offset is beyond its buffer: a bug of the family.
    pub fn launch(&mut self, launch: Launch<'_, '_>) -> Result<(), LaunchError> {
        self.launch_tuned(launch, Tuning::default())
    }

    /// As [`GpuQueue::launch`], with what only changes speed.
    ///
    /// # Errors
    /// As [`GpuQueue::launch`].
    pub fn launch_tuned(&mut self, launch: Launch<'_, '_>, tuning: Tuning) -> Result<(), LaunchError> {
        let Launch { program, entry, bindings, shape, groups, threads, shared_bytes } = launch;
        if groups == 0 {
            return Ok(());
        }
        let backend = self.backend();
        let exists = match backend {
            Backend::Cuda => program.cuda,
            Backend::Metal => program.metal.is_some(),
        };
        if !exists {
            return Err(LaunchError::NoKernel { program: program.name, entry, backend });
        }
        let limits = self.limits();
        let rounded = threads.max(1).next_multiple_of(32) as usize;
        LaunchError::check_shape("the threads of a group", threads as usize, rounded)?;
        LaunchError::check_limit("the groups of a launch", groups as usize, i32::MAX as usize)?;
        let taken = [
            ("the threads of a group", threads as usize, limits.threads_max as usize),
            ("a group's memory", shared_bytes as usize, limits.shared_bytes_max as usize),
            ("the buffers of a launch", bindings.len() + 1, limits.buffers_max as usize),
        ];
        let taken = taken.into_iter().try_for_each(|(what, found, max)| LaunchError::check_limit(what, found, max));
        let arguments: Vec<Argument<'_>> = bindings.iter().map(argument).collect();
        let (arguments, to_side) = (&arguments[..], self.to_side);
        let call = Call { program, entry, arguments, shape, groups, threads, shared_bytes, tuning, to_side };
        match taken {
            Ok(()) => self.driver.launch(&call),
            Err(refusal) => {
                self.driver.refused(&call);
                Err(refusal)
            }
        }
    }

    /// As [`crate::Queue::move_within`].
    pub(crate) fn move_within(
        &mut self,
        buffer: &GpuBuffer,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> Result<(), LaunchError> {
        let distance = from.abs_diff(to);
        if distance == 0 || bytes == 0 {
            return Ok(());
        }
        let pieces = bytes.div_ceil(distance);
        if pieces > MOVE_PIECES_MAX {
            let aside = self.take_scratch("move_within", bytes.next_power_of_two())?;
            let span = gpu_buffer(&aside).span(0, bytes);
            let moved = self.driver.copy(buffer.span(from, bytes), span);
            let moved = moved.and_then(|()| self.driver.copy(span, buffer.span(to, bytes)));
            self.keep_scratch("move_within", aside);
            return moved;
        }
        // From the side that is overwritten last.
        for index in 0..pieces {
            let first = distance * if to < from { index } else { pieces - 1 - index };
            let length = distance.min(bytes - first);
            self.driver.copy(buffer.span(from + first, length), buffer.span(to + first, length))?;
        }
        Ok(())
    }
}

fn argument<'a>(binding: &'a Binding<'_>) -> Argument<'a> {
    let span = |buffer: &Buffer, first: usize| {
        let buffer = gpu_buffer(buffer);
        buffer.span(first, buffer.len_bytes().saturating_sub(first))
    };
    let written = |buffer: &Buffer, first: usize| {
        let buffer = gpu_buffer(buffer);
        buffer.span_mut(first, buffer.len_bytes().saturating_sub(first))
    };
    match binding {
        Binding::Read(buffer) => Argument::Read(span(buffer, 0)),
        Binding::ReadAt(buffer, first) => Argument::Read(span(buffer, *first)),
        Binding::Write(buffer) => Argument::Write(written(buffer, 0)),
        Binding::WriteAt(buffer, first) => Argument::Write(written(buffer, *first)),
        Binding::Bytes(bytes) => Argument::Bytes(bytes),
        Binding::Missing => Argument::Missing,
    }
}

pub(crate) fn gpu_buffer(buffer: &Buffer) -> &GpuBuffer {
    match buffer {
        Buffer::Gpu(buffer) => buffer,
        Buffer::Cpu(_) => panic!("a buffer of the CPU was given to a GPU"),
    }
}

/// What is kept under a name, or zeroed memory where that is too small.
fn take(
    kept: &mut BTreeMap<(&'static str, bool), Buffer>,
    driver: &Arc<dyn Driver>,
    name: (&'static str, bool),
    bytes: usize,
) -> Result<Buffer, LaunchError> {
    match kept.remove(&name) {
        Some(buffer) if buffer.len_bytes() >= bytes => Ok(buffer),
        // The smaller one goes first.
        smaller => {
            drop(smaller);
            Buffer::zeroed(&Device::Gpu(GpuDevice::new(driver.clone())), bytes)
        }
    }
}
