//! What it costs that an operator's order of sums is one for every row count: the declared chunks of columns against the
//! quickest ones for the row count at hand, in the same kernels; of attention, a row's keys in one chain against the same keys
//! in several, whose sums nobody puts together here. Such a choice would make a row's bits depend on its company.

use anyhow::{Result, bail};
use serde_json::json;
use tf_device::{Buffer, Queue};
use tf_kernels::linear::Finish;
use tf_kernels::linear::cuda::Format;
use tf_kernels::moe_experts::cuda::{DOWN_CHUNK, UP_CHUNK};
use tf_kernels::{linear_bf16, linear_fp8, moe_experts};

use crate::attention::Attention;
use crate::linears::{Case, Weights};
use crate::speed::{HIDDEN, INTERMEDIATE, Timer, random_rows};

/// The last are a prompt's.
const ROWS: [usize; 6] = [1, 6, 16, 32, 128, PROMPT];

const PROMPT: usize = 2048;
/// Parts that the columns are cut into, at most.
const PARTS_MAX: usize = 20;
/// Of attention's keys: a part is whole steps.
const KEY_PARTS: [usize; 4] = [1, 2, 4, 8];
/// A chunk is whole steps of the kernels of few and of many rows.
const STEP: usize = 64;

pub(crate) fn heading() {
    crate::say(format_args!("\nOf attention, what would put the parts of a row's keys together again is not counted."));
    crate::say(format_args!("\n| op | rows | declared | us | quickest | us | cost of one order |"));
    crate::say(format_args!("| --- | --- | --- | --- | --- | --- | --- |"));
}

/// Chunks that cut `columns` into equal parts, and the declared one, which is first. Of a prompt, where every one takes long,
/// the whole columns and halves.
fn chunks(case: &Case, rows: usize) -> Vec<usize> {
    let declared = case.chunk;
    let most = if rows == PROMPT { 2 } else { PARTS_MAX };
    let equal = (1..=most).filter(|parts| case.columns.is_multiple_of(parts * STEP));
    let others = equal.map(|parts| case.columns / parts).filter(|length| *length != declared);
    [declared].into_iter().chain(others).collect()
}

/// Chunks of both products of an expert: the declared ones, fewer in both, and others in one of them.
fn expert_chunks(rows: usize) -> Vec<[usize; 2]> {
    let [up, down] = [UP_CHUNK, DOWN_CHUNK];
    let both = [[up, down], [HIDDEN, INTERMEDIATE], [HIDDEN / 2, INTERMEDIATE / 2]];
    let one = [[HIDDEN, down], [HIDDEN / 2, down], [up / 2, down], [up, INTERMEDIATE], [up, INTERMEDIATE / 2]];
    let others = one.into_iter().filter(|_| rows != PROMPT);
    let mut all: Vec<[usize; 2]> = Vec::new();
    for chunks in both.into_iter().chain(others) {
        if !all.contains(&chunks) {
            all.push(chunks);
        }
    }
    all
}

/// A way to sum, and microseconds.
type Found = (String, f64);

impl Timer<'_> {
    /// The first of the times is that of the declared order.
    fn cost_of(&mut self, name: &str, rows: usize, times: &[Found]) -> Result<()> {
        let Some((declared, us)) = times.first() else { bail!("{name}: the declared order did not run") };
        let quickest =
            times.iter().min_by(|a, b| a.1.total_cmp(&b.1)).map_or((declared, *us), |best| (&best.0, best.1));
        let cost = 100.0 * (us / quickest.1 - 1.0);
        crate::say(format_args!(
            "| {name} | {rows} | {declared} | {us:.2} | {} | {:.2} | {cost:.1} % |",
            quickest.0, quickest.1
        ));
        let all: Vec<_> = times.iter().map(|(order, us)| json!({"chunk": order, "us": us})).collect();
        self.records.push(json!({
            "cost_of": name, "rows": rows, "declared_chunk": declared, "declared_us": us,
            "quickest_chunk": quickest.0, "quickest_us": quickest.1, "cost_percent": cost, "chunks": all,
        }));
        Ok(())
    }

    pub(crate) fn linear_cost(&mut self, case: &Case) -> Result<()> {
        let Case { weight_rows, columns, groups, .. } = *case;
        let (weights, _) = self.rotating_weights(case)?;
        for rows in ROWS {
            let x = random_rows(self.device, rows, groups * columns)?;
            let mut out = Buffer::zeroed_of::<f32>(self.device, rows * weight_rows)?;
            let calls = if rows > 64 { 4 } else { weights.len().max(16) };
            let mut times = Vec::new();
            for chunk in chunks(case, rows) {
                let measured = self.time(calls, |queue, call| {
                    let Queue::Gpu(queue) = queue else { bail!("the queue is no GPU's") };
                    match &weights[call % weights.len()] {
                        Weights::Fp8(weights) => {
                            let mut products = [linear_fp8::Product { weights, out: &mut out, finish: Finish::Bf16 }];
                            let args = linear_fp8::Args { x: &x, rows, groups, products: &mut products };
                            Ok(linear_fp8::measure_in_chunks(queue, args, chunk)?)
                        }
                        Weights::Bf16(weights) => {
                            let mut products = [linear_bf16::Product { weights, out: &mut out, finish: Finish::F32 }];
                            let args = linear_bf16::Args { x: &x, rows, products: &mut products };
                            Ok(linear_bf16::measure_in_chunks(queue, args, chunk)?)
                        }
                    }
                });
                keep(&mut times, chunk.to_string(), measured, self)?;
            }
            self.cost_of(case.name, rows, &times)?;
        }
        Ok(())
    }

    pub(crate) fn expert_cost(&mut self) -> Result<()> {
        let weights = self.release_experts()?;
        for rows in ROWS {
            let calls = if rows > 64 { 4 } else { 16 };
            let mut routed = self.routed(rows, calls)?;
            let mut times = Vec::new();
            for chunks in expert_chunks(rows) {
                let measured = self.time(calls, |queue, call| {
                    let Queue::Gpu(queue) = queue else { bail!("the queue is no GPU's") };
                    Ok(moe_experts::measure_in_chunks(queue, routed.args(&weights, call), chunks)?)
                });
                keep(&mut times, format!("{} and {}", chunks[0], chunks[1]), measured, self)?;
            }
            self.cost_of("experts", rows, &times)?;
        }
        Ok(())
    }

    pub(crate) fn attention_cost(&mut self) -> Result<()> {
        for rows in ROWS.into_iter().filter(|rows| *rows < PROMPT) {
            let mut times = Vec::new();
            for parts in KEY_PARTS {
                let mut attention = Attention::random(self.device, rows, parts)?;
                let calls = if rows * parts > 64 { 4 } else { 16 };
                let measured = self.time(calls, |queue, _| attention.launch(queue));
                keep(&mut times, format!("keys in {parts}"), measured, self)?;
            }
            self.cost_of("attention", rows, &times)?;
        }
        Ok(())
    }
}

/// Some orders have no room, or no kernel: those are left out, but for the declared one. What failed while it was recorded must
/// not be in the next graph, so the queue is waited for.
fn keep(times: &mut Vec<Found>, order: String, measured: Result<[f64; 3]>, timer: &mut Timer<'_>) -> Result<()> {
    match measured {
        Ok([median, ..]) => times.push((order, median)),
        Err(error) if times.is_empty() => return Err(error),
        Err(_) => timer.queue.finish()?,
    }
    Ok(())
}

/// Whether what a linear's order costs can be asked: the head has one chunk.
pub(crate) fn has_chunks(case: &Case) -> bool {
    case.released && case.format != Format::Head
}
