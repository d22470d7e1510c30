//! First stage of reading a reply: tokens or raw text become characters and markers.

use crate::chat::Marker;
use crate::detokenizer::Detokenizer;

/// Tokens that a character was made of: half-open, empty for raw text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) first: u32,
    pub(super) end: u32,
}

impl Span {
    pub(super) const NONE: Span = Span { first: 0, end: 0 };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Char(char),
    Marker(Marker),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    pub(super) piece: Piece,
    pub(super) span: Span,
}

/// First stage: tokens or text to characters and markers.
#[derive(Debug, Default)]
pub(super) struct Input {
    pub(super) detokenizer: Detokenizer,
    /// The token that began the unfinished character, and how many tokens it has so far.
    pub(super) tail_first: Option<u32>,
    pub(super) tail_tokens: u32,
    /// Raw text that may be the beginning of a marker.
    pub(super) raw: String,
}

/// Markers that raw text can contain.
pub(super) const RAW_MARKERS: [Marker; 4] = [Marker::ThinkStart, Marker::ThinkEnd, Marker::Dsml, Marker::EndOfSentence];

impl Input {
    pub(super) fn push_bytes(&mut self, bytes: &[u8], span: Span, out: &mut Vec<Symbol>) {
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

    pub(super) fn interrupt(&mut self, span: Span, out: &mut Vec<Symbol>) {
        let mut text = String::new();
        self.detokenizer.interrupt(&mut text);
        self.emit(&text, Span { first: span.first, end: span.first }, out);
        self.tail_first = None;
    }

    /// The first character takes the tokens of the unfinished one before it.
    pub(super) fn emit(&mut self, text: &str, span: Span, out: &mut Vec<Symbol>) {
        for character in text.chars() {
            let first = self.tail_first.take().unwrap_or(span.first);
            out.push(Symbol { piece: Piece::Char(character), span: Span { first, end: span.end } });
        }
    }

    pub(super) fn push_text(&mut self, text: &str, ended: bool, out: &mut Vec<Symbol>) {
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
