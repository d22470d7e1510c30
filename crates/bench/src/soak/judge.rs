//! What the replies of a soak come to: counts, times, and the comparison with replies alone.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::ask::{End, Heard, Outage, STUCK_AFTER, ask};
use super::traffic::Wanted;
use super::watch::Seen;
use super::{Asked, Outcome};
use crate::client::Client;
use crate::record::{Check, Row};
use crate::workload::Request;

/// How often the comparison says how far it is.
const SAY_EVERY: Duration = Duration::from_secs(15);

/// Counts and times of all requests under load.
#[derive(Default)]
pub struct Tally {
    /// What follows is no load any more: it is compared, but counted in no figure.
    pub is_calm: bool,
    pub whole: u64,
    pub left: u64,
    pub down: u64,
    pub busy: u64,
    pub stuck: u64,
    failures: Vec<String>,
    prompt_tokens: u64,
    cached_tokens: u64,
    reply_tokens: u64,
    drafted: u64,
    accepted: u64,
    first_token_ms: Vec<f64>,
    gaps_ms: Vec<f64>,
    latency_ms: Vec<f64>,
}

impl Tally {
    /// Counts one sending.
    pub fn add(&mut self, heard: &Heard) {
        if let End::Failed(failure) = &heard.end {
            self.failures.push(failure.clone());
        }
        if self.is_calm {
            return;
        }
        match heard.end {
            End::Whole => self.whole += 1,
            End::Left => self.left += 1,
            End::Down => self.down += 1,
            End::Busy(_) => self.busy += 1,
            End::Stuck => self.stuck += 1,
            End::Failed(_) => {}
        }
        let reply = &heard.reply;
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        self.reply_tokens += reply.progress.last().map_or(0, |(_, tokens)| *tokens);
        self.gaps_ms.extend(reply.gaps().map(ms));
        self.first_token_ms.extend(reply.first_token().map(ms));
        if heard.end != End::Whole {
            return;
        }
        self.prompt_tokens += reply.prompt_tokens.unwrap_or(0);
        self.cached_tokens += reply.cached_tokens.unwrap_or(0);
        self.drafted += reply.drafted.unwrap_or(0);
        self.accepted += reply.accepted.unwrap_or(0);
        self.latency_ms.push(ms(reply.ended.saturating_sub(reply.sent)));
    }

    /// Figures of the load, which took `time`.
    pub fn rows(&self, time: Duration) -> Vec<Row> {
        let row = |name: &str, unit: &str, sample: f64| Row {
            name: name.to_owned(),
            unit: unit.to_owned(),
            samples: vec![sample],
        };
        let seconds = time.as_secs_f64();
        let mut rows = vec![
            row("requests, whole", "requests", self.whole as f64),
            row("requests, left by the client", "requests", self.left as f64),
            row("requests, cut by the kill", "requests", self.down as f64),
            row("requests, to be asked again", "requests", self.busy as f64),
            row("replies", "tokens/s", self.reply_tokens as f64 / seconds),
            row("prompts", "tokens/s", self.prompt_tokens as f64 / seconds),
            row("prompt tokens cached", "of 1", self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64),
            row("drafts accepted", "of 1", self.accepted as f64 / self.drafted.max(1) as f64),
        ];
        let times = [
            ("time to first token", &self.first_token_ms),
            ("inter-token gap", &self.gaps_ms),
            ("latency", &self.latency_ms),
        ];
        for (name, samples) in times {
            // One sort serves all percentiles; single samples are too many for a record.
            let mut sorted = samples.clone();
            sorted.sort_by(f64::total_cmp);
            for percent in [50, 90, 99, 100] {
                let place = (percent * sorted.len()).div_ceil(100).max(1) - 1;
                let samples = sorted.get(place).copied().into_iter().collect();
                rows.push(Row { name: format!("{name}, percentile {percent}"), unit: "ms".to_owned(), samples });
            }
        }
        rows
    }

    /// Every request has one ending, and none that nobody asked for. `all_ended`: every client came to its end.
    pub fn endings(&self, all_ended: bool) -> Check {
        let mut check = Check::new("endings");
        for _ in 0..self.whole {
            check.count("", Some(true), String::new);
        }
        for failure in &self.failures {
            check.count("a request failed", Some(false), || failure.clone());
        }
        for _ in 0..self.stuck {
            check.count("a request is stuck", Some(false), || format!("no token for {} s", STUCK_AFTER.as_secs()));
        }
        check.count("clients", Some(all_ended), || "some never came to their end".to_owned());
        check
    }

