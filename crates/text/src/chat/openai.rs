//! Reads the conversation of an OpenAI chat-completions body.
//!
//! Only what decides the prompt: messages, tools, response format, reasoning, continuation. Sampling and the like
//! belong to the route, which reads them from the same [`Fields`]. Unknown keys are ignored; a known one with a value
//! that is not supported is an error that names it. Control markers inside any text are ordinary text.

use std::collections::HashSet;

use super::{
    ChatError, Effort, Message, Part, Request, ResponseFormat, Thinking, Tool, ToolCall, ToolChoice, ToolMode,
};
use crate::fields::{BodyError, Code, Field, Fields};
use crate::json::{Object, Value};

pub const MESSAGES_MAX: usize = 10_000;
pub const TOOLS_MAX: usize = 512;
pub const TOOL_NAME_CHARS_MAX: usize = 64;

const TOOL_CHOICES: &str = "\"none\", \"auto\", \"required\" or an object that names a function, like {\"type\": \
                            \"function\", \"function\": {\"name\": \"NAME\"}}";
const RESPONSE_FORMATS: &str = "an object like {\"type\": \"text\"}";

/// What holds where the body says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    pub thinking: bool,
    pub effort: Effort,
    /// Whether image parts are accepted.
    pub images: bool,
}

impl Default for Defaults {
    fn default() -> Defaults {
        Defaults { thinking: true, effort: Effort::High, images: false }
    }
}

/// The conversation of a body and how its reasoning is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatBody {
    pub request: Request,
    /// Most reasoning tokens.
    pub thinking_budget: Option<u64>,
    /// Whether the reply shows its reasoning text.
    pub include_reasoning: bool,
}

/// Reads the conversation of a chat-completions body.
///
/// # Errors
/// The first mistake, with the path of its field.
pub fn chat_body(body: &Fields<'_>, defaults: Defaults) -> Result<ChatBody, BodyError> {
    refuse_others(body)?;
    let mut messages = read_messages(&body.required("messages")?, defaults.images)?;
    let tools = body.get("tools").map(|field| read_tools(&field)).transpose()?.unwrap_or_default();
    let tool_choice =
        body.get("tool_choice").map(|field| read_tool_choice(&field, &tools)).transpose()?.unwrap_or_default();
    let parallel_tool_calls = flag(body, "parallel_tool_calls")?.unwrap_or(true);
    let response_format =
        body.get("response_format").map(|field| read_response_format(&field)).transpose()?.unwrap_or_default();
    let reasoning = read_reasoning(body, defaults)?;

    let add_generation_prompt = flag(body, "add_generation_prompt")?;
    if flag(body, "continue_final_message")? == Some(true) {
        if add_generation_prompt == Some(true) {
            return Err(conflict(
                "continue_final_message",
                "continue_final_message and add_generation_prompt cannot both be true: a continued message has its \
                 header already",
            ));
        }
        match messages.last_mut() {
            Some(Message::Assistant { prefix, .. }) => *prefix = true,
            _ => {
                return Err(BodyError {
                    code: Code::InvalidValue,
                    param: Some("continue_final_message".into()),
                    message: "continue_final_message needs an assistant message at the end of messages".into(),
                });
            }
        }
    }
    let request = Request {
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        response_format,
        thinking: reasoning.thinking,
        add_generation_prompt: add_generation_prompt.unwrap_or(true),
    };
    super::encode(&request).map_err(|error| refuse(&error))?;
    Ok(ChatBody { request, thinking_budget: reasoning.budget, include_reasoning: reasoning.include })
}

/// What the format cannot express, as a mistake of the body.
fn refuse(error: &ChatError) -> BodyError {
    let (code, param) = match error {
        ChatError::NoMessages => (Code::InvalidValue, "messages".into()),
        ChatError::PrefixNotLast { index } => (Code::InvalidValue, format!("messages[{index}].prefix")),
        ChatError::PrefixWithCalls { index } => (Code::ConflictingValues, format!("messages[{index}].prefix")),
        ChatError::ForcedCallWithPrefix | ChatError::ForcedCallWithoutTools => {
            (Code::ConflictingValues, "tool_choice".into())
        }
    };
    BodyError { code, param: Some(param), message: error.to_string() }
}

fn conflict(param: &str, message: impl Into<String>) -> BodyError {
    BodyError { code: Code::ConflictingValues, param: Some(param.into()), message: message.into() }
}

