//! Sixteen tokens a vector; several vectors of every sequence are computed while their part of the head lies in the cache.

use super::{Args, RANK_MAX};
use crate::order::sum_products;
use crate::parallel::threads_for;
use crate::sample::draw_one;
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::bf16;
use tf_numerics::lanes::{Kernel, Lanes, Level, Mask, WIDTH, dispatch};

/// Vectors of tokens in one tile.
const TILE: usize = 4;

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_, '_>) {
    let Args { base, hidden_rows, anchors, embed, head, proj, vocabulary, rank, hidden, block, steps, .. } = args;
    let (base, hidden_rows, embed) = (base.f32(), hidden_rows.f32(), embed.u16());
    let level = queue.level;
    let threads = threads_for(anchors.len() * vocabulary * rank);
    for step in 0..steps {
        let job = Step {
            base,
            anchors,
            proposals: &*args.tokens,
            embed,
            head: head.u16(),
            vocabulary,
            rank,
            block,
            steps,
            step,
            logits: Parts::new(&mut args.logits.f32_mut()[..anchors.len() * vocabulary]),
        };
        queue.pool.run_on(threads, |index, count| {
            let vectors = split(vocabulary.div_ceil(WIDTH), count, index, TILE);
            dispatch(level, Vectors { job: &job, vectors });
        });
        for s in 0..anchors.len() {
            let at = s * steps + step;
            let previous = previous_token(anchors, args.tokens, steps, s, step);
            let state = &embed[previous as usize * rank..][..rank];
            let hidden_row = &hidden_rows[(s * block + step) * hidden..][..hidden];
            args.confidence[at] = dispatch(level, Confidence { proj: proj.f32(), hidden_row, state });
            let logits = &args.logits.f32()[s * vocabulary..][..vocabulary];
            args.tokens[at] = match (args.sampled)(s) {
                None => argmax(level, logits),
                Some(sampled) => draw_one(level, logits, &sampled.draw(0, step), args.scratch).unwrap_or(0),
            };
        }
    }
}

/// The token in front of step `step` of sequence `s`.
fn previous_token(anchors: &[u32], proposals: &[u32], steps: usize, s: usize, step: usize) -> u32 {
    if step == 0 { anchors[s] } else { proposals[s * steps + step - 1] }
}

struct Step<'a> {
    base: &'a [f32],
    anchors: &'a [u32],
    proposals: &'a [u32],
    embed: &'a [u16],
    head: &'a [u16],
    vocabulary: usize,
    rank: usize,
    block: usize,
    steps: usize,
    step: usize,
    logits: Parts<'a, f32>,
}

struct Vectors<'a> {
    job: &'a Step<'a>,
    vectors: Range<usize>,
}

impl Kernel for Vectors<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Vectors { job, vectors } = self;
        for first in vectors.clone().step_by(TILE) {
            for s in 0..job.anchors.len() {
                if vectors.end - first >= TILE {
                    tile::<L, TILE>(job, s, first);
                } else {
                    for vector in first..vectors.end {
                        tile::<L, 1>(job, s, vector);
                    }
                }
            }
        }
    }
}

/// `V` vectors of tokens of sequence `s`.
#[inline(always)]
fn tile<L: Lanes, const V: usize>(job: &Step<'_>, s: usize, first: usize) {
    let Step { vocabulary, rank, block, step, .. } = *job;
    let previous = previous_token(job.anchors, job.proposals, job.steps, s, step);
    let state = &job.embed[previous as usize * rank..][..rank];
    let mut heads = [&[][..]; V];
    for v in 0..V {
        heads[v] = &job.head[(first + v) * rank * WIDTH..][..rank * WIDTH];
    }
    let mut sums = [L::splat(0.0); V];
    for k in 0..rank {
        let state = L::splat(bf16::to_f32(state[k]));
        for v in 0..V {
            sums[v] = L::load_bf16(&heads[v][k * WIDTH..]).fma(state, sums[v]);
        }
    }
    for v in 0..V {
        let start = (first + v) * WIDTH;
        let count = (vocabulary - start).min(WIDTH);
        let base = &job.base[(s * block + step) * vocabulary + start..][..count];
        let at = s * vocabulary + start;
        // SAFETY: these tokens belong to this thread.
        let out = unsafe { job.logits.part(at..at + count) };
        if count == WIDTH {
            (L::load(base) + sums[v]).store(out);
        } else {
            (L::load_partial(base, 0.0) + sums[v]).store_partial(out);
        }
    }
}

struct Confidence<'a> {
    proj: &'a [f32],
    hidden_row: &'a [f32],
    state: &'a [u16],
}

impl Kernel for Confidence<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        let mut state = [0.0; RANK_MAX];
        let state = &mut state[..self.state.len()];
        bf16::widen(self.state, state);
        let (of_hidden, of_state) = self.proj.split_at(self.hidden_row.len());
        sum_products::<L>(of_hidden, self.hidden_row) + sum_products::<L>(of_state, state)
    }
}

