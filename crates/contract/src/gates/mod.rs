//! The four gates, one question each.

pub mod geometry;
pub mod limits;
pub mod memory;
pub mod repeat;
pub mod value;
