//! What must hold of a kernel, as data: the records that the contract program, the timer and the generated page read.
//!
//! A [`Contract`] names one launch of a family. Its `make` builds a [`World`] from a case and a seed: rows of inputs, the
//! launch over any choice of them, and for every output element the interval that the definition allows. The four gates ask
//! their questions through these alone, so a new kernel writes no checking code.
//!
//! Nothing here runs in a forward. Planted defects live in a world's launch or in its [`Stage`], around the shipping
//! kernel: the shipped code holds none.

mod seats;
mod span;
mod stage;
mod values;

pub use seats::Seats;
pub use span::{Span, U, dot_error, dot_span, qdq_e4m3, qdq_fine, qdq_fp4, rotate, sum_error};
pub use stage::{Fill, Input, Outcome, Output, Stage, Word};
pub use values::{Values, gather};

use tf_device::gpu::Backend;

/// One of the four questions, and what the count of limit problems asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gate {
    /// Is every element inside the interval that the float64 definition allows?
    Value,
    /// Are a row's bits the same whatever the launch?
    Geometry,
    /// Does a launch touch only what it owns, and write all that it promises?
    Memory,
    /// Are the bits the same whatever ran before or beside it?
    Repeat,
    /// Does every chip take what a launch asks for? No gate over cases: every launch of the run is counted, also one that
    /// fails. Controls show that it would be.
    Limits,
}

impl Gate {
    /// Those that every kernel passes case by case.
    pub const ALL: [Gate; 4] = [Gate::Value, Gate::Geometry, Gate::Memory, Gate::Repeat];

    pub const fn name(self) -> &'static str {
        match self {
            Gate::Value => "value",
            Gate::Geometry => "geometry",
            Gate::Memory => "memory",
            Gate::Repeat => "repeat",
            Gate::Limits => "limits",
        }
    }
}

/// One launch of a family and what must hold of it.
pub struct Contract {
    /// `family` or `family/launch`: the name that the launcher gives its queue.
    pub name: &'static str,
    /// What it computes, in one line.
    pub formula: &'static str,
    pub shapes: &'static str,
    /// The order in which it sums, or that it doesn't.
    pub order: &'static str,
    /// How the interval of an element is derived.
    pub bound: &'static str,
    pub cases: &'static [Case],
    pub make: fn(&Case, u64) -> Box<dyn World>,
    pub limits: &'static [Limit],
    pub controls: &'static [Control],
    /// Edits of its GPU sources.
    pub edits: &'static [Control],
    /// What every kernel carries besides: [`STANDARD_CONTROLS`], or [`IN_PLACE_CONTROLS`].
    pub standard: &'static [Control],
}

impl Contract {
    pub fn family(&self) -> &'static str {
        self.name.split('/').next().expect("a split gives one part")
    }

    /// The kernel's own controls, its edits, then those that every kernel carries.
    pub fn all_controls(&self) -> impl Iterator<Item = &Control> {
        self.controls.iter().chain(self.edits).chain(self.standard)
    }
}

/// Sizes of one case. Gates 2 to 4 choose among its `rows`.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    pub rows: usize,
    pub sizes: &'static [(&'static str, usize)],
}

/// The size of a case whose rows are all launched, also where a slow device launches some.
pub const ALL_ROWS: (&str, usize) = ("all rows", 1);

impl Case {
    /// The size called `name`, 0 where the case doesn't give it.
    pub fn size(&self, name: &str) -> usize {
        self.sizes.iter().find(|(given, _)| *given == name).map_or(0, |(_, size)| *size)
    }
}

/// A row of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// The world's row of this index.
    Row(usize),
    /// A row full of NaN, infinities, zeros or huge values, by kind; nobody reads its outputs.
    Poison(usize),
}

impl Pick {
    pub const POISON_KINDS: usize = 5;

    pub fn row(self) -> Option<usize> {
        match self {
            Pick::Row(row) => Some(row),
            Pick::Poison(_) => None,
        }
    }
}

/// Seeded inputs of one case, and the kernel over any choice of its rows.
pub trait World: Sync {
    /// Launches the picks together and hands each pick's outputs to the stage.
    ///
    /// # Errors
    /// The launcher's refusal.
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String>;

    /// What each element of a row's output may be, in the order of [`World::decode`].
    fn expected(&self, row: usize) -> Vec<Expected>;

    /// A row's output words as numbers.
    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        words.iter().map(|word| f64::from(f32::from_bits(*word))).collect()
    }

    /// A row's output words by the mirror of an order that CUDA's kernel has for itself; `None` where it has none.
    fn stepped(&self, _row: usize) -> Option<Vec<u32>> {
        None
    }

    /// What all rows in one launch read and compute, for the timer.
    fn work(&self) -> Work;
}

/// Bytes that a launch over all rows must move, and its multiply-adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub bytes: usize,
    pub multiply_adds: usize,
}

/// The definition's value of an element, and what is allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    pub value: f64,
    pub span: Span,
}

impl Expected {
    /// Nothing but this value.
    pub fn exactly(value: f64) -> Expected {
        Expected { value, span: Span::exact(value) }
    }

    /// Each value of the reference with the interval derived for it.
    pub fn zip(values: &[f64], spans: &[Span]) -> Vec<Expected> {
        assert_eq!(values.len(), spans.len(), "a reference and its bound must cover the same elements");
        values.iter().zip(spans).map(|(&value, &span)| Expected { value, span }).collect()
    }
}

/// Which of a world's planted defects is on. [`Fault::NONE`] everywhere but in a control's run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault(Option<&'static str>);

impl Fault {
    pub const NONE: Fault = Fault(None);

