//! Reads the fields of a JSON body strictly and says which field was wrong.
//!
//! A field that is `null` is absent. Types are exact: `true` is no number, `"5"` is no integer. An error names the
//! field by its path (`messages[2].content[0].type`), so that a route can answer with `param`.

use std::ops::{Bound, RangeBounds, RangeInclusive};

use crate::json::{JsonError, Object, Value};

/// What kind of mistake a body contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidJson,
    MissingField,
    InvalidType,
    InvalidValue,
    UnsupportedValue,
    UnsupportedParameter,
    UnsupportedContent,
    ConflictingValues,
}

impl Code {
    pub fn as_str(self) -> &'static str {
        match self {
            Code::InvalidJson => "invalid_json",
            Code::MissingField => "missing_field",
            Code::InvalidType => "invalid_type",
            Code::InvalidValue => "invalid_value",
            Code::UnsupportedValue => "unsupported_value",
            Code::UnsupportedParameter => "unsupported_parameter",
            Code::UnsupportedContent => "unsupported_content",
            Code::ConflictingValues => "conflicting_values",
        }
    }
}

/// The first mistake of a body.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct BodyError {
    pub code: Code,
    /// Path of the field; `None` where the body as a whole is wrong.
    pub param: Option<String>,
    pub message: String,
}

impl From<JsonError> for BodyError {
    fn from(error: JsonError) -> BodyError {
        BodyError { code: Code::InvalidJson, param: None, message: format!("the body is {error}") }
    }
}

/// An object of the body and where it stands.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    path: String,
    object: &'a Object,
}

/// A value of the body and where it stands; never `null`.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub fn of_body(body: &'a Value) -> Result<Fields<'a>, BodyError> {
        match body {
            Value::Object(object) => Ok(Fields { path: String::new(), object }),
            other => Err(BodyError {
                code: Code::InvalidType,
                param: None,
                message: format!("the body must be a JSON object, got {}", other.describe()),
            }),
        }
    }

    /// Path of a field of this object.
    pub fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// The field, unless it is missing or `null`.
    pub fn get(&self, key: &str) -> Option<Field<'a>> {
        match self.object.get(key) {
            None | Some(Value::Null) => None,
            Some(value) => Some(Field { path: self.path_of(key), value }),
        }
    }

    pub fn required(&self, key: &str) -> Result<Field<'a>, BodyError> {
        self.get(key).ok_or_else(|| {
            let path = self.path_of(key);
            BodyError { code: Code::MissingField, message: format!("{path} is required"), param: Some(path) }
        })
    }

    pub fn object(&self) -> &'a Object {
        self.object
    }
}

