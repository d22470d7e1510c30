//! What users of other servers have reported, tried with the history model: each test is named after what they saw.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Setup, read_answer, start};
use serde_json::json;
use tf_engine::VirtualClock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn a_prompt_of_more_than_65536_tokens_does_not_hang() {
    let server = start(Setup::default()).await;
    for length in [65_535usize, 65_536, 65_537] {
        let prompt: Vec<usize> = (0..length).map(|at| 5 + at * 7 % 4000).collect();
        let body = json!({"prompt": prompt, "max_tokens": 3, "ignore_eos": true});
        let reply = server.post("/v1/completions", &body).await.json();
        assert_eq!(reply["usage"]["prompt_tokens"], length, "{}", reply["error"]);
        assert_eq!(reply["usage"]["completion_tokens"], 3);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_prompt_that_its_client_gave_up_is_not_computed_on_and_not_lost() {
    let server = start(Setup { limits: |limits| limits.prefix_cache_bytes = 1 << 30, ..Setup::default() }).await;
    let prompt: Vec<usize> = (0..20_000).map(|at| 5 + at * 11 % 4000).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1, "ignore_eos": true});
    for retry in 0..3 {
        server.gate.close();
        let computed = server.engine.stats().prompt_rows;
        let open = server.post_open("/v1/completions", &body).await;
        server.until("a round under way", |stats| stats.round_since.is_some()).await;
        drop(open);
        // A client that is gone is known by its reset.
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.gate.open();
        server.until("no request", |stats| stats.prefilling + stats.decoding + stats.waiting == 0).await;
        let rows = server.engine.stats().prompt_rows - computed;
        assert!(rows < 1000, "try {retry} computed {rows} rows for nobody");
    }
    let reply = server.post("/v1/completions", &body).await.json();
    let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    assert!(cached > 200, "{cached} tokens of the given up prompts were kept");
    server.stop().await;
}

#[tokio::test]
async fn a_timeout_runs_from_the_arrival_and_not_from_the_queue_on() {
    let clock = VirtualClock::new();
    let server = start(Setup { clock: Arc::new(clock.clone()), ..Setup::default() }).await;
    for (stream, passes, status) in [(false, 6, 504), (true, 6, 504), (false, 4, 200)] {
        let body = json!({"prompt": "a", "max_tokens": 2, "timeout": 5, "stream": stream}).to_string();
        let mut open = server.connect().await;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        open.write_all(head.as_bytes()).await.expect("the server reads");
        // The server asks for the body once it knows of the request.
        let mut interim = [0; 25];
        open.read_exact(&mut interim).await.expect("an interim answer");
        assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
        clock.advance(Duration::from_secs(passes));
        open.write_all(body.as_bytes()).await.expect("the server reads");
        let answer = read_answer(open).await;
        assert_eq!(answer.status, status, "{stream} {passes}: {}", answer.text());
        if status == 504 {
            assert_eq!(answer.json()["error"]["code"], "deadline_exceeded");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_prompt_that_is_too_long_for_the_model_is_not_told_to_raise_the_context() {
    for (made_for, advice) in
        [(40, "this is the most that the model was made for"), (50, "a larger --context, up to 50")]
    {
        let mut setup = Setup::default();
        setup.model.limits.context = 40;
        setup.config = match made_for {
            40 => |config| config.identity.trained_context = 40,
            _ => |config| config.identity.trained_context = 50,
        };
        let server = start(setup).await;
        for count in [40, 41] {
            let body = json!({"prompt": vec![5; count], "max_tokens": 5});
            let message = server.post("/v1/completions", &body).await.json()["error"]["message"].to_string();
            assert!(message.contains(advice), "{count} of 40, {made_for}: {message}");
        }
        server.stop().await;
    }
}

#[tokio::test]
async fn min_tokens_above_the_limit_of_the_reply_is_refused() {
    let server = start(Setup::default()).await;
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a", "min_tokens": 20, "max_tokens": 8})),
        // Without max_tokens a completion has 16, and a chat what the server gives.
        ("/v1/completions", json!({"prompt": "a", "min_tokens": 17})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}], "min_tokens": 61})),
    ] {
        let answer = server.post(path, &body).await;
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["code"], &error["param"]),
            (400, &json!("conflicting_values"), &json!("min_tokens"))
        );
    }
    let body = json!({"prompt": "a", "min_tokens": 16});
    assert_eq!(server.post("/v1/completions", &body).await.json()["usage"]["completion_tokens"], 16);
    server.stop().await;
}

