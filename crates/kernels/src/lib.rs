//! The kernels: one folder a family, holding its definition in float64, its production code and its launcher.
//!
//! Every family's `mod.rs` states formula, shapes, dtypes, rounding points and summation order; `launch` checks the
//! arguments against each other and dispatches on the queue. A row's bits depend on that row's inputs only: not on its
//! neighbours, their number, the threads or the instruction set.
//!
//! Activations are float32 buffers, row-major, holding bfloat16 values wherever the release rounds to bfloat16. Reads no
//! file and no environment, and knows no layer number.

pub mod contract;
#[cfg(feature = "cuda")]
pub mod cubins;
pub mod families;
pub mod float_step;
mod gpu;
pub mod numerics_policy;
pub mod order;
pub mod pack;
mod parallel;
pub mod reference_formats;
pub mod rows;
#[cfg(test)]
mod testing;

pub mod attention;
pub mod draft_head;
pub mod embed;
pub mod engram;
pub mod hyper;
pub mod index_key;
pub mod index_query;
pub mod index_score;
pub mod kv_compress;
pub mod kv_store;
pub mod linear;
pub mod linear_bf16;
pub mod linear_fp8;
pub mod lm_head;
pub mod moe_experts;
pub mod moe_route;
pub mod quantise;
pub mod rms_norm;
pub mod rope;
pub mod sample;
pub mod stream_read;
pub mod tensor_step;
pub mod top_k;
