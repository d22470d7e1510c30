//! Holds every kernel family that is not a linear to the CPU's bits on another device, and times it there.
//!
//! A case makes its inputs from a seed, runs one registered launch on the CPU and on the device, and compares every output
//! bit for bit (a NaN equals every NaN). Where CUDA has an order of its own, a mirror takes the CPU's place there. Sizes are
//! those of the tiny, the demo and the release model.

mod cases;
mod draws;

use std::fmt;
use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, LaunchError, Queue};
use tf_numerics::lanes::Level;

/// Sizes of a model, as far as these families see them.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub name: &'static str,
    pub hidden: usize,
    pub vocabulary: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rope_dim: usize,
    pub window: usize,
    pub selected: usize,
    pub index_heads: usize,
    pub index_head_dim: usize,
    pub blocks_max: usize,
    pub block_size: usize,
    pub experts: usize,
    pub experts_of_row: usize,
    pub engram_columns: usize,
    pub engram_head_dim: usize,
    /// Positions before the rows of a case.
    pub context: usize,
}

pub const TINY: Sizes = Sizes {
    name: "tiny",
    hidden: 160,
    vocabulary: 600,
    heads: 8,
    head_dim: 64,
    rope_dim: 16,
    window: 16,
    selected: 12,
    index_heads: 4,
    index_head_dim: 32,
    blocks_max: 4,
    block_size: 8,
    experts: 16,
    experts_of_row: 3,
    engram_columns: 6,
    engram_head_dim: 32,
    context: 101,
};

pub const DEMO: Sizes = Sizes {
    name: "demo",
    hidden: 512,
    vocabulary: 4096,
    heads: 16,
    head_dim: 128,
    rope_dim: 32,
    window: 64,
    selected: 64,
    index_heads: 8,
    index_head_dim: 64,
    blocks_max: 16,
    block_size: 16,
    experts: 72,
    experts_of_row: 6,
    engram_columns: 6,
    engram_head_dim: 64,
    context: 1501,
};

pub const RELEASE: Sizes = Sizes {
    name: "release",
    hidden: 5120,
    vocabulary: 4096,
    heads: 64,
    head_dim: 512,
    rope_dim: 64,
    window: 128,
    selected: 512,
    index_heads: 32,
    index_head_dim: 128,
    blocks_max: 2048,
    block_size: 8,
    experts: 384,
    experts_of_row: 6,
    engram_columns: 24,
    engram_head_dim: 256,
    context: 65_537,
};

/// What a buffer is to its case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Not written.
    Input,
    /// Compared, in words of f32.
    Floats,
    /// Compared.
    Bytes,
    /// Written, but nothing is promised of it.
    Work,
}

type Run = Box<dyn Fn(&mut Queue, &mut [Buffer]) -> Result<(), LaunchError>>;

/// What the launch does on CUDA, on buffers of the host.
type Mirror = Box<dyn Fn(&mut [Buffer])>;

/// One launch on inputs of its own.
struct Case {
    family: &'static str,
    rows: usize,
    buffers: Vec<(Role, Vec<u8>)>,
    run: Run,
    /// Where CUDA has an order of its own.
    mirror: Option<Mirror>,
    /// Bytes that the launch must move at least.
    moved_bytes: usize,
    /// Whether the launch waits for results of its own, so that no graph can hold it.
    waits: bool,
}

/// What a case gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub family: &'static str,
    pub sizes: &'static str,
    pub rows: usize,
    /// Bytes or words compared, and how many differ.
    pub compared: u64,
    pub differ: u64,
    pub first: Option<String>,
    pub moved_bytes: usize,
    /// Of one launch (or its several), where it was timed.
    pub microseconds: Option<f64>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<20} {:<8} {:>5} rows {:>10} compared {:>8} differ",
            self.family, self.sizes, self.rows, self.compared, self.differ
        )?;
        if let Some(time) = self.microseconds {
            let rate = self.moved_bytes as f64 / time / 1000.0;
            write!(f, "  {time:>10.2} us  {rate:>7.1} GB/s  {:>5.3} of 4.3 TB/s", rate / 4300.0)?;
        }
        match &self.first {
            Some(first) => write!(f, "; first at {first}"),
            None => Ok(()),
        }
    }
}

/// How a device's time is measured.
pub type Timer<'a> =
    &'a dyn Fn(&mut Queue, &mut dyn FnMut(&mut Queue) -> Result<(), LaunchError>) -> Result<f64, LaunchError>;

