//! Text to token ids and back, safe against control tokens typed by a user.
//!
//! A checkpoint's `tokenizer.json` is loaded twice. The *plain* tokenizer has no added tokens, and none of their ids in
//! its vocabulary either, so caller text cannot become a control token whatever it spells. The *full* one recognises
//! every added token and serves routes that replay a rendered prompt. Markers of the chat format are placed by id.
//!
//! Wraps the `tokenizers` library; nothing else in the program uses it, apart from its normalizers in `vocabulary`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::TokenId;
use crate::chat::{Marker, Segment};
use crate::json::reason;

/// Why a `tokenizer.json` cannot be used, or a text cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("tokenizer.json is not valid JSON: {0}. The file is damaged or cut off; fetch it again.")]
    Json(String),
    #[error("tokenizer.json: {place} is {found}, expected {expected}. Use the file that came with the checkpoint.")]
    Form { place: String, found: String, expected: String },
    #[error("tokenizer.json: {place} is not supported ({found}); a byte-level BPE tokenizer is expected")]
    Unsupported { place: String, found: String },
    #[error("tokenizer.json: id {id} is used for both {first:?} and {second:?}. Fetch the file again.")]
    DuplicateId { id: TokenId, first: String, second: String },
    #[error("tokenizer.json: added token {content:?} has two ids, {first} and {second}. Fetch the file again.")]
    DuplicateContent { content: String, first: TokenId, second: TokenId },
    #[error("tokenizer.json: no token has id {id}, the ids end at {last}. Fetch the file again.")]
    MissingId { id: TokenId, last: TokenId },
    #[error("tokenizer.json: the vocabulary lacks {count} of the 256 single bytes, the first is 0x{first:02x}")]
    MissingBytes { count: usize, first: u8 },
    #[error(
        "tokenizer.json: the chat markers {names} are missing. This tokenizer does not belong to a DeepSeek-V4.1 checkpoint."
    )]
    MissingMarkers { names: String },
    #[error("tokenizer.json cannot be loaded: {0}")]
    Library(String),
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    #[error("token id {id} is outside the vocabulary of {size} ids")]
    UnknownId { id: TokenId, size: usize },
}

/// Ids of the chat markers, resolved by their spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Markers {
    ids: [TokenId; Marker::ALL.len()],
}

impl Markers {
    pub fn id(&self, marker: Marker) -> TokenId {
        self.ids[marker as usize]
    }

    /// The marker that has this id.
    pub fn of(&self, id: TokenId) -> Option<Marker> {
        Marker::ALL.into_iter().find(|marker| self.id(*marker) == id)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Base,
    Added,
    /// Added and flagged as special: decoders leave it out of text.
    Special,
}

struct Token {
    /// Range in [`Tokenizer::bytes`].
    start: u32,
    end: u32,
    kind: Kind,
}

/// A byte-level BPE tokenizer of a checkpoint.
pub struct Tokenizer {
    plain: tokenizers::Tokenizer,
    full: tokenizers::Tokenizer,
    tokens: Vec<Token>,
    bytes: Vec<u8>,
    markers: Markers,
    /// Most bytes of a text that one token can stand for; `None` where the file says that more may vanish.
    longest: Option<usize>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Tokenizer").field("vocabulary", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizerError`] where the file is damaged, is of another kind, or lacks a chat marker.
    pub fn from_bytes(json: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let mut file: Value = serde_json::from_slice(json).map_err(|error| TokenizerError::Json(reason(&error)))?;
        check_kind(&file)?;
        let vocabulary = read_vocabulary(&file)?;
        let added = read_added(&file)?;
        let (tokens, bytes) = build_table(&vocabulary, &added)?;
        let markers = resolve_markers(&added)?;
        let keeps_every_byte = keeps_every_byte(&file);

        // Nothing may shorten, pad or extend what the spans say.
        for key in ["truncation", "padding", "post_processor"] {
            file[key] = Value::Null;
        }
        let full = load(&file)?;
        file["added_tokens"] = Value::Array(Vec::new());
        if let Some(entries) = file["model"]["vocab"].as_object_mut() {
            let marker_ids: HashSet<TokenId> = added.iter().map(|token| token.id).collect();
            entries.retain(|_, id| id.as_u64().is_none_or(|id| !marker_ids.contains(&(id as TokenId))));
        }
        let plain = load(&file)?;
        let longest = tokens.iter().map(|token| (token.end - token.start) as usize).max();
        let longest = longest.filter(|longest| *longest > 0 && keeps_every_byte);
        Ok(Tokenizer { plain, full, tokens, bytes, markers, longest })
    }