impl<'a> Field<'a> {
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn value(&self) -> &'a Value {
        self.value
    }

    pub fn error(&self, code: Code, message: impl Into<String>) -> BodyError {
        BodyError { code, param: Some(self.path.clone()), message: message.into() }
    }

    /// The field has the wrong type; `expected` reads like `a string`.
    pub fn wrong_type(&self, expected: &str) -> BodyError {
        self.error(Code::InvalidType, format!("{} must be {expected}, got {}", self.path, self.value.describe()))
    }

    /// The field has the right type and a value that is not allowed.
    pub fn wrong_value(&self, expected: &str) -> BodyError {
        self.error(Code::InvalidValue, format!("{} must be {expected}, got {}", self.path, self.value.describe()))
    }

    pub fn string(&self) -> Result<&'a str, BodyError> {
        match self.value {
            Value::String(text) => Ok(text),
            _ => Err(self.wrong_type("a string")),
        }
    }

    pub fn boolean(&self) -> Result<bool, BodyError> {
        match self.value {
            Value::Bool(value) => Ok(*value),
            _ => Err(self.wrong_type("true or false")),
        }
    }

    /// A finite number inside `range`.
    pub fn number(&self, range: impl RangeBounds<f64>) -> Result<f64, BodyError> {
        self.number_of("", range)
    }

    /// As [`Field::number`], of a `unit` that errors name.
    pub fn number_of(&self, unit: &str, range: impl RangeBounds<f64>) -> Result<f64, BodyError> {
        let of = if unit.is_empty() { String::new() } else { format!(" of {unit}") };
        let least = match range.start_bound() {
            Bound::Included(least) => format!(" from {least}"),
            Bound::Excluded(least) => format!(" above {least},"),
            Bound::Unbounded => String::new(),
        };
        let most = match range.end_bound() {
            Bound::Included(most) if least.ends_with(',') => format!(" up to {most}"),
            Bound::Included(most) => format!(" to {most}"),
            Bound::Excluded(most) => format!(" below {most}"),
            Bound::Unbounded => String::new(),
        };
        let expected = format!("a number{of}{least}{most}");
        let Value::Number(text) = self.value else { return Err(self.wrong_type(&expected)) };
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() && range.contains(&number) => Ok(number),
            _ => Err(self.wrong_value(&expected)),
        }
    }

    /// A whole number inside `range`, written without a fraction.
    pub fn integer(&self, range: RangeInclusive<i128>) -> Result<i128, BodyError> {
        let expected = integer_from(&range);
        let Value::Number(text) = self.value else { return Err(self.wrong_type(&expected)) };
        if text.contains(['.', 'e', 'E']) {
            return Err(self.wrong_type(&expected));
        }
        match text.parse::<i128>() {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => Err(self.wrong_value(&expected)),
        }
    }

    pub fn array(&self) -> Result<Vec<Field<'a>>, BodyError> {
        match self.value {
            Value::Array(items) => Ok(items
                .iter()
                .enumerate()
                .map(|(index, value)| Field { path: format!("{}[{index}]", self.path), value })
                .collect()),
            _ => Err(self.wrong_type("a list")),
        }
    }

    pub fn object(&self) -> Result<Fields<'a>, BodyError> {
        self.object_as("an object")
    }

    /// As [`Field::object`]; `expected` shows what it may hold, like `an object like {"type": "text"}`.
    pub fn object_as(&self, expected: &str) -> Result<Fields<'a>, BodyError> {
        match self.value {
            Value::Object(object) => Ok(Fields { path: self.path.clone(), object }),
            _ => Err(self.wrong_type(expected)),
        }
    }
}

/// What a whole number in `range` is called in errors.
pub fn integer_from(range: &RangeInclusive<i128>) -> String {
    format!("an integer from {} to {}", range.start(), range.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code<T>(result: Result<T, BodyError>) -> Result<T, (Code, Option<String>)> {
        result.map_err(|error| (error.code, error.param))
    }

    #[test]
    fn types_are_exact_and_errors_carry_the_path() {
        let body = Value::parse(
            r#"{"text": "5", "flag": true, "n": 5, "f": 5.0, "big": 18446744073709551615, "null": null,
                "list": [{"x": "y"}], "huge": 1e999}"#,
        )
        .expect("valid");
        let fields = Fields::of_body(&body).expect("an object");
        let get = |key: &str| fields.get(key).expect("present");
        assert!(fields.get("null").is_none());
        assert!(fields.get("missing").is_none());
        assert_eq!(get("text").string(), Ok("5"));
        assert_eq!(get("n").integer(0..=9), Ok(5));
        assert_eq!(get("n").number(0.0..=9.0), Ok(5.0));
        assert_eq!(get("big").integer(0..=u64::MAX.into()), Ok(u64::MAX.into()));
        assert_eq!(code(get("text").integer(0..=9)), Err((Code::InvalidType, Some("text".into()))));
        assert_eq!(code(get("flag").number(0.0..=9.0)), Err((Code::InvalidType, Some("flag".into()))));
        assert_eq!(code(get("f").integer(0..=9)), Err((Code::InvalidType, Some("f".into()))));
        assert_eq!(code(get("n").integer(6..=9)), Err((Code::InvalidValue, Some("n".into()))));
        assert_eq!(code(get("huge").number(0.0..=9.0)), Err((Code::InvalidValue, Some("huge".into()))));
        let error = get("huge").integer(i64::MIN.into()..=u64::MAX.into()).unwrap_err();
        assert!(error.message.contains("an integer from -9223372036854775808 to 18446744073709551615"), "{error}");
        let error = get("n").number((Bound::Excluded(5.0), Bound::Included(9.0))).unwrap_err();
        assert_eq!(error.message, "n must be a number above 5, up to 9, got 5");
        let items = get("list").array().expect("a list");
        let item = items[0].object().expect("an object");
        assert_eq!(code(item.required("z").map(|_| ())), Err((Code::MissingField, Some("list[0].z".into()))));
        assert_eq!(code(item.get("x").expect("present").boolean()), Err((Code::InvalidType, Some("list[0].x".into()))));
    }
}
