//! Holds the CUDA linears to their mirror on the GPU of this machine, bit for bit, and times them.
//!
//! `tf-cuda-check CUBINS [check] [time] [sweep] [--out FILE] [--only NAME]`: `CUBINS` is the folder that `cargo xtask cubins`
//! fills. `check` runs the arithmetic probe and every kernel at every row count against [`tf_numerics::fma16`]; `time`
//! replays graphs of calls over rotating weights; `sweep` tries launch shapes. Records go to FILE, one JSON object a line.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tf_device::cuda::{Gpu, GpuBuffer, Module, Parameter, Shape};
use tf_kernels::linear::cuda::{Addresses, Fold, Format, Linears, Operator, Tuning, chunks};
use tf_kernels::moe_experts::cuda::{Addresses as ExpertAddresses, Experts, Sizes, Tuning as ExpertTuning};
use tf_kernels::{linear_bf16, linear_fp8, moe_experts};
use tf_numerics::lanes::Level;
use tf_numerics::{bf16, fma16, fp8, math, mxfp4, qdq};

const ROW_COUNTS: [usize; 13] = [1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32];
const TIMED_ROWS: [usize; 4] = [1, 6, 16, 32];
const REPLAYS: usize = 20;
/// Bytes a microsecond: a copy, and a read-only stream, as measured on one H200.
const RATES: [f64; 2] = [4.3e6, 4.657e6];

struct Named {
    name: &'static str,
    operator: Operator,
    /// Rows of the pool: fewer where the mirror would take long.
    pool: usize,
}

fn operators() -> Vec<Named> {
    let fp8 = |name, weight_rows, columns, groups, chunk| Named {
        name,
        operator: Operator { format: Format::Fp8, weight_rows, columns, groups, chunk },
        pool: 32,
    };
    let bf16 = |name, weight_rows, columns, chunk| Named {
        name,
        operator: Operator { format: Format::Bf16, weight_rows, columns, groups: 1, chunk },
        pool: 32,
    };
    let head = Operator { format: Format::Head, weight_rows: 129_280, columns: 5120, groups: 1, chunk: 5120 };
    vec![
        fp8("wq_a+wkv", 1792, 5120, 1, chunks::WQ_A_WKV),
        fp8("wq_b", 32_768, 1280, 1, chunks::WQ_B),
        fp8("wo_a", 8192, 4096, 8, chunks::WO_A),
        fp8("wo_b", 5120, 8192, 1, chunks::WO_B),
        fp8("shared w1+w3", 4608, 5120, 1, chunks::EXPERT_UP),
        fp8("shared w2", 5120, 2304, 1, chunks::EXPERT_DOWN),
        fp8("index wq_b", 4096, 1280, 1, chunks::INDEX_QUERY),
        fp8("engram wkv", 25_600, 6144, 1, chunks::ENGRAM),
        // Odd sizes: a last chunk that is shorter, and one chunk below its length.
        fp8("odd", 80, 1696, 1, 640),
        fp8("small", 48, 96, 1, 640),
        bf16("router", 384, 5120, chunks::ROUTER),
        bf16("compressor", 1024, 5120, chunks::COMPRESSOR),
        bf16("odd bf16", 80, 1696, 640),
        Named { name: "head", operator: head, pool: 8 },
    ]
}

/// Numbers from a counter.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A bf16 with an exponent field in `low..=high`.
    fn bf16(&mut self, low: u64, high: u64) -> u16 {
        let bits = self.next();
        (bits as u16 & 0x807f) | ((low + (bits >> 32) % (high - low + 1)) as u16) << 7
    }
}

/// Row `index` of the pool: each kind that could spill over to a neighbour or lose bits.
fn pool_row(index: usize, columns: usize, random: &mut Random) -> Vec<u16> {
    let mut row: Vec<u16> = match index % 8 {
        0 | 1 | 7 => (0..columns).map(|_| random.bf16(120, 128)).collect(),
        2 => (0..columns).map(|_| random.bf16(87, 167)).collect(),
        3 => (0..columns).map(|_| random.bf16(224, 228)).collect(),
        4 => vec![0; columns],
        5 => (0..columns).map(|_| random.bf16(0, 2)).collect(),
        _ => (0..columns).map(|i| [0x3f80, 0xbf80][i / 16 % 2]).collect(),
    };
    let at = random.below(columns as u64) as usize;
    match index {
        9 => row.fill(0x7fc0),
        11 => row[at] = 0x7f80,
        12 => row[at] = 0x3f80,
        13 => row[at] = 0x7fff,
        19 => row.fill(0xff80),
        _ => {}
    }
    row
}

