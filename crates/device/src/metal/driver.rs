//! The driver: memory, programs and launches of one Metal device.

use super::Choices;
use super::memory::{BufferObject, Memory};
use super::programs::{Kept, Missing, Pipeline, Programs};
use super::stream::{Stream, contents};
use super::system::{DeviceObject, page_bytes};
use super::warm;
use crate::apple::chip::Chip;
use crate::apple::entry::{self, Launched, Log};
use crate::gpu::{Argument, Backend, Block, Call, Driver, GpuLimits, Span};
use crate::{HostBytes, LaunchError};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLComputeCommandEncoder, MTLComputePipelineState, MTLDevice, MTLResourceOptions, MTLSize};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Bytes that a launch may bring without a buffer of their own.
const INLINE_BYTES_MAX: usize = 4096;
/// Of the buffer that stands for none, and of the one that ticks write.
const SMALL_BYTES: usize = 16;
/// The number in the argument table of the buffer that stands for none; blocks count from 1.
const DUMMY: u64 = 0;
/// Buffers that one kernel may bind.
const BUFFERS_MAX: u32 = 31;

pub(super) struct MetalDriver {
    device: DeviceObject,
    name: String,
    limits: GpuLimits,
    simdgroups: Option<u32>,
    log: Option<Log>,
    notice: fn(&str),
    state: Arc<Mutex<State>>,
}

pub(super) struct State {
    stream: Stream,
    memory: Memory,
    programs: Programs,
    /// What a binding without a buffer points at.
    dummy: BufferObject,
    ticked: BufferObject,
    /// When the last round ended.
    pub worked: Instant,
}

// SAFETY: Metal's objects belong to no thread; those that may not be used by two at once lie behind the driver's lock.
unsafe impl Send for State {}

impl State {
    /// Whether something was given and not waited for.
    pub fn is_busy(&self) -> bool {
        !self.stream.is_idle()
    }

    /// See [`Stream::tick`].
    pub fn tick(&self) {
        self.stream.tick(&self.ticked);
    }

    fn finish(&mut self, notice: fn(&str)) -> Result<(), String> {
        if self.stream.is_idle() {
            return Ok(());
        }
        self.memory.commit_residency();
        let finished = self.stream.finish();
        self.memory.settle();
        self.programs.round_ended().iter().for_each(|problem| notice(problem));
        self.worked = Instant::now();
        finished
    }
}

impl fmt::Debug for MetalDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metal device {}", self.name)
    }
}

impl Drop for MetalDriver {
    fn drop(&mut self) {
        let notice = self.notice;
        autoreleasepool(|_| {
            let mut state = self.state();
            // A failure has nowhere to be reported any more.
            drop(state.finish(notice));
            state.programs.write().iter().for_each(|problem| notice(problem));
        });
    }
}

