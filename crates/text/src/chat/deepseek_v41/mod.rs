//! The prompt format of DeepSeek-V4.1.
//!
//! Messages become turns (tool results join the user's turn, empty system messages go), and the turns are written one
//! after the other: no role for tools, no newline between messages. The fixed texts beside this file belong to the
//! release's prompt format and carry its licence in `LICENSE-prompt-format`.

use std::collections::HashMap;

use super::{
    ChatError, Marker, Message, ParseStart, Part, Prompt, Request, ResponseFormat, Segment, Thinking, Tool, ToolCall,
    ToolMode,
};
use crate::json::{Object, Value};

/// Describes the call syntax; `{schemas}` stands for one JSON object a line. Its markers are markers.
const TOOLS: &str = include_str!("tools.txt");
/// Stands at the start of every conversation with reasoning; `{effort}` is a number from 1 to 100.
const EFFORT: &str = include_str!("effort.txt");
/// `{schema}` stands for a JSON Schema or a format object.
const RESPONSE_FORMAT: &str = include_str!("response_format.txt");

const CALLS_OPEN: &str = "<｜DSML｜ calls>\n";
const CALLS_CLOSE: &str = "</｜DSML｜ calls>";

/// Markers that occur inside the fixed texts.
const TEMPLATE_MARKERS: [Marker; 3] = [Marker::Dsml, Marker::ThinkStart, Marker::ThinkEnd];