fn in_parallel<T: Send + Default + Clone>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let mut results = vec![T::default(); count];
    let share = count.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, results) in results.chunks_mut(share).enumerate() {
            let work = &work;
            scope.spawn(move || {
                for (index, result) in results.iter_mut().enumerate() {
                    *result = work(part * share + index);
                }
            });
        }
    });
    results
}

/// A weight of the operator's shape: packed, its packed scales, and every weight as bf16.
fn random_weight(operator: &Operator, random: &mut Random) -> Result<(Vec<u8>, Vec<u8>, Vec<u16>)> {
    let (rows, columns) = (operator.weight_rows, operator.columns);
    let scales: Vec<u8>;
    let (packed, packed_scales, weights): (Vec<u8>, Vec<u8>, Vec<u16>);
    match operator.format {
        Format::Fp8 => {
            let codes: Vec<u8> = (0..rows * columns)
                .map(|_| random.next() as u8)
                .map(|code| if code & 0x7f == 0x7f { code ^ 1 } else { code })
                .collect();
            scales = (0..rows.div_ceil(32) * columns / 32)
                .map(|_| if random.below(40) == 0 { 3 + random.below(132) as u8 } else { 112 + random.below(12) as u8 })
                .collect();
            let both = linear_fp8::pack_cuda::pack(&codes, &scales, rows, columns)?;
            (packed, packed_scales) = (both.codes, both.scales);
            weights = in_parallel(rows, |row| -> Vec<u16> {
                let value = |column: usize| {
                    let scale = fp8::decode_e8m0(scales[row / 32 * (columns / 32) + column / 32]);
                    bf16::from_f32(fp8::decode_e4m3(codes[row * columns + column]) * scale)
                };
                (0..columns).map(value).collect()
            })
            .concat();
        }
        Format::Bf16 | Format::Head => {
            weights = (0..rows * columns).map(|_| random.bf16(112, 126)).collect();
            let bytes: Vec<u8> = weights.iter().flat_map(|value| value.to_le_bytes()).collect();
            (packed, packed_scales) = (linear_bf16::pack_cuda::pack(&bytes, rows, columns)?, vec![0]);
        }
    }
    Ok((packed, packed_scales, weights))
}

fn read_outputs(out: &GpuBuffer, count: usize, is_bf16: bool) -> Result<Vec<f32>> {
    if is_bf16 {
        let mut bits = vec![0_u16; count];
        out.read(0, &mut bits)?;
        return Ok(bits.into_iter().map(bf16::to_f32).collect());
    }
    let mut values = vec![0.0_f32; count];
    out.read(0, &mut values)?;
    Ok(values)
}

/// The index of the largest value of a pool row, ties to the lowest; 0 where all are NaN.
fn winner(expected: &[Vec<f32>], pool_index: usize) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (column, values) in expected.iter().enumerate() {
        let value = values[pool_index];
        if !value.is_nan() && best.is_none_or(|(_, most)| value > most) {
            best = Some((column, value));
        }
    }
    best.map_or(0, |(column, _)| column)
}

/// Every way of folding that the operator has, with and without overlap.
fn checked_tunings(operator: &Operator) -> Vec<Tuning> {
    let folds = [Fold::Together, Fold::Cluster, Fold::Apart];
    let mut tunings = folds.map(|fold| Tuning { fold: Some(fold), ..Tuning::default() }).to_vec();
    tunings.push(Tuning { overlap: false, ..Tuning::default() });
    if operator.chunk_count() == 1 {
        tunings.truncate(1);
    }
    tunings
}

/// The checkpoint's tensors of one expert: w1, its scale, w3, its scale, w2, its scale.
type Tensors = [Vec<u8>; 6];

/// The tensors of each expert, and all experts packed: codes and scales, up and down.
fn random_experts(sizes: Sizes, random: &mut Random) -> Result<(Vec<Tensors>, [Vec<u8>; 4])> {
    let Sizes { hidden, intermediate, experts } = sizes;
    let mut tensors: Vec<Tensors> = Vec::new();
    let mut packed: [Vec<u8>; 4] = Default::default();
    for _ in 0..experts {
        let expert: Tensors = std::array::from_fn(|index| {
            let count = hidden * intermediate / if index % 2 == 0 { 2 } else { 32 };
            let byte = |random: &mut Random| if index % 2 == 0 { random.next() } else { 112 + random.below(9) } as u8;
            (0..count).map(|_| byte(random)).collect()
        });
        let [w1, w1_scale, w3, w3_scale, w2, w2_scale] = &expert;
        let bytes = moe_experts::ExpertBytes { w1, w1_scale, w3, w3_scale, w2, w2_scale };
        let (up, down) = moe_experts::pack_cuda::pack(bytes, hidden, intermediate)?;
        for (all, one) in packed.iter_mut().zip([up.codes, up.scales, down.codes, down.scales]) {
            all.extend(one);
        }
        tensors.push(expert);
    }
    Ok((tensors, packed))
}

