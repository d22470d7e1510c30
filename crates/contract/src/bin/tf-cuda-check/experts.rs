//! The mixture of the routed experts and the shared one, as the model launches it.

use anyhow::Result;
use tf_device::{Buffer, Device, Queue};
use tf_kernels::linear_fp8;
use tf_kernels::moe_experts::cuda::{DOWN_CHUNK, UP_CHUNK};
use tf_kernels::moe_experts::{self, Args, Expert, ExpertBytes, Shared};
use tf_numerics::lanes::Level;
use tf_numerics::{bf16, fma16, fp8, math, mxfp4, qdq};

use crate::random::{Random, Tally, in_parallel, pool_row};

const POOL: usize = 32;
const LIMIT: f32 = 10.0;

#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub name: &'static str,
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
}

/// The release's with few experts, those of the two small checkpoints, and odd ones.
pub(crate) const SIZES: [Sizes; 4] = [
    Sizes { name: "experts", hidden: 5120, intermediate: 2304, experts: 6 },
    Sizes { name: "experts, demo", hidden: 160, intermediate: 64, experts: 16 },
    Sizes { name: "experts, tiny", hidden: 128, intermediate: 64, experts: 8 },
    Sizes { name: "experts, odd", hidden: 1376, intermediate: 608, experts: 7 },
];

/// The three matrices of an expert, dequantised: w1, w3 `[intermediate, hidden]`, w2 `[hidden, intermediate]`.
type Matrices = [Vec<u16>; 3];

pub(crate) struct Mixture {
    pub sizes: Sizes,
    pub weights: moe_experts::Weights,
    /// The routed experts, then the shared one.
    matrices: Vec<Matrices>,
    pool: Vec<Vec<u16>>,
}

