//! Times the linear families and prints a line a case. Checks nothing; the tests do.
//!
//! `cargo run --release -p tf-kernels --example linear_speed [-- THREADS [LEVEL [free]]]`

use std::time::Instant;
use tf_device::cpu::{CpuQueue, Placement};
use tf_device::{Buffer, Device, Queue};
use tf_kernels::linear_bf16::Dtype;
use tf_kernels::{linear_bf16, linear_fp8, lm_head, moe_experts, quantise};
use tf_numerics::lanes::Level;

/// Rows of activations that each case is timed with.
const ROWS: [usize; 6] = [1, 2, 3, 6, 16, 64];
/// Many short samples: the best one is likely to have run without a pause.
const SAMPLES: usize = 60;
const SAMPLE_SECONDS: f64 = 0.0004;

/// The largest matrices are there for the bandwidth of one row.
fn rows_for(weights: usize) -> impl Iterator<Item = usize> {
    ROWS.into_iter().take(if weights > 1 << 22 { 1 } else { ROWS.len() })
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(2, |text| text.parse().expect("THREADS is a number"));
    let level = arguments.next().map_or(Level::best(), |text| Level::parse(&text).expect("LEVEL is a known level"));
    println!("{threads} threads, {level}; best of {SAMPLES}; GB/s of packed weights, GFMA/s of unpadded products");
    let free = arguments.next().is_some_and(|word| word == "free");
    let placement = if free { Placement::Free } else { Placement::Pinned };
    let mut queue = Queue::Cpu(CpuQueue::placed(threads, level, placement));
    let device = Device::cpu();
    let mut random = Random(88172645463325252);
    for family in [fp8_linears, bf16_linears, heads, experts, quantisers] {
        family(&device, &mut random, &mut queue);
    }
}

fn fp8_linears(device: &Device, random: &mut Random, queue: &mut Queue) {
    for (name, rows, columns) in [
        ("fp8 8192 x 5120", 8192, 5120),
        ("fp8 256 x 5120", 256, 5120),
        ("fp8 512 x 96", 512, 96),
        ("fp8 160 x 160", 160, 160),
        ("fp8 64 x 160", 64, 160),
    ] {
        let weights = fp8(device, random, rows, columns);
        for count in rows_for(rows * columns) {
            let x = activations(device, random, count * columns);
            let mut out = Buffer::zeroed_of::<f32>(device, count * rows).unwrap();
            time(name, count, weights.bytes(), count * rows * columns, || {
                let product =
                    linear_fp8::Product { weights: &weights, out: &mut out, finish: linear_fp8::Finish::Bf16 };
                linear_fp8::launch(queue, linear_fp8::Args { x: &x, rows: count, groups: 1, products: &mut [product] })
                    .unwrap();
            });
        }
    }
}

fn bf16_linears(device: &Device, random: &mut Random, queue: &mut Queue) {
    for (name, rows, columns, dtype) in [
        ("bf16 8192 x 5120", 8192, 5120, Dtype::Bf16),
        ("bf16 256 x 5120", 256, 5120, Dtype::Bf16),
        ("bf16 16 x 160", 16, 160, Dtype::Bf16),
        ("f32 24 x 640", 24, 640, Dtype::F32),
        ("f32 24 x 20480", 24, 20480, Dtype::F32),
    ] {
        let weight = random.values(rows * columns, dtype);
        let weights = linear_bf16::Weights::pack(device, &weight, dtype, rows, columns).unwrap();
        for count in rows_for(rows * columns) {
            let x = activations(device, random, count * columns);
            let mut out = Buffer::zeroed_of::<f32>(device, count * rows).unwrap();
            time(name, count, weights.bytes(), count * rows * columns, || {
                let product =
                    linear_bf16::Product { weights: &weights, out: &mut out, finish: linear_bf16::Finish::F32 };
                linear_bf16::launch(queue, linear_bf16::Args { x: &x, rows: count, products: &mut [product] }).unwrap();
            });
        }
    }
}

fn heads(device: &Device, random: &mut Random, queue: &mut Queue) {
    let (rows, columns) = (4096, 160);
    let weight = random.values(rows * columns, Dtype::Bf16);
    let weights = lm_head::Weights::pack(device, &weight, Dtype::Bf16, rows, columns).unwrap();
    for count in ROWS {
        let x = activations(device, random, count * columns);
        let row_indices: Vec<u32> = (0..count as u32).collect();
        let mut out = Buffer::zeroed_of::<f32>(device, count * rows).unwrap();
        time("head 4096 x 160", count, weights.bytes(), count * rows * columns, || {
            let args = lm_head::Args { weights: &weights, x: &x, row_indices: &row_indices, out: &mut out };
            lm_head::launch(queue, args).unwrap();
        });
    }
}