/// The routing weight of a pool row's pick.
fn weight_of(row: usize, expert: usize) -> f32 {
    0.05 + ((row * 7 + expert * 3) % 16) as f32 / 9.0
}

/// The mirror: `[expert * hidden + output][pool row]`.
fn expert_mirror(sizes: Sizes, tensors: &[Tensors], pool: &[Vec<u16>], limit: f32) -> Vec<Vec<f32>> {
    let Sizes { hidden, intermediate, experts } = sizes;
    let dequantised = |codes: &[u8], scales: &[u8], row: usize, columns: usize| -> Vec<u16> {
        let value = |column: usize| {
            let byte = codes[(row * columns + column) / 2];
            let code = if column.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
            let scale = fp8::decode_e8m0(scales[(row * columns + column) / 32]);
            bf16::from_f32(mxfp4::E2M1[usize::from(code)] * scale)
        };
        (0..columns).map(value).collect()
    };
    // The mirror for every (pool row, expert).
    let count = 32 * experts;
    let up = in_parallel(experts * intermediate, |index| -> Vec<f32> {
        let (expert, row) = (index / intermediate, index % intermediate);
        let [w1, w1_scale, w3, w3_scale, ..] = &tensors[expert];
        let (w1, w3) = (dequantised(w1, w1_scale, row, hidden), dequantised(w3, w3_scale, row, hidden));
        let round = |value: f32| bf16::to_f32(bf16::from_f32(value));
        let dot = |x: &[u16], w: &[u16]| round(fma16::chunked_dot(x, w, chunks::EXPERT_UP));
        let activate = |(index, x): (usize, &Vec<u16>)| {
            let (gate, up) = (dot(x, &w1), dot(x, &w3));
            // As the CPU's minimum and maximum: the second where one is NaN.
            let gate = if limit < gate { limit } else { gate };
            let up = if -limit > up { -limit } else { up };
            let up = if limit < up { limit } else { up };
            round(math::silu(gate) * up * weight_of(index, expert))
        };
        pool.iter().enumerate().map(activate).collect()
    });
    let activations = in_parallel(count, |index| -> Vec<u16> {
        let (row, expert) = (index / experts, index % experts);
        let mut values: Vec<f32> = (0..intermediate).map(|i| up[expert * intermediate + i][row]).collect();
        qdq::round_row(Level::best(), qdq::Format::Fp8, &mut values);
        values.into_iter().map(bf16::from_f32).collect()
    });
    in_parallel(experts * hidden, |index| -> Vec<f32> {
        let (expert, row) = (index / hidden, index % hidden);
        let [.., w2, w2_scale] = &tensors[expert];
        let w2 = dequantised(w2, w2_scale, row, intermediate);
        let dot = |x: &[u16]| fma16::chunked_dot(x, &w2, chunks::EXPERT_DOWN);
        (0..32).map(|row| bf16::to_f32(bf16::from_f32(dot(&activations[row * experts + expert])))).collect()
    })
}

/// Equal bits, or both NaN: the payload of a NaN is not part of the definition.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// How many outputs were compared and differed, with the first difference.
#[derive(Default)]
struct Tally {
    compared: u64,
    bad: u64,
    first: Option<String>,
}

impl Tally {
    fn add(&mut self, found: f32, expected: f32, place: impl Fn() -> String) {
        self.compared += 1;
        if !same(found, expected) {
            self.bad += 1;
            self.first.get_or_insert_with(|| {
                format!("{}: {:#010x}, expected {:#010x}", place(), found.to_bits(), expected.to_bits())
            });
        }
    }

    fn line(&self, name: &str) -> String {
        let first = self.first.as_ref().map(|text| format!("; first at {text}")).unwrap_or_default();
        format!("{:<18} {:>12} compared, {:>8} differ{first}", name, self.compared, self.bad)
    }
}

struct Session {
    gpu: Gpu,
    modules: BTreeMap<String, Arc<Module>>,
    linears: Linears,
    experts: Experts,
    records: Vec<serde_json::Value>,
    failures: usize,
    only: Option<String>,
}

