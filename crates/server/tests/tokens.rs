//! Token routes, figures and memory.

mod common;

use common::{MODEL, Setup, start, tokenizer};
use serde_json::{Value, json};
use tf_server::{MetricsNames, ServerConfig};
use tokio::io::AsyncReadExt;

#[tokio::test]
async fn tokens_of_a_conversation_are_those_of_the_chat_route() {
    let server = start(Setup::default()).await;
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    let messages =
        json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi <think> \u{e9}"}]);
    let bodies = [
        json!({"messages": messages}),
        json!({"messages": messages, "thinking": {"type": "disabled"}}),
        json!({"messages": messages, "tools": [tool], "reasoning_effort": "low"}),
    ];
    for body in bodies {
        let mut asked = body.clone();
        asked["max_tokens"] = json!(1);
        asked["return_token_ids"] = json!(true);
        let chat = server.post("/v1/chat/completions", &asked).await.json();
        let tokenized = server.post("/tokenize", &body).await.json();
        assert_eq!(tokenized["tokens"], chat["prompt_token_ids"], "{body}");
        assert_eq!(tokenized["count"], chat["usage"]["prompt_tokens"]);
        assert_eq!(tokenized["max_model_len"], 1 << 20);
        let text = server.post("/v1/apply-template", &body).await.json()["prompt"].clone();
        let back = server.post("/detokenize", &json!({"tokens": tokenized["tokens"]})).await.json();
        assert_eq!((&back["prompt"], &back["content"]), (&text, &text));
    }
    server.stop().await;
}

#[tokio::test]
async fn texts_become_tokens_and_texts_again() {
    let server = start(Setup::default()).await;
    let text = "one two \u{1f600}";
    let ids = tokenizer().encode_with_markers(text).expect("a text");
    for (key, path) in [("prompt", "/tokenize"), ("content", "/v1/tokenize")] {
        let reply = server.post(path, &json!({key: text, "return_token_strs": true})).await.json();
        assert_eq!((&reply["tokens"], &reply["count"]), (&json!(ids), &json!(ids.len())));
        assert_eq!(reply["token_strs"].as_array().map(Vec::len), Some(ids.len()));
    }
    let info = server.get("/tokenizer_info").await.json();
    let reply = server.post("/tokenize", &json!({"prompt": text, "add_special_tokens": true})).await.json();
    assert_eq!(reply["tokens"][0], info["bos_token_id"]);
    assert_eq!(reply["count"], ids.len() + 1);
    let pieces = server.post("/tokenize", &json!({"content": text, "with_pieces": true})).await.json();
    let bytes = |piece: &Value| match piece {
        Value::String(text) => text.as_bytes().to_vec(),
        other => serde_json::from_value(other.clone()).expect("bytes"),
    };
    let pieces = pieces["tokens"].as_array().expect("a list").clone();
    let joined: Vec<u8> = pieces.iter().flat_map(|token| bytes(&token["piece"])).collect();
    assert_eq!(joined, text.as_bytes());
    assert!(pieces.iter().any(|token| token["piece"].is_array()), "no piece of a character was seen");
    for (key, id) in [("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "pad_token_id")] {
        let spelled = server.post("/tokenize", &json!({"prompt": info[key]})).await.json();
        assert_eq!(spelled["tokens"], json!([info[id]]), "{key}");
    }
    assert_eq!(info["vocab_size"], tokenizer().vocab_size());

    let wrong = [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 1}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({"tokens": [1, 1 << 30]}), "tokens[1]"),
        ("/detokenize", json!({}), "tokens"),
        ("/apply-template", json!({"messages": [{"role": "nobody"}]}), "messages[0].role"),
    ];
    for (path, body, param) in wrong {
        let answer = server.post(path, &body).await;
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)), "{path} {body}");
    }
    server.stop().await;
}

#[tokio::test]
async fn token_routes_do_not_wait_for_the_engine() {
    let server = start(Setup::default()).await;
    server.gate.close();
    let open = server.post_open("/v1/completions", &json!({"prompt": "go", "max_tokens": 2})).await;
    server.until("a round", |stats| stats.round_since.is_some()).await;
    assert_eq!(server.post("/tokenize", &json!({"prompt": "go"})).await.status, 200);
    server.gate.open();
    common::read_answer(open).await;
    server.stop().await;
}

