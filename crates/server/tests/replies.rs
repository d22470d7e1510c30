//! What replies say: streams folded equal whole replies, drafts change nothing, stops cut exactly, choices are apart.

mod common;

use common::{Answer, Setup, TestServer, start};
use serde_json::{Value, json};

fn chat(fields: Value) -> Value {
    let mut body = json!({"model": "history", "messages": [{"role": "user", "content": "How many?"}]});
    for (key, value) in fields.as_object().expect("fields of a body") {
        body[key] = value.clone();
    }
    body
}

fn with(body: &Value, key: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[key] = value;
    body
}

/// A stream's chunks; asserts how it begins and ends.
fn chunks(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let mut events = answer.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| serde_json::from_str(event).expect("chunks are JSON")).collect()
}

fn append(target: &mut Value, piece: &Value) {
    match (target, piece) {
        (_, Value::Null) => {}
        (Value::String(text), Value::String(piece)) => text.push_str(piece),
        (Value::Array(list), Value::Array(piece)) => list.extend(piece.iter().cloned()),
        (Value::Object(map), Value::Object(piece)) => {
            for (key, value) in piece {
                match map.get_mut(key) {
                    Some(known) => append(known, value),
                    None => drop(map.insert(key.clone(), value.clone())),
                }
            }
        }
        (target, piece) => *target = piece.clone(),
    }
}

/// Folds a stream into what the whole reply should be, choice by choice.
fn fold(chunks: &[Value]) -> Vec<Value> {
    let mut choices: Vec<Value> = Vec::new();
    for chunk in chunks {
        for key in ["id", "created", "model", "system_fingerprint"] {
            assert_eq!(chunk[key], chunks[0][key], "{key} differs between chunks");
        }
        for entry in chunk["choices"].as_array().expect("choices are a list") {
            let index = entry["index"].as_u64().expect("an index") as usize;
            while choices.len() <= index {
                choices.push(
                    json!({"message": {}, "text": "", "logprobs": null, "finish_reason": null, "stop_reason": null}),
                );
            }
            let choice = &mut choices[index];
            assert_eq!(choice["finish_reason"], Value::Null, "a chunk after the finish");
            if let Some(text) = entry.get("text") {
                append(&mut choice["text"], text);
            }
            if let Some(delta) = entry.get("delta") {
                fold_delta(&mut choice["message"], delta);
            }
            if choice["logprobs"].is_null() {
                choice["logprobs"] = entry["logprobs"].clone();
            } else {
                append(&mut choice["logprobs"], &entry["logprobs"]);
            }
            choice["finish_reason"] = entry["finish_reason"].clone();
            choice["stop_reason"] = entry.get("stop_reason").cloned().unwrap_or(Value::Null);
        }
    }
    choices
}

fn fold_delta(message: &mut Value, delta: &Value) {
    for (key, value) in delta.as_object().expect("deltas are objects") {
        if key != "tool_calls" {
            match message.get_mut(key) {
                Some(known) => append(known, value),
                None => message[key] = value.clone(),
            }
            continue;
        }
        for piece in value.as_array().expect("calls are a list") {
            if message.get("tool_calls").is_none() {
                message["tool_calls"] = json!([]);
            }
            let calls = message["tool_calls"].as_array_mut().expect("made above");
            let index = piece["index"].as_u64().expect("an index") as usize;
            if calls.len() <= index {
                assert!(piece.get("id").is_some(), "a call begins with its id");
                calls.push(json!({"id": piece["id"], "type": piece["type"], "function": piece["function"]}));
            } else {
                append(&mut calls[index]["function"], &piece["function"]);
            }
        }
    }
}

