//! The launch on a GPU: one group a draw. What a draw asks for becomes words that the kernel reads; its lists are gathered
//! on the host, since only it has the history of a reply.

use super::{Args, Draw, Drawn, RowError, Scratch};
use crate::gpu::program;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};
use tf_device::{Buffer, LaunchError};
use tf_numerics::draw::Threshold;

static PROGRAM: Program = program("sample", Some(include_str!("kernel.metal")), true);

/// Threads of a group: the more, the sooner a row is through.
const THREADS_MAX: u32 = 1024;
/// As the CUDA kernel was compiled for.
const CUDA_THREADS: u32 = 512;
/// As the kernel's.
const NONE: u32 = u32::MAX;
/// Words of a `Result` of the kernel, and of a `Listed`.
const RESULT_WORDS: usize = 5;
const LISTED_WORDS: usize = 2;

/// What the host hands to the kernel, kept from launch to launch.
#[derive(Debug, Default)]
pub(super) struct Encoded {
    /// `struct Draw`, one after the other.
    draws: Vec<u32>,
    /// The lists that they point into.
    words: Vec<u32>,
    /// For each token, its count in the reply, with bit 31 set where prompt or reply have it. All zero between draws.
    counts: Vec<u32>,
    touched: Vec<u32>,
}

impl Encoded {
    fn clear(&mut self) {
        self.draws.clear();
        self.words.clear();
        // A list is never empty memory.
        self.words.push(0);
    }

    /// Appends a draw whose likeliest tokens go to `top`, and whose token also goes to `token`.
    fn push(&mut self, draw: &Draw<'_>, vocab: usize, top: (usize, usize), token: u32) {
        let settings = draw.settings;
        let bias = self.words.len();
        self.words.extend(settings.logit_bias.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]));
        let seen = self.words.len();
        let seen_count = if settings.needs_history() { self.push_history(draw, vocab) } else { 0 };
        let allowed = self.words.len();
        self.words.extend_from_slice(draw.allowed.unwrap_or(&[]));
        let masked = self.words.len();
        let masked_ids = if draw.reply_count < settings.masked_before { settings.masked } else { &[] };
        self.words.extend_from_slice(masked_ids);

        let top_p = settings.top_p.max(0.0);
        let filters = [top_p < 1.0, draw.logprobs.is_some(), draw.next.is_some()];
        let filters = filters.iter().enumerate().fold(0, |bits, (bit, on)| bits | u32::from(*on) << bit);
        let share = if top_p < 1.0 { Threshold::share_of(top_p) } else { 0 };
        self.draws.extend([draw.row as u32, draw.position, settings.seed as u32, (settings.seed >> 32) as u32]);
        self.draws.extend([settings.temperature.to_bits(), settings.min_p.to_bits()]);
        self.draws.extend([settings.top_k, share, filters, draw.next.unwrap_or(0)]);
        let penalties = [settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty];
        self.draws.extend(penalties.map(f32::to_bits));
        self.draws.extend([bias as u32, settings.logit_bias.len() as u32, seen as u32, seen_count as u32]);
        let allowed_first = if draw.allowed.is_some() { allowed as u32 } else { NONE };
        self.draws.extend([allowed_first, draw.allowed.map_or(0, <[u32]>::len) as u32]);
        self.draws.extend([masked as u32, masked_ids.len() as u32, top.0 as u32, top.1 as u32, token]);
    }

    /// Appends (id, count in the reply) of every token that the penalties meet; how many there are.
    fn push_history(&mut self, draw: &Draw<'_>, vocab: usize) -> usize {
        const SEEN: u32 = 1 << 31;
        self.counts.resize(vocab, 0);
        self.touched.clear();
        let prompt: &[u32] = if draw.settings.repetition_penalty != 1.0 { draw.history.prompt } else { &[] };
        let reply = draw.history.reply.iter().chain(draw.history.window);
        for (&id, count) in prompt.iter().map(|id| (id, 0)).chain(reply.map(|id| (id, 1))) {
            if let Some(entry) = self.counts.get_mut(id as usize) {
                if *entry == 0 {
                    self.touched.push(id);
                }
                *entry = (*entry + count) | SEEN;
            }
        }
        for &id in &self.touched {
            self.words.extend([id, std::mem::take(&mut self.counts[id as usize]) & !SEEN]);
        }
        self.touched.len()
    }
}

