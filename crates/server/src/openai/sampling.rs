//! The fields that chat and completions share: how tokens are drawn, where a reply ends, how it is sent.

use std::ops::{Bound, RangeInclusive};
use std::time::Duration;

use tf_engine::{Priority, Sampling};
use tf_text::TokenId;
use tf_text::fields::{BodyError, Code, Field, Fields, integer_from};
use tf_text::json::Value;

use crate::config::SamplingDefaults;

pub const STOPS_MAX: usize = 64;
pub const STOP_CHARACTERS_MAX: usize = 256;
pub const BIAS_MAX: usize = 1024;
pub const TOP_LOGPROBS_MAX: u32 = 20;
pub const TIMEOUT_SECONDS_MAX: f64 = 86_400.0;
const TOKENS_MAX: i128 = u32::MAX as i128;

/// What a body says about the reply, apart from the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Complete but for the seed and the masked end tokens.
    pub sampling: Sampling,
    pub seed: Option<u64>,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub choice_count: u32,
    pub stops: Vec<String>,
    pub stop_ids: Vec<TokenId>,
    pub include_stop: bool,
    pub ignore_eos: bool,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub draft: bool,
    pub return_token_ids: bool,
    pub priority: Priority,
    /// The time from the request's arrival to its end.
    pub timeout: Option<Duration>,
}

/// What the server allows and assumes.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub defaults: SamplingDefaults,
    pub choices_max: u32,
    pub vocab_size: u32,
}

/// Values of a refused field that say the same as leaving it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neutral {
    /// `null`, `false`, 0, and what is empty.
    Empty,
    /// As [`Neutral::Empty`], or 1.
    One,
    /// As [`Neutral::Empty`], or a number below 0.
    Negative,
    /// `null` alone.
    Nothing,
}

const STRUCTURED: &str = "structured output is not built yet; leave it out";
const OTHER_SAMPLER: &str = "this sampler is not offered; use temperature, top_p, top_k or min_p";

/// Fields that other servers know and this one doesn't offer, with what to do instead. Whatever would change the reply stands
/// here: to ignore it would answer another question.
const REFUSED: &[(&str, Neutral, &str)] = &[
    ("modalities", Neutral::Empty, "only text is written; leave it out or send [\"text\"]"),
    ("audio", Neutral::Empty, "only text is written; leave it out"),
    ("web_search_options", Neutral::Empty, "the server searches nothing; offer a tool instead"),
    ("functions", Neutral::Empty, "use tools"),
    ("function_call", Neutral::Empty, "use tool_choice"),
    ("use_beam_search", Neutral::Empty, "beam search is not offered; leave it out"),
    ("length_penalty", Neutral::One, "beam search is not offered; leave it out"),
    ("mirostat", Neutral::Empty, "mirostat is not offered; use temperature, top_p, top_k or min_p"),
    ("typical_p", Neutral::One, OTHER_SAMPLER),
    ("tfs_z", Neutral::One, OTHER_SAMPLER),
    ("top_a", Neutral::Empty, OTHER_SAMPLER),
    ("top_n_sigma", Neutral::Negative, OTHER_SAMPLER),
    ("xtc_probability", Neutral::Empty, OTHER_SAMPLER),
    ("dry_multiplier", Neutral::Empty, OTHER_SAMPLER),
    ("dynatemp_range", Neutral::Empty, OTHER_SAMPLER),
    ("logits_processors", Neutral::Empty, OTHER_SAMPLER),
    ("custom_logit_processor", Neutral::Empty, OTHER_SAMPLER),
    ("repeat_penalty", Neutral::One, "use repetition_penalty"),
    ("bad_words", Neutral::Empty, "use logit_bias with -100 for their tokens"),
    ("allowed_token_ids", Neutral::Empty, "use logit_bias"),
    ("n_predict", Neutral::Negative, "use max_tokens"),
    ("max_new_tokens", Neutral::Nothing, "use max_tokens"),
    ("truncate_prompt_tokens", Neutral::Negative, "prompts are never cut; send a shorter one"),
    ("lora_path", Neutral::Empty, "one model is served; leave it out"),
    ("thinking_budget_tokens", Neutral::Negative, "use thinking_budget"),
    ("structured_outputs", Neutral::Empty, STRUCTURED),
    ("guided_json", Neutral::Empty, STRUCTURED),
    ("guided_regex", Neutral::Empty, STRUCTURED),
    ("guided_choice", Neutral::Empty, STRUCTURED),
    ("guided_grammar", Neutral::Empty, STRUCTURED),
    ("grammar", Neutral::Empty, STRUCTURED),
    ("json_schema", Neutral::Empty, STRUCTURED),
    ("regex", Neutral::Empty, STRUCTURED),
    ("ebnf", Neutral::Empty, STRUCTURED),
    ("return_progress", Neutral::Empty, "progress of the prompt is not reported yet; leave it out"),
    ("prompt_logprobs", Neutral::Empty, "use echo and logprobs of /v1/completions"),
];

