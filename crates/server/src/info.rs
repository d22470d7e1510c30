//! `GET /server_info`: what runs here, as `info` says it, and what the engine allows.

use serde_json::{Value, json};

use crate::http::Server;

/// The body of the reply.
pub fn report(server: &Server) -> Value {
    let (config, engine) = (&server.config, &server.engine);
    let (limits, model) = (engine.limits(), engine.model_limits());
    let mut report = config.info.clone();
    report["names"] = json!(config.names);
    report["exact"] = true.into();
    report["limits"] = json!({
        "context_length": limits.context, "slots": limits.slots, "round_rows": limits.round_rows,
        "prompt_chunk": limits.prompt_chunk, "queue": limits.queue,
        "queue_timeout_seconds": limits.queue_timeout.as_secs_f64(),
        "decode_gap_seconds": limits.decode_gap.map(|gap| gap.as_secs_f64()),
        "drafts": limits.draft.max, "prefix_cache_bytes": limits.prefix_cache_bytes,
        "snapshot_every": limits.snapshot_every, "vocab_size": model.vocab_size,
        "body_bytes": config.max_body_bytes, "choices": config.choices_max
    });
    report
}
