//! `render` as a user runs it, over the golden prompts and outputs.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

const PROMPTS: &str = include_str!("../../text/tests/golden/chat-encoding/prompts.json");
const OUTPUTS: &str = include_str!("../../text/tests/golden/chat-encoding/outputs.json");
const TINY_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/golden/dsv41-tiny-a/model");

/// Exit code, stdout and stderr.
fn render(arguments: &[&str], input: &[u8]) -> (Option<i32>, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tensorfold"))
        .arg("render")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    // A command that refuses its arguments doesn't read.
    let _ = child.stdin.take().expect("piped").write_all(input);
    let output = child.wait_with_output().expect("ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn golden_requests_print_their_prompts_and_ids() {
    let goldens: Vec<Value> = serde_json::from_str(PROMPTS).expect("golden file");
    assert_eq!(goldens.len(), 20);
    for golden in &goldens {
        let (name, request) = (&golden["name"], golden["request"].to_string());
        let (code, stdout, stderr) = render(&[TINY_MODEL, "-", "--json"], request.as_bytes());
        assert_eq!(code, Some(0), "{name}: {stderr}");
        let found: Value = serde_json::from_str(&stdout).expect("JSON");
        for (field, expected) in [
            ("prompt", &golden["prompt"]),
            ("special_ranges", &golden["special_ranges"]),
            ("token_ids", &golden["tiny_token_ids"]),
            ("images", &golden["n_images"]),
            ("thinking", &json!(golden["parse_start"] == "ReasoningStart")),
        ] {
            assert_eq!(&found[field], expected, "{name}: {field}");
        }
    }
    let (code, stdout, _) = render(&[], goldens[0]["request"].to_string().as_bytes());
    assert_eq!((code, Some(stdout.as_str())), (Some(0), goldens[0]["prompt"].as_str()), "plain text, nothing added");
}

#[test]
fn golden_outputs_print_their_messages() {
    let goldens: Vec<Value> = serde_json::from_str(OUTPUTS).expect("golden file");
    assert_eq!(goldens.len(), 10);
    for golden in &goldens {
        let name = &golden["name"];
        let mode = if golden["thinking"] == true { "--thinking" } else { "--no-thinking" };
        let finish = golden["backend_finish"].as_str().expect("text");
        let text = golden["text"].as_str().expect("text");
        let (code, stdout, stderr) = render(&["--parse", mode, "--finish", finish], text.as_bytes());
        assert_eq!(code, Some(0), "{name}: {stderr}");
        let found: Value = serde_json::from_str(&stdout).expect("JSON");
        let message = &golden["message"];
        assert_eq!(found["reasoning_content"], message["reasoning_content"], "{name}");
        assert_eq!(found["content"].as_str().unwrap_or_default(), message["content"], "{name}");
        assert_eq!(found["finish_reason"], golden["finish_reason"], "{name}");
        let calls = |value: &Value| -> Vec<Value> {
            value["tool_calls"].as_array().into_iter().flatten().map(|call| call["function"].clone()).collect()
        };
        assert_eq!(calls(&found), calls(message), "{name}");
    }
}

#[test]
fn wrong_usage_ends_with_2_and_a_refused_body_with_1() {
    let cases: [(&[&str], &[u8], i32, &str); 6] = [
        (&["--finish", "stop"], b"{}", 2, "--finish belongs to --parse"),
        (&["no-such-file.json"], b"", 2, "no-such-file.json is not a model here"),
        (&["--parse", "--stream", "0"], b"x", 2, "--stream 0"),
        (&[], b"{\"input\": \"x\"}", 1, "this is a Responses body"),
        (&[], b"{\"messages\": [{\"role\": \"user\"}]}", 1, "messages[0].content is required"),
        (&[], b"\xff", 1, "stdin is not UTF-8 from byte 0 on"),
    ];
    for (arguments, input, expected, part) in cases {
        let (code, stdout, stderr) = render(arguments, input);
        assert_eq!((code, stdout.as_str()), (Some(expected), ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains(part), "{arguments:?}: {stderr}");
    }
}
