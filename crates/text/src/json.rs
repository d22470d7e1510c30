//! JSON values that remember how they were written.
//!
//! The prompt format shows schemas and arguments to the model, so key order and the spelling of numbers (`1.0`, `1e5`,
//! thirty digits) belong to the prompt. `serde_json` checks the text; this module keeps what its own value drops.

use std::collections::HashMap;
use std::fmt::Write;

/// Deepest nesting that is accepted.
pub const DEPTH_MAX: usize = 128;

/// Objects with fewer keys look duplicates up one by one.
const LINEAR_KEYS_MAX: usize = 16;

/// One JSON value; numbers keep their text.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    /// The number as written.
    Number(String),
    String(String),
    Array(Vec<Value>),
    Object(Object),
}

/// Keys are unique and in the order of their first appearance; the last value of a repeated key counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Object {
    entries: Vec<(String, Value)>,
}

/// Why a text is no JSON value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum JsonError {
    #[error("not valid JSON: {0}")]
    Syntax(String),
    #[error(
        "not valid Unicode at line {line}, column {column} ({reason}); write the character itself or a \
         whole surrogate pair"
    )]
    Text { line: usize, column: usize, reason: String },
    #[error("nested deeper than {DEPTH_MAX} levels at line {line}, column {column}; flatten it")]
    Depth { line: usize, column: usize },
}

impl Value {
    /// Reads one value and nothing after it.
    ///
    /// # Errors
    /// [`JsonError`] with line and column.
    pub fn parse(text: &str) -> Result<Value, JsonError> {
        serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| JsonError::Syntax(reason(&error)))?;
        let mut reader = Reader { text, at: 0 };
        reader.value(0)
    }

    /// Appends the value with `", "` and `": "` between its parts and non-ASCII text unescaped.
    pub fn render(&self, out: &mut String) {
        match self {
            Value::Null => out.push_str("null"),
            Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Value::Number(text) => out.push_str(text),
            Value::String(text) => quote(text, out),
            Value::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push_str(", ");
                    }
                    item.render(out);
                }
                out.push(']');
            }
            Value::Object(object) => {
                out.push('{');
                for (index, (key, value)) in object.entries.iter().enumerate() {
                    if index > 0 {
                        out.push_str(", ");
                    }
                    quote(key, out);
                    out.push_str(": ");
                    value.render(out);
                }
                out.push('}');
            }
        }
    }

    /// The value as [`Value::render`] writes it.
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        self.render(&mut out);
        out
    }

    /// What kind of value this is, for messages: `a string`, `true`, `null`, ...
    pub fn describe(&self) -> String {
        match self {
            Value::Null => "null".into(),
            Value::Bool(value) => value.to_string(),
            Value::Number(text) => shorten(text),
            Value::String(text) => {
                let mut out = String::new();
                quote(&shorten(text), &mut out);
                out
            }
            Value::Array(_) => "a list".into(),
            Value::Object(_) => "an object".into(),
        }
    }

    /// The same value in `serde_json`'s form, where numbers lose their spelling.
    pub fn to_serde(&self) -> serde_json::Value {
        match self {
            Value::Null => serde_json::Value::Null,
            Value::Bool(value) => serde_json::Value::Bool(*value),
            Value::Number(text) => serde_json::from_str(text).unwrap_or(serde_json::Value::Null),
            Value::String(text) => serde_json::Value::String(text.clone()),
            Value::Array(items) => serde_json::Value::Array(items.iter().map(Value::to_serde).collect()),
            Value::Object(object) => serde_json::Value::Object(
                object.entries.iter().map(|(key, value)| (key.clone(), value.to_serde())).collect(),
            ),
        }
    }
}