/// What must be equal of two replies: everything but ids, times and cache figures.
fn comparable(reply: &Value) -> Value {
    let mut reply = reply.clone();
    for key in ["id", "created", "timings", "speculative", "usage"] {
        reply.as_object_mut().expect("a reply").remove(key);
    }
    let kept = ["token_sha", "seed", "seed_source", "max_tokens", "sampling", "thinking"];
    let block = reply["tensorfold"].as_object_mut().expect("the extension block");
    block.retain(|key, _| kept.contains(&key.as_str()));
    for choice in reply["choices"].as_array_mut().expect("choices") {
        for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
            call["id"] = Value::Null;
        }
    }
    reply
}

fn choice_parts(choice: &Value, key: &str) -> Value {
    let mut body = choice[key].clone();
    if let Some(calls) = body.get_mut("tool_calls").and_then(Value::as_array_mut) {
        calls.iter_mut().for_each(|call| call["id"] = Value::Null);
    }
    // An absent content is an empty one in a stream.
    if key == "message" && body["content"].is_null() {
        body["content"] = "".into();
    }
    body.as_object_mut().map(|message| message.remove("refusal"));
    json!({"body": body, "logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"]})
}

async fn assert_stream_is_whole(server: &TestServer, path: &str, body: &Value) -> Value {
    let whole = server.post(path, body).await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    let streamed = with(&with(body, "stream", json!(true)), "stream_options", json!({"include_usage": true}));
    let chunks = chunks(&server.post(path, &streamed).await);
    let key = if path.contains("chat") { "message" } else { "text" };
    let folded: Vec<Value> = fold(&chunks).iter().map(|choice| choice_parts(choice, key)).collect();
    let expected: Vec<Value> =
        whole["choices"].as_array().expect("choices").iter().map(|choice| choice_parts(choice, key)).collect();
    assert_eq!(folded, expected, "{body}");
    // The extension blocks are on the last finish chunk, the usage on a chunk of its own.
    let (usage, rest) = chunks.split_last().expect("a usage chunk");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"], whole["usage"]);
    assert!(rest.iter().all(|chunk| chunk["usage"].is_null()), "usage on a chunk that isn't the last");
    let last = rest.last().expect("a finish chunk");
    assert_eq!(last["tensorfold"]["token_sha"], whole["tensorfold"]["token_sha"]);
    assert!(rest[..rest.len() - 1].iter().all(|chunk| chunk.get("tensorfold").is_none()));
    whole
}

#[tokio::test]
async fn a_folded_stream_is_the_whole_reply() {
    let server = start(Setup::default()).await;
    let bodies = [
        chat(json!({"max_tokens": 40})),
        chat(json!({"max_tokens": 40, "n": 3, "temperature": 2.0})),
        chat(json!({"max_tokens": 30, "logprobs": true, "top_logprobs": 2})),
        chat(json!({"max_tokens": 30, "thinking": {"type": "disabled"}, "logprobs": true})),
        chat(json!({"max_tokens": 30, "temperature": 0, "ignore_eos": true, "include_reasoning": false})),
        chat(json!({"max_tokens": 0})),
    ];
    for body in &bodies {
        assert_stream_is_whole(&server, "/v1/chat/completions", body).await;
    }
    let bodies = [
        json!({"prompt": "Once upon a time", "max_tokens": 30}),
        json!({"prompt": ["a", "b c"], "max_tokens": 10, "n": 2, "logprobs": 1}),
        json!({"prompt": "Once upon a time", "max_tokens": 10, "echo": true, "logprobs": 2}),
        json!({"prompt": [[3, 4, 5], [6, 7]], "max_tokens": 0, "echo": true, "logprobs": 0}),
    ];
    for body in &bodies {
        assert_stream_is_whole(&server, "/v1/completions", body).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn reasoning_content_and_calls_come_apart() {
    let call = "\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"weather\">\n<｜DSML｜ parameter name=\"city\" \
                string=\"true\">Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>";
    let text = format!("3 + 4 is 7.</think>Seven 👩‍🚀 ž.{call}");
    // A prompt is seen first by the whole reply, then by the stream.
    let server = start(Setup::scripted(&[&text, &text])).await;
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]);
    let body = chat(json!({"tools": tools, "max_tokens": 400}));
    let whole = assert_stream_is_whole(&server, "/v1/chat/completions", &body).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["reasoning_content"], "3 + 4 is 7.");
    assert_eq!(choice["message"]["content"], "Seven 👩‍🚀 ž.");
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(
        (function["name"].as_str(), function["arguments"].as_str()),
        (Some("weather"), Some("{\"city\": \"Paris\"}"))
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a count");
    assert!(reasoning > 0 && reasoning < whole["usage"]["completion_tokens"].as_u64().expect("a count"));
    server.stop().await;
}