/// Runs every family at `sizes` for each row count on the CPU and on `device`; `timer` adds the device's time. Each outcome
/// is handed to `say` as soon as it is known; `only` names a part of the families.
///
/// # Errors
/// [`LaunchError`] of a launch that was refused or failed.
pub fn check(
    device: &Device,
    queue: &mut Queue,
    sizes: Sizes,
    row_counts: &[usize],
    only: Option<&str>,
    timer: Option<Timer<'_>>,
    say: &mut dyn FnMut(&Outcome),
) -> Result<(), LaunchError> {
    check_all(cases::ALL, device, queue, sizes, row_counts, (only, timer), say)
}

/// As [`check`], for the draw and the draft head, whose host side waits for tokens; at the release's whole vocabulary.
///
/// # Errors
/// As [`check`].
pub fn check_draws(
    device: &Device,
    queue: &mut Queue,
    sizes: Sizes,
    row_counts: &[usize],
    only: Option<&str>,
    timer: Option<Timer<'_>>,
    say: &mut dyn FnMut(&Outcome),
) -> Result<(), LaunchError> {
    check_all(draws::ALL, device, queue, sizes, row_counts, (only, timer), say)
}

fn check_all(
    makes: &[cases::Make],
    device: &Device,
    queue: &mut Queue,
    sizes: Sizes,
    row_counts: &[usize],
    (only, timer): (Option<&str>, Option<Timer<'_>>),
    say: &mut dyn FnMut(&Outcome),
) -> Result<(), LaunchError> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let mut host = Queue::cpu(threads, Level::best());
    for &rows in row_counts {
        for make in makes {
            for case in make(sizes, rows, host.threads()) {
                if only.is_some_and(|only| !case.family.contains(only)) {
                    continue;
                }
                say(&run(&case, device, queue, &mut host, sizes, timer)?);
            }
        }
    }
    Ok(())
}

fn upload(case: &Case, device: &Device) -> Result<Vec<Buffer>, LaunchError> {
    case.buffers.iter().map(|(_, bytes)| Buffer::from_slice(device, bytes)).collect()
}

fn run(
    case: &Case,
    device: &Device,
    queue: &mut Queue,
    host: &mut Queue,
    sizes: Sizes,
    timer: Option<Timer<'_>>,
) -> Result<Outcome, LaunchError> {
    let mut wanted = upload(case, &Device::cpu())?;
    match &case.mirror {
        Some(mirror) if device.backend() == Some(Backend::Cuda) => mirror(&mut wanted),
        _ => (case.run)(host, &mut wanted)?,
    }
    let mut found = upload(case, device)?;
    (case.run)(queue, &mut found)?;
    let mut outcome = Outcome {
        family: case.family,
        sizes: sizes.name,
        rows: case.rows,
        compared: 0,
        differ: 0,
        first: None,
        moved_bytes: case.moved_bytes,
        microseconds: None,
    };
    for (index, ((role, _), (found, wanted))) in case.buffers.iter().zip(found.iter().zip(&wanted)).enumerate() {
        let is_float = match role {
            Role::Input | Role::Work => continue,
            Role::Floats => true,
            Role::Bytes => false,
        };
        compare(&mut outcome, index, is_float, &found.to_vec::<u8>()?, wanted.view());
    }
    outcome.microseconds = match timer {
        None => None,
        Some(_) if case.waits => {
            let started = std::time::Instant::now();
            (case.run)(queue, &mut found)?;
            Some(1e6 * started.elapsed().as_secs_f64())
        }
        Some(timer) => Some(timer(queue, &mut |queue| (case.run)(queue, &mut found))?),
    };
    Ok(outcome)
}

fn compare(outcome: &mut Outcome, buffer: usize, is_float: bool, found: &[u8], wanted: &[u8]) {
    let step = if is_float { 4 } else { 1 };
    let is_nan = |word: &[u8]| word.try_into().is_ok_and(|word| f32::from_ne_bytes(word).is_nan());
    for (at, (found, wanted)) in found.chunks(step).zip(wanted.chunks(step)).enumerate() {
        outcome.compared += 1;
        if found != wanted && !(is_float && is_nan(found) && is_nan(wanted)) {
            outcome.differ += 1;
            outcome.first.get_or_insert_with(|| format!("buffer {buffer}, {at}: {found:02x?}, wanted {wanted:02x?}"));
        }
    }
}
