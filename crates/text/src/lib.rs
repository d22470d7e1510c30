//! Text in and out: chat encoding, tokens, whole characters, stop strings, reply parsing.
//!
//! Pure: reads and writes no file, knows no HTTP and no model. A conversation becomes a [`chat::Prompt`] of text and
//! markers, a [`tokenizer::Tokenizer`] turns it into ids, and a [`reply::ReplyStream`] turns the ids of a reply back
//! into reasoning, content and tool calls. `chat::openai` reads request bodies, so that a server and a command line
//! tool understand a body the same way.

pub mod chat;
pub mod detokenizer;
pub mod fields;
pub mod json;
pub mod message;
pub mod reply;
pub mod stop;
pub mod tokenizer;
pub mod vocabulary;

/// Index into the vocabulary of a checkpoint.
pub type TokenId = u32;
