//! The DeepSeek-V4.1 family.

pub mod engram;
pub mod pages;
pub mod reference;
pub mod rows;
pub mod shape;