fn flag(fields: &Fields<'_>, key: &str) -> Result<Option<bool>, BodyError> {
    fields.get(key).map(|field| field.boolean()).transpose()
}

fn text(fields: &Fields<'_>, key: &str) -> Result<Option<String>, BodyError> {
    fields.get(key).map(|field| field.string().map(str::to_owned)).transpose()
}

/// Fields that decide the prompt elsewhere. To ignore one would answer another question.
fn refuse_others(body: &Fields<'_>) -> Result<(), BodyError> {
    const OWN_ENCODING: &str = "the encoding is the release's own, put everything into messages";
    const SWITCH: &str = "use thinking, like {\"type\": \"disabled\"}, or chat_template_kwargs";
    for (key, instead) in [
        ("functions", "use tools"),
        ("function_call", "use tool_choice"),
        ("chat_template", OWN_ENCODING),
        ("documents", OWN_ENCODING),
        ("enable_thinking", SWITCH),
    ] {
        if let Some(field) = body.get(key)
            && (instead == SWITCH || !is_blank(field.value()))
        {
            return Err(field.error(Code::UnsupportedParameter, format!("{key} is not supported: {instead}")));
        }
    }
    Ok(())
}

fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty() || text == "none" || text == "auto",
        Value::Bool(true) | Value::Number(_) | Value::Object(_) => false,
    }
}

fn read_messages(field: &Field<'_>, images: bool) -> Result<Vec<Message>, BodyError> {
    let items = field.array()?;
    if items.is_empty() {
        return Err(field.error(Code::InvalidValue, "messages is empty: at least one message is needed"));
    }
    if items.len() > MESSAGES_MAX {
        let message = format!("messages has {} entries, the limit is {MESSAGES_MAX}", items.len());
        return Err(field.error(Code::InvalidValue, message));
    }
    items.iter().map(|item| read_message(&item.object()?, images)).collect()
}

fn read_message(message: &Fields<'_>, images: bool) -> Result<Message, BodyError> {
    let role = message.required("role")?;
    let content = || read_content(&message.required("content")?, images);
    match role.string()? {
        "system" | "developer" => Ok(Message::System { content: content()? }),
        "user" => Ok(Message::User { content: content()? }),
        "latest_reminder" => Ok(Message::LatestReminder { content: content()? }),
        "tool" => Ok(Message::Tool { content: content()?, call_id: call_id(message, "tool_call_id")? }),
        "function" => {
            let call_id = match call_id(message, "tool_call_id")? {
                Some(id) => Some(id),
                None => text(message, "name")?,
            };
            Ok(Message::Tool { content: content()?, call_id })
        }
        "assistant" => read_assistant(message, images),
        _ => Err(role.wrong_value(
            "one of \"system\", \"developer\", \"user\", \"assistant\", \"tool\", \"function\", \"latest_reminder\"",
        )),
    }
}

