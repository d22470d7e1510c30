//! Many replies at once, then each again by itself, or without drafts: every pair must be the same tokens.

use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::client::Client;
use crate::load::{self, Reply, steady_rate};
use crate::record::{Check, Record, ReplyRow, Row};
use crate::workload::{self, Request, Settings};

/// What is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Requests at once.
    pub levels: Vec<usize>,
    pub temperatures: Vec<f64>,
    pub repetitions: u64,
    /// Of every group; its temperature is set for each.
    pub settings: Settings,
    pub stagger: Duration,
    /// Sends each request again by itself.
    pub alone: bool,
    /// Sends each request again without drafts.
    pub serial: bool,
}

/// Measures, and adds rows, checks and the digest to `record`.
pub async fn run(client: &Client, plan: &Plan, record: &mut Record) {
    let mut streams = Check::new("streams");
    let (mut alone, mut serial) = (Check::new("alone"), Check::new("serial"));
    let mut digest = Sha256::new();
    for &level in &plan.levels {
        for &temperature in &plan.temperatures {
            let settings = Settings { temperature, ..plan.settings.clone() };
            let group = format!("{level} at once, temperature {temperature}");
            let mut figures = Figures::default();
            for repetition in 0..plan.repetitions {
                let requests = workload::requests(&settings, repetition, level);
                let replies = load::together(client, &requests, plan.stagger).await;
                figures.add(&replies);
                for (stream, (request, reply)) in requests.iter().zip(&replies).enumerate() {
                    let name = format!("{group}, repetition {repetition}, stream {stream}");
                    streams.measured(&name, reply);
                    digest.update(reply.token_sha.as_deref().unwrap_or("unknown"));
                    record.replies.push(ReplyRow::new(&name, reply));
                    if plan.alone {
                        alone.compare(&name, reply, &again(client, request).await);
                    }
                    if plan.serial {
                        serial.compare(&name, reply, &again(client, &request.undrafted()).await);
                    }
                }
            }
            record.rows.extend(figures.rows(&group));
        }
    }
    record.checks.push(streams);
    record
        .checks
        .extend([(plan.alone, alone), (plan.serial, serial)].into_iter().filter(|pair| pair.0).map(|pair| pair.1));
    record.digest = Some(digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect());
}

async fn again(client: &Client, request: &Request) -> Reply {
    load::ask(client, request, Instant::now()).await
}

/// Samples of one group, a repetition each; those of single streams, one a stream.
#[derive(Default)]
struct Figures {
    aggregate: Vec<f64>,
    steady: Vec<f64>,
    streams: Vec<f64>,
    first_token: Vec<f64>,
}

impl Figures {
    fn add(&mut self, replies: &[Reply]) {
        let tokens: u64 = replies.iter().filter_map(|reply| reply.reply_tokens).sum();
        let from = replies.iter().map(|reply| reply.sent).min().unwrap_or_default();
        let to = replies.iter().map(|reply| reply.ended).max().unwrap_or_default();
        let seconds = to.saturating_sub(from).as_secs_f64();
        if seconds > 0.0 {
            self.aggregate.push(tokens as f64 / seconds);
        }
        self.steady.extend(steady_rate(replies));
        self.streams.extend(replies.iter().filter_map(Reply::rate));
        self.first_token
            .extend(replies.iter().filter_map(Reply::first_token).max().map(|time| 1e3 * time.as_secs_f64()));
    }

    fn rows(self, group: &str) -> Vec<Row> {
        let row =
            |what: &str, unit: &str, samples| Row { name: format!("{group}: {what}"), unit: unit.to_owned(), samples };
        vec![
            row("all streams", "tokens/s", self.aggregate),
            row("while all write", "tokens/s", self.steady),
            row("each stream", "tokens/s", self.streams),
            row("longest first token", "ms", self.first_token),
        ]
    }
}
