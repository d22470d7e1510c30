//! Splits a reply, as it arrives, into reasoning, content and tool calls.
//!
//! Three stages, each independent of how the reply is cut into pieces: tokens or raw text become characters and
//! markers; a state machine says what each of them is (reasoning, content or the markup of a call); and an output stage
//! looks for stop strings in each of the three and shows what is decided. Text that may be the start of markup or of a
//! stop string waits.
//!
//! Markers are matched by token id; in raw text, by their spelling. Only the exact encoding is a call: look-alikes with
//! other bars or older tag names are text. Markup that is damaged is read as far as it can be and counted.

use std::collections::VecDeque;

use crate::TokenId;
use crate::chat::{Marker, ParseStart};
use crate::detokenizer::Detokenizer;
use crate::json;
use crate::stop::StopMatcher;
use crate::tokenizer::Tokenizer;

/// Longest name and attributes of one tag, in characters; a longer one is no tag.
const HEADER_CHARS_MAX: usize = 4096;

/// The bar of the markers. Two of them in a row are no marker of ours.
const BAR: char = '｜';

/// A piece of the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Reasoning {
        text: String,
        /// Places in the reply of the tokens that are first shown here; empty for raw text.
        tokens: Vec<u32>,
    },
    Content {
        text: String,
        /// As for reasoning.
        tokens: Vec<u32>,
    },
    CallStart {
        index: usize,
        id: String,
        name: String,
    },
    /// Joined, the pieces of one call are its arguments.
    CallArguments {
        index: usize,
        text: String,
    },
}

/// Why the engine ended the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An end token, a stop token.
    Stop,
    /// The token limit or the end of the window.
    Length,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

impl FinishReason {
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        }
    }
}

/// What is known when the reply has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishReason,
    /// The stop string that ended the reply.
    pub stop: Option<String>,
    /// Tokens that belong to the reply; those after a stop string do not.
    pub token_count: u32,
    /// Tokens up to and including the end of the reasoning.
    pub reasoning_token_count: u32,
    /// The reply ends inside a call.
    pub incomplete_call: bool,
    /// Places where markup was not as the format has it.
    pub malformed_markup: u32,
    /// Bytes of a character that the end cut.
    pub withheld: Vec<u8>,
}

/// Makes the ids of tool calls: `call_` and 24 characters, distinct for distinct seeds.
#[derive(Clone, Copy, Debug)]
pub struct CallIds {
    seed: u64,
}

impl CallIds {
    pub fn new(seed: u64) -> CallIds {
        CallIds { seed }
    }

    /// Ids of one of several choices; choice 0 keeps these.
    pub fn of_choice(self, choice: u32) -> CallIds {
        CallIds { seed: self.seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e6c_63d0_876a_68d5)) }
    }

    fn id(self, index: usize) -> String {
        const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        const ID_CHARS: usize = 24;
        let mut state = self.seed ^ (index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let mut id = String::from("call_");
        for _ in 0..ID_CHARS {
            // SplitMix64: a counter through a bijective mix.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^= mixed >> 31;
            id.push(char::from(DIGITS[(mixed % 62) as usize]));
        }
        id
    }
}

/// How a reply is read.
#[derive(Clone, Debug)]
pub struct ReplyOptions {
    pub start: ParseStart,
    /// `false` for routes where text is text: everything is content.
    pub parse: bool,
    /// `false` where no call is wanted: the marker of calls is dropped and what stands around it is text.
    pub calls: bool,
    pub stops: Vec<String>,
    /// Shows the stop string too.
    pub include_stop: bool,
    /// The end token does not end the reply.
    pub ignore_end: bool,
    pub call_ids: CallIds,
}

impl ReplyOptions {
    pub fn new(start: ParseStart) -> ReplyOptions {
        ReplyOptions {
            start,
            parse: true,
            calls: true,
            stops: Vec::new(),
            include_stop: false,
            ignore_end: false,
            call_ids: CallIds::new(0),
        }
    }
}

/// Reads one reply.
#[derive(Debug)]
pub struct ReplyStream {
    input: Input,
    parser: Parser,
    output: Output,
    ignore_end: bool,
    reads_calls: bool,
    token_count: u32,
    /// Number of tokens when the end token came.
    ended_at: Option<u32>,
}

impl ReplyStream {
    pub fn new(options: ReplyOptions) -> ReplyStream {
        ReplyStream {
            input: Input::default(),
            parser: Parser::new(options.start, options.parse),
            output: Output::new(&options),
            ignore_end: options.ignore_end,
            reads_calls: options.calls,
            token_count: 0,
            ended_at: None,
        }
    }