/// The index of the largest value, the smaller one among equals; 0 where nothing is above minus infinity.
fn argmax(level: Level, values: &[f32]) -> u32 {
    dispatch(level, Argmax(values))
}

struct Argmax<'a>(&'a [f32]);

impl Kernel for Argmax<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<L: Lanes>(self) -> u32 {
        let (chunks, rest) = self.0.as_chunks::<WIDTH>();
        let rest = L::load_partial(rest, f32::NAN);
        let mut largest = rest.max(L::splat(f32::NEG_INFINITY));
        for chunk in chunks {
            largest = L::load_array(chunk).max(largest);
        }
        let largest = L::splat(largest.fold_max());
        for (t, chunk) in chunks.iter().enumerate() {
            let equal = L::load_array(chunk).eq(largest).bits();
            if equal != 0 {
                return t as u32 * WIDTH as u32 + equal.trailing_zeros();
            }
        }
        let equal = rest.eq(largest).bits();
        if equal == 0 { 0 } else { chunks.len() as u32 * WIDTH as u32 + equal.trailing_zeros() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_head::{Sampled, launch, pack, reference};
    use crate::sample::{Scratch, Settings};
    use crate::testing::*;
    use tf_device::{LaunchError, Queue};

    struct Setting {
        vocabulary: usize,
        rank: usize,
        hidden: usize,
        block: usize,
        base: Vec<f32>,
        hidden_rows: Vec<f32>,
        embed: Vec<f32>,
        head: Vec<f32>,
        proj: Vec<f32>,
        anchors: Vec<u32>,
    }

    impl Setting {
        fn new(sequences: usize, vocabulary: usize, rank: usize, hidden: usize, block: usize) -> Setting {
            let mut values = Values::new(70);
            Setting {
                vocabulary,
                rank,
                hidden,
                block,
                base: values.uniform(sequences * block * vocabulary, 3.0),
                hidden_rows: values.bf16(sequences * block * hidden, 2.0),
                embed: values.bf16(vocabulary * rank, 1.0),
                head: values.bf16(vocabulary * rank, 1.0),
                proj: values.bf16(hidden + rank, 1.0),
                anchors: (0..sequences).map(|_| values.below(vocabulary as u32)).collect(),
            }
        }

        fn run(
            &self,
            queue: &mut Queue,
            steps: usize,
            sampled: &dyn Fn(usize) -> Option<Sampled<'static>>,
        ) -> Result<(Vec<u32>, Vec<f32>), LaunchError> {
            let codes = |v: &[f32]| v.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>();
            let mut packed = vec![0; pack::packed_len(self.vocabulary, self.rank)];
            pack::pack(&codes(&self.head), self.vocabulary, self.rank, &mut packed);
            let sequences = self.anchors.len();
            let (mut tokens, mut confidence) = (vec![u32::MAX; sequences * steps], vec![f32::NAN; sequences * steps]);
            let args = Args {
                base: &device(&self.base),
                hidden_rows: &device(&self.hidden_rows),
                anchors: &self.anchors,
                embed: &device(&codes(&self.embed)),
                head: &device(&packed),
                proj: &device(&self.proj),
                vocabulary: self.vocabulary,
                rank: self.rank,
                hidden: self.hidden,
                block: self.block,
                steps,
                sampled,
                logits: &mut dirty(sequences * self.vocabulary),
                tokens: &mut tokens,
                confidence: &mut confidence,
                scratch: &mut Scratch::default(),
            };
            launch(queue, args)?;
            Ok((tokens, confidence))
        }
    }

    fn argmax_of_all(_: usize) -> Option<Sampled<'static>> {
        None
    }

    #[test]
    fn greedy_proposals_and_confidences_are_those_of_the_definition() {
        for (sequences, vocabulary, rank, hidden) in [(1, 4096, 32, 160), (3, 389, 32, 128), (2, 64, 256, 512)] {
            let setting = Setting::new(sequences, vocabulary, rank, hidden, 5);
            let mut tokens = Vec::new();
            let confidence = on_all_queues(|queue| {
                let (got, confidence) = setting.run(queue, 5, &argmax_of_all).unwrap();
                if tokens.is_empty() {
                    tokens = got.clone();
                }
                assert_eq!(got, tokens);
                confidence
            });
            for s in 0..sequences {
                let rows = |v: &[f32], width: usize| wide(&v[s * 5 * width..(s + 1) * 5 * width]);
                let (base, hidden_rows) = (rows(&setting.base, vocabulary), rows(&setting.hidden_rows, hidden));
                let (embed, head, proj) = (wide(&setting.embed), wide(&setting.head), wide(&setting.proj));
                let wanted = reference::proposals(&base, &hidden_rows, &embed, &head, &proj, rank, setting.anchors[s]);
                assert_eq!(tokens[s * 5..(s + 1) * 5], wanted.ids);
                // Terms of at most 2, one rounding for 64 of them a lane and ten more.
                let terms = (hidden + rank) as f64;
                let bounds = vec![terms * 2.0 * (terms / 64.0 + 10.0) * F32_HALF_ULP; 5];
                assert_close(&confidence[s * 5..(s + 1) * 5], &wanted.confidence, &bounds);
            }
        }
    }

