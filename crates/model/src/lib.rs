//! DeepSeek-V4.1-Flash: shape, weight table, caches, forward and draft head. All mathematics, no scheduling.

pub mod deepseek_v41;
