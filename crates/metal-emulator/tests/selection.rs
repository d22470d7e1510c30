//! The selector's CUDA source on the emulated device against the CPU, on lists of every length that it cuts differently and
//! on values that a search by digits finds hard.

mod common;

use tf_device::{Buffer, Device, Queue};
use tf_kernels::rows::RowInfo;
use tf_kernels::top_k::{Args, CandidateShape, Candidates, launch};
use tf_metal_emulator::{Rigour, cuda_device};
use tf_numerics::lanes::Level;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % bound
    }
}

/// Rows of `entries` scores each, one a kind of value.
fn rows_of(entries: usize) -> Vec<Vec<f32>> {
    let mut random = Random(entries as u64);
    let mut row = |of: &mut dyn FnMut(usize, &mut Random) -> f32| (0..entries).map(|i| of(i, &mut random)).collect();
    let last = entries - 1;
    vec![
        row(&mut |_, random| random.below(1 << 24) as f32 / 4096.0),
        row(&mut |_, random| (random.below(1 << 24) as f32 - 16_700_000.0) / 4096.0),
        row(&mut |_, _| -1.5),
        row(&mut |_, random| [0.0, -0.0, 1.0, -1.0, 2.5][random.below(5) as usize]),
        row(&mut |i, _| i as f32),
        row(&mut |i, _| -(i as f32)),
        row(&mut |_, random| f32::from_bits(0x3f80_0000 + random.below(300))),
        row(&mut |_, random| [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, 1.0, -1.0][random.below(5) as usize]),
        row(&mut |i, _| if i % 977 == 5 { 1e-40 } else { f32::NEG_INFINITY }),
        row(&mut |i, _| if i < 700 { f32::MAX } else { f32::MIN }),
        row(&mut |i, random| if i + 700 > last { 1e30 } else { random.below(100) as f32 }),
        row(&mut |_, random| f32::from_bits(random.below(u32::MAX))),
    ]
}

fn select(device: &Device, queue: &mut Queue, rows: &[Vec<f32>], top_k: usize, shape: CandidateShape) -> [Vec<u32>; 4] {
    let stride = rows[0].len().next_multiple_of(16);
    let mut scores = Vec::new();
    for row in rows {
        scores.extend_from_slice(row);
        scores.resize(scores.len().next_multiple_of(stride), f32::INFINITY);
    }
    // The last rows see less.
    let seen = |r: usize| (rows[0].len() - 37 * r.saturating_sub(7)) as u32;
    let infos: Vec<RowInfo> = (0..rows.len()).map(|r| RowInfo { slot: 0, position: seen(r) - 1, window: 0 }).collect();
    let words = |count: usize| Buffer::from_slice(device, &vec![7u32; rows.len() * count]).unwrap();
    let mut outputs = [words(top_k), words(1), words(shape.blocks_max), words(1)];
    let [selected, counts, blocks, block_counts] = &mut outputs;
    let args = Args {
        scores: &Buffer::from_slice(device, &scores).unwrap(),
        stride,
        rows: &infos,
        tile: 0..rows.len(),
        ratio: 1,
        top_k,
        candidates: Candidates::Publish { shape, blocks, counts: block_counts },
        selected,
        counts,
    };
    launch(queue, args).unwrap();
    queue.finish().unwrap();
    let mut words = outputs.map(|buffer| buffer.to_vec::<u32>().unwrap());
    // Behind its count a row's list holds what it may.
    for (list, width) in [(0, top_k), (2, shape.blocks_max)] {
        for r in 0..rows.len() {
            let held = (words[list + 1][r] as usize).min(width);
            words[list][r * width + held..][..width - held].fill(0);
        }
    }
    words
}

#[test]
fn emulated_cuda_selects_what_the_cpu_selects_whatever_the_values_and_the_length() {
    if !common::ready("emulated_cuda_selects_what_the_cpu_selects_whatever_the_values_and_the_length") {
        return;
    }
    let device = cuda_device(Rigour::Once).unwrap();
    let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
    let (mut queue, mut host) = (Queue::gpu(gpu), Queue::cpu(2, Level::best()));
    for (entries, top_k, blocks_max, block_size) in [
        (600, 512, 100, 6),
        (4096, 512, 512, 8),
        (4099, 20, 600, 1),
        (16_384, 512, 2048, 8),
        (16_384, 5000, 5000, 4),
        (16_385, 512, 300, 64),
        (40_003, 513, 2048, 8),
        (40_003, 5000, 5000, 1),
    ] {
        let rows = rows_of(entries);
        let shape = CandidateShape { blocks_max, block_size };
        let wanted = select(&Device::cpu(), &mut host, &rows, top_k, shape);
        let found = select(&device, &mut queue, &rows, top_k, shape);
        for (name, (found, wanted)) in
            ["entries", "counts", "blocks", "block counts"].iter().zip(found.iter().zip(&wanted))
        {
            let width = found.len() / rows.len();
            for (r, (found, wanted)) in found.chunks(width).zip(wanted.chunks(width)).enumerate() {
                assert_eq!(found, wanted, "{name} of row {r}, {top_k} of {entries}");
            }
        }
    }
}