    /// Takes the next token. An id outside the vocabulary has no text.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, id: TokenId) -> Vec<Delta> {
        let place = self.token_count;
        self.token_count += 1;
        let span = Span { first: place, end: self.token_count };
        let marker = tokenizer.markers().of(id);
        let mut symbols = Vec::new();
        match marker {
            Some(Marker::EndOfSentence) if self.ignore_end => self.input.interrupt(span, &mut symbols),
            Some(Marker::EndOfSentence) => {
                if !self.has_ended() {
                    self.close();
                    self.ended_at = Some(self.token_count).filter(|_| self.output.stopped.is_none());
                }
            }
            Some(Marker::Dsml) if !self.reads_calls => self.input.interrupt(span, &mut symbols),
            Some(marker @ (Marker::ThinkStart | Marker::ThinkEnd | Marker::Dsml)) => {
                self.input.interrupt(span, &mut symbols);
                symbols.push(Symbol { piece: Piece::Marker(marker), span });
            }
            _ if tokenizer.is_special(id) => self.input.interrupt(span, &mut symbols),
            _ => self.input.push_bytes(tokenizer.token_bytes(id).unwrap_or_default(), span, &mut symbols),
        }
        self.feed(symbols);
        self.output.take()
    }

    /// Takes a piece of raw text, in which the spelling of a marker is the marker.
    pub fn push_text(&mut self, text: &str) -> Vec<Delta> {
        let mut symbols = Vec::new();
        self.input.push_text(text, false, &mut symbols);
        self.feed(symbols);
        self.output.take()
    }

    /// Whether the reply has ended: an end token came, or a stop string. What is pushed afterwards is dropped.
    pub fn has_ended(&self) -> bool {
        self.ended_at.is_some() || self.output.stopped.is_some()
    }

    /// The stop string that has ended the reply.
    pub fn stop(&self) -> Option<&str> {
        self.output.stopped.as_ref().map(|stopped| stopped.stop.as_str())
    }

    /// Whether the next token belongs to an open reasoning, as far as the reply is decided.
    pub fn is_in_reasoning(&self) -> bool {
        matches!(self.parser.state, State::Reasoning { .. } | State::Lost { in_reasoning: true }) && !self.has_ended()
    }

    /// The engine has ended the reply. A stop string or an end token that came before decides over `end`.
    pub fn finish(mut self, end: End) -> (Vec<Delta>, Finish) {
        if !self.has_ended() {
            let mut symbols = Vec::new();
            self.input.push_text("", true, &mut symbols);
            self.feed(symbols);
        }
        if !self.has_ended() {
            self.close();
        }
        let withheld =
            if self.output.stopped.is_some() { Vec::new() } else { self.input.detokenizer.withheld().to_vec() };
        let stopped = self.output.stopped.take();
        let (incomplete_call, token_count, stop) = match stopped {
            Some(stopped) => (stopped.inside_call, stopped.token_count, Some(stopped.stop)),
            None => {
                let count = self.ended_at.unwrap_or(self.token_count);
                (self.output.open_call || self.parser.cut_inside_call, count, None)
            }
        };
        let cause = match end {
            End::Length if stop.is_none() && self.ended_at.is_none() => FinishReason::Length,
            End::Length | End::Stop => FinishReason::Stop,
        };
        let finish = Finish {
            reason: if self.output.whole_calls > 0 && !incomplete_call { FinishReason::ToolCalls } else { cause },
            token_count,
            reasoning_token_count: match self.output.reasoning_end {
                Some(count) => count.min(token_count),
                None if self.parser.started_in_reasoning => token_count,
                None => 0,
            },
            incomplete_call,
            malformed_markup: self.parser.malformed + self.output.malformed,
            withheld,
            stop,
        };
        (self.output.take(), finish)
    }

    fn feed(&mut self, symbols: Vec<Symbol>) {
        for symbol in symbols {
            if self.has_ended() {
                return;
            }
            if symbol.piece == Piece::Marker(Marker::EndOfSentence) {
                if !self.ignore_end {
                    self.close();
                    self.ended_at = Some(self.token_count).filter(|_| self.output.stopped.is_none());
                }
                continue;
            }
            self.parser.push(symbol, &mut self.output);
        }
    }

    /// Nothing more comes: decides what waits.
    fn close(&mut self) {
        self.parser.drain(&mut self.output);
        self.output.flush();
        if let Some(first) = self.input.tail_first.filter(|_| self.output.stopped.is_none()) {
            // The end token itself has no part in the character that was cut.
            let end = first + self.input.tail_tokens;
            self.output.show_tail(self.parser.channel(), Span { first, end });
        }
    }
}

/// Tokens that a character was made of: half-open, empty for raw text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    first: u32,
    end: u32,
}

impl Span {
    const NONE: Span = Span { first: 0, end: 0 };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Char(char),
    Marker(Marker),
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    piece: Piece,
    span: Span,
}

/// First stage: tokens or text to characters and markers.
#[derive(Debug, Default)]
struct Input {
    detokenizer: Detokenizer,
    /// The token that began the unfinished character, and how many tokens it has so far.
    tail_first: Option<u32>,
    tail_tokens: u32,
    /// Raw text that may be the beginning of a marker.
    raw: String,
}

/// Markers that raw text can contain.
const RAW_MARKERS: [Marker; 4] = [Marker::ThinkStart, Marker::ThinkEnd, Marker::Dsml, Marker::EndOfSentence];

impl Input {
    fn push_bytes(&mut self, bytes: &[u8], span: Span, out: &mut Vec<Symbol>) {
        let mut text = String::new();
        self.detokenizer.push(bytes, &mut text);
        self.emit(&text, span, out);
        if self.detokenizer.withheld().is_empty() {
            self.tail_first = None;
        } else {
            let first = *self.tail_first.get_or_insert(span.first);
            self.tail_tokens = span.end - first;
        }
    }

