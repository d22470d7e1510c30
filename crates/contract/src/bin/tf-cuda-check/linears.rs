//! The linears and the head, as the model launches them.

use anyhow::Result;
use tf_device::{Buffer, Device, Queue};
use tf_kernels::linear::Finish;
use tf_kernels::linear::cuda::{Format, chunk};
use tf_kernels::moe_experts::cuda::{DOWN_CHUNK, UP_CHUNK};
use tf_kernels::{linear_bf16, linear_fp8, lm_head};
use tf_numerics::lanes::Level;
use tf_numerics::{bf16, fma16, fp8, qdq};

use crate::random::{Random, Tally, in_parallel, pool_row};

pub(crate) const ROW_COUNTS: [usize; 15] = [1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 71];

#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub name: &'static str,
    pub format: Format,
    pub weight_rows: usize,
    pub columns: usize,
    pub groups: usize,
    /// The declared columns of a chunk.
    pub chunk: usize,
    /// Rows of the pool: fewer where the mirror would take long.
    pub pool: usize,
    /// Timed, too.
    pub released: bool,
}

/// The release's shapes, those of the two small checkpoints, and odd ones: a last chunk that is shorter, padded rows and
/// columns, groups whose rows fill no slab.
pub(crate) fn cases() -> Vec<Case> {
    let case = |name, format, weight_rows, columns, groups| Case {
        name,
        format,
        weight_rows,
        columns,
        groups,
        chunk: chunk(format, columns),
        pool: 32,
        released: true,
    };
    let small = |name, format, weight_rows, columns, groups| Case {
        released: false,
        ..case(name, format, weight_rows, columns, groups)
    };
    vec![
        case("wq_a", Format::Fp8, 1280, 5120, 1),
        case("wq_b", Format::Fp8, 32_768, 1280, 1),
        case("wo_a", Format::Fp8, 8192, 4096, 8),
        case("wo_b", Format::Fp8, 5120, 8192, 1),
        case("shared w2", Format::Fp8, 5120, 2304, 1),
        case("index wq_b", Format::Fp8, 4096, 1280, 1),
        case("engram wkv", Format::Fp8, 25_600, 6144, 1),
        Case { pool: 16, ..case("main_proj", Format::Fp8, 5120, 15_360, 1) },
        case("router", Format::Bf16, 384, 5120, 1),
        case("compressor", Format::Bf16, 1024, 5120, 1),
        case("index weights", Format::Bf16, 32, 5120, 1),
        case("index wk", Format::Bf16, 128, 512, 1),
        Case { pool: 8, ..case("head", Format::Head, 129_280, 5120, 1) },
        small("tiny wq_b", Format::Fp8, 512, 64, 1),
        small("tiny wo_a", Format::Fp8, 128, 128, 4),
        small("demo wq_a", Format::Fp8, 96, 160, 1),
        small("demo wo_a", Format::Fp8, 128, 256, 2),
        small("demo main_proj", Format::Fp8, 160, 480, 1),
        small("demo gate", Format::Bf16, 16, 160, 1),
        small("demo draft gate", Format::Bf16, 8, 160, 1),
        small("demo index weights", Format::Bf16, 4, 160, 1),
        small("demo head", Format::Head, 4096, 160, 1),
        small("odd", Format::Fp8, 80, 1696, 1),
        small("odd rows and columns", Format::Fp8, 39, 1684, 1),
        small("odd groups", Format::Fp8, 20, 96, 4),
        small("odd padded groups", Format::Fp8, 72, 84, 3),
        small("odd bf16", Format::Bf16, 75, 1690, 1),
        small("odd head", Format::Head, 75, 1690, 1),
    ]
}

/// What is timed: the released ones, and the products that the model launches together as one weight.
pub(crate) fn timed() -> Vec<Case> {
    let mut cases: Vec<Case> = cases().into_iter().filter(|case| case.released).collect();
    let of_hidden = cases[0];
    cases.extend([
        Case { name: "wq_a+wkv", weight_rows: 1280 + 512, ..of_hidden },
        Case { name: "shared w1+w3", weight_rows: 2 * 2304, chunk: UP_CHUNK, ..of_hidden },
    ]);
    // The shared expert's chunks are those of the mixture.
    for case in cases.iter_mut().filter(|case| case.name == "shared w2") {
        case.chunk = DOWN_CHUNK;
    }
    cases
}