/// A message after normalisation.
enum Turn<'a> {
    System(&'a [Part]),
    User(Vec<Block<'a>>),
    Assistant { content: &'a [Part], reasoning: &'a str, tool_calls: &'a [ToolCall], prefix: bool },
    LatestReminder(&'a [Part]),
}

/// A piece of a user's turn.
enum Block<'a> {
    Own(&'a [Part]),
    ToolResult { content: &'a [Part], call_id: Option<&'a str> },
}

/// Renders a conversation. Source: architecture description, chat encoding; the release's own encoder.
pub fn encode(request: &Request) -> Result<Prompt, ChatError> {
    check(request)?;
    let tools = request.shown_tools();
    let turns = turns(&request.messages);
    let thinking = request.thinking.is_on();
    let header = if thinking { Marker::ThinkStart } else { Marker::ThinkEnd };
    let mut writer = Writer::default();
    writer.marker(Marker::BeginOfSentence);

    // The leading system message carries the tools and the format, whether or not the conversation begins with one.
    let (leading, rest) = match turns.split_first() {
        Some((Turn::System(content), rest)) => (Some(*content), rest),
        _ => (None, turns.as_slice()),
    };
    let has_extras = !tools.is_empty() || request.response_format != ResponseFormat::Text;
    if thinking || leading.is_some() || has_extras {
        writer.marker(Marker::System);
    }
    if let Thinking::On(effort) = request.thinking {
        writer.text(&EFFORT.replace("{effort}", &effort.value().to_string()));
    }
    writer.parts(leading.unwrap_or_default());
    if !tools.is_empty() {
        writer.text("\n\n");
        writer.tools(tools);
    }
    writer.response_format(&request.response_format);

    let mut start = None;
    for turn in rest {
        match turn {
            Turn::System(content) => {
                writer.marker(Marker::System);
                writer.parts(content);
            }
            Turn::User(blocks) => {
                writer.marker(Marker::User);
                writer.blocks(blocks);
            }
            Turn::LatestReminder(content) => {
                writer.marker(Marker::LatestReminder);
                writer.parts(content);
            }
            Turn::Assistant { content, reasoning, tool_calls, prefix } => {
                // Without tools every finished reply loses its reasoning, the last one included: the reply to come
                // opens a reasoning of its own. With tools nothing is dropped.
                let shows_reasoning = thinking && (*prefix || !tools.is_empty());
                writer.marker(Marker::Assistant);
                writer.marker(if shows_reasoning { Marker::ThinkStart } else { Marker::ThinkEnd });
                let has_content = !is_empty(content);
                if shows_reasoning {
                    writer.text(reasoning);
                    if !prefix || has_content {
                        writer.marker(Marker::ThinkEnd);
                    }
                }
                writer.parts(content);
                writer.calls(tool_calls);
                if *prefix {
                    start = Some(match (shows_reasoning, has_content) {
                        (_, true) => ParseStart::ContentContinued,
                        (false, false) => ParseStart::Content,
                        (true, false) if reasoning.is_empty() => ParseStart::Reasoning,
                        (true, false) => ParseStart::ReasoningContinued,
                    });
                } else {
                    writer.marker(Marker::EndOfSentence);
                }
            }
        }
    }

    if start.is_none() && request.add_generation_prompt {
        writer.marker(Marker::Assistant);
        writer.marker(header);
        if request.tool_choice.mode == ToolMode::Required && !thinking {
            writer.text("\n\n");
            writer.template(CALLS_OPEN);
            start = Some(ParseStart::Calls);
        }
    }
    let fresh = if thinking { ParseStart::Reasoning } else { ParseStart::Content };
    let start = start.unwrap_or(fresh);
    Ok(Prompt { segments: writer.segments, images: writer.images, start, opening: opening(request, start) })
}

/// What the answer begins with: the opened block, which a prompt without reasoning holds already, and the name of the
/// only tool that can be called.
fn opening(request: &Request, start: ParseStart) -> Vec<Segment> {
    let mut writer = Writer::default();
    if request.tool_choice.mode == ToolMode::Required {
        if start != ParseStart::Calls {
            writer.text("\n\n");
            writer.template(CALLS_OPEN);
        }
        if let Some(name) = request.forced_tool() {
            writer.call_open(name);
        }
    }
    writer.segments
}

fn check(request: &Request) -> Result<(), ChatError> {
    let Some(last) = request.messages.len().checked_sub(1) else { return Err(ChatError::NoMessages) };
    for (index, message) in request.messages.iter().enumerate() {
        if let Message::Assistant { prefix: true, tool_calls, .. } = message {
            if index != last {
                return Err(ChatError::PrefixNotLast { index });
            }
            if !tool_calls.is_empty() {
                return Err(ChatError::PrefixWithCalls { index });
            }
        }
    }
    if request.tool_choice.mode == ToolMode::Required {
        if request.tools.is_empty() {
            return Err(ChatError::ForcedCallWithoutTools);
        }
        if request.continues() {
            return Err(ChatError::ForcedCallWithPrefix);
        }
    }
    Ok(())
}

/// Drops empty system messages, joins user and tool messages, and orders the tool results of a turn by the calls.
fn turns(messages: &[Message]) -> Vec<Turn<'_>> {
    let mut turns: Vec<Turn<'_>> = Vec::new();
    for message in messages {
        let turn = match message {
            Message::System { content } if is_empty(content) => continue,
            Message::System { content } => Turn::System(content),
            Message::LatestReminder { content } => Turn::LatestReminder(content),
            Message::Assistant { content, reasoning, tool_calls, prefix } => {
                Turn::Assistant { content, reasoning, tool_calls, prefix: *prefix }
            }
            Message::User { content } => Turn::User(vec![Block::Own(content)]),
            Message::Tool { content, call_id } => {
                Turn::User(vec![Block::ToolResult { content, call_id: call_id.as_deref() }])
            }
        };
        match (turns.last_mut(), turn) {
            (Some(Turn::User(blocks)), Turn::User(more)) => blocks.extend(more),
            (_, turn) => turns.push(turn),
        }
    }
    let mut order: HashMap<&str, usize> = HashMap::new();
    for turn in &mut turns {
        match turn {
            Turn::Assistant { tool_calls, .. } if !tool_calls.is_empty() => {
                order = tool_calls.iter().enumerate().map(|(index, call)| (call.id.as_str(), index)).collect();
            }
            Turn::User(blocks) => sort_results(blocks, &order),
            Turn::Assistant { .. } | Turn::System(_) | Turn::LatestReminder(_) => {}
        }
    }
    turns
}

/// Orders the results by the calls they answer; blocks of other kinds stay where they are. An unknown id counts as the
/// first call, a missing one comes last.
fn sort_results(blocks: &mut [Block<'_>], order: &HashMap<&str, usize>) {
    let places: Vec<usize> =
        (0..blocks.len()).filter(|place| matches!(blocks[*place], Block::ToolResult { .. })).collect();
    if places.len() < 2 || order.is_empty() {
        return;
    }
    let rank = |block: &Block<'_>| match block {
        Block::ToolResult { call_id: Some(id), .. } => order.get(id).copied().unwrap_or(0),
        Block::ToolResult { call_id: None, .. } | Block::Own(_) => usize::MAX,
    };
    let mut results: Vec<Block<'_>> =
        places.iter().map(|place| std::mem::replace(&mut blocks[*place], Block::Own(&[]))).collect();
    results.sort_by_key(rank);
    for (place, result) in places.into_iter().zip(results) {
        blocks[place] = result;
    }
}

fn is_empty(content: &[Part]) -> bool {
    // Two empty parts still print the blank line between them.
    match content {
        [] => true,
        [Part::Text(text)] => text.is_empty(),
        _ => false,
    }
}

/// Collects segments; neighbouring texts become one, because token borders depend on what stands beside.
#[derive(Default)]
struct Writer {
    segments: Vec<Segment>,
    images: Vec<String>,
}

impl Writer {
    fn marker(&mut self, marker: Marker) {
        self.segments.push(Segment::Marker(marker));
    }

    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.segments.last_mut() {
            Some(Segment::Text(last)) => last.push_str(text),
            _ => self.segments.push(Segment::Text(text.into())),
        }
    }

    /// Writes a text of the format itself, in which the spelling of a marker is the marker.
    fn template(&mut self, mut text: &str) {
        while let Some((at, marker)) = TEMPLATE_MARKERS
            .iter()
            .filter_map(|marker| text.find(marker.spelling()).map(|at| (at, *marker)))
            .min_by_key(|(at, _)| *at)
        {
            self.text(&text[..at]);
            self.marker(marker);
            text = &text[at + marker.spelling().len()..];
        }
        self.text(text);
    }

    fn parts(&mut self, content: &[Part]) {
        for (index, part) in content.iter().enumerate() {
            if index > 0 {
                self.text("\n\n");
            }
            match part {
                Part::Text(text) => self.text(text),
                Part::Image { url } => {
                    self.marker(Marker::Image);
                    self.images.push(url.clone());
                }
            }
        }
    }

    fn blocks(&mut self, blocks: &[Block<'_>]) {
        for (index, block) in blocks.iter().enumerate() {
            if index > 0 {
                self.text("\n\n");
            }
            match block {
                Block::Own(content) => self.parts(content),
                Block::ToolResult { content, .. } => {
                    self.text("<tool_result>");
                    self.parts(content);
                    self.text("</tool_result>");
                }
            }
        }
    }

    fn tools(&mut self, tools: &[Tool]) {
        let (before, after) = TOOLS.split_once("{schemas}").unwrap_or((TOOLS, ""));
        self.template(before);
        for (index, tool) in tools.iter().enumerate() {
            if index > 0 {
                self.text("\n");
            }
            self.text(&schema_line(tool));
        }
        self.template(after);
    }

    fn response_format(&mut self, format: &ResponseFormat) {
        let schema = match format {
            ResponseFormat::Text => return,
            ResponseFormat::JsonObject => "{\"type\": \"json_object\"}".into(),
            ResponseFormat::JsonSchema { schema, .. } => schema.to_text(),
        };
        self.text("\n\n");
        self.text(&RESPONSE_FORMAT.replace("{schema}", &schema));
    }

    fn call_open(&mut self, name: &str) {
        self.template("<｜DSML｜ invoke name=\"");
        self.text(name);
        self.text("\">\n");
    }

    fn calls(&mut self, calls: &[ToolCall]) {
        if calls.is_empty() {
            return;
        }
        self.text("\n\n");
        self.template(CALLS_OPEN);
        for call in calls {
            self.call_open(&call.name);
            match Value::parse(&call.arguments) {
                Ok(Value::Object(arguments)) => {
                    for (index, (key, value)) in arguments.iter().enumerate() {
                        if index > 0 {
                            self.text("\n");
                        }
                        match value {
                            Value::String(text) => self.parameter(key, true, text),
                            other => self.parameter(key, false, &other.to_text()),
                        }
                    }
                }
                _ => self.parameter("arguments", true, &call.arguments),
            }
            self.text("\n");
            self.template("</｜DSML｜ invoke>\n");
        }
        self.template(CALLS_CLOSE);
    }

    fn parameter(&mut self, key: &str, is_string: bool, value: &str) {
        self.template("<｜DSML｜ parameter name=\"");
        self.text(key);
        self.text(if is_string { "\" string=\"true\">" } else { "\" string=\"false\">" });
        self.text(value);
        self.template("</｜DSML｜ parameter>");
    }
}

fn schema_line(tool: &Tool) -> String {
    let mut line = String::from("{\"name\": ");
    crate::json::quote(&tool.name, &mut line);
    line.push_str(", \"description\": ");
    crate::json::quote(&tool.description, &mut line);
    line.push_str(", \"parameters\": ");
    if tool.strict {
        let mut parameters = tool.parameters.clone();
        close_objects(&mut parameters);
        parameters.render(&mut line);
    } else {
        tool.parameters.render(&mut line);
    }
    line.push('}');
    line
}

/// Says `additionalProperties: false` behind the properties of every object schema that does not allow others.
fn close_objects(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object.values_mut() {
                match (key, value) {
                    ("properties" | "$defs" | "definitions", Value::Object(children)) => {
                        children.values_mut().for_each(|(_, child)| close_objects(child));
                    }
                    ("items" | "additionalProperties", child) => close_objects(child),
                    ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(children)) => {
                        children.iter_mut().for_each(close_objects);
                    }
                    _ => {}
                }
            }
            close(object);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {}
    }
}

fn close(object: &mut Object) {
    let is_open = matches!(object.get("additionalProperties"), Some(value) if *value != Value::Bool(false));
    if object.get("properties").is_some() && !is_open {
        object.insert_after("properties", "additionalProperties", Value::Bool(false));
    }
}