    fn interrupt(&mut self, span: Span, out: &mut Vec<Symbol>) {
        let mut text = String::new();
        self.detokenizer.interrupt(&mut text);
        self.emit(&text, Span { first: span.first, end: span.first }, out);
        self.tail_first = None;
    }

    /// The first character takes the tokens of the unfinished one before it.
    fn emit(&mut self, text: &str, span: Span, out: &mut Vec<Symbol>) {
        for character in text.chars() {
            let first = self.tail_first.take().unwrap_or(span.first);
            out.push(Symbol { piece: Piece::Char(character), span: Span { first, end: span.end } });
        }
    }

    fn push_text(&mut self, text: &str, ended: bool, out: &mut Vec<Symbol>) {
        self.raw.push_str(text);
        let mut at = 0;
        while let Some(character) = self.raw[at..].chars().next() {
            let rest = &self.raw[at..];
            let marker = RAW_MARKERS.into_iter().find(|marker| rest.starts_with(marker.spelling()));
            if let Some(marker) = marker {
                out.push(Symbol { piece: Piece::Marker(marker), span: Span::NONE });
                at += marker.spelling().len();
            } else if !ended && RAW_MARKERS.into_iter().any(|marker| marker.spelling().starts_with(rest)) {
                break;
            } else {
                out.push(Symbol { piece: Piece::Char(character), span: Span::NONE });
                at += character.len_utf8();
            }
        }
        self.raw.drain(..at);
    }
}

/// Which part of the message a character belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Content,
    Markup,
}

/// What a piece of markup does to the message.
#[derive(Clone, Debug, PartialEq)]
enum Effect {
    None,
    ReasoningEnd,
    CallStart(String),
    Arguments(String),
    /// What stands in front of a value that is JSON as written, its characters, and its end.
    RawStart(String),
    Raw(char),
    RawEnd,
    CallEnd,
}

#[derive(Debug)]
struct Item {
    channel: Channel,
    /// `None` only carries an effect.
    character: Option<char>,
    shown: bool,
    span: Span,
    effect: Effect,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    /// `fresh`: nothing but newlines so far.
    Reasoning {
        fresh: bool,
    },
    Content {
        fresh: bool,
    },
    /// Unknown markup has ended the text; a call that follows is still read.
    Lost {
        in_reasoning: bool,
    },
    /// Inside the block, between calls.
    Block,
    /// After `<D invoke name="`.
    InvokeHeader {
        text: String,
    },
    /// Inside a call, between parameters.
    Invoke {
        parameters: usize,
        after_value: bool,
    },
    /// After `<D parameter name="`.
    ParameterHeader {
        parameters: usize,
        text: String,
    },
    Value {
        parameters: usize,
        is_string: bool,
    },
    /// The block is closed: what follows is dropped.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    OpenCalls,
    OpenInvoke,
    OpenParameter,
    CloseCalls,
    CloseInvoke,
    CloseParameter,
}

const OPEN_TAGS: [(Tag, &str); 3] =
    [(Tag::OpenCalls, " calls>"), (Tag::OpenInvoke, " invoke name=\""), (Tag::OpenParameter, " parameter name=\"")];
const CLOSE_TAGS: [(Tag, &str); 3] =
    [(Tag::CloseCalls, " calls>"), (Tag::CloseInvoke, " invoke>"), (Tag::CloseParameter, " parameter>")];

/// What stands at a `<`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Not decided yet. With `marker`, the marker has been seen, so it is no text.
    More {
        marker: bool,
        closing: bool,
    },
    Text,
    Tag {
        tag: Tag,
        length: usize,
    },
    /// A marker that no known tag follows.
    Unknown {
        closing: bool,
        next: Option<Piece>,
    },
}

/// Second stage: says what each character and marker is.
#[derive(Debug)]
struct Parser {
    state: State,
    parse: bool,
    pending: VecDeque<Symbol>,
    started_in_reasoning: bool,
    malformed: u32,
    /// Newlines at the front of `pending` that were counted already, so that a flood of them is counted once.
    newlines: usize,
    /// Skipped text inside a block is counted once a run.
    in_junk: bool,
    cut_inside_call: bool,
    /// The character of content or reasoning before the pending ones.
    previous: Option<char>,
}

impl Parser {
    fn new(start: ParseStart, parse: bool) -> Parser {
        let state = match start {
            _ if !parse => State::Content { fresh: false },
            ParseStart::Reasoning => State::Reasoning { fresh: true },
            ParseStart::ReasoningContinued => State::Reasoning { fresh: false },
            ParseStart::Content => State::Content { fresh: true },
            ParseStart::ContentContinued => State::Content { fresh: false },
            ParseStart::Calls => State::Block,
        };
        Parser {
            started_in_reasoning: matches!(state, State::Reasoning { .. }),
            state,
            parse,
            pending: VecDeque::new(),
            malformed: 0,
            newlines: 0,
            in_junk: false,
            cut_inside_call: false,
            previous: None,
        }
    }

    fn push(&mut self, symbol: Symbol, out: &mut Output) {
        self.pending.push_back(symbol);
        while !self.pending.is_empty() && self.step(false, out) {}
    }

