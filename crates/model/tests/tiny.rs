//! The production model on the CPU against recorded values.

mod common;
mod goldens;
mod production;

use tf_model::deepseek_v41::{DeepseekV41, Options};

const IS_EMULATED: bool = false;
/// Rows of a run before a float32 sum first falls on the other side of a rounding.
const EQUAL_ROWS: usize = 19;

fn model(options: Options) -> DeepseekV41 {
    production::tiny_a().load(options)
}

const fn is_ready() -> bool {
    true
}
