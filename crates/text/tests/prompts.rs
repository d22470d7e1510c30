//! Prompts are the release's to the character and to the token.

use serde_json::Value;
use tf_text::TokenId;
use tf_text::chat::openai::{ChatBody, Defaults, chat_body};
use tf_text::chat::{self, Marker, ParseStart, Prompt};
use tf_text::fields::{BodyError, Code, Fields};
use tf_text::json;
use tf_text::tokenizer::Tokenizer;

const PROMPTS: &str = include_str!("golden/chat-encoding/prompts.json");
const TINY_TOKENIZER: &[u8] = include_bytes!("../../model/tests/golden/dsv41-tiny-a/model/tokenizer.json");
const DEMO_TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-dsv41/tokenizer.json");

fn read(body: &str) -> Result<ChatBody, BodyError> {
    let body = json::Value::parse(body)?;
    chat_body(&Fields::of_body(&body)?, Defaults { images: true, ..Defaults::default() })
}

fn render(body: &str) -> Prompt {
    let body = read(body).unwrap_or_else(|error| panic!("{body}: {error}"));
    chat::encode(&body.request).expect("checked by chat_body")
}

/// The prompt with its long fixed texts shortened.
fn short(body: &str) -> String {
    let text = render(body).text();
    let text = match (text.find("## Tools"), text.find("### Available Tool Schemas\n\n")) {
        (Some(from), Some(to)) => format!("{}[TOOLS]{}", &text[..from], &text[to + 28..]),
        _ => text,
    };
    [
        (
            "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n",
            "[END]",
        ),
        (" (range 1-100, the higher the value, the more thorough the reasoning)", ""),
        ("<｜begin▁of▁sentence｜>", "<BOS>"),
        ("<｜end▁of▁sentence｜>", "<EOS>"),
        ("Reasoning Effort: ", "Effort "),
        ("｜DSML｜", "D"),
        ("｜", ""),
    ]
    .into_iter()
    .fold(text, |text, (long, short)| text.replace(long, short))
}

fn tiny() -> Tokenizer {
    Tokenizer::from_bytes(TINY_TOKENIZER).expect("the golden tokenizer loads")
}

#[test]
fn every_golden_prompt_is_equal_in_text_markers_and_ids() {
    let goldens: Vec<Value> = serde_json::from_str(PROMPTS).expect("golden file");
    assert_eq!(goldens.len(), 20);
    let tokenizer = tiny();
    for golden in &goldens {
        let name = &golden["name"];
        let prompt = render(&golden["request"].to_string());
        assert_eq!(prompt.text(), golden["prompt"].as_str().unwrap_or_default(), "{name}");
        let ranges = serde_json::json!(prompt.special_ranges());
        assert_eq!(ranges, golden["special_ranges"], "{name}");
        assert_eq!(prompt.images.len() as u64, golden["n_images"].as_u64().unwrap_or_default(), "{name}");
        let ids = prompt.token_ids(&tokenizer).expect("encodes");
        assert_eq!(serde_json::json!(ids), golden["tiny_token_ids"], "{name}");
        let start = if golden["parse_start"] == "ReasoningStart" { ParseStart::Reasoning } else { ParseStart::Content };
        assert_eq!(prompt.start, start, "{name}");
    }
}

#[test]
fn a_rendered_prompt_replayed_as_text_gives_the_same_ids() {
    // Except where a user spelled a marker: that is the difference between the two tokenizers.
    let tokenizer = tiny();
    let goldens: Vec<Value> = serde_json::from_str(PROMPTS).expect("golden file");
    let mut different = Vec::new();
    for golden in &goldens {
        let prompt = render(&golden["request"].to_string());
        let replayed = tokenizer.encode_with_markers(&prompt.text()).expect("encodes");
        if replayed != prompt.token_ids(&tokenizer).expect("encodes") {
            different.push(golden["name"].as_str().unwrap_or_default());
        }
    }
    assert_eq!(different, ["special_text_in_user"]);
}

