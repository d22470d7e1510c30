//! Measurements as records: what was run, where, every sample, and how a table of them is printed. Speaks HTTP to a
//! server; runs no model itself.

pub mod record;

pub use record::{Format, Record, Row};