impl MetalDriver {
    /// With one queue.
    pub fn new(
        device: DeviceObject,
        chip: Chip,
        kept: Option<Kept>,
        choices: Choices,
    ) -> Result<MetalDriver, LaunchError> {
        let name = device.name().to_string();
        let refused = |text: &str| LaunchError::Device { device: name.clone(), text: text.into() };
        let queue = device.newCommandQueue().ok_or_else(|| refused("it gives no command queue"))?;
        let small = || {
            let buffer = device.newBufferWithLength_options(SMALL_BYTES, MTLResourceOptions::StorageModeShared);
            buffer.ok_or_else(|| refused("it gives no memory"))
        };
        let limits = limits_of(&device, &chip);
        let state = State {
            memory: Memory::new(device.clone(), &queue, chip.has_residency_sets, page_bytes()),
            stream: Stream::new(device.clone(), queue).ok_or_else(|| refused("it gives no event"))?,
            programs: Programs::new(device.clone(), limits.target.clone(), kept, choices.edit),
            dummy: small()?,
            ticked: small()?,
            worked: Instant::now(),
        };
        let state = Arc::new(Mutex::new(state));
        if !choices.keep_warm.is_zero() {
            warm::keep(Arc::downgrade(&state), choices.keep_warm);
        }
        let Choices { simdgroups, log, notice, .. } = choices;
        Ok(MetalDriver { device, name, limits, simdgroups, log, notice, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, text: impl fmt::Display) -> LaunchError {
        LaunchError::Device { device: self.name.clone(), text: text.to_string() }
    }

    fn no_memory(&self, bytes: usize) -> LaunchError {
        let (free, total) = (self.free(), self.limits.memory_bytes);
        LaunchError::DeviceMemory { device: self.name.clone(), bytes, free, total }
    }

    fn free(&self) -> u64 {
        self.limits.memory_bytes.saturating_sub(self.device.currentAllocatedSize() as u64)
    }

    fn bind(
        &self,
        state: &mut State,
        encoder: &Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
        index: usize,
        argument: &Argument<'_>,
    ) -> Result<(), LaunchError> {
        match argument {
            Argument::Read(span) | Argument::Write(span) => {
                let buffer = self.block(state, span.block)?;
                state.stream.bind(encoder, index, &buffer, span.block.0, span.first);
            }
            Argument::Missing => state.stream.bind(encoder, index, &state.dummy, DUMMY, 0),
            Argument::Bytes(bytes) if bytes.is_empty() => state.stream.bind(encoder, index, &state.dummy, DUMMY, 0),
            Argument::Bytes(bytes) if bytes.len() <= INLINE_BYTES_MAX => state.stream.bind_bytes(encoder, index, bytes),
            Argument::Bytes(bytes) => {
                let staged = state.stream.stage(bytes).ok_or_else(|| self.no_memory(bytes.len()))?;
                state.stream.bind(encoder, index, &staged.buffer, staged.number, staged.first);
            }
        }
        Ok(())
    }

    fn block(&self, state: &State, block: Block) -> Result<BufferObject, LaunchError> {
        let buffer = state.memory.buffer(block.0).cloned();
        buffer.ok_or_else(|| self.failed(format_args!("there is no block {}", block.0)))
    }

    fn encode(&self, state: &mut State, call: &Call<'_>) -> Result<(), LaunchError> {
        let missing =
            || LaunchError::NoKernel { program: call.program.name, entry: call.entry, backend: Backend::Metal };
        let pipeline = state.programs.pipeline(call.program, call.entry).map_err(|why| match why {
            Missing::Entry => missing(),
            Missing::Failed(text) => self.failed(text),
            Missing::Refused(text) => {
                self.note(asked(call, Some(text.clone())));
                self.failed(text)
            }
        })?;
        let threads_max = u32::try_from(pipeline.maxTotalThreadsPerThreadgroup()).unwrap_or(u32::MAX);
        let (groups, threads) = entry::geometry(call, self.simdgroups, threads_max);
        let shared_bytes = call.shared_bytes.next_multiple_of(16) as usize;
        self.check(&pipeline, call, threads, shared_bytes)?;
        let encoder = state.stream.compute().map_err(|text| self.failed(text))?;
        encoder.setComputePipelineState(&pipeline);
        for (index, argument) in call.arguments.iter().enumerate() {
            self.bind(state, &encoder, index, argument)?;
        }
        if !call.shape.is_empty() {
            state.stream.bind_bytes(&encoder, call.arguments.len(), call.shape);
        }
        if shared_bytes > 0 {
            // SAFETY: the length was checked against the device's limit.
            unsafe { encoder.setThreadgroupMemoryLength_atIndex(shared_bytes, 0) };
        }
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(groups), size(threads));
        Ok(())
    }

    /// Holds a launch against what the compiled pipeline takes on this chip.
    fn check(
        &self,
        pipeline: &Pipeline,
        call: &Call<'_>,
        threads: u32,
        shared_bytes: usize,
    ) -> Result<(), LaunchError> {
        let most = pipeline.maxTotalThreadsPerThreadgroup();
        let threadgroup_bytes = pipeline.staticThreadgroupMemoryLength() + shared_bytes;
        let simd_width = pipeline.threadExecutionWidth();
        self.note(Launched {
            threads,
            pipeline_threads_max: count(most),
            threadgroup_bytes: count(threadgroup_bytes),
            simd_width: count(simd_width),
            ..asked(call, None)
        });
        LaunchError::check_limit("the threads of a group, after its registers,", threads as usize, most)?;
        let limit = self.limits.shared_bytes_max as usize;
        LaunchError::check_limit("a group's memory, with what the kernel declares,", threadgroup_bytes, limit)?;
        LaunchError::check_shape("the threads of a SIMD group", simd_width, entry::LANES as usize)
    }

    /// Records a launch, where somebody wants to know.
    fn note(&self, launched: Launched) {
        if let Some(log) = &self.log {
            log.lock().unwrap_or_else(PoisonError::into_inner).insert(launched);
        }
    }

    fn allocated(&self, state: &mut State, bytes: usize) -> Result<Block, LaunchError> {
        LaunchError::check_limit("the bytes of a buffer", bytes, state.memory.buffer_bytes_max())?;
        let block = state.memory.allocate(bytes).ok_or_else(|| self.no_memory(bytes))?;
        let buffer = self.block(state, Block(block))?;
        // SAFETY: the buffer is as long as was asked for, and nothing given to the device uses its place.
        unsafe { contents(&buffer, 0).write_bytes(0, bytes) };
        Ok(Block(block))
    }
}

fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What a call asks for before a pipeline is there to ask.
fn asked(call: &Call<'_>, refusal: Option<String>) -> Launched {
    Launched {
        entry: call.entry,
        threads: call.threads,
        pipeline_threads_max: 0,
        threadgroup_bytes: call.shared_bytes,
        simd_width: entry::LANES,
        buffers: count(call.arguments.len() + 1),
        argument_bytes: count(call.shape.len()),
        refusal,
    }
}

fn limits_of(device: &ProtocolObject<dyn MTLDevice>, chip: &Chip) -> GpuLimits {
    GpuLimits {
        threads_max: u32::try_from(device.maxThreadsPerThreadgroup().width).unwrap_or(u32::MAX),
        shared_bytes_max: u32::try_from(device.maxThreadgroupMemoryLength()).unwrap_or(u32::MAX),
        buffers_max: BUFFERS_MAX,
        units: chip.cores,
        memory_bytes: device.recommendedMaxWorkingSetSize(),
        target: chip.target(),
    }
}

fn size(width: u32) -> MTLSize {
    MTLSize { width: width as usize, height: 1, depth: 1 }
}

impl Driver for MetalDriver {
    fn backend(&self) -> Backend {
        Backend::Metal
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &GpuLimits {
        &self.limits
    }

    fn free_bytes(&self) -> Result<u64, LaunchError> {
        Ok(self.free())
    }

    fn allocate(&self, bytes: usize) -> Result<Block, LaunchError> {
        autoreleasepool(|_| self.allocated(&mut self.state(), bytes))
    }

    fn map(&self, host: &HostBytes<'_>, element_bytes: usize) -> Result<Option<(Block, usize)>, LaunchError> {
        let mapped = autoreleasepool(|_| self.state().memory.map(host, element_bytes));
        Ok(mapped.map(|(block, first)| (Block(block), first)))
    }

    fn free(&self, block: Block) {
        autoreleasepool(|_| {
            let mut state = self.state();
            let is_busy = state.is_busy();
            state.stream.forget(block.0);
            state.memory.free(block.0, is_busy);
        });
    }

    fn refused(&self, call: &Call<'_>) {
        self.note(asked(call, None));
    }

    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError> {
        autoreleasepool(|_| self.encode(&mut self.state(), call))
    }

    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError> {
        autoreleasepool(|_| {
            let mut state = self.state();
            let (source, target) = (self.block(&state, from.block)?, self.block(&state, to.block)?);
            let copied = state.stream.copy(&source, from.first, &target, to.first, from.bytes);
            copied.map_err(|text| self.failed(text))
        })
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        autoreleasepool(|_| {
            let mut state = self.state();
            let buffer = self.block(&state, span.block)?;
            state.stream.zero(&buffer, span.first, span.bytes).map_err(|text| self.failed(text))
        })
    }

    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        autoreleasepool(|_| {
            let mut state = self.state();
            state.finish(self.notice).map_err(|text| self.failed(text))?;
            let buffer = self.block(&state, from.block)?;
            // SAFETY: callers check the range, the device is idle, and a host slice never overlaps device memory.
            unsafe { contents(&buffer, from.first).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
            Ok(())
        })
    }

    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError> {
        autoreleasepool(|_| {
            let mut state = self.state();
            let buffer = self.block(&state, to.block)?;
            if !state.is_busy() {
                // SAFETY: as in `read`.
                unsafe { contents(&buffer, to.first).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
                return Ok(());
            }
            if from.is_empty() {
                return Ok(());
            }
            // Launches before it may still read the old bytes.
            let staged = state.stream.stage(from).ok_or_else(|| self.no_memory(from.len()))?;
            let copied = state.stream.copy(&staged.buffer, staged.first, &buffer, to.first, from.len());
            copied.map_err(|text| self.failed(text))
        })
    }

    fn finish(&self) -> Result<(), LaunchError> {
        autoreleasepool(|_| self.state().finish(self.notice).map_err(|text| self.failed(text)))
    }
}