    /// Nothing more comes: decides what waits.
    fn drain(&mut self, out: &mut Output) {
        while !self.pending.is_empty() && self.step(true, out) {}
        match &self.state {
            State::InvokeHeader { text } => {
                self.cut_inside_call = true;
                if let Some((name, _)) = text.split_once('"') {
                    out.effect(Effect::CallStart(name.into()));
                }
            }
            State::ParameterHeader { parameters, text } => {
                let mut arguments = String::from(if *parameters == 0 { "{\"" } else { ", \"" });
                let key = text.split('"').next().unwrap_or_default();
                key.chars().for_each(|character| json::escape(character, &mut arguments));
                match text[key.len()..].len() {
                    0 => {}
                    1 => arguments.push('"'),
                    _ => arguments.push_str("\": "),
                }
                out.effect(Effect::Arguments(arguments));
            }
            State::Reasoning { .. }
            | State::Content { .. }
            | State::Lost { .. }
            | State::Block
            | State::Invoke { .. }
            | State::Value { .. }
            | State::Done => {}
        }
    }

    /// The part of the message that text would belong to now.
    fn channel(&self) -> Channel {
        match self.state {
            State::Reasoning { .. } => Channel::Reasoning,
            State::Content { .. } => Channel::Content,
            State::Lost { .. }
            | State::Block
            | State::InvokeHeader { .. }
            | State::Invoke { .. }
            | State::ParameterHeader { .. }
            | State::Value { .. }
            | State::Done => Channel::Markup,
        }
    }

    /// Consumes from the front of `pending`; `false` when more has to be seen first.
    fn step(&mut self, ended: bool, out: &mut Output) -> bool {
        let Some(&front) = self.pending.front() else { return false };
        if !self.parse {
            self.pending.pop_front();
            self.emit(Channel::Content, front, out);
            return true;
        }
        match self.state {
            State::Reasoning { fresh } | State::Content { fresh } => self.step_text(front, fresh, ended, out),
            State::Lost { in_reasoning } => self.step_lost(front, in_reasoning, ended, out),
            State::Block => self.step_block(front, ended, out),
            State::Invoke { parameters, .. } => self.step_invoke(front, parameters, ended, out),
            State::InvokeHeader { .. } | State::ParameterHeader { .. } => self.step_header(front, out),
            State::Value { parameters, is_string } => self.step_value(front, parameters, is_string, ended, out),
            State::Done => {
                self.pending.pop_front();
                true
            }
        }
    }

    fn step_text(&mut self, front: Symbol, fresh: bool, ended: bool, out: &mut Output) -> bool {
        let channel = self.channel();
        let in_reasoning = channel == Channel::Reasoning;
        match front.piece {
            Piece::Char('\n') if fresh => {
                self.pending.pop_front();
                true
            }
            Piece::Char('\n') => {
                // Newlines in front of a block of calls, or of the end of a reasoning, belong to the format.
                while self.pending.get(self.newlines).is_some_and(|symbol| symbol.piece == Piece::Char('\n')) {
                    self.newlines += 1;
                }
                let run = self.newlines;
                let shown = match self.pending.get(run).map(|symbol| symbol.piece) {
                    None if !ended => return false,
                    None => true,
                    Some(Piece::Char('<')) => match self.look(run) {
                        Look::More { marker: false, .. } if ended => true,
                        Look::More { .. } if !ended => return false,
                        Look::More { .. } => false,
                        Look::Tag { tag: Tag::OpenCalls | Tag::OpenInvoke | Tag::OpenParameter, .. } => false,
                        Look::Unknown { closing: false, next } => is_look_alike(next),
                        Look::Tag { .. } | Look::Unknown { closing: true, .. } | Look::Text => true,
                    },
                    Some(Piece::Marker(Marker::ThinkEnd)) => !in_reasoning,
                    Some(Piece::Char(_) | Piece::Marker(_)) => true,
                };
                for _ in 0..run {
                    self.take(channel, shown, Effect::None, out);
                }
                true
            }
            Piece::Char('<') => match self.look(0) {
                Look::More { .. } if !ended => false,
                Look::More { marker: true, closing } => {
                    // The end cut a tag: it is no text, and an opening one would have been a call.
                    self.cut_inside_call |= !closing;
                    self.take_all(Channel::Markup, out);
                    true
                }
                Look::More { marker: false, .. } | Look::Text => self.show(channel, out),
                Look::Tag { tag: tag @ (Tag::OpenCalls | Tag::OpenInvoke), length } => {
                    self.open(tag, length, in_reasoning, out);
                    true
                }
                Look::Tag { tag: Tag::OpenParameter, length } => {
                    self.lose(length, in_reasoning, out);
                    true
                }
                Look::Tag { tag: Tag::CloseCalls | Tag::CloseInvoke | Tag::CloseParameter, length } => {
                    self.malformed += 1;
                    self.skip(length, out);
                    true
                }
                Look::Unknown { closing: false, next } if !is_look_alike(next) => {
                    self.lose(2, in_reasoning, out);
                    true
                }
                Look::Unknown { closing, .. } => {
                    // As text, the marker too.
                    let length = if closing { 3 } else { 2 };
                    for _ in 0..length {
                        self.show(channel, out);
                    }
                    true
                }
            },
            Piece::Marker(Marker::ThinkEnd) => {
                let effect = if in_reasoning { Effect::ReasoningEnd } else { Effect::None };
                self.take(channel, false, effect, out);
                // After a stray mark the text goes on as it was.
                self.state = State::Content { fresh: in_reasoning };
                self.previous = None;
                true
            }
            Piece::Marker(Marker::Dsml) => match self.bare_marker(ended) {
                None => false,
                Some(0) => self.show(channel, out),
                Some(length) => {
                    self.malformed += 1;
                    self.skip(length, out);
                    true
                }
            },
            Piece::Char(_) | Piece::Marker(_) => self.show(channel, out),
        }
    }

