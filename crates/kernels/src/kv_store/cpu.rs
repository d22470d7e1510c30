use super::{Args, RingArgs};
use tf_device::cpu::CpuQueue;

pub(super) fn run(_queue: &mut CpuQueue, _args: Args<'_>) {}
pub(super) fn run_ring(_queue: &mut CpuQueue, _args: RingArgs<'_>) {}
