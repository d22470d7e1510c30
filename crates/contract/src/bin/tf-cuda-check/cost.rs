//! What it costs that a linear's order of summation is one for every row count: the declared chunks of columns against the
//! quickest ones for the row count at hand, in the same kernels. Such a choice would make a row's bits depend on its company.

use anyhow::{Result, bail};
use serde_json::json;
use tf_device::{Buffer, Queue};
use tf_kernels::linear::Finish;
use tf_kernels::linear::cuda::chunk;
use tf_kernels::linear_fp8::{Args, Product, measure_in_chunks};

use crate::linears::Case;
use crate::speed::{Timer, random_fp8, random_rows};

const ROWS: [usize; 4] = [1, 6, 16, 32];
/// Parts that the columns are cut into, at most.
const PARTS_MAX: usize = 20;
/// A chunk is whole steps of the kernels of few and of many rows.
const STEP: usize = 64;

pub(crate) fn heading() {
    crate::say(format_args!("\n| op | rows | declared chunk | us | quickest chunk | us | cost of one order |"));
    crate::say(format_args!("| --- | --- | --- | --- | --- | --- | --- |"));
}

/// Chunks that cut `columns` into equal parts, and the declared one, which is first.
fn chunks(case: &Case) -> Vec<usize> {
    let declared = chunk(case.format, case.columns);
    let equal = (1..=PARTS_MAX).filter(|parts| case.columns.is_multiple_of(parts * STEP));
    let others = equal.map(|parts| case.columns / parts).filter(|length| *length != declared);
    [declared].into_iter().chain(others).collect()
}

impl Timer<'_> {
    pub(crate) fn cost(&mut self, case: &Case) -> Result<()> {
        let Case { weight_rows, columns, groups, .. } = *case;
        let copies = (4 * self.gpu.l2_bytes).div_ceil(weight_rows * columns).clamp(2, 64);
        let mut weights = Vec::new();
        for _ in 0..copies {
            weights.push(random_fp8(self.queue, self.device, weight_rows, columns)?);
        }
        for rows in ROWS {
            let x = random_rows(self.device, rows, groups * columns)?;
            let mut out = Buffer::zeroed_of::<f32>(self.device, rows * weight_rows)?;
            let mut times = Vec::new();
            for chunk in chunks(case) {
                let measured = self.time(copies.max(16), |queue, call| {
                    let Queue::Gpu(queue) = queue else { bail!("the queue is no GPU's") };
                    let weights = &weights[call % copies];
                    let mut products = [Product { weights, out: &mut out, finish: Finish::Bf16 }];
                    let args = Args { x: &x, rows, groups, products: &mut products };
                    Ok(measure_in_chunks(queue, args, chunk)?)
                });
                // Some cuts have no room, or no kernel.
                if let Ok([median, ..]) = measured {
                    times.push((chunk, median));
                }
            }
            let Some(&(declared, us)) = times.first() else { bail!("{}: the declared order did not run", case.name) };
            let quickest = times.iter().min_by(|a, b| a.1.total_cmp(&b.1)).copied().unwrap_or((declared, us));
            let cost = 100.0 * (us / quickest.1 - 1.0);
            crate::say(format_args!(
                "| {} | {rows} | {declared} | {us:.2} | {} | {:.2} | {cost:.1} % |",
                case.name, quickest.0, quickest.1
            ));
            let all: Vec<_> = times.iter().map(|(chunk, us)| json!({"chunk": chunk, "us": us})).collect();
            self.records.push(json!({
                "cost_of": case.name, "rows": rows, "declared_chunk": declared, "declared_us": us,
                "quickest_chunk": quickest.0, "quickest_us": quickest.1, "cost_percent": cost, "chunks": all,
            }));
        }
        Ok(())
    }
}