    fn step_lost(&mut self, front: Symbol, in_reasoning: bool, ended: bool, out: &mut Output) -> bool {
        if front.piece == Piece::Char('<') {
            match self.look(0) {
                Look::More { .. } if !ended => return false,
                Look::Tag { tag: tag @ (Tag::OpenCalls | Tag::OpenInvoke), length } => {
                    self.open(tag, length, in_reasoning, out);
                    return true;
                }
                Look::More { .. } | Look::Text | Look::Tag { .. } | Look::Unknown { .. } => {}
            }
        }
        let ends_reasoning = in_reasoning && front.piece == Piece::Marker(Marker::ThinkEnd);
        self.take(Channel::Markup, false, if ends_reasoning { Effect::ReasoningEnd } else { Effect::None }, out);
        if ends_reasoning {
            self.state = State::Content { fresh: true };
        }
        true
    }

    fn step_block(&mut self, front: Symbol, ended: bool, out: &mut Output) -> bool {
        if front.piece == Piece::Char('<') {
            match self.look(0) {
                Look::More { .. } if !ended => return false,
                Look::More { marker: true, closing: false } => {
                    self.cut_inside_call = true;
                    self.take_all(Channel::Markup, out);
                    return true;
                }
                Look::Tag { tag: tag @ Tag::OpenInvoke, length } => {
                    self.open(tag, length, false, out);
                    return true;
                }
                Look::Tag { tag: Tag::CloseCalls, length } => {
                    self.skip(length, out);
                    self.state = State::Done;
                    return true;
                }
                Look::More { .. } | Look::Text | Look::Tag { .. } | Look::Unknown { .. } => {}
            }
        }
        self.junk(front, ended, out);
        true
    }

    fn step_invoke(&mut self, front: Symbol, parameters: usize, ended: bool, out: &mut Output) -> bool {
        if front.piece == Piece::Char('<') {
            let close = |parser: &mut Parser, out: &mut Output| {
                out.effect(Effect::Arguments(if parameters == 0 { "{}".into() } else { "}".into() }));
                out.effect(Effect::CallEnd);
                parser.state = State::Block;
                parser.in_junk = false;
            };
            match self.look(0) {
                Look::More { .. } if !ended => return false,
                Look::More { marker: true, closing } => {
                    self.take_all(Channel::Markup, out);
                    if closing && !matches!(self.state, State::Invoke { after_value: true, .. }) {
                        out.effect(Effect::Arguments(if parameters == 0 { "{}".into() } else { "}".into() }));
                    }
                    return true;
                }
                Look::Tag { tag: Tag::OpenParameter, length } => {
                    self.skip(length, out);
                    self.in_junk = false;
                    self.state = State::ParameterHeader { parameters, text: String::new() };
                    return true;
                }
                Look::Tag { tag: Tag::CloseParameter, length }
                    if matches!(self.state, State::Invoke { after_value: true, .. }) =>
                {
                    self.skip(length, out);
                    self.state = State::Invoke { parameters, after_value: false };
                    return true;
                }
                Look::Tag { tag: Tag::CloseInvoke, length } => {
                    self.malformed += u32::from(matches!(self.state, State::Invoke { after_value: true, .. }));
                    self.skip(length, out);
                    close(self, out);
                    return true;
                }
                Look::Tag { tag: Tag::CloseCalls, length } => {
                    self.malformed += 1;
                    self.skip(length, out);
                    close(self, out);
                    self.state = State::Done;
                    return true;
                }
                Look::Tag { tag: Tag::OpenInvoke, .. } => {
                    self.malformed += 1;
                    close(self, out);
                    return true;
                }
                Look::More { .. } | Look::Text | Look::Tag { .. } | Look::Unknown { .. } => {}
            }
        }
        self.junk(front, ended, out);
        true
    }

