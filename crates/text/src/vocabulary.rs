//! The folded vocabulary of the Engram tables: ids whose texts differ only in case, accents or white space share one.
//!
//! Every hash multiplier of a checkpoint depends on the number of folded ids, so the folding has to be the release's to
//! the character. It is built from the normalizers of the `tokenizers` library, whose Unicode tables are the ones that
//! the release's tables were made with; newer tables, or the category Mn alone, give another count.

use std::collections::HashMap;

use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{Lowercase, NFD, NFKC, NormalizerWrapper, Replace, Sequence, Strip, StripAccents};
use tokenizers::{NormalizedString, Normalizer, Result as LibraryResult};

use crate::TokenId;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Stands for a lone space while white space is trimmed; a private-use character.
const LONE_SPACE: &str = "\u{e000}";

/// Token id to folded id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoldedVocabulary {
    /// Folded id of each token id.
    pub map: Vec<u32>,
    /// Number of folded ids; they are `0..count`, by first appearance.
    pub count: u32,
}

impl FoldedVocabulary {
    /// Folds every id of the tokenizer. Source: architecture description, Engram, compressed vocabulary.
    ///
    /// # Errors
    /// [`TokenizerError::Library`] where the library's normalizers fail.
    pub fn build(tokenizer: &Tokenizer) -> Result<FoldedVocabulary, TokenizerError> {
        let library = |error: tokenizers::Error| TokenizerError::Library(error.to_string());
        let normalizer = normalizer().map_err(library)?;
        let mut ids: HashMap<String, u32> = HashMap::new();
        let mut map = Vec::with_capacity(tokenizer.vocab_size());
        for id in 0..tokenizer.vocab_size() as TokenId {
            let text = tokenizer.decode(&[id], false)?;
            let key = if text.contains(char::REPLACEMENT_CHARACTER) {
                // A part of a character has no text to fold; its spelling keeps such tokens apart.
                tokenizer.token_name(id).unwrap_or_default()
            } else {
                let mut folded = NormalizedString::from(text.as_str());
                normalizer.normalize(&mut folded).map_err(library)?;
                if folded.is_empty() { text } else { folded.get().into() }
            };
            let next = ids.len() as u32;
            map.push(*ids.entry(key).or_insert(next));
        }
        Ok(FoldedVocabulary { map, count: ids.len() as u32 })
    }
}

fn normalizer() -> LibraryResult<Sequence> {
    let regex = |pattern: &str, content: &str| Replace::new(ReplacePattern::Regex(pattern.into()), content);
    Ok(Sequence::new(vec![
        NormalizerWrapper::NFKC(NFKC),
        NormalizerWrapper::NFD(NFD),
        NormalizerWrapper::StripAccents(StripAccents),
        NormalizerWrapper::Lowercase(Lowercase),
        NormalizerWrapper::Replace(regex(r"[ \t\r\n]+", " ")?),
        NormalizerWrapper::Replace(regex(r"^ $", LONE_SPACE)?),
        NormalizerWrapper::StripNormalizer(Strip::new(true, true)),
        NormalizerWrapper::Replace(Replace::new(ReplacePattern::String(LONE_SPACE.into()), " ")?),
    ]))
}
