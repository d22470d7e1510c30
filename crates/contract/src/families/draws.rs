//! The cases of the draw and of the draft head, whose results the host reads. Their time is the host's, the wait included.

use super::Role::{Bytes, Floats, Input, Work};
use super::cases::{Make, Random, bytes, zeros};
use super::{Case, Sizes};
use tf_kernels::draft_head::{self, Sampled, pack};
use tf_kernels::sample::{self, Draw, History, Scratch, Settings};
use tf_numerics::bf16;

pub const ALL: &[Make] = &[draw_greedy, draw_sampled, draw_filtered, draw_likeliest, chain];

/// The release's vocabulary is drawn from whole.
fn vocabulary(sizes: Sizes) -> usize {
    if sizes.name == "release" { 129_280 } else { sizes.vocabulary }
}

const SAMPLED: Settings<'static> = Settings { temperature: 0.8, seed: 0x0123_4567_89ab_cdef, ..Settings::GREEDY };
const FILTERED: Settings<'static> = Settings { top_k: 60, top_p: 0.9, min_p: 0.01, ..SAMPLED };

fn draw_greedy(sizes: Sizes, rows: usize, _: usize) -> Vec<Case> {
    draw("sample/greedy", sizes, rows, Settings::GREEDY, None)
}

fn draw_sampled(sizes: Sizes, rows: usize, _: usize) -> Vec<Case> {
    draw("sample/sampled", sizes, rows, SAMPLED, None)
}

fn draw_filtered(sizes: Sizes, rows: usize, _: usize) -> Vec<Case> {
    draw("sample/filtered", sizes, rows, FILTERED, None)
}

fn draw_likeliest(sizes: Sizes, rows: usize, _: usize) -> Vec<Case> {
    draw("sample/likeliest", sizes, rows, Settings { top_p: 0.95, ..SAMPLED }, Some(20))
}

/// Words of a row: token, two log-probabilities, and pairs of the likeliest.
fn draw(
    family: &'static str,
    sizes: Sizes,
    rows: usize,
    settings: Settings<'static>,
    logprobs: Option<u32>,
) -> Vec<Case> {
    let vocab = vocabulary(sizes);
    let mut random = Random(rows as u64 + 77);
    let mut logits = random.floats(rows * vocab, 4.0);
    // Some tokens stand out, as in a model's rows, and some are equal.
    for _ in 0..rows * vocab / 50 {
        let at = random.below(rows * vocab);
        logits[at] = (logits[at] * 5.0).round();
    }
    let width = 3 + 2 * logprobs.unwrap_or(0) as usize;
    let run = move |queue: &mut tf_device::Queue, buffers: &mut [tf_device::Buffer]| {
        let of = |row: usize| Draw {
            row,
            position: 900 + row as u32,
            reply_count: 0,
            settings: &settings,
            history: History::default(),
            allowed: None,
            logprobs,
            next: logprobs.map(|_| 3),
        };
        let draws: Vec<Draw<'_>> = (0..rows).map(of).collect();
        let (mut outcomes, mut top, mut scratch) = (Vec::new(), Vec::new(), Scratch::default());
        let [logits, found] = buffers else { panic!("a draw has two buffers") };
        let args = sample::Args {
            logits,
            vocab,
            draws: &draws,
            outcomes: &mut outcomes,
            top: &mut top,
            scratch: &mut scratch,
        };
        sample::launch(queue, args)?;
        let mut words = vec![u32::MAX; rows * width];
        for (row, outcome) in words.chunks_mut(width).zip(&outcomes) {
            let Ok(drawn) = outcome else { continue };
            let listed = &top[drawn.top_start as usize..][..drawn.top_count as usize];
            let listed = listed.iter().flat_map(|(id, logprob)| [*id, logprob.to_bits()]);
            let head = [drawn.token, drawn.logprob.to_bits(), drawn.next_logprob.to_bits()];
            row.iter_mut().zip(head.into_iter().chain(listed)).for_each(|(word, value)| *word = value);
        }
        queue.write(found, 0, &words)
    };
    let buffers = vec![(Input, bytes(&logits)), (Bytes, zeros(rows * width))];
    let moved_bytes = logits.len() * 4;
    vec![Case { family, rows, buffers, moved_bytes, waits: true, mirror: None, run: Box::new(run) }]
}

/// A chain of five proposals; every third sequence is sampled.
fn chain(sizes: Sizes, rows: usize, _: usize) -> Vec<Case> {
    let (vocab, steps) = (vocabulary(sizes), 5);
    let sequences = rows.min(8);
    let (rank, hidden) = (if sizes.name == "release" { 256 } else { 32 }, sizes.hidden);
    let mut random = Random(rows as u64 + 78);
    let codes = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<u16>>();
    let embed = codes(random.bf16(vocab * rank, 1.0));
    let head = codes(random.bf16(vocab * rank, 1.0));
    let mut packed = vec![0; pack::packed_len(vocab, rank)];
    pack::pack(&head, vocab, rank, &mut packed);
    let anchors: Vec<u32> = (0..sequences).map(|_| random.below(vocab) as u32).collect();
    let run = move |queue: &mut tf_device::Queue, buffers: &mut [tf_device::Buffer]| {
        let [base, hidden_rows, embed, head, proj, logits, found_tokens, found_confidence] = buffers else {
            panic!("a chain has eight buffers")
        };
        let sampled = |sequence: usize| (sequence % 3 == 1).then(|| Sampled::new(SAMPLED, 40 + sequence as u32));
        let (mut tokens, mut confidence) = (vec![0; sequences * steps], vec![0.0; sequences * steps]);
        let args = draft_head::Args {
            base,
            hidden_rows,
            anchors: &anchors,
            embed,
            head,
            proj,
            vocabulary: vocab,
            rank,
            hidden,
            block: steps,
            steps,
            sampled: &sampled,
            logits,
            tokens: &mut tokens,
            confidence: &mut confidence,
            scratch: &mut Scratch::default(),
        };
        draft_head::launch(queue, args)?;
        queue.write(found_tokens, 0, &tokens)?;
        queue.write(found_confidence, 0, &confidence)
    };
    let buffers = vec![
        (Input, bytes(&random.floats(sequences * steps * vocab, 6.0))),
        (Input, bytes(&random.bf16(sequences * steps * hidden, 2.0))),
        (Input, bytes(&embed)),
        (Input, bytes(&packed)),
        (Input, bytes(&random.floats(hidden + rank, 0.5))),
        (Work, zeros(sequences * vocab)),
        (Bytes, zeros(sequences * steps)),
        (Floats, zeros(sequences * steps)),
    ];
    let moved_bytes = steps * (packed.len() * 2 + sequences * vocab * 4);
    let family = "draft_head/chain";
    vec![Case { family, rows: sequences, buffers, moved_bytes, waits: true, mirror: None, run: Box::new(run) }]
}
