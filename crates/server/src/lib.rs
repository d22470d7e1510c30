//! HTTP in, replies out: the OpenAI routes over a submit handle of the engine.
//!
//! A body becomes prompt ids and an engine request; the engine's events become a reply or a stream, both from the same
//! steps. Knows no device and no weight, and draws nothing: whatever could change a token happens behind the handle.

mod body;
pub mod config;
pub mod connections;
pub mod error;
pub mod generate;
pub mod health;
pub mod http;
mod ids;
mod info;
mod memory;
pub mod metrics;
pub mod openai;
mod openapi;
pub mod routes;
pub mod session;
mod work;

pub use config::{ApiKey, FilesCheck, Identity, ReasoningField, SamplingDefaults, Seeds, ServerConfig};
pub use generate::{ReasoningLimits, conversation_positions, forcing};
pub use http::{Shutdown, serve};
pub use metrics::MetricsNames;
pub use work::{BODIES_MAX, CUT_BYTES};
