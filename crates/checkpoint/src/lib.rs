//! Reads a checkpoint's files as the release ships them: safetensors shards and their index as typed read-only views,
//! configuration files as data.
//!
//! Files are mapped, never loaded whole; a view is a name, a dtype, a shape and bytes. Nothing here computes on values,
//! opens a socket or reads the environment, and no byte of a file can make it panic or allocate more than a header.

mod config;
mod error;
mod fingerprint;
mod header;
mod hub;
mod json;
mod shards;
mod view;

pub use config::{Config, Field, GenerationConfig, Spelling};
pub use error::CheckpointError;
pub use fingerprint::Fingerprint;
pub use hub::{HubCache, HubError, HubSnapshot};
pub use shards::{Checkpoint, EmbeddedFiles, Place, SmallFiles};
pub use view::{Dtype, View};
