//! `render`: a request body in, the exact prompt out; with `--parse` a raw reply in, the message out. Reads the
//! tokenizer and small files only, never a weight.
//!
//! Both directions are the server's own code, so what is printed for a body is what the server feeds to the model.

use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};
use tf_server::SamplingDefaults;
use tf_server::openai::sampling::{self, Rules};
use tf_text::TokenId;
use tf_text::chat::openai::{ChatBody, Defaults, chat_body};
use tf_text::chat::{self, Marker, ParseStart, Prompt, Thinking};
use tf_text::fields::{BodyError, Code, Fields};
use tf_text::json::Value as Json;
use tf_text::message::Message;
use tf_text::reply::{Delta, End, Finish, ReplyOptions, ReplyStream};
use tf_text::tokenizer::Tokenizer;

use crate::arguments::{Arguments, Mistakes};
use crate::demo;
use crate::failure::{Failure, print};
use crate::locate::{Located, locate};
use crate::options::Environment;
use crate::resolve;

const CHOICES_MAX: u32 = 16;

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    let (located, file) = source(arguments, environment)?;
    let small_files = located.small_files().map_err(|error| Failure::run_time(error.to_string()))?;
    let bytes = small_files.required_file("tokenizer.json").map_err(|error| Failure::run_time(error.to_string()))?;
    let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| Failure::run_time(error.to_string()))?;
    let input = read(file.as_deref())?;
    if arguments.is_on("parse") {
        let end = if arguments.text("finish") == Some("length") { End::Length } else { End::Stop };
        let start = if resolve::chat(arguments).thinking { ParseStart::Reasoning } else { ParseStart::Content };
        let pieces = arguments.count("stream").map(|count| count as usize);
        return Ok(print(&parse(&tokenizer, &input, start, end, pieces)?)?);
    }
    let misused: Vec<String> = ["finish", "stream"]
        .into_iter()
        .filter(|flag| arguments.is_given(flag))
        .map(|flag| format!("--{flag} belongs to --parse: add it, or leave --{flag} out"))
        .collect();
    if !misused.is_empty() {
        return Err(Mistakes(misused).into());
    }
    let generation = small_files.generation_config().map_err(|error| Failure::run_time(error.to_string()))?;
    let sampling = resolve::checkpoint_sampling(&generation);
    let rendered = Rendered::of(&input, &tokenizer, resolve::chat(arguments), sampling)
        .map_err(|error| Failure::run_time(describe(&error)))?;
    if !rendered.prompt.images.is_empty() {
        eprintln!("note: an image is shown as its marker; the server refuses images so far");
    }
    let text =
        if arguments.is_on("json") { format!("{:#}\n", rendered.to_json(&tokenizer)?) } else { rendered.prompt.text() };
    Ok(print(&text)?)
}

/// The model, and the file to read; `None` is stdin. One word alone is a file where there is one of that name.
fn source(arguments: &Arguments, environment: &Environment) -> Result<(Located, Option<String>), Failure> {
    let mut words = arguments.positionals.clone();
    let mut model = None;
    let is_input = |word: &String| word == "-" || Path::new(word).is_file();
    if words.len() > 1 || words.first().is_some_and(|word| !is_input(word)) {
        model = Some(words.remove(0));
    }
    let name = model.as_deref().or(arguments.text("model")).unwrap_or(demo::NAME);
    let located = locate(name, arguments.text("revision").unwrap_or("main"), environment)?;
    Ok((located, words.pop().filter(|word| word != "-")))
}

fn read(file: Option<&str>) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let name = file.unwrap_or("stdin");
    match file {
        Some(path) => {
            bytes = std::fs::read(path).map_err(|error| {
                Mistakes(vec![format!("{path} can't be read: {error}. Give a file, or - for stdin")])
            })?;
        }
        None => {
            std::io::stdin()
                .read_to_end(&mut bytes)
                .map_err(|error| Failure::run_time(format!("stdin can't be read: {error}")))?;
        }
    }
    String::from_utf8(bytes).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        Failure::run_time(format!("{name} is not UTF-8 from byte {place} on: save it as UTF-8"))
    })
}

