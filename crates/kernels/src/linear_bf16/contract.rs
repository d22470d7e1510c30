//! What must hold of the linears with unquantised weights; the world is [`crate::linear::contract`]'s.

use crate::contract::*;
use crate::linear::contract::{
    BOUND, CASES, CONTROLS, CUDA_FOLD, CUDA_ROUNDING, CUDA_SPLIT_STEPS, CUDA_THREE_ROWS, CUDA_TILE_STEPS, Format,
    ORDER, make, metal_dot,
};

pub const LINEAR_BF16: Contract = Contract {
    name: "linear_bf16",
    formula: "out = x @ W^T, W in bf16; then nothing, bf16, or bf16 and QDQ8",
    shapes: "x [rows, columns] f32; W [outputs, columns] bf16; out [rows, outputs] f32; several W a launch",
    order: ORDER,
    bound: BOUND,
    cases: CASES,
    make: |case, seed| make(case, seed, Format::Bf16),
    limits: &[],
    controls: CONTROLS,
    edits: &[
        metal_dot(
            "drops the last column (Metal)",
            "w1 = WHOLE || c1 < columns ? value_of(w[c1]) : 0.0f;",
            "w1 = c1 + 1u < columns ? value_of(w[c1]) : 0.0f;",
        ),
        metal_dot(
            "adds in another order (Metal)",
            "acc[odd * ROWS + r];\n            const float p",
            "acc[r];\n            const float p",
        ),
        CUDA_ROUNDING,
        CUDA_THREE_ROWS,
        CUDA_SPLIT_STEPS,
        CUDA_TILE_STEPS,
        CUDA_FOLD,
    ],
    standard: STANDARD_CONTROLS,
};

pub const LINEAR_F32: Contract = Contract {
    name: "linear_bf16/f32",
    formula: "out = x @ W^T, W in float32; then nothing, bf16, or bf16 and QDQ8",
    shapes: "x [rows, columns] f32; W [outputs, columns] f32; out [rows, outputs] f32; several W a launch",
    make: |case, seed| make(case, seed, Format::F32),
    edits: &[
        metal_dot(
            "adds in another order (Metal)",
            "acc[odd * ROWS + r];\n            const float p",
            "acc[r];\n            const float p",
        ),
        metal_dot(
            "rounds a product on its own (Metal)",
            "const float p = fma(w0, input<WHOLE>(x + rows[r], c0, columns), sum);",
            "const float p = w0 * input<WHOLE>(x + rows[r], c0, columns) + sum;",
        ),
    ],
    ..LINEAR_BF16
};
