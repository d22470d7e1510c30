//! The server under load as it shows itself: memory against its plan, steps, and what is left when nobody asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Shared;
use crate::client::Client;
use crate::record::{Check, Row};

const EVERY: Duration = Duration::from_millis(500);
/// Longest time that a round may take while requests run.
const STEP_MAX: f64 = 10.0;

/// What was seen.
pub struct Seen {
    memory: Check,
    budget: Check,
    steps: Check,
    idle: Check,
    resident: Vec<f64>,
    plan_bytes: f64,
    prefix_bytes: Vec<f64>,
    /// Prefixes that were let go, both lives of the server together.
    pub evictions: u64,
    disk: Disk,
}

/// Files of kept prefixes, and what became of them when the server was killed.
struct Disk {
    kept: Check,
    /// At the last look, and of which life of the server.
    files: Option<(u64, u64)>,
    /// Prompts that resumed from a file in the server's second life.
    hits: u64,
}

impl Disk {
    fn look(&mut self, memory: &Value, health: &Value, life: u64) {
        let disk = &memory["disk_cache"];
        let (Some(files), Some(rounds)) = (disk["files"].as_u64(), health["rounds_total"].as_u64()) else { return };
        // What a life found on disk is known once it has worked.
        if rounds == 0 {
            return;
        }
        if let Some((before, older)) = self.files
            && older < life
        {
            let gone = disk["evictions"].as_u64().unwrap_or(0);
            let is_kept = files + gone >= before;
            self.kept.count("after the kill", Some(is_kept), || format!("{files} files of {before}"));
        }
        self.files = Some((files, life));
        if life > 0 {
            self.hits = disk["hits"].as_u64().unwrap_or(0);
        }
    }
}

/// Looks at the server until the load is over.
pub async fn run(shared: Arc<Shared>) -> Seen {
    let mut seen = Seen {
        memory: Check::new("memory within the plan"),
        budget: Check::new("kept prefixes within their budget"),
        steps: Check::new("steps"),
        idle: Check::new("idle at the end"),
        resident: Vec::new(),
        plan_bytes: 0.0,
        prefix_bytes: Vec::new(),
        evictions: 0,
        disk: Disk { kept: Check::new("files kept across the kill"), files: None, hits: 0 },
    };
    let mut before = 0;
    while !shared.is_over.load(Ordering::SeqCst) {
        let kills = shared.outage.kills();
        let (memory, health) = (shared.client.get("/memory").await, shared.client.get("/health").await);
        match (memory, health) {
            (Ok(memory), Ok(health)) => {
                seen.look(&memory, &health);
                seen.disk.look(&memory, &health, kills);
                let evictions = memory["prefix_cache"]["evictions"].as_u64().unwrap_or(0);
                // A restarted server counts from the start.
                seen.evictions += if evictions < before { evictions } else { evictions - before };
                before = evictions;
            }
            (memory, health) if !shared.outage.is_down() && shared.outage.kills() == kills => {
                let error = memory.err().or(health.err()).map_or_else(String::new, |error| error.to_string());
                seen.steps.fail("health", &error);
            }
            _ => {}
        }
        tokio::time::sleep(EVERY).await;
    }
    seen
}

impl Seen {
    fn look(&mut self, memory: &Value, health: &Value) {
        let process = &memory["process"];
        let plan = memory["plan_bytes"].as_u64();
        let held = process["anonymous_bytes"].as_u64().or(process["resident_bytes"].as_u64());
        let is_within = held.zip(plan).map(|(held, plan)| held <= plan);
        let at = format!("sample {}", self.resident.len());
        self.memory.count(&at, is_within, || format!("{held:?} bytes held, {plan:?} planned"));
        self.resident.extend(held.map(|bytes| bytes as f64));
        self.plan_bytes = plan.map_or(0.0, |bytes| bytes as f64);
        let cache = &memory["prefix_cache"];
        let (used, budget) = (cache["used_bytes"].as_u64(), cache["budget_bytes"].as_u64());
        let is_within = used.zip(budget).map(|(used, budget)| used <= budget);
        self.budget.count(&at, is_within, || format!("{used:?} bytes of {budget:?}"));
        self.prefix_bytes.extend(used.map(|bytes| bytes as f64));
        let (running, age) = (health["requests_running"].as_u64(), health["last_step_age_seconds"].as_f64());
        if running.is_some_and(|running| running > 0) && age.is_some() {
            let is_moving = age.map(|age| age < STEP_MAX);
            self.steps.count(&at, is_moving, || format!("the last step is {age:?} s old"));
        }
    }

    /// Waits until nothing runs; a server that nobody asks holds no request.
    pub async fn settle(&mut self, client: &Client, within: Duration) {
        let start = Instant::now();
        loop {
            let found = client.get("/health").await.map_err(|error| error.to_string()).and_then(|health| {
                let count = |name: &str| health[name].as_u64().ok_or_else(|| format!("/health has no {name}"));
                Ok((count("requests_running")?, count("requests_waiting")?))
            });
            if found == Ok((0, 0)) || start.elapsed() > within {
                self.idle.count("health", Some(found == Ok((0, 0))), || format!("running and waiting: {found:?}"));
                return;
            }
            tokio::time::sleep(EVERY / 5).await;
        }
    }

    /// Memory over time, and what was planned.
    pub fn rows(&self) -> Vec<Row> {
        let row = |name: &str, samples: Vec<f64>| Row {
            name: name.to_owned(),
            unit: "MiB".to_owned(),
            samples: samples.into_iter().map(|bytes| bytes / f64::from(1 << 20)).collect(),
        };
        vec![
            row("memory of the process", self.resident.clone()),
            row("planned memory", vec![self.plan_bytes]),
            row("kept prefixes", self.prefix_bytes.clone()),
        ]
    }

    /// What must hold for every look.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = vec![self.memory.clone(), self.budget.clone(), self.steps.clone(), self.idle.clone()];
        // Where there is no disk tier there is nothing to keep.
        checks.extend(self.disk.files.map(|_| self.disk.kept.clone()));
        checks
    }

    /// Prompts that resumed from a file after the kill; `None` where there is no disk tier.
    pub fn disk_hits(&self) -> Option<u64> {
        self.disk.files.map(|_| self.disk.hits)
    }
}
