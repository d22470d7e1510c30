//! The served model under each of its names.

use serde_json::{Value, json};

use crate::config::ServerConfig;
use crate::error::ApiError;

/// `GET /v1/models`.
pub fn list(config: &ServerConfig, context: u32, vocab_size: u32) -> Value {
    let data: Vec<Value> = config.names.iter().map(|name| entry(config, name, context, vocab_size)).collect();
    json!({"object": "list", "data": data})
}

/// `GET /v1/models/{id}`.
///
/// # Errors
/// 404 for a name that isn't served.
pub fn one(config: &ServerConfig, id: &str, context: u32, vocab_size: u32) -> Result<Value, ApiError> {
    check_name(config, id)?;
    Ok(entry(config, id, context, vocab_size))
}

/// The name that a reply to a request for `asked` carries.
///
/// # Errors
/// 404 for a name that isn't served.
pub fn check_name<'a>(config: &'a ServerConfig, asked: &'a str) -> Result<&'a str, ApiError> {
    if asked.is_empty() {
        return Ok(&config.names[0]);
    }
    if config.any_model || config.names.iter().any(|name| name == asked) {
        return Ok(asked);
    }
    Err(ApiError::model_not_found(asked, &config.names))
}

fn entry(config: &ServerConfig, name: &str, context: u32, vocab_size: u32) -> Value {
    let identity = &config.identity;
    let root = &config.names[0];
    let mut meta = json!({"n_ctx": context, "n_ctx_train": identity.trained_context, "n_vocab": vocab_size});
    if let Some(size_bytes) = identity.size_bytes {
        meta["size"] = json!(size_bytes);
    }
    json!({
        "id": name, "object": "model", "created": identity.created, "owned_by": "tensorfold", "root": root, "parent": null,
        "max_model_len": context, "context_length": context,
        "meta": meta,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "tensorfold": {
            "exact": true, "fingerprint": identity.fingerprint, "numerics": identity.numerics, "aliases": &config.names[1..]
        }
    })
}
