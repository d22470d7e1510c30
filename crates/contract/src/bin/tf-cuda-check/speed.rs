//! Microseconds of a call: graphs of launches over rotating weights that the device fills with random bytes.

use anyhow::{Context, Result, bail};
use serde_json::json;
use tf_device::cuda::Gpu;
use tf_device::{Buffer, Device, Queue};
use tf_kernels::linear::Finish;
use tf_kernels::linear::cuda::Format;
use tf_kernels::moe_experts::{self, Args, Shared};
use tf_kernels::{linear_bf16, linear_fp8};

use crate::linears::{Case, Weights, launch};
use crate::random::Random;

const REPLAYS: usize = 20;
pub(crate) const HIDDEN: usize = 5120;
pub(crate) const INTERMEDIATE: usize = 2304;
const EXPERTS: usize = 384;
const PICKS: usize = 6;
/// Bytes a microsecond of a copy and of a read-only stream, and bf16 operations a microsecond, as measured on one H200.
const COPY: f64 = 4.3e6;
const READ: f64 = 4.657e6;
const OPERATIONS: f64 = 790e6;

pub(crate) struct Timer<'a> {
    pub device: &'a Device,
    pub queue: &'a mut Queue,
    pub gpu: Gpu,
    pub records: Vec<serde_json::Value>,
}

/// `bytes` random bytes, a pattern of at most 4 MiB over and over; each byte is what `byte` makes of random bits.
fn filled(queue: &mut Queue, device: &Device, bytes: usize, byte: impl Fn(u64) -> u8) -> Result<Buffer> {
    let mut random = Random(bytes as u64);
    let period = bytes.min(4 << 20);
    let mut pattern = Vec::with_capacity(period);
    while pattern.len() < period {
        let bits = random.next();
        pattern.extend((0..8.min(period - pattern.len())).map(|i| byte(bits >> (8 * i))));
    }
    let mut buffer = Buffer::zeroed(device, bytes)?;
    let first = Buffer::from_slice(device, &pattern)?;
    let mut done = 0;
    while done < bytes {
        let count = period.min(bytes - done);
        queue.copy(&first, 0, &mut buffer, done, count)?;
        done += count;
    }
    queue.finish()?;
    Ok(buffer)
}

pub(crate) fn random_fp8(
    queue: &mut Queue,
    device: &Device,
    rows: usize,
    columns: usize,
) -> Result<linear_fp8::Weights> {
    let (codes, scales) = linear_fp8::pack_cuda::packed_len(rows, columns);
    let codes = filled(queue, device, codes, |bits| bits as u8)?;
    let scales = filled(queue, device, scales, |bits| 116 + bits as u8 % 7)?;
    Ok(linear_fp8::Weights::from_packed(rows, columns, codes, scales)?)
}

pub(crate) fn random_rows(device: &Device, rows: usize, columns: usize) -> Result<Buffer> {
    let mut random = Random(columns as u64);
    let x: Vec<f32> = (0..rows * columns).map(|_| f32::from_bits(u32::from(random.bf16(120, 127)) << 16)).collect();
    Ok(Buffer::from_slice(device, &x)?)
}

