//! `GET /memory`: what was planned and what the process has. Reading it changes nothing; what can't be read is left out.

use serde_json::{Map, Value, json};
use tf_engine::EngineHandle;

use crate::config::ServerConfig;

/// Resident and peak bytes of this process, as Linux tells them.
pub fn process() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some((field(&status, "VmRSS:")?, field(&status, "VmHWM:")?))
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
            "budget_bytes": limits.prefix_cache_bytes, "used_bytes": stats.prefix_bytes, "entries": stats.prefixes
        },
    });
    if let Some((resident, peak)) = process() {
        report["process"] = json!({"resident_bytes": resident, "peak_bytes": peak, "source": "/proc/self/status"});
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
        let status = "Name:\tx\nVmHWM:\t    20 kB\nVmRSS:\t   12 kB\nThreads:\t3\n";
        assert_eq!((field(status, "VmRSS:"), field(status, "VmHWM:")), (Some(12 << 10), Some(20 << 10)));
        assert_eq!((field(status, "Threads:"), field(status, "None:")), (None, None));
    }
}