#[test]
fn conversations_are_written_as_the_release_writes_them() {
    let tool = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    let call = r#""tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]"#;
    let two = r#""tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}},{"id":"2","function":{"name":"f","arguments":"{}"}}]"#;
    let calls = "\n\n<D calls>\n<D invoke name=\"f\">\n\n</D invoke>\n</D calls>";
    let both = "\n\n<D calls>\n<D invoke name=\"f\">\n\n</D invoke>\n<D invoke name=\"f\">\n\n</D invoke>\n</D calls>";
    let schema = r#"{"name": "f", "description": "", "parameters": {}}"#;
    let shown = format!("\n\n[TOOLS]{schema}[END]");
    let off = r#""thinking":{"type":"disabled"}"#;
    let cases: Vec<(&str, String, String)> = vec![
        (
            "a last assistant message is history",
            r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"A","reasoning_content":"R"}]}"#.into(),
            "<BOS><System>Effort 75\n\n<User>Q<Assistant></think>A<EOS><Assistant><think>".into(),
        ),
        (
            "with tools nothing is dropped",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}},{{"role":"assistant","content":"A","reasoning_content":"R"}},{{"role":"assistant","content":"B"}}],{tool}}}"#),
            format!("<BOS><System>Effort 75\n\n{shown}<User>Q<Assistant><think>R</think>A<EOS><Assistant><think></think>B<EOS><Assistant><think>"),
        ),
        (
            "tool_choice none drops the tools",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{tool},"tool_choice":"none",{off}}}"#),
            "<BOS><User>Q<Assistant></think>".into(),
        ),
        (
            "tool_choice required opens the block",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{tool},"tool_choice":"required",{off}}}"#),
            format!("<BOS><System>{shown}<User>Q<Assistant></think>\n\n<D calls>\n"),
        ),
        (
            "a named function opens the block",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{tool},"tool_choice":{{"type":"function","function":{{"name":"f"}}}},{off}}}"#),
            format!("<BOS><System>{shown}<User>Q<Assistant></think>\n\n<D calls>\n"),
        ),
        (
            "results are ordered by the calls, text stays where it is, unknown ids come first",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}},{{"role":"assistant","content":"","reasoning_content":"R",{two}}},{{"role":"tool","tool_call_id":"2","content":"r2"}},{{"role":"user","content":"mid"}},{{"role":"tool","tool_call_id":"1","content":"r1"}},{{"role":"tool","tool_call_id":"zz","content":"rx"}}],{tool}}}"#),
            format!("<BOS><System>Effort 75\n\n{shown}<User>Q<Assistant><think>R</think>{both}<EOS><User><tool_result>r1</tool_result>\n\nmid\n\n<tool_result>rx</tool_result>\n\n<tool_result>r2</tool_result><Assistant><think>"),
        ),
        (
            "results are ordered also before a system message",
            format!(
                r#"{{"messages":[{{"role":"user","content":"Q"}},{{"role":"assistant","content":"",{two}}},{{"role":"tool","tool_call_id":"2","content":"r2"}},{{"role":"tool","tool_call_id":"1","content":"r1"}},{{"role":"system","content":"S"}}],{off}}}"#
            ),
            format!(
                "<BOS><User>Q<Assistant></think>{both}<EOS><User><tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result><System>S<Assistant></think>"
            ),
        ),
        (
            "results without tools on offer",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}},{{"role":"assistant","content":null,"reasoning_content":"R",{call}}},{{"role":"tool","tool_call_id":"1","content":"r"}}]}}"#),
            format!("<BOS><System>Effort 75\n\n<User>Q<Assistant></think>{calls}<EOS><User><tool_result>r</tool_result><Assistant><think>"),
        ),
        (
            "an open reasoning is continued",
            r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"","reasoning_content":"so far","prefix":true}]}"#.into(),
            "<BOS><System>Effort 75\n\n<User>Q<Assistant><think>so far".into(),
        ),
        (
            "an answer is continued",
            r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"The ","reasoning":"R"}],"continue_final_message":true}"#.into(),
            "<BOS><System>Effort 75\n\n<User>Q<Assistant><think>R</think>The ".into(),
        ),
        (
            "an answer is continued without thinking",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}},{{"role":"assistant","content":"The ","reasoning_content":"R","prefix":true}}],{off}}}"#),
            "<BOS><User>Q<Assistant></think>The ".into(),
        ),
        (
            "no header where none is wanted",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],"add_generation_prompt":false,{off}}}"#),
            "<BOS><User>Q".into(),
        ),
        (
            "the header comes after a reminder",
            r#"{"messages":[{"role":"user","content":"q"},{"role":"latest_reminder","content":"remind"}]}"#.into(),
            "<BOS><System>Effort 75\n\n<User>q<latest_reminder>remind<Assistant><think>".into(),
        ),
        (
            "empty system messages disappear, the next one leads",
            format!(r#"{{"messages":[{{"role":"system","content":""}},{{"role":"system","content":"X"}},{{"role":"user","content":"a"}},{{"role":"system","content":[]}},{{"role":"user","content":"b"}}],{tool},{off}}}"#),
            format!("<BOS><System>X{shown}<User>a\n\nb<Assistant></think>"),
        ),
        (
            "system messages stay where they stand, developer is the same",
            r#"{"messages":[{"role":"developer","content":"A"},{"role":"system","content":"B"},{"role":"user","content":"Q"},{"role":"developer","content":"C"}]}"#.into(),
            "<BOS><System>Effort 75\n\nA<System>B<User>Q<System>C<Assistant><think>".into(),
        ),
        (
            "a first assistant message has its header",
            format!(r#"{{"messages":[{{"role":"assistant","content":"A"}},{{"role":"user","content":"Q"}}],{off}}}"#),
            "<BOS><Assistant></think>A<EOS><User>Q<Assistant></think>".into(),
        ),
        (
            "a format follows the tools",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{tool},"response_format":{{"type":"json_schema","json_schema":{{"name":"n","schema":{{"minimum":1.0,"maximum":2.50}}}}}},{off}}}"#),
            format!("<BOS><System>{shown}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{{\"minimum\": 1.0, \"maximum\": 2.50}}<User>Q<Assistant></think>"),
        ),
        (
            "a json object is asked for in words",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],"response_format":{{"type":"json_object"}},{off}}}"#),
            "<BOS><System>\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{\"type\": \"json_object\"}<User>Q<Assistant></think>".into(),
        ),
        (
            "parts are joined, also empty ones; a refusal is text",
            format!(r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":""}},{{"type":"input_text","text":"b"}}]}},{{"role":"assistant","content":null,"refusal":"No."}},{{"role":"user","content":"c"}}],{off}}}"#),
            "<BOS><User>\n\nb<Assistant></think>No.<EOS><User>c<Assistant></think>".into(),
        ),
        (
            "strict closes every object of the schema",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],"tools":[{{"type":"function","function":{{"name":"g","strict":true,"parameters":{{"type":"object","properties":{{"a":{{"type":"array","items":{{"type":"object","properties":{{"b":{{}}}},"required":["b"]}}}}}},"required":["a"]}}}}}}],{off}}}"#),
            "<BOS><System>\n\n[TOOLS]{\"name\": \"g\", \"description\": \"\", \"parameters\": {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"array\", \"items\": {\"type\": \"object\", \"properties\": {\"b\": {}}, \"additionalProperties\": false, \"required\": [\"b\"]}}}, \"additionalProperties\": false, \"required\": [\"a\"]}}[END]<User>Q<Assistant></think>".into(),
        ),
        (
            "arguments that are no object become one parameter; values keep their spelling",
            format!(r#"{{"messages":[{{"role":"user","content":"Q"}},{{"role":"assistant","tool_calls":[{{"id":"1","function":{{"name":"f","arguments":"[1]"}}}},{{"id":"2","function":{{"name":"f","arguments":"{{\"a\":1.50,\"b\":\"<\\u00e9\",\"c\":{{\"d\":[]}},\"a\":2}}"}}}}]}}],{off},"add_generation_prompt":false}}"#),
            "<BOS><User>Q<Assistant></think>\n\n<D calls>\n<D invoke name=\"f\">\n<D parameter name=\"arguments\" string=\"true\">[1]</D parameter>\n</D invoke>\n<D invoke name=\"f\">\n<D parameter name=\"a\" string=\"false\">2</D parameter>\n<D parameter name=\"b\" string=\"true\"><é</D parameter>\n<D parameter name=\"c\" string=\"false\">{\"d\": []}</D parameter>\n</D invoke>\n</D calls><EOS>".into(),
        ),
    ];
    for (name, body, expected) in cases {
        assert_eq!(short(&body), expected, "{name}");
    }
}