impl From<&serde_json::Value> for Value {
    fn from(value: &serde_json::Value) -> Value {
        match value {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(value) => Value::Bool(*value),
            serde_json::Value::Number(number) => Value::Number(number.to_string()),
            serde_json::Value::String(text) => Value::String(text.clone()),
            serde_json::Value::Array(items) => Value::Array(items.iter().map(Value::from).collect()),
            serde_json::Value::Object(map) => Value::Object(Object {
                entries: map.iter().map(|(key, value)| (key.clone(), Value::from(value))).collect(),
            }),
        }
    }
}

impl Object {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Puts `value` directly behind `after`, replacing an older value of `key`; at the end where `after` is missing.
    pub fn insert_after(&mut self, after: &str, key: &str, value: Value) {
        self.entries.retain(|(name, _)| name != key);
        let place = self.entries.iter().position(|(name, _)| name == after).map_or(self.entries.len(), |at| at + 1);
        self.entries.insert(place, (key.into(), value));
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = (&str, &mut Value)> {
        self.entries.iter_mut().map(|(key, value)| (key.as_str(), value))
    }
}

/// Appends `text` as a JSON string, quotes included.
pub fn quote(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        escape(character, out);
    }
    out.push('"');
}

/// Appends one character as it stands inside a JSON string.
pub fn escape(character: char, out: &mut String) {
    match character {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        control if control < ' ' => {
            write!(out, "\\u{:04x}", control as u32).expect("writing to a String cannot fail");
        }
        other => out.push(other),
    }
}

/// What is wrong with a text, and where, in words that a reader of the text knows.
pub fn reason(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    match error.is_eof() {
        true => format!("it ends at line {line}, column {column}, before the value is complete"),
        false => format!("{} at line {line}, column {column}", phrase(error)),
    }
}

/// The library's words without their place, those of its own trade replaced.
fn phrase(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.rfind(" at line ").map_or(text.as_str(), |end| &text[..end]);
    match text {
        "expected value" => "expected a value".to_owned(),
        "expected ident" => "expected true, false or null".to_owned(),
        "key must be a string" => "expected a key in double quotes".to_owned(),
        "recursion limit exceeded" => format!("nested deeper than {DEPTH_MAX} levels"),
        other => other.to_owned(),
    }
}

fn shorten(text: &str) -> String {
    const SHOWN_CHARS: usize = 40;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}

