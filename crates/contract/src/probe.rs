//! One launch of a world, with its queue and what is planted; a panic becomes a failure.

use crate::target::Target;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tf_device::Queue;
use tf_kernels::contract::{Control, Fault, Fill, Gate, Outcome, Pick, Plant, Stage, Tamper, World};
use tf_numerics::lanes::Level;

/// Why a gate did not pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// The gate's own question was answered no.
    Red(String),
    /// The launch was refused, panicked, or there was nothing to compare: no answer at all.
    Broken(String),
}

impl Failure {
    pub fn text(&self) -> &str {
        match self {
            Failure::Red(text) | Failure::Broken(text) => text,
        }
    }
}

/// How a launch runs.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Of the CPU.
    pub level: Level,
    /// Of the CPU; on a GPU the number of its way to run a launch, from 1 on.
    pub threads: usize,
    pub fill: Fill,
}

impl Setting {
    /// The best level on one thread; the first way of a GPU.
    pub fn plain() -> Setting {
        Setting { level: Level::best(), threads: 1, fill: Fill::NAN }
    }

    pub fn with_fill(self, fill: Fill) -> Setting {
        Setting { fill, ..self }
    }
}

/// A queue and how many launches it has run.
pub struct Counted {
    pub queue: Queue,
    pub launches: usize,
    threads: usize,
}

impl Counted {
    /// A queue of its own.
    pub fn new(target: &Target, setting: Setting) -> Counted {
        Counted { queue: target.queue(setting), launches: 0, threads: setting.threads }
    }
}

/// Queues by level and threads, kept for the whole run.
#[derive(Default)]
pub struct Queues {
    pub target: Target,
    queues: BTreeMap<(String, usize), Counted>,
}

impl Queues {
    /// No queue yet.
    pub fn new(target: Target) -> Queues {
        Queues { target, queues: BTreeMap::new() }
    }

    pub fn of(&mut self, setting: Setting) -> &mut Counted {
        let key = (setting.level.to_string(), setting.threads);
        self.queues.entry(key).or_insert_with(|| Counted::new(&self.target, setting))
    }
}

/// The defect of a control, or none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planted {
    pub fault: Fault,
    pub tamper: Option<Tamper>,
}

impl Planted {
    pub const NONE: Planted = Planted { fault: Fault::NONE, tamper: None };

    /// `None` for what is no matter of a running kernel: its source's text, its launches' geometry.
    pub fn of(control: &Control) -> Option<Planted> {
        match control.plant {
            Plant::Arguments => Some(Planted { fault: Fault::named(control.name), tamper: None }),
            Plant::Outcome(tamper) => Some(Planted { fault: Fault::NONE, tamper: Some(tamper) }),
            Plant::Edit { .. } | Plant::Simdgroups(_) => None,
        }
    }
}

/// A world under one gate.
pub struct Probe<'a> {
    /// Its name.
    pub kernel: &'a str,
    pub world: &'a dyn World,
    pub queues: &'a mut Queues,
    pub planted: Planted,
    pub row_count: usize,
    pub tally: Tally,
}

/// What a gate did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    pub launches: usize,
    /// Elements or words compared.
    pub compared: usize,
    /// Gate 1: the worst element, as a share of its bound, and where.
    pub worst: f64,
    pub worst_at: String,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.launches += other.launches;
        self.compared += other.compared;
        if other.worst > self.worst {
            self.worst = other.worst;
            self.worst_at.clone_from(&other.worst_at);
        }
    }
}

impl Probe<'_> {
    pub fn all_rows(&self) -> Vec<Pick> {
        (0..self.row_count).map(Pick::Row).collect()
    }

    /// Launches the picks; problems with memory are left to the caller.
    pub fn launch(&mut self, setting: Setting, picks: &[Pick]) -> Result<Outcome, Failure> {
        self.tally.launches += 1;
        launch_on(self.world, self.queues.of(setting), self.planted, setting.fill, picks)
    }

    /// As [`Probe::launch`] on a queue of the caller's.
    pub fn launch_on(&mut self, queue: &mut Counted, fill: Fill, picks: &[Pick]) -> Result<Outcome, Failure> {
        self.tally.launches += 1;
        launch_on(self.world, queue, self.planted, fill, picks)
    }
}

/// Launches that run just now, on any thread.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Keeps panics inside launches from being printed: each is caught and told as a failure. Others are printed as ever.
pub fn quiet_launches() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if RUNNING.load(Ordering::Relaxed) == 0 {
            print(info);
        }
    }));
}

/// One launch on a given queue.
pub fn launch_on(
    world: &dyn World,
    counted: &mut Counted,
    planted: Planted,
    fill: Fill,
    picks: &[Pick],
) -> Result<Outcome, Failure> {
    let (launches, threads) = (counted.launches, counted.threads);
    counted.launches += 1;
    let queue = &mut counted.queue;
    let run = AssertUnwindSafe(|| {
        let mut stage = Stage::new(queue, picks.len(), fill, planted.tamper, launches, threads);
        world.launch(&mut stage, picks, planted.fault)?;
        Ok(stage.finish(picks))
    });
    RUNNING.fetch_add(1, Ordering::Relaxed);
    let result = catch_unwind(run);
    RUNNING.fetch_sub(1, Ordering::Relaxed);
    match result {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(refusal)) => Err(Failure::Broken(refusal)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
            Err(Failure::Broken(format!("the launch panicked: {text}")))
        }
    }
}

/// Time of one launch over all rows.
pub fn time_of(world: &dyn World, counted: &mut Counted, row_count: usize) -> Result<Duration, Failure> {
    let picks: Vec<Pick> = (0..row_count).map(Pick::Row).collect();
    launch_on(world, counted, Planted::NONE, Fill::ZERO, &picks).map(|outcome| outcome.elapsed)
}

/// Compares each picked row's words with those of the same row in `base`, which holds all rows in order.
///
/// A row may leave no words in one of the two, where the launch promises none; then there is nothing to compare.
pub fn compare_rows(
    picks: &[Pick],
    got: &[Vec<u32>],
    base: &[Vec<u32>],
    what: &str,
    tally: &mut Tally,
) -> Result<(), Failure> {
    for (place, (pick, got)) in picks.iter().zip(got).enumerate() {
        let Some(row) = pick.row() else { continue };
        let base = &base[row];
        if got.is_empty() || base.is_empty() {
            continue;
        }
        tally.compared += got.len();
        if got.len() != base.len() {
            let text =
                format!("{what}: row {row} at place {place} has {} outputs, alone in order {}", got.len(), base.len());
            return Err(Failure::Red(text));
        }
        if let Some(at) = got.iter().zip(base).position(|(got, base)| got != base) {
            let text = format!(
                "{what}: row {row} at place {place} of {}, element {at}: bits {:#010x}, and {:#010x} in the first launch",
                picks.len(),
                got[at],
                base[at]
            );
            return Err(Failure::Red(text));
        }
    }
    Ok(())
}

/// Runs one gate over a world.
pub fn check(gate: Gate, probe: &mut Probe<'_>) -> Result<(), Failure> {
    if probe.row_count == 0 {
        return Err(Failure::Broken("the case has no rows".to_owned()));
    }
    match gate {
        Gate::Value => crate::gates::value::check(probe),
        Gate::Geometry => crate::gates::geometry::check(probe),
        Gate::Memory => crate::gates::memory::check(probe),
        Gate::Repeat => crate::gates::repeat::check(probe),
        Gate::Limits => crate::gates::limits::check(probe),
    }?;
    if probe.tally.compared == 0 {
        return Err(Failure::Broken("nothing was compared".to_owned()));
    }
    Ok(())
}