fn shapes(sizes: Sizes) -> [(usize, usize); 3] {
    let Sizes { hidden, intermediate, .. } = sizes;
    [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
}

fn random_expert(device: &Device, sizes: Sizes, random: &mut Random) -> Result<(Expert, Matrices)> {
    let tensors = shapes(sizes).map(|(rows, columns)| {
        let codes: Vec<u8> = (0..rows * columns / 2).map(|_| random.next() as u8).collect();
        let scales: Vec<u8> = (0..rows * columns / 32).map(|_| 112 + random.below(9) as u8).collect();
        (codes, scales)
    });
    let matrices = std::array::from_fn(|index| {
        let (codes, scales) = &tensors[index];
        let value = |at: usize| {
            let code = if at.is_multiple_of(2) { codes[at / 2] & 15 } else { codes[at / 2] >> 4 };
            bf16::from_f32(mxfp4::E2M1[usize::from(code)] * fp8::decode_e8m0(scales[at / 32]))
        };
        (0..codes.len() * 2).map(value).collect()
    });
    let [(w1, w1_scale), (w3, w3_scale), (w2, w2_scale)] = &tensors;
    let bytes = ExpertBytes { w1, w1_scale, w3, w3_scale, w2, w2_scale };
    Ok((Expert::pack(device, bytes, sizes.hidden, sizes.intermediate)?, matrices))
}

fn random_shared(device: &Device, sizes: Sizes, random: &mut Random) -> Result<(Shared, Matrices)> {
    let mut packed = Vec::new();
    let mut matrices: Matrices = Default::default();
    for ((rows, columns), matrix) in shapes(sizes).into_iter().zip(&mut matrices) {
        let codes: Vec<u8> = (0..rows * columns).map(|_| random.e4m3()).collect();
        let scales: Vec<u8> = (0..rows.div_ceil(32) * columns / 32).map(|_| 108 + random.below(9) as u8).collect();
        packed.push(linear_fp8::Weights::pack(device, &codes, &scales, rows, columns)?);
        let scale = |at: usize| scales[at / columns / 32 * (columns / 32) + at % columns / 32];
        let value = |at: usize| bf16::from_f32(fp8::decode_e4m3(codes[at]) * fp8::decode_e8m0(scale(at)));
        *matrix = (0..codes.len()).map(value).collect();
    }
    let mut packed = packed.into_iter();
    let mut next = || packed.next().expect("three are packed");
    Ok((Shared { w1: next(), w3: next(), w2: next() }, matrices))
}

/// The routing weight of a pool row's pick.
fn weight_of(row: usize, expert: usize) -> f32 {
    0.05 + ((row * 7 + expert * 3) % 16) as f32 / 9.0
}

fn round(value: f32) -> f32 {
    bf16::to_f32(bf16::from_f32(value))
}

/// `bf16(silu(min(limit, gate)) * clamp(up) * weight)`, minimum and maximum as the CPU's: the second where one is NaN.
fn activate(gate: f32, up: f32, weight: Option<f32>) -> f32 {
    let min = |a: f32, b: f32| if a < b { a } else { b };
    let gate = min(LIMIT, round(gate));
    let up = round(up);
    let up = min(LIMIT, if -LIMIT > up { -LIMIT } else { up });
    let value = math::silu(gate) * up;
    round(weight.map_or(value, |weight| value * weight))
}

impl Mixture {
    pub(crate) fn random(device: &Device, sizes: Sizes) -> Result<Mixture> {
        let mut random = Random(sizes.hidden as u64);
        let (mut experts, mut matrices) = (Vec::new(), Vec::new());
        for _ in 0..sizes.experts {
            let (expert, values) = random_expert(device, sizes, &mut random)?;
            experts.push(expert);
            matrices.push(values);
        }
        let (shared, values) = random_shared(device, sizes, &mut random)?;
        matrices.push(values);
        let pool = (0..POOL).map(|index| pool_row(index, sizes.hidden, &mut random)).collect();
        Ok(Mixture { sizes, weights: moe_experts::Weights::new(experts, shared)?, matrices, pool })
    }

    /// `[expert, the shared one last][pool row][hidden]`, each output rounded to bf16.
    fn mirror(&self) -> Vec<Vec<Vec<f32>>> {
        let Sizes { hidden, intermediate, experts, .. } = self.sizes;
        let count = experts + 1;
        let up = in_parallel(count * intermediate, |index| -> Vec<f32> {
            let (expert, row) = (index / intermediate, index % intermediate);
            let [w1, w3, _] = &self.matrices[expert];
            let dot = |x: &[u16], w: &[u16]| fma16::chunked_dot(x, &w[row * hidden..][..hidden], UP_CHUNK);
            let weight = |row: usize| (expert < experts).then(|| weight_of(row, expert));
            let rows = self.pool.iter().enumerate();
            rows.map(|(index, x)| activate(dot(x, w1), dot(x, w3), weight(index))).collect()
        });
        let activations = in_parallel(count * POOL, |index| -> Vec<u16> {
            let (expert, row) = (index / POOL, index % POOL);
            let mut values: Vec<f32> = (0..intermediate).map(|i| up[expert * intermediate + i][row]).collect();
            qdq::round_row(Level::best(), qdq::Format::Fp8, &mut values);
            values.into_iter().map(bf16::from_f32).collect()
        });
        let down = in_parallel(count * hidden, |index| -> Vec<f32> {
            let (expert, row) = (index / hidden, index % hidden);
            let w2 = &self.matrices[expert][2][row * intermediate..][..intermediate];
            let dot = |row: usize| fma16::chunked_dot(&activations[expert * POOL + row], w2, DOWN_CHUNK);
            (0..POOL).map(|row| round(dot(row))).collect()
        });
        let row_of = |expert: usize, row: usize| (0..hidden).map(|i| down[expert * hidden + i][row]).collect();
        (0..count).map(|expert| (0..POOL).map(|row| row_of(expert, row)).collect()).collect()
    }

    /// Spread over all, everybody on the same ones, and one expert with all rows among lonely ones; ids in any order.
    fn picks(&self, routing: usize, row: usize) -> [u32; 2] {
        let experts = self.sizes.experts;
        let picks = match routing {
            0 => [(row * 3 + 3) % experts, (row * 3 + 1) % experts],
            1 => [1, experts - 1],
            _ => [1 + row % (experts - 1), 0],
        };
        picks.map(|id| id as u32)
    }

    pub(crate) fn run(
        &self,
        device: &Device,
        queue: &mut Queue,
        chosen: &[usize],
        picks: impl Fn(usize) -> Vec<u32>,
    ) -> Result<Vec<f32>> {
        let rows = chosen.len();
        let x: Vec<f32> = chosen.iter().flat_map(|i| self.pool[*i].iter().map(|bits| bf16::to_f32(*bits))).collect();
        let selected: Vec<u32> = (0..rows).flat_map(&picks).collect();
        let per_row = selected.len() / rows;
        let weight = |index: usize| weight_of(chosen[index / per_row], selected[index] as usize);
        let routing: Vec<f32> = (0..selected.len()).map(weight).collect();
        let (x, routing) = (Buffer::from_slice(device, &x)?, Buffer::from_slice(device, &routing)?);
        let selected = Buffer::from_slice(device, &selected)?;
        let mut out = Buffer::from_slice(device, &vec![f32::MAX; rows * self.sizes.hidden])?;
        for _ in 0..2 {
            let args = Args {
                weights: &self.weights,
                x: &x,
                rows,
                picks: per_row,
                selected: &selected,
                routing: &routing,
                limit: LIMIT,
                out: &mut out,
            };
            moe_experts::launch(queue, args)?;
        }
        Ok(out.to_vec()?)
    }

    /// Every output of every row count and routing against the emulator.
    pub(crate) fn check(&self, device: &Device, queue: &mut Queue, row_counts: &[usize]) -> Result<Tally> {
        let mirror = self.mirror();
        let (hidden, experts) = (self.sizes.hidden, self.sizes.experts);
        let mut tally = Tally::default();
        for &row_count in row_counts {
            let chosen: Vec<usize> = (0..row_count).map(|row| (row * 5 + row_count * 3) % POOL).collect();
            for routing in 0..3 {
                let found = self.run(device, queue, &chosen, |row| self.picks(routing, row).to_vec())?;
                for (row, (found, pool_row)) in found.chunks(hidden).zip(&chosen).enumerate() {
                    let mut picks = self.picks(routing, row);
                    picks.sort_unstable();
                    let parts = picks.iter().map(|id| *id as usize).chain([experts]);
                    let parts: Vec<&[f32]> = parts.map(|expert| mirror[expert][*pool_row].as_slice()).collect();
                    let sum = |column: usize| parts.iter().fold(0.0_f32, |sum, part| sum + part[column]);
                    let expected: Vec<f32> = (0..hidden).map(|column| round(sum(column))).collect();
                    tally.add_rows(found, &expected, hidden, |_, column| {
                        format!("R={row_count}, routing {routing}, row {row} (pool {pool_row}), output {column}")
                    });
                }
            }
        }
        Ok(tally)
    }

    /// Every row of a long launch against the same row launched alone.
    pub(crate) fn check_long(&self, device: &Device, queue: &mut Queue, row_counts: &[usize]) -> Result<Tally> {
        let hidden = self.sizes.hidden;
        let mut tally = Tally::default();
        let alone: Vec<Vec<f32>> = (0..POOL)
            .map(|index| self.run(device, queue, &[index], |_| self.picks(0, index).to_vec()))
            .collect::<Result<_>>()?;
        for &row_count in row_counts {
            let chosen: Vec<usize> = (0..row_count).map(|row| (row * 5 + row / 32) % POOL).collect();
            let found = self.run(device, queue, &chosen, |row| self.picks(0, chosen[row]).to_vec())?;
            for (row, (found, pool_row)) in found.chunks(hidden).zip(&chosen).enumerate() {
                tally.add_rows(found, &alone[*pool_row], hidden, |_, column| {
                    format!("R={row_count}, row {row} (pool {pool_row}), output {column}")
                });
            }
        }
        Ok(tally)
    }
}
