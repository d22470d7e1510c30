//! The driver: memory, programs and launches of one Metal device.

use super::stream::Stream;
use crate::LaunchError;
use crate::gpu::{Argument, Backend, Block, Call, Driver, GpuLimits, Program, Span};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBuffer, MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState, MTLDevice, MTLLanguageVersion,
    MTLLibrary, MTLMathMode, MTLResourceOptions, MTLSize,
};
use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes that a launch may bring without a buffer of their own.
const INLINE_BYTES_MAX: usize = 4096;
/// Of the buffer that stands for none.
const DUMMY_BYTES: usize = 16;

pub(super) type BufferObject = Retained<ProtocolObject<dyn MTLBuffer>>;
type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;
type Library = Retained<ProtocolObject<dyn MTLLibrary>>;

pub(super) struct MetalDriver {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    name: String,
    limits: GpuLimits,
    state: Mutex<State>,
}

struct State {
    stream: Stream,
    /// What a binding without a buffer points at.
    dummy: BufferObject,
    blocks: HashMap<u64, BufferObject>,
    next: u64,
    /// By the address of the program, which is a static.
    libraries: HashMap<usize, Library>,
    pipelines: HashMap<(usize, &'static str), Pipeline>,
}

// SAFETY: Metal's objects belong to no thread; those that may not be used by two at once lie behind the driver's lock.
unsafe impl Send for State {}

impl fmt::Debug for MetalDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metal device {}", self.name)
    }
}

impl MetalDriver {
    /// With one queue.
    pub fn new(device: Retained<ProtocolObject<dyn MTLDevice>>) -> Result<MetalDriver, LaunchError> {
        let name = device.name().to_string();
        let refused = |text: &str| LaunchError::Device { device: name.clone(), text: text.into() };
        let queue = device.newCommandQueue().ok_or_else(|| refused("it gives no command queue"))?;
        let dummy = device.newBufferWithLength_options(DUMMY_BYTES, MTLResourceOptions::StorageModeShared);
        let dummy = dummy.ok_or_else(|| refused("it gives no memory"))?;
        let limits = super::limits_of(&device);
        let state = State {
            stream: Stream::new(queue),
            dummy,
            blocks: HashMap::new(),
            next: 0,
            libraries: HashMap::new(),
            pipelines: HashMap::new(),
        };
        Ok(MetalDriver { device, name, limits, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, text: impl fmt::Display) -> LaunchError {
        LaunchError::Device { device: self.name.clone(), text: text.to_string() }
    }

    fn pipeline(
        &self,
        state: &mut State,
        program: &'static Program,
        entry: &'static str,
    ) -> Result<Pipeline, LaunchError> {
        let key = std::ptr::from_ref(program) as usize;
        if let Some(pipeline) = state.pipelines.get(&(key, entry)) {
            return Ok(pipeline.clone());
        }
        let missing = || LaunchError::NoKernel { program: program.name, entry, backend: Backend::Metal };
        if !state.libraries.contains_key(&key) {
            let source = program.metal_text().ok_or_else(missing)?;
            let options = MTLCompileOptions::new();
            options.setMathMode(MTLMathMode::Safe);
            options.setLanguageVersion(MTLLanguageVersion::Version3_1);
            let library = self.device.newLibraryWithSource_options_error(&NSString::from_str(&source), Some(&options));
            state.libraries.insert(key, library.map_err(|error| self.failed(error))?);
        }
        let function = state.libraries[&key].newFunctionWithName(&NSString::from_str(entry)).ok_or_else(missing)?;
        let pipeline = self.device.newComputePipelineStateWithFunction_error(&function);
        let pipeline = pipeline.map_err(|error| self.failed(error))?;
        state.pipelines.insert((key, entry), pipeline.clone());
        Ok(pipeline)
    }

    /// A copy of host bytes that lives until the command buffer that uses it is done.
    fn staged(&self, bytes: &[u8]) -> Result<BufferObject, LaunchError> {
        let pointer = NonNull::from(bytes).cast();
        // SAFETY: the pointer is valid for the length, and the bytes are copied before the call returns.
        let buffer = unsafe {
            self.device.newBufferWithBytes_length_options(pointer, bytes.len(), MTLResourceOptions::StorageModeShared)
        };
        buffer.ok_or_else(|| self.no_memory(bytes.len()))
    }

    fn no_memory(&self, bytes: usize) -> LaunchError {
        let total = self.limits.memory_bytes;
        let free = total.saturating_sub(self.device.currentAllocatedSize() as u64);
        LaunchError::DeviceMemory { device: self.name.clone(), bytes, free, total }
    }

    fn bind(
        &self,
        state: &State,
        encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>,
        index: usize,
        argument: &Argument<'_>,
    ) -> Result<(), LaunchError> {
        let (buffer, first) = match argument {
            Argument::Read(span) | Argument::Write(span) => (self.block(state, span.block)?.clone(), span.first),
            Argument::Missing => (state.dummy.clone(), 0),
            Argument::Bytes(bytes) if bytes.is_empty() => (state.dummy.clone(), 0),
            Argument::Bytes(bytes) if bytes.len() <= INLINE_BYTES_MAX => {
                set_bytes(encoder, bytes, index);
                return Ok(());
            }
            Argument::Bytes(bytes) => (self.staged(bytes)?, 0),
        };
        // SAFETY: the offset lies inside the buffer (callers check spans), and the command buffer keeps the buffer alive.
        unsafe { encoder.setBuffer_offset_atIndex(Some(&buffer), first, index) };
        Ok(())
    }

    fn block<'a>(&self, state: &'a State, block: Block) -> Result<&'a BufferObject, LaunchError> {
        state.blocks.get(&block.0).ok_or_else(|| self.failed(format_args!("there is no block {}", block.0)))
    }
}