#[tokio::test]
async fn no_call_comes_where_none_is_wanted() {
    let call = "Here:\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"weather\">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>";
    let server = start(Setup::scripted(&[call, call])).await;
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]);
    let body =
        chat(json!({"tools": tools, "tool_choice": "none", "thinking": {"type": "disabled"}, "max_tokens": 400}));
    let whole = assert_stream_is_whole(&server, "/v1/chat/completions", &body).await;
    let choice = &whole["choices"][0];
    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    assert_eq!(choice["finish_reason"], "stop");
    let content = choice["message"]["content"].as_str().expect("text");
    assert!(content.starts_with("Here:") && !content.contains('｜'), "{content}");
    server.stop().await;
}

#[tokio::test]
async fn drafted_is_undrafted_by_token_sha() {
    let server = start(Setup::default()).await;
    let (mut accepted, mut rejected) = (0, 0);
    for (index, temperature) in [0.0, 1.0, 0.7, 0.0, 2.0, 1.0].into_iter().enumerate() {
        let messages = json!([{"role": "user", "content": format!("question {index}")}]);
        let body =
            chat(json!({"messages": messages, "temperature": temperature, "max_tokens": 80, "ignore_eos": true}));
        let drafted = server.post("/v1/chat/completions", &body).await.json();
        let plain = server.post("/v1/chat/completions", &with(&body, "draft", json!(false))).await.json();
        assert_eq!(comparable(&drafted), comparable(&plain));
        assert!(plain.get("speculative").is_none(), "drafts in a reply without drafts");
        let counts = &drafted["speculative"];
        accepted += counts["accepted"].as_u64().expect("a count");
        rejected += counts["drafted"].as_u64().expect("a count") - counts["accepted"].as_u64().expect("a count");
        let per_position: u64 =
            counts["accepted_per_position"].as_array().expect("counts").iter().filter_map(Value::as_u64).sum();
        assert_eq!(Some(per_position), counts["accepted"].as_u64());
    }
    assert!(accepted > 10 && rejected > 10, "{accepted} accepted and {rejected} rejected drafts show little");
    server.stop().await;
}

#[tokio::test]
async fn together_is_alone_by_token_sha() {
    let server = std::sync::Arc::new(start(Setup::default()).await);
    let body = |index: usize| {
        let messages = json!([{"role": "user", "content": format!("question {index} {}", "long ".repeat(index * 20))}]);
        chat(json!({"messages": messages, "max_tokens": 60, "ignore_eos": true, "stream": index.is_multiple_of(2)}))
    };
    let sha = |answer: &Answer| {
        let text = answer.text();
        let start = text.find("\"token_sha\":\"").expect("a digest") + 13;
        text[start..start + 16].to_string()
    };
    let mut alone = Vec::new();
    for index in 0..8 {
        alone.push(sha(&server.post("/v1/chat/completions", &body(index)).await));
    }
    let before = server.engine.stats().rounds;
    let tasks: Vec<_> = (0..8)
        .map(|index| {
            let (server, body) = (server.clone(), body(index));
            tokio::spawn(async move { server.post("/v1/chat/completions", &body).await })
        })
        .collect();
    for (task, alone) in tasks.into_iter().zip(&alone) {
        assert_eq!(&sha(&task.await.expect("a task")), alone);
    }
    assert!(server.engine.stats().rounds > before);
    std::sync::Arc::into_inner(server).expect("all tasks have ended").stop().await;
}

