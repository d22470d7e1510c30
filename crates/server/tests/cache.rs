//! What a client hears of kept prefixes: how much was resumed, and why not more.

mod common;

use common::{Setup, TestServer, start};
use serde_json::{Value, json};

async fn server() -> TestServer {
    start(Setup { limits: |limits| limits.prefix_cache_bytes = 1 << 30, ..Setup::default() }).await
}

fn cached(reply: &Value) -> u64 {
    let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached tokens");
    assert_eq!(reply["tensorfold"]["cache"]["resumed"], json!(cached));
    assert_eq!(reply["usage"]["prompt_cache_hit_tokens"], json!(cached));
    let source = if cached > 0 { "ram" } else { "none" };
    assert_eq!(reply["tensorfold"]["cache"]["source"], source, "{reply}");
    cached
}

/// Tokens that a reply's prompt had.
fn prompt(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens"].as_u64().expect("prompt tokens")
}

#[tokio::test]
async fn a_conversation_computes_its_new_part_only() {
    let (server, cold) = (server().await, start(Setup::default()).await);
    let words = "You answer in few words and never guess what a number could be. ".repeat(20);
    let mut messages = vec![json!({"role": "system", "content": words})];
    let mut known = 0;
    for turn in 0..4 {
        messages.push(json!({"role": "user", "content": format!("Question {turn}: how many are there now?")}));
        let body =
            json!({"model": "history", "messages": messages, "max_tokens": 12, "thinking": {"type": "disabled"}});
        let reply = server.post("/v1/chat/completions", &body).await.json();
        let again = cold.post("/v1/chat/completions", &body).await.json();
        assert_eq!(reply["tensorfold"]["token_sha"], again["tensorfold"]["token_sha"], "turn {turn}");
        assert_eq!(again["tensorfold"]["cache"]["reason"], "off");
        assert!(turn == 0 || cached(&reply) + 2 >= known, "turn {turn}: {reply}");
        known = prompt(&reply);
        let content = reply["choices"][0]["message"]["content"].clone();
        messages.push(json!({"role": "assistant", "content": content}));
    }
    // Another question after the same system text.
    let other = json!([messages[0], {"role": "user", "content": "Something else"}]);
    let body = json!({"model": "history", "messages": other, "max_tokens": 3, "thinking": {"type": "disabled"}});
    let reply = server.post("/v1/chat/completions", &body).await.json();
    assert!(prompt(&reply) - cached(&reply) < 24, "{reply}");
    // Figures and memory know of it.
    let memory = server.get("/memory").await.json()["prefix_cache"].clone();
    assert_eq!(memory["budget_bytes"], 1 << 30);
    assert!(memory["entries"].as_u64() > Some(0) && memory["used_bytes"].as_u64() > Some(0), "{memory}");
    // A reply ends before its round's counters are published.
    server.until("the end of the last round", |stats| stats.round_since.is_none()).await;
    let page = server.get("/metrics").await.text();
    let hits =
        page.lines().find_map(|line| line.strip_prefix("tensorfold:prefix_cache_hits_total{model_name=\"history\"} "));
    let hits: u64 = hits.expect("a figure").parse().expect("a count");
    assert_eq!(hits, server.engine.stats().cached_tokens);
    assert!(hits > 0);
    server.stop().await;
    cold.stop().await;
}

#[tokio::test]
async fn a_text_that_grows_is_computed_from_its_old_end() {
    let server = server().await;
    let mut journal = "Day by day it rains, and nobody minds. ".repeat(15);
    let mut known = 0;
    for call in 0..5 {
        let body = json!({"model": "history", "prompt": journal, "max_tokens": 3});
        let reply = server.post("/v1/completions", &body).await.json();
        let computed = prompt(&reply) - cached(&reply);
        assert!(call == 0 || computed <= prompt(&reply) - known + 8, "call {call}: {reply}");
        known = prompt(&reply);
        journal += &format!("On day {call} the sun came out at last.");
    }
    server.stop().await;
}
