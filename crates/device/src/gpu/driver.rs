//! What a backend has to bring.

use super::rounds::{Counts, Giving, RoundTimes};
use super::{Backend, Program, Tuning};
use crate::{HostBytes, LaunchError};
use std::fmt::Debug;

/// What a device can take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuLimits {
    /// Threads of a group.
    pub threads_max: u32,
    /// Shared (threadgroup) memory of a group, static and dynamic together.
    pub shared_bytes_max: u32,
    /// Buffers of a launch, its constants included.
    pub buffers_max: u32,
    /// Multiprocessors or GPU cores: how many groups run at once, at least.
    pub units: u32,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Which code it runs: `90a` and the like for CUDA, the GPU family for Metal (`apple9`).
    pub target: String,
}

/// A piece of a device's memory, in the driver's own terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block(pub u64);

/// Bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub block: Block,
    pub first: usize,
    pub bytes: usize,
}

/// One argument of a call, in the order of the entry's parameters.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    Read(Span),
    Write(Span),
    /// Host bytes, to be copied before the driver returns.
    Bytes(&'a [u8]),
    /// Not read and not written by this launch.
    Missing,
}

/// A launch whose buffers are resolved and whose geometry is within the limits.
#[derive(Debug)]
pub struct Call<'a> {
    pub program: &'static Program,
    pub entry: &'static str,
    pub arguments: &'a [Argument<'a>],
    /// The constants, by value: the entry's last parameter.
    pub shape: &'a [u8],
    pub groups: u32,
    pub threads: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    pub tuning: Tuning,
    /// May run beside the launches behind it that touch nothing of it: see [`super::GpuQueue::beside`].
    pub to_side: bool,
}

/// One device and its stream. Everything runs in the order in which it was given; `read`, `free` and `finish` wait.
///
/// A driver may collect launches into rounds: they then start with the next `submit`, or with the next call that isn't a
/// launch.
///
/// Callers have checked every range against the block's length.
pub trait Driver: Debug + Send + Sync {
    /// Whose code it runs.
    fn backend(&self) -> Backend;

    /// The name that the vendor gave the device.
    fn name(&self) -> &str;

    /// What a launch may ask for.
    fn limits(&self) -> &GpuLimits;

    /// Bytes that could be allocated now.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn free_bytes(&self) -> Result<u64, LaunchError>;

    /// `bytes` zero bytes (more than none), aligned to 256.
    ///
    /// # Errors
    /// [`LaunchError::DeviceMemory`] with the figures.
    fn allocate(&self, bytes: usize) -> Result<Block, LaunchError>;

    /// A block over host bytes that stay where they are, and where they start in it. `None` where the device needs a copy, or
    /// nobody keeps them. The driver holds their keeper until the block is freed and its work is done; launches only read it.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn map(&self, _host: &HostBytes<'_>, _element_bytes: usize) -> Result<Option<(Block, usize)>, LaunchError> {
        Ok(None)
    }

    /// Gives a block back once, after everything that uses it.
    fn free(&self, block: Block);

    /// Puts a launch into the stream.
    ///
    /// # Errors
    /// [`LaunchError::NoKernel`] where the program has no such entry; [`LaunchError::Device`], also for launches that were
    /// collected before it.
    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError>;

    /// Hears of a launch that is beyond the limits and will not come: for whoever counts what launches ask for.
    fn refused(&self, _call: &Call<'_>) {}

    /// Copies between ranges that do not overlap, of equal length.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError>;

    /// Writes zero bytes.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn zero(&self, span: Span) -> Result<(), LaunchError>;

    /// Copies to the host, after everything given before.
    ///
    /// # Errors
    /// [`LaunchError::Device`]; failures of earlier launches show here too.
    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError>;

    /// Copies from the host; `from` may be changed as soon as this returns.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError>;

    /// Waits until everything is done.
    ///
    /// # Errors
    /// [`LaunchError::Device`]; failures of earlier launches show here.
    fn finish(&self) -> Result<(), LaunchError>;

    /// The end of a round: starts what was collected. Waits for nothing that was given since the round before last.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn submit(&self) -> Result<(), LaunchError> {
        Ok(())
    }

    /// When the launches of a round start, from now on; for comparisons.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn give(&self, _giving: Giving) -> Result<(), LaunchError> {
        Ok(())
    }

    /// What became of collected launches so far.
    fn round_counts(&self) -> Counts {
        Counts::default()
    }

    /// Starts what was collected, then says where its time goes; `None` where nothing is collected. Each time is a median of
    /// `repetitions` runs. Buffers that the launches write hold anything afterwards.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    fn time_round(&self, _repetitions: u32) -> Result<Option<RoundTimes>, LaunchError> {
        Ok(None)
    }

    /// The CUDA device, for what only CUDA has. Collected launches are not in its stream yet.
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&crate::cuda::Gpu> {
        None
    }
}
