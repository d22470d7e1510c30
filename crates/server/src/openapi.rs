//! `GET /openapi.json`: the served routes as OpenAPI 3.1. Kept by hand; a test compares it with the table of routes.

use serde_json::{Map, Value, json};

use crate::config::ServerConfig;
use crate::openai::sampling::{STOP_CHARACTERS_MAX, STOPS_MAX, TIMEOUT_SECONDS_MAX, TOP_LOGPROBS_MAX};

/// Method, path, what it does, the request's schema, the answer's media type.
type Operation = (&'static str, &'static str, &'static str, Option<&'static str>, &'static str);

const JSON: &str = "application/json";

const OPERATIONS: [Operation; 20] = [
    ("get", "/", "Name and version", None, JSON),
    ("get", "/health", "Whether rounds make progress, with counters", None, JSON),
    ("get", "/live", "As /health", None, JSON),
    ("get", "/ready", "Whether a request would be accepted now", None, JSON),
    ("get", "/ping", "As /ready, without a body", None, ""),
    ("get", "/version", "Version and commit", None, JSON),
    ("get", "/server_info", "Machine, build, model, plan and options of this server", None, JSON),
    ("get", "/openapi.json", "This document", None, JSON),
    ("get", "/v1/models", "The served names", None, JSON),
    ("get", "/v1/models/{model}", "One served name", None, JSON),
    ("get", "/memory", "Planned and held memory, kept prefixes", None, JSON),
    ("get", "/v1/memory", "As /memory", None, JSON),
    ("get", "/metrics", "Figures in Prometheus' text form", None, "text/plain"),
    ("get", "/v1/metrics", "As /metrics", None, "text/plain"),
    ("post", "/v1/chat/completions", "A chat reply, streamed or whole", Some("ChatRequest"), JSON),
    ("post", "/v1/completions", "A text reply, streamed or whole", Some("CompletionRequest"), JSON),
    ("post", "/tokenize", "Token ids of a text or of a chat", Some("TokenizeRequest"), JSON),
    ("post", "/detokenize", "The text of token ids", Some("DetokenizeRequest"), JSON),
    ("post", "/apply-template", "The prompt of a chat", Some("ChatRequest"), JSON),
    ("get", "/tokenizer_info", "Marker tokens and size of the vocabulary", None, JSON),
];

/// The document.
pub fn document(config: &ServerConfig) -> Value {
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let path = paths.entry(operation.1).or_insert_with(|| json!({}));
        path[operation.0] = described(operation);
    }
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {"title": "TensorFold", "version": config.identity.version},
        "servers": [{"url": if config.api_prefix.is_empty() { "/" } else { &config.api_prefix }}],
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    });
    if !config.api_keys.is_empty() {
        document["security"] = json!([{"key": []}]);
    }
    document
}

