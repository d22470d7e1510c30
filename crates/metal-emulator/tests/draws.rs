//! The draw and the draft head through their registered launches on the emulated Metal and CUDA devices: tokens, outcomes and
//! log-probabilities have the CPU's bits, for every rule, with ties, forbidden tokens and broken rows.

mod common;

use common::{Values, ready};
use tf_device::{Buffer, Device, Queue};
use tf_kernels::draft_head::{self, Sampled, pack};
use tf_kernels::sample::{self, Draw, History, Outcome, Scratch, Settings};
use tf_kernels::stream_read;
use tf_metal_emulator::{Rigour, cuda_device, device_with};
use tf_numerics::lanes::Level;

fn devices() -> Vec<(&'static str, Device, Queue)> {
    let queue = |device: &Device| match device {
        Device::Gpu(gpu) => Queue::gpu(gpu),
        Device::Cpu(_) => Queue::cpu(1, Level::best()),
    };
    let all = [("metal", device_with(Rigour::Once)), ("cuda", cuda_device(Rigour::Once))];
    all.into_iter()
        .map(|(name, device)| {
            let device = device.unwrap();
            let queue = queue(&device);
            (name, device, queue)
        })
        .collect()
}

/// Wide, flat, alike, of few values, with forbidden tokens, broken.
fn rows(values: &mut Values, vocab: usize) -> Vec<Vec<f32>> {
    let mut unit = |scale: f32| values.f32(1, scale)[0];
    let mut rows: Vec<Vec<f32>> = vec![
        (0..vocab).map(|_| unit(1.0) * unit(1.0) * 12.0).collect(),
        (0..vocab).map(|_| unit(0.01)).collect(),
        vec![-0.0; vocab],
        (0..vocab).map(|_| (unit(3.0)).round()).collect(),
        (0..vocab).map(|id| if id % 3 == 0 { unit(8.0) } else { f32::NEG_INFINITY }).collect(),
        vec![f32::NEG_INFINITY; vocab],
        (0..vocab).map(|_| unit(60.0)).collect(),
        (0..vocab).map(|_| unit(1.0) * 3e38).collect(),
    ];
    for broken in [f32::NAN, f32::INFINITY] {
        let mut row = rows[0].clone();
        row[vocab / 2] = broken;
        rows.push(row);
    }
    rows
}

const BIAS: &[(u32, f32)] = &[(3, 2.5), (7, -4.0), (3, 1.25), (900_000, 1.0)];

fn settings() -> Vec<Settings<'static>> {
    let plain = Settings { temperature: 1.0, seed: 0x0123_4567_89ab_cdef, ..Settings::GREEDY };
    vec![
        Settings::GREEDY,
        plain,
        Settings { temperature: 0.7, top_k: 4, ..plain },
        Settings { top_k: 60, top_p: 0.6, ..plain },
        Settings { temperature: 1.3, top_p: 0.9, seed: 9, ..plain },
        Settings { top_p: 0.0, ..plain },
        Settings { top_p: 0.999, min_p: 0.05, ..plain },
        Settings { min_p: 2.0, ..plain },
        Settings { temperature: 1e-40, ..plain },
        Settings { logit_bias: BIAS, frequency_penalty: 0.5, presence_penalty: 0.25, repetition_penalty: 1.2, ..plain },
        Settings {
            logit_bias: BIAS,
            masked: &[1, 5, 20],
            masked_before: 4,
            repetition_penalty: 0.8,
            ..Settings::GREEDY
        },
    ]
}

/// NaN has no equal, and its payload is nobody's promise.
fn comparable(outcomes: &[Outcome], top: &[(u32, f32)]) -> Vec<String> {
    let outcomes = outcomes.iter().map(|outcome| match outcome {
        Ok(drawn) => {
            let listed = &top[drawn.top_start as usize..][..drawn.top_count as usize];
            let listed: Vec<(u32, u32)> = listed.iter().map(|(id, logprob)| (*id, logprob.to_bits())).collect();
            format!("{} {:x} {:x} {listed:x?}", drawn.token, drawn.logprob.to_bits(), drawn.next_logprob.to_bits())
        }
        Err(error) => format!("{error:?}"),
    });
    outcomes.collect()
}

