//! What the system says of itself and of its GPUs.

use crate::apple::chip::{Found, version};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLCopyAllDevices, MTLDevice, MTLGPUFamily};
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

pub(super) type DeviceObject = Retained<ProtocolObject<dyn MTLDevice>>;

/// Families that may exist, the ones to come included.
const FAMILIES: std::ops::RangeInclusive<u32> = 1..=32;
/// What Metal adds to an Apple family's number.
const FAMILY_BASE: u32 = 1000;

/// Every Metal device of this Mac. Asks for all rather than for the default one, which programs without a window may not get.
pub(super) fn devices() -> Vec<(DeviceObject, Found)> {
    let macos = version(&text_of(c"kern.osproductversion").unwrap_or_default());
    let all = MTLCopyAllDevices();
    let described = all.iter().map(|device| {
        let found = Found {
            name: device.name().to_string(),
            family: family_of(&device),
            unified: device.hasUnifiedMemory(),
            macos,
        };
        (device, found)
    });
    described.collect()
}

fn family_of(device: &ProtocolObject<dyn MTLDevice>) -> Option<u32> {
    FAMILIES.rev().find(|family| device.supportsFamily(MTLGPUFamily((FAMILY_BASE + family) as isize)))
}

/// The build of the system: `24A335`.
pub(super) fn build() -> String {
    text_of(c"kern.osversion").unwrap_or_default()
}

/// Bytes of a page of memory.
pub(super) fn page_bytes() -> usize {
    // SAFETY: takes a number and gives one.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| *bytes > 0).unwrap_or(16 << 10)
}

fn text_of(name: &CStr) -> Option<String> {
    let mut bytes = [0_u8; 64];
    let mut length = bytes.len();
    // SAFETY: the system writes at most `length` bytes and says how many; nothing is set.
    let result =
        unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut length, std::ptr::null_mut(), 0) };
    let text = bytes.get(..length).filter(|_| result == 0)?;
    Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
}

/// The folder for files of this user that may be lost.
pub(super) fn cache_folder() -> Option<PathBuf> {
    let mut bytes = [0_u8; 1024];
    // SAFETY: the system writes at most the given length, its terminator included, and says how long the text is.
    let length = unsafe { libc::confstr(libc::_CS_DARWIN_USER_CACHE_DIR, bytes.as_mut_ptr().cast(), bytes.len()) };
    let text = bytes.get(..length.checked_sub(1)?)?;
    Some(PathBuf::from(OsStr::from_bytes(text)))
}
