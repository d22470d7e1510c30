//! Kernels from cubins, and their launches.

use super::error::{CudaError, check};
use super::gpu::{Context, Gpu};
use crate::gpu::Tuning;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A loaded cubin.
#[derive(Debug)]
pub struct Module {
    module: sys::CUmodule,
    /// What it was loaded from.
    cubin: Vec<u8>,
    inner: Arc<Context>,
}

// SAFETY: a module is a handle of the driver, which locks its own state.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin that was compiled for [`Gpu::target`].
    ///
    /// # Errors
    /// [`CudaError::Driver`] when it was made for another GPU or is no cubin.
    pub fn load(gpu: &Gpu, cubin: &[u8]) -> Result<Module, CudaError> {
        gpu.inner.enter()?;
        let mut module = std::ptr::null_mut();
        // A cubin is an ELF file, which says its own length; the terminator is there should it be text.
        let mut image = cubin.to_vec();
        image.push(0);
        // SAFETY: the driver reads the image during the call only.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })?;
        Ok(Module { module, cubin: image, inner: gpu.inner.clone() })
    }

    /// A kernel by its name, with the sizes of its arguments.
    ///
    /// # Errors
    /// [`CudaError::NoKernel`].
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, CudaError> {
        self.inner.enter()?;
        let missing = || CudaError::NoKernel { kernel: name.to_string() };
        let symbol = CString::new(name).map_err(|_| missing())?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name terminated.
        let result = unsafe { sys::cuModuleGetFunction(&mut function, self.module, symbol.as_ptr()) };
        if result == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(missing());
        }
        check("cuModuleGetFunction", result)?;
        let attribute = |which: Attribute| -> Result<usize, CudaError> {
            let mut value = 0;
            // SAFETY: writes one integer about an existing function.
            check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut value, which, function) })?;
            Ok(usize::try_from(value).unwrap_or(0))
        };
        let mut argument_bytes = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: writes two sizes; an index past the last argument is answered with an error.
            let result = unsafe { sys::cuFuncGetParamInfo(function, argument_bytes.len(), &mut offset, &mut bytes) };
            if result == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
                break;
            }
            check("cuFuncGetParamInfo", result)?;
            argument_bytes.push(bytes);
        }
        Ok(Kernel {
            name: name.to_string(),
            function,
            argument_bytes,
            shared_allowed: AtomicUsize::new(0),
            static_shared_bytes: attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            threads_max: attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            waits: super::elf::waits(&self.cubin, name),
            module: self.clone(),
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.inner.enter().is_ok() {
            // SAFETY: loaded in `load` and unloaded once; kernels keep the module alive.
            unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// One kernel of a module, with the compiler's figures.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub static_shared_bytes: usize,
    pub threads_max: usize,
    /// Whether it waits itself for the launch before it: only then may it start while that one runs.
    pub waits: bool,
    argument_bytes: Vec<usize>,
    function: sys::CUfunction,
    /// Dynamic shared memory that the driver was asked for so far. What it allows unasked depends on the kernel: 48 KiB less the
    /// kernel's own.
    shared_allowed: AtomicUsize,
    module: Arc<Module>,
}

impl Kernel {
    /// Asks the driver for `bytes` of dynamic shared memory, which are within the device's limit.
    fn ask_for_shared(&self, bytes: usize) -> Result<(), CudaError> {
        if bytes <= self.shared_allowed.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.module.inner.enter()?;
        let set = |which: Attribute, value: i32| {
            // SAFETY: sets one integer of an existing function.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.function, which, value) })
        };
        set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)?;
        // A multiprocessor drains before it divides its memory anew, so kernels that want much of it want the same.
        if bytes > MUCH_SHARED {
            set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        self.shared_allowed.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// What the driver takes for arguments that lie one behind the other. It copies them during the call and writes none.
    pub(super) fn pointers(&self, arguments: &[u8]) -> Result<Vec<*mut c_void>, CudaError> {
        let (mut pointers, mut rest) = (Vec::with_capacity(self.argument_bytes.len()), arguments);
        for (index, expected) in self.argument_bytes.iter().copied().enumerate() {
            let Some((argument, behind)) = rest.split_at_checked(expected) else {
                return Err(CudaError::Argument { kernel: self.name.clone(), index, found: rest.len(), expected });
            };
            pointers.push(argument.as_ptr().cast_mut().cast());
            rest = behind;
        }
        Ok(pointers)
    }

    pub(super) fn function(&self) -> sys::CUfunction {
        self.function
    }
}

/// Dynamic shared memory from which on a kernel asks for all that a multiprocessor can give as such.
const MUCH_SHARED: usize = 64 << 10;

// SAFETY: a function is a handle into its module, which is kept.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// How a launch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub blocks: usize,
    pub threads: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Blocks of a cluster (compute capability 9.0 and later), 1 for none; divides the block count. See [`Tuning::cluster`].
    pub cluster: usize,
    /// Starts while the launch before it still runs. The kernel itself waits before it reads what that one writes.
    pub overlap: bool,
}

impl Gpu {
    /// Whether the kernel can run so, with arguments of these sizes. Lets it use that much shared memory.
    pub(super) fn check_launch(
        &self,
        kernel: &Kernel,
        shape: Shape,
        mut sizes: impl Iterator<Item = usize>,
    ) -> Result<(), CudaError> {
        let limit = |what, found: usize, max: usize| match found <= max {
            true => Ok(()),
            false => {
                let (kernel, found, max) = (kernel.name.clone(), found as u64, max as u64);
                Err(CudaError::Limit { kernel, what, found, max })
            }
        };
        limit("the block's thread count", shape.threads, kernel.threads_max)?;
        limit("the cluster's block count", shape.cluster, if self.capability.0 >= 9 { 8 } else { 1 })?;
        limit("what is left of the blocks by clusters", shape.blocks % shape.cluster.max(1), 0)?;
        limit("the grid's block count", shape.blocks, i32::MAX as usize)?;
        let shared_max = self.shared_bytes_max.saturating_sub(kernel.static_shared_bytes);
        limit("the block's shared memory", shape.shared_bytes, shared_max)?;
        let mut wanted = kernel.argument_bytes.iter().copied();
        for index in 0.. {
            let (found, expected) = (sizes.next(), wanted.next());
            if found.is_none() && expected.is_none() {
                break;
            }
            if found != expected {
                let (found, expected) = (found.unwrap_or(0), expected.unwrap_or(0));
                return Err(CudaError::Argument { kernel: kernel.name.clone(), index, found, expected });
            }
        }
        if !Arc::ptr_eq(&kernel.module.inner, &self.inner) {
            return Err(CudaError::OtherDevice { kernel: kernel.name.clone() });
        }
        kernel.ask_for_shared(shape.shared_bytes)
    }

    /// Puts a launch that [`Gpu::check_launch`] took into one of this device's streams, with its arguments' bytes one behind the
    /// other. The context is this thread's own.
    pub(super) fn launch_checked(
        &self,
        stream: sys::CUstream,
        kernel: &Kernel,
        shape: Shape,
        arguments: &[u8],
    ) -> Result<(), CudaError> {
        let mut pointers = kernel.pointers(arguments)?;
        let overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let cluster = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: shape.cluster as u32, y: 1, z: 1 },
            },
        };
        let together = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { cooperative: 1 },
        };
        let mut attributes = Vec::with_capacity(2);
        if shape.overlap && kernel.waits && self.capability.0 >= 9 {
            attributes.push(overlap);
        }
        if shape.cluster > 1 {
            attributes.push(cluster);
        }
        if shape.cluster == Tuning::WHOLE_GRID as usize {
            attributes.push(together);
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.blocks as u32,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes as u32,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: every argument has the kernel's own size, checked above, and is copied during the call.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, kernel.function, pointers.as_mut_ptr(), std::ptr::null_mut())
        })
    }
}