    /// A soak that exercised nothing has shown nothing.
    pub fn exercised(&self, seen: &Seen) -> Check {
        let mut check = Check::new("exercised");
        let counts = [
            ("replies left by their client", self.left),
            ("replies cut by the kill", self.down),
            ("drafts accepted", self.accepted),
            ("drafts rejected", self.drafted - self.accepted.min(self.drafted)),
            ("prompt tokens resumed", self.cached_tokens),
            ("prefixes let go", seen.evictions),
        ];
        let disk = seen.disk_hits().map(|hits| ("prompts resumed from disk after the kill", hits));
        for (name, count) in counts.into_iter().chain(disk) {
            check.count(name, Some(count > 0), || "never happened".to_owned());
        }
        check
    }
}

/// Asks each request alone, each of the servers one at a time, and compares all that was heard about it.
pub async fn compare(clients: &[Client], all: &[Asked], say: &dyn Fn(&str)) -> Vec<Check> {
    let mut checks = Checks::new();
    let (start, outage) = (Instant::now(), Outage::default());
    let mut said = Instant::now();
    for (round, group) in all.chunks(clients.len()).enumerate() {
        let alone = group.iter().zip(clients).map(|(asked, client)| {
            let (body, outage) = (serde_json::from_str(&asked.body).unwrap_or_default(), &outage);
            let wanted = Wanted { request: Request { path: asked.path, body }, leave: None, conversation: None };
            async move { ask(client, &wanted, outage, start).await }
        });
        let alone = join_all(alone).await;
        for (place, (asked, alone)) in group.iter().zip(&alone).enumerate() {
            checks.judge(&format!("request {}", round * clients.len() + place), asked, alone);
        }
        if said.elapsed() > SAY_EVERY {
            said = Instant::now();
            let done = (round + 1) * clients.len();
            say(&format!("{done} of {} requests compared, {} unequal", all.len(), checks.unequal()));
        }
    }
    vec![checks.whole, checks.after, checks.cut]
}

struct Checks {
    whole: Check,
    after: Check,
    cut: Check,
}

impl Checks {
    fn new() -> Checks {
        Checks {
            whole: Check::new("equal to the cold reply alone"),
            after: Check::new("of these after the restart"),
            cut: Check::new("cut replies begin the reply alone"),
        }
    }

    fn judge(&mut self, name: &str, asked: &Asked, alone: &Heard) {
        for outcome in &asked.outcomes {
            if outcome.is_whole {
                compare_whole(&mut self.whole, name, asked, outcome, alone);
                if outcome.after_restart {
                    compare_whole(&mut self.after, name, asked, outcome, alone);
                }
            } else if alone.end != End::Whole {
                self.cut.fail(name, &format!("alone: {:?}", alone.end));
            } else {
                let begins = alone.text.starts_with(&outcome.text);
                self.cut.count(name, Some(begins), || format!("{:?} and {:?}", outcome.text, alone.text));
            }
        }
    }

    fn unequal(&self) -> u64 {
        self.whole.unequal + self.cut.unequal
    }
}

fn compare_whole(check: &mut Check, name: &str, asked: &Asked, outcome: &Outcome, alone: &Heard) {
    if alone.end != End::Whole {
        return check.fail(name, &format!("alone: {:?}", alone.end));
    }
    let (one, other) = (&outcome.reply, &alone.reply);
    let shas = one.token_sha.as_ref().zip(other.token_sha.as_ref());
    let is_equal = shas.map(|(sha, alone)| {
        sha == alone
            && one.finish == other.finish
            && one.reply_tokens == other.reply_tokens
            && one.prompt_tokens == other.prompt_tokens
    });
    check.count(name, is_equal, || {
        let body: String = asked.body.chars().take(300).collect();
        format!("{one:?}, alone {other:?}; {} {body}", asked.path)
    });
}

/// A turn whose `common` leading tokens were computed before resumes within a page of their end.
pub fn resumed(check: &mut Check, name: &str, common: Option<u64>, page: u64, heard: &Heard) {
    if heard.end != End::Whole {
        return check.fail(name, &format!("{:?}", heard.end));
    }
    let Some(common) = common else { return };
    let is_near = heard.reply.cached_tokens.map(|cached| cached + page >= common);
    check.count(name, is_near, || format!("{:?} cached of {common} common tokens", heard.reply.cached_tokens));
}
