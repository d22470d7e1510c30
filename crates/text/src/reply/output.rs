//! Last stage of reading a reply: looks for stop strings in each part of the message and shows what is decided.

use std::collections::VecDeque;

use super::input::Span;
use super::parser::{Channel, Effect, Item};
use super::{CallIds, Delta, ReplyOptions};
use crate::json;
use crate::stop::StopMatcher;

#[derive(Debug)]
pub(super) struct Stopped {
    pub(super) stop: String,
    pub(super) token_count: u32,
    pub(super) inside_call: bool,
}

/// Third stage: stop strings, and the deltas.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) stops: Vec<String>,
    pub(super) matcher: StopMatcher,
    pub(super) include_stop: bool,
    /// Items that may be the start of a stop string, all of one channel.
    pub(super) queue: VecDeque<Item>,
    pub(super) queue_characters: usize,
    pub(super) channel: Option<Channel>,
    pub(super) deltas: Vec<Delta>,
    /// Tokens below this place have been shown.
    pub(super) next_token: u32,
    pub(super) stopped: Option<Stopped>,
    pub(super) call_ids: CallIds,
    pub(super) call_count: usize,
    pub(super) whole_calls: usize,
    pub(super) open_call: bool,
    pub(super) arguments: String,
    /// The value so far, while it has not shown whether it is JSON.
    pub(super) held_raw: Option<String>,
    pub(super) reasoning_end: Option<u32>,
    pub(super) malformed: u32,
}

impl Output {
    pub(super) fn new(options: &ReplyOptions) -> Output {
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

    pub(super) fn take(&mut self) -> Vec<Delta> {
        std::mem::take(&mut self.deltas)
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.push(Item { channel: Channel::Markup, character: None, shown: false, span: Span::NONE, effect });
    }

    pub(super) fn push(&mut self, item: Item) {
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
    pub(super) fn flush(&mut self) {
        if self.stopped.is_none() {
            self.release_to(0);
            self.end_raw_as_it_is();
        }
    }

    /// Releases items until `held` characters are left.
    pub(super) fn release_to(&mut self, held: usize) {
        while self.queue_characters > held
            || (held == 0 && !self.queue.is_empty())
            || self.queue.front().is_some_and(|item| item.character.is_none())
        {
            let Some(item) = self.queue.pop_front() else { return };
            self.queue_characters -= usize::from(item.character.is_some());
            self.release(item);
        }
    }

    pub(super) fn release(&mut self, item: Item) {
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
    pub(super) fn add_raw(&mut self, character: char) {
        let Some(raw) = &mut self.held_raw else {
            self.add_arguments(character.encode_utf8(&mut [0; 4]));
            return;
        };
        raw.push(character);
        if matches!(raw.trim_start().chars().next(), Some('{' | '[' | '"')) {
            self.end_raw_as_it_is();
        }
    }

    pub(super) fn end_raw_as_it_is(&mut self) {
        if let Some(raw) = self.held_raw.take() {
            self.add_arguments(&raw);
        }
    }

    pub(super) fn add_arguments(&mut self, text: &str) {
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

    pub(super) fn end_reasoning(&mut self, token_count: u32) {
        self.reasoning_end.get_or_insert(token_count);
    }

    /// Tokens of a character that was cut have rows but no text.
    pub(super) fn show_tail(&mut self, channel: Channel, span: Span) {
        let tokens = self.next_token.max(span.first)..span.end;
        self.next_token = span.end;
        self.show(channel, None, tokens);
    }

    pub(super) fn show(&mut self, channel: Channel, character: Option<char>, places: std::ops::Range<u32>) {
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
