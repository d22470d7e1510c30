//! Prints decode and prompt speed of a checkpoint folder: `speed FOLDER THREADS`. A measurement, never a test.

use std::sync::Arc;
use std::time::Instant;

use tf_checkpoint::Checkpoint;
use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, RoundPlan, SequenceView, SlotIndex, Window};
use tf_engine::request::Sampling;
use tf_model::deepseek_v41::shape::Shape;
use tf_model::deepseek_v41::{DeepseekV41, Options};

fn round(start: u32, tokens: Vec<u32>, prompt_end: u32, draw: std::ops::Range<usize>) -> RoundPlan {
    let rows = 0..tokens.len();
    let window = Window {
        slot: SlotIndex(0),
        start,
        rows,
        prompt_end,
        whole: false,
        draw,
        logprobs: None,
        sequence: 0,
    };
    RoundPlan { tokens, windows: vec![window] }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, folder, threads] = &arguments[..] else {
        eprintln!("usage: speed FOLDER THREADS");
        std::process::exit(2);
    };
    let checkpoint = Arc::new(Checkpoint::open(folder.as_ref()).expect("a checkpoint folder"));
    let shape = Shape::from_config(&checkpoint.config().expect("a configuration")).expect("a known shape");
    // Speed needs no sensible n-gram classes.
    let folded = shape.engram_compressed_vocab_size as u32;
    let token_map = (0..shape.vocab_size as u32).map(|id| id % folded).collect();
    let threads = threads.parse().expect("a number of threads");
    let options = Options { threads, slots: 1, ..Options::default() };
    let mut model: DeepseekV41 = tf_model::load(checkpoint, token_map, options, &|_| {}).expect("the model loads");

    let sampling = Sampling::greedy();
    let view = SequenceView { sampling: &sampling, prompt: &[], reply: &[] };
    let mut drawn = Drawn::default();
    let token = |index: u32| (index * 7919 + 11) % (shape.vocab_size as u32 / 2);
    for chunk in [64u32, 512] {
        for total in [512u32, 2048] {
            let started = Instant::now();
            for start in (0..total).step_by(chunk as usize) {
                let end = start + chunk;
                let draw = if end == total { chunk as usize - 1..chunk as usize } else { 0..0 };
                let plan = round(start, (start..end).map(token).collect(), total, draw);
                model.forward(&plan, &[view], &mut drawn).expect("the prompt runs");
                model.keep(SlotIndex(0), end);
            }
            let seconds = started.elapsed().as_secs_f64();
            println!("prompt {total} in chunks of {chunk}: {:.0} tok/s", f64::from(total) / seconds);
            model.release(SlotIndex(0));
        }
    }
    for prompt in [16u32, 512] {
        let plan = round(0, (0..prompt).map(token).collect(), prompt, prompt as usize - 1..prompt as usize);
        model.forward(&plan, &[view], &mut drawn).expect("the prompt runs");
        for (name, rows) in [("decode", 1u32), ("windows of 6", 6)] {
            let mut start = model.length(SlotIndex(0));
            let started = Instant::now();
            let rounds = 400;
            for _ in 0..rounds {
                let plan = round(start, (0..rows).map(|row| token(start + row)).collect(), start, 0..rows as usize);
                model.forward(&plan, &[view], &mut drawn).expect("the row runs");
                start += 1;
                model.keep(SlotIndex(0), start);
            }
            let micros = started.elapsed().as_secs_f64() * 1e6 / f64::from(rounds);
            println!("{name} from {prompt}: {micros:.0} us a round, {:.0} rounds/s", 1e6 / micros);
        }
        let mut drafts = Drafts::default();
        let position = model.length(SlotIndex(0));
        let started = Instant::now();
        for anchor in 0..200 {
            let wanted = DraftRequest { slot: SlotIndex(0), anchor, position, count_max: 5, sampling: &sampling };
            model.draft(&[wanted], &mut drafts).expect("drafting runs");
        }
        println!("draft block: {:.0} us", started.elapsed().as_secs_f64() * 1e6 / 200.0);
        model.release(SlotIndex(0));
    }
}
