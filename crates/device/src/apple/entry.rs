//! How a launch is cut into threadgroups, and how it may be cut otherwise without another result: for a chip that leaves a
//! kernel fewer threads, and for trials, since no bit depends on it.

use crate::gpu::Call;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// Threads of a SIMD group, on every chip.
pub const LANES: u32 = 32;

/// What a launch asked of the chip, and what its pipeline takes there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Launched {
    pub entry: &'static str,
    pub threads: u32,
    /// After the kernel's registers.
    pub pipeline_threads_max: u32,
    /// Declared and asked for.
    pub threadgroup_bytes: u32,
    pub simd_width: u32,
    pub buffers: u32,
    /// Of the constants, which are set without a buffer.
    pub argument_bytes: u32,
    /// Why the chip made no pipeline of the kernel: what it declares may be too much. The figures are the launch's then.
    pub refusal: Option<String>,
}

/// The launches of some devices, each kind once.
pub type Log = Arc<Mutex<BTreeSet<Launched>>>;

/// What a kernel deals out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// An item to each thread or SIMD group, counted over the grid: threadgroups may have any size.
    OfGrid,
    /// An item to each threadgroup, of any number of SIMD groups.
    Threadgroup,
}

/// Threadgroups and threads of a call: as it asks, cut smaller where the compiled kernel leaves fewer than `threads_max` threads
/// on this chip, or with `simdgroups` SIMD groups a threadgroup.
pub fn geometry(call: &Call<'_>, simdgroups: Option<u32>, threads_max: u32) -> (u32, u32) {
    let most = (threads_max / LANES).max(1);
    let simdgroups = match simdgroups.filter(|simdgroups| *simdgroups > 0) {
        None if call.threads <= most * LANES => return (call.groups, call.threads),
        None => most,
        Some(simdgroups) => simdgroups.min(most),
    };
    match item_of(call.program.metal.unwrap_or_default(), call.entry) {
        Item::Threadgroup => (call.groups, LANES * simdgroups),
        Item::OfGrid => ((call.groups * (call.threads / LANES)).div_ceil(simdgroups), LANES * simdgroups),
    }
}

/// What an entry of a source deals out: its own threadgroup where it uses threadgroup memory or asks for a thread's place in it.
pub fn item_of(source: &str, entry: &str) -> Item {
    const OF_THREADGROUP: [&str; 4] =
        ["thread_position_in_threadgroup", "[[threads_per_threadgroup", "thread_index_in_threadgroup", "threadgroup "];
    let code: String = source.lines().flat_map(|line| [line.split("//").next().unwrap_or(line), "\n"]).collect();
    let mut kernels = code.split("kernel void ").skip(1);
    let kernel = kernels.find(|text| text.strip_prefix(entry).is_some_and(|rest| rest.starts_with('(')));
    let is_own = kernel.map(whole).is_some_and(|text| OF_THREADGROUP.iter().any(|mark| text.contains(mark)));
    if is_own { Item::Threadgroup } else { Item::OfGrid }
}

/// Parameters and body of a kernel: up to the brace that closes it.
fn whole(text: &str) -> &str {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 1 => return &text[..at],
            '}' => depth -= 1,
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Program, Tuning};

    const SOURCE: &str = "
inline float helper(threadgroup float *part) { return part[0]; }
kernel void each(device float *x [[buffer(0)]], uint i [[thread_position_in_grid]]) {}
kernel void each_group(device float *x [[buffer(0)]], uint g [[threadgroup_position_in_grid]],
                       uint s [[simdgroups_per_threadgroup]]) {}
// a threadgroup a row
inline float other(threadgroup float *part) { return part[1]; }
kernel void together(device float *x [[buffer(0)]], threadgroup float *part [[threadgroup(0)]]) {}
kernel void declared(device float *x [[buffer(0)]]) {
    threadgroup float part[32];
}
kernel void placed(uint i [[thread_position_in_threadgroup]]) {}
";
    static PROGRAM: Program = Program { name: "p", metal: Some(SOURCE), metal_includes: &[], cuda: false };

    #[test]
    fn a_launch_is_cut_as_its_kernel_allows() {
        let cut_for = |entry, simdgroups, threads_max| {
            let (arguments, shape, tuning) = (&[][..], &[][..], Tuning::default());
            let call = Call {
                program: &PROGRAM,
                entry,
                arguments,
                shape,
                groups: 5,
                threads: 256,
                shared_bytes: 0,
                tuning,
                to_side: false,
            };
            geometry(&call, simdgroups, threads_max)
        };
        let cut = |entry, simdgroups| cut_for(entry, simdgroups, 1024);
        for entry in ["each", "each_group", "together", "declared", "placed"] {
            assert_eq!(cut(entry, None), (5, 256), "{entry}");
        }
        for entry in ["each", "each_group"] {
            assert_eq!(cut(entry, Some(1)), (40, 32), "{entry}");
            assert_eq!(cut(entry, Some(3)), (14, 96), "{entry}: the last has a SIMD group to spare");
        }
        for entry in ["together", "declared", "placed"] {
            assert_eq!(cut(entry, Some(3)), (5, 96), "{entry}");
        }
        assert_eq!(cut("each", Some(0)), (5, 256));
        // A kernel of many registers.
        assert_eq!(cut_for("each", None, 256), (5, 256));
        assert_eq!(cut_for("each", None, 255), (6, 224));
        assert_eq!(cut_for("each", Some(3), 64), (20, 64));
        assert_eq!(cut_for("together", None, 200), (5, 192));
        assert_eq!(cut_for("each", None, 0), (40, 32), "refused by the pipeline itself");
    }
}
