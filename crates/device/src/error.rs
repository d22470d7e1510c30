//! Why a launch or an allocation was refused.

use crate::gpu::Backend;

/// Nothing was launched and no output was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// A size is beyond what the kernel family or the device takes.
    #[error("{what} is {found}, and this kernel takes at most {max}")]
    Limit { what: &'static str, found: usize, max: usize },
    /// An argument's length or dimension disagrees with the others.
    #[error("{what} is {found}, and the other arguments need {expected}")]
    Shape { what: &'static str, found: usize, expected: usize },
    /// The host has no room.
    #[error("no memory for a buffer of {bytes} bytes; choose a smaller context, fewer slots or a smaller model")]
    Memory { bytes: usize },
    /// A GPU has no room.
    #[error(
        "{device} has no memory for a buffer of {bytes} bytes: {free} of {total} bytes are free; stop other programs on it, or \
         choose a smaller context, fewer slots or a smaller model"
    )]
    DeviceMemory { device: String, bytes: usize, free: u64, total: u64 },
    /// The family has no code for this backend, or its code has no such entry.
    #[error("the kernels of `{program}` have no entry `{entry}` for {backend}")]
    NoKernel { program: &'static str, entry: &'static str, backend: Backend },
    /// The device failed, now or in an earlier launch; everything after that is void.
    #[error("{device} failed: {text}")]
    Device { device: String, text: String },
}

impl LaunchError {
    /// `Ok` when `found` equals `expected`.
    pub fn check_shape(what: &'static str, found: usize, expected: usize) -> Result<(), LaunchError> {
        if found == expected { Ok(()) } else { Err(LaunchError::Shape { what, found, expected }) }
    }

    /// `Ok` when `found` is at least `expected`: for buffers made for the largest launch.
    pub fn check_room(what: &'static str, found: usize, expected: usize) -> Result<(), LaunchError> {
        if found >= expected { Ok(()) } else { Err(LaunchError::Shape { what, found, expected }) }
    }

    /// `Ok` when `found` is at most `max`.
    pub fn check_limit(what: &'static str, found: usize, max: usize) -> Result<(), LaunchError> {
        if found <= max { Ok(()) } else { Err(LaunchError::Limit { what, found, max }) }
    }
}
