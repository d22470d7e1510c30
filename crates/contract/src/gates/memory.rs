//! Gate 3: does a launch touch only what it owns, and write all that it promises?
//!
//! Outputs, scratch and padding hold another pattern in each launch: an element that keeps its pattern, or a sum that read
//! one, differs between them. Guards, inputs and what is nobody's are watched by the stage.

use crate::probe::{Failure, Probe, compare_rows};
use tf_device::Queue;
use tf_kernels::contract::{Fill, Pick};

const FILLS: &[Fill] = &[Fill::NAN, Fill::LARGE, Fill::ZERO];

pub fn check(probe: &mut Probe<'_>) -> Result<(), Failure> {
    let all = probe.all_rows();
    let few: Vec<Pick> = all.iter().copied().take(3).collect();
    for picks in [&all, &few] {
        let target = probe.queues.target.clone();
        for setting in target.careful() {
            let mut base: Option<Vec<Vec<u32>>> = None;
            for &fill in FILLS {
                let setting = setting.with_fill(fill);
                dirty_scratch(&mut probe.queues.of(setting).queue, fill);
                let outcome = probe.launch(setting, picks)?;
                let what =
                    format!("{} rows on {}, memory full of {:#010x}", picks.len(), target.name(setting), fill.word);
                if let Some(problem) = outcome.problems.first() {
                    return Err(Failure::Red(format!("{what}: {problem}")));
                }
                match &base {
                    None => base = Some(outcome.rows),
                    Some(base) => compare_rows(&aligned(picks), &outcome.rows, base, &what, &mut probe.tally)?,
                }
            }
        }
    }
    Ok(())
}

/// The picks as rows of the base launch, which had the same ones.
fn aligned(picks: &[Pick]) -> Vec<Pick> {
    (0..picks.len()).map(Pick::Row).collect()
}

/// Overwrites the queue's scratch, as far as it has grown at least.
pub fn dirty_scratch(queue: &mut Queue, fill: Fill) {
    const FLOATS: usize = 1 << 16;
    match queue {
        Queue::Cpu(queue) => {
            if let Ok((values, indices)) = queue.scratch.values_and_indices(FLOATS, FLOATS) {
                values.fill(f32::from_bits(fill.word));
                indices.fill(fill.word);
            }
        }
        Queue::Gpu(queue) => {
            for scratch in queue.scratch_mut() {
                let words = vec![fill.word; scratch.len_of::<u32>()];
                scratch.write(0, &words).expect("a device takes as much as its scratch holds");
            }
        }
    }
}
