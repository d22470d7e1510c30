//! A conversation, and the prompt it becomes.
//!
//! A [`Request`] says who said what and how to answer; [`encode`] turns it into a [`Prompt`]: spans of plain text and
//! markers in turn. Text from a caller stays text whatever it spells, because markers are separate segments from the
//! start. One module per model family writes the format; today that is [`deepseek_v41`].

pub mod deepseek_v41;
pub mod openai;

use crate::TokenId;
use crate::json::Value;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// A control token of the chat format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Marker {
    BeginOfSentence,
    EndOfSentence,
    System,
    User,
    Assistant,
    LatestReminder,
    ThinkStart,
    ThinkEnd,
    Dsml,
    Image,
}

impl Marker {
    pub const ALL: [Marker; 10] = [
        Marker::BeginOfSentence,
        Marker::EndOfSentence,
        Marker::System,
        Marker::User,
        Marker::Assistant,
        Marker::LatestReminder,
        Marker::ThinkStart,
        Marker::ThinkEnd,
        Marker::Dsml,
        Marker::Image,
    ];

    /// The text of the token in `tokenizer.json`.
    pub fn spelling(self) -> &'static str {
        match self {
            Marker::BeginOfSentence => "<｜begin▁of▁sentence｜>",
            Marker::EndOfSentence => "<｜end▁of▁sentence｜>",
            Marker::System => "<｜System｜>",
            Marker::User => "<｜User｜>",
            Marker::Assistant => "<｜Assistant｜>",
            Marker::LatestReminder => "<｜latest_reminder｜>",
            Marker::ThinkStart => "<think>",
            Marker::ThinkEnd => "</think>",
            Marker::Dsml => "｜DSML｜",
            Marker::Image => "<｜deepseek_image｜>",
        }
    }
}

/// How thorough the reasoning is asked to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    Low,
    High,
    Xhigh,
    Max,
    /// 1 to 100.
    Number(u8),
}

impl Effort {
    pub const NUMBER_MAX: u8 = 100;

    /// The number that the prompt shows.
    pub fn value(self) -> u8 {
        match self {
            Effort::Low => 50,
            Effort::High | Effort::Xhigh => 75,
            Effort::Max => 100,
            Effort::Number(number) => number,
        }
    }

    /// The level's name, or the number in digits.
    pub fn name(self) -> String {
        match self {
            Effort::Low => "low".into(),
            Effort::High => "high".into(),
            Effort::Xhigh => "xhigh".into(),
            Effort::Max => "max".into(),
            Effort::Number(number) => number.to_string(),
        }
    }
}

/// Whether the reply opens with reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    Off,
    On(Effort),
}

impl Thinking {
    pub fn is_on(self) -> bool {
        self != Thinking::Off
    }
}

/// A piece of a message's content.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    Text(String),
    Image {
        /// Address of the image, as the request gave it.
        url: String,
    },
}

impl Part {
    pub fn text(text: impl Into<String>) -> Vec<Part> {
        vec![Part::Text(text.into())]
    }
}

/// One turn of the conversation as the caller sent it.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    System {
        content: Vec<Part>,
    },
    User {
        content: Vec<Part>,
    },
    Assistant {
        content: Vec<Part>,
        reasoning: String,
        tool_calls: Vec<ToolCall>,
        /// The reply continues this message. Only the last message can be one.
        prefix: bool,
    },
    Tool {
        content: Vec<Part>,
        /// The call that this answers; `None` where the request named none.
        call_id: Option<String>,
    },
    LatestReminder {
        content: Vec<Part>,
    },
}

/// A call of an earlier reply.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// A JSON object as text; anything else is shown as one parameter called `arguments`.
    pub arguments: String,
}

/// A function on offer.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments; an empty object where there is none.
    pub parameters: Value,
    /// Argument values are held to the schema.
    pub strict: bool,
}

/// Whether the reply may or must call a tool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolChoice {
    pub mode: ToolMode,
    /// The only names that may be called; `None` is any on offer.
    pub allowed: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolMode {
    /// The tools are not shown.
    None,
    #[default]
    Auto,
    /// The reply is a call.
    Required,
}

/// The form that the answer must have.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    #[default]
    Text,
    JsonObject,
    JsonSchema {
        name: String,
        schema: Value,
    },
}

