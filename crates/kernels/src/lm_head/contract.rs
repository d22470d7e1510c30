//! What must hold of the output head; the world is [`crate::linear::contract`]'s.

use crate::contract::*;
use crate::linear::contract::{BOUND, CASES, CONTROLS, Format, ORDER, make};

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
    standard: STANDARD_CONTROLS,
};
