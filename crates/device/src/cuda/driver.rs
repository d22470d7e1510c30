//! A CUDA GPU behind the face of all GPUs.

use super::launch::{Kernel, Module};
use super::rounds::{RoundGraph, Stream, shape_of};
use super::staging::Staging;
use super::{CudaError, Gpu};
use crate::gpu::rounds::{self, Arena, Counts, Cut, Giving, Line, Lines, Recorded, RoundTimes, Rounds};
use crate::gpu::{Argument, Backend, Block, Call, Driver, GpuDevice, GpuLimits, Program, Span};
use crate::{Device, LaunchError};
use cudarc::driver::sys;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The cubin of a program for a compiler target (`90a`), where the build has one.
type Cubins = Box<dyn Fn(&str, &str) -> Option<&'static [u8]> + Send + Sync>;

/// The most threads and dynamic shared bytes that launches asked for, by program and entry.
pub type Asked = Arc<Mutex<BTreeMap<(&'static str, &'static str), (u32, u32)>>>;

/// A device that is tried: less of it than there is, so that launches are cut otherwise, and a record of them. It launches
/// what it is given at once, so that its stream can be captured.
#[derive(Clone, Debug, Default)]
pub struct Trial {
    /// Multiprocessors at most.
    pub units: Option<u32>,
    /// Shared memory of a block at most.
    pub shared_bytes: Option<u32>,
    /// Where launches are recorded.
    pub asked: Option<Asked>,
}

/// Writes up to this size, such as a layer's window ring, go through pinned memory and are not waited for.
const STAGED_BYTES_MAX: usize = 128 << 10;

/// GPU `ordinal` as a device whose programs come from `cubins`. Rounds run as graphs.
///
/// # Errors
/// As [`Gpu::open`].
pub fn device(
    ordinal: usize,
    cubins: impl Fn(&str, &str) -> Option<&'static [u8]> + Send + Sync + 'static,
) -> Result<Device, CudaError> {
    opened(ordinal, Box::new(cubins), Trial::default(), Giving::default())
}

/// As [`device`], on trial.
///
/// # Errors
/// As [`Gpu::open`].
pub fn device_on_trial(
    ordinal: usize,
    cubins: impl Fn(&str, &str) -> Option<&'static [u8]> + Send + Sync + 'static,
    trial: Trial,
) -> Result<Device, CudaError> {
    opened(ordinal, Box::new(cubins), trial, Giving::OneByOne)
}

fn opened(ordinal: usize, cubins: Cubins, trial: Trial, giving: Giving) -> Result<Device, CudaError> {
    let gpu = Gpu::open(ordinal)?;
    let at_most = |most: Option<u32>, value: u32| most.map_or(value, |most| most.min(value));
    let limits = GpuLimits {
        threads_max: 1024,
        shared_bytes_max: at_most(trial.shared_bytes, gpu.shared_bytes_max as u32),
        buffers_max: 256,
        units: at_most(trial.units, gpu.multiprocessors as u32),
        memory_bytes: gpu.memory_bytes,
        target: gpu.target(),
    };
    let state = State {
        rounds: Rounds::default(),
        recorded: Recorded::default(),
        lines: Lines::default(),
        staging: Staging::new(&gpu)?,
        kernels: Vec::new(),
        numbers: HashMap::new(),
        modules: HashMap::new(),
        giving,
        pieces: 0,
        failure: None,
    };
    let driver = CudaDriver { state: Mutex::new(state), gpu, limits, cubins, asked: trial.asked };
    Ok(Device::Gpu(GpuDevice::new(Arc::new(driver))))
}

struct CudaDriver {
    state: Mutex<State>,
    gpu: Gpu,
    limits: GpuLimits,
    cubins: Cubins,
    asked: Option<Asked>,
}

/// What one call at a time may use. The lock also keeps the stream's order.
struct State {
    /// Before the kernels, which graphs use.
    rounds: Rounds<RoundGraph>,
    /// Launches that are not in the stream yet.
    recorded: Recorded,
    /// What those at the side touch.
    lines: Lines,
    staging: Staging,
    /// A launch names its kernel by the place here.
    kernels: Vec<Kernel>,
    /// By the program's address, which is static, and the entry.
    numbers: HashMap<(usize, &'static str), u32>,
    modules: HashMap<&'static str, Arc<Module>>,
    giving: Giving,
    /// Pieces of this round that have started.
    pieces: usize,
    /// Of launches that were given to the device where no error can be told: the next call tells it.
    failure: Option<CudaError>,
}

impl State {
    /// Starts what was collected. Nothing of it is left afterwards, also where it failed.
    fn flush(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        let State { rounds, recorded, lines, staging, kernels, failure, .. } = self;
        let given = match failure.take() {
            Some(failure) => Err(failure),
            None if recorded.is_empty() => Ok(()),
            None => {
                let ready = gpu.inner.enter().and_then(|()| staging.give(gpu));
                ready.and_then(|()| rounds.run(&mut Stream { gpu, kernels }, recorded))
            }
        };
        recorded.clear();
        lines.clear();
        given
    }