fn draw(device: &Device, queue: &mut Queue, logits: &[f32], vocab: usize, draws: &[Draw<'_>]) -> Vec<String> {
    let logits = Buffer::from_slice(device, logits).unwrap();
    let (mut outcomes, mut top, mut scratch) = (Vec::new(), Vec::new(), Scratch::default());
    let args =
        sample::Args { logits: &logits, vocab, draws, outcomes: &mut outcomes, top: &mut top, scratch: &mut scratch };
    sample::launch(queue, args).unwrap();
    comparable(&outcomes, &top)
}

#[test]
fn draws_are_those_of_the_cpu() {
    if !ready("draws_are_those_of_the_cpu") {
        return;
    }
    let mut devices = devices();
    // Fewer and more than what the CUDA kernel puts aside at once; the Metal kernel knows no such border and is slow here.
    for (vocab, only) in [(301, None), (4500, Some("cuda"))] {
        let mut values = Values::new(vocab as u64);
        let (rows, settings) = (rows(&mut values, vocab), settings());
        let mask: Vec<u32> = (0..vocab / 32).map(|_| values.below(u32::MAX)).collect();
        let logits: Vec<f32> = rows.concat();
        let mut draws = Vec::new();
        for row in 0..rows.len() {
            for (index, settings) in settings.iter().enumerate() {
                draws.push(Draw {
                    row,
                    position: 70 + index as u32,
                    reply_count: 3,
                    settings,
                    history: History { prompt: &[2, 5, 9, 5], reply: &[5, 8, 8], window: &[20] },
                    allowed: (index % 4 == 3).then_some(&mask[..]),
                    logprobs: [None, Some(0), Some(5), Some(vocab as u32 + 1)][(row + index) % 4],
                    next: (index % 2 == 1).then_some(17),
                });
            }
        }
        let cpu = draw(&Device::cpu(), &mut Queue::cpu(2, Level::best()), &logits, vocab, &draws);
        for kind in ["NotFinite", "NoCandidate"] {
            assert!(cpu.iter().any(|outcome| outcome == kind), "no row is {kind}");
        }
        for (name, device, queue) in devices.iter_mut().filter(|(name, ..)| only.is_none_or(|only| only == *name)) {
            let found = draw(device, queue, &logits, vocab, &draws);
            for (index, (found, wanted)) in found.iter().zip(&cpu).enumerate() {
                let (row, rule) = (index / settings.len(), index % settings.len());
                assert_eq!(found, wanted, "{name}, vocabulary {vocab}, row {row}, rule {rule}");
            }
        }
    }
}

#[test]
fn chains_of_proposals_are_those_of_the_cpu() {
    if !ready("chains_of_proposals_are_those_of_the_cpu") {
        return;
    }
    let (hidden, block, steps) = (96, 5, 4);
    let settings = Settings { temperature: 0.8, top_p: 0.9, seed: 11, ..Settings::GREEDY };
    let mut devices = devices();
    for (sequences, vocabulary, rank) in [(1, 389, 32), (11, 600, 48)] {
        let mut values = Values::new(sequences as u64);
        let bits = |values: Vec<f32>| values.into_iter().map(tf_numerics::bf16::from_f32).collect::<Vec<u16>>();
        let base = values.f32(sequences * block * vocabulary, 3.0);
        let rows = values.f32(sequences * block * hidden, 2.0);
        let embed = bits(values.f32(vocabulary * rank, 1.0));
        let head = bits(values.f32(vocabulary * rank, 1.0));
        let proj = values.f32(hidden + rank, 1.0);
        let anchors: Vec<u32> = (0..sequences).map(|_| values.below(vocabulary as u32)).collect();
        let mut packed = vec![0; pack::packed_len(vocabulary, rank)];
        pack::pack(&head, vocabulary, rank, &mut packed);
        let sampled = |sequence: usize| (sequence % 3 == 1).then_some(Sampled::new(settings, 40 + sequence as u32));
        let run = |device: &Device, queue: &mut Queue| {
            let floats = |values: &[f32]| Buffer::from_slice(device, values).unwrap();
            let words = |values: &[u16]| Buffer::from_slice(device, values).unwrap();
            let (mut tokens, mut confidence) = (vec![0; sequences * steps], vec![0.0; sequences * steps]);
            let args = draft_head::Args {
                base: &floats(&base),
                hidden_rows: &floats(&rows),
                anchors: &anchors,
                embed: &words(&embed),
                head: &words(&packed),
                proj: &floats(&proj),
                vocabulary,
                rank,
                hidden,
                block,
                steps,
                sampled: &sampled,
                logits: &mut floats(&vec![f32::NAN; sequences * vocabulary]),
                tokens: &mut tokens,
                confidence: &mut confidence,
                scratch: &mut Scratch::default(),
            };
            draft_head::launch(queue, args).unwrap();
            (tokens, confidence.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
        };
        let cpu = run(&Device::cpu(), &mut Queue::cpu(1, Level::best()));
        for (name, device, queue) in &mut devices {
            assert_eq!(run(device, queue), cpu, "{name}, {sequences} sequences");
        }
    }
}

#[test]
fn the_ceiling_reads_every_word_once() {
    if !ready("the_ceiling_reads_every_word_once") {
        return;
    }
    let mut values = Values::new(8);
    for device in [cuda_device(Rigour::Once).unwrap(), device_with(Rigour::Once).unwrap()] {
        let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
        let mut queue = Queue::gpu(gpu);
        for count in [4, 300_000] {
            let words: Vec<u32> = (0..count).map(|_| values.word()).collect();
            let from = Buffer::from_slice(&device, &words).unwrap();
            let mut folded = Buffer::from_slice(&device, &vec![9_u32; stream_read::folded_len(&queue)]).unwrap();
            stream_read::launch(&mut queue, &from, &mut folded).unwrap();
            let fold = |words: &[u32]| words.iter().fold(0, |sum, word| sum ^ word);
            assert_eq!(fold(&folded.to_vec::<u32>().unwrap()), fold(&words), "{count} words on {}", gpu.backend());
        }
    }
}