fn read_assistant(message: &Fields<'_>, images: bool) -> Result<Message, BodyError> {
    let mut content = match message.get("content") {
        Some(field) => read_content(&field, images)?,
        None => Vec::new(),
    };
    if let Some(refusal) = text(message, "refusal")? {
        if matches!(content.as_slice(), [Part::Text(text)] if text.is_empty()) {
            content.clear();
        }
        content.push(Part::Text(refusal));
    }
    let reasoning = match text(message, "reasoning_content")? {
        Some(reasoning) => reasoning,
        None => text(message, "reasoning")?.unwrap_or_default(),
    };
    let mut tool_calls = match message.get("tool_calls") {
        Some(field) => field.array()?.iter().map(|item| read_call(&item.object()?)).collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    if let Some(field) = message.get("function_call") {
        let call = field.object()?;
        let name = call.required("name")?.string()?.to_owned();
        tool_calls.push(ToolCall { id: name.clone(), name, arguments: arguments(&call)? });
    }
    Ok(Message::Assistant { content, reasoning, tool_calls, prefix: flag(message, "prefix")?.unwrap_or(false) })
}

fn read_call(call: &Fields<'_>) -> Result<ToolCall, BodyError> {
    if let Some(field) = call.get("type")
        && field.string()? != "function"
    {
        return Err(unsupported(&field, "only \"function\" calls are supported"));
    }
    let function = call.required("function")?.object()?;
    Ok(ToolCall {
        id: call_id(call, "id")?.unwrap_or_default(),
        name: function.required("name")?.string()?.into(),
        arguments: arguments(&function)?,
    })
}

fn arguments(function: &Fields<'_>) -> Result<String, BodyError> {
    Ok(text(function, "arguments")?.unwrap_or_else(|| "{}".into()))
}

/// Ids are only compared, so a number is as good as a text.
fn call_id(fields: &Fields<'_>, key: &str) -> Result<Option<String>, BodyError> {
    let Some(field) = fields.get(key) else { return Ok(None) };
    match field.value() {
        Value::String(text) | Value::Number(text) => Ok(Some(text.clone())),
        _ => Err(field.wrong_type("a string")),
    }
}

fn read_content(field: &Field<'_>, images: bool) -> Result<Vec<Part>, BodyError> {
    match field.value() {
        Value::String(text) => Ok(Part::text(text.as_str())),
        Value::Array(_) => field.array()?.iter().map(|item| read_part(item, images)).collect(),
        _ => Err(field.wrong_type("a string or a list of parts")),
    }
}

fn read_part(item: &Field<'_>, images: bool) -> Result<Part, BodyError> {
    if let Value::String(text) = item.value() {
        return Ok(Part::Text(text.clone()));
    }
    let part = item.object()?;
    let kind = part.required("type")?;
    match kind.string()? {
        "text" | "input_text" | "output_text" => Ok(Part::Text(part.required("text")?.string()?.into())),
        "refusal" => Ok(Part::Text(part.required("refusal")?.string()?.into())),
        "image_url" | "image" | "input_image" if images => {
            let address = match part.get("image_url") {
                Some(field) if matches!(field.value(), Value::Object(_)) => field.object()?.required("url")?,
                Some(field) => field,
                None => part.required("url")?,
            };
            Ok(Part::Image { url: address.string()?.into() })
        }
        "image_url" | "image" | "input_image" => {
            Err(kind.error(Code::UnsupportedContent, format!("{}: images are not supported yet", kind.path())))
        }
        "input_audio" | "audio" | "audio_url" | "video" | "video_url" | "input_video" | "file" | "input_file" => {
            let message = format!("{}: only text parts are supported, got {}", kind.path(), kind.value().describe());
            Err(kind.error(Code::UnsupportedContent, message))
        }
        _ => Err(kind.wrong_value("\"text\", \"input_text\", \"output_text\" or \"refusal\"")),
    }
}

fn unsupported(field: &Field<'_>, what: &str) -> BodyError {
    let message = format!("{}: {what}, got {}", field.path(), field.value().describe());
    field.error(Code::UnsupportedValue, message)
}

fn read_tools(field: &Field<'_>) -> Result<Vec<Tool>, BodyError> {
    let items = field.array()?;
    if items.len() > TOOLS_MAX {
        let message = format!("tools has {} entries, the limit is {TOOLS_MAX}", items.len());
        return Err(field.error(Code::InvalidValue, message));
    }
    let mut names = HashSet::new();
    let mut tools = Vec::with_capacity(items.len());
    for item in &items {
        let item = item.object()?;
        let kind = item.required("type")?;
        if kind.string()? != "function" {
            return Err(unsupported(&kind, "only \"function\" tools are supported"));
        }
        let function = item.required("function")?.object()?;
        let name = function.required("name")?;
        let tool = Tool {
            name: tool_name(&name)?.into(),
            description: text(&function, "description")?.unwrap_or_default(),
            parameters: match function.get("parameters") {
                Some(parameters) => {
                    parameters.object()?;
                    parameters.value().clone()
                }
                None => Value::Object(Object::default()),
            },
            strict: flag(&function, "strict")?.unwrap_or(false),
        };
        if !names.insert(tool.name.clone()) {
            let message = format!("{}: two tools are called {:?}; names must differ", name.path(), tool.name);
            return Err(name.error(Code::InvalidValue, message));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn tool_name<'a>(field: &Field<'a>) -> Result<&'a str, BodyError> {
    let name = field.string()?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > TOOL_NAME_CHARS_MAX || !name.bytes().all(is_allowed) {
        return Err(field.wrong_value("1 to 64 letters, digits, \"_\", \"-\" or \".\""));
    }
    Ok(name)
}

fn read_tool_choice(field: &Field<'_>, tools: &[Tool]) -> Result<ToolChoice, BodyError> {
    let mode = |field: &Field<'_>, expected: &str| match field.value() {
        Value::String(text) if text == "none" => Ok(ToolMode::None),
        Value::String(text) if text == "auto" => Ok(ToolMode::Auto),
        Value::String(text) if text == "required" => Ok(ToolMode::Required),
        Value::String(_) => Err(field.wrong_value(expected)),
        _ => Err(field.wrong_type(expected)),
    };
    let Value::Object(_) = field.value() else {
        return Ok(ToolChoice { mode: mode(field, TOOL_CHOICES)?, allowed: None });
    };
    let choice = field.object()?;
    let named = |entry: &Fields<'_>| {
        let name = match entry.get("function") {
            Some(function) => function.object()?.required("name")?,
            None => entry.required("name")?,
        };
        let text = name.string()?;
        if tools.iter().any(|tool| tool.name == text) {
            return Ok(text.to_owned());
        }
        let message = format!("{}: no tool is called {text:?}", name.path());
        Err(name.error(Code::InvalidValue, message))
    };
    let kind = choice.required("type")?;
    match kind.string()? {
        "function" => Ok(ToolChoice { mode: ToolMode::Required, allowed: Some(vec![named(&choice)?]) }),
        "allowed_tools" => {
            let inner = match choice.get("allowed_tools") {
                Some(field) => field.object()?,
                None => choice,
            };
            let list = inner.required("tools")?;
            let allowed = list.array()?.iter().map(|item| named(&item.object()?)).collect::<Result<Vec<_>, _>>()?;
            if allowed.is_empty() {
                return Err(list.wrong_value("a list with at least one tool"));
            }
            let modes = "\"none\", \"auto\" or \"required\"";
            let mode = inner.get("mode").map(|field| mode(&field, modes)).transpose()?.unwrap_or_default();
            Ok(ToolChoice { mode, allowed: Some(allowed) })
        }
        _ => Err(kind.wrong_value("\"function\" or \"allowed_tools\"")),
    }
}