    /// Makes room for `needed` bytes more, which belong to the next launch.
    fn make_room(&mut self, gpu: &Gpu, needed: usize) -> Result<(), CudaError> {
        if self.staging.has_room(needed) {
            return Ok(());
        }
        self.flush(gpu)?;
        self.staging.turn(gpu, needed)
    }

    /// Waits for everything; the next round begins as this one did.
    fn finish(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.flush(gpu)?;
        gpu.finish()?;
        self.pieces = 0;
        // Who captures launches one by one finds their bytes where they were.
        if self.giving != Giving::OneByOne {
            self.staging.rewind();
        }
        Ok(())
    }

    /// Adds a launch of kernel number `kernel` to those collected.
    fn record(&mut self, gpu: &Gpu, kernel: u32, call: &Call<'_>) -> Result<(), CudaError> {
        let mut cut = Cut {
            kernel,
            blocks: call.groups,
            threads: call.threads,
            shared_bytes: call.shared_bytes,
            cluster: call.tuning.cluster,
            overlap: call.tuning.overlap,
            line: Line::Main,
        };
        let shape_bytes = (!call.shape.is_empty()).then_some(call.shape.len());
        let sizes = call.arguments.iter().map(|_| size_of::<u64>()).chain(shape_bytes);
        gpu.check_launch(&self.kernels[kernel as usize], shape_of(&cut), sizes)?;
        let lengths = call.arguments.iter().filter_map(|argument| match argument {
            Argument::Bytes(bytes) => Some(bytes.len()),
            Argument::Read(_) | Argument::Write(_) | Argument::Missing => None,
        });
        self.make_room(gpu, Arena::needed(lengths))?;
        for argument in call.arguments {
            let address = match argument {
                Argument::Read(span) | Argument::Write(span) => address(*span),
                Argument::Bytes(bytes) => self.staging.place(bytes),
                Argument::Missing => 0,
            };
            self.recorded.argument(&address.to_ne_bytes());
        }
        self.recorded.argument(call.shape);
        // Behind the room for its bytes, which may end a list.
        let ranges = |wanted: fn(&Argument<'_>) -> Option<Span>| {
            call.arguments.iter().filter_map(wanted).map(range_of).collect::<Vec<_>>()
        };
        let reads = ranges(|argument| if let Argument::Read(span) = argument { Some(*span) } else { None });
        let writes = ranges(|argument| if let Argument::Write(span) = argument { Some(*span) } else { None });
        cut.line = self.lines.place(call.to_side, &reads, &writes);
        self.recorded.push(cut);
        Ok(())
    }
}

impl std::fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} ({})", self.gpu.ordinal, self.gpu.name)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaDriver {
    fn failed(&self, text: impl ToString) -> LaunchError {
        LaunchError::Device { device: format!("GPU {} ({})", self.gpu.ordinal, self.gpu.name), text: text.to_string() }
    }

    fn check(&self, result: Result<(), CudaError>) -> Result<(), LaunchError> {
        result.map_err(|error| self.failed(error))
    }

    /// Names the driver call and turns its answer into an error.
    fn answered(&self, call: &'static str, result: sys::CUresult) -> Result<(), LaunchError> {
        self.check(super::error::check(call, result))
    }

    fn enter(&self) -> Result<(), LaunchError> {
        self.check(self.gpu.inner.enter())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// The state with nothing collected, for a call that is no launch.
    fn flushed(&self) -> Result<MutexGuard<'_, State>, LaunchError> {
        let mut state = self.state();
        self.check(state.flush(&self.gpu))?;
        self.enter()?;
        Ok(state)
    }

    fn kernel(&self, state: &mut State, program: &'static Program, entry: &'static str) -> Result<u32, LaunchError> {
        let key = (std::ptr::from_ref(program) as usize, entry);
        if let Some(number) = state.numbers.get(&key) {
            return Ok(*number);
        }
        let module = self.module(state, program)?;
        let missing = LaunchError::NoKernel { program: program.name, entry, backend: Backend::Cuda };
        let kernel = match module.kernel(entry) {
            Ok(kernel) => kernel,
            Err(CudaError::NoKernel { .. }) => return Err(missing),
            Err(error) => return Err(self.failed(error)),
        };
        let number = state.kernels.len() as u32;
        state.kernels.push(kernel);
        state.numbers.insert(key, number);
        Ok(number)
    }

    fn module(&self, state: &mut State, program: &'static Program) -> Result<Arc<Module>, LaunchError> {
        if let Some(module) = state.modules.get(program.name) {
            return Ok(module.clone());
        }
        let target = &self.limits.target;
        let Some(cubin) = (self.cubins)(program.name, target) else {
            let name = program.name;
            return Err(self.failed(format_args!(
                "this build has no code of `{name}` for sm_{target}; `cargo xtask cubins` makes it, then build again"
            )));
        };
        let module = Arc::new(Module::load(&self.gpu, cubin).map_err(|error| self.failed(error))?);
        state.modules.insert(program.name, module.clone());
        Ok(module)
    }
}