impl Timer<'_> {
    /// Median, least and most microseconds of a call: a graph of `calls`, replayed.
    pub(crate) fn time(
        &mut self,
        calls: usize,
        mut call: impl FnMut(&mut Queue, usize) -> Result<()>,
    ) -> Result<[f64; 3]> {
        // Working memory and modules are there before anything is recorded.
        call(self.queue, 0)?;
        self.queue.finish()?;
        let queue = &mut *self.queue;
        let graph = self.gpu.capture(|| (0..calls).try_for_each(|index| call(queue, index)))?;
        for _ in 0..3 {
            self.gpu.replay(&graph)?;
        }
        let mut samples = Vec::new();
        for _ in 0..REPLAYS {
            let from = self.gpu.event()?;
            self.gpu.replay(&graph)?;
            let to = self.gpu.event()?;
            samples.push(self.gpu.microseconds(&from, &to)? / calls as f64);
        }
        samples.sort_by(f64::total_cmp);
        Ok([samples[REPLAYS / 2], samples[0], samples[REPLAYS - 1]])
    }

    pub(crate) fn report(
        &mut self,
        name: &str,
        rows: usize,
        bytes: f64,
        operations: f64,
        [median, least, most]: [f64; 3],
    ) {
        let floor = (bytes / COPY).max(operations / OPERATIONS);
        crate::say(format_args!(
            "| {name} | {rows} | {median:.2} | {least:.2} to {most:.2} | {:.0} | {:.0} | {floor:.2} | {:.2} |",
            bytes / median / 1000.0,
            operations / median / 1e6,
            floor / median
        ));
        self.records.push(json!({
            "op": name, "rows": rows, "bytes": bytes, "operations": operations, "us_median": median, "us_least": least,
            "us_most": most, "floor_us": floor, "fraction_of_floor": floor / median,
            "fraction_of_read": bytes / READ / median,
        }));
    }

    pub(crate) fn heading(&self) {
        crate::say(format_args!("| op | rows | us | spread | GB/s | TFLOP/s | floor us | of floor |"));
        crate::say(format_args!("| --- | --- | --- | --- | --- | --- | --- | --- |"));
    }

    /// Copies of the weight beyond four times the second-level cache, and bytes of one.
    pub(crate) fn rotating_weights(&mut self, case: &Case) -> Result<(Vec<Weights>, usize)> {
        let Case { weight_rows, columns, .. } = *case;
        let bytes = match case.format {
            Format::Fp8 => {
                let (codes, scales) = linear_fp8::pack_cuda::packed_len(weight_rows, columns);
                codes + scales
            }
            Format::Bf16 | Format::Head => linear_bf16::pack_cuda::packed_len(weight_rows, columns),
        };
        let copies = (4 * self.gpu.l2_bytes).div_ceil(bytes).clamp(2, 64);
        let mut weights = Vec::new();
        for _ in 0..copies {
            weights.push(match case.format {
                Format::Fp8 => Weights::Fp8(random_fp8(self.queue, self.device, weight_rows, columns)?),
                Format::Bf16 | Format::Head => {
                    // The high byte of each value: exponents of small numbers.
                    let values = filled(self.queue, self.device, bytes, |bits| 0x3a ^ (bits as u8 & 0x83))?;
                    Weights::Bf16(linear_bf16::Weights::from_packed(weight_rows, columns, values)?)
                }
            });
        }
        Ok((weights, bytes))
    }

    /// The copies of the weight in turn.
    pub(crate) fn linear(&mut self, case: &Case, row_counts: &[usize]) -> Result<()> {
        let Case { weight_rows, columns, groups, .. } = *case;
        let (weights, bytes) = self.rotating_weights(case)?;
        let copies = weights.len();
        let finish = if case.format == Format::Fp8 { Finish::Bf16 } else { Finish::F32 };
        for &rows in row_counts {
            let x = random_rows(self.device, rows, groups * columns)?;
            let indices: Vec<u32> = (0..rows as u32).collect();
            let mut outs = [(finish, Buffer::zeroed_of::<f32>(self.device, rows * weight_rows)?)];
            let calls = if rows > 64 || case.format == Format::Head { 4 } else { copies.max(16) };
            let measured =
                self.time(calls, |queue, call| launch(queue, case, &weights[call % copies], &x, &indices, &mut outs))?;
            let operations = 2.0 * (rows * weight_rows * columns) as f64;
            self.report(case.name, rows, bytes as f64, operations, measured);
        }
        Ok(())
    }

    /// The release's layer: 384 experts and the shared one.
    pub(crate) fn release_experts(&mut self) -> Result<moe_experts::Weights> {
        let lengths = moe_experts::pack_cuda::packed_len(HIDDEN, INTERMEDIATE);
        let mut parts = Vec::new();
        for (index, bytes) in lengths.into_iter().enumerate() {
            let byte = |bits: u64| if index % 2 == 0 { bits as u8 } else { 116 + bits as u8 % 7 };
            parts.push(filled(self.queue, self.device, EXPERTS * bytes, byte)?);
        }
        let Ok(parts) = <[Buffer; 4]>::try_from(parts) else { bail!("four parts were made") };
        let mut fp8 = |rows, columns| random_fp8(self.queue, self.device, rows, columns);
        let (w1, w3) = (fp8(INTERMEDIATE, HIDDEN)?, fp8(INTERMEDIATE, HIDDEN)?);
        let shared = Shared { w1, w3, w2: fp8(HIDDEN, INTERMEDIATE)? };
        Ok(moe_experts::Weights::from_packed(EXPERTS, shared, parts)?)
    }

    /// `calls` random routings of `rows` rows, and what a launch takes beside them.
    pub(crate) fn routed(&self, rows: usize, calls: usize) -> Result<Routed> {
        let mut random = Random(11 + rows as u64);
        let (mut routings, mut distinct) = (Vec::new(), 0);
        for _ in 0..calls {
            let mut met = vec![false; EXPERTS];
            let mut ids = Vec::new();
            for _ in 0..rows {
                let mut row: Vec<u32> = Vec::new();
                while row.len() < PICKS {
                    let id = random.below(EXPERTS as u64) as u32;
                    if !row.contains(&id) {
                        row.push(id);
                    }
                }
                row.iter().for_each(|id| met[*id as usize] = true);
                ids.extend(row);
            }
            distinct += met.iter().filter(|met| **met).count();
            routings.push(Buffer::from_slice(self.device, &ids)?);
        }
        Ok(Routed {
            rows,
            x: random_rows(self.device, rows, HIDDEN)?,
            weights: Buffer::from_slice(self.device, &vec![0.25_f32; rows * PICKS])?,
            out: Buffer::zeroed_of::<f32>(self.device, rows * HIDDEN)?,
            distinct: distinct as f64 / calls as f64,
            routings,
        })
    }

    /// Random routings in turn.
    pub(crate) fn experts(&mut self, row_counts: &[usize]) -> Result<()> {
        let weights = self.release_experts()?;
        let expert_bytes: usize = moe_experts::pack_cuda::packed_len(HIDDEN, INTERMEDIATE).iter().sum();
        let shared_bytes = weights.shared().bytes();
        for &rows in row_counts {
            let calls = if rows > 64 { 4 } else { 16 };
            let mut routed = self.routed(rows, calls)?;
            let measured = self.time(calls, |queue, call| {
                moe_experts::launch(queue, routed.args(&weights, call)).context("the experts")
            })?;
            let bytes = routed.distinct * expert_bytes as f64 + shared_bytes as f64;
            let operations = 6.0 * (rows * (PICKS + 1) * HIDDEN * INTERMEDIATE) as f64;
            self.report(&format!("experts ({:.0} distinct)", routed.distinct), rows, bytes, operations, measured);
        }
        Ok(())
    }
}

/// Routings of so many rows, inputs and results.
pub(crate) struct Routed {
    rows: usize,
    x: Buffer,
    routings: Vec<Buffer>,
    weights: Buffer,
    out: Buffer,
    /// Experts that a routing meets, in the mean.
    distinct: f64,
}

impl Routed {
    pub(crate) fn args<'a>(&'a mut self, weights: &'a moe_experts::Weights, call: usize) -> Args<'a> {
        Args {
            weights,
            x: &self.x,
            rows: self.rows,
            picks: PICKS,
            selected: &self.routings[call % self.routings.len()],
            routing: &self.weights,
            limit: 10.0,
            out: &mut self.out,
        }
    }
}
