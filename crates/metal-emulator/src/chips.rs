//! What a launch may ask of each Apple chip. Source: Apple's Metal feature set tables (families Apple 7 to 10).
//!
//! The limits below are the same for all families so far; they are kept a row a chip, so that a difference has a place.
//! Threads that remain after a kernel's register use are known to the device's pipeline only.

/// The limits of one chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chip {
    pub name: &'static str,
    pub threads_max: u32,
    pub threadgroup_bytes_max: u64,
    pub simd_width: u32,
    pub buffers_max: u32,
}

const fn chip(name: &'static str) -> Chip {
    Chip { name, threads_max: 1024, threadgroup_bytes_max: 32 << 10, simd_width: 32, buffers_max: 31 }
}

pub const CHIPS: [Chip; 5] = [chip("M1"), chip("M2"), chip("M3"), chip("M4"), chip("M5")];

/// Why a chip can't run a launch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{chip}: the launch of {kernel} has {found} {what}, at most {max}; choose another geometry")]
pub struct LimitError {
    pub chip: &'static str,
    pub kernel: String,
    pub what: &'static str,
    pub found: u64,
    pub max: u64,
}

impl Chip {
    /// Checks what the host decides; threadgroup memory includes the arrays that the kernel declares.
    ///
    /// # Errors
    /// The first limit that is exceeded.
    pub fn check(&self, kernel: &str, threads: u64, threadgroup_bytes: u64, buffers: u64) -> Result<(), LimitError> {
        let limits = [
            ("threads a threadgroup", threads, u64::from(self.threads_max)),
            ("bytes of threadgroup memory", threadgroup_bytes, self.threadgroup_bytes_max),
            ("buffers", buffers, u64::from(self.buffers_max)),
        ];
        for (what, found, max) in limits {
            if found > max {
                return Err(LimitError { chip: self.name, kernel: kernel.into(), what, found, max });
            }
        }
        Ok(())
    }
}
