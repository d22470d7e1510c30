//! The engine around the model: requests together, drafted from every source, with given tokens, in pieces, giving way
//! and resuming, against each request alone and one row a round.

use std::sync::Arc;

use tf_engine::model::Model;
use tf_engine::testing::serve;
use tf_engine::testing::simulate::ReplyRecord;
use tf_engine::{DraftPolicy, DraftSource, EngineLimits, Forcing, Priority, Reasoning, Request};

use super::{Evidence, Fault, Subject, samplings};

/// How requests are served: drafts from the head, from the context, slots, prompt rows a round, bytes for prefixes.
type Serving = (bool, bool, u32, u32, u64);
const SERVINGS: [Serving; 3] = [(true, true, 3, 7, 1 << 24), (false, true, 2, 64, 0), (true, false, 2, 5, 1 << 24)];
/// The one serving of an emulated device: more requests than slots, so that one in the background gives way.
const LEAST: Serving = (true, true, 2, 7, 1 << 24);

/// Six requests: prompts that repeat themselves and share prefixes, greedy and sampled, some with given tokens, some in
/// the background.
fn requests(subject: &Subject) -> Vec<Request> {
    let samplings = samplings();
    let tokens = &subject.tokens;
    let make = |index: usize| {
        let mut prompt = tokens[..21 + subject.extent.pick(2, 6, 6) * index].to_vec();
        prompt.extend_from_slice(&tokens[index..18]);
        let forcing = |budget| {
            let closing = vec![tokens[150], tokens[149], tokens[151]];
            let reasoning = Reasoning { close: tokens[149], budget: Some(budget), loop_guard: true, closing };
            Some(Arc::new(Forcing { reasoning: Some(reasoning), opening: tokens[5..12].to_vec() }))
        };
        let mut sampling = samplings[index % samplings.len()].clone();
        if index % 4 < 2 {
            // So few tokens that runs of them come again and are copied.
            sampling.logit_bias = tokens[5..8].iter().map(|&token| (token, 80.0)).collect();
        }
        Request {
            sampling,
            logprobs: Some(2),
            forcing: if index % 2 == 1 { forcing(4 + index as u32) } else { None },
            priority: if index.is_multiple_of(3) { Priority::Background } else { Priority::Foreground },
            ..Request::greedy(&prompt, subject.extent.pick(12, 26, 26))
        }
    };
    (0..6).map(make).collect()
}

/// Everything a client hears of a reply but its times.
fn heard(record: &ReplyRecord) -> (Vec<u32>, Vec<u32>) {
    let top = record.top.iter().flatten().flat_map(|(token, logprob)| [*token, logprob.to_bits()]);
    let logprobs = record.logprobs.iter().map(|logprob| logprob.to_bits());
    (record.tokens.clone(), logprobs.chain(top).collect())
}

pub(super) fn served(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let requests = requests(subject);
    let requests = subject.extent.pick(&requests[..4], &requests[..4], &requests[..]);
    let mut evidence = Evidence::new();
    let mut model = subject.plain(fault)?;
    let limits = EngineLimits::for_model(&model.limits());
    let mut wanted = Vec::new();
    for request in requests {
        let alone = Request { draft_max: Some(0), ..request.clone() };
        let (records, _) = serve(&mut *model, EngineLimits { slots: 1, ..limits }, &[(0, alone)])?;
        wanted.extend(records.iter().map(heard));
    }
    let servings = subject.extent.pick(&[LEAST][..], &SERVINGS, &SERVINGS);
    for &(head, copy, slots, prompt_chunk, prefix_cache_bytes) in servings {
        let draft = DraftPolicy { head, copy, adaptive: false, ..limits.draft };
        let limits = EngineLimits { slots, prompt_chunk, prefix_cache_bytes, draft, ..limits };
        let arrivals: Vec<(u64, Request)> = (0..).step_by(3).zip(requests.iter().cloned()).collect();
        let (records, stats) = serve(&mut *model, limits, &arrivals)?;
        for (index, (record, wanted)) in records.iter().zip(&wanted).enumerate() {
            let (tokens, bits) = heard(record);
            let how = format!("request {index}, {slots} at once, head {head}, copies {copy}");
            if tokens != wanted.0 {
                return Err(format!("{how}: {tokens:?}, alone it is {:?} ({:?})", wanted.0, record.finished));
            }
            if bits != wanted.1 {
                return Err(format!("{how}: equal tokens, other log-probabilities"));
            }
        }
        evidence.count("head drafts", stats.drafts[DraftSource::Head as usize].drafted);
        evidence.count("copied drafts", stats.drafts[DraftSource::Copy as usize].drafted);
        evidence.count("known rows", stats.known_rows);
        evidence.count("requests that gave way", stats.pauses);
        evidence.count("positions resumed", stats.cached_tokens);
    }
    for (tokens, bits) in wanted {
        evidence.bits(&[tokens, bits]);
    }
    evidence.complete()
}
