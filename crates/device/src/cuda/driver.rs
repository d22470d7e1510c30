//! A CUDA GPU behind the face of all GPUs.

use super::launch::{Kernel, Module, Shape};
use super::staging::Staging;
use super::{CudaError, Gpu};
use crate::gpu::{Argument, Backend, Block, Call, Driver, GpuDevice, GpuLimits, Program, Span};
use crate::{Device, LaunchError};
use cudarc::driver::sys;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The cubin of a program for a compiler target (`90a`), where the build has one.
type Cubins = Box<dyn Fn(&str, &str) -> Option<&'static [u8]> + Send + Sync>;

/// The most threads and dynamic shared bytes that launches asked for, by program and entry.
pub type Asked = Arc<Mutex<BTreeMap<(&'static str, &'static str), (u32, u32)>>>;

/// A device that is tried: less of it than there is, so that launches are cut otherwise, and a record of them.
#[derive(Clone, Debug, Default)]
pub struct Trial {
    /// Multiprocessors at most.
    pub units: Option<u32>,
    /// Shared memory of a block at most.
    pub shared_bytes: Option<u32>,
    /// Where launches are recorded.
    pub asked: Option<Asked>,
}

/// Writes up to this size go through pinned memory and are not waited for.
const STAGED_BYTES_MAX: usize = 64 << 10;

/// GPU `ordinal` as a device whose programs come from `cubins`.
///
/// # Errors
/// As [`Gpu::open`].
pub fn device(
    ordinal: usize,
    cubins: impl Fn(&str, &str) -> Option<&'static [u8]> + Send + Sync + 'static,
) -> Result<Device, CudaError> {
    device_on_trial(ordinal, cubins, Trial::default())
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
    let staging = Mutex::new(Staging::new(&gpu)?);
    let (cubins, asked) = (Box::new(cubins), trial.asked);
    let (modules, kernels) = (Mutex::default(), Mutex::default());
    let driver = CudaDriver { gpu, limits, cubins, asked, modules, kernels, staging };
    Ok(Device::Gpu(GpuDevice::new(Arc::new(driver))))
}

struct CudaDriver {
    gpu: Gpu,
    limits: GpuLimits,
    cubins: Cubins,
    asked: Option<Asked>,
    modules: Mutex<HashMap<&'static str, Arc<Module>>>,
    /// By the program's address, which is static, and the entry.
    kernels: Mutex<HashMap<(usize, &'static str), Arc<Kernel>>>,
    staging: Mutex<Staging>,
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

    fn kernel(&self, program: &'static Program, entry: &'static str) -> Result<Arc<Kernel>, LaunchError> {
        let mut kernels = locked(&self.kernels);
        let key = (std::ptr::from_ref(program) as usize, entry);
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel.clone());
        }
        let module = self.module(program)?;
        let missing = LaunchError::NoKernel { program: program.name, entry, backend: Backend::Cuda };
        let kernel = match module.kernel(entry) {
            Ok(kernel) => kernel,
            Err(CudaError::NoKernel { .. }) => return Err(missing),
            Err(error) => return Err(self.failed(error)),
        };
        let kernel = Arc::new(kernel);
        kernels.insert(key, kernel.clone());
        Ok(kernel)
    }

    fn module(&self, program: &'static Program) -> Result<Arc<Module>, LaunchError> {
        let mut modules = locked(&self.modules);
        if let Some(module) = modules.get(program.name) {
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
        modules.insert(program.name, module.clone());
        Ok(module)
    }
}

const fn address(span: Span) -> u64 {
    span.block.0 + span.first as u64
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
        if self.enter().is_ok() {
            // SAFETY: allocated in `allocate` and given back once; the driver waits for kernels that still use it.
            unsafe { sys::cuMemFree_v2(block.0) };
        }
    }

    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError> {
        let kernel = self.kernel(call.program, call.entry)?;
        if let Some(asked) = &self.asked {
            let mut asked = locked(asked);
            let most = asked.entry((call.program.name, call.entry)).or_default();
            *most = (most.0.max(call.threads), most.1.max(call.shared_bytes));
        }
        let mut staging = locked(&self.staging);
        let slices = call.arguments.iter().filter_map(|argument| match argument {
            Argument::Bytes(bytes) => Some(*bytes),
            Argument::Read(_) | Argument::Write(_) | Argument::Missing => None,
        });
        let mut staged = staging.stage(&self.gpu, slices).map_err(|error| self.failed(error))?.into_iter();
        let addresses: Vec<[u8; 8]> = call
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Read(span) | Argument::Write(span) => address(*span),
                Argument::Bytes(_) => staged.next().unwrap_or(0),
                Argument::Missing => 0,
            })
            .map(u64::to_ne_bytes)
            .collect();
        let shape_bytes = (!call.shape.is_empty()).then_some(call.shape);
        let images: Vec<&[u8]> = addresses.iter().map(|address| &address[..]).chain(shape_bytes).collect();
        let shape = Shape {
            blocks: call.groups as usize,
            threads: call.threads as usize,
            shared_bytes: call.shared_bytes as usize,
            cluster: call.tuning.cluster.max(1) as usize,
            overlap: call.tuning.overlap,
        };
        self.check(self.gpu.launch(&kernel, shape, &images))
    }

    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError> {
        self.enter()?;
        // SAFETY: both ranges lie in blocks of this device, as the caller has checked.
        self.answered("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(address(to), address(from), from.bytes, self.gpu.inner.stream)
        })
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.enter()?;
        // SAFETY: as in `copy`.
        self.answered("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(address(span), 0, span.bytes, self.gpu.inner.stream)
        })
    }

    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        if from.bytes > 0 {
            self.enter()?;
            // SAFETY: the range lies in its block, and `to` has as many bytes and outlives the wait below.
            self.answered("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), address(from), to.len(), self.gpu.inner.stream)
            })?;
        }
        self.finish()
    }

    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError> {
        if from.is_empty() {
            return Ok(());
        }
        self.enter()?;
        if from.len() <= STAGED_BYTES_MAX {
            let mut staging = locked(&self.staging);
            return self.check(staging.write(&self.gpu, from, address(to)));
        }
        // SAFETY: as in `read`, the other way.
        self.answered("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(address(to), from.as_ptr().cast(), from.len(), self.gpu.inner.stream)
        })?;
        self.finish()
    }

    fn finish(&self) -> Result<(), LaunchError> {
        self.check(self.gpu.finish())
    }

    fn cuda(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }
}
