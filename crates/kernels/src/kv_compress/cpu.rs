use super::Args;
use tf_device::cpu::CpuQueue;

pub(super) fn run(_queue: &mut CpuQueue, _args: Args<'_>) {}
