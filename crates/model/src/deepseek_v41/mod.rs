//! The DeepSeek-V4.1 family.

pub mod cache;
mod draft;
mod draw;
pub mod engram;
pub mod engram_rows;
pub mod fault;
mod forward;
mod inspect;
pub mod laws;
pub mod load;
pub mod memory;
mod model;
pub mod pages;
pub mod parts;
pub mod random;
pub mod reference;
pub mod rows;
mod scratch;
pub mod self_check;
pub mod shape;
pub mod snapshot;
mod snapshot_file;
mod timing;
pub mod weights;

pub use draw::DrawError;
pub use fault::Fault;
pub use forward::StepError;
pub use inspect::DraftRows;
pub use model::{BuildError, Counters, DeepseekV41, OptionError, Options};
pub use snapshot::Snapshot;
pub use timing::ReadBytes;
