//! Runs unmodified Metal sources on a CPU, to prove kernels where no Apple hardware is at hand. Test-only.
//!
//! A source becomes C++ by a pass over its tokens ([`prepass`]), is compiled by clang at test time and loaded
//! ([`Program::build`]); one fiber runs one GPU thread ([`Program::run`]). A launch runs under several fiber orders, in a
//! plain build and in one that checks every access; all must give the same bytes. Found at once: races between barriers,
//! reads of uninitialised threadgroup memory, accesses out of bounds or misaligned, writes to read-only buffers, barriers
//! and SIMD-group operations in divergent flow, launches beyond a chip's limits ([`chips`]), lost address spaces.
//!
//! CUDA sources without inline PTX run on the same fibers ([`cuda`]).
//!
//! No speed, registers or occupancy; float32 subnormals are kept, which a GPU may flush. Needs x86-64 Linux.

pub mod chips;
mod compile;
pub mod cuda;
mod device;
pub mod prepass;
mod run;

pub use compile::{BuildError, COMPILER, INSTALL, Program, compiler_found};
pub use device::{
    Launched, Log, Rigour, Settings, cuda_device, device, device_of, device_with, is_defect, large_cuda_device,
};
pub use run::{Argument, Launch, Order, Report, RunError, SCHEDULES, Schedule};