impl Session {
    fn open(cubins: &str, only: Option<String>) -> Result<Session> {
        let gpu = Gpu::open(0)?;
        let mut modules = BTreeMap::new();
        for family in ["linear_fp8", "linear_bf16", "lm_head", "moe_experts", "tensor_step"] {
            let stem = if family == "tensor_step" { "probe" } else { "kernel" };
            let path = format!("{cubins}/{family}.{stem}.sm_{}.cubin", gpu.target());
            let cubin = fs::read(&path).with_context(|| format!("{path}: `cargo xtask cubins` builds it"))?;
            modules.insert(family.to_string(), Arc::new(Module::load(&gpu, &cubin)?));
        }
        let three = ["linear_fp8", "linear_bf16", "lm_head"].map(|family| modules[family].clone());
        let linears = Linears::new(&gpu, &three, 16_384, 16_384)?;
        let experts = Experts::new(&modules["moe_experts"])?;
        for kernel in linears.kernels().iter().chain(experts.kernels()) {
            println!(
                "{:<18} {:>3} registers, {} local bytes, {} shared bytes, {} threads",
                kernel.name, kernel.registers, kernel.local_bytes, kernel.static_shared_bytes, kernel.threads_max
            );
        }
        Ok(Session { gpu, modules, linears, experts, records: Vec::new(), failures: 0, only })
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn judge(&mut self, name: &str, tally: &Tally) {
        println!("{}", tally.line(name));
        self.failures += usize::from(tally.bad > 0 || tally.compared == 0);
        self.records.push(json!({"check": name, "compared": tally.compared, "bad": tally.bad, "first": tally.first}));
    }

    /// mma.sync against the emulator: adversarial exponents, special values, neighbours of every kind, one step and chains.
    fn probe(&mut self) -> Result<()> {
        let kernel = self.modules["tensor_step"].kernel("tensor_step_probe")?;
        for (steps, tiles) in [(1_usize, 8192_usize), (4, 4096), (40, 512)] {
            let columns = steps * 16;
            let mut random = Random(steps as u64);
            let ranges = [(120, 134), (87, 167), (0, 3), (1, 254), (126, 127), (200, 254)];
            let mut operand = |rows: usize, tile: usize| -> Vec<u16> {
                let mut values = Vec::with_capacity(rows * columns);
                for row in 0..rows {
                    let (low, high) = ranges[(tile + row / 3) % ranges.len()];
                    for _ in 0..columns {
                        let value = random.bf16(low, high);
                        values.push(if random.below(11) == 0 { value & 0x8000 } else { value });
                    }
                    // A column or row of NaN or infinities beside ordinary ones.
                    match random.below(24) {
                        0 => values[row * columns..].fill(0x7fc0),
                        1 => values[row * columns..].fill(0x7f80),
                        2 => values[row * columns] = 0xff80,
                        _ => {}
                    }
                }
                values
            };
            let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
            for tile in 0..tiles {
                a.extend(operand(16, tile));
                b.extend(operand(8, tile / 6));
            }
            for _ in 0..tiles * 128 {
                let bits = random.next();
                let value = f32::from_bits(bits as u32);
                c.push(match bits >> 60 {
                    0..4 => 0.0,
                    4 => value,
                    _ => f32::from_bits((bits as u32 & 0x807f_ffff) | ((100 + (bits >> 32) % 60) as u32) << 23),
                });
            }
            let (a_device, b_device) = (GpuBuffer::from_slice(&self.gpu, &a)?, GpuBuffer::from_slice(&self.gpu, &b)?);
            let c_device = GpuBuffer::from_slice(&self.gpu, &c)?;
            let d_device = GpuBuffer::from_slice(&self.gpu, &vec![f32::MAX; c.len()])?;
            let shape = Shape { blocks: tiles.div_ceil(4), threads: 128, shared_bytes: 0, cluster: 1, overlap: false };
            let address = |buffer: &GpuBuffer| Parameter::new().address(buffer.address());
            let int = |value| Parameter::new().int(value);
            let buffers = [&a_device, &b_device, &c_device, &d_device].map(address);
            let parameters: Vec<Parameter> = buffers.into_iter().chain([int(tiles), int(steps)]).collect();
            self.gpu.launch(&kernel, shape, &parameters)?;
            let mut d = vec![0.0_f32; c.len()];
            d_device.read(0, &mut d)?;
            let expected = in_parallel(c.len(), |index| {
                let (tile, row, column) = (index / 128, index % 128 / 8, index % 8);
                let (a, b) = (&a[(tile * 16 + row) * columns..], &b[(tile * 8 + column) * columns..]);
                (0..steps).fold(c[index], |sum, step| {
                    let part = |values: &[u16]| std::array::from_fn(|k| values[step * 16 + k]);
                    fma16::step(sum, &part(a), &part(b))
                })
            });
            let mut tally = Tally::default();
            for (index, (found, expected)) in d.iter().zip(&expected).enumerate() {
                tally.add(*found, *expected, || format!("tile {}, element {}", index / 128, index % 128));
            }
            self.judge(&format!("probe K={columns}"), &tally);
        }
        Ok(())
    }

    fn check_linear(&mut self, named: &Named) -> Result<()> {
        let Named { name, operator, pool } = named;
        let (rows, columns, pool) = (operator.weight_rows, operator.columns, *pool);
        let mut random = Random(rows as u64 * 31 + columns as u64);
        let (packed, packed_scales, weights) = random_weight(operator, &mut random)?;
        let width = operator.groups * columns;
        let pool_rows: Vec<Vec<u16>> = (0..pool).map(|index| pool_row(index, width, &mut random)).collect();
        let group_rows = rows / operator.groups;
        let expected: Vec<Vec<f32>> = in_parallel(rows, |row| -> Vec<f32> {
            let weight = &weights[row * columns..][..columns];
            let from = row / group_rows * columns;
            pool_rows.iter().map(|x| fma16::chunked_dot(&x[from..from + columns], weight, operator.chunk)).collect()
        });
        let weights_device = GpuBuffer::from_slice(&self.gpu, &packed)?;
        let scales_device = GpuBuffer::from_slice(&self.gpu, &packed_scales)?;
        let (mut tally, mut winners) = (Tally::default(), Tally::default());
        for row_count in ROW_COUNTS {
            // Every pool row meets every position and other neighbours as the count changes.
            let chosen: Vec<usize> = (0..row_count).map(|row| (row * 5 + row_count * 3) % pool).collect();
            let x: Vec<u16> = chosen.iter().flat_map(|index| pool_rows[*index].iter().copied()).collect();
            let x_device = GpuBuffer::from_slice(&self.gpu, &x)?;
            let index_device = GpuBuffer::from_slice(&self.gpu, &vec![u32::MAX; row_count])?;
            let tunings = checked_tunings(operator);
            for (out_is_bf16, tuning) in tunings.iter().flat_map(|tuning| [(false, tuning), (true, tuning)]) {
                let out_device = GpuBuffer::from_slice(&self.gpu, &vec![f32::MAX; row_count * rows])?;
                let to = Addresses {
                    weights: weights_device.address(),
                    scales: scales_device.address(),
                    x: x_device.address(),
                    out: out_device.address(),
                    out_is_bf16,
                    best_index: if operator.format == Format::Head { index_device.address() } else { 0 },
                };
                // Twice: what the first launch leaves behind must not change the second.
                for _ in 0..2 {
                    self.linears.launch(&self.gpu, operator, row_count, to, *tuning)?;
                }
                let found = read_outputs(&out_device, row_count * rows, out_is_bf16)?;
                for (row, pool_index) in chosen.iter().enumerate() {
                    for column in 0..rows {
                        let exact = expected[column][*pool_index];
                        let expected = if out_is_bf16 { bf16::to_f32(bf16::from_f32(exact)) } else { exact };
                        tally.add(found[row * rows + column], expected, || {
                            format!("R={row_count}, {tuning:?}, row {row} (pool {pool_index}), output {column}")
                        });
                    }
                }
            }
            if operator.format == Format::Head {
                let mut found = vec![0_u32; row_count];
                index_device.read(0, &mut found)?;
                for (row, pool_index) in chosen.iter().enumerate() {
                    let expected = winner(&expected, *pool_index);
                    winners.add(found[row] as f32, expected as f32, || format!("argmax, R={row_count}, row {row}"));
                }
            }
        }
        self.judge(name, &tally);
        if operator.format == Format::Head {
            self.judge("head argmax", &winners);
        }
        Ok(())
    }

    fn check_experts(&mut self, name: &str, sizes: Sizes) -> Result<()> {
        let Sizes { hidden, intermediate, experts } = sizes;
        let mut random = Random(hidden as u64);
        let (tensors, packed) = random_experts(sizes, &mut random)?;
        let pool: Vec<Vec<u16>> = (0..32).map(|index| pool_row(index, hidden, &mut random)).collect();
        let limit = 10.0_f32;
        let outputs = expert_mirror(sizes, &tensors, &pool, limit);
        let device: Vec<GpuBuffer> =
            packed.iter().map(|bytes| GpuBuffer::from_slice(&self.gpu, bytes)).collect::<Result<_, _>>()?;
        let mut tally = Tally::default();
        for row_count in ROW_COUNTS {
            for routing in 0..3 {
                let chosen: Vec<usize> = (0..row_count).map(|row| (row * 5 + row_count * 3 + routing) % 32).collect();
                // Spread over all, everybody on the same ones, and one expert with all rows among lonely ones.
                let picks = |row: usize| -> Vec<usize> {
                    match routing {
                        0 => (0..2).map(|pick| (row * 3 + pick * 2 + 1) % experts).collect(),
                        1 => vec![1, experts - 1],
                        _ => vec![0, 1 + row % (experts - 1)],
                    }
                };
                let plan = Plan::new(row_count, experts, picks);
                let x: Vec<u16> = chosen.iter().flat_map(|index| pool[*index].iter().copied()).collect();
                let weights: Vec<f32> =
                    plan.pairs.iter().map(|(expert, row)| weight_of(chosen[*row as usize], *expert)).collect();
                let x_device = GpuBuffer::from_slice(&self.gpu, &x)?;
                let routing_device = RoutingBuffers::new(&self.gpu, &plan, &weights)?;
                let pairs = plan.pairs.len();
                let between = GpuBuffer::from_slice(&self.gpu, &vec![0x7fc1_u16; pairs * intermediate])?;
                let out = GpuBuffer::from_slice(&self.gpu, &vec![0x7fc1_u16; pairs * hidden])?;
                let to = routing_device.addresses(&device, &x_device, &between, &out);
                self.experts.launch(&self.gpu, sizes, row_count, to, limit, ExpertTuning::default())?;
                let mut found = vec![0_u16; pairs * hidden];
                out.read(0, &mut found)?;
                for (pair, (expert, row)) in plan.pairs.iter().enumerate() {
                    for column in 0..hidden {
                        let expected = outputs[expert * hidden + column][chosen[*row as usize]];
                        tally.add(bf16::to_f32(found[pair * hidden + column]), expected, || {
                            format!("R={row_count}, routing {routing}, pair {pair} (expert {expert}), output {column}")
                        });
                    }
                }
            }
        }
        self.judge(name, &tally);
        Ok(())
    }

    /// Median, least and most microseconds of a call: a graph of `calls`, replayed.
    fn time(&self, calls: usize, launch: impl Fn(usize) -> Result<(), tf_device::cuda::CudaError>) -> Result<[f64; 3]> {
        let graph = self.gpu.capture(|| (0..calls).try_for_each(&launch))?;
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

    fn report(&mut self, name: &str, rows: usize, note: &str, bytes: f64, [median, least, most]: [f64; 3]) {
        let fractions = RATES.map(|rate| bytes / rate / median);
        println!(
            "| {name} | {rows} | {note} | {median:.2} | {least:.2}-{most:.2} | {:.0} | {:.2} | {:.2} | {:.2} |",
            bytes / median / 1000.0,
            bytes / RATES[0],
            fractions[0],
            fractions[1]
        );
        self.records.push(json!({
            "op": name, "rows": rows, "note": note, "bytes": bytes, "us_median": median, "us_least": least, "us_most": most,
            "fraction_of_copy": fractions[0], "fraction_of_read": fractions[1],
        }));
    }

    fn time_linear(&mut self, named: &Named, row_counts: &[usize], tunings: &[Tuning]) -> Result<()> {
        let Named { name, operator, .. } = named;
        let bytes = operator.weight_bytes();
        let copies = (4 * self.gpu.l2_bytes).div_ceil(bytes).max(2);
        let codes = operator.slabs() * (operator.columns / 32) * operator.format.block_bytes();
        let stride = codes.next_multiple_of(256);
        let mut random = Random(7);
        let period = (64 << 20).min(copies * stride);
        let pattern: Vec<u16> = (0..period / 2)
            .map(|_| if operator.format == Format::Fp8 { random.next() as u16 } else { random.bf16(112, 126) })
            .collect();
        let mut weights = GpuBuffer::zeroed(&self.gpu, copies * stride)?;
        weights.write(0, &pattern)?;
        weights.repeat(period)?;
        let scale_count = operator.slabs().div_ceil(2) * (operator.columns / 32).next_multiple_of(8);
        let scale_stride = scale_count.next_multiple_of(256);
        let scale_bytes: Vec<u8> = (0..copies * scale_stride).map(|_| 116 + random.below(7) as u8).collect();
        let scales = GpuBuffer::from_slice(&self.gpu, &scale_bytes)?;
        let x: Vec<u16> = (0..32 * operator.groups * operator.columns).map(|_| random.bf16(120, 127)).collect();
        let x = GpuBuffer::from_slice(&self.gpu, &x)?;
        let out = GpuBuffer::zeroed(&self.gpu, 32 * operator.weight_rows * 4)?;
        let best = GpuBuffer::zeroed(&self.gpu, 32 * 4)?;
        let calls = if operator.format == Format::Head { 4 } else { copies.max(16) };
        for rows in row_counts {
            for tuning in tunings {
                let measured = self.time(calls, |call| {
                    let copy = call % copies;
                    let to = Addresses {
                        weights: weights.address() + (copy * stride) as u64,
                        scales: scales.address() + (copy * scale_stride) as u64,
                        x: x.address(),
                        out: out.address(),
                        out_is_bf16: operator.format == Format::Fp8,
                        best_index: if operator.format == Format::Head { best.address() } else { 0 },
                    };
                    self.linears.launch(&self.gpu, operator, *rows, to, *tuning)
                })?;
                let overlap = if tuning.overlap { "overlap" } else { "serial" };
                let plan = self.linears.describe(&self.gpu, operator, *rows, *tuning);
                let note = format!("{plan}, {overlap}");
                self.report(name, *rows, &note, bytes as f64, measured);
            }
        }
        Ok(())
    }

    fn time_experts(&mut self, row_counts: &[usize], tunings: &[ExpertTuning]) -> Result<()> {
        let sizes = Sizes { hidden: 5120, intermediate: 2304, experts: 384 };
        let up = sizes.hidden * sizes.intermediate;
        let mut random = Random(11);
        let mut device = Vec::new();
        for (index, bytes) in [up, up / 16, up / 2, up / 32].into_iter().enumerate() {
            let mut buffer = GpuBuffer::zeroed(&self.gpu, sizes.experts * bytes)?;
            let period = (32 << 20).min(buffer.len_bytes());
            let pattern: Vec<u8> = (0..period)
                .map(|_| if index % 2 == 0 { random.next() as u8 } else { 116 + random.below(7) as u8 })
                .collect();
            buffer.write(0, &pattern)?;
            buffer.repeat(period)?;
            device.push(buffer);
        }
        let x: Vec<u16> = (0..32 * sizes.hidden).map(|_| random.bf16(120, 127)).collect();
        let x = GpuBuffer::from_slice(&self.gpu, &x)?;
        for rows in row_counts {
            let pairs = rows * 6;
            let between = GpuBuffer::zeroed(&self.gpu, pairs * sizes.intermediate * 2)?;
            let out = GpuBuffer::zeroed(&self.gpu, pairs * sizes.hidden * 2)?;
            // Sixteen routings in turn; distinct experts are counted, not assumed.
            let mut distinct = 0;
            let mut routings = Vec::new();
            for _ in 0..16 {
                let picks: Vec<Vec<usize>> = (0..*rows)
                    .map(|_| {
                        let mut chosen = Vec::new();
                        while chosen.len() < 6 {
                            let expert = random.below(384) as usize;
                            if !chosen.contains(&expert) {
                                chosen.push(expert);
                            }
                        }
                        chosen
                    })
                    .collect();
                let plan = Plan::new(*rows, sizes.experts, |row| picks[row].clone());
                distinct += plan.active.len();
                routings.push(RoutingBuffers::new(&self.gpu, &plan, &vec![0.3; pairs])?);
            }
            let distinct = distinct as f64 / 16.0;
            for tuning in tunings {
                let measured = self.time(16, |call| {
                    let to = routings[call].addresses(&device, &x, &between, &out);
                    self.experts.launch(&self.gpu, sizes, *rows, to, 10.0, *tuning)
                })?;
                let overlap = if tuning.overlap { "overlap" } else { "serial" };
                let note = format!("{distinct:.1} distinct, {} teams, {overlap}", tuning.teams);
                self.report("experts up+down", *rows, &note, distinct * sizes.expert_bytes() as f64, measured);
            }
        }
        Ok(())
    }

    /// Every operator and the experts: the chosen launches at all row counts, or all launches at some.
    fn time_all(&mut self, operators: &[Named], sweep: bool) -> Result<()> {
        println!("| op | rows | launch | us | least-most | GB/s | floor us | of 4.3 TB/s | of 4.657 TB/s |");
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
        let skipped = ["odd", "small", "odd bf16"];
        let mut tunings = vec![Tuning::default()];
        let mut teams = vec![ExpertTuning::default()];
        if sweep {
            tunings.clear();
            let plain = Tuning::default();
            tunings
                .extend([Fold::Together, Fold::Cluster, Fold::Apart].map(|fold| Tuning { fold: Some(fold), ..plain }));
            tunings.push(Tuning { overlap: false, ..plain });
            teams = [4, 5].map(|teams| ExpertTuning { teams, overlap: true }).to_vec();
            teams.push(ExpertTuning { overlap: false, ..ExpertTuning::default() });
        }
        let row_counts: &[usize] = if sweep { &[1, 16] } else { &TIMED_ROWS };
        for named in operators {
            if self.wants(named.name) && !skipped.contains(&named.name) {
                self.time_linear(named, row_counts, &tunings)?;
            }
        }
        if self.wants("experts") {
            self.time_experts(if sweep { &[1, 6, 16] } else { &[1, 2, 4, 6, 8, 16, 32] }, &teams)?;
        }
        Ok(())
    }
}

/// Pairs in the order of (expert, row).
struct Plan {
    active: Vec<u32>,
    starts: Vec<u32>,
    pairs: Vec<(usize, u32)>,
}

impl Plan {
    fn new(rows: usize, experts: usize, picks: impl Fn(usize) -> Vec<usize>) -> Plan {
        let mut plan = Plan { active: Vec::new(), starts: vec![0], pairs: Vec::new() };
        let all: Vec<Vec<usize>> = (0..rows).map(picks).collect();
        for expert in 0..experts {
            let before = plan.pairs.len();
            plan.pairs.extend((0..rows).filter(|row| all[*row].contains(&expert)).map(|row| (expert, row as u32)));
            if plan.pairs.len() > before {
                plan.active.push(expert as u32);
                plan.starts.push(plan.pairs.len() as u32);
            }
        }
        plan
    }
}

struct RoutingBuffers {
    active: GpuBuffer,
    count: GpuBuffer,
    starts: GpuBuffer,
    rows: GpuBuffer,
    weights: GpuBuffer,
}

impl RoutingBuffers {
    fn new(gpu: &Gpu, plan: &Plan, weights: &[f32]) -> Result<RoutingBuffers> {
        let rows: Vec<u32> = plan.pairs.iter().map(|(_, row)| *row).collect();
        Ok(RoutingBuffers {
            active: GpuBuffer::from_slice(gpu, &plan.active)?,
            count: GpuBuffer::from_slice(gpu, &[plan.active.len() as u32])?,
            starts: GpuBuffer::from_slice(gpu, &plan.starts)?,
            rows: GpuBuffer::from_slice(gpu, &rows)?,
            weights: GpuBuffer::from_slice(gpu, weights)?,
        })
    }

    fn addresses(&self, weights: &[GpuBuffer], x: &GpuBuffer, between: &GpuBuffer, out: &GpuBuffer) -> ExpertAddresses {
        ExpertAddresses {
            up_codes: weights[0].address(),
            up_scales: weights[1].address(),
            down_codes: weights[2].address(),
            down_scales: weights[3].address(),
            x: x.address(),
            active: self.active.address(),
            active_count: self.count.address(),
            starts: self.starts.address(),
            pair_row: self.rows.address(),
            pair_weight: self.weights.address(),
            between: between.address(),
            out: out.address(),
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let cubins =
        arguments.next().context("usage: tf-cuda-check CUBINS [check] [time] [sweep] [--out FILE] [--only NAME]")?;
    let (mut modes, mut out, mut only) = (Vec::new(), None, None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = arguments.next(),
            "--only" => only = arguments.next(),
            "check" | "time" | "sweep" => modes.push(argument),
            other => bail!("`{other}` is none of check, time, sweep, --out FILE, --only NAME"),
        }
    }
    let has = |mode: &str| modes.iter().any(|found| found == mode);
    let mut session = Session::open(&cubins, only)?;
    let gpu = session.gpu.clone();
    let (free, total) = (gpu.free_bytes()? >> 20, gpu.memory_bytes >> 20);
    println!(
        "{}: sm_{}, driver CUDA {}, {} multiprocessors, L2 {} MiB, {free} of {total} MiB free, {} shared bytes a block",
        gpu.name,
        gpu.target(),
        gpu.driver,
        gpu.multiprocessors,
        gpu.l2_bytes >> 20,
        gpu.shared_bytes_max
    );
    session.records.push(json!({
        "device": gpu.name, "target": gpu.target(), "driver": gpu.driver, "multiprocessors": gpu.multiprocessors,
        "l2_bytes": gpu.l2_bytes, "memory_bytes": gpu.memory_bytes, "clock_khz": gpu.clock_khz, "replays": REPLAYS,
    }));
    let operators = operators();
    if has("check") {
        if session.wants("probe") {
            session.probe()?;
        }
        for named in &operators {
            if session.wants(named.name) {
                session.check_linear(named)?;
            }
        }
        if session.wants("experts") {
            session.check_experts("experts", Sizes { hidden: 5120, intermediate: 2304, experts: 6 })?;
        }
        if session.wants("experts, small") {
            session.check_experts("experts, small", Sizes { hidden: 192, intermediate: 128, experts: 7 })?;
        }
    }
    if has("time") || has("sweep") {
        session.time_all(&operators, has("sweep"))?;
    }
    if let Some(path) = out {
        let mut file = fs::File::create(&path).with_context(|| path.clone())?;
        for record in &session.records {
            writeln!(file, "{record}")?;
        }
    }
    if session.failures > 0 {
        bail!("{} checks failed", session.failures);
    }
    Ok(())
}
