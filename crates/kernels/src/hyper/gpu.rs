use super::{CollapseArgs, EnterArgs, ExpandArgs, TapArgs};
use crate::gpu::{OVERLAP, a_simd_group_each, a_thread_each, count, optional, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("hyper", Some(include_str!("kernel.metal")), true);

/// Outputs of a row's mixes, and beside them its sum of squares.
const ITEMS: usize = super::MIXES + 1;
/// On CUDA up to this many rows have a group for each of their items; more share the weights.
const APART_MAX: usize = 16;
/// Up to this many rows of at most so many columns enter in one launch.
const ENTER_APART_MAX: usize = 5;
const ENTER_APART_HIDDEN_MAX: usize = 5120;
const SHARING_ROWS: usize = 8;
const SHARING_BYTES: u32 = 68_608;
const MIX_THREADS: u32 = 256;
const ROW_THREADS: u32 = 640;
/// Of a row, which its group's threads hold in registers.
const HIDDEN_MAX: usize = 10_240;

/// The constants of a launch; each entry reads its own.
#[derive(Default)]
struct Sizes {
    rows: usize,
    hidden: usize,
    iterations: usize,
    outputs: usize,
    hc_eps: f32,
    norm_eps: f32,
    out_columns: usize,
    out_offset: usize,
}

impl Sizes {
    fn shape(&self) -> ShapeBytes {
        let counts = ShapeBytes::new().uint(self.rows).uint(self.hidden).uint(self.iterations).uint(self.outputs);
        counts.float(self.hc_eps).float(self.norm_eps).uint(self.out_columns).uint(self.out_offset)
    }
}

pub(super) fn run_enter(queue: &mut GpuQueue, args: EnterArgs<'_>) -> Result<(), LaunchError> {
    let sizes = Sizes {
        rows: args.rows,
        hidden: args.hidden,
        iterations: args.constants.iterations as usize,
        outputs: usize::from(args.normed.is_some())
            | usize::from(args.quantised.is_some()) << 1
            | usize::from(args.y.is_some()) << 3,
        hc_eps: args.constants.hc_eps,
        norm_eps: args.constants.norm_eps,
        ..Sizes::default()
    };
    match queue.backend() {
        Backend::Metal => enter_metal(queue, args, &sizes.shape()),
        Backend::Cuda => enter_cuda(queue, args, &sizes.shape()),
    }
}

fn enter_metal(queue: &mut GpuQueue, args: EnterArgs<'_>, shape: &ShapeBytes) -> Result<(), LaunchError> {
    let EnterArgs { y, streams, mix, post, comb, weights, norm, rows, hidden, normed, quantised, scratch, .. } = args;
    if let Some(y) = y {
        run_expand(queue, ExpandArgs { y, streams, post, comb, rows, hidden })?;
    }
    // Two outputs a SIMD group, and the squares.
    let (groups, threads) = a_simd_group_each(rows * (super::MIXES / 2 + 1));
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_products",
            bindings: &mut [Binding::Read(streams), Binding::Read(weights.function), Binding::Write(scratch)],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )?;
    let (groups, threads) = a_simd_group_each(rows);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_finish",
            bindings: &mut [
                Binding::Read(streams),
                Binding::Write(mix),
                Binding::Write(post),
                Binding::Write(comb),
                Binding::Read(weights.base),
                Binding::Read(weights.scale),
                Binding::Read(norm),
                Binding::Read(scratch),
                optional(normed),
                optional(quantised),
                Binding::Missing,
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

fn enter_cuda(queue: &mut GpuQueue, args: EnterArgs<'_>, shape: &ShapeBytes) -> Result<(), LaunchError> {
    let (rows, hidden) = (args.rows, args.hidden);
    LaunchError::check_limit("the hidden size", hidden, HIDDEN_MAX)?;
    // A row of weights and the four streams.
    let apart_bytes = count(2 * 4 * hidden * 4);
    let apart_fits = apart_bytes <= queue.limits().shared_bytes_max;
    if rows <= ENTER_APART_MAX && hidden <= ENTER_APART_HIDDEN_MAX && apart_fits {
        return enter_apart(queue, args, shape, apart_bytes);
    }
    let EnterArgs { y, streams, mix, post, comb, weights, norm, normed, quantised, scratch, .. } = args;
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_enter",
            bindings: &mut [
                y.map_or(Binding::Missing, Binding::Read),
                Binding::Write(streams),
                Binding::Read(mix),
                Binding::Read(post),
                Binding::Read(comb),
                Binding::Read(norm),
                optional(normed),
                optional(quantised),
                Binding::Write(scratch),
            ],
            shape: shape.bytes(),
            groups: count(rows),
            threads: ROW_THREADS,
            shared_bytes: count(4 * hidden),
        },
        OVERLAP,
    )?;
    let mut bindings = vec![
        Binding::Read(streams),
        Binding::Write(mix),
        Binding::Write(post),
        Binding::Write(comb),
        Binding::Read(weights.function),
        Binding::Read(weights.base),
        Binding::Read(weights.scale),
    ];
    let (entry, groups, shared_bytes) = if rows <= APART_MAX && apart_fits {
        bindings.push(Binding::Write(scratch));
        ("hyper_mixes_one", count(rows * ITEMS), apart_bytes)
    } else {
        ("hyper_mixes", count(rows.div_ceil(SHARING_ROWS)), SHARING_BYTES)
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry,
            bindings: &mut bindings,
            shape: shape.bytes(),
            groups,
            threads: MIX_THREADS,
            shared_bytes,
        },
        OVERLAP,
    )
}

