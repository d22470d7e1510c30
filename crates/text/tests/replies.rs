//! A reply means the same however it arrives.

use std::sync::LazyLock;

use serde_json::{Value, json};
use tf_text::TokenId;
use tf_text::chat::{Marker, ParseStart};
use tf_text::message::Message;
use tf_text::reply::{CallIds, Delta, End, Finish, FinishReason, ReplyOptions, ReplyStream};
use tf_text::tokenizer::Tokenizer;

const OUTPUTS: &str = include_str!("golden/chat-encoding/outputs.json");
const TINY_TOKENIZER: &[u8] = include_bytes!("../../model/tests/golden/dsv41-tiny-a/model/tokenizer.json");
const DEMO_TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-dsv41/tokenizer.json");

static TINY: LazyLock<Loaded> = LazyLock::new(|| Loaded::new(TINY_TOKENIZER));
static DEMO: LazyLock<Loaded> = LazyLock::new(|| Loaded::new(DEMO_TOKENIZER));

struct Loaded {
    tokenizer: Tokenizer,
    /// The token of each single byte.
    bytes: Vec<TokenId>,
}

impl Loaded {
    fn new(json: &[u8]) -> Loaded {
        let tokenizer = Tokenizer::from_bytes(json).expect("the tokenizer loads");
        let ids = 0..tokenizer.vocab_size() as TokenId;
        let find = |byte: u8| {
            let mut ids = ids.clone();
            let id = ids.find(|id| !tokenizer.is_added(*id) && tokenizer.token_bytes(*id) == Some(&[byte]));
            id.expect("every byte has a token")
        };
        Loaded { bytes: (0..=255).map(find).collect(), tokenizer }
    }

    fn encode(&self, text: &str) -> Vec<TokenId> {
        self.tokenizer.encode_with_markers(text).expect("encodes")
    }

    /// One byte a token, markers by id.
    fn encode_bytes(&self, text: &str) -> Vec<TokenId> {
        let mut bytes = Vec::new();
        for id in self.encode(text) {
            if self.tokenizer.is_added(id) {
                bytes.push(id);
            } else {
                let text = self.tokenizer.token_bytes(id).expect("known");
                bytes.extend(text.iter().map(|byte| self.bytes[usize::from(*byte)]));
            }
        }
        bytes
    }
}

/// `D` stands for the marker.
fn dsml(text: &str) -> String {
    text.replace("<D ", "<｜DSML｜ ").replace("</D ", "</｜DSML｜ ")
}

fn call() -> String {
    dsml(
        "<D calls>\n<D invoke name=\"w\">\n<D parameter name=\"location\" string=\"true\">Paris</D parameter>\n</D invoke>\n</D calls>",
    )
}

#[derive(Clone, Debug, PartialEq)]
struct Reply {
    reasoning: Option<String>,
    content: Option<String>,
    calls: Vec<(String, String)>,
    reason: FinishReason,
    stop: Option<String>,
    incomplete: bool,
    malformed: u32,
}

fn reply(deltas: &[Delta], finish: Finish) -> Reply {
    let message = Message::fold(deltas);
    Reply {
        reasoning: message.reasoning,
        content: message.content,
        calls: message.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect(),
        reason: finish.reason,
        stop: finish.stop,
        incomplete: finish.incomplete_call,
        malformed: finish.malformed_markup,
    }
}

fn parse<'a>(options: &ReplyOptions, pieces: impl IntoIterator<Item = &'a str>, end: End) -> Reply {
    let mut stream = ReplyStream::new(options.clone());
    let mut deltas = Vec::new();
    for piece in pieces {
        deltas.extend(stream.push_text(piece));
    }
    let (rest, finish) = stream.finish(end);
    deltas.extend(rest);
    reply(&deltas, finish)
}

fn parse_tokens(options: &ReplyOptions, tokenizer: &Tokenizer, ids: &[TokenId], end: End) -> Reply {
    let mut stream = ReplyStream::new(options.clone());
    let mut deltas = Vec::new();
    for &id in ids {
        deltas.extend(stream.push_token(tokenizer, id));
    }
    let (rest, finish) = stream.finish(end);
    deltas.extend(rest);
    reply(&deltas, finish)
}

