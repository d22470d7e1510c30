//! In preparation.

pub mod reference;
