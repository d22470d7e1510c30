//! Text in and out: chat encoding, tokens, reply parsing.

/// Index into the vocabulary of a checkpoint.
pub type TokenId = u32;