/// Parses the text whole, at every split, in equal pieces, and as tokens; all must agree.
fn check(options: &ReplyOptions, text: &str, end: End) -> Reply {
    let whole = parse(options, [text], end);
    let borders: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
    for &at in &borders {
        assert_eq!(parse(options, [&text[..at], &text[at..]], end), whole, "{text:?} split at {at}");
    }
    for size in 1..=7 {
        let starts: Vec<usize> = borders.iter().copied().step_by(size).chain([text.len()]).collect();
        let pieces = starts.windows(2).map(|range| &text[range[0]..range[1]]);
        assert_eq!(parse(options, pieces, end), whole, "{text:?} in pieces of {size}");
    }
    for loaded in [&*TINY, &*DEMO] {
        for ids in [loaded.encode(text), loaded.encode_bytes(text)] {
            assert_eq!(parse_tokens(options, &loaded.tokenizer, &ids, end), whole, "{text:?} as tokens {ids:?}");
        }
    }
    whole
}

fn chat() -> ReplyOptions {
    ReplyOptions::new(ParseStart::Content)
}

fn thinking() -> ReplyOptions {
    ReplyOptions::new(ParseStart::Reasoning)
}

#[test]
fn every_golden_output_gives_its_message_at_every_split() {
    let goldens: Vec<Value> = serde_json::from_str(OUTPUTS).expect("golden file");
    assert_eq!(goldens.len(), 10);
    for golden in &goldens {
        let options = if golden["thinking"] == true { thinking() } else { chat() };
        let end = if golden["backend_finish"] == "length" { End::Length } else { End::Stop };
        let found = check(&options, golden["text"].as_str().expect("text"), end);
        let message = &golden["message"];
        let name = &golden["name"];
        assert_eq!(found.reasoning.as_deref(), message["reasoning_content"].as_str(), "{name}");
        // The release writes "" next to calls; here content is null when there are only calls.
        assert_eq!(found.content.unwrap_or_default(), message["content"].as_str().unwrap_or_default(), "{name}");
        let calls: Vec<(String, String)> = message["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|call| {
                let text = |key: &str| call["function"][key].as_str().unwrap_or_default().to_owned();
                (text("name"), text("arguments"))
            })
            .collect();
        assert_eq!(found.calls, calls, "{name}");
        assert_eq!(found.reason.as_str(), golden["finish_reason"].as_str().expect("text"), "{name}");
        assert_eq!((found.incomplete, found.malformed), (false, 0), "{name}");
    }
}

struct Expected<'a> {
    reasoning: &'a str,
    content: &'a str,
    arguments: &'a [&'a str],
    reason: FinishReason,
    incomplete: bool,
    malformed: bool,
}

const TEXT: Expected<'static> = Expected {
    reasoning: "",
    content: "",
    arguments: &[],
    reason: FinishReason::Stop,
    incomplete: false,
    malformed: false,
};

fn assert_reply(name: &str, found: &Reply, expected: &Expected<'_>) {
    assert_eq!(found.reasoning.as_deref().unwrap_or_default(), expected.reasoning, "{name}: reasoning");
    assert_eq!(found.content.as_deref().unwrap_or_default(), expected.content, "{name}: content");
    let arguments: Vec<&str> = found.calls.iter().map(|(_, arguments)| arguments.as_str()).collect();
    assert_eq!(arguments, expected.arguments, "{name}: arguments");
    assert_eq!(found.reason, expected.reason, "{name}: reason");
    assert_eq!(found.incomplete, expected.incomplete, "{name}: incomplete");
    assert_eq!(found.malformed > 0, expected.malformed, "{name}: malformed");
}