    fn step_header(&mut self, front: Symbol, out: &mut Output) -> bool {
        let (State::InvokeHeader { text } | State::ParameterHeader { text, .. }) = &mut self.state else {
            return false;
        };
        if front.piece == Piece::Marker(Marker::Dsml) || text.len() > HEADER_CHARS_MAX {
            // Another tag begins before this one is complete: read that one instead.
            let opening = ["</", "<"].into_iter().find(|opening| text.ends_with(opening)).unwrap_or_default();
            let span = front.span;
            self.malformed += 1;
            self.state = match self.state {
                State::ParameterHeader { parameters, .. } => State::Invoke { parameters, after_value: false },
                _ => State::Block,
            };
            for character in opening.chars().rev() {
                self.pending.push_front(Symbol { piece: Piece::Char(character), span });
            }
            return true;
        }
        match front.piece {
            Piece::Char(character) => text.push(character),
            Piece::Marker(marker) => text.push_str(marker.spelling()),
        }
        let Some(attributes) = text.strip_suffix("\">").map(str::to_owned) else {
            self.take(Channel::Markup, false, Effect::None, out);
            return true;
        };
        let (effect, next) = match self.state {
            State::ParameterHeader { parameters, .. } => {
                let (key, is_string, is_exact) = parameter(&attributes);
                self.malformed += u32::from(!is_exact);
                let mut arguments = String::from(if parameters == 0 { "{" } else { ", " });
                json::quote(key, &mut arguments);
                arguments.push_str(if is_string { ": \"" } else { ": " });
                let next = State::Value { parameters: parameters + 1, is_string };
                (if is_string { Effect::Arguments(arguments) } else { Effect::RawStart(arguments) }, next)
            }
            _ => (Effect::CallStart(attributes), State::Invoke { parameters: 0, after_value: false }),
        };
        self.take(Channel::Markup, false, effect, out);
        self.state = next;
        true
    }

    fn step_value(&mut self, front: Symbol, parameters: usize, is_string: bool, ended: bool, out: &mut Output) -> bool {
        if front.piece == Piece::Char('<') {
            match self.look(0) {
                Look::More { marker: false, .. } if !ended => return false,
                // A closing marker ends the value, whatever its name: the tag itself is read between the parameters.
                Look::More { marker: true, closing: true }
                | Look::Unknown { closing: true, .. }
                | Look::Tag { tag: Tag::CloseCalls | Tag::CloseInvoke | Tag::CloseParameter, .. } => {
                    out.effect(if is_string { Effect::Arguments("\"".into()) } else { Effect::RawEnd });
                    self.state = State::Invoke { parameters, after_value: true };
                    return true;
                }
                Look::More { .. } | Look::Text | Look::Tag { .. } | Look::Unknown { .. } => {}
            }
        }
        self.pending.pop_front();
        let mut push = |character: char| {
            let effect = if is_string {
                let mut text = String::new();
                json::escape(character, &mut text);
                Effect::Arguments(text)
            } else {
                Effect::Raw(character)
            };
            let character = Some(character);
            out.push(Item { channel: Channel::Markup, character, shown: false, span: front.span, effect });
        };
        match front.piece {
            Piece::Char(character) => push(character),
            Piece::Marker(marker) => marker.spelling().chars().for_each(push),
        }
        true
    }

    /// Reads what stands at the `<` in `pending[at]`.
    fn look(&self, at: usize) -> Look {
        let piece = |index: usize| self.pending.get(index).map(|symbol| symbol.piece);
        let closing = piece(at + 1) == Some(Piece::Char('/'));
        let marker = at + 1 + usize::from(closing);
        match piece(marker) {
            None => return Look::More { marker: false, closing },
            Some(Piece::Marker(Marker::Dsml)) => {}
            Some(_) => return Look::Text,
        }
        let mut is_prefix = false;
        for (tag, name) in if closing { CLOSE_TAGS } else { OPEN_TAGS } {
            let mut index = marker + 1;
            let agrees = name.chars().all(|character| match piece(index) {
                None => true,
                Some(seen) => {
                    index += 1;
                    seen == Piece::Char(character)
                }
            });
            if !agrees {
                continue;
            }
            if index == marker + 1 + name.chars().count() {
                return Look::Tag { tag, length: index - at };
            }
            is_prefix = true;
        }
        if is_prefix {
            return Look::More { marker: true, closing };
        }
        Look::Unknown { closing, next: piece(marker + 1) }
    }

    /// How many symbols to drop for a marker at the front without a `<`: none where it stands in prose.
    fn bare_marker(&self, ended: bool) -> Option<usize> {
        if self.previous == Some(BAR) || self.previous == Some('|') {
            return Some(0);
        }
        let mut waits = false;
        for name in [" calls>", " invoke", " parameter"] {
            let seen = self.pending.iter().skip(1).zip(name.chars());
            let agrees = seen.clone().all(|(symbol, character)| symbol.piece == Piece::Char(character));
            if agrees && seen.count() == name.chars().count() {
                return Some(1 + name.chars().count());
            }
            waits |= agrees;
        }
        if waits && !ended { None } else { Some(0) }
    }

    fn open(&mut self, tag: Tag, length: usize, in_reasoning: bool, out: &mut Output) {
        if in_reasoning {
            // The tag's own tokens are no longer reasoning.
            let first = self.pending.front().map_or(0, |symbol| symbol.span.first);
            out.end_reasoning(first);
        }
        let is_in_block = self.state == State::Block;
        self.skip(length, out);
        self.in_junk = false;
        self.state = match tag {
            Tag::OpenInvoke => {
                self.malformed += u32::from(!is_in_block);
                State::InvokeHeader { text: String::new() }
            }
            Tag::OpenCalls | Tag::OpenParameter | Tag::CloseCalls | Tag::CloseInvoke | Tag::CloseParameter => {
                State::Block
            }
        };
    }

