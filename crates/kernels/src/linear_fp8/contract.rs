//! What must hold of the FP8 linears; the world is [`crate::linear::contract`]'s.

use crate::contract::*;
use crate::linear::contract::{BOUND, CASES, Format, ORDER, SCALED_CONTROLS, make};

pub const LINEAR_FP8: Contract = Contract {
    name: "linear_fp8",
    formula: "out = x @ W^T, W in E4M3 with one power-of-two scale a 32 x 32 block; then bf16, or bf16 and QDQ8",
    shapes: "x [rows, columns] f32 after QDQ8; W [outputs, columns]; out [rows, outputs] f32; several W a launch",
    order: ORDER,
    bound: BOUND,
    cases: CASES,
    make: |case, seed| make(case, seed, Format::Fp8(1)),
    limits: &[Limit { what: "columns", most: super::COLUMNS_MAX, accepts, beyond: super::COLUMNS_MAX + 32 }],
    controls: SCALED_CONTROLS,
    standard: STANDARD_CONTROLS,
};

pub const GROUPED: Contract = Contract {
    name: "linear_fp8/grouped",
    formula: "block g of the outputs = column block g of x @ W_g^T: the grouped output projection",
    shapes: "x [rows, groups * columns] f32, bf16 values; W [groups * outputs, columns]; out [rows, groups * \
        outputs] f32",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("columns", 128), ("outputs", 64)] },
        Case { name: "odd blocks", rows: 9, sizes: &[("columns", 96), ("outputs", 20)] },
        Case { name: "padded columns", rows: 3, sizes: &[("columns", 48), ("outputs", 8)] },
    ],
    make: |case, seed| make(case, seed, Format::Fp8(4)),
    limits: &[],
    ..LINEAR_FP8
};

fn accepts(columns: usize) -> bool {
    let (codes, scales) = (vec![0x38; columns], vec![127; columns.div_ceil(32)]);
    super::Weights::pack(&tf_device::Device::cpu(), &codes, &scales, 1, columns).is_ok()
}