fn read_response_format(field: &Field<'_>) -> Result<ResponseFormat, BodyError> {
    let format = field.object_as(RESPONSE_FORMATS)?;
    let kind = format.required("type")?;
    match kind.string()? {
        "text" => Ok(ResponseFormat::Text),
        "json_object" => Ok(ResponseFormat::JsonObject),
        "json_schema" => {
            let inner = format.required("json_schema")?.object()?;
            flag(&inner, "strict")?;
            let schema = inner.required("schema")?;
            match schema.value() {
                Value::Object(_) | Value::Bool(_) => Ok(ResponseFormat::JsonSchema {
                    name: text(&inner, "name")?.unwrap_or_default(),
                    schema: schema.value().clone(),
                }),
                _ => Err(schema.wrong_type("a JSON Schema object")),
            }
        }
        _ => Err(kind.wrong_value("\"text\", \"json_object\" or \"json_schema\"")),
    }
}

/// What a body says about reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reasoning {
    pub thinking: Thinking,
    pub budget: Option<u64>,
    pub include: bool,
}

/// Reads the fields about reasoning of a chat body.
///
/// # Errors
/// A wrong level, or two switches that contradict each other.
pub fn read_reasoning(body: &Fields<'_>, defaults: Defaults) -> Result<Reasoning, BodyError> {
    let object = |key: &str, example: &str| {
        let expected = format!("an object like {example}");
        body.get(key).map(|field| field.object_as(&expected)).transpose()
    };
    let thinking = object("thinking", "{\"type\": \"enabled\"} or {\"type\": \"disabled\"}")?;
    let kwargs = object("chat_template_kwargs", "{\"thinking\": true} or {\"thinking\": false}")?;
    let reasoning = object("reasoning", "{\"effort\": \"high\"}")?;
    let output_config = object("output_config", "{\"effort\": \"high\"}")?;

    // Switches say on or off; levels say how much, and "none" is a switch too.
    let mut switches: Vec<(String, bool)> = Vec::new();
    if let Some(kind) = thinking.as_ref().and_then(|fields| fields.get("type")) {
        switches.push((
            kind.path().into(),
            match kind.string()? {
                "enabled" | "adaptive" => true,
                "disabled" => false,
                _ => return Err(kind.wrong_value("\"enabled\", \"adaptive\" or \"disabled\"")),
            },
        ));
    }
    for key in ["thinking", "enable_thinking"] {
        if let Some(field) = kwargs.as_ref().and_then(|fields| fields.get(key)) {
            switches.push((field.path().into(), field.boolean()?));
        }
    }
    let own = [
        body.get("reasoning_effort"),
        reasoning.as_ref().and_then(|fields| fields.get("effort")),
        thinking.as_ref().and_then(|fields| fields.get("effort")),
        output_config.as_ref().and_then(|fields| fields.get("effort")),
    ];
    let mut level: Option<(String, Option<Effort>)> = None;
    for field in own.into_iter().flatten() {
        let effort = read_effort(&field)?;
        match &level {
            Some((first, before)) if *before != effort => {
                let message = format!("{first} and {} ask for different reasoning efforts", field.path());
                return Err(conflict(field.path(), message));
            }
            Some(_) => {}
            None => level = Some((field.path().into(), effort)),
        }
    }
    if let Some(field) = kwargs.as_ref().and_then(|fields| fields.get("reasoning_effort")) {
        let effort = read_effort(&field)?;
        level.get_or_insert((field.path().into(), effort));
    }
    if let Some((path, None)) = &level {
        switches.push((path.clone(), false));
    }
    if let Some((on, off)) = opposites(&switches) {
        return Err(conflict(off, format!("{on} switches thinking on and {off} switches it off: send one of them")));
    }
    let effort = level.as_ref().and_then(|(_, effort)| *effort);
    let is_on = switches.first().map_or(effort.is_some() || defaults.thinking, |(_, on)| *on);

    let mut budget = None;
    for field in [
        body.get("thinking_budget"),
        thinking.as_ref().and_then(|fields| fields.get("budget_tokens")),
        kwargs.as_ref().and_then(|fields| fields.get("thinking_budget")),
    ] {
        let Some(field) = field else { continue };
        let tokens = field.integer(0..=u32::MAX.into())? as u64;
        if budget.is_some_and(|before| before != tokens) {
            return Err(conflict(field.path(), format!("{} contradicts another thinking budget", field.path())));
        }
        budget = Some(tokens);
    }
    let include = flag(body, "include_reasoning")?.unwrap_or(true);
    let exclude = reasoning.as_ref().map(|fields| flag(fields, "exclude")).transpose()?.flatten().unwrap_or(false);
    Ok(Reasoning {
        thinking: if is_on { Thinking::On(effort.unwrap_or(defaults.effort)) } else { Thinking::Off },
        budget,
        include: include && !exclude,
    })
}

