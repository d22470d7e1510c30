//! Numbers whose bits are part of the product: formats, sums, functions, tables and draws.
//!
//! Everything here is a pure function with one result on every CPU: scalar, AVX2, AVX-512 and NEON bodies come from one
//! generic source ([`lanes`]), reductions have one named order ([`sum`]), and no function of the system's mathematics
//! library is on a path that a reply depends on. Knows nothing of models, devices or threads.

pub mod bf16;
pub mod compare;
pub mod draw;
pub mod fma16;
pub mod fp8;
pub mod lanes;
pub mod math;
pub mod mxfp4;
pub mod qdq;
pub mod rope;
pub mod sum;