#[test]
fn newlines_of_the_format_are_not_part_of_the_message() {
    let call = call();
    let paris = &[r#"{"location": "Paris"}"#][..];
    let called = Expected { arguments: paris, reason: FinishReason::ToolCalls, ..TEXT };
    let cases: Vec<(&str, ReplyOptions, String, Expected<'_>)> = vec![
        ("fresh content", chat(), "\n\nHi\n\n".into(), Expected { content: "Hi\n\n", ..TEXT }),
        (
            "continued content",
            ReplyOptions::new(ParseStart::ContentContinued),
            "\nHi".into(),
            Expected { content: "\nHi", ..TEXT },
        ),
        (
            "continued reasoning",
            ReplyOptions::new(ParseStart::ReasoningContinued),
            "\nmore</think>\n\nHi".into(),
            Expected { reasoning: "\nmore", content: "Hi", ..TEXT },
        ),
        (
            "end of reasoning",
            thinking(),
            "a\n\nb\n\n</think>c".into(),
            Expected { reasoning: "a\n\nb", content: "c", ..TEXT },
        ),
        ("only newlines", thinking(), "\n\n</think>c".into(), Expected { content: "c", ..TEXT }),
        ("after a stray mark", chat(), "</think>\n\nHi".into(), Expected { content: "\n\nHi", ..TEXT }),
        (
            "spaces stay",
            thinking(),
            " \n a</think> \n b".into(),
            Expected { reasoning: " \n a", content: " \n b", ..TEXT },
        ),
        ("one before a call", chat(), format!("Hi\n{call}"), Expected { content: "Hi", ..called }),
        ("four before a call", chat(), format!("Hi\n\n\n\n{call}"), Expected { content: "Hi", ..called }),
        ("none before a call", chat(), format!("Hi{call}"), Expected { content: "Hi", ..called }),
        (
            "a call in the reasoning",
            thinking(),
            format!("hm\n\n{call}</think>x"),
            Expected { reasoning: "hm", ..called },
        ),
        ("text after a call", chat(), format!("{call}\nbye {call}"), Expected { ..called }),
        ("no newlines at all", chat(), call.replace('\n', ""), Expected { ..called }),
        (
            "a block that the prompt opened",
            ReplyOptions::new(ParseStart::Calls),
            call[call.find("calls>\n").expect("opens") + 7..].into(),
            Expected { ..called },
        ),
        ("an empty block", chat(), dsml("<D calls>\n</D calls>"), Expected { ..TEXT }),
    ];
    for (name, options, text, expected) in cases {
        assert_reply(name, &check(&options, &text, End::Stop), &expected);
    }
}

#[test]
fn dsml_look_alikes_in_prose_stay_text() {
    for call in [
        call().replace('｜', "|"),
        call().replace("｜DSML｜", "｜｜DSML｜｜"),
        call().replace("<｜DSML｜ calls>", "<｜DSML｜tool_calls>").replace("｜ ", "｜"),
        "the word ｜DSML｜ and </｜DSML｜ other> and a < b </ c <think> d".into(),
        "<｜DSML is no marker, nor is ｜DSML".into(),
    ] {
        for text in [call.clone(), format!("So I write\n\n{call} and go on.\n")] {
            let found = check(&chat(), &text, End::Stop);
            assert_reply(&text, &found, &Expected { content: &text, ..TEXT });
        }
    }
    let found = check(&thinking(), "a</think>b <think>c</think> d", End::Stop);
    assert_eq!((found.content.as_deref(), found.malformed), (Some("b <think>c d"), 0));
}

#[test]
fn malformed_dsml_never_shows_its_markers() {
    let whole = call();
    let paris = [r#"{"location": "Paris"}"#];
    let both = [paris[0], "{}"];
    let called = Expected { arguments: &paris, reason: FinishReason::ToolCalls, malformed: true, ..TEXT };
    let cases: Vec<(&str, String, Expected<'_>)> = vec![
        (
            "missing outer wrapper",
            format!("Hi\n\n{}", whole.replace(&dsml("<D calls>\n"), "").replace(&dsml("\n</D calls>"), "")),
            Expected { content: "Hi", ..called },
        ),
        ("missing string attribute", whole.replace(" string=\"true\"", ""), Expected { ..called }),
        ("unknown string attribute", whole.replace("\"true\"", "\"maybe\""), Expected { ..called }),
        (
            "missing end of a parameter",
            whole.replace(&dsml("</D parameter>"), ""),
            Expected { arguments: &[r#"{"location": "Paris\n"}"#], ..called },
        ),
        ("missing end of a call", whole.replace(&dsml("</D invoke>\n"), ""), Expected { ..called }),
        (
            "a call inside a call",
            whole.replace(&dsml("</D invoke>"), &dsml("<D invoke name=\"z\">\n</D invoke>")),
            Expected { arguments: &both, ..called },
        ),
        ("text between the tags", whole.replace("\n<", "\n junk <"), Expected { ..called }),
        ("an unknown tag inside", whole.replace("calls>\n<", &dsml("calls>\n<D foo>x<")), Expected { ..called }),
        ("an unknown tag ends the text", dsml("Hi <D foo> bar"), Expected { content: "Hi ", malformed: true, ..TEXT }),
        (
            "a call after an unknown tag",
            format!("{}{whole}", dsml("Hi\n<D foo> bar ")),
            Expected { content: "Hi", ..called },
        ),
        (
            "a parameter alone",
            dsml("x <D parameter name=\"a\" string=\"true\">v</D parameter> y"),
            Expected { content: "x ", malformed: true, ..TEXT },
        ),
        ("an end alone", dsml("Hi</D invoke>, you"), Expected { content: "Hi, you", malformed: true, ..TEXT }),
        (
            "a marker without its bracket",
            "Hi｜DSML｜ calls>, you".into(),
            Expected { content: "Hi, you", malformed: true, ..TEXT },
        ),
        ("a word where JSON was promised", whole.replace("\"true\"", "\"false\""), Expected { ..called }),
        (
            "nothing where JSON was promised",
            whole.replace("\"true\"", "\"false\"").replace("Paris", ""),
            Expected { arguments: &[r#"{"location": ""}"#], ..called },
        ),
        (
            "a broken list where JSON was promised",
            whole.replace("\"true\"", "\"false\"").replace("Paris", "[1,"),
            Expected { arguments: &[r#"{"location": [1,}"#], ..called },
        ),
        ("a tag that never ends", whole.replace("\"w\">", "\"w"), Expected { ..TEXT }),
    ];
    for (name, text, expected) in cases {
        let found = check(&chat(), &text, End::Stop);
        if name == "a tag that never ends" {
            assert!(found.malformed > 0);
            assert!(!found.content.unwrap_or_default().contains("DSML"), "{name}");
            continue;
        }
        assert_reply(name, &found, &expected);
    }
}

#[test]
fn values_are_read_as_they_are_written() {
    let cases = [
        ("true", "a <｜DSML｜ foo> <think></think> b", r#""a <｜DSML｜ foo> <think></think> b""#),
        ("true", "\u{1}\u{7f}\u{2028}/\\\"\t\u{8}\r\n", "\"\\u0001\u{7f}\u{2028}/\\\\\\\"\\t\\b\\r\\n\""),
        ("true", "</b> é < </ ", r#""</b> é < </ ""#),
        ("true", "", r#""""#),
        ("false", "1.50", "1.50"),
        ("false", " [1,2]\n", " [1,2]\n"),
        ("false", r#"{"k": "v", "w": [1, null]}"#, r#"{"k": "v", "w": [1, null]}"#),
        ("false", "true", "true"),
        ("false", "\"text\"", "\"text\""),
        ("false", "-1e5 ", "-1e5 "),
    ];
    for (is_string, value, expected) in cases {
        let text = call().replace("\"true\"", &format!("\"{is_string}\"")).replace("Paris", value);
        let found = check(&chat(), &text, End::Stop);
        assert_eq!(found.calls, [("w".into(), format!("{{\"location\": {expected}}}"))], "{value:?}");
        assert_eq!((found.reason, found.malformed), (FinishReason::ToolCalls, 0), "{value:?}");
    }
    let twice = call().replace(
        &dsml("</D invoke>"),
        &dsml("<D parameter name=\"location\" string=\"true\">X</D parameter>\n</D invoke>"),
    );
    assert_eq!(check(&chat(), &twice, End::Stop).calls[0].1, r#"{"location": "Paris", "location": "X"}"#);
    let quoted = call().replace("\"location\"", "\"lo\"c\"");
    assert_eq!(check(&chat(), &quoted, End::Stop).calls[0].1, r#"{"lo\"c": "Paris"}"#);
}

#[test]
fn a_cut_reply_keeps_what_it_has_and_says_so() {
    let text = format!("Hi\n\n{}", call());
    let cases: [(&str, &str, &[&str], bool); 19] = [
        ("Hi\n\n", "Hi\n\n", &[], false),
        ("Hi\n\n<", "Hi\n\n<", &[], false),
        ("Hi\n\n<｜DSML", "Hi\n\n<｜DSML", &[], false),
        ("Hi\n\n<｜DSML｜", "Hi", &[], true),
        ("<｜DSML｜ ca", "Hi", &[], true),
        ("calls>\n", "Hi", &[], false),
        ("invoke name=\"", "Hi", &[], true),
        ("name=\"w", "Hi", &[], true),
        ("name=\"w\"", "Hi", &[""], true),
        ("\"w\">", "Hi", &[""], true),
        ("\"w\">\n<｜DSML｜ par", "Hi", &[""], true),
        ("name=\"loc", "Hi", &["{\"loc"], true),
        ("name=\"location\" str", "Hi", &["{\"location\": "], true),
        ("string=\"true\">", "Hi", &["{\"location\": \""], true),
        ("Par", "Hi", &["{\"location\": \"Par"], true),
        ("Paris</", "Hi", &["{\"location\": \"Paris</"], true),
        ("Paris</｜DSML｜", "Hi", &["{\"location\": \"Paris\""], true),
        ("</｜DSML｜ parameter>\n", "Hi", &["{\"location\": \"Paris\""], true),
        ("</｜DSML｜ invoke>", "Hi", &["{\"location\": \"Paris\"}"], false),
    ];
    for (last, content, arguments, incomplete) in cases {
        let cut = &text[..text.find(last).expect("occurs") + last.len()];
        for end in [End::Length, End::Stop] {
            let found = check(&chat(), cut, end);
            assert_eq!(found.content.as_deref().unwrap_or_default(), content, "{cut:?}");
            let found_arguments: Vec<&str> = found.calls.iter().map(|(_, arguments)| arguments.as_str()).collect();
            assert_eq!(found_arguments, arguments, "{cut:?}");
            assert_eq!(found.incomplete, incomplete, "{cut:?}");
            let reason = match (end, arguments, incomplete) {
                (_, [_], false) => FinishReason::ToolCalls,
                (End::Length, ..) => FinishReason::Length,
                (End::Stop, ..) => FinishReason::Stop,
            };
            assert_eq!(found.reason, reason, "{cut:?}");
        }
    }
    let number = call().replace("\"true\"", "\"false\"").replace("Paris", "1234");
    let cut = &number[..number.find("34<").expect("occurs")];
    assert_eq!(check(&chat(), cut, End::Length).calls[0].1, "{\"location\": 12");
    // Every prefix is a reply; none may panic or show a marker.
    for at in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
        let found = parse(&chat(), [&text[..at]], End::Length);
        assert!(!found.content.unwrap_or_default().contains("｜DSML｜"), "{at}");
    }
}

#[test]
fn reasoning_that_never_ends_is_reasoning() {
    for (end, reason) in [(End::Length, FinishReason::Length), (End::Stop, FinishReason::Stop)] {
        let found = check(&thinking(), "still thinking\n", end);
        assert_reply("open", &found, &Expected { reasoning: "still thinking\n", reason, ..TEXT });
        assert_eq!(found.content.as_deref(), Some(""), "content is empty, not null");
    }
    let lost = check(&thinking(), &dsml("a <D foo> b</think>\n\nc"), End::Stop);
    assert_reply(
        "the answer survives an unknown tag",
        &lost,
        &Expected { reasoning: "a ", content: "c", malformed: true, ..TEXT },
    );
}

#[test]
fn stop_strings_end_each_part_on_its_own() {
    let call = call();
    type Case<'a> = (&'a str, ReplyOptions, String, &'a [&'a str], Expected<'a>, Option<&'a str>);
    let cases: Vec<Case<'_>> = vec![
        (
            "content",
            chat(),
            "alpha beta gamma delta".into(),
            &["beta gamma"],
            Expected { content: "alpha ", ..TEXT },
            Some("beta gamma"),
        ),
        ("overlap", chat(), "aaab".into(), &["aab"], Expected { content: "a", ..TEXT }, Some("aab")),
        (
            "reasoning",
            thinking(),
            "alpha beta</think>gamma".into(),
            &["beta"],
            Expected { reasoning: "alpha ", ..TEXT },
            Some("beta"),
        ),
        (
            "not across parts",
            thinking(),
            "alpha</think>beta".into(),
            &["ab"],
            Expected { reasoning: "alpha", content: "beta", ..TEXT },
            None,
        ),
        (
            "newlines of the format are no text",
            thinking(),
            "alpha</think>\n\nbeta".into(),
            &["\n\n"],
            Expected { reasoning: "alpha", content: "beta", ..TEXT },
            None,
        ),
        (
            "the end of the reasoning",
            thinking(),
            "alpha</think>beta".into(),
            &["</think>"],
            Expected { reasoning: "alpha", ..TEXT },
            Some("</think>"),
        ),
        (
            "newlines before a call are text",
            chat(),
            format!("Hi\n\n{call}"),
            &["\n\n"],
            Expected { content: "Hi", ..TEXT },
            Some("\n\n"),
        ),
        (
            "inside a value",
            chat(),
            call.clone(),
            &["ris"],
            Expected { arguments: &["{\"location\": \"Pa"], incomplete: true, ..TEXT },
            Some("ris"),
        ),
        (
            "a number cut by a stop string",
            chat(),
            call.replace("\"true\"", "\"false\"").replace("Paris", "1234"),
            &["34"],
            Expected { arguments: &["{\"location\": 12"], incomplete: true, ..TEXT },
            Some("34"),
        ),
        ("inside the markup", chat(), call.clone(), &["invoke"], Expected { incomplete: true, ..TEXT }, Some("invoke")),
        (
            "the end of the block",
            chat(),
            call.clone(),
            &["</｜DSML｜ calls>"],
            Expected { arguments: &["{\"location\": \"Paris\"}"], reason: FinishReason::ToolCalls, ..TEXT },
            Some("</｜DSML｜ calls>"),
        ),
        (
            "first of several",
            chat(),
            "one two three".into(),
            &["three", "two", "xx", "wo "],
            Expected { content: "one ", ..TEXT },
            Some("two"),
        ),
        ("only a beginning", chat(), "alpha be".into(), &["beta"], Expected { content: "alpha be", ..TEXT }, None),
    ];
    for (name, mut options, text, stops, expected, stop) in cases {
        options.stops = stops.iter().map(|stop| stop.to_string()).collect();
        let found = check(&options, &text, End::Stop);
        assert_reply(name, &found, &expected);
        assert_eq!(found.stop.as_deref(), stop, "{name}");
    }
    let options = ReplyOptions { stops: vec!["be".into()], include_stop: true, ..chat() };
    assert_eq!(check(&options, "alpha beta", End::Stop).content.as_deref(), Some("alpha be"));
    let options = ReplyOptions { stops: vec!["be".into()], ..chat() };
    assert_eq!(check(&options, "alpha beta", End::Length).reason, FinishReason::Stop, "the stop string came first");
}

#[test]
fn nothing_of_a_stop_string_or_of_markup_is_shown_early() {
    let text = format!("alpha\n\nbe {}", call());
    let mut stream = ReplyStream::new(ReplyOptions { stops: vec!["beta".into()], ..chat() });
    let mut shown = String::new();
    for (at, character) in text.char_indices() {
        for delta in stream.push_text(character.encode_utf8(&mut [0; 4])) {
            if let Delta::Content { text, .. } = delta {
                shown.push_str(&text);
            }
        }
        assert!("alpha\n\nbe ".starts_with(&shown), "{shown:?} after {at}");
    }
    assert_eq!(shown, "alpha\n\nbe ");
}

#[test]
fn floods_of_one_character_are_read_in_one_pass() {
    for piece in ["\n", "<", "</", "｜DSML｜", "<｜DSML｜ invoke name=\"", "｜", "\"", " "] {
        let text = piece.repeat(300_000 / piece.len());
        for options in [chat(), thinking(), ReplyOptions { stops: vec!["\n\nx".into()], ..chat() }] {
            let found = parse(&options, [text.as_str(), "x"], End::Length);
            assert!(found.calls.is_empty(), "{piece:?}");
        }
    }
}

#[test]
fn raw_text_is_text_where_nothing_is_parsed() {
    let options = ReplyOptions { parse: false, ..chat() };
    let text = format!("\n\na</think>b\n\n{}", call());
    let tokenizer = &DEMO.tokenizer;
    let ids = tokenizer.encode_with_markers(&text).expect("encodes");
    for found in [parse(&options, [text.as_str()], End::Stop), parse_tokens(&options, tokenizer, &ids, End::Stop)] {
        assert_eq!((found.content.as_deref(), found.calls.len()), (Some(text.as_str()), 0));
        assert_eq!((found.reasoning, found.reason), (None, FinishReason::Stop));
    }
}

#[test]
fn the_end_token_ends_the_reply_and_has_no_text() {
    let tokenizer = &DEMO.tokenizer;
    let end = tokenizer.markers().id(Marker::EndOfSentence);
    let mut ids = tokenizer.encode_plain("one\n").expect("encodes");
    ids.push(end);
    ids.extend(tokenizer.encode_plain("two").expect("encodes"));
    let mut stream = ReplyStream::new(chat());
    let mut deltas = Vec::new();
    for &id in &ids {
        deltas.extend(stream.push_token(tokenizer, id));
    }
    assert!(stream.has_ended());
    let place = ids.iter().position(|id| *id == end).expect("there") as u32;
    let (rest, finish) = stream.finish(End::Length);
    assert!(rest.is_empty());
    assert_eq!((finish.reason, finish.token_count), (FinishReason::Stop, place + 1));
    assert_eq!(Message::fold(&deltas).content.as_deref(), Some("one\n"));

    let ignored = parse_tokens(&ReplyOptions { ignore_end: true, ..chat() }, tokenizer, &ids, End::Length);
    assert_eq!((ignored.content.as_deref(), ignored.reason), (Some("one\ntwo"), FinishReason::Length));
    assert_eq!(check(&chat(), "one<｜end▁of▁sentence｜>two", End::Length).content.as_deref(), Some("one"));
}

#[test]
fn emoji_never_become_replacement_characters() {
    let text = "ok 👩‍🚀 ž 漢";
    let tokenizer = &DEMO.tokenizer;
    let bytes: Vec<TokenId> = text.bytes().map(|byte| DEMO.bytes[usize::from(byte)]).collect();
    for cut in 0..=bytes.len() {
        let mut stream = ReplyStream::new(chat());
        let mut deltas: Vec<Delta> = Vec::new();
        for &id in &bytes[..cut] {
            deltas.extend(stream.push_token(tokenizer, id));
        }
        let (rest, finish) = stream.finish(End::Length);
        deltas.extend(rest);
        let shown = Message::fold(&deltas).content.expect("content");
        assert!(text.starts_with(&shown) && !shown.contains('\u{fffd}'), "{cut}: {shown:?}");
        assert_eq!(shown.len() + finish.withheld.len(), cut, "bytes are shown or withheld");
        // Every token has its row, also those of the character that was cut.
        let rows: Vec<u32> = deltas
            .iter()
            .flat_map(|delta| match delta {
                Delta::Content { tokens, .. } => tokens.clone(),
                Delta::Reasoning { .. } | Delta::CallStart { .. } | Delta::CallArguments { .. } => Vec::new(),
            })
            .collect();
        assert_eq!(rows, (0..cut as u32).collect::<Vec<_>>(), "{cut}");
    }
}

#[test]
fn each_token_of_text_has_one_row_in_its_part() {
    let tokenizer = &DEMO.tokenizer;
    let text = format!("I think 👍</think>\n\nSure, I do.\n\n{}", call());
    let ids = tokenizer.encode_with_markers(&text).expect("encodes");
    let mut stream = ReplyStream::new(thinking());
    let mut deltas = Vec::new();
    for &id in &ids {
        deltas.extend(stream.push_token(tokenizer, id));
    }
    let (rest, finish) = stream.finish(End::Stop);
    deltas.extend(rest);
    let (mut reasoning, mut content) = (Vec::new(), Vec::new());
    for delta in &deltas {
        match delta {
            Delta::Reasoning { tokens, .. } => reasoning.extend(tokens),
            Delta::Content { tokens, .. } => content.extend(tokens),
            Delta::CallStart { .. } | Delta::CallArguments { .. } => {}
        }
    }
    let text_of = |rows: &[u32]| {
        let ids: Vec<TokenId> = rows.iter().map(|row| ids[*row as usize]).collect();
        tokenizer.decode(&ids, false).expect("known ids")
    };
    assert_eq!(text_of(&reasoning), "I think 👍");
    assert_eq!(text_of(&content).trim_end_matches(['\n', '<']), "Sure, I do.");
    let close = ids.iter().position(|id| *id == tokenizer.markers().id(Marker::ThinkEnd)).expect("there") as u32;
    assert_eq!(finish.reasoning_token_count, close + 1);
    assert_eq!(finish.token_count, ids.len() as u32);
}

#[test]
fn tokens_after_a_stop_string_do_not_belong_to_the_reply() {
    let tokenizer = &DEMO.tokenizer;
    let ids: Vec<TokenId> = "ab\n\n\ncd".bytes().map(|byte| DEMO.bytes[usize::from(byte)]).collect();
    // Newlines wait for what follows them, so the stop string is seen late; the count is still exact.
    let mut stream = ReplyStream::new(ReplyOptions { stops: vec!["b\n".into()], ..chat() });
    for &id in &ids {
        stream.push_token(tokenizer, id);
    }
    let (_, finish) = stream.finish(End::Length);
    assert_eq!((finish.token_count, finish.stop.as_deref()), (3, Some("b\n")));
}

#[test]
fn call_ids_are_distinct_and_well_formed() {
    let mut ids = std::collections::HashSet::new();
    let two = call().replace(&dsml("</D calls>"), &dsml("<D invoke name=\"z\">\n</D invoke>\n</D calls>"));
    for seed in 0..100 {
        let mut stream = ReplyStream::new(ReplyOptions { call_ids: CallIds::new(seed), ..chat() });
        for delta in stream.push_text(&two) {
            if let Delta::CallStart { id, .. } = delta {
                let digits = id.strip_prefix("call_").expect("prefix");
                assert!(digits.len() == 24 && digits.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
                assert!(ids.insert(id));
            }
        }
    }
    assert_eq!(ids.len(), 200);
}

#[test]
fn the_first_piece_of_a_call_has_its_name_and_pieces_come_as_they_are_written() {
    let mut stream = ReplyStream::new(chat());
    let mut deltas = Vec::new();
    for character in call().chars() {
        deltas.extend(stream.push_text(character.encode_utf8(&mut [0; 4])));
    }
    let pieces: Vec<Value> = deltas
        .iter()
        .map(|delta| match delta {
            Delta::CallStart { index, name, .. } => json!([index, name]),
            Delta::CallArguments { index, text } => json!([index, text]),
            Delta::Reasoning { .. } | Delta::Content { .. } => json!("text"),
        })
        .collect();
    let expected = json!([
        [0, "w"],
        [0, "{\"location\": \""],
        [0, "P"],
        [0, "a"],
        [0, "r"],
        [0, "i"],
        [0, "s"],
        [0, "\""],
        [0, "}"]
    ]);
    assert_eq!(Value::Array(pieces), expected);
}

/// A small generator for texts made of the pieces that matter; the seed is in every message.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
}

#[test]
fn random_markup_means_the_same_at_every_split() {
    let pieces = [
        "<",
        "</",
        "｜DSML｜",
        "<｜DSML｜ calls>",
        "</｜DSML｜ calls>",
        "<｜DSML｜ invoke name=\"w\">",
        "</｜DSML｜ invoke>",
        "<｜DSML｜ parameter name=\"k\" string=\"true\">",
        "<｜DSML｜ parameter name=\"k\" string=\"false\">",
        "</｜DSML｜ parameter>",
        "<｜DSML｜ parameter name=\"k\">",
        "<｜DSML｜ zip>",
        "\n",
        "\n\n",
        " ",
        "text",
        "12",
        "[1]",
        "\"",
        ">",
        "</think>",
        "<think>",
        "é漢",
        "｜",
        " calls>",
        " invoke name=\"",
        "stop",
    ];
    let mut calls = 0;
    let mut incomplete = 0;
    for seed in 0..400 {
        let mut dice = Dice(seed);
        let text: String = (0..dice.roll(14) + 1).map(|_| pieces[dice.roll(pieces.len())]).collect();
        let start = [ParseStart::Reasoning, ParseStart::Content, ParseStart::Calls][dice.roll(3)];
        let mut options = ReplyOptions::new(start);
        if dice.roll(3) == 0 {
            options.stops = vec!["stop".into(), "\n\n<".into(), "xt".into()];
        }
        let end = if dice.roll(2) == 0 { End::Stop } else { End::Length };
        let whole = parse(&options, [text.as_str()], end);
        for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            let split = parse(&options, [&text[..at], &text[at..]], end);
            assert_eq!(split, whole, "seed {seed}: {text:?} split at {at}");
        }
        let ids = DEMO.encode(&text);
        assert_eq!(parse_tokens(&options, &DEMO.tokenizer, &ids, end), whole, "seed {seed}: {text:?} as tokens");
        let characters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(parse(&options, characters.iter().map(String::as_str), end), whole, "seed {seed}: {text:?}");
        for (_, arguments) in
            whole.calls.iter().take(whole.calls.len() - usize::from(whole.incomplete && !whole.calls.is_empty()))
        {
            assert!(arguments.starts_with('{') && arguments.ends_with('}'), "seed {seed}: {text:?}: {arguments}");
        }
        calls += whole.calls.len();
        incomplete += usize::from(whole.incomplete);
    }
    assert!(calls > 20 && incomplete > 20, "the texts must reach the calls: {calls} calls, {incomplete} cut");
}
