//! Tokens that are given and not drawn, as clients see them: a reasoning that is closed, a call that must be made.

mod common;

use common::{Setup, TestServer, script, start, tokenizer};
use serde_json::{Value, json};
use tf_server::ServerConfig;
use tf_text::chat::Marker;

const PATH: &str = "/v1/chat/completions";

fn chat(fields: Value) -> Value {
    let mut body = json!({"model": "history", "messages": [{"role": "user", "content": "How many?"}]});
    for (key, value) in fields.as_object().expect("fields of a body") {
        body[key] = value.clone();
    }
    body
}

/// A server whose replies follow these ids, one a prompt.
async fn following(scripts: Vec<Vec<u32>>, config: fn(&mut ServerConfig)) -> TestServer {
    let mut setup = Setup { config, ..Setup::default() };
    setup.model.scripts = scripts.into();
    start(setup).await
}

/// The reply to one body, which must be the same drafted, undrafted and streamed.
async fn answer(script: &[u32], config: fn(&mut ServerConfig), body: &Value) -> Value {
    let server = following(vec![script.to_vec(); 3], config).await;
    let whole = server.post(PATH, body).await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    let mut serial = body.clone();
    serial["draft"] = false.into();
    let serial = server.post(PATH, &serial).await.json();
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let streamed = server.post(PATH, &streamed).await;
    server.stop().await;
    let sha = |reply: &Value| reply["tensorfold"]["token_sha"].clone();
    assert_eq!(sha(&whole), sha(&serial), "drafts changed the reply");
    assert_eq!(whole["choices"][0]["message"]["content"], serial["choices"][0]["message"]["content"]);
    let last = streamed.events().into_iter().rev().nth(1).expect("a last chunk");
    assert_eq!(sha(&whole), sha(&serde_json::from_str(&last).expect("chunks are JSON")), "the stream is another reply");
    whole
}

fn plain(_: &mut ServerConfig) {}

fn reasoning_tokens(reply: &Value) -> u64 {
    reply["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a count")
}

/// One token over and over.
fn endless() -> Vec<u32> {
    tokenizer().encode_plain(" again").expect("text")[..1].to_vec()
}

#[tokio::test]
async fn a_reasoning_that_never_ends_is_closed_at_its_budget() {
    for (field, value) in [
        ("thinking_budget", json!(64)),
        ("thinking", json!({"type": "enabled", "budget_tokens": 64})),
        ("chat_template_kwargs", json!({"thinking_budget": 64})),
    ] {
        let mut body = chat(json!({"max_tokens": 100}));
        body[field] = value;
        let reply = answer(&endless(), plain, &body).await;
        let message = &reply["choices"][0]["message"];
        let thought = message["reasoning_content"].as_str().expect("a reasoning");
        assert_eq!(thought.matches("again").count(), 64, "{field}: {thought:?}");
        assert!(message["content"].as_str().is_some_and(|text| text.contains("again")), "no answer follows: {message}");
        // A newline and the closing mark stand at its end.
        assert_eq!((reasoning_tokens(&reply), &reply["choices"][0]["finish_reason"]), (66, &json!("length")));
        assert!(reply["tensorfold"].get("loop").is_none(), "the loop guard is off by default");
    }
}

#[tokio::test]
async fn the_server_has_a_budget_of_its_own_and_a_request_overrules_it() {
    let limited: fn(&mut ServerConfig) = |config| config.reasoning.budget = Some(10);
    for (fields, expected) in [
        (json!({}), 12),
        (json!({"thinking_budget": 0}), 2),
        (json!({"thinking_budget": 20}), 22),
        (json!({"thinking": {"type": "disabled"}}), 0),
    ] {
        let reply = answer(&endless(), limited, &chat(fields.clone())).await;
        assert_eq!(reasoning_tokens(&reply), expected, "{fields}");
    }
}

#[tokio::test]
async fn a_reasoning_that_ends_in_time_is_left_alone() {
    let text = "Three and four.</think>\n\nSeven.<｜end▁of▁sentence｜>";
    let free = answer(&script(text), plain, &chat(json!({}))).await;
    let limited = answer(&script(text), plain, &chat(json!({"thinking_budget": 64}))).await;
    assert_eq!(free["tensorfold"]["token_sha"], limited["tensorfold"]["token_sha"]);
    assert_eq!(limited["choices"][0]["message"]["content"], "Seven.");
}

#[tokio::test]
async fn an_exact_cycle_is_ended_where_the_guard_is_on_and_reported() {
    let guarded: fn(&mut ServerConfig) = |config| config.reasoning.loop_guard = true;
    let reply = answer(&endless(), guarded, &chat(json!({"max_tokens": 400}))).await;
    assert_eq!((&reply["tensorfold"]["loop"], reasoning_tokens(&reply)), (&json!(1), 64 + 256 + 2));
    assert_ne!(reply["choices"][0]["message"]["content"], "");
}

