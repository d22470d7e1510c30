//! The OpenAI routes: bodies in, replies and chunks out.

pub mod blocks;
pub mod chat;
pub mod completions;
pub mod models;
pub mod sampling;
pub mod tokens;