fn describe(error: &BodyError) -> String {
    format!("{} ({})", error.message, error.code.as_str())
}

/// A body that became a prompt.
#[derive(Debug)]
struct Rendered {
    body: ChatBody,
    prompt: Prompt,
    generation: sampling::Generation,
}

impl Rendered {
    fn of(
        input: &str,
        tokenizer: &Tokenizer,
        chat: Defaults,
        sampling: SamplingDefaults,
    ) -> Result<Rendered, BodyError> {
        let body = Json::parse(input)?;
        let fields = Fields::of_body(&body)?;
        refuse_other_routes(&fields)?;
        let vocab_size = tokenizer.vocab_size() as u32;
        let generation =
            sampling::generation(&fields, &Rules { defaults: sampling, choices_max: CHOICES_MAX, vocab_size })?;
        let body = chat_body(&fields, Defaults { images: true, ..chat })?;
        let prompt = chat::encode(&body.request).map_err(|error| BodyError {
            code: Code::InvalidValue,
            param: None,
            message: error.to_string(),
        })?;
        Ok(Rendered { body, prompt, generation })
    }

    fn to_json(&self, tokenizer: &Tokenizer) -> Result<Value, Failure> {
        let ids = self.prompt.token_ids(tokenizer).map_err(|error| Failure::run_time(error.to_string()))?;
        let effort = match self.body.request.thinking {
            Thinking::Off => None,
            Thinking::On(effort) => Some(effort),
        };
        let mut stop_ids = vec![tokenizer.markers().id(Marker::EndOfSentence)];
        if self.generation.ignore_eos {
            stop_ids.clear();
        }
        for id in &self.generation.stop_ids {
            if !stop_ids.contains(id) {
                stop_ids.push(*id);
            }
        }
        let sampling = &self.generation.sampling;
        Ok(json!({
            "prompt": self.prompt.text(),
            "special_ranges": self.prompt.special_ranges(),
            "token_ids": ids,
            "images": self.prompt.images.len(),
            "thinking": effort.is_some(),
            "reasoning_effort": effort.map(|effort| effort.name()),
            "reasoning_effort_value": effort.map(|effort| effort.value()),
            "sampling": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "frequency_penalty": sampling.frequency_penalty,
                "presence_penalty": sampling.presence_penalty,
                "repetition_penalty": sampling.repetition_penalty,
                "seed": self.generation.seed.map(|seed| seed.to_string()),
            },
            "max_tokens": self.generation.max_tokens,
            "stop": self.generation.stops,
            "stop_token_ids": stop_ids,
        }))
    }
}

/// Bodies of routes that aren't built yet are told apart from a chat body that is wrong.
fn refuse_other_routes(body: &Fields<'_>) -> Result<(), BodyError> {
    let refuse = |param: &str, kind: &str| {
        let message = format!("this is a {kind} body ({param}): only chat-completions bodies are rendered so far");
        Err(BodyError { code: Code::UnsupportedParameter, param: Some(param.to_owned()), message })
    };
    if body.get("messages").is_none() && body.get("input").is_some() {
        return refuse("input", "Responses");
    }
    for key in ["system", "stop_sequences", "anthropic_version", "output_format", "context_management"] {
        if body.get(key).is_some() {
            return refuse(key, "Messages");
        }
    }
    let tools = body.get("tools").and_then(|field| field.array().ok()).unwrap_or_default();
    let has_input_schema =
        tools.iter().any(|tool| tool.object().is_ok_and(|fields| fields.get("input_schema").is_some()));
    if has_input_schema { refuse("tools[].input_schema", "Messages") } else { Ok(()) }
}

/// What a reply is given as.
enum Reply {
    Text(String),
    Ids(Vec<TokenId>),
}

impl Reply {
    /// A JSON list of numbers is ids, anything else is text.
    fn of(input: &str, tokenizer: &Tokenizer) -> Result<Reply, Failure> {
        let Ok(ids) = serde_json::from_str::<Vec<u64>>(input) else { return Ok(Reply::Text(input.to_owned())) };
        let size = tokenizer.vocab_size() as u64;
        if let Some(id) = ids.iter().find(|id| **id >= size) {
            return Err(Failure::run_time(format!("token id {id} is outside the vocabulary of {size} ids")));
        }
        Ok(Reply::Ids(ids.into_iter().map(|id| id as TokenId).collect()))
    }
}