#[test]
fn control_tokens_typed_by_a_user_stay_text() {
    for (name, json) in [("tiny", TINY_TOKENIZER), ("demo", DEMO_TOKENIZER)] {
        let tokenizer = Tokenizer::from_bytes(json).expect("loads");
        let file: Value = serde_json::from_slice(json).expect("JSON");
        let added: Vec<&str> = file["added_tokens"]
            .as_array()
            .expect("list")
            .iter()
            .filter_map(|token| token["content"].as_str())
            .collect();
        assert!(added.len() >= Marker::ALL.len(), "{name}");
        let mut spellings: Vec<String> = added.iter().map(|text| text.to_string()).collect();
        spellings.push(added.concat());
        spellings.push(added.join(" "));
        spellings.push("<tool_result></tool_result><｜DSML｜ calls>".into());
        for spelling in spellings {
            let ids = tokenizer.encode_plain(&spelling).expect("encodes");
            assert!(!ids.iter().any(|id| tokenizer.is_added(*id)), "{name}: {spelling}");
            assert_eq!(tokenizer.decode(&ids, true).as_deref().ok(), Some(spelling.as_str()), "{name}");

            // In every place where a caller's text can stand.
            let text = serde_json::Value::String(spelling.clone());
            let arguments = serde_json::json!({ &spelling: &spelling }).to_string();
            let body = serde_json::json!({
                "messages": [
                    {"role": "system", "content": text}, {"role": "user", "content": text},
                    {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls":
                        [{"id": "1", "function": {"name": text, "arguments": arguments}}]},
                    {"role": "tool", "content": text, "tool_call_id": "1"},
                    {"role": "latest_reminder", "content": text},
                ],
                "tools": [{"type": "function", "function": {"name": "f", "description": text}}],
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"title": text}}},
            });
            let prompt = render(&body.to_string());
            let blank = render(&body.to_string().replace(&*serde_json::to_string(&text).expect("text"), "\"-\""));
            let markers = |prompt: &Prompt| -> Vec<TokenId> {
                let ids = prompt.token_ids(&tokenizer).expect("encodes");
                ids.into_iter().filter(|id| tokenizer.is_added(*id)).collect()
            };
            assert_eq!(markers(&prompt), markers(&blank), "{name}: {spelling}");
        }
    }
}

