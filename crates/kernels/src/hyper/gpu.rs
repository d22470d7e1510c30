use super::{CollapseArgs, EnterArgs, ExpandArgs, TapArgs};
use crate::gpu::{a_simd_group_each, a_thread_each, count, optional, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("hyper", Some(include_str!("kernel.metal")), true);

/// Work items of `hyper_products` a row: pairs of outputs, and the sum of squares.
const ITEMS: usize = 13;
/// Rows that share the weights of a group on CUDA, and up to how many rows none do.
const CUDA_ROWS: usize = 8;
const CUDA_APART_MAX: usize = 4;
const CUDA_THREADS: u32 = 256;

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
    let EnterArgs { y, streams, mix, post, comb, weights, norm, constants, rows, hidden, .. } = args;
    let EnterArgs { normed, quantised, scratch, .. } = args;
    if let Some(y) = y {
        run_expand(queue, ExpandArgs { y, streams, post, comb, rows, hidden })?;
    }
    let sizes = Sizes {
        rows,
        hidden,
        iterations: constants.iterations as usize,
        outputs: usize::from(normed.is_some()) | usize::from(quantised.is_some()) << 1,
        hc_eps: constants.hc_eps,
        norm_eps: constants.norm_eps,
        ..Sizes::default()
    };
    let shape = sizes.shape();
    let (entry, (groups, threads)) = match queue.backend() {
        Backend::Metal => ("hyper_products", a_simd_group_each(rows * ITEMS)),
        Backend::Cuda if rows <= CUDA_APART_MAX => ("hyper_products_one", (count(rows * ITEMS), CUDA_THREADS)),
        Backend::Cuda => ("hyper_products", (count(rows.div_ceil(CUDA_ROWS) * ITEMS), CUDA_THREADS)),
    };
    queue.launch(Launch {
        program: &PROGRAM,
        entry,
        bindings: &mut [Binding::Read(streams), Binding::Read(weights.function), Binding::Write(scratch)],
        shape: shape.bytes(),
        groups,
        threads,
        shared_bytes: 0,
    })?;
    let (groups, threads, shared_bytes) = a_row(queue, rows, hidden);
    queue.launch(Launch {
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
        shared_bytes,
    })
}

pub(super) fn run_expand(queue: &mut GpuQueue, args: ExpandArgs<'_>) -> Result<(), LaunchError> {
    let ExpandArgs { y, streams, post, comb, rows, hidden } = args;
    let (groups, threads) = a_thread_each(rows * hidden);
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "hyper_expand",
        bindings: &mut [Binding::Read(y), Binding::Write(streams), Binding::Read(post), Binding::Read(comb)],
        shape: Sizes { rows, hidden, ..Sizes::default() }.shape().bytes(),
        groups,
        threads,
        shared_bytes: 0,
    })
}

pub(super) fn run_collapse(queue: &mut GpuQueue, args: CollapseArgs<'_>) -> Result<(), LaunchError> {
    let CollapseArgs { streams, mix, norm, norm_eps, rows, hidden, collapsed, normed, quantised } = args;
    let outputs =
        usize::from(normed.is_some()) | usize::from(quantised.is_some()) << 1 | usize::from(collapsed.is_some()) << 2;
    let (groups, threads, shared_bytes) = a_row(queue, rows, hidden);
    queue.launch(Launch {
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
    })
}

pub(super) fn run_tap(queue: &mut GpuQueue, args: TapArgs<'_>) -> Result<(), LaunchError> {
    let TapArgs { streams, rows, hidden, out, out_columns, out_offset, quantise } = args;
    let outputs = usize::from(quantise) << 1;
    let (groups, threads) = a_simd_group_each(rows);
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "hyper_tap",
        bindings: &mut [Binding::Read(streams), Binding::Write(out)],
        shape: Sizes { rows, hidden, outputs, out_columns, out_offset, ..Sizes::default() }.shape().bytes(),
        groups,
        threads,
        shared_bytes: 0,
    })
}

/// Groups, threads and memory of the launches that finish a row.
fn a_row(queue: &GpuQueue, rows: usize, hidden: usize) -> (u32, u32, u32) {
    match queue.backend() {
        Backend::Metal => {
            let (groups, threads) = a_simd_group_each(rows);
            (groups, threads, 0)
        }
        Backend::Cuda => (count(rows), CUDA_THREADS, count(4 * hidden)),
    }
}
