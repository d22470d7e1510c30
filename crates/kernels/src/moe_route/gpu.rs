use super::Args;
use crate::gpu::{OVERLAP, a_simd_group_each, count, mark_bytes, marks, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("moe_route", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { logits, bias, bias_image, image, rows, experts, top_k, factor, chosen, weights } = args;
    let image = mark_bytes(if image.contains(&true) { image } else { &[] });
    let has_images = usize::from(!image.is_empty());
    let shape = ShapeBytes::new().uint(rows).uint(experts).uint(top_k).float(factor).uint(has_images);
    let (groups, threads) = match queue.backend() {
        Backend::Metal => a_simd_group_each(rows),
        Backend::Cuda => (count(rows), 512),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "moe_route",
            bindings: &mut [
                Binding::Read(logits),
                Binding::Read(bias),
                bias_image.map_or(Binding::Missing, Binding::Read),
                marks(&image),
                Binding::Write(chosen),
                Binding::Write(weights),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
