use super::{CollapseArgs, EnterArgs, ExpandArgs, TapArgs};
use tf_device::cpu::CpuQueue;

pub(super) fn run_enter(_queue: &mut CpuQueue, _args: EnterArgs<'_>) {}
pub(super) fn run_expand(_queue: &mut CpuQueue, _args: ExpandArgs<'_>) {}
pub(super) fn run_collapse(_queue: &mut CpuQueue, _args: CollapseArgs<'_>) {}
pub(super) fn run_tap(_queue: &mut CpuQueue, _args: TapArgs<'_>) {}
