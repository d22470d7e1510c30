//! Text to tokens and back, without the engine: `/tokenize`, `/detokenize`, `/apply-template`, `/tokenizer_info`.

use serde_json::{Value, json};
use tf_text::TokenId;
use tf_text::chat::openai::chat_body;
use tf_text::chat::{self, Marker, Prompt};
use tf_text::fields::{BodyError, Fields};
use tf_text::json::Value as Json;
use tf_text::tokenizer::Tokenizer;

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::openai::{models, sampling};

const PAD: &str = "<｜▁pad▁｜>";

/// The prompt of a chat body, as the chat route renders it.
fn rendered(config: &ServerConfig, fields: &Fields<'_>) -> Result<Prompt, ApiError> {
    let chat = chat_body(fields, config.chat)?;
    chat::encode(&chat.request).map_err(|error| ApiError::internal(&error.to_string()))
}

/// `POST /tokenize`.
///
/// # Errors
/// A mistake of the body.
pub fn tokenize(config: &ServerConfig, body: &Json, context: u32) -> Result<Value, ApiError> {
    let fields = Fields::of_body(body)?;
    models::check_name(config, sampling::model(&fields)?)?;
    let boolean = |key: &str| -> Result<bool, BodyError> {
        Ok(fields.get(key).map(|field| field.boolean()).transpose()?.unwrap_or(false))
    };
    let tokenizer = &config.tokenizer;
    let internal = |error: tf_text::tokenizer::TokenizerError| ApiError::internal(&error.to_string());
    let adds_begin = boolean("add_special_tokens")?;
    let text = fields.get("prompt").or_else(|| fields.get("content"));
    let tokens = match (fields.get("messages"), text) {
        (Some(_), _) => rendered(config, &fields)?.token_ids(tokenizer).map_err(internal)?,
        (None, Some(text)) => {
            let mut tokens = tokenizer.encode_with_markers(text.string()?).map_err(internal)?;
            if adds_begin {
                tokens.insert(0, tokenizer.markers().id(Marker::BeginOfSentence));
            }
            tokens
        }
        (None, None) => {
            let message = "expected prompt or content (a string), or messages";
            return Err(ApiError::invalid("missing_field", "prompt", message));
        }
    };
    let mut reply = json!({"tokens": tokens, "count": tokens.len(), "max_model_len": context});
    if boolean("return_token_strs")? {
        let name = |token: &TokenId| tokenizer.token_name(*token).unwrap_or_default();
        reply["token_strs"] = tokens.iter().map(name).collect();
    }
    if boolean("with_pieces")? {
        reply["tokens"] = tokens.iter().map(|token| json!({"id": token, "piece": piece(tokenizer, *token)})).collect();
    }
    Ok(reply)
}

/// A token's text; its bytes where they are no text of their own.
fn piece(tokenizer: &Tokenizer, token: TokenId) -> Value {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text))
}

/// `POST /detokenize`.
///
/// # Errors
/// A mistake of the body.
pub fn detokenize(config: &ServerConfig, body: &Json) -> Result<Value, ApiError> {
    let fields = Fields::of_body(body)?;
    models::check_name(config, sampling::model(&fields)?)?;
    let tokens = sampling::token_ids(&fields.required("tokens")?, config.tokenizer.vocab_size() as u32)?;
    let text = config.tokenizer.decode(&tokens, false).map_err(|error| ApiError::internal(&error.to_string()))?;
    Ok(json!({"prompt": text, "content": text}))
}

/// `POST /apply-template`.
///
/// # Errors
/// A mistake of the body.
pub fn apply_template(config: &ServerConfig, body: &Json) -> Result<Value, ApiError> {
    let fields = Fields::of_body(body)?;
    models::check_name(config, sampling::model(&fields)?)?;
    Ok(json!({"prompt": rendered(config, &fields)?.text()}))
}

/// `GET /tokenizer_info`.
pub fn info(tokenizer: &Tokenizer) -> Value {
    let named = |marker: Marker| (marker.spelling(), tokenizer.markers().id(marker));
    let (begin, end) = (named(Marker::BeginOfSentence), named(Marker::EndOfSentence));
    // No marker of the chat format, so it is found by its spelling; vocabularies without one pad with the end token.
    let pad = match tokenizer.encode_with_markers(PAD).as_deref() {
        Ok(&[id]) if tokenizer.is_added(id) => (PAD, id),
        Ok(_) | Err(_) => end,
    };
    json!({
        "bos_token": begin.0, "eos_token": end.0, "pad_token": pad.0,
        "bos_token_id": begin.1, "eos_token_id": end.1, "pad_token_id": pad.1,
        "vocab_size": tokenizer.vocab_size(), "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": null
    })
}
