//! Where the time of a round goes, kernel by kernel.
//!
//! Kernels overlap, so no time of one alone is its share of the round. Each is measured twice: alone, its launches one behind
//! the other, and by what the round takes without them. The first says what the kernel costs, the second what the round
//! would gain if it cost nothing.

use super::{Calls, Cut, Line, Recorded};

/// A device that can say how long a graph runs.
pub trait Clock: Calls {
    /// The entry of a kernel.
    fn name(&self, kernel: u32) -> String;

    /// Microseconds of one run on the device, the median of `repetitions` runs behind a first one.
    ///
    /// # Errors
    /// When the device refuses it.
    fn microseconds(&mut self, graph: &Self::Graph, repetitions: u32) -> Result<f64, Self::Error>;
}

/// The times of one list of launches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoundTimes {
    /// Microseconds of the whole list.
    pub whole_us: f64,
    /// In the order of their first launches.
    pub parts: Vec<PartTimes>,
}

/// The launches of one kernel with one grid.
#[derive(Clone, Debug, PartialEq)]
pub struct PartTimes {
    pub kernel: String,
    pub blocks: u32,
    pub launches: usize,
    /// Microseconds of all its launches, one behind the other and nothing between them.
    pub alone_us: f64,
    /// By how many microseconds the list is shorter without them.
    pub saved_us: f64,
}

/// Launches of a part alone at least: a short list would be timed with the start of a graph.
const ALONE_MIN: usize = 32;

/// Times `round` and its parts. Buffers hold anything afterwards.
///
/// # Errors
/// Of the first call that fails.
pub fn times<C: Clock>(clock: &mut C, round: &Recorded, repetitions: u32) -> Result<RoundTimes, C::Error> {
    let whole = clock.build(round)?;
    let whole_us = clock.microseconds(&whole, repetitions)?;
    let mut parts: Vec<PartTimes> = Vec::new();
    for (index, (cut, _)) in round.iter().enumerate() {
        let is_of_part = |other: &Cut| (other.kernel, other.blocks) == (cut.kernel, cut.blocks);
        if round.iter().take(index).any(|(other, _)| is_of_part(other)) {
            continue;
        }
        let own = only(round, is_of_part);
        let times = ALONE_MIN.div_ceil(own.len());
        let alone = clock.build(&repeated(&own, times))?;
        let alone_us = clock.microseconds(&alone, repetitions)? / times as f64;
        let without = clock.build(&only(round, |other| !is_of_part(other)))?;
        let without_us = clock.microseconds(&without, repetitions)?;
        // Again, since a device's clock follows its load; and what later parts read is what a round has written.
        let whole_us = clock.microseconds(&whole, repetitions)?;
        let (kernel, blocks, launches) = (clock.name(cut.kernel), cut.blocks, own.len());
        parts.push(PartTimes { kernel, blocks, launches, alone_us, saved_us: whole_us - without_us });
    }
    Ok(RoundTimes { whole_us, parts })
}

fn only(round: &Recorded, wanted: impl Fn(&Cut) -> bool) -> Recorded {
    let mut list = Recorded::default();
    for (cut, arguments) in round.iter().filter(|(cut, _)| wanted(cut)) {
        list.argument(arguments);
        list.push(*cut);
    }
    list
}

fn repeated(round: &Recorded, times: usize) -> Recorded {
    let mut list = Recorded::default();
    for (cut, arguments) in (0..times).flat_map(|_| round.iter()) {
        list.argument(arguments);
        list.push(Cut { line: Line::Main, ..*cut });
    }
    list
}