    fn lose(&mut self, length: usize, in_reasoning: bool, out: &mut Output) {
        self.malformed += 1;
        self.skip(length, out);
        self.state = State::Lost { in_reasoning };
    }

    fn junk(&mut self, front: Symbol, ended: bool, out: &mut Output) {
        let is_space = matches!(front.piece, Piece::Char(character) if character.is_whitespace());
        // At the end this is a tag that was cut.
        if !is_space && !ended && !self.in_junk {
            self.in_junk = true;
            self.malformed += 1;
        }
        self.take(Channel::Markup, false, Effect::None, out);
    }

    fn skip(&mut self, length: usize, out: &mut Output) {
        for _ in 0..length {
            self.take(Channel::Markup, false, Effect::None, out);
        }
    }

    fn take_all(&mut self, channel: Channel, out: &mut Output) {
        while !self.pending.is_empty() {
            self.take(channel, false, Effect::None, out);
        }
    }

    fn show(&mut self, channel: Channel, out: &mut Output) -> bool {
        self.take(channel, true, Effect::None, out);
        true
    }

    /// Moves the front symbol to the output; `effect` belongs to its last character.
    fn take(&mut self, channel: Channel, shown: bool, effect: Effect, out: &mut Output) {
        let Some(symbol) = self.pending.pop_front() else { return };
        self.newlines = self.newlines.saturating_sub(1);
        if shown {
            self.emit(channel, symbol, out);
            return;
        }
        let span = symbol.span;
        let mut hide = |character: char, effect: Effect| {
            out.push(Item { channel, character: Some(character), shown: false, span, effect });
        };
        match symbol.piece {
            Piece::Char(character) => hide(character, effect),
            Piece::Marker(marker) => {
                let mut characters = marker.spelling().chars();
                let last = characters.next_back().unwrap_or(BAR);
                characters.for_each(|character| hide(character, Effect::None));
                hide(last, effect);
            }
        }
    }

    fn emit(&mut self, channel: Channel, symbol: Symbol, out: &mut Output) {
        if let State::Reasoning { fresh } | State::Content { fresh } = &mut self.state {
            *fresh = false;
        }
        let mut show = |character: char| {
            self.previous = Some(character);
            let span = symbol.span;
            out.push(Item { channel, character: Some(character), shown: true, span, effect: Effect::None });
        };
        match symbol.piece {
            Piece::Char(character) => show(character),
            Piece::Marker(marker) => marker.spelling().chars().for_each(show),
        }
    }
}

/// A marker in prose: a doubled bar, or a tag name without the space of this format.
fn is_look_alike(next: Option<Piece>) -> bool {
    matches!(next, Some(Piece::Char(character)) if character.is_alphanumeric() || character == BAR || character == '|')
}

/// Key, whether the value is a string, and whether the attributes are as the format has them.
fn parameter(attributes: &str) -> (&str, bool, bool) {
    if let Some(key) = attributes.strip_suffix("\" string=\"true") {
        return (key, true, true);
    }
    if let Some(key) = attributes.strip_suffix("\" string=\"false") {
        return (key, false, true);
    }
    // Without a word about its type, a value is text.
    (attributes.split('"').next().unwrap_or_default(), true, false)
}

#[derive(Debug)]
struct Stopped {
    stop: String,
    token_count: u32,
    inside_call: bool,
}

/// Third stage: stop strings, and the deltas.
#[derive(Debug)]
struct Output {
    stops: Vec<String>,
    matcher: StopMatcher,
    include_stop: bool,
    /// Items that may be the start of a stop string, all of one channel.
    queue: VecDeque<Item>,
    queue_characters: usize,
    channel: Option<Channel>,
    deltas: Vec<Delta>,
    /// Tokens below this place have been shown.
    next_token: u32,
    stopped: Option<Stopped>,
    call_ids: CallIds,
    call_count: usize,
    whole_calls: usize,
    open_call: bool,
    arguments: String,
    /// The value so far, while it has not shown whether it is JSON.
    held_raw: Option<String>,
    reasoning_end: Option<u32>,
    malformed: u32,
}

impl Output {
    fn new(options: &ReplyOptions) -> Output {
        Output {
            stops: options.stops.clone(),
            matcher: StopMatcher::new(&options.stops),
            include_stop: options.include_stop,
            queue: VecDeque::new(),
            queue_characters: 0,
            channel: None,
            deltas: Vec::new(),
            next_token: 0,
            stopped: None,
            call_ids: options.call_ids,
            call_count: 0,
            whole_calls: 0,
            open_call: false,
            arguments: String::new(),
            held_raw: None,
            reasoning_end: None,
            malformed: 0,
        }
    }

    fn take(&mut self) -> Vec<Delta> {
        std::mem::take(&mut self.deltas)
    }

    fn effect(&mut self, effect: Effect) {
        self.push(Item { channel: Channel::Markup, character: None, shown: false, span: Span::NONE, effect });
    }