/// Everything in one launch.
fn enter_apart(
    queue: &mut GpuQueue,
    args: EnterArgs<'_>,
    shape: &ShapeBytes,
    shared_bytes: u32,
) -> Result<(), LaunchError> {
    let EnterArgs { y, streams, mix, post, comb, weights, norm, rows, normed, quantised, .. } = args;
    let mut arrivals = queue.take_counters("hyper", rows * 32)?;
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_enter_apart",
            bindings: &mut [
                y.map_or(Binding::Missing, Binding::Read),
                Binding::Write(streams),
                Binding::Write(mix),
                Binding::Write(post),
                Binding::Write(comb),
                Binding::Read(weights.function),
                Binding::Read(weights.base),
                Binding::Read(weights.scale),
                Binding::Read(norm),
                optional(normed),
                optional(quantised),
                Binding::Write(&mut arrivals),
            ],
            shape: shape.bytes(),
            groups: count(rows * (ITEMS + 1)),
            threads: ROW_THREADS,
            shared_bytes,
        },
        OVERLAP,
    )?;
    queue.keep_counters("hyper", arrivals);
    Ok(())
}

pub(super) fn run_expand(queue: &mut GpuQueue, args: ExpandArgs<'_>) -> Result<(), LaunchError> {
    let ExpandArgs { y, streams, post, comb, rows, hidden } = args;
    let (groups, threads) = a_thread_each(rows * hidden);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_expand",
            bindings: &mut [Binding::Read(y), Binding::Write(streams), Binding::Read(post), Binding::Read(comb)],
            shape: Sizes { rows, hidden, ..Sizes::default() }.shape().bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

pub(super) fn run_collapse(queue: &mut GpuQueue, args: CollapseArgs<'_>) -> Result<(), LaunchError> {
    let CollapseArgs { streams, mix, norm, norm_eps, rows, hidden, collapsed, normed, quantised } = args;
    let outputs =
        usize::from(normed.is_some()) | usize::from(quantised.is_some()) << 1 | usize::from(collapsed.is_some()) << 2;
    let ((groups, threads), shared_bytes) = match queue.backend() {
        Backend::Metal => (a_simd_group_each(rows), 0),
        Backend::Cuda => {
            LaunchError::check_limit("the hidden size", hidden, HIDDEN_MAX)?;
            ((count(rows), ROW_THREADS), count(4 * hidden))
        }
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_collapse",
            bindings: &mut [
                Binding::Read(streams),
                Binding::Read(mix),
                Binding::Read(norm),
                optional(normed),
                optional(quantised),
                optional(collapsed),
            ],
            shape: Sizes { rows, hidden, outputs, norm_eps, ..Sizes::default() }.shape().bytes(),
            groups,
            threads,
            shared_bytes,
        },
        OVERLAP,
    )
}

pub(super) fn run_tap(queue: &mut GpuQueue, args: TapArgs<'_>) -> Result<(), LaunchError> {
    let TapArgs { streams, rows, hidden, out, out_columns, out_offset, quantise } = args;
    let outputs = usize::from(quantise) << 1;
    let (groups, threads) = match queue.backend() {
        Backend::Metal => a_simd_group_each(rows),
        Backend::Cuda => a_thread_each(rows * hidden / 4),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_tap",
            bindings: &mut [Binding::Read(streams), Binding::Write(out)],
            shape: Sizes { rows, hidden, outputs, out_columns, out_offset, ..Sizes::default() }.shape().bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