/// The message of a raw reply, or with `pieces` its deltas when so many characters, or ids, arrive at a time.
fn parse(
    tokenizer: &Tokenizer,
    input: &str,
    start: ParseStart,
    end: End,
    pieces: Option<usize>,
) -> Result<String, Failure> {
    let mut stream = ReplyStream::new(ReplyOptions::new(start));
    let mut deltas = Vec::new();
    let mut lines = String::new();
    let mut arrive = |arrived: Vec<Delta>| {
        for delta in &arrived {
            lines += &format!("{}\n", delta_json(delta));
        }
        deltas.extend(arrived);
    };
    match Reply::of(input, tokenizer)? {
        Reply::Text(text) => {
            let characters: Vec<char> = text.chars().collect();
            for piece in characters.chunks(pieces.unwrap_or(characters.len()).max(1)) {
                arrive(stream.push_text(&piece.iter().collect::<String>()));
            }
        }
        Reply::Ids(ids) => {
            for piece in ids.chunks(pieces.unwrap_or(ids.len()).max(1)) {
                arrive(piece.iter().flat_map(|id| stream.push_token(tokenizer, *id)).collect());
            }
        }
    }
    let (rest, finish) = stream.finish(end);
    arrive(rest);
    Ok(match pieces {
        Some(_) => format!("{lines}{}\n", Value::Object(finish_json(&finish))),
        None => {
            let mut message = Message::fold(&deltas).to_json();
            message.extend(finish_json(&finish));
            format!("{:#}\n", Value::Object(message))
        }
    })
}

fn finish_json(finish: &Finish) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("finish_reason".into(), finish.reason.as_str().into());
    if finish.incomplete_call {
        fields.insert("incomplete_call".into(), true.into());
    }
    if finish.malformed_markup > 0 {
        fields.insert("malformed_markup".into(), finish.malformed_markup.into());
    }
    fields
}