#[tokio::test]
async fn stop_strings_cut_exactly_and_leak_nothing() {
    // text, stops, include, shown, stop reason
    type Case<'a> = (&'a str, &'a [&'a str], bool, &'a str, Option<&'a str>);
    let cases: [Case<'_>; 7] = [
        ("alpha beta gamma delta", &["beta gamma"], false, "alpha ", Some("beta gamma")),
        ("alpha beta gamma delta", &["beta gamma"], true, "alpha beta gamma", Some("beta gamma")),
        ("one\nUser: two", &["\nUser:"], false, "one", Some("\nUser:")),
        ("xaaab", &["aab"], false, "xa", Some("aab")),
        ("alpha beta", &["gamma", "lph", "beta", "zzz"], false, "a", Some("lph")),
        ("a line\n\nmore", &["\n\n"], false, "a line", Some("\n\n")),
        ("alpha beta gamma", &["beta gamma delta"], false, "alpha beta gamma", None),
    ];
    for (text, stops, include, shown, stop) in cases {
        let server = start(Setup::scripted(&[text; 4])).await;
        let base = json!({"prompt": "go", "max_tokens": 100, "stop": stops, "include_stop_str_in_output": include});
        let whole = assert_stream_is_whole(&server, "/v1/completions", &base).await;
        let choice = &whole["choices"][0];
        assert_eq!(choice["text"], shown, "{text} {stops:?}");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["stop_reason"].as_str(), stop);
        // What was committed behind the stop is neither counted nor digested, drafted or not.
        let plain = server.post("/v1/completions", &with(&base, "draft", json!(false))).await.json();
        assert_eq!(plain["tensorfold"]["token_sha"], whole["tensorfold"]["token_sha"]);
        assert_eq!(plain["usage"], whole["usage"]);
        // The digest is that of the prefix of the script that completes the stop.
        let count = whole["usage"]["completion_tokens"].as_u64().expect("a count") as usize;
        let script = common::script(text);
        let sha = tf_server::generate::token_sha(&script[..count]);
        assert_eq!(whole["tensorfold"]["token_sha"], sha);
        let all = common::tokenizer().decode(&script[..count], true).expect("known ids");
        let before = common::tokenizer().decode(&script[..count - 1], true).expect("known ids");
        if let Some(stop) = stop {
            assert!(all.contains(stop) && !before.contains(stop), "cut at {all:?}, not at the first {stop:?}");
        } else {
            assert_eq!(count, script.len());
        }
        server.stop().await;
    }
}

#[tokio::test]
async fn a_stop_that_is_found_late_takes_nothing_with_it() {
    // In a chat the newlines wait for what follows, because a call could: the stop is seen a token after its last one.
    let text = "a line\n\nmore and more";
    let server = start(Setup::scripted(&[text; 2])).await;
    let body = chat(json!({"thinking": {"type": "disabled"}, "max_tokens": 100, "stop": "\n\n", "logprobs": true}));
    let whole = assert_stream_is_whole(&server, "/v1/chat/completions", &body).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "a line");
    let script = common::script(text);
    let decode = |count| common::tokenizer().decode(&script[..count], true).expect("known ids");
    let count = (1..script.len()).find(|&count| decode(count).contains("\n\n")).expect("the stop is in the script");
    assert_eq!(whole["usage"]["completion_tokens"], count);
    assert_eq!(whole["tensorfold"]["token_sha"], tf_server::generate::token_sha(&script[..count]));
    server.stop().await;
}

