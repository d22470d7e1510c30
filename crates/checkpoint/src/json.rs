//! JSON with rules that `serde_json::Value` alone doesn't have: a key may appear once in an object.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::CheckpointError;

/// Parses one JSON text. Depth is limited by the library (128).
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Strict.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// A JSON file that can't be read, or doesn't hold what it should.
pub(crate) fn error(file: &str, error: &serde_json::Error) -> CheckpointError {
    let (file, reason) = (file.to_owned(), reason(error));
    match error.is_data() {
        true => CheckpointError::InvalidJson { file, reason },
        false => CheckpointError::NotJson { file, reason },
    }
}

/// What is wrong with a text, and where, in words that are not the library's.
pub(crate) fn reason(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    if error.is_eof() {
        return format!("it ends at line {line}, column {column}, before it is complete");
    }
    let text = error.to_string();
    let text = text.rfind(" at line ").map_or(text.as_str(), |end| &text[..end]);
    let mut plain =
        match text.split_once("missing field `").and_then(|(before, rest)| Some((before, rest.split_once('`')?))) {
            Some((before, (field, after))) => format!("{before}{field} is missing{after}"),
            None => text.to_owned(),
        };
    for (word, instead) in WORDS {
        plain = plain.replace(word, instead);
    }
    match error.is_data() {
        true => plain,
        false => format!("{plain} at line {line}, column {column}"),
    }
}

/// The library's words for what it found and wanted.
const WORDS: [(&str, &str); 13] = [
    ("invalid type: ", "found "),
    ("invalid value: ", "found "),
    ("invalid length", "found a list of"),
    ("duplicate field", "twice:"),
    ("integer `", "`"),
    ("floating point `", "`"),
    ("boolean `", "`"),
    ("string \"", "\""),
    ("found map,", "found an object,"),
    ("found sequence,", "found a list,"),
    ("expected u64", "expected a whole number"),
    ("expected ident", "expected true, false or null"),
    ("expected value", "expected a value"),
];

struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Strict)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(Strict)?;
            if object.contains_key(&key) {
                return Err(de::Error::custom(format_args!("the key {key:?} appears twice")));
            }
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_appears_once() {
        assert_eq!(parse(br#"{"a": [1, -2, 0.5, null, true, "x"]}"#).unwrap()["a"][1], -2);
        for (text, part) in [
            (r#"{"a": 1, "a": 1}"#, "\"a\" appears twice"),
            (r#"{"b": {"c": 1, "c": 2}}"#, "\"c\" appears twice"),
            (r#"{"a": 1} x"#, "trailing characters at line 1, column 10"),
            (r#"{"a": 1"#, "it ends at line 1, column 7, before it is complete"),
            ("", "it ends at line 1, column 0, before it is complete"),
            ("weights", "expected a value at line 1, column 1"),
            (r#"{"a": nul}"#, "expected true, false or null at line 1, column 10"),
        ] {
            let error = reason(&parse(text.as_bytes()).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
        // Nesting is limited, so a hostile text can't overflow the stack.
        assert!(parse("[".repeat(100_000).as_bytes()).is_err());
    }
}