/// Walks a text that is known to be valid JSON; anything unexpected is still an error, never a panic.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.skip_space();
        match self.byte() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => Ok(Value::String(self.string()?)),
            _ => {
                let start = self.at;
                while self.byte().is_some_and(|byte| !matches!(byte, b',' | b']' | b'}' | b' ' | b'\t' | b'\n' | b'\r'))
                {
                    self.at += 1;
                }
                Ok(match &self.text[start..self.at] {
                    "null" => Value::Null,
                    "true" => Value::Bool(true),
                    "false" => Value::Bool(false),
                    "" => return Err(self.syntax()),
                    number => Value::Number(number.into()),
                })
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.enter(depth)?;
        let mut entries: Vec<(String, Value)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        loop {
            self.skip_space();
            match self.byte() {
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Object(Object { entries }));
                }
                Some(b',') => self.at += 1,
                Some(b'"') => {
                    let key = self.string()?;
                    self.skip_space();
                    if self.byte() != Some(b':') {
                        return Err(self.syntax());
                    }
                    self.at += 1;
                    let value = self.value(depth + 1)?;
                    let known = if entries.len() < LINEAR_KEYS_MAX {
                        entries.iter().position(|(name, _)| *name == key)
                    } else {
                        if places.is_empty() {
                            places.extend(entries.iter().enumerate().map(|(place, (name, _))| (name.clone(), place)));
                        }
                        let known = places.get(&key).copied();
                        places.entry(key.clone()).or_insert(entries.len());
                        known
                    };
                    match known {
                        Some(place) => entries[place].1 = value,
                        None => entries.push((key, value)),
                    }
                }
                _ => return Err(self.syntax()),
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.enter(depth)?;
        let mut items = Vec::new();
        loop {
            self.skip_space();
            match self.byte() {
                Some(b']') => {
                    self.at += 1;
                    return Ok(Value::Array(items));
                }
                Some(b',') => self.at += 1,
                Some(_) => items.push(self.value(depth + 1)?),
                None => return Err(self.syntax()),
            }
        }
    }

    fn enter(&mut self, depth: usize) -> Result<(), JsonError> {
        if depth >= DEPTH_MAX {
            let (line, column) = self.place();
            return Err(JsonError::Depth { line, column });
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<String, JsonError> {
        let start = self.at;
        let bytes = self.text.as_bytes();
        let mut end = start + 1;
        let mut escaped = false;
        while end < bytes.len() && bytes[end] != b'"' {
            if bytes[end] == b'\\' {
                escaped = true;
                end += 1;
            }
            end += 1;
        }
        if end >= bytes.len() {
            return Err(self.syntax());
        }
        self.at = end + 1;
        if !escaped {
            return Ok(self.text[start + 1..end].into());
        }
        serde_json::from_str(&self.text[start..=end]).map_err(|error| {
            let (line, column) = Reader { text: self.text, at: start }.place();
            JsonError::Text { line, column, reason: phrase(&error) }
        })
    }

    fn skip_space(&mut self) {
        while self.byte().is_some_and(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn place(&self) -> (usize, usize) {
        let before = &self.text.as_bytes()[..self.at.min(self.text.len())];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() + 1;
        (line, column)
    }

    fn syntax(&self) -> JsonError {
        let (line, column) = self.place();
        JsonError::Syntax(format!("unexpected text at line {line} column {column}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_numbers_and_order_as_written_and_spaces_as_the_prompt_has_them() {
        let cases = [
            (r#"{"z":1.0,"a":[1,2.50,1e5, -0]}"#, r#"{"z": 1.0, "a": [1, 2.50, 1e5, -0]}"#),
            (r#"{ "n" : 123456789012345678901234567890 }"#, r#"{"n": 123456789012345678901234567890}"#),
            ("\"\\u00e9\\n\\u0001/\\\"\"", "\"é\\n\\u0001/\\\"\""),
            (r#"{"a":1,"b":2,"a":3}"#, r#"{"a": 3, "b": 2}"#),
            ("[]", "[]"),
            ("{}", "{}"),
            (" null ", "null"),
        ];
        for (text, expected) in cases {
            assert_eq!(Value::parse(text).map(|value| value.to_text()).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn last_of_many_repeated_keys_counts() {
        let mut text = String::from("{");
        for round in 0..3 {
            for key in 0..40 {
                text.push_str(&format!("\"k{key}\": {round},"));
            }
        }
        text.push_str("\"end\": 0}");
        let Ok(Value::Object(object)) = Value::parse(&text) else { panic!("not an object") };
        assert_eq!(object.iter().count(), 41);
        assert!(object.iter().take(40).all(|(_, value)| *value == Value::Number("2".into())));
    }

    #[test]
    fn refuses_what_is_no_json_with_its_place() {
        for text in ["", "{", "[1,", "{\"a\" 1}", "nul", "1 2", "\"\u{1}\"", "[1,]", "{,}", "+1", "01", "{\"a\":}"] {
            assert!(matches!(Value::parse(text), Err(JsonError::Syntax(_))), "{text:?}");
        }
        assert!(matches!(Value::parse("[\n  \"\\ud800\"]"), Err(JsonError::Text { line: 2, column: 3, .. })));
        let deep = format!("{}{}", "[".repeat(DEPTH_MAX + 1), "]".repeat(DEPTH_MAX + 1));
        assert!(matches!(Value::parse(&deep), Err(JsonError::Depth { line: 1, column: 129 })));
        let nearly = format!("{}{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX));
        assert!(Value::parse(&nearly).is_ok());
        assert!(Value::parse(&"[".repeat(1_000_000)).is_err());
    }
}