fn opposites(switches: &[(String, bool)]) -> Option<(&str, &str)> {
    let find = |wanted: bool| switches.iter().find(|(_, on)| *on == wanted).map(|(path, _)| path.as_str());
    find(true).zip(find(false))
}

/// A level of reasoning effort; `None` switches reasoning off.
///
/// # Errors
/// Names the levels for anything else.
pub fn read_effort(field: &Field<'_>) -> Result<Option<Effort>, BodyError> {
    let digits = match field.value() {
        Value::String(name) => match parse_effort(name) {
            Some(effort) => return Ok(effort),
            None => None,
        },
        Value::Number(digits) => effort_number(digits),
        _ => None,
    };
    digits.map(Some).ok_or_else(|| field.wrong_value(EFFORTS))
}

/// What a reasoning effort may be, for messages.
pub const EFFORTS: &str = "\"none\", \"minimal\", \"low\", \"medium\", \"high\", \"xhigh\", \"max\", \"ultra\" or an \
                           integer from 1 to 100";

/// The level called `name`, or the number in its digits; `Some(None)` switches reasoning off.
pub fn parse_effort(name: &str) -> Option<Option<Effort>> {
    Some(match name {
        "none" => None,
        "minimal" | "low" => Some(Effort::Low),
        "medium" | "high" => Some(Effort::High),
        "xhigh" => Some(Effort::Xhigh),
        "max" | "ultra" => Some(Effort::Max),
        digits => Some(effort_number(digits)?),
    })
}

fn effort_number(digits: &str) -> Option<Effort> {
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse::<u8>().ok().filter(|number| is_plain && (1..=Effort::NUMBER_MAX).contains(number))?;
    Some(Effort::Number(number))
}