    /// Number of ids; the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    pub fn markers(&self) -> &Markers {
        &self.markers
    }

    /// Tokens that a text has at the least, known from its length alone: what is hopelessly long need not be encoded.
    pub fn least_tokens(&self, text: &str) -> usize {
        self.longest.map_or(0, |longest| text.len() / longest)
    }

    /// Bytes of the longest text that may have no more than `tokens` tokens, known from its length alone.
    pub fn most_bytes(&self, tokens: usize) -> Option<usize> {
        Some(tokens.saturating_add(1).saturating_mul(self.longest?))
    }

    /// Ids of a text from outside; never an added token, whatever the text spells.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        encode(&self.plain, text)
    }

    /// Ids of a text in which the spelling of an added token means that token.
    pub fn encode_with_markers(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        encode(&self.full, text)
    }

    /// Ids of a rendered prompt: markers by id, everything between them as plain text.
    pub fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::new();
        for segment in segments {
            match segment {
                Segment::Marker(marker) => ids.push(self.markers.id(*marker)),
                Segment::Text(text) => ids.extend(self.encode_plain(text)?),
            }
        }
        Ok(ids)
    }

    /// Text of `ids`; bytes that form no character become U+FFFD. `skip_special` leaves special tokens out.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> Result<String, TokenizerError> {
        let mut bytes = Vec::new();
        for &id in ids {
            let size = self.vocab_size();
            bytes.extend_from_slice(match self.token_bytes(id) {
                None => return Err(TokenizerError::UnknownId { id, size }),
                Some(_) if skip_special && self.is_special(id) => &[],
                Some(bytes) => bytes,
            });
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The bytes that one token stands for, possibly only a part of a character.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        let token = self.tokens.get(id as usize)?;
        Some(&self.bytes[token.start as usize..token.end as usize])
    }

    /// The spelling of a token in the vocabulary, byte-level letters not decoded.
    pub fn token_name(&self, id: TokenId) -> Option<String> {
        self.full.id_to_token(id)
    }

    /// Whether the token is in the table of added tokens.
    pub fn is_added(&self, id: TokenId) -> bool {
        self.tokens.get(id as usize).is_some_and(|token| token.kind != Kind::Base)
    }

    /// Whether the token is flagged as special, so that decoders leave it out of text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.tokens.get(id as usize).is_some_and(|token| token.kind == Kind::Special)
    }
}

fn load(file: &Value) -> Result<tokenizers::Tokenizer, TokenizerError> {
    // Through text: the library's own parser expects the merges in file order and reports places.
    file.to_string().parse().map_err(|error: tokenizers::Error| not_loaded(file, &error.to_string()))
}

/// What the library says, or which part of the file it stumbled over where it only speaks of its own types.
fn not_loaded(file: &Value, reason: &str) -> TokenizerError {
    let speaks_of_types = ["untagged enum", "invalid type", "invalid value", "missing field", "unknown variant"]
        .iter()
        .any(|word| reason.contains(word));
    if !speaks_of_types {
        return TokenizerError::Library(reason.rfind(" at line ").map_or(reason, |end| &reason[..end]).into());
    }
    let loads_without = |part: &&str| {
        let mut rest = file.clone();
        rest[*part] = if *part == "added_tokens" { Value::Array(Vec::new()) } else { Value::Null };
        rest.to_string().parse::<tokenizers::Tokenizer>().is_ok()
    };
    let place = ["normalizer", "pre_tokenizer", "decoder", "added_tokens"].into_iter().find(loads_without);
    TokenizerError::Form {
        place: place.unwrap_or("model").into(),
        found: "of another form".into(),
        expected: "that of a byte-level BPE tokenizer".into(),
    }
}

