//! What users of other servers have reported, tried with the history model: each test is named after what they saw.

mod common;

use std::time::Duration;

use common::{Setup, start};
use serde_json::json;

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
