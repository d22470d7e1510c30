//! Clients that go away, servers that go away, engines that take their time.

mod common;

use std::time::Duration;

use common::{Setup, parse_answer, read_answer, start, start_loading};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A reply that would take hours.
fn endless(stream: bool) -> serde_json::Value {
    json!({"prompt": "go", "max_tokens": 1_000_000, "ignore_eos": true, "stream": stream})
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_slot() {
    // Without the bound on unread tokens, which would free it too, and later.
    let server = start(Setup { limits: |limits| limits.unread_tokens = u32::MAX, ..Setup::default() }).await;
    for stream in [false, true] {
        let open = server.post_open("/v1/completions", &endless(stream)).await;
        let tokens = server.engine.stats().reply_tokens;
        server.until("a running reply", |stats| stats.decoding == 1 && stats.reply_tokens > tokens).await;
        drop(open);
        server.until("a free slot", |stats| stats.decoding == 0 && stats.prefilling == 0).await;
        assert_eq!(server.engine.stats().broken_off, if stream { 2 } else { 1 });
    }
    // A neighbour hears nothing of it.
    let body = json!({"prompt": "go", "max_tokens": 20, "ignore_eos": true});
    let alone = server.post("/v1/completions", &body).await.json();
    let open = server.post_open("/v1/completions", &endless(true)).await;
    server.until("a running reply", |stats| stats.decoding == 1).await;
    let neighbour = server.post_open("/v1/completions", &body).await;
    drop(open);
    let neighbour = read_answer(neighbour).await.json();
    assert_eq!(neighbour["tensorfold"]["token_sha"], alone["tensorfold"]["token_sha"]);
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_while_it_waits_leaves_the_queue() {
    let server = start(Setup { limits: |limits| limits.slots = 1, ..Setup::default() }).await;
    let running = server.post_open("/v1/completions", &endless(true)).await;
    server.until("a running reply", |stats| stats.decoding == 1).await;
    for stream in [false, true] {
        let waiting = server.post_open("/v1/completions", &endless(stream)).await;
        server.until("a waiting request", |stats| stats.waiting == 1).await;
        drop(waiting);
        server.until("an empty queue", |stats| stats.waiting == 0).await;
    }
    drop(running);
    server.stop().await;
}

/// What stands behind interim answers, which a client skips.
fn final_answer(bytes: &[u8]) -> &[u8] {
    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
    let mut rest = bytes;
    while let Some(after) = rest.strip_prefix(interim) {
        rest = after;
    }
    rest
}

#[tokio::test]
async fn a_client_that_only_stops_sending_gets_its_reply() {
    let server = start(Setup::default()).await;
    for stream in [false, true] {
        server.gate.close();
        let body = json!({"prompt": "go", "max_tokens": 30, "ignore_eos": true, "stream": stream});
        let mut open = server.post_open("/v1/completions", &body).await;
        open.shutdown().await.expect("an open connection");
        server.until("a round under way", |stats| stats.round_since.is_some()).await;
        // Long enough to be asked whether it is there.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(server.engine.stats().broken_off, 0, "the request was dropped");
        server.gate.open();
        let mut bytes = Vec::new();
        open.read_to_end(&mut bytes).await.expect("the reply");
        let answer = parse_answer(final_answer(&bytes));
        assert_eq!(answer.status, 200);
        match stream {
            true => assert_eq!(answer.events().last().map(String::as_str), Some("[DONE]")),
            false => assert_eq!(answer.json()["choices"][0]["finish_reason"], "length"),
        }
    }
    let mut open = server.send("GET", "/v1/models", &[], b"").await;
    open.shutdown().await.expect("an open connection");
    assert_eq!(read_answer(open).await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_silent_stream_is_kept_alive() {
    let server =
        start(Setup { config: |config| config.sse_ping = Duration::from_millis(20), ..Setup::default() }).await;
    server.gate.close();
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true});
    let mut open = server.post_open("/v1/chat/completions", &body).await;
    let mut bytes = Vec::new();
    // Head, role chunk and comments come while the engine is inside one forward.
    while String::from_utf8_lossy(&bytes).matches(": keep-alive").count() < 3 {
        assert!(open.read_buf(&mut bytes).await.expect("an open stream") > 0, "the stream ended");
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let role = text.find("\"role\":\"assistant\"").expect("the role chunk comes first");
    assert!(role < text.find(": keep-alive").expect("counted above"));
    server.gate.open();
    open.read_to_end(&mut bytes).await.expect("the rest");
    assert_eq!(parse_answer(&bytes).events().last().map(String::as_str), Some("[DONE]"));
    server.stop().await;
}

#[tokio::test]
async fn a_wait_that_is_too_long_is_429_or_an_error_event() {
    let limits = |limits: &mut tf_engine::EngineLimits| {
        limits.slots = 1;
        limits.queue_timeout = Duration::from_millis(100);
    };
    let config = |config: &mut tf_server::ServerConfig| config.sse_ping = Duration::from_millis(30);
    let server = start(Setup { limits, config, ..Setup::default() }).await;
    let running = server.post_open("/v1/completions", &endless(true)).await;
    server.until("a running reply", |stats| stats.decoding == 1).await;
    let answer = server.post("/v1/completions", &endless(false)).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (429, Some("queue_timeout")));
    assert!(answer.header("retry-after").is_some());
    // The stream's head is out by then, so that it could be kept alive.
    let answer = server.post("/v1/completions", &endless(true)).await;
    assert_eq!(answer.status, 200);
    assert!(answer.text().contains(": keep-alive"));
    let events = answer.events();
    assert!(events.last().is_some_and(|event| event.contains("queue_timeout")), "{events:?}");
    drop(running);
    server.stop().await;
}

#[tokio::test]
async fn a_reply_that_fails_in_its_stream_does_not_look_finished() {
    let server = start(Setup::default()).await;
    let mut open = server.post_open("/v1/completions", &endless(true)).await;
    let mut bytes = Vec::new();
    while String::from_utf8_lossy(&bytes).matches("data: ").count() < 3 {
        assert!(open.read_buf(&mut bytes).await.expect("an open stream") > 0, "the stream ended");
    }
    server.gate.is_failing.store(true, std::sync::atomic::Ordering::SeqCst);
    open.read_to_end(&mut bytes).await.expect("the rest");
    let answer = parse_answer(&bytes);
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert!(events.len() > 2, "nothing came before the failure: {events:?}");
    let error: serde_json::Value = serde_json::from_str(events.last().expect("an error")).expect("JSON");
    assert_eq!(error["error"]["code"], "engine_error");
    assert!(events.iter().all(|event| event != "[DONE]"));
    server.stop().await;
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_refuses_what_comes() {
    let mut server = start(Setup::default()).await;
    let body = json!({"prompt": "go", "max_tokens": 1000, "ignore_eos": true});
    let whole = server.post_open("/v1/completions", &body).await;
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let streamed = server.post_open("/v1/completions", &streamed).await;
    server.until("two running replies", |stats| stats.decoding == 2).await;
    server.gate.close();
    server.begin_shutdown();
    let mut refused = server.post("/v1/completions", &json!({"prompt": 1})).await;
    while refused.status != 503 {
        // The signal is still on its way; what came in before it waits for the gate and is given up here.
        refused = server.post("/v1/completions", &json!({"prompt": 1})).await;
    }
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("draining")));
    assert!(refused.header("retry-after").is_some());
    let health = server.get("/health").await;
    assert_eq!((health.status, health.json()["error"]["message"].as_str()), (503, Some("draining")));
    server.gate.open();
    assert_eq!(read_answer(whole).await.json()["choices"][0]["finish_reason"], "length");
    assert_eq!(read_answer(streamed).await.events().last().map(String::as_str), Some("[DONE]"));
    server.stop().await;
}

#[tokio::test]
async fn a_drain_that_takes_too_long_cuts_streams_with_an_error() {
    let config = |config: &mut tf_server::ServerConfig| config.shutdown_timeout = Duration::from_millis(50);
    let mut server = start(Setup { config, ..Setup::default() }).await;
    let streamed = server.post_open("/v1/completions", &endless(true)).await;
    let whole = server.post_open("/v1/completions", &endless(false)).await;
    server.until("two running replies", |stats| stats.decoding == 2).await;
    let reading = tokio::spawn(read_answer(streamed));
    server.begin_shutdown();
    let events = reading.await.expect("a task").events();
    assert!(events.last().is_some_and(|event| event.contains("\"draining\"")), "{:?}", events.last());
    let whole = read_answer(whole).await;
    assert_eq!((whole.status, whole.json()["error"]["code"].as_str()), (503, Some("draining")));
    server.stop().await;
}

#[tokio::test]
async fn a_slow_reader_is_cancelled_and_holds_up_nobody() {
    let limits = |limits: &mut tf_engine::EngineLimits| limits.unread_tokens = 64;
    let server = start(Setup { limits, ..Setup::default() }).await;
    // Nothing of this stream is read, so its socket fills; rows of log-probabilities fill it soon.
    let mut body = endless(true);
    body["logprobs"] = json!(20);
    let stuck = server.post_open("/v1/completions", &body).await;
    server.until("a cancelled reader", |stats| stats.broken_off == 1).await;
    let body = json!({"prompt": "go", "max_tokens": 5, "ignore_eos": true});
    assert_eq!(server.post("/v1/completions", &body).await.status, 200);
    drop(stuck);
    server.stop().await;
}

#[tokio::test]
async fn a_server_answers_while_it_loads() {
    let (mut server, ready) = start_loading(Setup::default()).await;
    for path in ["/health", "/ready", "/live"] {
        let answer = server.get(path).await;
        let expected = json!({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}});
        assert_eq!((answer.status, answer.json()), (503, expected), "{path}");
    }
    assert_eq!(server.get("/ping").await.status, 503);
    assert_eq!(server.get("/version").await.status, 200);
    let metrics = server.get("/metrics").await;
    assert!(metrics.text().contains("tensorfold:model_ready{model_name=\"history\"} 0\n"), "{}", metrics.text());
    let body = json!({"prompt": "go", "max_tokens": 1});
    for answer in [server.get("/v1/models").await, server.post("/v1/completions", &body).await] {
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (503, Some("model_loading")));
        assert!(answer.header("retry-after").is_some());
    }
    assert_eq!(server.get("/nonsense").await.status, 404);

    server.finish_loading();
    ready.await.expect("the server becomes ready");
    assert_eq!(server.get("/health").await.json()["status"], "ok");
    assert_eq!(server.post("/v1/completions", &body).await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_server_can_be_ended_while_it_loads() {
    let (server, ready) = start_loading(Setup::default()).await;
    assert_eq!(server.get("/health").await.status, 503);
    server.stop().await;
    assert!(ready.await.is_err(), "it said that it was ready");
}

#[tokio::test]
async fn a_round_that_takes_too_long_makes_the_server_unhealthy() {
    let config = |config: &mut tf_server::ServerConfig| config.watchdog = Duration::from_millis(50);
    let server = start(Setup { config, ..Setup::default() }).await;
    assert_eq!(server.get("/health").await.status, 200);
    server.gate.close();
    let body = json!({"prompt": "go", "max_tokens": 3, "ignore_eos": true});
    let waiting = server.post_open("/v1/completions", &body).await;
    let mut health = server.get("/health").await;
    while health.status == 200 {
        health = server.get("/health").await;
    }
    assert_eq!((health.status, health.json()["error"]["message"].as_str()), (503, Some("stalled")));
    assert_eq!(server.get("/ready").await.status, 503);
    let refused = server.post("/v1/completions", &body).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("engine_stalled")));
    assert!(refused.header("retry-after").is_some());
    // The round ends after all: what waited is whole and the server is well.
    server.gate.open();
    assert_eq!(read_answer(waiting).await.json()["choices"][0]["finish_reason"], "length");
    server.until("the end of the round", |stats| stats.round_since.is_none()).await;
    assert_eq!(server.get("/health").await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_second_request_to_end_cuts_what_runs() {
    let mut server = start(Setup::default()).await;
    let streamed = server.post_open("/v1/completions", &endless(true)).await;
    server.until("a running reply", |stats| stats.decoding == 1).await;
    let reading = tokio::spawn(read_answer(streamed));
    server.begin_shutdown();
    server.stop_now();
    let events = reading.await.expect("a task").events();
    assert!(events.last().is_some_and(|event| event.contains("\"draining\"")), "{:?}", events.last());
    server.stop().await;
}

#[tokio::test]
async fn a_reply_that_passes_its_requests_timeout_ends_and_frees_its_slot() {
    let server = start(Setup { limits: |limits| limits.slots = 1, ..Setup::default() }).await;
    let body = |stream: bool| json!({"prompt": "late", "max_tokens": 1000, "ignore_eos": true, "timeout": 0.3, "stream": stream});
    server.gate.close();
    let running = server.post_open("/v1/completions", &body(true)).await;
    server.until("a running request", |stats| stats.requests == 1).await;
    let waiting = server.post_open("/v1/completions", &body(false)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    server.gate.open();
    let (running, waiting) = (read_answer(running).await, read_answer(waiting).await);
    assert_eq!(waiting.status, 504);
    assert_eq!(waiting.json()["error"]["code"], "deadline_exceeded");
    assert_eq!(waiting.header("x-should-retry"), Some("false"));
    assert!(running.text().contains("deadline_exceeded"), "{}", running.text());
    assert!(!running.text().contains("[DONE]"));
    server.until("two endings", |stats| stats.broken_off == 2 && stats.waiting + stats.decoding == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn a_request_in_the_background_gives_way_and_its_reply_is_unchanged() {
    let server = start(Setup { limits: |limits| limits.slots = 1, ..Setup::default() }).await;
    let body = |prompt: &str, tokens: u32| json!({"prompt": prompt, "max_tokens": tokens, "ignore_eos": true});
    let alone = server.post("/v1/completions", &body("slow", 30)).await.json();
    let mut slow = body("slow", 30);
    slow["priority"] = "background".into();
    // Its first round is held up until another request is there.
    server.gate.close();
    let slow = server.post_open("/v1/completions", &slow).await;
    server.until("a request in the background", |stats| stats.requests == 2).await;
    let urgent = server.engine.submit(tf_engine::Request::greedy(&[1, 2, 3], 5)).expect("it fits");
    server.gate.open();
    server.until("a reply that went first", |stats| stats.pauses == 1 && stats.completed >= 2).await;
    drop(urgent);
    let slow = read_answer(slow).await.json();
    assert_eq!(slow["tensorfold"]["token_sha"], alone["tensorfold"]["token_sha"]);
    server.stop().await;
}