/// The value of a line of `/metrics`.
fn figure(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[tokio::test]
async fn figures_count_what_happened() {
    let config = |config: &mut ServerConfig| config.metrics = MetricsNames::All;
    let server = start(Setup { config, ..Setup::default() }).await;
    let body = json!({"prompt": vec![5; 7], "max_tokens": 11, "ignore_eos": true});
    for _ in 0..3 {
        assert_eq!(server.post("/v1/completions", &body).await.status, 200);
    }
    assert_eq!(server.post("/v1/completions", &json!({})).await.status, 400);
    let open = json!({"prompt": "go", "max_tokens": 1_000_000, "ignore_eos": true, "stream": true});
    let mut open = server.post_open("/v1/completions", &open).await;
    server.until("a reply that has begun", |stats| stats.decoding == 1 && stats.reply_tokens > 33).await;
    // Its head is counted once it is out.
    assert!(open.read(&mut [0; 64]).await.expect("an open stream") > 0);
    drop(open);
    server.until("a free slot", |stats| stats.decoding == 0).await;

    let answer = server.get("/metrics").await;
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let page = answer.text();
    let model = format!("model_name=\"{MODEL}\"");
    let cases = [
        (format!("requests_total{{{model},route=\"/v1/completions\",code=\"200\",key=\"\"}}"), 4.0),
        (format!("requests_total{{{model},route=\"/v1/completions\",code=\"400\",key=\"\"}}"), 1.0),
        (format!("request_success_total{{{model},finished_reason=\"length\"}}"), 3.0),
        (format!("request_prompt_tokens_sum{{{model}}}"), 21.0),
        (format!("request_generation_tokens_sum{{{model}}}"), 33.0),
        (format!("request_generation_tokens_bucket{{{model},le=\"10\"}}"), 0.0),
        (format!("request_generation_tokens_bucket{{{model},le=\"20\"}}"), 3.0),
        (format!("time_to_first_token_seconds_count{{{model}}}"), 3.0),
        (format!("client_disconnections_total{{{model}}}"), 1.0),
        (format!("model_ready{{{model}}}"), 1.0),
        (format!("lifecycle_state{{{model},state=\"ready\"}}"), 1.0),
        (format!("requests_running{{{model}}}"), 0.0),
        (format!("preemptions_total{{{model}}}"), 0.0),
        (
            format!(
                "cache_config_info{{{model},block_size=\"4\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"False\",\
                 prefix_cache_bytes=\"0\"}}",
                server.engine.stats().pages
            ),
            1.0,
        ),
    ];
    for (name, value) in cases {
        assert_eq!(figure(&page, &format!("tensorfold:{name}")), Some(value), "{name}\n{page}");
    }
    let tokens = figure(&page, &format!("tensorfold:generation_tokens_total{{{model}}}")).expect("tokens");
    assert!(tokens > 33.0, "{tokens}");
    assert_eq!(figure(&page, &format!("vllm:generation_tokens_total{{{model}}}")), Some(tokens));
    assert_eq!(figure(&page, &format!("vllm:num_requests_running{{{model}}}")), Some(0.0));
    let rounds = figure(&page, &format!("tensorfold:rounds_total{{{model}}}"));
    assert_eq!(figure(&page, &format!("tensorfold:round_rows_count{{{model}}}")), rounds);
    assert_eq!(figure(&page, &format!("vllm:iteration_tokens_total_count{{{model}}}")), rounds);
    let stats = server.engine.stats();
    let rows = figure(&page, &format!("tensorfold:round_rows_sum{{{model}}}"));
    assert_eq!(rows, Some((stats.prompt_rows + stats.reply_rows) as f64));
    let used = figure(&page, &format!("vllm:kv_cache_usage_perc{{{model}}}"));
    assert!(used.is_some_and(|used| (0.0..=1.0).contains(&used)), "{used:?}");
    // Every line is a comment or a figure, and every figure has a head.
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().expect("a name");
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let heads = page.matches(&format!("# TYPE {base} ")).count() + page.matches(&format!("# TYPE {name} ")).count();
        assert!(heads >= 1, "{line} has no head");
        assert!(line.rsplit(' ').next().is_some_and(|value| value.parse::<f64>().is_ok()), "{line}");
    }
    let head = server.call("HEAD", "/v1/metrics", &[], b"").await;
    assert_eq!((head.status, head.body.len()), (200, 0));
    server.stop().await;
}

#[tokio::test]
async fn figures_are_off_open_or_behind_the_key() {
    let off = start(Setup { config: |config| config.metrics = MetricsNames::Off, ..Setup::default() }).await;
    let answer = off.get("/metrics").await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("unsupported_route")));
    off.stop().await;
    for is_open in [false, true] {
        let key = |config: &mut ServerConfig| {
            config.api_keys = vec![tf_server::ApiKey { label: "me".to_string(), key: "sk-1".to_string() }];
        };
        let config: fn(&mut ServerConfig) = if is_open {
            |config| {
                config.api_keys = vec![tf_server::ApiKey { label: "me".to_string(), key: "sk-1".to_string() }];
                config.metrics_open = true;
            }
        } else {
            key
        };
        let server = start(Setup { config, ..Setup::default() }).await;
        let expected = if is_open { 200 } else { 401 };
        for path in ["/metrics", "/memory"] {
            assert_eq!(server.get(path).await.status, expected, "{path}");
            let answer = server.call("GET", path, &[("x-api-key", "sk-1")], b"").await;
            assert_eq!(answer.status, 200, "{path}");
        }
        let page = server.call("GET", "/metrics", &[("x-api-key", "sk-1")], b"").await.text();
        assert!(page.contains("route=\"/memory\",code=\"200\",key=\"me\"") && !page.contains("sk-1"), "{page}");
        assert!(!page.contains("vllm:"));
        server.stop().await;
    }
}

#[tokio::test]
async fn memory_says_what_was_planned_and_what_is_used() {
    let server = start(Setup::default()).await;
    let memory = server.get("/v1/memory").await.json();
    assert_eq!(memory["schema_version"], 1);
    assert_eq!(memory["plan"], json!({"weights": 1000, "kv": 24}));
    assert_eq!(memory["plan_bytes"], 1024);
    if cfg!(target_os = "linux") {
        let bytes = |key: &str| memory["process"][key].as_u64().expect("bytes");
        assert!(bytes("resident_bytes") > 1 << 20 && bytes("peak_bytes") >= bytes("resident_bytes") / 2);
        assert!(bytes("anonymous_bytes") <= bytes("resident_bytes") + (16 << 20));
        let peak = || async { server.get("/memory").await.json()["process"]["peak_bytes"].as_u64().expect("bytes") };
        let grown = vec![1u8; 64 << 20];
        let high = peak().await;
        drop(grown);
        assert_eq!(server.get("/health?reset_peak=0").await.status, 200);
        // The system counts pages in batches.
        let slack = 8 << 20;
        assert!(peak().await + slack >= high, "a peak fell by itself");
        assert_eq!(server.get("/health?reset_peak=1").await.status, 200);
        assert!(peak().await + slack < high, "the peak was not reset");
    }
    server.stop().await;
}