fn experts(device: &Device, random: &mut Random, queue: &mut Queue) {
    for (name, hidden, intermediate, expert_count, picks) in [
        ("experts 5120, 2304, 8 of 8", 5120, 2304, 8, 8),
        ("experts 5120, 64, 2 of 2", 5120, 64, 2, 2),
        ("experts 160, 64, 3 of 16", 160, 64, 16, 3),
    ] {
        let list = (0..expert_count).map(|_| expert(device, random, hidden, intermediate)).collect();
        let shared = moe_experts::Shared {
            w1: fp8(device, random, intermediate, hidden),
            w3: fp8(device, random, intermediate, hidden),
            w2: fp8(device, random, hidden, intermediate),
        };
        let weights = moe_experts::Weights::new(list, shared).unwrap();
        let one = weights.experts()[0].bytes();
        for count in rows_for(hidden * intermediate) {
            let x = activations(device, random, count * hidden);
            let mut selected = Vec::new();
            for _ in 0..count {
                let first = random.below(expert_count);
                let mut ids: Vec<u32> = (0..picks).map(|pick| ((first + pick) % expert_count) as u32).collect();
                ids.sort();
                selected.extend(ids);
            }
            let distinct = (0..expert_count as u32).filter(|id| selected.contains(id)).count();
            let selected = Buffer::from_slice(device, &selected).unwrap();
            let routing = Buffer::from_slice(device, &vec![0.25f32; count * picks]).unwrap();
            let mut out = Buffer::zeroed_of::<f32>(device, count * hidden).unwrap();
            let bytes = distinct * one + weights.shared().bytes();
            time(name, count, bytes, count * (picks + 1) * 3 * hidden * intermediate, || {
                let args = moe_experts::Args {
                    weights: &weights,
                    x: &x,
                    rows: count,
                    picks,
                    selected: &selected,
                    routing: &routing,
                    limit: 10.0,
                    out: &mut out,
                };
                moe_experts::launch(queue, args).unwrap();
            });
        }
    }
}

fn quantisers(device: &Device, random: &mut Random, queue: &mut Queue) {
    for (count, columns) in [(1, 160), (64, 160), (64, 5120)] {
        let x = activations(device, random, count * columns);
        let mut out = Buffer::zeroed_of::<f32>(device, count * columns).unwrap();
        time(&format!("QDQ8, {columns} columns"), count, 4 * count * columns, 0, || {
            quantise::launch(queue, quantise::Args { x: &x, out: &mut out, rows: count, columns }).unwrap();
        });
    }
}

fn time(name: &str, rows: usize, bytes: usize, multiply_adds: usize, mut launch: impl FnMut()) {
    let start = Instant::now();
    launch();
    launch();
    let repeats = (SAMPLE_SECONDS / (start.elapsed().as_secs_f64() / 2.0)).ceil().max(1.0) as usize;
    let mut best = f64::MAX;
    for _ in 0..SAMPLES {
        let start = Instant::now();
        for _ in 0..repeats {
            launch();
        }
        best = best.min(start.elapsed().as_secs_f64() / repeats as f64);
    }
    println!(
        "{name:>28} rows {rows:>3}: {:>9.2} us {:>6.1} GB/s {:>6.1} GFMA/s",
        best * 1e6,
        bytes as f64 / best / 1e9,
        multiply_adds as f64 / best / 1e9
    );
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    fn bytes(&mut self, count: usize, map: impl Fn(u8) -> u8) -> Vec<u8> {
        (0..count).map(|_| map(self.next() as u8)).collect()
    }

    /// bf16 or float32 values between -2 and 2.
    fn values(&mut self, count: usize, dtype: Dtype) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count * dtype.bytes());
        for _ in 0..count {
            let value = (self.next() as f32 / u32::MAX as f32 - 0.5) * 4.0;
            match dtype {
                Dtype::Bf16 => bytes.extend(((value.to_bits() >> 16) as u16).to_le_bytes()),
                Dtype::F32 => bytes.extend(value.to_le_bytes()),
            }
        }
        bytes
    }
}

fn activations(device: &Device, random: &mut Random, count: usize) -> Buffer {
    let bytes = random.values(count, Dtype::Bf16);
    let values: Vec<f32> =
        bytes.chunks(2).map(|pair| f32::from_bits(u32::from_le_bytes([0, 0, pair[0], pair[1]]))).collect();
    Buffer::from_slice(device, &values).unwrap()
}

fn fp8(device: &Device, random: &mut Random, rows: usize, columns: usize) -> linear_fp8::Weights {
    let weight = random.bytes(rows * columns, |byte| if byte & 0x7f == 0x7f { 0 } else { byte });
    let scale = random.bytes(rows.div_ceil(32) * columns.div_ceil(32), |byte| 110 + byte % 8);
    linear_fp8::Weights::pack(device, &weight, &scale, rows, columns).unwrap()
}

fn expert(device: &Device, random: &mut Random, hidden: usize, intermediate: usize) -> moe_experts::Expert {
    let mut weight = || random.bytes(hidden * intermediate / 2, |byte| byte);
    let (w1, w3, w2) = (weight(), weight(), weight());
    let mut scale = || random.bytes(hidden * intermediate / 32, |byte| 115 + byte % 8);
    let (w1_scale, w3_scale, w2_scale) = (scale(), scale(), scale());
    let bytes = moe_experts::ExpertBytes {
        w1: &w1,
        w1_scale: &w1_scale,
        w3: &w3,
        w3_scale: &w3_scale,
        w2: &w2,
        w2_scale: &w2_scale,
    };
    moe_experts::Expert::pack(device, bytes, hidden, intermediate).unwrap()
}