fn encode(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let encoding = tokenizer.encode_fast(text, false).map_err(|error| TokenizerError::Encode(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

/// Whether no normaliser rewrites a text and no added token takes the blanks beside it.
fn keeps_every_byte(file: &Value) -> bool {
    let normalizer = &file["normalizer"];
    let is_empty = |list: &Value| list.as_array().is_some_and(Vec::is_empty);
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    (normalizer.is_null() || is_empty(&normalizer["normalizers"]))
        && file["added_tokens"].as_array().is_none_or(|added| !added.iter().any(strips))
}

/// `found`: `None` where the file has no such key.
fn form(place: &str, found: Option<&Value>, expected: &str) -> TokenizerError {
    let found = match found {
        None => "missing".into(),
        Some(found @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_))) => found.to_string(),
        Some(Value::Array(_)) => "a list".into(),
        Some(Value::Object(_)) => "an object".into(),
    };
    TokenizerError::Form { place: place.into(), found, expected: expected.into() }
}

fn check_kind(file: &Value) -> Result<(), TokenizerError> {
    if !file.is_object() {
        return Err(form("the file", Some(file), "an object"));
    }
    for (place, path, kind) in [("model.type", "/model/type", "BPE"), ("decoder.type", "/decoder/type", "ByteLevel")] {
        let found = file.pointer(path);
        if found.is_none_or(|found| found != kind) {
            return Err(form(place, found, &format!("{kind:?}")));
        }
    }
    if !file["model"]["dropout"].is_null() {
        let found = file["model"]["dropout"].to_string();
        return Err(TokenizerError::Unsupported { place: "model.dropout".into(), found });
    }
    let steps = match &file["pre_tokenizer"] {
        step if step["type"] == "Sequence" => step["pretokenizers"].as_array().cloned().unwrap_or_default(),
        step => vec![step.clone()],
    };
    let Some(byte_level) = steps.iter().find(|step| step["type"] == "ByteLevel") else {
        let found = file.get("pre_tokenizer").map(|step| step.get("type").unwrap_or(step));
        return Err(form("pre_tokenizer", found, "a sequence with a \"ByteLevel\" step"));
    };
    if byte_level["add_prefix_space"] == true {
        // It would put a space in front of every span between two markers.
        let place = "pre_tokenizer.add_prefix_space".into();
        return Err(TokenizerError::Unsupported { place, found: "true".into() });
    }
    check_merges(file)
}

/// The library's parser doesn't say which entry is wrong.
fn check_merges(file: &Value) -> Result<(), TokenizerError> {
    let found = file.pointer("/model/merges");
    let Some(merges) = found.and_then(Value::as_array) else { return Err(form("model.merges", found, "a list")) };
    let is_pair = |merge: &Value| match merge {
        Value::String(text) => text.split(' ').count() == 2,
        Value::Array(parts) => parts.len() == 2 && parts.iter().all(Value::is_string),
        _ => false,
    };
    match merges.iter().position(|merge| !is_pair(merge)) {
        None => Ok(()),
        Some(index) => {
            Err(form(&format!("model.merges[{index}]"), merges.get(index), "two tokens, as \"a b\" or as a list"))
        }
    }
}

fn read_vocabulary(file: &Value) -> Result<Vec<(TokenId, String)>, TokenizerError> {
    let found = file.pointer("/model/vocab");
    let Some(entries) = found.and_then(Value::as_object) else { return Err(form("model.vocab", found, "an object")) };
    entries
        .iter()
        .map(|(text, id)| match id.as_u64().and_then(|id| TokenId::try_from(id).ok()) {
            Some(id) => Ok((id, text.clone())),
            None => Err(form(&format!("model.vocab[{text:?}]"), Some(id), "a 32-bit id")),
        })
        .collect()
}

struct Added {
    id: TokenId,
    content: String,
    special: bool,
}

fn read_added(file: &Value) -> Result<Vec<Added>, TokenizerError> {
    let found = file.get("added_tokens");
    let Some(list) = found.and_then(Value::as_array) else { return Err(form("added_tokens", found, "a list")) };
    list.iter()
        .enumerate()
        .map(|(index, entry)| {
            let place = |key: &str| format!("added_tokens[{index}].{key}");
            let id = entry["id"].as_u64().and_then(|id| TokenId::try_from(id).ok());
            let content = entry["content"].as_str();
            Ok(Added {
                id: id.ok_or_else(|| form(&place("id"), entry.get("id"), "a 32-bit id"))?,
                content: content
                    .filter(|content| !content.is_empty())
                    .ok_or_else(|| form(&place("content"), entry.get("content"), "a text"))?
                    .into(),
                special: entry["special"] == true,
            })
        })
        .collect()
}

/// The bytes of every id. Added tokens win over vocabulary entries of the same id, which must spell the same.
fn build_table(vocabulary: &[(TokenId, String)], added: &[Added]) -> Result<(Vec<Token>, Vec<u8>), TokenizerError> {
    let mut by_id: HashMap<TokenId, (&str, Kind)> = HashMap::new();
    for (id, text) in vocabulary {
        if let Some((first, _)) = by_id.insert(*id, (text, Kind::Base)) {
            return Err(TokenizerError::DuplicateId { id: *id, first: first.into(), second: text.clone() });
        }
    }
    let mut by_content: HashMap<&str, TokenId> = HashMap::new();
    for token in added {
        if let Some(first) = by_content.insert(&token.content, token.id)
            && first != token.id
        {
            let (content, second) = (token.content.clone(), token.id);
            return Err(TokenizerError::DuplicateContent { content, first, second });
        }
        let kind = if token.special { Kind::Special } else { Kind::Added };
        if let Some((first, _)) = by_id.insert(token.id, (&token.content, kind))
            && first != token.content
        {
            let (first, second) = (first.into(), token.content.clone());
            return Err(TokenizerError::DuplicateId { id: token.id, first, second });
        }
    }
    // The library would give an added token the id of the vocabulary entry that spells the same.
    for (id, text) in vocabulary {
        if let Some(&second) = by_content.get(text.as_str())
            && second != *id
        {
            return Err(TokenizerError::DuplicateContent { content: text.clone(), first: *id, second });
        }
    }

    let alphabet = byte_alphabet();
    let mut present = [false; 256];
    let mut tokens = Vec::with_capacity(by_id.len());
    let mut bytes: Vec<u8> = Vec::new();
    let last = by_id.keys().max().copied().unwrap_or_default();
    for id in 0..=last {
        let Some((text, kind)) = by_id.get(&id) else { return Err(TokenizerError::MissingId { id, last }) };
        let start = bytes.len();
        let decoded: Option<Vec<u8>> = match kind {
            Kind::Base => text.chars().map(|letter| alphabet.get(&letter).copied()).collect(),
            Kind::Added | Kind::Special => None,
        };
        match decoded {
            Some(decoded) => bytes.extend(decoded),
            None => bytes.extend(text.as_bytes()),
        }
        if *kind == Kind::Base && bytes.len() == start + 1 {
            present[bytes[start] as usize] = true;
        }
        let (start, end) = (start as u32, bytes.len() as u32);
        tokens.push(Token { start, end, kind: *kind });
    }
    let missing: Vec<usize> = (0..256).filter(|byte| !present[*byte]).collect();
    if let Some(&first) = missing.first() {
        return Err(TokenizerError::MissingBytes { count: missing.len(), first: first as u8 });
    }
    Ok((tokens, bytes))
}

fn resolve_markers(added: &[Added]) -> Result<Markers, TokenizerError> {
    let find = |marker: &Marker| added.iter().find(|token| token.content == marker.spelling());
    let missing: Vec<&str> =
        Marker::ALL.iter().filter(|marker| find(marker).is_none()).map(|marker| marker.spelling()).collect();
    if !missing.is_empty() {
        return Err(TokenizerError::MissingMarkers { names: missing.join(", ") });
    }
    let ids = Marker::ALL.map(|marker| find(&marker).map_or(0, |token| token.id));
    Ok(Markers { ids })
}

/// The byte behind each letter of byte-level BPE: printable Latin-1 stands for itself, the rest for U+0100 and on.
fn byte_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| {
            if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
                return (char::from(byte), byte);
            }
            next += 1;
            (char::from_u32(next - 1).expect("U+0100 to U+0143 are characters"), byte)
        })
        .collect()
}
