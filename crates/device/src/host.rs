//! Host bytes on their way to a device.

use std::any::Any;
use std::sync::Arc;

/// Who keeps bytes in place.
pub type Keeper = Arc<dyn Any + Send + Sync>;

/// Bytes of the host, and who keeps them in place where that is known: a device that shares the host's memory may then read
/// them where they are.
#[derive(Clone, Debug)]
pub struct HostBytes<'a> {
    bytes: &'a [u8],
    keeper: Option<Keeper>,
}

impl<'a> HostBytes<'a> {
    /// Bytes that are part of what `keeper` holds: they stay as they are while it, or a clone of it, lives.
    pub fn kept<T: Any + Send + Sync>(
        keeper: &'a Arc<T>,
        part: impl for<'t> FnOnce(&'t T) -> &'t [u8],
    ) -> HostBytes<'a> {
        HostBytes { bytes: part(keeper), keeper: Some(keeper.clone()) }
    }

    /// As they lie on the host.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Who keeps them in place.
    pub fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_ref()
    }
}

impl<'a> From<&'a [u8]> for HostBytes<'a> {
    fn from(bytes: &'a [u8]) -> HostBytes<'a> {
        HostBytes { bytes, keeper: None }
    }
}

impl<'a> From<&'a Vec<u8>> for HostBytes<'a> {
    fn from(bytes: &'a Vec<u8>) -> HostBytes<'a> {
        HostBytes::from(bytes.as_slice())
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for HostBytes<'a> {
    fn from(bytes: &'a [u8; N]) -> HostBytes<'a> {
        HostBytes::from(bytes.as_slice())
    }
}