/// Waits for the tokens, which the host needs.
pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { logits, vocab, draws, outcomes, top, scratch } = args;
    let encoded = &mut scratch.encoded;
    encoded.clear();
    let mut top_count = 0;
    for draw in draws {
        let count = (draw.logprobs.unwrap_or(0) as usize).min(vocab);
        encoded.push(draw, vocab, (top_count, count), NONE);
        top_count += count;
    }
    let results_bytes = draws.len() * RESULT_WORDS * size_of::<u32>();
    let listed_bytes = top_count.max(1) * LISTED_WORDS * size_of::<u32>();
    let mut results = queue.take_scratch("sample results", results_bytes)?;
    let mut listed = queue.take_scratch("sample top", listed_bytes)?;
    let launched = launch(queue, logits, vocab, encoded, &mut results, &mut listed, Binding::Missing);
    let mut words = vec![0u32; draws.len() * RESULT_WORDS + top_count * LISTED_WORDS];
    let (result_words, listed_words) = words.split_at_mut(draws.len() * RESULT_WORDS);
    let read = launched.and_then(|()| results.read(0, result_words)).and_then(|()| listed.read(0, listed_words));
    queue.keep_scratch("sample results", results);
    queue.keep_scratch("sample top", listed);
    read?;
    let mut top_start = 0;
    for (draw, &[token, status, logprob, next_logprob, found]) in draws.iter().zip(result_words.as_chunks().0) {
        outcomes.push(match status {
            0 => Ok(Drawn {
                token,
                logprob: f32::from_bits(logprob),
                next_logprob: f32::from_bits(next_logprob),
                top_start,
                top_count: found,
            }),
            1 => Err(RowError::NotFinite),
            _ => Err(RowError::NoCandidate),
        });
        top_start += draw.logprobs.unwrap_or(0).min(vocab as u32);
    }
    top.extend(listed_words.as_chunks().0.iter().map(|&[id, logprob]| (id, f32::from_bits(logprob))));
    Ok(())
}

/// Draws into device memory: draw `i`'s token, or 0 where it has none, goes to `tokens[places[i]]`. Waits for nothing.
pub(crate) fn into_tokens<'a>(
    queue: &mut GpuQueue,
    logits: &Buffer,
    vocab: usize,
    draws: impl Iterator<Item = (Draw<'a>, u32)>,
    tokens: &mut Buffer,
    scratch: &mut Scratch,
) -> Result<(), LaunchError> {
    let encoded = &mut scratch.encoded;
    encoded.clear();
    for (draw, place) in draws {
        encoded.push(&draw, vocab, (0, 0), place);
    }
    let bytes = encoded.draws.len() / DRAW_WORDS * RESULT_WORDS * size_of::<u32>();
    let mut results = queue.take_scratch("sample results", bytes)?;
    let mut listed = queue.take_scratch("sample top", LISTED_WORDS * size_of::<u32>())?;
    let launched = launch(queue, logits, vocab, encoded, &mut results, &mut listed, Binding::Write(tokens));
    queue.keep_scratch("sample results", results);
    queue.keep_scratch("sample top", listed);
    launched
}

/// Words of the kernel's `struct Draw`.
const DRAW_WORDS: usize = 24;

fn launch(
    queue: &mut GpuQueue,
    logits: &Buffer,
    vocab: usize,
    encoded: &Encoded,
    results: &mut Buffer,
    listed: &mut Buffer,
    tokens: Binding<'_>,
) -> Result<(), LaunchError> {
    debug_assert!(encoded.draws.len().is_multiple_of(DRAW_WORDS));
    let count = encoded.draws.len() / DRAW_WORDS;
    let mut values = queue.take_scratch("sample values", count * vocab * size_of::<f32>())?;
    let threads = match queue.backend() {
        // A few tokens a thread of a small vocabulary, so that not every thread only waits.
        Backend::Metal => {
            let threads = vocab.div_ceil(64).next_multiple_of(32).clamp(32, THREADS_MAX as usize);
            queue.limits().threads_max.min(threads as u32)
        }
        Backend::Cuda => CUDA_THREADS,
    };
    let launched = queue.launch(Launch {
        program: &PROGRAM,
        entry: "sample",
        bindings: &mut [
            Binding::Read(logits),
            Binding::Bytes(bytes_of(&encoded.draws)),
            Binding::Bytes(bytes_of(&encoded.words)),
            Binding::Write(&mut values),
            Binding::Write(results),
            Binding::Write(listed),
            tokens,
        ],
        shape: ShapeBytes::new().uint(vocab).bytes(),
        groups: u32::try_from(count).unwrap_or(u32::MAX),
        threads,
        shared_bytes: 0,
    });
    queue.keep_scratch("sample values", values);
    launched
}