pub(crate) enum Weights {
    Fp8(linear_fp8::Weights),
    Bf16(linear_bf16::Weights),
}

/// A weight on the device, and every weight as bf16.
fn random_weight(device: &Device, case: &Case, random: &mut Random) -> Result<(Weights, Vec<u16>)> {
    let (rows, columns) = (case.weight_rows, case.columns);
    if case.format != Format::Fp8 {
        let weights: Vec<u16> = (0..rows * columns).map(|_| random.bf16(112, 126)).collect();
        let bytes: Vec<u8> = weights.iter().flat_map(|value| value.to_le_bytes()).collect();
        let packed = linear_bf16::Weights::pack(device, &bytes, linear_bf16::Dtype::Bf16, rows, columns)?;
        return Ok((Weights::Bf16(packed), weights));
    }
    let blocks = columns.div_ceil(32);
    let codes: Vec<u8> = (0..rows * columns).map(|_| random.e4m3()).collect();
    let scale =
        |random: &mut Random| if random.below(40) == 0 { 3 + random.below(132) } else { 112 + random.below(12) };
    let scales: Vec<u8> = (0..rows.div_ceil(32) * blocks).map(|_| scale(random) as u8).collect();
    let packed = linear_fp8::Weights::pack(device, &codes, &scales, rows, columns)?;
    let weights = in_parallel(rows, |row| -> Vec<u16> {
        let value = |column: usize| {
            let scale = fp8::decode_e8m0(scales[row / 32 * blocks + column / 32]);
            bf16::from_f32(fp8::decode_e4m3(codes[row * columns + column]) * scale)
        };
        (0..columns).map(value).collect()
    })
    .concat();
    Ok((Weights::Fp8(packed), weights))
}

/// Launches as the model does: FP8 and bf16 with these finishes, one product each; the head with chosen rows.
pub(crate) fn launch(
    queue: &mut Queue,
    case: &Case,
    weights: &Weights,
    x: &Buffer,
    rows: &[u32],
    outs: &mut [(Finish, Buffer)],
) -> Result<()> {
    match weights {
        Weights::Fp8(weights) => {
            let product = |(finish, out)| linear_fp8::Product { weights, out, finish };
            let mut products: Vec<_> = outs.iter_mut().map(|(finish, out)| product((*finish, out))).collect();
            let args = linear_fp8::Args { x, rows: rows.len(), groups: case.groups, products: &mut products };
            match queue {
                Queue::Gpu(queue) if case.chunk != chunk(case.format, case.columns) => {
                    linear_fp8::measure_in_chunks(queue, args, case.chunk)?;
                }
                _ => linear_fp8::launch(queue, args)?,
            }
        }
        Weights::Bf16(weights) if case.format == Format::Head => {
            let out = &mut outs[0].1;
            lm_head::launch(queue, lm_head::Args { weights, x, row_indices: rows, out })?;
        }
        Weights::Bf16(weights) => {
            let product = |(finish, out)| linear_bf16::Product { weights, out, finish };
            let mut products: Vec<_> = outs.iter_mut().map(|(finish, out)| product((*finish, out))).collect();
            linear_bf16::launch(queue, linear_bf16::Args { x, rows: rows.len(), products: &mut products })?;
        }
    }
    Ok(())
}

fn finishes(case: &Case) -> Vec<Finish> {
    match case.format {
        Format::Head => vec![Finish::F32],
        _ if case.weight_rows.is_multiple_of(32) => vec![Finish::F32, Finish::Bf16, Finish::Qdq8],
        _ => vec![Finish::F32, Finish::Bf16],
    }
}

fn finished(finish: Finish, mut row: Vec<f32>) -> Vec<f32> {
    if finish != Finish::F32 {
        row.iter_mut().for_each(|value| *value = bf16::to_f32(bf16::from_f32(*value)));
    }
    if finish == Finish::Qdq8 {
        qdq::round_row(Level::best(), qdq::Format::Fp8, &mut row);
    }
    row
}

fn wide(rows: &[Vec<u16>], chosen: &[usize]) -> Vec<f32> {
    chosen.iter().flat_map(|index| rows[*index].iter().map(|bits| bf16::to_f32(*bits))).collect()
}