#[tokio::test]
async fn health_is_not_ok_while_an_n_gram_file_cannot_be_read() {
    let server = start(Setup::default()).await;
    let body = json!({"prompt": "a b", "max_tokens": 2});
    server.gate.is_unreadable.store(true, Ordering::SeqCst);
    assert_eq!(server.post("/v1/completions", &body).await.status, 500);
    for path in ["/health", "/ready", "/ping"] {
        assert_eq!(server.get(path).await.status, 503, "{path}");
    }
    let message = server.get("/health").await.json()["error"]["message"].to_string();
    assert!(message.contains("the checkpoint could not be read"), "{message}");
    assert!(server.get("/metrics").await.text().contains("state=\"failed\"} 1"));
    // It is tried again, and a round that works says that all is well.
    server.gate.is_unreadable.store(false, Ordering::SeqCst);
    assert_eq!(server.post("/v1/completions", &body).await.status, 200);
    assert_eq!(server.get("/health").await.status, 200);
    server.stop().await;
}

static SHRUNK: AtomicBool = AtomicBool::new(false);

#[tokio::test]
async fn a_checkpoint_that_shrinks_under_the_server_is_told_and_not_computed_from() {
    let config = |config: &mut tf_server::ServerConfig| {
        config.api_keys = vec![tf_server::ApiKey { label: "test".to_string(), key: "sk-1".to_string() }];
        config.files = Arc::new(|| match SHRUNK.load(Ordering::SeqCst) {
            true => Err("model.safetensors has 16 bytes, it had 32".to_string()),
            false => Ok(()),
        });
    };
    let server = start(Setup { config, ..Setup::default() }).await;
    let key = ("x-api-key", "sk-1");
    assert_eq!(server.get("/health").await.status, 200);
    SHRUNK.store(true, Ordering::SeqCst);
    let mut health = server.get("/health").await;
    for _ in 0..2000 {
        if health.status == 503 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        health = server.get("/health").await;
    }
    assert_eq!(health.status, 503, "nobody looked at the files");
    assert!(!health.text().contains("safetensors"), "names of files are for those with a key");
    let known = server.call("GET", "/health", &[key], b"").await.text();
    assert!(known.contains("model.safetensors has 16 bytes, it had 32"), "{known}");
    let body = json!({"prompt": "a b", "max_tokens": 2}).to_string();
    let answer = server.call("POST", "/v1/completions", &[key], body.as_bytes()).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["code"]),
        (503, &json!("checkpoint_changed")),
        "{}",
        answer.text()
    );
    server.stop().await;
}

#[tokio::test]
async fn bodies_on_their_way_take_no_more_than_was_planned() {
    let server = start(Setup { config: |config| config.max_body_bytes = 1000, ..Setup::default() }).await;
    let part = |bytes: usize| vec![b' '; bytes];
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = server
            .send("POST", "/v1/completions", &[("content-length", "1000"), ("expect", "100-continue")], b"")
            .await;
        let mut interim = [0; 25];
        stream.read_exact(&mut interim).await.expect("an interim answer");
        stream.write_all(&part(990)).await.expect("the server reads");
        open.push(stream);
    }
    let body = json!({"prompt": "a b", "max_tokens": 2});
    let mut answer = server.post("/v1/completions", &body).await;
    for _ in 0..2000 {
        if answer.status != 200 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        answer = server.post("/v1/completions", &body).await;
    }
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (429, &json!("too_many_bodies")), "{}", answer.text());
    assert!(answer.header("retry-after").is_some());
    // Whoever goes away gives the room back.
    drop(open);
    for _ in 0..2000 {
        if answer.status == 200 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        answer = server.post("/v1/completions", &body).await;
    }
    assert_eq!(answer.status, 200, "{}", answer.text());
    server.stop().await;
}

#[tokio::test]
async fn a_body_gives_its_memory_back_before_its_reply_begins() {
    // Room for one body at a time.
    let server = start(Setup { config: |config| config.work_bytes = 1, ..Setup::default() }).await;
    let endless = json!({"prompt": "go", "max_tokens": 1_000_000, "ignore_eos": true, "stream": true});
    let open = server.post_open("/v1/completions", &endless).await;
    server.until("a running reply", |stats| stats.decoding == 1).await;
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
    assert_eq!(server.post("/v1/chat/completions", &chat).await.status, 200);
    assert_eq!(server.post("/tokenize", &json!({"prompt": "a"})).await.status, 200);
    drop(open);
    server.stop().await;
}