/// As a chat chunk's `delta`.
fn delta_json(delta: &Delta) -> Value {
    match delta {
        Delta::Reasoning { text, .. } => json!({"reasoning_content": text}),
        Delta::Content { text, .. } => json!({"content": text}),
        Delta::CallStart { index, id, name } => json!({"tool_calls": [
            {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        ]}),
        Delta::CallArguments { index, text } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: SamplingDefaults = SamplingDefaults { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0 };

    fn tokenizer() -> Tokenizer {
        let (_, bytes) = demo::FILES.iter().find(|(name, _)| *name == "tokenizer.json").expect("built in");
        Tokenizer::from_bytes(bytes).expect("loads")
    }

    fn render(input: &str) -> Result<Value, String> {
        let tokenizer = tokenizer();
        let rendered =
            Rendered::of(input, &tokenizer, Defaults::default(), GREEDY).map_err(|error| describe(&error))?;
        rendered.to_json(&tokenizer).map_err(|failure| failure.text)
    }

    #[test]
    fn a_body_becomes_its_prompt_with_everything_that_decides_the_reply() {
        let body = r#"{"messages":[{"role":"user","content":"<think> é"}],"reasoning_effort":"low","temperature":0.5,
                       "seed":18446744073709551615,"stop":"END","stop_token_ids":[7,1]}"#;
        let found = render(body).expect("valid");
        let prompt = found["prompt"].as_str().expect("text");
        assert!(prompt.ends_with("<｜User｜><think> é<｜Assistant｜><think>"), "{prompt}");
        let characters: Vec<char> = prompt.chars().collect();
        let ranges: Vec<(usize, usize)> = serde_json::from_value(found["special_ranges"].clone()).expect("pairs");
        let markers: Vec<String> = ranges.iter().map(|&(from, to)| characters[from..to].iter().collect()).collect();
        assert_eq!(markers, ["<｜begin▁of▁sentence｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>"]);
        let ids: Vec<TokenId> = serde_json::from_value(found["token_ids"].clone()).expect("ids");
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.decode(&ids, false).expect("known"), prompt);
        assert_eq!(ids.iter().filter(|id| tokenizer.is_added(**id)).count(), markers.len());
        for (field, expected) in [
            ("thinking", json!(true)),
            ("reasoning_effort", json!("low")),
            ("reasoning_effort_value", json!(50)),
            ("images", json!(0)),
            ("stop", json!(["END"])),
            ("stop_token_ids", json!([1, 7])),
        ] {
            assert_eq!(found[field], expected, "{field}");
        }
        assert_eq!(found["sampling"]["temperature"], json!(0.5));
        assert_eq!(found["sampling"]["seed"], json!("18446744073709551615"));
    }

    #[test]
    fn a_body_that_cannot_be_rendered_is_refused_by_name() {
        for (body, part) in [
            ("{", "not valid JSON"),
            (r#"{"input":"Hi"}"#, "this is a Responses body"),
            (r#"{"max_tokens":5,"system":"S","messages":[]}"#, "this is a Messages body (system)"),
            (
                r#"{"messages":[],"tools":[{"name":"f","input_schema":{}}]}"#,
                "this is a Messages body (tools[].input_schema)",
            ),
            (r#"{"messages":[{"role":"user","content":"Q"}],"temperature":"hot"}"#, "temperature must be a number"),
            (r#"{"messages":[{"role":"user"}]}"#, "messages[0].content is required (missing_field)"),
        ] {
            let error = render(body).expect_err(body);
            assert!(error.contains(part), "{body}: {error}");
        }
    }

    const CALL: &str = "I see.</think>Now.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n\
                        <｜DSML｜ parameter name=\"n\" string=\"false\">5</｜DSML｜ parameter>\n\
                        </｜DSML｜ invoke>\n</｜DSML｜ calls>";

    fn parsed(input: &str, start: ParseStart, end: End) -> Value {
        let text = parse(&tokenizer(), input, start, end, None).expect("parses");
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn a_raw_reply_becomes_its_message() {
        let found = parsed(CALL, ParseStart::Reasoning, End::Stop);
        assert_eq!(found["reasoning_content"], json!("I see."));
        assert_eq!(found["content"], json!("Now."));
        assert_eq!(found["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"n\": 5}"}));
        assert_eq!(found["finish_reason"], json!("tool_calls"));

        let cut = parsed(&CALL[..CALL.find("5</").expect("a value")], ParseStart::Reasoning, End::Length);
        assert_eq!((&cut["finish_reason"], &cut["incomplete_call"]), (&json!("length"), &json!(true)));
        let open = parsed("still", ParseStart::Reasoning, End::Length);
        assert_eq!(open, json!({"content": "", "reasoning_content": "still", "finish_reason": "length"}));
        let plain = parsed("Hi\n", ParseStart::Content, End::Stop);
        assert_eq!(plain, json!({"content": "Hi\n", "finish_reason": "stop"}));
    }

    #[test]
    fn ids_and_pieces_of_any_size_give_the_same_message() {
        let tokenizer = tokenizer();
        let ids = serde_json::to_string(&tokenizer.encode_with_markers(CALL).expect("encodes")).expect("JSON");
        let whole = parsed(CALL, ParseStart::Reasoning, End::Stop);
        assert_eq!(parsed(&ids, ParseStart::Reasoning, End::Stop), whole);
        for (input, size) in [(CALL, 1), (CALL, 3), (CALL, 1000), (ids.as_str(), 1), (ids.as_str(), 4)] {
            let lines = parse(&tokenizer, input, ParseStart::Reasoning, End::Stop, Some(size)).expect("parses");
            let mut texts = (String::new(), String::new(), String::new());
            let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
            for line in &lines {
                texts.0 += line["reasoning_content"].as_str().unwrap_or_default();
                texts.1 += line["content"].as_str().unwrap_or_default();
                texts.2 += line["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default();
            }
            assert_eq!(texts, ("I see.".into(), "Now.".into(), "{\"n\": 5}".into()), "{size}");
            assert_eq!(lines.last(), Some(&json!({"finish_reason": "tool_calls"})));
        }
        assert!(parse(&tokenizer, "[4096]", ParseStart::Content, End::Stop, None).is_err());
    }
}
