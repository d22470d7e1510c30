//! Prints decode and prompt speed of a checkpoint folder: `speed FOLDER THREADS [prompt|decode|window|draft]`. Beside the wall
//! clock it shows processor time of all threads (Linux only), which a busy machine disturbs less. A measurement, never a test.

use std::sync::Arc;
use std::time::Instant;

use tf_checkpoint::Checkpoint;
use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, RoundPlan, SequenceView, SlotIndex, Window};
use tf_engine::request::Sampling;
use tf_model::deepseek_v41::shape::Shape;
use tf_model::deepseek_v41::{DeepseekV41, Options};

fn round(start: u32, tokens: Vec<u32>, prompt_end: u32, draw: std::ops::Range<usize>) -> RoundPlan {
    let rows = 0..tokens.len();
    let window =
        Window { slot: SlotIndex(0), start, rows, prompt_end, whole: false, draw, logprobs: None, sequence: 0 };
    RoundPlan { tokens, windows: vec![window] }
}

/// Processor time of this process's threads in nanoseconds; 0 where the system doesn't tell.
fn processor_nanos() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = |path: std::path::PathBuf| std::fs::read_to_string(path.join("schedstat")).ok();
    let first = |text: String| text.split(' ').next().and_then(|number| number.parse::<u64>().ok());
    tasks.filter_map(|task| nanos(task.path()).and_then(first)).sum()
}

/// Times `rounds` calls and prints one line.
fn measure(name: &str, rounds: u32, rows: u32, mut round: impl FnMut(u32)) {
    if rounds == 0 {
        return;
    }
    let (started, before) = (Instant::now(), processor_nanos());
    (0..rounds).for_each(&mut round);
    let micros = started.elapsed().as_secs_f64() * 1e6 / f64::from(rounds);
    let processor = (processor_nanos() - before) as f64 / 1e3 / f64::from(rounds);
    let rate = |micros: f64| 1e6 / micros * f64::from(rows);
    println!(
        "{name}: {micros:.0} us a round ({:.0} rows/s), processor {processor:.0} us ({:.0} rows/s)",
        rate(micros),
        rate(processor)
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (folder, threads, only) = match &arguments[..] {
        [_, folder, threads] => (folder, threads, ""),
        [_, folder, threads, only] => (folder, threads, only.as_str()),
        _ => {
            eprintln!("usage: speed FOLDER THREADS [prompt|decode|window|draft]");
            std::process::exit(2);
        }
    };
    let wanted = |name: &str| only.is_empty() || only == name;
    let checkpoint = Arc::new(Checkpoint::open(folder.as_ref()).expect("a checkpoint folder"));
    let shape = Shape::from_config(&checkpoint.config().expect("a configuration")).expect("a known shape");
    // Speed needs no sensible n-gram classes.
    let folded = shape.engram_compressed_vocab_size as u32;
    let token_map = (0..shape.vocab_size as u32).map(|id| id % folded).collect();
    let threads = threads.parse().expect("a number of threads");
    let options = Options { threads, slots: 1, ..Options::default() };
    let mut model: DeepseekV41 = tf_model::load(checkpoint, token_map, options, &|_| {}).expect("the model loads");

    let sampling = Sampling::greedy();
    let view = SequenceView { sampling: &sampling, prompt: &[], reply: &[], given: &[] };
    let mut drawn = Drawn::default();
    let token = |index: u32| (index * 7919 + 11) % (shape.vocab_size as u32 / 2);
    for (chunk, total) in [(64u32, 512u32), (512, 512), (512, 2048)].into_iter().filter(|_| wanted("prompt")) {
        measure(&format!("prompt of {total} in chunks of {chunk}"), 3, total, |_| {
            for start in (0..total).step_by(chunk as usize) {
                let end = start + chunk;
                let draw = if end == total { chunk as usize - 1..chunk as usize } else { 0..0 };
                let plan = round(start, (start..end).map(token).collect(), total, draw);
                model.forward(&plan, &[view], &mut drawn).expect("the prompt runs");
                model.keep(SlotIndex(0), end);
            }
            model.release(SlotIndex(0));
        });
    }
    for prompt in [16u32, 512] {
        let plan = round(0, (0..prompt).map(token).collect(), prompt, prompt as usize - 1..prompt as usize);
        model.forward(&plan, &[view], &mut drawn).expect("the prompt runs");
        for (name, part, rows) in [("decode", "decode", 1u32), ("window of 6", "window", 6)] {
            let rounds = if wanted(part) { 600 } else { 0 };
            let mut start = model.length(SlotIndex(0));
            measure(&format!("{name} from position {prompt}"), rounds, rows, |_| {
                let plan = round(start, (0..rows).map(|row| token(start + row)).collect(), start, 0..rows as usize);
                model.forward(&plan, &[view], &mut drawn).expect("the row runs");
                start += 1;
                model.keep(SlotIndex(0), start);
            });
        }
        let mut drafts = Drafts::default();
        let position = model.length(SlotIndex(0));
        let rounds = if wanted("draft") { 300 } else { 0 };
        measure("draft block", rounds, 5, |anchor| {
            let wanted = DraftRequest { slot: SlotIndex(0), anchor, position, count_max: 5, sampling: &sampling };
            model.draft(&[wanted], &mut drafts).expect("drafting runs");
        });
        model.release(SlotIndex(0));
    }
}
