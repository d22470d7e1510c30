//! Why a launch or an allocation was refused.

/// Nothing was launched and no output was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// A size is beyond what the kernel family or the device takes.
    #[error("{what} is {found}, and this kernel takes at most {max}")]
    Limit { what: &'static str, found: usize, max: usize },
    /// An argument's length or dimension disagrees with the others.
    #[error("{what} is {found}, and the other arguments need {expected}")]
    Shape { what: &'static str, found: usize, expected: usize },
    /// The device has no room.
    #[error("no memory for a buffer of {bytes} bytes; choose a smaller context, fewer slots or a smaller model")]
    Memory { bytes: usize },
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
