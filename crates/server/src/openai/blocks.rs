//! The blocks that every reply carries beside its text: usage, what the server did, drafts, times.

use serde_json::{Map, Value, json};
use tf_engine::{CacheSource, DraftCounts, DraftSource, Sampling};
use tf_text::TokenId;
use tf_text::chat::Thinking;
use tf_text::tokenizer::Tokenizer;

use crate::config::ServerConfig;
use crate::generate::{Choice, LogprobRow};

/// What is known of a reply before it begins.
#[derive(Clone, Debug)]
pub struct Facts {
    pub id: String,
    /// `object` of a whole reply and of a chunk.
    pub object: &'static str,
    pub chunk_object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    pub model: String,
    pub sampling: Sampling,
    pub is_seed_derived: bool,
    /// `None` where a route knows no reasoning.
    pub thinking: Option<Thinking>,
    /// Prompts of the body; each is counted once.
    pub prompt_count: usize,
}

/// The keys that a whole reply and each of its chunks begin with.
pub fn head(config: &ServerConfig, facts: &Facts, object: &str) -> Map<String, Value> {
    let mut head = Map::new();
    head.insert("id".into(), facts.id.clone().into());
    head.insert("object".into(), object.into());
    head.insert("created".into(), facts.created.into());
    head.insert("model".into(), facts.model.clone().into());
    head.insert("system_fingerprint".into(), config.identity.fingerprint.clone().into());
    head
}

/// One value for one choice, a list for several.
fn one_or_all(mut values: Vec<Value>) -> Value {
    if values.len() == 1 { values.remove(0) } else { Value::Array(values) }
}

/// `usage`: each prompt counted once, replies over all choices so far.
pub fn usage(facts: &Facts, choices: &[Choice]) -> Value {
    let per_prompt = (choices.len() / facts.prompt_count.max(1)).max(1);
    let prompt: usize = choices.iter().step_by(per_prompt).map(|choice| choice.prompt.len()).sum();
    let cached: usize = choices.iter().step_by(per_prompt).map(|choice| stats(choice).cached_tokens as usize).sum();
    let completion: usize = choices.iter().map(|choice| choice.tokens.len()).sum();
    let mut usage = json!({
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    });
    if facts.thinking.is_some() {
        let reasoning = |choice: &Choice| choice.ended.as_ref().map_or(0, |ended| ended.finish.reasoning_token_count);
        let reasoning: u32 = choices.iter().map(reasoning).sum();
        usage["completion_tokens_details"] = json!({"reasoning_tokens": reasoning});
    }
    usage["prompt_cache_hit_tokens"] = json!(cached);
    usage["prompt_cache_miss_tokens"] = json!(prompt - cached);
    usage
}

fn stats(choice: &Choice) -> tf_engine::ReplyStats {
    choice.ended.as_ref().map(|ended| ended.stats).unwrap_or_default()
}

