//! All decisions: which rows run, what is kept, when a reply ends. Knows no device, dtype or HTTP type.

pub mod model;
pub mod request;
