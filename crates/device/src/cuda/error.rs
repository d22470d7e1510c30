//! What the CUDA layer may refuse or fail with.

use cudarc::driver::sys::{CUresult, cuGetErrorString};
use std::ffi::CStr;

/// Every field is a figure that the user can compare with what is needed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no NVIDIA driver on this machine.
    #[error(
        "no NVIDIA driver was found (libcuda.so.1 could not be loaded): install a driver of version 580 or later, or use the \
         CPU"
    )]
    NoDriver,
    /// The driver speaks an older CUDA than the kernels were built with.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, the kernels need {}.{}: install a driver of version 580 or later",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    OldDriver { found: i32, needed: i32 },
    /// There is no device of this number.
    #[error("there is no GPU {ordinal}: the driver shows {count}. Choose one from 0 to {}", count.saturating_sub(1))]
    NoDevice { ordinal: usize, count: usize },
    /// The GPU's generation is too old for the kernels.
    #[error(
        "GPU {ordinal} ({name}) has compute capability {}.{}, the kernels need {}.{} or later: use another GPU or the CPU",
        found.0, found.1, needed.0, needed.1
    )]
    OldDevice { ordinal: usize, name: String, found: (i32, i32), needed: (i32, i32) },
    /// The device has less free memory than is needed.
    #[error(
        "{needed} bytes are needed on {name}, {free} of {total} are free: stop other programs on it, or use a smaller context \
         or fewer sequences"
    )]
    Memory { name: String, needed: u64, free: u64, total: u64 },
    /// A module has no kernel of this name.
    #[error("the module has no kernel `{kernel}`: it was built from another source; build the cubins again")]
    NoKernel { kernel: String },
    /// A launch asks for more than the device or the kernel gives.
    #[error("`{kernel}`: {what} is {found}, at most {max} is possible on this device")]
    Limit { kernel: String, what: &'static str, found: u64, max: u64 },
    /// A launch's arguments are not those of the kernel.
    #[error(
        "`{kernel}` takes {expected} bytes as argument {index}, not {found}: launcher and kernel do not belong together"
    )]
    Argument { kernel: String, index: usize, found: usize, expected: usize },
    /// A kernel was loaded on another GPU.
    #[error("`{kernel}` was loaded on another GPU: load its module on this one")]
    OtherDevice { kernel: String },
    /// The driver answered with an error.
    #[error("{call} failed: {text} (code {code})")]
    Driver { call: &'static str, code: u32, text: String },
}

/// Turns the driver's answer into ours.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, since it answered; it writes a pointer to a string of its own that is never freed.
    let known = unsafe { cuGetErrorString(result, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    // SAFETY: a known code's text is a terminated string, checked above.
    let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { "unknown".into() };
    Err(CudaError::Driver { call, code: result as u32, text })
}