const fn address(span: Span) -> u64 {
    span.block.0 + span.first as u64
}

fn range_of(span: Span) -> Range<u64> {
    address(span)..address(span) + span.bytes as u64
}

impl Driver for CudaDriver {
    fn backend(&self) -> Backend {
        Backend::Cuda
    }

    fn name(&self) -> &str {
        &self.gpu.name
    }

    fn limits(&self) -> &GpuLimits {
        &self.limits
    }

    fn free_bytes(&self) -> Result<u64, LaunchError> {
        self.gpu.free_bytes().map_err(|error| self.failed(error))
    }

    fn allocate(&self, bytes: usize) -> Result<Block, LaunchError> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: writes one address; freed in `free`.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (device, total) = (self.gpu.name.clone(), self.gpu.memory_bytes);
            return Err(LaunchError::DeviceMemory { device, bytes, free: self.free_bytes()?, total });
        }
        self.answered("cuMemAlloc", result)?;
        let block = Block(address);
        self.zero(Span { block, first: 0, bytes }).inspect_err(|_| self.free(block))?;
        Ok(block)
    }

    fn free(&self, block: Block) {
        let mut state = self.state();
        // What was collected may use the block.
        if let Err(failure) = state.flush(&self.gpu) {
            state.failure = Some(failure);
        }
        if self.enter().is_ok() {
            // SAFETY: allocated in `allocate` and given back once; the driver waits for kernels that still use it.
            unsafe { sys::cuMemFree_v2(block.0) };
        }
    }

    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError> {
        let mut state = self.state();
        let kernel = self.kernel(&mut state, call.program, call.entry)?;
        if let Some(asked) = &self.asked {
            let mut asked = locked(asked);
            let most = asked.entry((call.program.name, call.entry)).or_default();
            *most = (most.0.max(call.threads), most.1.max(call.shared_bytes));
        }
        self.check(state.record(&self.gpu, kernel, call))?;
        if !state.giving.starts(state.pieces, state.recorded.len()) {
            return Ok(());
        }
        state.pieces += 1;
        self.check(state.flush(&self.gpu))
    }

    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError> {
        let _state = self.flushed()?;
        // SAFETY: both ranges lie in blocks of this device, as the caller has checked.
        self.answered("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(address(to), address(from), from.bytes, self.gpu.inner.stream)
        })
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        let _state = self.flushed()?;
        // SAFETY: as in `copy`.
        self.answered("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(address(span), 0, span.bytes, self.gpu.inner.stream)
        })
    }

    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        let mut state = self.flushed()?;
        if from.bytes > 0 {
            // SAFETY: the range lies in its block, and `to` has as many bytes and outlives the wait below.
            self.answered("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), address(from), to.len(), self.gpu.inner.stream)
            })?;
        }
        self.check(state.finish(&self.gpu))
    }

    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError> {
        if from.is_empty() {
            return Ok(());
        }
        let mut state = self.flushed()?;
        if from.len() <= STAGED_BYTES_MAX {
            let room = state.make_room(&self.gpu, Arena::needed([from.len()].into_iter()));
            return self.check(room.and_then(|()| state.staging.write(&self.gpu, from, address(to))));
        }
        // SAFETY: as in `read`, the other way.
        self.answered("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(address(to), from.as_ptr().cast(), from.len(), self.gpu.inner.stream)
        })?;
        self.check(state.finish(&self.gpu))
    }

    fn finish(&self) -> Result<(), LaunchError> {
        self.check(self.state().finish(&self.gpu))
    }

    fn submit(&self) -> Result<(), LaunchError> {
        let mut state = self.state();
        if state.giving == Giving::OneByOne {
            return Ok(());
        }
        state.pieces = 0;
        let given = state.flush(&self.gpu);
        self.check(given.and_then(|()| state.staging.turn(&self.gpu, 0)))
    }

    fn give(&self, giving: Giving) -> Result<(), LaunchError> {
        self.flushed()?.giving = giving;
        Ok(())
    }

    fn round_counts(&self) -> Counts {
        self.state().rounds.counts()
    }

    fn time_round(&self, repetitions: u32) -> Result<Option<RoundTimes>, LaunchError> {
        let mut state = self.state();
        let round = state.recorded.clone();
        if round.is_empty() {
            return Ok(None);
        }
        self.check(state.flush(&self.gpu))?;
        self.enter()?;
        let mut stream = Stream { gpu: &self.gpu, kernels: &state.kernels };
        let times = rounds::times(&mut stream, &round, repetitions).map_err(|error| self.failed(error))?;
        self.check(state.finish(&self.gpu))?;
        Ok(Some(times))
    }

    fn cuda(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }
}
