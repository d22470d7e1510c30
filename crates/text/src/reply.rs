//! Splits a reply, as it arrives, into reasoning, content and tool calls.
//!
//! Three stages, each independent of how the reply is cut into pieces: tokens or raw text become characters and
//! markers; a state machine says what each of them is (reasoning, content or the markup of a call); and an output stage
//! looks for stop strings in each of the three and shows what is decided. Text that may be the start of markup or of a
//! stop string waits.
//!
//! Markers are matched by token id; in raw text, by their spelling. Only the exact encoding is a call: look-alikes with
//! other bars or older tag names are text. Markup that is damaged is read as far as it can be and counted.

mod input;
mod output;
mod parser;

use crate::TokenId;
use crate::chat::{Marker, ParseStart};
use crate::tokenizer::Tokenizer;

use self::input::{Input, Piece, Span, Symbol};
use self::output::Output;
use self::parser::{Parser, State};

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
