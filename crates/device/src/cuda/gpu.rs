//! Choosing a GPU, its figures, and its one stream of work.

use super::error::{CudaError, check};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::sync::Arc;

/// CUDA version of the compiler that makes the cubins.
const DRIVER_NEEDED: i32 = 13_000;
/// mma.sync on bf16 and fused bf16 arithmetic.
const CAPABILITY_NEEDED: (i32, i32) = (8, 0);

/// The context and stream, alive as long as anything made from them.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    pub(super) context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
    /// Captured beside the other; nothing runs in it.
    pub(super) side: sys::CUstream,
}

// SAFETY: the driver's contexts and streams may be used from any thread; calls make the context current first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context this thread's own: the driver keeps the current one a thread.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained in `open` and is released only when this value goes.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: both were made by `open` and nothing made from them is left. A failure has nowhere to be reported.
        unsafe {
            sys::cuCtxSetCurrent(self.context);
            sys::cuStreamDestroy_v2(self.side);
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub name: String,
    pub ordinal: usize,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// CUDA version of the driver, as `1000 * major + 10 * minor`.
    pub driver: i32,
    pub multiprocessors: usize,
    pub l2_bytes: usize,
    pub memory_bytes: u64,
    /// Dynamic shared memory that a block may ask for.
    pub shared_bytes_max: usize,
    pub clock_khz: usize,
    pub(super) inner: Arc<Context>,
}

impl Gpu {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::NoDevice`] or [`CudaError::OldDevice`] with what was
    /// found and what is needed; [`CudaError::Driver`] when the driver fails.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        // Asked first, since the bindings panic on their first call where there is no library.
        // SAFETY: loads the driver's library, whose initialisers touch nothing of ours.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: the library is present; this call is the one that must come first.
        let started = unsafe { sys::cuInit(0) };
        if started == sys::CUresult::CUDA_ERROR_NO_DEVICE {
            return Err(CudaError::NoDevice { ordinal, count: 0 });
        }
        if started == sys::CUresult::CUDA_ERROR_STUB_LIBRARY {
            return Err(CudaError::NoDriver);
        }
        check("cuInit", started)?;
        let (mut driver, mut count) = (0, 0);
        // SAFETY: writes one integer.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut driver) })?;
        // SAFETY: writes one integer.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        let count = usize::try_from(count).unwrap_or(0);
        let mut device = 0;
        let index = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(index) = index else { return Err(CudaError::NoDevice { ordinal, count }) };
        // SAFETY: the ordinal exists, checked above.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, index) })?;
        let attribute = |which: Attribute| -> Result<i32, CudaError> {
            let mut value = 0;
            // SAFETY: writes one integer about an existing device.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
            Ok(value)
        };
        let name = name_of(device)?;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        judge(ordinal, &name, capability, driver)?;
        let mut memory_bytes = 0;
        // SAFETY: writes one size.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
        let figure = |which| attribute(which).map(|value| usize::try_from(value).unwrap_or(0));
        let multiprocessors = figure(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let l2_bytes = figure(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        let shared_bytes_max = figure(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let clock_khz = figure(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
        let mut context = std::ptr::null_mut();
        let (mut stream, mut side) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: retains the device's own context; released in `Context::drop`.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        // SAFETY: the context was just retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        for stream in [&mut stream, &mut side] {
            // SAFETY: writes one handle, destroyed in `Context::drop`.
            check("cuStreamCreate", unsafe { sys::cuStreamCreate(stream, flags) })?;
        }
        let inner = Arc::new(Context { device, context, stream, side });
        Ok(Gpu {
            name,
            ordinal,
            capability,
            driver,
            multiprocessors,
            l2_bytes,
            memory_bytes: memory_bytes as u64,
            shared_bytes_max,
            clock_khz,
            inner,
        })
    }

    /// The compiler target whose cubins run here: `90a` and the like. Cubins of an `a` target run on that one only.
    pub fn target(&self) -> String {
        let (major, minor) = self.capability;
        format!("{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Free bytes now.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        self.inner.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Waits until everything launched is done; an earlier kernel's failure shows here.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn finish(&self) -> Result<(), CudaError> {
        self.inner.enter()?;
        // SAFETY: the stream lives as long as `inner`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.inner.stream) })
    }
}

fn name_of(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name = [0_u8; 128];
    // SAFETY: the driver writes at most the given length, terminator included.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) })?;
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..length]).into_owned())
}

/// Whether the kernels can run on such a device with such a driver.
fn judge(ordinal: usize, name: &str, capability: (i32, i32), driver: i32) -> Result<(), CudaError> {
    if driver < DRIVER_NEEDED {
        return Err(CudaError::OldDriver { found: driver, needed: DRIVER_NEEDED });
    }
    if capability < CAPABILITY_NEEDED {
        let (name, needed) = (name.to_string(), CAPABILITY_NEEDED);
        return Err(CudaError::OldDevice { ordinal, name, found: capability, needed });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_or_a_device_is_refused_and_nothing_panics() {
        // With a GPU the last ordinal can't exist; without one the first can't either.
        match Gpu::open(usize::MAX) {
            Err(CudaError::NoDriver | CudaError::OldDriver { .. } | CudaError::NoDevice { .. }) => {}
            other => panic!("opened or failed otherwise: {other:?}"),
        }
    }

    #[test]
    fn old_devices_and_drivers_are_refused_with_their_figures() {
        let texts = [
            (judge(1, "Tesla T4", (7, 5), 13_000), "GPU 1 (Tesla T4) has compute capability 7.5, the kernels need 8.0"),
            (judge(0, "NVIDIA H200", (9, 0), 12_080), "the NVIDIA driver supports CUDA 12.8, the kernels need 13.0"),
        ];
        for (found, expected) in texts {
            let text = found.expect_err("refused").to_string();
            assert!(text.starts_with(expected), "{text}");
        }
        assert_eq!(judge(0, "NVIDIA H200", (9, 0), 13_000), Ok(()));
        assert_eq!(judge(0, "NVIDIA A100", (8, 0), 13_010), Ok(()));
    }

    #[test]
    fn too_little_memory_is_refused_with_the_figures() {
        let error = CudaError::Memory { name: "NVIDIA H200".into(), needed: 300, free: 100, total: 150 };
        assert!(error.to_string().starts_with("300 bytes are needed on NVIDIA H200, 100 of 150 are free"));
    }
}
