//! Second stage of reading a reply: what each character is (reasoning, content, the markup of a call), and what markup
//! does to the message.

use std::collections::VecDeque;

use super::ParseStart;
use super::input::{Piece, Span, Symbol};
use super::output::Output;
use crate::chat::Marker;
use crate::json;

/// Longest name and attributes of one tag, in characters; a longer one is no tag.
const HEADER_CHARS_MAX: usize = 4096;

/// The bar of the markers. Two of them in a row are no marker of ours.
const BAR: char = '｜';

/// Which part of the message a character belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    Reasoning,
    Content,
    Markup,
}

/// What a piece of markup does to the message.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Effect {
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
pub(super) struct Item {
    pub(super) channel: Channel,
    /// `None` only carries an effect.
    pub(super) character: Option<char>,
    pub(super) shown: bool,
    pub(super) span: Span,
    pub(super) effect: Effect,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum State {
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
pub(super) enum Tag {
    OpenCalls,
    OpenInvoke,
    OpenParameter,
    CloseCalls,
    CloseInvoke,
    CloseParameter,
}

pub(super) const OPEN_TAGS: [(Tag, &str); 3] =
    [(Tag::OpenCalls, " calls>"), (Tag::OpenInvoke, " invoke name=\""), (Tag::OpenParameter, " parameter name=\"")];
pub(super) const CLOSE_TAGS: [(Tag, &str); 3] =
    [(Tag::CloseCalls, " calls>"), (Tag::CloseInvoke, " invoke>"), (Tag::CloseParameter, " parameter>")];

/// What stands at a `<`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
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
pub(super) struct Parser {
    pub(super) state: State,
    pub(super) parse: bool,
    pub(super) pending: VecDeque<Symbol>,
    pub(super) started_in_reasoning: bool,
    pub(super) malformed: u32,
    /// Newlines at the front of `pending` that were counted already, so that a flood of them is counted once.
    pub(super) newlines: usize,
    /// Skipped text inside a block is counted once a run.
    pub(super) in_junk: bool,
    pub(super) cut_inside_call: bool,
    /// The character of content or reasoning before the pending ones.
    pub(super) previous: Option<char>,
}

impl Parser {
    pub(super) fn new(start: ParseStart, parse: bool) -> Parser {
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

    pub(super) fn push(&mut self, symbol: Symbol, out: &mut Output) {
        self.pending.push_back(symbol);
        while !self.pending.is_empty() && self.step(false, out) {}
    }

    /// Nothing more comes: decides what waits.
    pub(super) fn drain(&mut self, out: &mut Output) {
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
    pub(super) fn channel(&self) -> Channel {
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
    pub(super) fn step(&mut self, ended: bool, out: &mut Output) -> bool {
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

    pub(super) fn step_text(&mut self, front: Symbol, fresh: bool, ended: bool, out: &mut Output) -> bool {
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

    pub(super) fn step_lost(&mut self, front: Symbol, in_reasoning: bool, ended: bool, out: &mut Output) -> bool {
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

    pub(super) fn step_block(&mut self, front: Symbol, ended: bool, out: &mut Output) -> bool {
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

    pub(super) fn step_invoke(&mut self, front: Symbol, parameters: usize, ended: bool, out: &mut Output) -> bool {
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

    pub(super) fn step_header(&mut self, front: Symbol, out: &mut Output) -> bool {
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

    pub(super) fn step_value(
        &mut self,
        front: Symbol,
        parameters: usize,
        is_string: bool,
        ended: bool,
        out: &mut Output,
    ) -> bool {
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
    pub(super) fn look(&self, at: usize) -> Look {
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
    pub(super) fn bare_marker(&self, ended: bool) -> Option<usize> {
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

    pub(super) fn open(&mut self, tag: Tag, length: usize, in_reasoning: bool, out: &mut Output) {
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

    pub(super) fn lose(&mut self, length: usize, in_reasoning: bool, out: &mut Output) {
        self.malformed += 1;
        self.skip(length, out);
        self.state = State::Lost { in_reasoning };
    }

    pub(super) fn junk(&mut self, front: Symbol, ended: bool, out: &mut Output) {
        let is_space = matches!(front.piece, Piece::Char(character) if character.is_whitespace());
        // At the end this is a tag that was cut.
        if !is_space && !ended && !self.in_junk {
            self.in_junk = true;
            self.malformed += 1;
        }
        self.take(Channel::Markup, false, Effect::None, out);
    }

    pub(super) fn skip(&mut self, length: usize, out: &mut Output) {
        for _ in 0..length {
            self.take(Channel::Markup, false, Effect::None, out);
        }
    }

    pub(super) fn take_all(&mut self, channel: Channel, out: &mut Output) {
        while !self.pending.is_empty() {
            self.take(channel, false, Effect::None, out);
        }
    }

    pub(super) fn show(&mut self, channel: Channel, out: &mut Output) -> bool {
        self.take(channel, true, Effect::None, out);
        true
    }

    /// Moves the front symbol to the output; `effect` belongs to its last character.
    pub(super) fn take(&mut self, channel: Channel, shown: bool, effect: Effect, out: &mut Output) {
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

    pub(super) fn emit(&mut self, channel: Channel, symbol: Symbol, out: &mut Output) {
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
pub(super) fn is_look_alike(next: Option<Piece>) -> bool {
    matches!(next, Some(Piece::Char(character)) if character.is_alphanumeric() || character == BAR || character == '|')
}

/// Key, whether the value is a string, and whether the attributes are as the format has them.
pub(super) fn parameter(attributes: &str) -> (&str, bool, bool) {
    if let Some(key) = attributes.strip_suffix("\" string=\"true") {
        return (key, true, true);
    }
    if let Some(key) = attributes.strip_suffix("\" string=\"false") {
        return (key, false, true);
    }
    // Without a word about its type, a value is text.
    (attributes.split('"').next().unwrap_or_default(), true, false)
}