/// A conversation and how to answer it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// At least one.
    pub messages: Vec<Message>,
    pub tools: Vec<Tool>,
    pub tool_choice: ToolChoice,
    pub parallel_tool_calls: bool,
    pub response_format: ResponseFormat,
    pub thinking: Thinking,
    /// Whether the prompt ends with the header of the reply.
    pub add_generation_prompt: bool,
}

impl Request {
    /// The only tool that a reply can call, where it must call one.
    pub fn forced_tool(&self) -> Option<&str> {
        match (self.tool_choice.mode, &self.tool_choice.allowed, self.tools.as_slice()) {
            (ToolMode::Required, Some(allowed), _) if allowed.len() == 1 => Some(&allowed[0]),
            (ToolMode::Required, None, [tool]) => Some(&tool.name),
            (ToolMode::Required | ToolMode::Auto | ToolMode::None, _, _) => None,
        }
    }

    /// Tools that the prompt shows.
    pub fn shown_tools(&self) -> &[Tool] {
        if self.tool_choice.mode == ToolMode::None { &[] } else { &self.tools }
    }

    /// The last message is an assistant message that the reply continues.
    pub fn continues(&self) -> bool {
        matches!(self.messages.last(), Some(Message::Assistant { prefix: true, .. }))
    }
}

/// Why a conversation cannot become a prompt.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ChatError {
    #[error("messages is empty: at least one message is needed")]
    NoMessages,
    #[error("messages[{index}] is to be continued, but only the last message can be: drop its prefix")]
    PrefixNotLast { index: usize },
    #[error(
        "messages[{index}] is to be continued and has tool_calls: a message with calls is complete; drop one of the two"
    )]
    PrefixWithCalls { index: usize },
    #[error("tool_choice asks for a call and the last message is to be continued: drop one of the two")]
    ForcedCallWithPrefix,
    #[error("tool_choice asks for a call, but no tools are given")]
    ForcedCallWithoutTools,
}

/// A run of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Encoded without added tokens, whatever it spells. Never empty, never beside another text.
    Text(String),
    Marker(Marker),
}

/// Where in the format the reply begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseStart {
    /// A new reasoning; its leading newlines are dropped.
    Reasoning,
    /// An open reasoning goes on; leading newlines belong to it.
    ReasoningContinued,
    /// A new answer; its leading newlines are dropped.
    Content,
    /// An open answer goes on; leading newlines belong to it.
    ContentContinued,
    /// Inside a block of calls that the prompt opened.
    Calls,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub segments: Vec<Segment>,
    /// Addresses of the images, in the order of their markers.
    pub images: Vec<String>,
    pub start: ParseStart,
    /// What the reply's answer begins with where a call is asked for: after its reasoning, or at once without one.
    pub opening: Vec<Segment>,
}

impl Prompt {
    /// The prompt as text.
    pub fn text(&self) -> String {
        self.segments
            .iter()
            .map(|segment| match segment {
                Segment::Text(text) => text.as_str(),
                Segment::Marker(marker) => marker.spelling(),
            })
            .collect()
    }

    /// Half-open ranges of [`Prompt::text`] that are markers, in characters (code points).
    pub fn special_ranges(&self) -> Vec<(usize, usize)> {
        let mut at = 0;
        let mut ranges = Vec::new();
        for segment in &self.segments {
            match segment {
                Segment::Text(text) => at += text.chars().count(),
                Segment::Marker(marker) => {
                    let end = at + marker.spelling().chars().count();
                    ranges.push((at, end));
                    at = end;
                }
            }
        }
        ranges
    }

    /// Tokens that it has at the least; see [`Tokenizer::least_tokens`].
    pub fn least_tokens(&self, tokenizer: &Tokenizer) -> usize {
        let least = |segment: &Segment| match segment {
            Segment::Marker(_) => 1,
            Segment::Text(text) => tokenizer.least_tokens(text),
        };
        self.segments.iter().map(least).sum()
    }

    /// The ids that the model reads.
    pub fn token_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, TokenizerError> {
        tokenizer.encode_segments(&self.segments)
    }

    /// The ids that the reply's answer begins with.
    pub fn opening_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, TokenizerError> {
        tokenizer.encode_segments(&self.opening)
    }
}

/// Renders a conversation.
///
/// # Errors
/// [`ChatError`] for what the format cannot express.
pub fn encode(request: &Request) -> Result<Prompt, ChatError> {
    deepseek_v41::encode(request)
}
