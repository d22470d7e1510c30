//! What must hold of the FP8 linears; the world is [`crate::linear::contract`]'s.

use crate::contract::*;
use crate::linear::contract::{
    BOUND, CASES, CUDA_FOLD, CUDA_ROUNDING, CUDA_SCALE, CUDA_SPLIT_STEPS, CUDA_THREE_ROWS, CUDA_TILE_STEPS, Format,
    ORDER, SCALED_CONTROLS, make, metal_dot,
};

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
    edits: &[
        metal("takes the scale of another block row (Metal)", "scales + n / 32u * (", "scales + (n + 1u) / 32u * ("),
        metal(
            "counts whole blocks of columns alone (Metal)",
            "scales + n / 32u * ((columns + 31u) / 32u)",
            "scales + n / 32u * (columns / 32u)",
        ),
        metal("leaves the rounding out (Metal)", "shape.round != 0u ? bf16_round(sum) : sum", "sum"),
        metal("reads the first rows for all (Metal)", "x + ulong(row * shape.groups + part)", "x + ulong(part)"),
        metal("skips rows behind a few (Metal)", "return row + ROWS;", "return row + 8u;"),
        metal_dot(
            "adds to the other accumulator (Metal)",
            "acc[odd * ROWS + r];\n            sum = add_group",
            "acc[r];\n            sum = add_group",
        ),
        metal_dot("takes the next row's sum (Metal)", "x + r * step, c0", "x + (r ^ 1u) % ROWS * step, c0"),
        metal_dot(
            "takes a padded scale for the last (Metal)",
            "const float scale = WHOLE || g < groups ? e8m0_value(scales[g]) : 1.0f;",
            "const float scale = WHOLE || g + 1u < groups ? e8m0_value(scales[g]) : 1.0f;",
        ),
        CUDA_ROUNDING,
        CUDA_THREE_ROWS,
        CUDA_SPLIT_STEPS,
        CUDA_TILE_STEPS,
        CUDA_FOLD,
        CUDA_SCALE,
    ],
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
    edits: &[
        metal(
            "reads the input of the first group (Metal)",
            "ulong(row * shape.groups + part) * columns",
            "ulong(row * shape.groups) * columns",
        ),
        metal("takes the scale of another block row (Metal)", "scales + n / 32u * (", "scales + (n + 1u) / 32u * ("),
    ],
    ..LINEAR_FP8
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

fn accepts(columns: usize) -> bool {
    let (codes, scales) = (vec![0x38; columns], vec![127; columns.div_ceil(32)]);
    super::Weights::pack(&tf_device::Device::cpu(), &codes, &scales, 1, columns).is_ok()
}
