//! What this machine has: cores and memory. Reads the system's own files; unknown stays unknown.

use std::collections::HashSet;

/// Bytes of memory, as far as the system says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    /// What can be taken without pushing others out.
    pub available: u64,
}

/// Memory of the machine, or of the container if that is less. `None` where the system doesn't say.
pub fn memory() -> Option<Memory> {
    let machine = linux_memory().or_else(other_memory)?;
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    match (number("/sys/fs/cgroup/memory.max"), number("/sys/fs/cgroup/memory.current")) {
        (Some(most), Some(used)) => {
            Some(Memory { total: machine.total.min(most), available: machine.available.min(most.saturating_sub(used)) })
        }
        _ => Some(machine),
    }
}

fn linux_memory() -> Option<Memory> {
    read_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn read_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: field("MemTotal")?, available: field("MemAvailable")? })
}

/// Elsewhere only the total is known; most of it counts as available.
fn other_memory() -> Option<Memory> {
    let output = std::process::Command::new("sysctl").args(["-n", "hw.memsize"]).output().ok()?;
    let total = String::from_utf8(output.stdout).ok()?.trim().parse::<u64>().ok()?;
    Some(Memory { total, available: total / 4 * 3 })
}

/// What a program may take: what is available, less a reserve for the system.
pub fn budget(memory: Memory) -> u64 {
    let reserve = (memory.total / 20).clamp(256 << 20, 8 << 30);
    memory.available.saturating_sub(reserve)
}

/// Cores that this process may use, without the second threads of one core.
pub fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, |count| count.get());
    let topology = |cpu: usize, name: &str| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/{name}")).ok()
    };
    let cores: HashSet<(String, String)> =
        (0..4096).map_while(|cpu| Some((topology(cpu, "physical_package_id")?, topology(cpu, "core_id")?))).collect();
    match cores.len() {
        0 => logical,
        count => count.min(logical),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_own_figures_are_read() {
        let text = "MemTotal:       16000 kB\nMemFree:         1 kB\nMemAvailable:    8000 kB\n";
        assert_eq!(read_meminfo(text), Some(Memory { total: 16_000 << 10, available: 8000 << 10 }));
        for text in ["", "MemTotal: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n", "MemTotal: 1\nMemAvailable: 1\n"] {
            assert_eq!(read_meminfo(text), None, "{text}");
        }
        assert!(physical_cores() >= 1);
        let half = Memory { total: 64 << 30, available: 32 << 30 };
        assert!(budget(half) < half.available && budget(half) > half.available / 2);
        assert_eq!(budget(Memory { total: 1 << 30, available: 0 }), 0);
    }
}