/// Every output of every row count against the emulator.
pub(crate) fn check(device: &Device, queue: &mut Queue, case: &Case) -> Result<Tally> {
    let (rows, columns) = (case.weight_rows, case.columns);
    let mut random = Random(rows as u64 * 31 + columns as u64);
    let (weights, values) = random_weight(device, case, &mut random)?;
    let pool: Vec<Vec<u16>> = (0..case.pool).map(|index| pool_row(index, case.groups * columns, &mut random)).collect();
    let (group_rows, length) = (rows / case.groups, case.chunk);
    // [weight row][pool row]
    let exact: Vec<Vec<f32>> = in_parallel(rows, |row| -> Vec<f32> {
        let (weight, from) = (&values[row * columns..][..columns], row / group_rows * columns);
        pool.iter().map(|x| fma16::chunked_dot(&x[from..from + columns], weight, length)).collect()
    });
    let expected: Vec<Vec<Vec<f32>>> = finishes(case)
        .into_iter()
        .map(|finish| in_parallel(case.pool, |row| finished(finish, exact.iter().map(|by_row| by_row[row]).collect())))
        .collect();
    let mut tally = Tally::default();
    for row_count in ROW_COUNTS {
        // Every pool row meets every position and other neighbours as the count changes.
        let chosen: Vec<usize> = (0..row_count).map(|row| (row * 5 + row_count * 3) % case.pool).collect();
        let x = Buffer::from_slice(device, &wide(&pool, &chosen))?;
        // The head takes its rows from the end.
        let mut indices: Vec<u32> = (0..row_count as u32).collect();
        if case.format == Format::Head {
            indices.reverse();
        }
        let mut outs: Vec<(Finish, Buffer)> = finishes(case)
            .into_iter()
            .map(|finish| Ok((finish, Buffer::from_slice(device, &vec![f32::MAX; row_count * rows])?)))
            .collect::<Result<_>>()?;
        // Twice: what the first launch leaves behind must not change the second.
        for _ in 0..2 {
            launch(queue, case, &weights, &x, &indices, &mut outs)?;
        }
        for ((finish, out), expected) in outs.iter().zip(&expected) {
            let found: Vec<f32> = out.to_vec()?;
            for (found, index) in found.chunks(rows).zip(&indices) {
                let pool_index = chosen[*index as usize];
                tally.add_rows(found, &expected[pool_index], rows, |_, column| {
                    format!("R={row_count}, {finish:?}, row {index} (pool {pool_index}), output {column}")
                });
            }
        }
    }
    Ok(tally)
}

/// Every row of a long launch against the same row launched alone.
pub(crate) fn check_long(device: &Device, queue: &mut Queue, case: &Case, row_counts: &[usize]) -> Result<Tally> {
    let (rows, columns) = (case.weight_rows, case.columns);
    let mut random = Random(rows as u64 * 37 + columns as u64);
    let (weights, _) = random_weight(device, case, &mut random)?;
    let pool: Vec<Vec<u16>> = (0..32).map(|index| pool_row(index, case.groups * columns, &mut random)).collect();
    let finish = if case.format == Format::Head { Finish::F32 } else { Finish::Bf16 };
    let run = |queue: &mut Queue, chosen: &[usize]| -> Result<Vec<f32>> {
        let x = Buffer::from_slice(device, &wide(&pool, chosen))?;
        let indices: Vec<u32> = (0..chosen.len() as u32).collect();
        let mut outs = [(finish, Buffer::from_slice(device, &vec![f32::MAX; chosen.len() * rows])?)];
        launch(queue, case, &weights, &x, &indices, &mut outs)?;
        Ok(outs[0].1.to_vec()?)
    };
    let alone: Vec<Vec<f32>> = (0..pool.len()).map(|index| run(queue, &[index])).collect::<Result<_>>()?;
    let mut tally = Tally::default();
    for &row_count in row_counts {
        let chosen: Vec<usize> = (0..row_count).map(|row| (row * 5 + row / 32) % pool.len()).collect();
        let found = run(queue, &chosen)?;
        for (row, (found, pool_index)) in found.chunks(rows).zip(&chosen).enumerate() {
            tally.add_rows(found, &alone[*pool_index], rows, |_, column| {
                format!("R={row_count}, row {row} (pool {pool_index}), output {column}")
            });
        }
    }
    Ok(tally)
}
