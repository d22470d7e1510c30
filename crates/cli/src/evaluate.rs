//! `bench evaluate`: answers prompts that have an expected reply, greedily, and prints how many came out exactly, by
//! task. With `--reps` it answers them again, drafted and undrafted in turn, and prints both speeds; the replies must be
//! equal.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Map, Value as Json, json};
use tf_bench::{Record, Row};
use tf_text::chat::Request;
use tf_text::chat::openai::{Defaults, chat_body};
use tf_text::fields::Fields;
use tf_text::message::Message;

use crate::answer::{Answer, Asker};
use crate::arguments::Arguments;
use crate::bench::{NEVER, record};
use crate::demo;
use crate::failure::Failure;
use crate::load::Checked;

struct Case {
    task: String,
    request: Request,
    expected: Json,
}

pub fn run(arguments: &Arguments, checked: &Checked) -> Result<Record, Failure> {
    let (source, text) = match arguments.text("dataset") {
        Some(file) => (file, crate::output::read("dataset", file)?),
        None => ("the demo checkpoint's eval.jsonl", demo::EVALUATION.to_owned()),
    };
    let cases = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            case(line).map_err(|problem| Failure::run_time(format!("{source}, line {}: {problem}", index + 1)))
        })
        .collect::<Result<Vec<_>, _>>()?;
    if cases.is_empty() {
        return Err(Failure::run_time(format!("{source} holds no prompt")));
    }
    let mut asker = Asker::start(checked, arguments)?;
    let mut tasks: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let mut replies = Vec::new();
    for case in &cases {
        let answer = ask(&asker, case)?;
        let (right, all) = tasks.entry(&case.task).or_default();
        *all += 1;
        match is_expected(&answer.message, &case.expected) {
            true => *right += 1,
            false => eprintln!("{}: expected {}, got {}", case.task, case.expected, shown(&answer.message)),
        }
        replies.push(answer.tokens);
    }
    let right: u32 = tasks.values().map(|(right, _)| right).sum();
    let extra = [("dataset", source.to_owned()), ("prompts", cases.len().to_string())];
    let mut record = record("bench evaluate", checked, &checked.loading.options, &extra);
    for (task, (right, all)) in &tasks {
        let samples = vec![f64::from(*right)];
        record.rows.push(Row { name: (*task).to_owned(), unit: format!("exact of {all}"), samples });
    }
    let unit = format!("exact of {}", cases.len());
    record.rows.push(Row { name: "all tasks".into(), unit, samples: vec![f64::from(right)] });
    pairs(arguments, &mut asker, &cases, &replies, &mut record)?;
    Ok(record)
}

/// Drafted and undrafted in turn, the whole dataset a sample.
fn pairs(
    arguments: &Arguments,
    asker: &mut Asker,
    cases: &[Case],
    replies: &[Vec<u32>],
    record: &mut Record,
) -> Result<(), Failure> {
    let repetitions = arguments.count("reps").unwrap_or(0);
    let mut rows = [(None, "drafted"), (Some(0), "undrafted")].map(|(draft_max, name)| {
        let row = Row { name: format!("whole dataset, {name}"), unit: "tokens/s".into(), samples: Vec::new() };
        (draft_max, row)
    });
    let mut ratio = Row { name: "drafted against undrafted".into(), unit: "times".into(), samples: Vec::new() };
    for _ in 0..repetitions {
        let mut seconds = [0.0; 2];
        for (side, (draft_max, row)) in rows.iter_mut().enumerate() {
            asker.draft_max = *draft_max;
            let started = Instant::now();
            let mut tokens = 0;
            for (case, expected) in cases.iter().zip(replies) {
                let answer = ask(asker, case)?;
                if answer.tokens != *expected {
                    return Err(Failure::run_time(format!(
                        "{}: {} gave another reply than before",
                        case.task, row.name
                    )));
                }
                tokens += answer.tokens.len();
            }
            seconds[side] = started.elapsed().as_secs_f64();
            row.samples.push(tokens as f64 / seconds[side]);
        }
        ratio.samples.push(seconds[1] / seconds[0]);
    }
    if repetitions > 0 {
        record.rows.extend(rows.map(|(_, row)| row));
        record.rows.push(ratio);
    }
    Ok(())
}

fn ask(asker: &Asker, case: &Case) -> Result<Answer, Failure> {
    asker
        .ask(&case.request, &NEVER, &mut |_| Ok(()))
        .map_err(|failure| Failure { text: format!("{}: {}", case.task, failure.text), ..failure })
}

/// A dataset line as the chat route would read it.
fn case(line: &str) -> Result<Case, String> {
    let line: Json = serde_json::from_str(line).map_err(|error| tf_text::json::reason(&error))?;
    let task = line["task"].as_str().ok_or("no task")?.to_owned();
    let mut body = Map::new();
    body.insert("messages".into(), line["messages"].clone());
    if line["tools"].as_array().is_some_and(|tools| !tools.is_empty()) {
        body.insert("tools".into(), line["tools"].clone());
    }
    if !line["response_format"].is_null() {
        let schema = json!({"name": "answer", "schema": line["response_format"]});
        body.insert("response_format".into(), json!({"type": "json_schema", "json_schema": schema}));
    }
    let kind = if line["thinking"] == json!(true) { "enabled" } else { "disabled" };
    body.insert("thinking".into(), json!({"type": kind}));
    if kind == "enabled" && !line["effort"].is_null() {
        body.insert("reasoning_effort".into(), line["effort"].clone());
    }
    let text = Json::Object(body).to_string();
    let value = tf_text::json::Value::parse(&text).map_err(|error| error.to_string())?;
    let fields = Fields::of_body(&value).map_err(|error| error.to_string())?;
    let body = chat_body(&fields, Defaults::default()).map_err(|error| error.to_string())?;
    Ok(Case { task, request: body.request, expected: line["expected"].clone() })
}

fn shown(message: &Message) -> Json {
    let calls: Vec<Json> = message
        .tool_calls
        .iter()
        .map(|call| {
            // Arguments that are no JSON stay text and are equal to nothing that is expected.
            let arguments =
                serde_json::from_str(&call.arguments).unwrap_or_else(|_| Json::from(call.arguments.clone()));
            json!({"name": call.name, "arguments": arguments})
        })
        .collect();
    json!({
        "reasoning": message.reasoning.clone().unwrap_or_default(),
        "content": message.content.clone().unwrap_or_default(),
        "tool_calls": calls,
    })
}

fn is_expected(message: &Message, expected: &Json) -> bool {
    let found = shown(message);
    let calls = |calls: &Json| -> Vec<(String, Json)> {
        let one = |call: &Json| {
            let call = if call["function"].is_object() { &call["function"] } else { call };
            let arguments = match &call["arguments"] {
                Json::String(text) => serde_json::from_str(text).unwrap_or_else(|_| Json::from(text.clone())),
                other => other.clone(),
            };
            (call["name"].as_str().unwrap_or_default().to_owned(), arguments)
        };
        calls.as_array().map(|calls| calls.iter().map(one).collect()).unwrap_or_default()
    };
    found["reasoning"] == expected["reasoning"]
        && found["content"] == expected["content"]
        && calls(&found["tool_calls"]) == calls(&expected["tool_calls"])
}