fn described((method, path, summary, request, media): Operation) -> Value {
    let error = json!({
        "description": "A refusal or a failure",
        "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    });
    let mut success = json!({"description": summary});
    if !media.is_empty() {
        success["content"] = json!({media: {"schema": {"type": if media == JSON { "object" } else { "string" }}}});
    }
    let is_streaming = path.ends_with("completions");
    if is_streaming {
        success["content"]["text/event-stream"] = json!({"schema": {"type": "string"}});
    }
    let mut operation = json!({
        "summary": summary,
        "operationId": format!("{method}{}", path.replace(['/', '{', '}', '.', '-'], "_")),
        "responses": {"200": success, "4XX": error.clone(), "5XX": error}
    });
    if path.contains("{model}") {
        // An id may have slashes of its own, written as they are or as %2F.
        let model = json!({"name": "model", "in": "path", "required": true, "schema": {"type": "string"}});
        operation["parameters"] = json!([model]);
    }
    if path == "/health" || path == "/live" {
        operation["parameters"] = json!([{
            "name": "reset_peak", "in": "query", "required": false, "schema": {"type": "integer", "enum": [0, 1]},
            "description": "1 lets the memory's peak begin anew"
        }]);
        operation["responses"]["503"] = json!({
            "description": "Loading, draining, stalled or failed", "content": {JSON: {"schema": {"type": "object"}}}
        });
    }
    if let Some(request) = request {
        let schema = json!({"$ref": format!("#/components/schemas/{request}")});
        operation["requestBody"] = json!({"required": true, "content": {JSON: {"schema": schema}}});
    }
    operation
}

fn schemas() -> Value {
    let error = json!({
        "type": "object", "required": ["error"],
        "properties": {"error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "integer", "null"]}
            }
        }}
    });
    let mut chat = generation();
    chat.insert(
        "messages".into(),
        json!({"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}}),
    );
    for (name, schema) in [
        ("max_completion_tokens", count()),
        ("tools", json!({"type": ["array", "null"], "maxItems": 512, "items": {"type": "object"}})),
        ("tool_choice", json!({"type": ["string", "object", "null"]})),
        ("logprobs", flag()),
        ("top_logprobs", json!({"type": ["integer", "null"], "minimum": 0, "maximum": TOP_LOGPROBS_MAX})),
        ("thinking", json!({"type": ["object", "null"]})),
        ("thinking_budget", count()),
        ("reasoning_effort", json!({"type": ["string", "integer", "null"]})),
        ("chat_template_kwargs", json!({"type": ["object", "null"]})),
        ("include_reasoning", flag()),
        ("add_generation_prompt", flag()),
        ("continue_final_message", flag()),
    ] {
        chat.insert(name.into(), schema);
    }
    let mut completion = generation();
    completion.insert(
        "prompt".into(),
        json!({"type": ["string", "array"], "items": {"type": ["string", "integer", "array"]}}),
    );
    completion.insert("echo".into(), flag());
    completion
        .insert("logprobs".into(), json!({"type": ["integer", "null"], "minimum": 0, "maximum": TOP_LOGPROBS_MAX}));
    completion.insert("add_special_tokens".into(), flag());
    let text = json!({"type": ["string", "null"]});
    json!({
        "Error": error,
        "Message": {
            "type": "object", "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function", "latest_reminder"]},
                "content": {"type": ["string", "array", "null"]}, "reasoning_content": text,
                "tool_calls": {"type": ["array", "null"]}, "tool_call_id": text
            }
        },
        "ChatRequest": {"type": "object", "required": ["messages"], "properties": chat},
        "CompletionRequest": {"type": "object", "required": ["prompt"], "properties": completion},
        "TokenizeRequest": {"type": "object", "properties": {
            "prompt": text, "content": text, "messages": {"type": ["array", "null"]},
            "add_special_tokens": flag(), "return_token_strs": flag(), "with_pieces": flag()
        }},
        "DetokenizeRequest": {"type": "object", "required": ["tokens"], "properties": {
            "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}
        }}
    })
}

/// The fields that both generating routes take.
fn generation() -> Map<String, Value> {
    let number = |least: f64, most: f64| json!({"type": ["number", "null"], "minimum": least, "maximum": most});
    let fields = [
        ("model", json!({"type": ["string", "null"]})),
        ("max_tokens", count()),
        ("min_tokens", count()),
        ("temperature", number(0.0, 100.0)),
        ("top_p", number(0.0, 1.0)),
        ("top_k", json!({"type": ["integer", "null"]})),
        ("min_p", number(0.0, 1.0)),
        ("frequency_penalty", number(-2.0, 2.0)),
        ("presence_penalty", number(-2.0, 2.0)),
        ("repetition_penalty", json!({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 10})),
        ("logit_bias", json!({"type": ["object", "null"], "additionalProperties": number(-100.0, 100.0)})),
        ("seed", json!({"type": ["integer", "null"]})),
        ("n", json!({"type": ["integer", "null"], "minimum": 1})),
        (
            "stop",
            json!({
                "type": ["string", "array", "null"], "maxItems": STOPS_MAX,
                "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS_MAX}
            }),
        ),
        ("stop_token_ids", json!({"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}})),
        ("include_stop_str_in_output", flag()),
        ("ignore_eos", flag()),
        ("stream", flag()),
        ("stream_options", json!({"type": ["object", "null"]})),
        ("draft", flag()),
        ("priority", json!({"type": ["string", "integer", "null"]})),
        ("timeout", json!({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": TIMEOUT_SECONDS_MAX})),
        ("return_token_ids", flag()),
    ];
    fields.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect()
}

fn count() -> Value {
    json!({"type": ["integer", "null"], "minimum": 0})
}

fn flag() -> Value {
    json!({"type": ["boolean", "null"]})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::routes::Route;

    #[test]
    fn every_path_is_a_route_that_takes_its_method_and_every_route_has_a_path() {
        let mut labels = BTreeSet::new();
        for (method, path, ..) in OPERATIONS {
            let route = Route::find(path).unwrap_or_else(|| panic!("{path} is no route"));
            assert!(!matches!(route, Route::Unsupported(_)), "{path} isn't served");
            assert!(route.allow().contains(&method.to_uppercase()), "{method} {path}: {}", route.allow());
            labels.insert(route.label());
        }
        let served: BTreeSet<&str> = Route::LABELS.iter().copied().collect();
        assert_eq!(labels, served);
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let schemas = schemas();
        for (_, path, _, request, _) in OPERATIONS {
            let Some(request) = request else { continue };
            assert!(schemas[request].is_object(), "{path}: {request}");
        }
        let text = schemas.to_string();
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap_or_default();
            assert!(schemas[name].is_object(), "{name}");
        }
    }
}
