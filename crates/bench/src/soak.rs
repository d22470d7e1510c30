//! Many clients for a long time, with the server killed and started again in the middle; then every reply is compared
//! with the one that the same request gets alone, from a server without drafts and without kept prefixes.

mod ask;
mod judge;
mod traffic;
mod watch;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

use self::ask::{End, Heard, Outage, ask};
pub use self::traffic::CONVERSATIONS;
use self::traffic::{Traffic, Wanted, prompt_ids};
use crate::child::{ChildError, Server};
use crate::client::{Client, ClientError};
use crate::record::{Check, Record};
use crate::workload::{self, Numbers, Request};

/// Time between a refusal and the next try.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// How long the server lies dead before it is started again.
const DEAD_FOR: Duration = Duration::from_millis(500);
/// Longest time until nothing runs any more once nobody asks.
const IDLE_WITHIN: Duration = Duration::from_secs(10);
/// Conversations and turns that are asked in calm, to see where turns resume.
const CALM: (u64, u64) = (4, 6);

/// What is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The program that serves; its words follow, without a port.
    pub program: PathBuf,
    /// Variables that the servers shall not see.
    pub hidden: Vec<String>,
    /// Of the server under load.
    pub words: Vec<String>,
    /// Of the server that keeps whatever fits, for turns asked in calm.
    pub calm_words: Vec<String>,
    /// Of the servers whose replies are the standard: one request at a time, no drafts, nothing kept.
    pub solo_words: Vec<String>,
    /// How many of these share the work.
    pub solo_servers: usize,
    /// Where the servers' logs go.
    pub folder: PathBuf,
    pub clients: usize,
    pub time: Duration,
    pub seed: u64,
    /// Positions of a page: how far before a common prefix's end a turn may resume.
    pub page: u64,
}

/// Why nothing could be measured.
#[derive(Debug, Error)]
pub enum SoakError {
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("/v1/models says neither meta.n_vocab nor max_model_len")]
    Model,
    #[error("a task broke down: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// A request and everything that was heard about it.
struct Asked {
    path: &'static str,
    body: String,
    outcomes: Vec<Outcome>,
}

/// What one sending of a request came to.
struct Outcome {
    reply: crate::load::Reply,
    /// Of a reply that was left or cut; empty for whole ones.
    text: String,
    is_whole: bool,
    after_restart: bool,
}

/// What all clients have heard.
#[derive(Default)]
struct Heap {
    /// In the order of the first sending.
    asked: Vec<Asked>,
    places: HashMap<String, usize>,
    tally: judge::Tally,
}

impl Heap {
    fn add(&mut self, request: &Request, heard: Heard) {
        self.tally.add(&heard);
        let is_whole = heard.end == End::Whole;
        if !is_whole && heard.text.is_empty() {
            return;
        }
        let body = request.body.to_string();
        let place = match self.places.get(&body) {
            Some(place) => *place,
            None => {
                self.places.insert(body.clone(), self.asked.len());
                self.asked.push(Asked { path: request.path, body, outcomes: Vec::new() });
                self.asked.len() - 1
            }
        };
        let text = if is_whole { String::new() } else { heard.text };
        // Times are in the tally by now.
        let reply = crate::load::Reply { progress: Vec::new(), ..heard.reply };
        let after_restart = heard.after_restart;
        self.asked[place].outcomes.push(Outcome { reply, text, is_whole, after_restart });
    }
}

/// What the clients share.
struct Shared {
    client: Client,
    outage: Outage,
    is_over: AtomicBool,
    heap: Mutex<Heap>,
    start: Instant,
}