    pub const fn named(name: &'static str) -> Fault {
        Fault(Some(name))
    }

    pub fn is(self, name: &str) -> bool {
        self.0 == Some(name)
    }
}

/// A planted defect and the gate that must turn red.
pub struct Control {
    pub name: &'static str,
    pub gate: Gate,
    pub plant: Plant,
}

/// Where a defect is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// In the kernel's arguments or around its launch, by the world: [`Fault::named`] with the control's name.
    Arguments,
    /// In what the launch leaves behind, by the stage.
    Outcome(Tamper),
    /// In a GPU's source text, a kernel's own or one that it includes, where `find` must occur exactly once.
    Edit { backend: Backend, source: &'static str, find: &'static str, replace: &'static str },
    /// In the geometry of a Metal launch: so many SIMD groups a threadgroup.
    Simdgroups(u32),
}

impl Control {
    pub const fn value(name: &'static str) -> Control {
        Control { name, gate: Gate::Value, plant: Plant::Arguments }
    }

    pub const fn geometry(name: &'static str) -> Control {
        Control { name, gate: Gate::Geometry, plant: Plant::Arguments }
    }

    /// An edit of a Metal source.
    pub const fn metal(
        name: &'static str,
        gate: Gate,
        source: &'static str,
        find: &'static str,
        replace: &'static str,
    ) -> Control {
        Control { name, gate, plant: Plant::Edit { backend: Backend::Metal, source, find, replace } }
    }

    /// A Metal launch of more threads a threadgroup than any chip takes.
    pub const fn crowded() -> Control {
        let plant = Plant::Simdgroups(33);
        Control { name: "asks for 1056 threads a threadgroup (Metal)", gate: Gate::Limits, plant }
    }

    /// An edit of a CUDA source.
    pub const fn cuda(
        name: &'static str,
        gate: Gate,
        source: &'static str,
        find: &'static str,
        replace: &'static str,
    ) -> Control {
        Control { name, gate, plant: Plant::Edit { backend: Backend::Cuda, source, find, replace } }
    }

    /// The same control of another kernel.
    pub const fn copy(&self) -> Control {
        Control { name: self.name, gate: self.gate, plant: self.plant }
    }

    const fn outcome(name: &'static str, gate: Gate, tamper: Tamper) -> Control {
        Control { name, gate, plant: Plant::Outcome(tamper) }
    }
}

/// A defect that any kernel could have, planted in its outputs and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tamper {
    /// A row's last bit follows the number of rows.
    RowCount,
    /// A row's last bit follows the number of threads.
    ThreadCount,
    /// A row takes in the row after it, times zero.
    Neighbour,
    /// One byte in front of an output.
    WritesBefore,
    /// One byte behind an output.
    WritesBehind,
    /// The last promised element stays as it was.
    LeavesLast,
    /// One bit of an input.
    WritesInput,
    /// An output takes in what was in its memory before.
    ReadsOutput,
    /// An output follows the number of launches before.
    CountsLaunches,
}

/// What every kernel carries: at least one defect for each gate that its own controls need not reach.
pub const STANDARD_CONTROLS: &[Control] = &[
    Control::outcome("the last bit follows the row count", Gate::Geometry, Tamper::RowCount),
    Control::outcome("the last bit follows the thread count", Gate::Geometry, Tamper::ThreadCount),
    Control::outcome("a row takes in zero times its neighbour", Gate::Geometry, Tamper::Neighbour),
    Control::outcome("writes a byte in front of the output", Gate::Memory, Tamper::WritesBefore),
    Control::outcome("writes a byte behind the output", Gate::Memory, Tamper::WritesBehind),
    Control::outcome("leaves the last element unwritten", Gate::Memory, Tamper::LeavesLast),
    Control::outcome("writes into an input", Gate::Memory, Tamper::WritesInput),
    Control::outcome("adds to what the output held", Gate::Memory, Tamper::ReadsOutput),
    Control::outcome("follows the number of launches before", Gate::Repeat, Tamper::CountsLaunches),
];

/// For kernels that overwrite their only operand: what they leave unwritten is the operand, which gate 1 sees.
pub const IN_PLACE_CONTROLS: &[Control] = &[
    STANDARD_CONTROLS[0].copy(),
    STANDARD_CONTROLS[1].copy(),
    STANDARD_CONTROLS[2].copy(),
    STANDARD_CONTROLS[3].copy(),
    STANDARD_CONTROLS[4].copy(),
    Control::outcome("leaves the last element unwritten", Gate::Value, Tamper::LeavesLast),
    STANDARD_CONTROLS[7].copy(),
    STANDARD_CONTROLS[8].copy(),
];

/// For kernels whose results are host values: they own no output buffer.
pub const HOST_CONTROLS: &[Control] = &[
    STANDARD_CONTROLS[0].copy(),
    STANDARD_CONTROLS[1].copy(),
    STANDARD_CONTROLS[2].copy(),
    STANDARD_CONTROLS[6].copy(),
    STANDARD_CONTROLS[7].copy(),
    STANDARD_CONTROLS[8].copy(),
];

/// Float32 values in float64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// The rows that a launch's picks stand for, with poison standing for row `0`: for integer inputs, which must stay valid.
pub fn row_of(pick: Pick) -> usize {
    pick.row().unwrap_or(0)
}

/// A bound of a launch's arguments: `most` is accepted, and the next larger valid size is refused by the launcher.
pub struct Limit {
    pub what: &'static str,
    pub most: usize,
    /// Whether the launcher takes a launch of this size; it computes nothing of worth.
    pub accepts: fn(usize) -> bool,
    /// The smallest size above `most` that is wrong for no other reason.
    pub beyond: usize,
}