fn rate(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// Adds `tensorfold`, `speculative` and `timings` to a whole reply or to the last finish chunk.
pub fn add_extensions(config: &ServerConfig, facts: &Facts, choices: &[Choice], reply: &mut Map<String, Value>) {
    let all: Vec<tf_engine::ReplyStats> = choices.iter().map(stats).collect();
    let longest = |of: fn(&tf_engine::ReplyStats) -> std::time::Duration| {
        all.iter().map(of).max().unwrap_or_default().as_secs_f64()
    };
    let (queue, prefill, decode) = (longest(|s| s.queue), longest(|s| s.prefill), longest(|s| s.decode));
    let predicted: usize = choices.iter().map(|choice| choice.tokens.len()).sum();
    let cached = all.iter().map(|stats| stats.cached_tokens).max().unwrap_or(0);
    let sampling = &facts.sampling;

    let mut block = json!({
        "exact": true,
        "token_sha": one_or_all(choices.iter().map(|choice| choice.token_sha().into()).collect()),
        "engine": config.identity.version, "backend": config.identity.backend, "numerics": config.identity.numerics,
    });
    if let Some(thinking) = facts.thinking {
        block["thinking"] = thinking.is_on().into();
        if let Thinking::On(effort) = thinking {
            block["reasoning_effort"] = effort.name().into();
            block["reasoning_effort_value"] = effort.value().into();
        }
    }
    let mut seeds: Vec<Value> = choices.iter().map(|choice| choice.seed.to_string().into()).collect();
    seeds.dedup();
    block["seed"] = one_or_all(seeds);
    block["seed_source"] = if facts.is_seed_derived { "derived" } else { "request" }.into();
    let mut limits: Vec<Value> = choices.iter().map(|choice| choice.max_tokens.into()).collect();
    limits.dedup();
    block["max_tokens"] = one_or_all(limits);
    block["sampling"] = json!({
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p
    });
    block["cache"] = cache(&all, cached);
    block["queue_seconds"] = queue.into();
    block["prefill_seconds"] = prefill.into();
    block["decode_seconds"] = decode.into();
    block["time_to_first_token"] = (queue + prefill).into();
    block["tokens_per_second"] = rate(predicted, decode).into();
    let finishes = || choices.iter().filter_map(|choice| choice.ended.as_ref()).map(|ended| &ended.finish);
    if finishes().any(|finish| finish.incomplete_call) {
        block["incomplete_call"] = true.into();
    }
    if let Some(period) = all.iter().find_map(|stats| stats.looped) {
        block["loop"] = period.into();
    }
    let malformed: u32 = finishes().map(|finish| finish.malformed_markup).sum();
    if malformed > 0 {
        block["malformed_markup"] = malformed.into();
    }
    reply.insert("tensorfold".into(), block);

    let drafted: u32 = all.iter().map(|stats| stats.drafted).sum();
    let accepted: u32 = all.iter().map(|stats| stats.accepted).sum();
    if drafted > 0 {
        reply.insert("speculative".into(), speculative(&all, drafted, accepted, predicted));
    }
    let prompt: usize = choices.iter().map(|choice| choice.prompt.len()).max().unwrap_or(0) - cached as usize;
    reply.insert(
        "timings".into(),
        json!({
            "cache_n": cached, "prompt_n": prompt, "prompt_ms": prefill * 1e3, "prompt_per_second": rate(prompt, prefill),
            "predicted_n": predicted, "predicted_ms": decode * 1e3, "predicted_per_second": rate(predicted, decode),
            "draft_n": drafted, "draft_n_accepted": accepted
        }),
    );
}

/// What kept prefixes did for the choice that they helped most.
fn cache(all: &[tf_engine::ReplyStats], cached: u32) -> Value {
    let best = all.iter().find(|stats| stats.cached_tokens == cached);
    let used = best.map(|stats| stats.cache).unwrap_or_default();
    let source = match used.source {
        CacheSource::None => "none",
        CacheSource::Ram => "ram",
        CacheSource::Disk => "disk",
    };
    let mut block = json!({"matched": used.matched, "resumed": cached, "source": source});
    if let Some(reason) = used.reason {
        block["reason"] = reason.as_str().into();
    }
    block
}

fn speculative(all: &[tf_engine::ReplyStats], drafted: u32, accepted: u32, predicted: usize) -> Value {
    let windows: u32 = all.iter().map(|stats| stats.windows).sum();
    let mut by_source = [DraftCounts::default(); DraftSource::ALL.len()];
    for stats in all {
        by_source.iter_mut().zip(&stats.drafts).for_each(|(sum, counts)| sum.add(counts));
    }
    let mut total = DraftCounts::default();
    by_source.iter().for_each(|counts| total.add(counts));
    let used: Vec<DraftSource> =
        DraftSource::ALL.into_iter().filter(|source| by_source[*source as usize].drafted > 0).collect();
    let names: Vec<&str> = used.iter().map(|source| source.as_str()).collect();
    let sources: Map<String, Value> = used
        .iter()
        .map(|source| {
            let counts = &by_source[*source as usize];
            let (drafted_per_position, accepted_per_position) = per_position(counts);
            let entry = json!({
                "drafted": counts.drafted, "accepted": counts.accepted,
                "drafted_per_position": drafted_per_position, "accepted_per_position": accepted_per_position
            });
            (source.as_str().to_owned(), entry)
        })
        .collect();
    let (drafted_per_position, accepted_per_position) = per_position(&total);
    json!({
        "proposer": names.join("+"), "rounds": windows, "drafted": drafted, "accepted": accepted,
        "acceptance_rate": rate(accepted as usize, f64::from(drafted)),
        "tokens_per_round": rate(predicted, f64::from(windows)),
        "drafted_per_position": drafted_per_position, "accepted_per_position": accepted_per_position,
        "sources": sources
    })
}

/// Drafted and accepted by place in the window, as far as anything was drafted.
fn per_position(counts: &DraftCounts) -> (&[u64], &[u64]) {
    let used = counts.drafted_per_position.iter().take_while(|drafted| **drafted > 0).count();
    (&counts.drafted_per_position[..used], &counts.accepted_per_position[..used])
}

/// A log-probability as it is printed: minus infinity has no JSON number.
pub fn logprob(value: f32) -> Value {
    if value.is_finite() { f64::from(value).into() } else { (-9999.0).into() }
}

/// One row of chat's log-probabilities.
pub fn logprob_row(tokenizer: &Tokenizer, row: &LogprobRow) -> Value {
    let mut entry = token_entry(tokenizer, row.token, row.logprob);
    let top: Vec<Value> = row.top.iter().map(|&(token, logprob)| token_entry(tokenizer, token, logprob)).collect();
    entry["top_logprobs"] = top.into();
    entry
}

fn token_entry(tokenizer: &Tokenizer, token: TokenId, value: f32) -> Value {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob(value), "bytes": bytes})
}