    #[test]
    fn a_sampled_sequence_draws_from_its_own_logits_and_goes_on_from_its_draw() {
        let setting = Setting::new(2, 389, 32, 64, 4);
        let settings = Settings { temperature: 0.9, top_k: 40, seed: 11, ..Settings::GREEDY };
        let sampled = |sequence: usize| (sequence == 1).then(|| Sampled::new(settings, 70));
        for (name, mut queue) in queues() {
            let (tokens, _) = setting.run(&mut queue, 3, &sampled).unwrap();
            let mut previous = setting.anchors[1] as usize;
            for (step, &token) in tokens[3..].iter().enumerate() {
                let state = &setting.embed[previous * 32..][..32];
                let logit = |token: usize| {
                    let row = &setting.head[token * 32..][..32];
                    let sum = row.iter().zip(state).fold(0f32, |sum, (w, m)| w.mul_add(*m, sum));
                    setting.base[(4 + step) * 389 + token] + sum
                };
                let logits: Vec<f32> = (0..389).map(logit).collect();
                let draw = Sampled::new(settings, 70);
                let wanted = draw_one(Level::Scalar, &logits, &draw.draw(0, step), &mut Scratch::default());
                assert_eq!(Ok(token), wanted, "{name}, step {step}");
                previous = token as usize;
            }
            let greedy = setting.run(&mut queue, 3, &argmax_of_all).unwrap().0;
            assert_eq!(tokens[..3], greedy[..3], "{name}: the greedy sequence");
            assert_ne!(tokens[3..], greedy[3..], "{name}: the draw is the argmax");
        }
    }

    #[test]
    fn a_sequence_without_a_candidate_proposes_token_0() {
        let mut setting = Setting::new(1, 389, 32, 64, 4);
        setting.base.fill(f32::NEG_INFINITY);
        let sampled = |_| Some(Sampled::new(Settings { temperature: 1.0, ..Settings::GREEDY }, 70));
        for (_, mut queue) in queues() {
            assert_eq!(setting.run(&mut queue, 2, &sampled).unwrap().0, [0, 0]);
        }
    }

    #[test]
    fn a_sequence_proposes_the_same_alone_and_in_company() {
        let together = Setting::new(3, 389, 32, 64, 5);
        let mut queue = Queue::cpu(2, Level::best());
        let all = together.run(&mut queue, 5, &argmax_of_all).unwrap();
        for s in 0..3 {
            let cut = |v: &[f32]| v[s * v.len() / 3..(s + 1) * v.len() / 3].to_vec();
            let alone = Setting {
                base: cut(&together.base),
                hidden_rows: cut(&together.hidden_rows),
                anchors: vec![together.anchors[s]],
                embed: together.embed.clone(),
                head: together.head.clone(),
                proj: together.proj.clone(),
                ..together
            };
            let got = alone.run(&mut queue, 5, &argmax_of_all).unwrap();
            assert_eq!(got.0, all.0[s * 5..(s + 1) * 5]);
            assert_eq!(bits(&got.1), bits(&all.1[s * 5..(s + 1) * 5]));
            // Fewer steps are a prefix.
            assert_eq!(alone.run(&mut queue, 2, &argmax_of_all).unwrap().0, got.0[..2]);
        }
    }

    #[test]
    fn the_largest_value_wins_then_the_smaller_index_and_nan_never() {
        let mut values = Values::new(71);
        let mut cases = vec![
            (vec![f32::NAN; 20], 0),
            (vec![f32::NEG_INFINITY; 3], 0),
            (vec![1.0, 2.0, 2.0], 1),
            (vec![-0.0, 0.0], 0),
        ];
        for count in [1, 15, 16, 17, 40] {
            for at in 0..count {
                let mut row = values.uniform(count, 1.0);
                row[at] = 1.5;
                if at + 1 < count {
                    row[count - 1] = 1.5;
                }
                if at > 0 {
                    row[0] = f32::NAN;
                }
                cases.push((row, at as u32));
            }
        }
        for (row, wanted) in cases {
            for level in Level::available() {
                assert_eq!(argmax(level, &row), wanted, "{level}: {row:?}");
            }
        }
    }

    #[test]
    fn more_steps_than_the_block_has_are_refused() {
        let setting = Setting::new(1, 64, 32, 32, 3);
        let got = setting.run(&mut Queue::cpu(1, Level::Scalar), 4, &argmax_of_all);
        assert_eq!(got, Err(LaunchError::Limit { what: "the draft steps", found: 4, max: 3 }));
    }
}