impl Shared {
    fn heap(&self) -> MutexGuard<'_, Heap> {
        // Each change is one push; a task that broke down can't have torn it.
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures, and adds rows and checks to `record`. `say` hears what is being done.
///
/// # Errors
/// A server that doesn't start or can't be reached.
pub async fn run(plan: &Plan, record: &mut Record, say: &dyn Fn(&str)) -> Result<(), SoakError> {
    say(&format!("{} clients for {} s, one kill -9 in the middle", plan.clients, plan.time.as_secs()));
    let server = start(plan, &plan.words, "load", 0).await?;
    let client = Client::new(&server.url)?;
    let (vocab_size, context) = sizes(&client).await?;
    let shared = Arc::new(Shared {
        client,
        outage: Outage::default(),
        is_over: AtomicBool::new(false),
        heap: Mutex::default(),
        start: Instant::now(),
    });
    let watcher = tokio::spawn(watch::run(shared.clone()));
    let mut clients = Vec::new();
    for number in 0..plan.clients as u64 {
        clients.push(tokio::spawn(lead(shared.clone(), Traffic::new(plan.seed, number, vocab_size, context), number)));
    }
    let server = load(plan, &shared, server).await?;
    let ended = tokio::time::timeout(2 * ask::STUCK_AFTER, futures_util::future::join_all(clients)).await;
    let loaded = shared.start.elapsed();
    let mut seen = watcher.await?;
    seen.settle(&shared.client, IDLE_WITHIN).await;
    server.kill();

    say("turns in calm");
    let mut turns = Check::new("resumed turns");
    calm(plan, vocab_size, &shared, &mut turns).await?;
    let heap = std::mem::take(&mut *shared.heap());
    let count: usize = heap.asked.iter().map(|asked| asked.outcomes.len()).sum();
    say(&format!("{count} replies; now each of the {} requests alone, without drafts or cache", heap.asked.len()));
    let mut solo = Vec::new();
    for _ in 0..plan.solo_servers.max(1) {
        solo.push(start(plan, &plan.solo_words, "solo", 0).await?);
    }
    let clients = solo.iter().map(|server| Client::new(&server.url)).collect::<Result<Vec<_>, _>>()?;
    let checks = judge::compare(&clients, &heap.asked, say).await;
    solo.into_iter().for_each(Server::kill);

    record.rows.extend(heap.tally.rows(loaded));
    record.rows.extend(seen.rows());
    record.checks.extend(checks);
    record.checks.push(heap.tally.endings(ended.is_ok()));
    record.checks.extend(seen.checks());
    record.checks.push(turns);
    record.checks.push(heap.tally.exercised(&seen));
    Ok(())
}

/// Lets the clients work, kills the server in the middle, and starts it again on the same port.
async fn load(plan: &Plan, shared: &Shared, server: Server) -> Result<Server, SoakError> {
    tokio::time::sleep(plan.time / 2).await;
    let port = server.url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
    shared.outage.begins();
    server.kill();
    tokio::time::sleep(DEAD_FOR).await;
    let server = start(plan, &plan.words, "load", port).await;
    shared.outage.ends();
    if server.is_ok() {
        tokio::time::sleep(plan.time / 2).await;
    }
    shared.is_over.store(true, Ordering::SeqCst);
    server
}

async fn start(plan: &Plan, words: &[String], name: &str, port: u16) -> Result<Server, SoakError> {
    let mut words = words.to_vec();
    words.push(format!("--port={port}"));
    let (program, hidden, log) = (plan.program.clone(), plan.hidden.clone(), log_of(&plan.folder, name));
    Ok(tokio::task::spawn_blocking(move || Server::start(&program, &words, &hidden, &log)).await??)
}

fn log_of(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

async fn sizes(client: &Client) -> Result<(u64, u64), SoakError> {
    let models = client.get("/v1/models").await?;
    let model = &models["data"][0];
    model["meta"]["n_vocab"].as_u64().zip(model["max_model_len"].as_u64()).ok_or(SoakError::Model)
}

/// One client's life.
async fn lead(shared: Arc<Shared>, mut traffic: Traffic, number: u64) {
    let mut numbers = Numbers::new(number ^ 0x6c65_6164);
    let mut again: Option<Wanted> = None;
    while !shared.is_over.load(Ordering::SeqCst) {
        let wanted = again.take().unwrap_or_else(|| traffic.next());
        let heard = ask(&shared.client, &wanted, &shared.outage, shared.start).await;
        match heard.end {
            End::Whole => {
                if let Some(place) = wanted.conversation {
                    traffic.replied(place, &prompt_ids(&wanted.request), &heard.ids);
                }
            }
            // A reply that the crash cut is asked for again, and must be the same.
            End::Down | End::Busy(_) => {
                tokio::time::sleep(RETRY_AFTER).await;
                again = Some(wanted.clone());
            }
            End::Left if numbers.below(2) == 0 => again = Some(Wanted { leave: None, ..wanted.clone() }),
            End::Left | End::Stuck | End::Failed(_) => {}
        }
        shared.heap().add(&wanted.request, heard);
    }
}

/// A few conversations, two at a time, on a server that keeps what fits: each turn resumes where the one before it
/// ended, within a page.
async fn calm(plan: &Plan, vocab_size: u64, shared: &Shared, turns: &mut Check) -> Result<(), SoakError> {
    let server = start(plan, &plan.calm_words, "calm", 0).await?;
    let client = Client::new(&server.url)?;
    let mut numbers = Numbers::new(plan.seed ^ 0x6361_6c6d);
    let (conversations, turns_count) = CALM;
    let mut histories: Vec<Vec<u32>> =
        (0..conversations).map(|_| workload::ids(&mut numbers, vocab_size, 300)).collect();
    for turn in 0..turns_count {
        for pair in 0..conversations as usize / 2 {
            let places = [2 * pair, 2 * pair + 1];
            let wanted = places.map(|place| {
                let mut ids = histories[place].clone();
                ids.extend(workload::ids(&mut numbers, vocab_size, 40));
                let mut request = workload::of_ids(&ids, 48, numbers.number());
                request.body["return_token_ids"] = true.into();
                Wanted { request, leave: None, conversation: Some(place) }
            });
            let [one, other] = &wanted;
            let outage = Outage::default();
            let heard =
                tokio::join!(ask(&client, one, &outage, shared.start), ask(&client, other, &outage, shared.start));
            for (wanted, place, heard) in [(one, places[0], heard.0), (other, places[1], heard.1)] {
                // The last token of a reply has been drawn and not yet computed.
                let common = (turn > 0).then(|| histories[place].len() as u64 - 1);
                judge::resumed(turns, &format!("conversation {place}, turn {turn}"), common, plan.page, &heard);
                histories[place] = [&prompt_ids(&wanted.request)[..], &heard.ids].concat();
                let mut heap = shared.heap();
                heap.tally.is_calm = true;
                heap.add(&wanted.request, heard);
            }
        }
    }
    server.kill();
    Ok(())
}