/// Reads the fields.
///
/// # Errors
/// The first mistake, or a field that would change the reply and isn't offered.
pub fn generation(fields: &Fields<'_>, rules: &Rules) -> Result<Generation, BodyError> {
    refuse_unsupported(fields)?;
    let number = |key: &str, range: RangeInclusive<f64>| fields.get(key).map(|field| field.number(range)).transpose();
    let integer = |key: &str, range| fields.get(key).map(|field| field.integer(range)).transpose();
    let boolean = |key: &str| fields.get(key).map(|field| field.boolean()).transpose();

    let defaults = rules.defaults;
    let above_zero = (Bound::Excluded(0.0), Bound::Included(10.0));
    let repetition_penalty = fields.get("repetition_penalty").map(|field| field.number(above_zero)).transpose()?;
    let top_k = integer("top_k", i64::MIN.into()..=i64::MAX.into())?;
    let sampling = Sampling {
        temperature: number("temperature", 0.0..=100.0)?.map_or(defaults.temperature, |value| value as f32),
        top_p: number("top_p", 0.0..=1.0)?.map_or(defaults.top_p, |value| value as f32),
        top_k: top_k.map_or(defaults.top_k, |value| value.clamp(0, TOKENS_MAX) as u32),
        min_p: number("min_p", 0.0..=1.0)?.map_or(defaults.min_p, |value| value as f32),
        seed: 0,
        frequency_penalty: number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
        presence_penalty: number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
        repetition_penalty: repetition_penalty.unwrap_or(1.0) as f32,
        logit_bias: logit_bias(fields, rules.vocab_size)?,
        masked_before: 0,
        masked: Vec::new(),
    };
    let (max_tokens, min_tokens) = token_limits(fields)?;
    let expected = "an object like {\"include_usage\": true}";
    let options = fields.get("stream_options").map(|field| field.object_as(expected)).transpose()?;
    let option = |key: &str| -> Result<bool, BodyError> {
        let field = options.as_ref().and_then(|options| options.get(key));
        Ok(field.map(|field| field.boolean()).transpose()?.unwrap_or(false))
    };
    // 64 bits in either reading: clients send signed and unsigned seeds.
    let seed = integer("seed", i64::MIN.into()..=u64::MAX.into())?;
    let generation = Generation {
        sampling,
        seed: seed.map(|value| value as u64),
        max_tokens,
        min_tokens,
        choice_count: integer("n", 1..=i128::from(rules.choices_max))?.map_or(1, |value| value as u32),
        stops: stops(fields)?,
        stop_ids: match fields.get("stop_token_ids") {
            Some(field) => token_ids(&field, rules.vocab_size)?,
            None => Vec::new(),
        },
        include_stop: boolean("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: boolean("ignore_eos")?.unwrap_or(false),
        stream: boolean("stream")?.unwrap_or(false),
        include_usage: option("include_usage")?,
        continuous_usage: option("continuous_usage_stats")?,
        draft: boolean("draft")?.unwrap_or(true),
        return_token_ids: boolean("return_token_ids")?.unwrap_or(false),
        priority: priority(fields)?,
        timeout: timeout(fields)?,
    };
    if let Some(field) = fields.get("best_of") {
        let best_of = field.integer(0..=i64::MAX.into())?;
        if best_of != 0 && best_of != i128::from(generation.choice_count) {
            let message = "best_of must equal n or be left out: all choices are returned, none is picked";
            return Err(field.error(Code::UnsupportedParameter, message));
        }
    }
    Ok(generation)
}

/// The most tokens of a reply, where the body says, and the least.
fn token_limits(fields: &Fields<'_>) -> Result<(Option<u32>, u32), BodyError> {
    let limit = |key: &str| -> Result<Option<u32>, BodyError> {
        let Some(field) = fields.get(key) else { return Ok(None) };
        Ok(Some(field.integer(0..=i64::MAX.into())?.min(TOKENS_MAX) as u32))
    };
    let most = match limit("max_completion_tokens")? {
        Some(most) => Some(("max_completion_tokens", most)),
        None => limit("max_tokens")?.map(|most| ("max_tokens", most)),
    };
    let least = limit("min_tokens")?.unwrap_or(0);
    if let (Some((name, most)), Some(field)) = (most.filter(|(_, most)| least > *most), fields.get("min_tokens")) {
        let message = format!("min_tokens {least} is more than {name} {most}: lower it, or raise {name}");
        return Err(field.error(Code::ConflictingValues, message));
    }
    Ok((most.map(|(_, most)| most), least))
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), BodyError> {
    for &(key, neutral, advice) in REFUSED {
        let Some(field) = fields.get(key) else { continue };
        if !is_neutral(key, neutral, field.value()) {
            return Err(field.error(Code::UnsupportedParameter, format!("{key} is not supported: {advice}")));
        }
    }
    if let Some(field) = fields.get("skip_special_tokens")
        && !field.boolean()?
    {
        let message = "skip_special_tokens: false is not supported: markers are never part of a reply's text; \
                       return_token_ids shows them";
        return Err(field.error(Code::UnsupportedParameter, message));
    }
    if let Some(field) = fields.get("suffix")
        && !field.string()?.is_empty()
    {
        return Err(field.error(Code::UnsupportedParameter, "suffix is not supported: this model has no fill-in form"));
    }
    Ok(())
}

/// Whether a value says the same as leaving the field out.
fn is_neutral(key: &str, neutral: Neutral, value: &Value) -> bool {
    match (value, neutral) {
        (Value::Null, _) => true,
        (_, Neutral::Nothing) | (Value::Bool(true) | Value::Object(_), _) => false,
        (Value::Bool(false), _) => true,
        (Value::Number(text), neutral) => text.parse::<f64>().is_ok_and(|number| match neutral {
            Neutral::Empty | Neutral::Nothing => number == 0.0,
            Neutral::One => number == 0.0 || number == 1.0,
            Neutral::Negative => number <= 0.0,
        }),
        (Value::String(text), _) => text.is_empty() || (key == "function_call" && text == "none"),
        (Value::Array(items), _) => {
            items.is_empty() || (key == "modalities" && items.iter().all(|item| *item == Value::String("text".into())))
        }
    }
}

fn priority(fields: &Fields<'_>) -> Result<Priority, BodyError> {
    let Some(field) = fields.get("priority") else { return Ok(Priority::Foreground) };
    // Numbers are what other servers take; here the queue is first come, first served.
    let numbers = i64::MIN.into()..=i64::MAX.into();
    let expected = format!("\"background\", \"foreground\" or {}", integer_from(&numbers));
    match field.value() {
        Value::Number(_) if field.integer(numbers).is_ok() => Ok(Priority::Foreground),
        Value::String(text) if text == "background" => Ok(Priority::Background),
        Value::String(text) if text == "foreground" => Ok(Priority::Foreground),
        Value::Number(_) | Value::String(_) => Err(field.wrong_value(&expected)),
        _ => Err(field.wrong_type(&expected)),
    }
}

fn timeout(fields: &Fields<'_>) -> Result<Option<Duration>, BodyError> {
    let Some(field) = fields.get("timeout") else { return Ok(None) };
    let seconds = field.number_of("seconds", (Bound::Excluded(0.0), Bound::Included(TIMEOUT_SECONDS_MAX)))?;
    Ok(Some(Duration::from_secs_f64(seconds)))
}

fn logit_bias(fields: &Fields<'_>, vocab_size: u32) -> Result<Vec<(TokenId, f32)>, BodyError> {
    let Some(field) = fields.get("logit_bias") else { return Ok(Vec::new()) };
    let last = vocab_size.saturating_sub(1);
    let map = field.object_as(&format!("an object of token ids from 0 to {last} and numbers from -100 to 100"))?;
    let count = map.object().iter().count();
    if count > BIAS_MAX {
        return Err(
            field.error(Code::InvalidValue, format!("logit_bias has {count} entries, at most {BIAS_MAX} are allowed"))
        );
    }
    let mut biases = Vec::with_capacity(count);
    for (key, _) in map.object().iter() {
        let Some(entry) = map.get(key) else { continue };
        let Some(token) = key.parse().ok().filter(|&token: &TokenId| token < vocab_size) else {
            let message = format!("logit_bias has the key {key:?}; keys are token ids from 0 to {last}");
            return Err(field.error(Code::InvalidValue, message));
        };
        biases.push((token, entry.number(-100.0..=100.0)? as f32));
    }
    Ok(biases)
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, BodyError> {
    let Some(field) = fields.get("stop") else { return Ok(Vec::new()) };
    let string = format!("a string of 1 to {STOP_CHARACTERS_MAX} characters");
    let one = |field: &Field<'_>| match field.value() {
        Value::String(text) if (1..=STOP_CHARACTERS_MAX).contains(&text.chars().count()) => Ok(text.clone()),
        Value::String(_) => Err(field.wrong_value(&string)),
        _ => Err(field.wrong_type(&string)),
    };
    match field.value() {
        Value::String(_) => Ok(vec![one(&field)?]),
        Value::Array(items) if items.len() <= STOPS_MAX => field.array()?.iter().map(one).collect(),
        Value::Array(items) => {
            let message = format!("stop has {} strings, at most {STOPS_MAX} are allowed", items.len());
            Err(field.error(Code::InvalidValue, message))
        }
        _ => Err(field.wrong_type(&format!("{string}, or a list of at most {STOPS_MAX} such strings"))),
    }
}

/// A list of ids inside the vocabulary.
pub fn token_ids(field: &Field<'_>, vocab_size: u32) -> Result<Vec<TokenId>, BodyError> {
    let range = 0..=i128::from(vocab_size) - 1;
    let Value::Array(_) = field.value() else {
        return Err(field.wrong_type(&format!("a list of token ids from 0 to {}", range.end())));
    };
    let ids = field.array()?;
    ids.iter().map(|id| Ok(id.integer(range.clone())? as TokenId)).collect()
}

/// The name that the request gives the model; empty when it gives none.
pub fn model<'a>(fields: &Fields<'a>) -> Result<&'a str, BodyError> {
    Ok(fields.get("model").map(|field| field.string()).transpose()?.unwrap_or(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Generation, (&'static str, Option<String>)> {
        generation_of(body).map_err(|error| (error.code.as_str(), error.param))
    }

    fn refusal(body: &str) -> String {
        generation_of(body).expect_err(body).message
    }

    fn generation_of(body: &str) -> Result<Generation, BodyError> {
        let value = Value::parse(body).expect("test bodies are JSON");
        let fields = Fields::of_body(&value).expect("test bodies are objects");
        let defaults = SamplingDefaults { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 };
        let rules = Rules { defaults, choices_max: 16, vocab_size: 100 };
        generation(&fields, &rules)
    }

    #[test]
    fn wrong_fields_are_named() {
        let cases = [
            (r#"{"temperature": "hot"}"#, "invalid_type", "temperature"),
            (r#"{"temperature": 101}"#, "invalid_value", "temperature"),
            (r#"{"temperature": true}"#, "invalid_type", "temperature"),
            (r#"{"top_p": 1.5}"#, "invalid_value", "top_p"),
            (r#"{"top_k": 1.5}"#, "invalid_type", "top_k"),
            (r#"{"min_p": -1}"#, "invalid_value", "min_p"),
            (r#"{"frequency_penalty": 3}"#, "invalid_value", "frequency_penalty"),
            (r#"{"repetition_penalty": 0}"#, "invalid_value", "repetition_penalty"),
            (r#"{"logit_bias": {"100": 1}}"#, "invalid_value", "logit_bias"),
            (r#"{"logit_bias": {"x": 1}}"#, "invalid_value", "logit_bias"),
            (r#"{"logit_bias": {"5": 101}}"#, "invalid_value", "logit_bias.5"),
            (r#"{"max_tokens": -1}"#, "invalid_value", "max_tokens"),
            (r#"{"max_tokens": "5"}"#, "invalid_type", "max_tokens"),
            (r#"{"max_completion_tokens": 1.0}"#, "invalid_type", "max_completion_tokens"),
            (r#"{"seed": 1e3}"#, "invalid_type", "seed"),
            (r#"{"n": 0}"#, "invalid_value", "n"),
            (r#"{"n": 17}"#, "invalid_value", "n"),
            (r#"{"stop": [""]}"#, "invalid_value", "stop[0]"),
            (r#"{"stop": [1]}"#, "invalid_type", "stop[0]"),
            (r#"{"stop": 1}"#, "invalid_type", "stop"),
            (r#"{"stop_token_ids": [100]}"#, "invalid_value", "stop_token_ids[0]"),
            (r#"{"stream": 1}"#, "invalid_type", "stream"),
            (r#"{"stream_options": {"include_usage": 1}}"#, "invalid_type", "stream_options.include_usage"),
            (r#"{"draft": 0}"#, "invalid_type", "draft"),
            (r#"{"best_of": 3}"#, "unsupported_parameter", "best_of"),
            (r#"{"priority": "urgent"}"#, "invalid_value", "priority"),
            (r#"{"priority": true}"#, "invalid_type", "priority"),
            (r#"{"priority": 1.5}"#, "invalid_value", "priority"),
            (r#"{"min_tokens": 20, "max_tokens": 8}"#, "conflicting_values", "min_tokens"),
            (r#"{"min_tokens": 20, "max_completion_tokens": 8, "max_tokens": 30}"#, "conflicting_values", "min_tokens"),
            (r#"{"timeout": 0}"#, "invalid_value", "timeout"),
            (r#"{"timeout": -1}"#, "invalid_value", "timeout"),
            (r#"{"timeout": "soon"}"#, "invalid_type", "timeout"),
            (r#"{"functions": [{}]}"#, "unsupported_parameter", "functions"),
            (r#"{"modalities": ["text", "audio"]}"#, "unsupported_parameter", "modalities"),
            (r#"{"guided_json": {}}"#, "unsupported_parameter", "guided_json"),
            (r#"{"suffix": "x"}"#, "unsupported_parameter", "suffix"),
            (r#"{"skip_special_tokens": false}"#, "unsupported_parameter", "skip_special_tokens"),
            (r#"{"bad_words": ["x"]}"#, "unsupported_parameter", "bad_words"),
            (r#"{"allowed_token_ids": [1]}"#, "unsupported_parameter", "allowed_token_ids"),
            (r#"{"typical_p": 0.5}"#, "unsupported_parameter", "typical_p"),
            (r#"{"repeat_penalty": 1.1}"#, "unsupported_parameter", "repeat_penalty"),
            (r#"{"n_predict": 5}"#, "unsupported_parameter", "n_predict"),
            (r#"{"max_new_tokens": 5}"#, "unsupported_parameter", "max_new_tokens"),
            (r#"{"truncate_prompt_tokens": 5}"#, "unsupported_parameter", "truncate_prompt_tokens"),
            (r#"{"web_search_options": {}}"#, "unsupported_parameter", "web_search_options"),
        ];
        for (body, code, param) in cases {
            assert_eq!(read(body), Err((code, Some(param.to_string()))), "{body}");
        }
    }

    #[test]
    fn a_refused_value_is_told_the_whole_range() {
        for (body, message) in [
            (r#"{"timeout": -1}"#, "timeout must be a number of seconds above 0, up to 86400, got -1"),
            (r#"{"timeout": 0}"#, "timeout must be a number of seconds above 0, up to 86400, got 0"),
            (r#"{"repetition_penalty": -1}"#, "repetition_penalty must be a number above 0, up to 10, got -1"),
            (
                r#"{"priority": 1.5}"#,
                "priority must be \"background\", \"foreground\" or an integer from -9223372036854775808 to \
                 9223372036854775807, got 1.5",
            ),
            (
                r#"{"max_tokens": 9223372036854775808}"#,
                "max_tokens must be an integer from 0 to 9223372036854775807, got 9223372036854775808",
            ),
            (
                r#"{"stop": 1}"#,
                "stop must be a string of 1 to 256 characters, or a list of at most 64 such strings, got 1",
            ),
            (r#"{"stop": [1]}"#, "stop[0] must be a string of 1 to 256 characters, got 1"),
            (r#"{"stop_token_ids": 1}"#, "stop_token_ids must be a list of token ids from 0 to 99, got 1"),
            (
                r#"{"logit_bias": 1}"#,
                "logit_bias must be an object of token ids from 0 to 99 and numbers from -100 to 100, got 1",
            ),
            (r#"{"stream_options": 1}"#, "stream_options must be an object like {\"include_usage\": true}, got 1"),
            (
                r#"{"min_tokens": 9, "max_tokens": 8}"#,
                "min_tokens 9 is more than max_tokens 8: lower it, or raise max_tokens",
            ),
        ] {
            assert_eq!(refusal(body), message, "{body}");
        }
        assert!(read(r#"{"min_tokens": 8, "max_tokens": 8}"#).is_ok() && read(r#"{"min_tokens": 9}"#).is_ok());
    }

    #[test]
    fn null_and_unknown_fields_are_absent() {
        let plain = read("{}");
        let same = read(
            r#"{"temperature": null, "stop": null, "n": null, "suffix": "", "modalities": ["text"], "functions": null,
                "use_beam_search": false, "mirostat": 0, "top_k": -1, "nobody_knows": {"a": 1}, "priority": 3,
                "n_predict": -1, "typical_p": 1.0, "repeat_penalty": 1, "length_penalty": 1.0,
                "bad_words": [], "xtc_probability": 0, "structured_outputs": null,
                "truncate_prompt_tokens": -1}"#,
        );
        assert_eq!(same, plain);
        assert!(plain.is_ok_and(|generation| generation.draft && generation.choice_count == 1));
    }

    #[test]
    fn seeds_are_64_bits_in_either_reading() {
        for (text, seed) in [("18446744073709551615", u64::MAX), ("-1", u64::MAX), ("7", 7)] {
            assert_eq!(read(&format!("{{\"seed\": {text}}}")).map(|generation| generation.seed), Ok(Some(seed)));
        }
        assert!(read(r#"{"seed": 18446744073709551616}"#).is_err());
    }
}