#[tokio::test]
async fn a_stop_ends_the_computing_too() {
    let server = start(Setup::scripted(&["alpha beta gamma"])).await;
    let body = json!({"prompt": "go", "max_tokens": 1_000_000, "ignore_eos": true, "stop": ["beta"]});
    let reply = server.post("/v1/completions", &body).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert!(server.engine.stats().reply_tokens < 100_000, "the engine went on to the limit");
    server.until("a free slot", |stats| stats.decoding == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn stop_ids_end_a_reply_and_are_named() {
    let script = common::script("alpha beta gamma");
    let server = start(Setup::scripted(&["alpha beta gamma"])).await;
    let body = json!({"prompt": "go", "max_tokens": 50, "stop_token_ids": [script[2]]});
    let reply = server.post("/v1/completions", &body).await.json();
    assert_eq!(reply["choices"][0]["stop_reason"], json!(script[2]));
    assert_eq!(reply["choices"][0]["text"], common::tokenizer().decode(&script[..2], true).expect("known ids"));
    assert_eq!(reply["tensorfold"]["token_sha"], tf_server::generate::token_sha(&script[..3]));
    server.stop().await;
}

#[tokio::test]
async fn a_character_cut_by_the_limit_is_withheld() {
    let text = "ok 漢";
    let script = common::script(text);
    let tokenizer = common::tokenizer();
    // Cut one token before the end of the character, where the tokenizer spreads it over several.
    let partial = (1..script.len())
        .find(|&count| tokenizer.decode(&script[..count], true).is_ok_and(|text| text.contains('\u{fffd}')));
    let count = partial.expect("the character spans tokens in the demo vocabulary");
    let server = start(Setup::scripted(&[text, text])).await;
    let body = chat(json!({"max_tokens": count, "thinking": {"type": "disabled"}, "logprobs": true}));
    let whole = assert_stream_is_whole(&server, "/v1/chat/completions", &body).await;
    let choice = &whole["choices"][0];
    assert_eq!(
        (choice["message"]["content"].as_str(), choice["finish_reason"].as_str()),
        (Some("ok "), Some("length"))
    );
    let rows = choice["logprobs"]["content"].as_array().expect("rows");
    let bytes: Vec<u8> = rows
        .iter()
        .flat_map(|row| row["bytes"].as_array().expect("bytes"))
        .map(|byte| byte.as_u64().expect("a byte") as u8)
        .collect();
    let expected: Vec<u8> =
        script[..count].iter().flat_map(|&id| tokenizer.token_bytes(id).expect("known")).copied().collect();
    assert_eq!(bytes, expected, "withheld bytes are in the rows");
    server.stop().await;
}

#[tokio::test]
async fn choice_0_is_the_only_choice_and_seeds_decide() {
    let server = start(Setup::default()).await;
    let body = chat(json!({"max_tokens": 30, "ignore_eos": true}));
    let one = server.post("/v1/chat/completions", &body).await.json();
    let three = server.post("/v1/chat/completions", &with(&body, "n", json!(3))).await.json();
    assert_eq!(one["choices"][0], three["choices"][0]);
    assert_eq!(one["tensorfold"]["token_sha"], three["tensorfold"]["token_sha"][0]);
    assert_ne!(three["tensorfold"]["token_sha"][1], three["tensorfold"]["token_sha"][0], "choices are alike");
    assert_eq!(one["usage"]["prompt_tokens"], three["usage"]["prompt_tokens"], "the prompt is counted once");
    assert_eq!(one["tensorfold"]["seed_source"], "derived");
    // The derived seed, given back, is the same reply.
    let seed: u64 = one["tensorfold"]["seed"].as_str().expect("a string").parse().expect("64 bits");
    let again = server.post("/v1/chat/completions", &with(&body, "seed", json!(seed))).await.json();
    assert_eq!(again["tensorfold"]["token_sha"], one["tensorfold"]["token_sha"]);
    assert_eq!(again["tensorfold"]["seed_source"], "request");
    let other = server.post("/v1/chat/completions", &with(&body, "seed", json!(seed ^ 1))).await.json();
    assert_ne!(other["tensorfold"]["token_sha"], one["tensorfold"]["token_sha"]);
    server.stop().await;
}

#[tokio::test]
async fn echoed_prompts_are_scored_token_by_token() {
    let server = start(Setup::default()).await;
    for length in [1, 15, 16, 17, 33] {
        let ids: Vec<u32> = (0..length).map(|index| 300 + index * 7).collect();
        let body = json!({"prompt": [ids, [5, 6]], "echo": true, "logprobs": 1, "max_tokens": 1, "ignore_eos": true});
        let reply = server.post("/v1/completions", &body).await.json();
        let again = server.post("/v1/completions", &body).await.json();
        assert_eq!(reply["choices"], again["choices"]);
        let lists = &reply["choices"][0]["logprobs"];
        let count = |key: &str| lists[key].as_array().expect("a list").len();
        assert_eq!(count("tokens"), length as usize + 1);
        assert_eq!(count("token_logprobs"), length as usize + 1);
        assert_eq!(count("text_offset"), length as usize + 1);
        assert!(lists["token_logprobs"][0].is_null() && lists["top_logprobs"][0].is_null());
        assert!((1..=length as usize).all(|place| lists["token_logprobs"][place].is_f64()));
        let offsets: Vec<u64> =
            lists["text_offset"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect();
        assert!(offsets.is_sorted(), "{offsets:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn models_health_and_the_root() {
    let server = start(Setup::default()).await;
    let models = server.get("/v1/models").await.json();
    assert_eq!(models["data"][1]["id"], "alias");
    assert_eq!(models["data"][1]["root"], "history");
    assert_eq!(models["data"][0]["max_model_len"], 1 << 20);
    assert_eq!(server.get("/v1/models/history").await.json()["id"], "history");
    server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 5, "ignore_eos": true})).await;
    // A reply ends before its round's counters are published.
    server.until("the last round's counters", |stats| stats.reply_tokens == 5).await;
    let health = server.get("/health").await.json();
    assert_eq!(
        (&health["status"], &health["completion_tokens_total"], &health["requests_total"]),
        (&json!("ok"), &json!(5), &json!(1))
    );
    let live = &health["live"];
    assert!(live["decode_tokens_per_second"].is_number() && live["prefill_tokens_per_second"].is_number(), "{live}");
    assert!(live["connections"].as_u64() >= Some(1), "{live}");
    let info = server.get("/server_info").await.json();
    assert_eq!((&info["build"]["version"], &info["names"][1]), (&json!("test"), &json!("alias")));
    assert_eq!(info["limits"]["context_length"], models["data"][0]["max_model_len"]);
    let document = server.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["paths"]["/v1/chat/completions"]["post"]["requestBody"].is_object());
    for path in ["/", "/ready", "/ping", "/live", "/version"] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
        let head = server.call("HEAD", path, &[], b"").await;
        assert_eq!((head.status, head.body.len()), (200, 0), "HEAD {path}");
    }
    let answer = server.call("GET", "/", &[("x-request-id", "mine")], b"").await;
    assert_eq!((answer.header("x-request-id"), answer.header("request-id")), (Some("mine"), Some("mine")));
    server.stop().await;
}

#[tokio::test]
async fn a_compressed_body_is_read() {
    let server = start(Setup::default()).await;
    // gzip of {"prompt": "a", "max_tokens": 2}, stored without compression.
    let body = br#"{"prompt": "a", "max_tokens": 2}"#;
    let mut gzip = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 1];
    gzip.extend((body.len() as u16).to_le_bytes());
    gzip.extend((!(body.len() as u16)).to_le_bytes());
    gzip.extend(body);
    gzip.extend(crc32(body).to_le_bytes());
    gzip.extend((body.len() as u32).to_le_bytes());
    let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
    assert_eq!(server.call("POST", "/v1/completions", &headers, &gzip).await.status, 200);
    let headers = [("content-type", "application/json"), ("content-encoding", "br")];
    assert_eq!(server.call("POST", "/v1/completions", &headers, &gzip).await.status, 415);
    server.stop().await;
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, &byte: &u8| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 })
    };
    !bytes.iter().fold(!0, step)
}