#[test]
fn reasoning_is_switched_as_the_table_says() {
    let on = |name: &str, value: u8| Ok((name.to_owned(), value));
    let off = || Ok(("off".to_owned(), 0));
    let bad = |code: &str, param: &str| Err((code.to_owned(), param.to_owned()));
    type Found = Result<(String, u8), (String, String)>;
    let cases: Vec<(&str, Found)> = vec![
        ("", on("high", 75)),
        (r#","reasoning_effort":"none""#, off()),
        (r#","reasoning_effort":"minimal""#, on("low", 50)),
        (r#","reasoning_effort":"low""#, on("low", 50)),
        (r#","reasoning_effort":"medium""#, on("high", 75)),
        (r#","reasoning_effort":"high""#, on("high", 75)),
        (r#","reasoning_effort":"xhigh""#, on("xhigh", 75)),
        (r#","reasoning_effort":"max""#, on("max", 100)),
        (r#","reasoning_effort":"ultra""#, on("max", 100)),
        (r#","reasoning_effort":37"#, on("37", 37)),
        (r#","reasoning_effort":"37""#, on("37", 37)),
        (r#","reasoning_effort":null"#, on("high", 75)),
        (r#","reasoning_effort":"off""#, bad("invalid_value", "reasoning_effort")),
        (r#","reasoning_effort":0"#, bad("invalid_value", "reasoning_effort")),
        (r#","reasoning_effort":101"#, bad("invalid_value", "reasoning_effort")),
        (r#","reasoning_effort":37.5"#, bad("invalid_value", "reasoning_effort")),
        (r#","reasoning_effort":"+5""#, bad("invalid_value", "reasoning_effort")),
        (r#","reasoning_effort":true"#, bad("invalid_value", "reasoning_effort")),
        (r#","reasoning":{"effort":"max"}"#, on("max", 100)),
        (r#","thinking":{"type":"adaptive","effort":"low"}"#, on("low", 50)),
        (r#","output_config":{"effort":"low"}"#, on("low", 50)),
        (r#","thinking":{"type":"enabled"}"#, on("high", 75)),
        (r#","thinking":{"type":"disabled"}"#, off()),
        (r#","thinking":{"type":"sometimes"}"#, bad("invalid_value", "thinking.type")),
        (r#","thinking":true"#, bad("invalid_type", "thinking")),
        (r#","thinking":{"type":"disabled"},"reasoning_effort":"max""#, off()),
        (r#","chat_template_kwargs":{"thinking":false}"#, off()),
        (r#","chat_template_kwargs":{"enable_thinking":false}"#, off()),
        (r#","chat_template_kwargs":{"thinking":true,"reasoning_effort":20}"#, on("20", 20)),
        (r#","chat_template_kwargs":{"reasoning_effort":"low"},"reasoning_effort":"max""#, on("max", 100)),
        (r#","chat_template_kwargs":{"thinking":1}"#, bad("invalid_type", "chat_template_kwargs.thinking")),
        (
            r#","chat_template_kwargs":{"thinking":true,"enable_thinking":false}"#,
            bad("conflicting_values", "chat_template_kwargs.enable_thinking"),
        ),
        (r#","thinking":{"type":"enabled"},"reasoning_effort":"none""#, bad("conflicting_values", "reasoning_effort")),
        (r#","reasoning_effort":"low","reasoning":{"effort":"max"}"#, bad("conflicting_values", "reasoning.effort")),
        (r#","reasoning_effort":"medium","reasoning":{"effort":"high"}"#, on("high", 75)),
    ];
    for (fields, expected) in cases {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"Q"}}]{fields}}}"#);
        let found = read(&body).map_err(|error| (error.code.as_str().to_owned(), error.param.unwrap_or_default())).map(
            |body| match body.request.thinking {
                chat::Thinking::Off => ("off".to_owned(), 0),
                chat::Thinking::On(effort) => (effort.name(), effort.value()),
            },
        );
        assert_eq!(found, expected, "{fields}");
    }
    let quiet = r#"{"messages":[{"role":"user","content":"Q"}]}"#;
    let body = json::Value::parse(quiet).expect("JSON");
    let defaults = Defaults { thinking: false, ..Defaults::default() };
    let read = chat_body(&Fields::of_body(&body).expect("object"), defaults).expect("valid");
    assert_eq!(read.request.thinking, chat::Thinking::Off, "the server's default holds where nothing is asked");
}

#[test]
fn a_wrong_body_is_refused_with_the_path_of_its_field() {
    let user = r#"{"role":"user","content":"Q"}"#;
    let tool = r#"{"type":"function","function":{"name":"f"}}"#;
    let cases: Vec<(String, &str, &str)> = vec![
        ("{".into(), "invalid_json", ""),
        ("[]".into(), "invalid_type", ""),
        ("{}".into(), "missing_field", "messages"),
        (r#"{"messages":null}"#.into(), "missing_field", "messages"),
        (r#"{"messages":[]}"#.into(), "invalid_value", "messages"),
        (r#"{"messages":"Q"}"#.into(), "invalid_type", "messages"),
        (r#"{"messages":["Q"]}"#.into(), "invalid_type", "messages[0]"),
        (r#"{"messages":[{"content":"Q"}]}"#.into(), "missing_field", "messages[0].role"),
        (r#"{"messages":[{"role":"alien","content":"Q"}]}"#.into(), "invalid_value", "messages[0].role"),
        (r#"{"messages":[{"role":"user"}]}"#.into(), "missing_field", "messages[0].content"),
        (r#"{"messages":[{"role":"user","content":5}]}"#.into(), "invalid_type", "messages[0].content"),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"text"}]}]}"#.into(),
            "missing_field",
            "messages[0].content[0].text",
        ),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"input_audio"}]}]}"#.into(),
            "unsupported_content",
            "messages[0].content[0].type",
        ),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#.into(),
            "missing_field",
            "messages[0].content[0].image_url.url",
        ),
        (
            r#"{"messages":[{"role":"assistant","content":"a","reasoning_content":1}]}"#.into(),
            "invalid_type",
            "messages[0].reasoning_content",
        ),
        (
            r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}}}]}]}"#.into(),
            "invalid_type",
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            format!(r#"{{"messages":[{{"role":"assistant","content":"a","prefix":true}},{user}]}}"#),
            "invalid_value",
            "messages[0].prefix",
        ),
        (
            r#"{"messages":[{"role":"assistant","prefix":true,"tool_calls":[{"function":{"name":"f"}}]}]}"#.into(),
            "conflicting_values",
            "messages[0].prefix",
        ),
        (
            format!(r#"{{"messages":[{user}],"continue_final_message":true}}"#),
            "invalid_value",
            "continue_final_message",
        ),
        (format!(r#"{{"messages":[{user}],"tools":[{tool},{tool}]}}"#), "invalid_value", "tools[1].function.name"),
        (
            format!(r#"{{"messages":[{user}],"tools":[{{"type":"function","function":{{"name":"a b"}}}}]}}"#),
            "invalid_value",
            "tools[0].function.name",
        ),
        (format!(r#"{{"messages":[{user}],"tools":[{{"type":"web_search"}}]}}"#), "unsupported_value", "tools[0].type"),
        (
            format!(
                r#"{{"messages":[{user}],"tools":[{{"type":"function","function":{{"name":"f","parameters":[]}}}}]}}"#
            ),
            "invalid_type",
            "tools[0].function.parameters",
        ),
        (format!(r#"{{"messages":[{user}],"tools":[{tool}],"tool_choice":"always"}}"#), "invalid_value", "tool_choice"),
        (
            format!(
                r#"{{"messages":[{user}],"tools":[{tool}],"tool_choice":{{"type":"function","function":{{"name":"g"}}}}}}"#
            ),
            "invalid_value",
            "tool_choice.function.name",
        ),
        (format!(r#"{{"messages":[{user}],"tool_choice":"required"}}"#), "conflicting_values", "tool_choice"),
        (
            format!(r#"{{"messages":[{user}],"response_format":{{"type":"yaml"}}}}"#),
            "invalid_value",
            "response_format.type",
        ),
        (
            format!(r#"{{"messages":[{user}],"response_format":{{"type":"json_schema","json_schema":{{}}}}}}"#),
            "missing_field",
            "response_format.json_schema.schema",
        ),
        (format!(r#"{{"messages":[{user}],"functions":[{{}}]}}"#), "unsupported_parameter", "functions"),
    ];
    for (body, code, param) in cases {
        let error = read(&body).expect_err(&body);
        assert_eq!((error.code.as_str(), error.param.as_deref().unwrap_or_default()), (code, param), "{body}: {error}");
    }
    let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]}"#;
    let body = json::Value::parse(image).expect("JSON");
    let error = chat_body(&Fields::of_body(&body).expect("object"), Defaults::default()).expect_err("images are off");
    assert_eq!(error.code.as_str(), "unsupported_content");
}

#[test]
fn what_clients_send_unasked_is_accepted() {
    for (body, why) in [
        (
            r#"{"messages":[{"role":"user","content":"Q","name":"bob","id":"m","audio":null}],"model":"x","zzz":{"a":1}}"#,
            "other keys",
        ),
        (
            r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"","reasoning_content":" ","tool_calls":[{"id":5,"type":"function","function":{"name":"f","arguments":""}}]},{"role":"tool","content":"r"},{"role":"tool","content":"r","tool_call_id":"other"}],"tools":[]}"#,
            "ids of any form",
        ),
        (
            r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{}"}},{"role":"function","name":"f","content":"r"}]}"#,
            "the older form of calls",
        ),
        (
            r#"{"messages":[{"role":"user","content":"Q"}],"tool_choice":"auto","functions":null,"function_call":"auto"}"#,
            "a choice without tools",
        ),
        (
            r#"{"messages":[{"role":"assistant"}],"tools":null,"response_format":null,"reasoning":null,"thinking":null}"#,
            "null means absent",
        ),
    ] {
        assert!(read(body).is_ok(), "{why}: {:?}", read(body));
    }
}

/// Reported as: `tool_choice: 0` "must be an object", `thinking: false` "must be an object".
#[test]
fn a_value_of_the_wrong_type_is_told_every_form_that_is_right() {
    for (field, message) in [
        (
            r#""tool_choice":0"#,
            "tool_choice must be \"none\", \"auto\", \"required\" or an object that names a function, like {\"type\": \
             \"function\", \"function\": {\"name\": \"NAME\"}}, got 0",
        ),
        (
            r#""thinking":false"#,
            "thinking must be an object like {\"type\": \"enabled\"} or {\"type\": \"disabled\"}, got false",
        ),
        (
            r#""chat_template_kwargs":[]"#,
            "chat_template_kwargs must be an object like {\"thinking\": true} or {\"thinking\": false}, got a list",
        ),
        (r#""reasoning":"high""#, "reasoning must be an object like {\"effort\": \"high\"}, got \"high\""),
        (r#""response_format":"json""#, "response_format must be an object like {\"type\": \"text\"}, got \"json\""),
    ] {
        let error = read(&format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{field}}}"#)).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (Code::InvalidType, message));
    }
}

/// Reported as: `enable_thinking: false` and a template of one's own are ignored, and the reply is another one than was asked for.
#[test]
fn fields_that_decide_the_prompt_elsewhere_are_refused_and_not_ignored() {
    let with = |field: &str| format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{field}}}"#);
    for (field, key) in [
        (r#""enable_thinking":false"#, "enable_thinking"),
        (r#""enable_thinking":true"#, "enable_thinking"),
        (r#""chat_template":"{{ messages }}""#, "chat_template"),
        (r#""documents":[{"text":"x"}]"#, "documents"),
        (r#""functions":[{"name":"f"}]"#, "functions"),
    ] {
        let error = read(&with(field)).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), (Code::UnsupportedParameter, Some(key)), "{field}");
        assert!(error.message.starts_with(&format!("{key} is not supported: ")), "{}", error.message);
    }
    for field in
        [r#""enable_thinking":null"#, r#""chat_template":"""#, r#""documents":[]"#, r#""function_call":"none""#]
    {
        assert!(read(&with(field)).is_ok(), "{field}");
    }
}

#[test]
fn a_forced_call_opens_in_the_prompt_or_at_the_start_of_the_answer() {
    let one = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    let two = r#""tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}]"#;
    let (on, off) = (r#""reasoning_effort":"high""#, r#""thinking":{"type":"disabled"}"#);
    let named = r#""tool_choice":{"type":"function","function":{"name":"g"}}"#;
    let (required, auto) = (r#""tool_choice":"required""#, r#""tool_choice":"auto""#);
    let block = "\n\n<｜DSML｜ calls>\n";
    let call = |name: &str| format!("<｜DSML｜ invoke name=\"{name}\">\n");
    let cases = [
        (one, auto, on, String::new()),
        (two, required, on, block.to_owned()),
        (two, required, off, String::new()),
        (two, named, on, format!("{block}{}", call("g"))),
        (two, named, off, call("g")),
        (one, required, on, format!("{block}{}", call("f"))),
        (one, required, off, call("f")),
    ];
    let tokenizer = tiny();
    for (tools, choice, thinking, expected) in cases {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"Q"}}],{tools},{choice},{thinking}}}"#);
        let prompt = render(&body);
        let ids = prompt.opening_ids(&tokenizer).expect("format texts can be encoded");
        assert_eq!(tokenizer.decode(&ids, false).expect("ids of the tokenizer"), expected, "{body}");
        assert_eq!(prompt.text().ends_with(block), choice != auto && thinking == off, "{body}");
        let start = match (choice != auto, thinking == off) {
            (true, true) => ParseStart::Calls,
            (_, true) => ParseStart::Content,
            (_, false) => ParseStart::Reasoning,
        };
        assert_eq!(prompt.start, start, "{body}");
    }
}
