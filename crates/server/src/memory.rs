//! `GET /memory`: what was planned and what the process has. Reading it changes nothing; what can't be read is left out.

use serde_json::{Map, Value, json};
use tf_engine::EngineHandle;

use crate::config::ServerConfig;

/// What this process has, as Linux tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub resident_bytes: u64,
    pub peak_bytes: u64,
    /// Of the resident bytes those that no file backs: what the program took for itself.
    pub anonymous_bytes: Option<u64>,
}

impl Process {
    /// This process now.
    pub fn own() -> Option<Process> {
        Process::read(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    fn read(status: &str) -> Option<Process> {
        Some(Process {
            resident_bytes: field(status, "VmRSS:")?,
            peak_bytes: field(status, "VmHWM:")?,
            anonymous_bytes: field(status, "RssAnon:"),
        })
    }
}

/// Lets the peak begin anew at what the process has now, where the system can do that.
pub fn reset_peak() {
    // A system without this file keeps its peak, and says so by not falling.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn field(status: &str, name: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The body of the reply.
pub fn report(config: &ServerConfig, engine: &EngineHandle) -> Value {
    let (limits, stats) = (engine.limits(), engine.stats());
    let mut report = json!({
        "schema_version": 1, "context_length": limits.context,
        "prefix_cache": {
            "budget_bytes": limits.prefix_cache_bytes, "used_bytes": stats.prefix_bytes, "entries": stats.prefixes,
            "evictions": stats.prefix_evictions
        },
        "plan_bytes": config.memory_plan_total
    });
    let disk = &stats.disk;
    if disk.budget_bytes > 0 {
        report["disk_cache"] = json!({
            "budget_bytes": disk.budget_bytes, "files": disk.files, "used_bytes": disk.bytes, "hits": disk.hits,
            "index_bytes": disk.index_bytes, "evictions": disk.evictions, "write_failures": disk.write_failures,
            "refused": disk.refused.iter().sum::<u64>()
        });
    }
    if let Some(process) = Process::own() {
        let (resident, peak) = (process.resident_bytes, process.peak_bytes);
        report["process"] = json!({"resident_bytes": resident, "peak_bytes": peak, "source": "/proc/self/status"});
        if let Some(anonymous) = process.anonymous_bytes {
            report["process"]["anonymous_bytes"] = anonymous.into();
        }
    }
    let plan: Map<String, Value> =
        config.memory_plan.iter().map(|(part, bytes)| (part.to_string(), (*bytes).into())).collect();
    report["plan"] = plan.into();
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_their_own_line() {
        let status = "Name:\tx\nVmHWM:\t    20 kB\nVmRSS:\t   12 kB\nRssAnon:\t 7 kB\nThreads:\t3\n";
        let expected = Process { resident_bytes: 12 << 10, peak_bytes: 20 << 10, anonymous_bytes: Some(7 << 10) };
        assert_eq!(Process::read(status), Some(expected));
        assert_eq!((field(status, "Threads:"), field(status, "None:")), (None, None));
    }
}
