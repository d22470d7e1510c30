//! Requests from a seed: distinct prompts, mixed lengths, conversations that grow. The same seed gives the same requests
//! on every machine.

use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

const WORDS: [&str; 48] = [
    "river", "stone", "amber", "seven", "quiet", "north", "paper", "lamp", "garden", "winter", "copper", "violin",
    "harbour", "letter", "market", "bridge", "silver", "morning", "engine", "forest", "candle", "island", "mirror",
    "thunder", "pencil", "orchard", "window", "velvet", "meadow", "signal", "barrel", "compass", "ladder", "saffron",
    "tunnel", "glacier", "feather", "cottage", "anchor", "pepper", "ribbon", "canyon", "walnut", "lantern", "summit",
    "ferry", "quartz", "willow",
];

/// A body and where it goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub path: &'static str,
    pub body: Value,
}

impl Request {
    /// The same request without drafts.
    pub fn undrafted(&self) -> Request {
        self.with("draft", json!(false))
    }

    /// The same request with another value of one field.
    pub fn with(&self, key: &str, value: Value) -> Request {
        let mut request = self.clone();
        request.body[key] = value;
        request
    }
}

/// SplitMix64: a fixed sequence of 64-bit numbers for each seed.
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// The sequence of a seed, from its start.
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// In (0, 1).
    pub fn unit(&mut self) -> f64 {
        ((self.number() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
}

fn words(numbers: &mut Numbers, count: u64) -> String {
    let words: Vec<&str> = (0..count).map(|_| WORDS[numbers.below(WORDS.len() as u64) as usize]).collect();
    words.join(" ")
}

/// What the requests of one group have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub seed: u64,
    /// Reply tokens.
    pub tokens: u64,
    pub temperature: f64,
    /// Prompts of several lengths, and conversations that grow from one repetition to the next.
    pub mixed: bool,
    /// One prompt for all.
    pub same_prompt: bool,
    /// Sends no seed, so that the server derives it from the prompt.
    pub no_seed: bool,
}

/// The `count` requests of a repetition.
pub fn requests(settings: &Settings, repetition: u64, count: usize) -> Vec<Request> {
    (0..count).map(|index| request(settings, repetition, index as u64)).collect()
}

fn request(settings: &Settings, repetition: u64, index: u64) -> Request {
    let (repetition, index) = if settings.same_prompt { (0, 0) } else { (repetition, index) };
    let mut numbers = Numbers::new(settings.seed ^ (repetition << 32) ^ index.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut tokens = settings.tokens;
    let messages = match (settings.mixed, index % 3) {
        (false, _) => vec![user(&mut numbers, 12)],
        (true, 0) => vec![user(&mut numbers, 4)],
        (true, 1) => {
            let count = 60 + numbers.below(140);
            vec![user(&mut numbers, count)]
        }
        (true, _) => {
            tokens = (tokens / 2).max(1);
            conversation(settings.seed, index, repetition)
        }
    };
    let mut body = Map::new();
    body.insert("messages".into(), messages.into());
    body.insert("thinking".into(), json!({"type": "disabled"}));
    body.insert("max_tokens".into(), tokens.into());
    // Every stream writes its whole length, so that rates are over the same number of tokens.
    body.insert("ignore_eos".into(), true.into());
    body.insert("temperature".into(), settings.temperature.into());
    if !settings.no_seed {
        body.insert("seed".into(), ((settings.seed ^ (repetition << 16) ^ index) & 0xffff_ffff).into());
    }
    Request { path: CHAT, body: Value::Object(body) }
}

fn user(numbers: &mut Numbers, count: u64) -> Value {
    // The number makes prompts distinct whatever the words.
    let number = numbers.below(1 << 40);
    json!({"role": "user", "content": format!("Tell me about {number}: {}.", words(numbers, count))})
}

/// The messages of a conversation at a turn: those of the turn before it, and two more.
fn conversation(seed: u64, index: u64, turn: u64) -> Vec<Value> {
    let mut numbers = Numbers::new(seed ^ 0x6772_6f77 ^ (index << 8));
    // All conversations share their system text.
    let mut messages =
        vec![json!({"role": "system", "content": words(&mut Numbers::new(seed), 40)}), user(&mut numbers, 10)];
    for _ in 0..turn {
        messages.push(json!({"role": "assistant", "content": words(&mut numbers, 15)}));
        messages.push(user(&mut numbers, 8));
    }
    messages
}

/// A completions request with exactly these tokens.
pub fn of_ids(ids: &[u32], tokens: u64, seed: u64) -> Request {
    let body = json!({
        "prompt": ids, "max_tokens": tokens, "ignore_eos": true, "temperature": 1.0, "seed": seed & 0xffff_ffff,
    });
    Request { path: COMPLETIONS, body }
}

/// `count` tokens of a vocabulary, away from its ends, where markers are.
pub fn ids(numbers: &mut Numbers, vocab_size: u64, count: u64) -> Vec<u32> {
    let (from, span) = (vocab_size / 4, (vocab_size / 2).max(1));
    (0..count).map(|_| (from + numbers.below(span)) as u32).collect()
}

/// A line of a dataset: an object with `messages` or `prompt`. Other fields of a request's body are taken over.
///
/// # Errors
/// What is wrong with the line.
pub fn of_line(line: &str, tokens: u64, seed: u64) -> Result<Request, String> {
    const TAKEN: [&str; 7] = ["messages", "tools", "tool_choice", "temperature", "reasoning_effort", "prompt", "stop"];
    let line: Map<String, Value> = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let path = match (line.contains_key("messages"), line.contains_key("prompt")) {
        (true, _) => CHAT,
        (false, true) => COMPLETIONS,
        (false, false) => return Err("expected an object with messages or prompt".to_owned()),
    };
    let is_wanted = |key: &str, value: &Value| {
        TAKEN.contains(&key) && !value.is_null() && !value.as_array().is_some_and(Vec::is_empty)
    };
    let mut body: Map<String, Value> = line.iter().filter(|(key, value)| is_wanted(key, value)).map(pair).collect();
    if path == CHAT
        && let Some(thinking) = line.get("thinking").and_then(Value::as_bool)
    {
        body.insert("thinking".into(), json!({"type": if thinking { "enabled" } else { "disabled" }}));
    }
    body.insert("max_tokens".into(), tokens.into());
    body.insert("seed".into(), (seed & 0xffff_ffff).into());
    Ok(Request { path, body: Value::Object(body) })
}

fn pair((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn settings() -> Settings {
        Settings { seed: 1, tokens: 8, temperature: 1.0, mixed: true, same_prompt: false, no_seed: false }
    }

    #[test]
    fn a_seed_gives_the_same_distinct_requests() {
        let all = |settings: &Settings| -> Vec<Request> {
            (0..3).flat_map(|repetition| requests(settings, repetition, 9)).collect()
        };
        assert_eq!(all(&settings()), all(&settings()));
        let bodies = |settings: &Settings| -> BTreeSet<String> {
            all(settings).iter().map(|request| request.body["messages"].to_string()).collect()
        };
        for mixed in [false, true] {
            assert_eq!(bodies(&Settings { mixed, ..settings() }).len(), 27, "mixed {mixed}");
        }
        assert_eq!(bodies(&Settings { same_prompt: true, ..settings() }).len(), 1);
        assert!(bodies(&settings()).is_disjoint(&bodies(&Settings { seed: 2, ..settings() })));
    }

    #[test]
    fn conversations_grow_at_their_end() {
        let turns: Vec<Request> = (0..3).map(|turn| request(&settings(), turn, 2)).collect();
        for pair in turns.windows(2) {
            let (before, after) = (pair[0].body["messages"].as_array(), pair[1].body["messages"].as_array());
            let (before, after) = (before.unwrap(), after.unwrap());
            assert_eq!(after.len(), before.len() + 2);
            assert_eq!(after[..before.len()], before[..]);
        }
    }

    #[test]
    fn a_seed_is_sent_unless_it_shall_be_derived() {
        let seeds = |no_seed| request(&Settings { no_seed, ..settings() }, 1, 2).body.get("seed").cloned();
        assert!(seeds(false).is_some_and(|seed| seed.is_u64()));
        assert_eq!(seeds(true), None);
        assert_eq!(request(&settings(), 0, 0).undrafted().body["draft"], json!(false));
    }

    #[test]
    fn a_dataset_line_keeps_what_belongs_to_a_body() {
        let line = r#"{"task": "x", "messages": [{"role": "user", "content": "a"}], "thinking": true, "tools": [], "expected": {}}"#;
        let request = of_line(line, 5, 7).unwrap();
        assert_eq!(request.path, CHAT);
        let expected = json!({"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "enabled"},
                              "max_tokens": 5, "seed": 7});
        assert_eq!(request.body, expected);
        assert_eq!(of_line(r#"{"prompt": "a"}"#, 5, 7).unwrap().path, COMPLETIONS);
        assert!(of_line("{}", 5, 7).is_err() && of_line("x", 5, 7).is_err());
    }
}