fn set_bytes(encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, bytes: &[u8], index: usize) {
    // SAFETY: the pointer is valid for the length, and the bytes are copied before the call returns.
    unsafe { encoder.setBytes_length_atIndex(NonNull::from(bytes).cast(), bytes.len(), index) };
}

fn size(width: u32) -> MTLSize {
    MTLSize { width: width as usize, height: 1, depth: 1 }
}

/// Bytes of a shared buffer, as the host sees them.
fn contents(buffer: &BufferObject, first: usize) -> *mut u8 {
    // SAFETY: callers stay inside the buffer's length.
    unsafe { buffer.contents().as_ptr().cast::<u8>().add(first) }
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
        Ok(self.limits.memory_bytes.saturating_sub(self.device.currentAllocatedSize() as u64))
    }

    fn allocate(&self, bytes: usize) -> Result<Block, LaunchError> {
        let buffer = self.device.newBufferWithLength_options(bytes, MTLResourceOptions::StorageModeShared);
        let buffer = buffer.ok_or_else(|| self.no_memory(bytes))?;
        // SAFETY: the buffer is new, and as long as was asked for.
        unsafe { contents(&buffer, 0).write_bytes(0, bytes) };
        let mut state = self.state();
        state.next += 1;
        let block = Block(state.next);
        state.blocks.insert(block.0, buffer);
        Ok(block)
    }

    fn free(&self, block: Block) {
        // A command buffer keeps what it uses until it is done.
        self.state().blocks.remove(&block.0);
    }

    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError> {
        let mut state = self.state();
        let pipeline = self.pipeline(&mut state, call.program, call.entry)?;
        let most = pipeline.maxTotalThreadsPerThreadgroup();
        LaunchError::check_limit("the threads of a group, after its registers,", call.threads as usize, most)?;
        let encoder = state.stream.compute().map_err(|text| self.failed(text))?;
        encoder.setComputePipelineState(&pipeline);
        for (index, argument) in call.arguments.iter().enumerate() {
            self.bind(&state, &encoder, index, argument)?;
        }
        if !call.shape.is_empty() {
            set_bytes(&encoder, call.shape, call.arguments.len());
        }
        if call.shared_bytes > 0 {
            // SAFETY: callers check the length against the device's limit.
            unsafe {
                encoder.setThreadgroupMemoryLength_atIndex(call.shared_bytes.next_multiple_of(16) as usize, 0);
            }
        }
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(call.groups), size(call.threads));
        Ok(())
    }

    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError> {
        let mut state = self.state();
        let (source, target) = (self.block(&state, from.block)?.clone(), self.block(&state, to.block)?.clone());
        let copied = state.stream.copy(&source, from.first, &target, to.first, from.bytes);
        copied.map_err(|text| self.failed(text))
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        let mut state = self.state();
        let buffer = self.block(&state, span.block)?.clone();
        state.stream.zero(&buffer, span.first, span.bytes).map_err(|text| self.failed(text))
    }

    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        let mut state = self.state();
        state.stream.finish().map_err(|text| self.failed(text))?;
        let buffer = self.block(&state, from.block)?;
        // SAFETY: callers check the range, the device is idle, and a host slice never overlaps device memory.
        unsafe { contents(buffer, from.first).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError> {
        let mut state = self.state();
        let buffer = self.block(&state, to.block)?.clone();
        if state.stream.is_idle() {
            // SAFETY: as in `read`.
            unsafe { contents(&buffer, to.first).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            return Ok(());
        }
        if from.is_empty() {
            return Ok(());
        }
        // Launches before it may still read the old bytes.
        let staged = self.staged(from)?;
        state.stream.copy(&staged, 0, &buffer, to.first, from.len()).map_err(|text| self.failed(text))
    }

    fn finish(&self) -> Result<(), LaunchError> {
        self.state().stream.finish().map_err(|text| self.failed(text))
    }
}
