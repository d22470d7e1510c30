//! What a server is told at its start. Plain data; `cli` fills it from its options.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tf_text::TokenId;
use tf_text::chat::openai::Defaults;
use tf_text::tokenizer::Tokenizer;

use crate::generate::ReasoningLimits;
use crate::metrics::MetricsNames;

/// What a reply says about the program that made it.
#[derive(Clone, Debug)]
pub struct Identity {
    pub version: String,
    pub commit: String,
    pub backend: String,
    pub numerics: String,
    /// Equal fingerprints promise equal replies: `tf-` and 16 hexadecimal digits.
    pub fingerprint: String,
    /// Unix time in seconds at which the model was loaded.
    pub created: u64,
    /// Positions that the checkpoint was made for.
    pub trained_context: u32,
    /// Bytes of the checkpoint, where they are known.
    pub size_bytes: Option<u64>,
}

/// Sampling of requests that don't say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
}

/// A key and the label under which the log knows it.
#[derive(Clone)]
pub struct ApiKey {
    pub label: String,
    pub key: String,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ApiKey").field("label", &self.label).finish_non_exhaustive()
    }
}

/// In which field of a chat reply the reasoning goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningField {
    ReasoningContent,
    Reasoning,
    Both,
}

/// A seed from a prompt's ids.
pub type PromptSeed = dyn Fn(&[TokenId]) -> u64 + Send + Sync;

/// Whether the files that the model reads while it runs are what they were; else which is not, and how.
pub type FilesCheck = dyn Fn() -> Result<(), String> + Send + Sync;

/// Seeds by name; the server draws nothing itself.
#[derive(Clone)]
pub struct Seeds {
    /// The seed of a request without one, from its prompt's ids and the server's salt.
    pub of_prompt: Arc<PromptSeed>,
    /// The seed of one choice; choice 0 has the request's own.
    pub of_choice: fn(u64, u32) -> u64,
}

/// Everything a server needs besides its engine.
#[derive(Clone)]
pub struct ServerConfig {
    /// The served names; the first is the main one.
    pub names: Vec<String>,
    /// Serves any name that a request gives.
    pub any_model: bool,
    pub identity: Identity,
    pub tokenizer: Arc<Tokenizer>,
    pub chat: Defaults,
    pub sampling: SamplingDefaults,
    /// Reply limit of requests without one; `None` is the end of the context.
    pub max_tokens: Option<u32>,
    /// Largest `n`.
    pub choices_max: u32,
    pub reasoning_field: ReasoningField,
    /// Limits of a reasoning; a request's own budget takes the place of this one.
    pub reasoning: ReasoningLimits,
    pub seeds: Seeds,
    /// Empty: no key is asked for.
    pub api_keys: Vec<ApiKey>,
    /// Origins of browsers that may read replies; `*` is any. `None`: those of this machine.
    pub allowed_origins: Option<Vec<String>>,
    /// Names under which the server may be called; `None`: any.
    pub allowed_hosts: Option<Vec<String>>,
    /// All routes are below this path; empty or `/path`.
    pub api_prefix: String,
    pub max_body_bytes: usize,
    /// Memory for work on bodies, beside their own bytes.
    pub work_bytes: u64,
    /// Longest silence in an open stream.
    pub sse_ping: Duration,
    /// How long a drain may take.
    pub shutdown_timeout: Duration,
    /// One log line a request.
    pub access_log: bool,
    /// A round older than this makes the server unhealthy.
    pub watchdog: Duration,
    pub files: Arc<FilesCheck>,
    pub metrics: MetricsNames,
    /// `/metrics` and `/memory` are answered without a key.
    pub metrics_open: bool,
    /// Planned bytes by part, what stays mapped included.
    pub memory_plan: Vec<(&'static str, u64)>,
    /// What `/server_info` says about machine, build, model and options; nothing secret in it.
    pub info: serde_json::Value,
    /// What the process may take beside its own code, what stays mapped excluded.
    pub memory_plan_total: u64,
}