    fn push(&mut self, item: Item) {
        if self.stopped.is_some() {
            return;
        }
        if self.matcher.is_empty() {
            self.release(item);
            return;
        }
        if self.channel != Some(item.channel) {
            self.release_to(0);
            self.matcher.reset();
            self.channel = Some(item.channel);
        }
        let (character, span, channel) = (item.character, item.span, item.channel);
        self.queue.push_back(item);
        let Some(character) = character else {
            self.release_to(self.matcher.held());
            return;
        };
        self.queue_characters += 1;
        match self.matcher.advance(character) {
            None => self.release_to(self.matcher.held()),
            Some(hit) => {
                self.release_to(if self.include_stop { 0 } else { hit.length });
                self.queue.clear();
                self.stopped = Some(Stopped {
                    stop: self.stops[hit.stop].clone(),
                    token_count: span.end,
                    inside_call: channel == Channel::Markup && (self.open_call || self.whole_calls == 0),
                });
                self.end_raw_as_it_is();
            }
        }
    }

    /// Shows what waits: no stop string can complete any more.
    fn flush(&mut self) {
        if self.stopped.is_none() {
            self.release_to(0);
            self.end_raw_as_it_is();
        }
    }

    /// Releases items until `held` characters are left.
    fn release_to(&mut self, held: usize) {
        while self.queue_characters > held
            || (held == 0 && !self.queue.is_empty())
            || self.queue.front().is_some_and(|item| item.character.is_none())
        {
            let Some(item) = self.queue.pop_front() else { return };
            self.queue_characters -= usize::from(item.character.is_some());
            self.release(item);
        }
    }

    fn release(&mut self, item: Item) {
        if let Some(character) = item.character.filter(|_| item.shown) {
            let tokens = self.next_token.max(item.span.first)..item.span.end;
            self.next_token = self.next_token.max(item.span.end);
            self.show(item.channel, Some(character), tokens);
        }
        match item.effect {
            Effect::None => {}
            Effect::ReasoningEnd => self.end_reasoning(item.span.end),
            Effect::CallStart(name) => {
                let index = self.call_count;
                self.call_count += 1;
                self.open_call = true;
                self.arguments.clear();
                self.deltas.push(Delta::CallStart { index, id: self.call_ids.id(index), name });
            }
            Effect::Arguments(text) => self.add_arguments(&text),
            Effect::RawStart(text) => {
                self.add_arguments(&text);
                self.held_raw = Some(String::new());
            }
            Effect::Raw(character) => self.add_raw(character),
            Effect::RawEnd => {
                if let Some(value) = self.held_raw.take() {
                    // As written where it is JSON; else the model forgot to say that it is text.
                    if serde_json::from_str::<serde::de::IgnoredAny>(&value).is_ok() {
                        self.add_arguments(&value);
                    } else {
                        self.malformed += 1;
                        let mut quoted = String::new();
                        json::quote(&value, &mut quoted);
                        self.add_arguments(&quoted);
                    }
                }
            }
            Effect::CallEnd => {
                self.open_call = false;
                self.whole_calls += 1;
                let is_json = serde_json::from_str::<serde::de::IgnoredAny>(&self.arguments).is_ok();
                self.malformed += u32::from(!is_json);
            }
        }
    }

    /// Lists, objects and strings are shown as they come; a number or a word could still turn out to be text.
    fn add_raw(&mut self, character: char) {
        let Some(raw) = &mut self.held_raw else {
            self.add_arguments(character.encode_utf8(&mut [0; 4]));
            return;
        };
        raw.push(character);
        if matches!(raw.trim_start().chars().next(), Some('{' | '[' | '"')) {
            self.end_raw_as_it_is();
        }
    }

    fn end_raw_as_it_is(&mut self) {
        if let Some(raw) = self.held_raw.take() {
            self.add_arguments(&raw);
        }
    }

    fn add_arguments(&mut self, text: &str) {
        let Some(index) = self.call_count.checked_sub(1) else { return };
        if text.is_empty() {
            return;
        }
        self.arguments.push_str(text);
        match self.deltas.last_mut() {
            Some(Delta::CallArguments { index: last, text: before }) if *last == index => before.push_str(text),
            _ => self.deltas.push(Delta::CallArguments { index, text: text.into() }),
        }
    }

    fn end_reasoning(&mut self, token_count: u32) {
        self.reasoning_end.get_or_insert(token_count);
    }

    /// Tokens of a character that was cut have rows but no text.
    fn show_tail(&mut self, channel: Channel, span: Span) {
        let tokens = self.next_token.max(span.first)..span.end;
        self.next_token = span.end;
        self.show(channel, None, tokens);
    }

    fn show(&mut self, channel: Channel, character: Option<char>, places: std::ops::Range<u32>) {
        match (self.deltas.last_mut(), channel) {
            (Some(Delta::Reasoning { text, tokens }), Channel::Reasoning)
            | (Some(Delta::Content { text, tokens }), Channel::Content) => {
                text.extend(character);
                tokens.extend(places);
            }
            (_, Channel::Reasoning) => {
                self.deltas.push(Delta::Reasoning { text: character.into_iter().collect(), tokens: places.collect() });
            }
            (_, Channel::Content) => {
                self.deltas.push(Delta::Content { text: character.into_iter().collect(), tokens: places.collect() });
            }
            (_, Channel::Markup) => {}
        }
    }
}
