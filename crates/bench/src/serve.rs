//! A server under a load like its users': times to first token, gaps, latencies, totals, acceptance.

use std::time::Duration;

use crate::client::Client;
use crate::load::{self, Reply};
use crate::record::{Check, Record, Row};
use crate::workload::{Numbers, Request};

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// So many are running at any time.
    Concurrency(usize),
    /// So many a second on average, at random times from the seed, however many are running.
    Rate { per_second: f64, seed: u64 },
}

/// Times after the start at which requests arrive on their own: exponential gaps.
fn arrivals(count: usize, per_second: f64, seed: u64) -> Vec<Duration> {
    let mut numbers = Numbers::new(seed);
    let mut time = 0.0;
    let next = |_| {
        let at = time;
        time += -numbers.unit().ln() / per_second;
        Duration::try_from_secs_f64(at).unwrap_or_default()
    };
    (0..count).map(next).collect()
}

/// Measures, and adds rows and a check to `record`.
pub async fn run(client: &Client, requests: &[Request], arrival: Arrival, record: &mut Record) {
    let replies = match arrival {
        Arrival::Concurrency(count) => load::at_most(client, requests, count).await,
        Arrival::Rate { per_second, seed } => {
            load::at(client, requests, &arrivals(requests.len(), per_second, seed)).await
        }
    };
    let mut whole = Check::new("whole replies");
    for (index, reply) in replies.iter().enumerate() {
        whole.answered(&format!("request {index}"), reply);
    }
    record.rows.extend(rows(&replies));
    record.checks.push(whole);
}

fn rows(replies: &[Reply]) -> Vec<Row> {
    let row = |name: &str, unit: &str, samples: Vec<f64>| Row { name: name.to_owned(), unit: unit.to_owned(), samples };
    let ms = |time: Duration| 1e3 * time.as_secs_f64();
    let done: Vec<&Reply> = replies.iter().filter(|reply| reply.failure.is_none()).collect();
    let distributions = [
        row("time to first token", "ms", done.iter().filter_map(|reply| reply.first_token()).map(ms).collect()),
        row("inter-token gap", "ms", done.iter().flat_map(|reply| reply.gaps()).map(ms).collect()),
        row("latency", "ms", done.iter().map(|reply| ms(reply.ended.saturating_sub(reply.sent))).collect()),
        row("each stream", "tokens/s", done.iter().filter_map(|reply| reply.rate()).collect()),
    ];
    let mut rows = Vec::new();
    for distribution in distributions {
        let high = [90.0, 99.0].map(|percent| {
            let samples = distribution.percentile(percent).into_iter().collect();
            row(&format!("{}, percentile {percent}", distribution.name), &distribution.unit, samples)
        });
        rows.push(distribution);
        rows.extend(high);
    }
    let longest = done.iter().flat_map(|reply| reply.gaps()).max();
    rows.push(row("longest gap of any reply", "ms", longest.map(ms).into_iter().collect()));
    let seconds = replies.iter().map(|reply| reply.ended).max().unwrap_or_default().as_secs_f64();
    let sum = |of: fn(&Reply) -> Option<u64>| -> f64 { done.iter().filter_map(|reply| of(reply)).sum::<u64>() as f64 };
    let per_second = |count: f64| if seconds > 0.0 { vec![count / seconds] } else { Vec::new() };
    rows.push(row("requests", "requests/s", per_second(done.len() as f64)));
    rows.push(row("replies", "tokens/s", per_second(sum(|reply| reply.reply_tokens))));
    rows.push(row("prompts", "tokens/s", per_second(sum(|reply| reply.prompt_tokens))));
    rows.push(row("prompt tokens", "tokens", vec![sum(|reply| reply.prompt_tokens)]));
    let known: Vec<f64> = done.iter().filter_map(|reply| reply.cached_tokens).map(|tokens| tokens as f64).collect();
    // A sum over some of the replies would look like a sum over all.
    rows.push(row(
        "cached tokens",
        "tokens",
        if known.len() == done.len() { vec![known.iter().sum()] } else { Vec::new() },
    ));
    rows.push(row("reply tokens", "tokens", vec![sum(|reply| reply.reply_tokens)]));
    let (drafted, accepted) = (sum(|reply| reply.drafted), sum(|reply| reply.accepted));
    rows.push(row("accepted drafts", "of 1", if drafted > 0.0 { vec![accepted / drafted] } else { Vec::new() }));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_the_asked_rate_and_come_from_the_seed() {
        let times = arrivals(10_000, 50.0, 3);
        assert_eq!(times, arrivals(10_000, 50.0, 3));
        assert_ne!(times[1..], arrivals(10_000, 50.0, 4)[1..]);
        assert!(times.is_sorted() && times[0].is_zero());
        // The sum of 10,000 exponential gaps lies within five deviations of its mean.
        let last = times.last().unwrap().as_secs_f64();
        assert!((last - 200.0).abs() < 5.0 * 2.0, "{last}");
    }

    #[test]
    fn unknown_cached_counts_are_no_sum() {
        let reply = |cached_tokens| Reply { cached_tokens, ended: Duration::from_secs(1), ..Reply::default() };
        let cached = |replies: &[Reply]| {
            rows(replies).into_iter().find(|row| row.name == "cached tokens").map(|row| row.samples)
        };
        assert_eq!(cached(&[reply(Some(1)), reply(Some(2))]), Some(vec![3.0]));
        assert_eq!(cached(&[reply(Some(1)), reply(None)]), Some(vec![]));
    }
}