#[tokio::test]
async fn a_small_limit_is_used_up_by_the_reasoning_and_says_so() {
    let reply = answer(&endless(), plain, &chat(json!({"max_tokens": 32}))).await;
    let choice = &reply["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
    assert_ne!(choice["message"]["reasoning_content"], "");
    assert_eq!(reasoning_tokens(&reply), 32);
    for off in [
        json!({"thinking": {"type": "disabled"}}),
        json!({"reasoning_effort": "none"}),
        json!({"chat_template_kwargs": {"thinking": false}}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        let reply = answer(&endless(), plain, &chat(off)).await;
        assert_eq!(reasoning_tokens(&reply), 0);
        assert_ne!(reply["choices"][0]["message"]["content"], "");
    }
}

fn tools(names: &[&str]) -> Value {
    let schema = json!({"type": "object", "properties": {"x": {"type": "number"}}});
    let tool = |name: &&str| json!({"type": "function", "function": {"name": name, "parameters": schema}});
    names.iter().map(tool).collect()
}

const BLOCK: &str = "\n\n<｜DSML｜ calls>\n";
const REST: &str =
    "<｜DSML｜ parameter name=\"x\" string=\"false\">42</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>";

/// `before`, then as many tokens of nonsense as `given` has, then `after`: what would be drawn at the given places counts
/// for nothing.
fn around(before: &str, given: &str, after: &str) -> Vec<u32> {
    let encode = |text: &str| tokenizer().encode_with_markers(text).expect("scripts can be encoded");
    let mut ids = encode(before);
    ids.extend(vec![endless()[0]; encode(given).len()]);
    ids.extend(encode(after));
    ids.push(tokenizer().markers().id(Marker::EndOfSentence));
    ids
}

#[tokio::test]
async fn a_required_call_is_made_with_thinking_on_and_off() {
    let call = "<｜DSML｜ invoke name=\"f\">\n";
    let named = json!({"type": "function", "function": {"name": "f"}});
    let off = json!({"type": "disabled"});
    let (block_and_name, own_name) = (format!("{BLOCK}{call}"), format!("{call}{REST}"));
    let thought = "I should call.</think>";
    // tools, choice, thinking off, script
    let cases = [
        (tools(&["f"]), json!("required"), false, around(thought, &block_and_name, REST)),
        (tools(&["f", "g"]), named.clone(), false, around(thought, &block_and_name, REST)),
        (tools(&["f", "g"]), json!("required"), false, around(thought, BLOCK, &own_name)),
        (tools(&["f"]), json!("required"), true, around("", call, REST)),
        (tools(&["f", "g"]), named, true, around("", call, REST)),
        (tools(&["f", "g"]), json!("required"), true, around("", "", &own_name)),
    ];
    for (tools, choice, is_off, script) in cases {
        let mut body = chat(json!({"tools": tools, "tool_choice": choice}));
        if is_off {
            body["thinking"] = off.clone();
        }
        let reply = answer(&script, plain, &body).await;
        let (choice, message) = (&reply["choices"][0], &reply["choices"][0]["message"]);
        assert_eq!(choice["finish_reason"], "tool_calls", "{body}: {reply}");
        let calls = message["tool_calls"].as_array().expect("a call");
        let function = &calls[0]["function"];
        assert_eq!((calls.len(), &function["name"], &function["arguments"]), (1, &json!("f"), &json!("{\"x\": 42}")));
        assert_eq!(message["content"], Value::Null, "nothing of the markup is content");
        assert_eq!(message.get("reasoning_content").is_some(), !is_off);
    }
}

#[tokio::test]
async fn a_spent_budget_and_a_required_call_come_together() {
    let call = "<｜DSML｜ invoke name=\"f\">\n";
    let thought = " again".repeat(8);
    let budget = tokenizer().encode_plain(&thought).expect("text").len();
    let script = around(&thought, &format!("\n</think>{BLOCK}{call}"), REST);
    let body = chat(json!({"tools": tools(&["f"]), "tool_choice": "required", "thinking_budget": budget}));
    let reply = answer(&script, plain, &body).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls", "{reply}");
    assert_eq!(reasoning_tokens(&reply), budget as u64 + 2);
}

#[tokio::test]
async fn a_call_cut_inside_a_number_ends_its_request_and_no_other() {
    let call = format!("{BLOCK}<｜DSML｜ invoke name=\"f\">\n{REST}");
    let script = around("</think>", "", &call);
    let body = chat(json!({"tools": tools(&["f"]), "stop": ["2</"], "max_tokens": 60}));
    let reply = answer(&script, plain, &body).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "stop", "{reply}");
    assert_eq!(reply["tensorfold"]["incomplete_call"], true, "{reply}");
    // A limit inside the number, on one server, then a request that gets its whole call.
    let server = following(vec![script.clone(), script.clone()], plain).await;
    let length = script.len() as u64;
    let mut cut = chat(json!({"tools": tools(&["f"]), "max_tokens": length - 12, "stream": true}));
    assert_eq!(server.post(PATH, &cut).await.status, 200);
    cut["max_tokens"] = length.into();
    cut["stream"] = false.into();
    cut["messages"][0]["content"] = "Another".into();
    let next = server.post(PATH, &cut).await.json();
    assert_eq!(next["choices"][0]["finish_reason"], "tool_calls", "{next}");
    server.stop().await;
}

#[tokio::test]
async fn given_tokens_have_log_probabilities_of_their_own() {
    let body = chat(json!({"thinking_budget": 8, "max_tokens": 24, "logprobs": true, "top_logprobs": 2}));
    let server = start(Setup::default()).await;
    let drafted = server.post(PATH, &body).await.json();
    let mut serial = body;
    serial["draft"] = false.into();
    let serial = server.post(PATH, &serial).await.json();
    server.stop().await;
    let rows = |reply: &Value| reply["choices"][0]["logprobs"].clone();
    assert_eq!(rows(&drafted), rows(&serial));
    assert_eq!(rows(&drafted)["reasoning_content"].as_array().map(Vec::len), Some(8), "{drafted}");
    assert!(drafted["speculative"]["drafted"].as_u64() < Some(24 * 5), "given tokens are no drafts");
}
