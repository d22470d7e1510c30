//! What must hold of the output head; the world is [`crate::linear::contract`]'s.

use crate::contract::*;
use crate::linear::contract::{BOUND, CASES, CONTROLS, Format, ORDER, make, metal_dot};

pub const LM_HEAD: Contract = Contract {
    name: "lm_head",
    formula: "out[i] = x[row_indices[i]] @ W^T, unrounded",
    shapes: "x [rows, columns] f32, W [vocabulary, columns] bf16, out [row_indices, vocabulary] f32",
    order: ORDER,
    bound: BOUND,
    cases: CASES,
    make: |case, seed| make(case, seed, Format::Head),
    limits: &[],
    controls: CONTROLS,
    edits: &[
        metal_dot(
            "drops the last column (Metal)",
            "w1 = WHOLE || c1 < columns ? value_of(w[c1]) : 0.0f;",
            "w1 = c1 + 1u < columns ? value_of(w[c1]) : 0.0f;",
        ),
        metal("takes the rows in order (Metal)", "ulong(row_indices[i]) * columns", "ulong(i) * columns"),
        metal("rounds the logits (Metal)", "+ n] = sum;", "+ n] = bf16_round(sum);"),
        Control::cuda(
            "takes the rows in order (CUDA)",
            Gate::Value,
            include_str!("../linear/kernel.cu"),
            "(chosen ? chosen[row] : row) * shape.x_stride + part",
            "row * shape.x_stride + part",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}
