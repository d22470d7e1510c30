//! Measurements as records: what was run, where, every sample, and how a table of them is printed. Speaks HTTP to a
//! server; runs no model itself.
//!
//! Replies are compared by the digest that the server gives for their tokens. What the server doesn't say is unknown,
//! and unknown never passes.

pub mod cache;
pub mod child;
pub mod client;
pub mod compare;
pub mod concurrent;
pub mod load;
pub mod record;
pub mod serve;
pub mod soak;
pub mod workload;

pub use client::{Client, ClientError};
pub use record::{Check, Format, Record, ReplyRow, Row};
