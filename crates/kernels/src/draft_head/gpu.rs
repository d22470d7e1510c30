//! The launches on a GPU: all steps of all sequences without a wait, then one read of the proposals.

use super::{Args, Sampled};
use crate::gpu::{THREADS, program};
use crate::sample;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = program("draft_head", Some(include_str!("kernel.metal")), true);
/// Tokens of one SIMD group.
const VECTOR: usize = 32;
/// Threads of a CUDA block that looks at a whole row of logits.
const CUDA_ROW_THREADS: u32 = 512;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_, '_>) -> Result<(), LaunchError> {
    let bytes = args.anchors.len() * args.steps * size_of::<u32>();
    let mut tokens = queue.take_scratch("draft tokens", bytes)?;
    let mut confidence = queue.take_scratch("draft confidence", bytes)?;
    let Args { tokens: host_tokens, confidence: host_confidence, .. } = args;
    let args = Args { tokens: &mut [], confidence: &mut [], ..args };
    let result = steps(queue, args, &mut tokens, &mut confidence)
        .and_then(|()| tokens.read(0, host_tokens))
        .and_then(|()| confidence.read(0, host_confidence));
    queue.keep_scratch("draft tokens", tokens);
    queue.keep_scratch("draft confidence", confidence);
    result
}

fn steps(
    queue: &mut GpuQueue,
    args: Args<'_, '_>,
    tokens: &mut Buffer,
    confidence: &mut Buffer,
) -> Result<(), LaunchError> {
    let Args { base, hidden_rows, anchors, embed, head, proj, vocabulary, rank, hidden, block, steps, .. } = args;
    let Args { sampled, logits, scratch, .. } = args;
    let sequences = anchors.len();
    let greedy: Vec<u32> = (0..sequences).map(|sequence| u32::from(sampled(sequence).is_none())).collect();
    // More groups on CUDA, whose blocks each stay on one multiprocessor.
    let is_cuda = queue.backend() == Backend::Cuda;
    let threads = if is_cuda { 128 } else { THREADS };
    for step in 0..steps {
        let shape = ShapeBytes::new().uint(sequences).uint(vocabulary).uint(rank).uint(hidden);
        let shape = shape.uint(block).uint(steps).uint(step);
        let launch_groups = |queue: &mut GpuQueue, entry, (groups, threads), bindings: &mut [Binding<'_>]| {
            let shape = shape.bytes();
            queue.launch(Launch { program: &PROGRAM, entry, bindings, shape, groups, threads, shared_bytes: 0 })
        };
        let by_vector = |items: usize| ((items as u32).div_ceil(threads / 32), threads);
        let launch = |queue: &mut GpuQueue, entry, items, bindings: &mut [Binding<'_>]| {
            launch_groups(queue, entry, by_vector(items), bindings)
        };
        let anchors = || Binding::Bytes(bytes_of(anchors));
        launch(
            queue,
            "draft_logits",
            vocabulary.div_ceil(VECTOR),
            &mut [
                Binding::Read(base),
                anchors(),
                Binding::Read(tokens),
                Binding::Read(embed),
                Binding::Read(head),
                Binding::Write(logits),
            ],
        )?;
        launch(
            queue,
            "draft_confidence",
            sequences,
            &mut [
                Binding::Read(hidden_rows),
                anchors(),
                Binding::Read(tokens),
                Binding::Read(embed),
                Binding::Read(proj),
                Binding::Write(confidence),
            ],
        )?;
        if greedy.contains(&1) {
            let greedy = Binding::Bytes(bytes_of(&greedy));
            // A whole block looks at a row on CUDA.
            let groups = if is_cuda { (sequences as u32, CUDA_ROW_THREADS) } else { by_vector(sequences) };
            let bindings = &mut [Binding::Read(logits), greedy, Binding::Write(tokens)];
            launch_groups(queue, "draft_argmax", groups, bindings)?;
        }
        if greedy.contains(&0) {
            let of = |sequence: usize| Some((sequence, sampled(sequence)?));
            let list: Vec<(usize, Sampled<'_>)> = (0..sequences).filter_map(of).collect();
            let draws = list
                .iter()
                .map(|(sequence, sampled)| (sampled.draw(*sequence, step), (sequence * steps + step) as u32));
            sample::into_tokens(queue, logits, vocabulary, draws, tokens, scratch)?;
        }
    }
    Ok(())
}
