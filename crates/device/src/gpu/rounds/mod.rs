//! Rounds: launches that a driver collects and gives to its device as one.
//!
//! A driver notes the launches of a round in a [`Recorded`] list and their host bytes in an [`Arena`]; [`Rounds`] then runs
//! the list through the driver's [`Calls`]. A list of a kind that was met before becomes a graph; from then on only launches
//! that changed are told to it. What is kept is bounded. Knows no device: order, choice and bookkeeping only.

mod arena;
mod lines;
mod recorded;
mod times;

use std::time::Instant;

pub use arena::Arena;
pub use lines::{Line, Lines};
pub use recorded::{Cut, Recorded};
pub use times::{Clock, PartTimes, RoundTimes, times};

/// When the launches of a round start. Changes no bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Giving {
    /// Each at once.
    OneByOne,
    /// A few early, so that the device works while the host notes the others, then more and more.
    #[default]
    Pieces,
    /// All together at the end.
    Whole,
}

/// Launches of the pieces of a round; the last piece is what is left.
const PIECES: [usize; 3] = [16, 64, 256];

impl Giving {
    /// Whether the `collected` launches behind `pieces` pieces of this round start now.
    pub fn starts(self, pieces: usize, collected: usize) -> bool {
        match self {
            Giving::OneByOne => true,
            Giving::Pieces => PIECES.get(pieces).is_some_and(|size| collected >= *size),
            Giving::Whole => false,
        }
    }
}

/// A shorter list is launched one by one.
pub const GRAPH_LAUNCHES_MIN: usize = 16;
/// Graphs that are kept at most, of all kinds and of one.
pub const GRAPHS_MAX: usize = 192;
/// See [`GRAPHS_MAX`].
pub const GRAPHS_OF_A_KIND_MAX: usize = 12;
/// Kinds that were met once and have no graph yet, at most.
const MET_MAX: usize = 256;
/// A graph of which no more than this share differs is changed; else another one is made while there is room.
const CHANGED_SHARE: usize = 4;

/// What a driver does with a list.
pub trait Calls {
    /// The list as one, with the node of each of its launches.
    type Graph;
    /// Why it did not work.
    type Error;

    /// Puts one launch into the stream.
    ///
    /// # Errors
    /// When the device refuses it.
    fn launch(&mut self, cut: &Cut, arguments: &[u8]) -> Result<(), Self::Error>;

    /// Makes a graph that runs the launches in their order.
    ///
    /// # Errors
    /// When the device refuses it.
    fn build(&mut self, round: &Recorded) -> Result<Self::Graph, Self::Error>;

    /// Lets launch `index` of the graph, of equal kernel, run with another grid and other arguments from now on.
    ///
    /// # Errors
    /// When the graph can't be changed so: it is made anew.
    fn change(&mut self, graph: &mut Self::Graph, index: usize, cut: &Cut, arguments: &[u8])
    -> Result<(), Self::Error>;

    /// Puts the whole graph into the stream.
    ///
    /// # Errors
    /// When the device refuses it.
    fn replay(&mut self, graph: &Self::Graph) -> Result<(), Self::Error>;
}

/// What happened to the lists so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Launches that went one by one.
    pub launched: u64,
    /// Graphs made, and how many of them stand for one that could not be changed.
    pub built: u64,
    /// See [`Counts::built`].
    pub rebuilt: u64,
    /// Lists that ran as a graph.
    pub replayed: u64,
    /// Launches of graphs that were changed.
    pub changed: u64,
    /// Nanoseconds of the host in the driver's calls.
    pub given_ns: u64,
}

/// The graphs of a driver, the newest first.
#[derive(Debug)]
pub struct Rounds<G> {
    graphs: Vec<Kept<G>>,
    met: Vec<u64>,
    counts: Counts,
}

/// A graph and the list that it runs.
#[derive(Debug)]
struct Kept<G> {
    round: Recorded,
    graph: G,
}

impl<G> Default for Rounds<G> {
    fn default() -> Rounds<G> {
        Rounds { graphs: Vec::new(), met: Vec::new(), counts: Counts::default() }
    }
}

/// What to do with a list.
enum Choice {
    Launch,
    Build,
    Change(usize),
}

impl<G> Rounds<G> {
    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Runs the launches of `round` in their order.
    ///
    /// # Errors
    /// Of the first call that fails; what follows it in the list has not run. No graph is kept that may be half changed.
    pub fn run<C: Calls<Graph = G>>(&mut self, calls: &mut C, round: &Recorded) -> Result<(), C::Error> {
        let started = Instant::now();
        let given = self.give(calls, round);
        self.counts.given_ns += started.elapsed().as_nanos() as u64;
        given
    }

    fn give<C: Calls<Graph = G>>(&mut self, calls: &mut C, round: &Recorded) -> Result<(), C::Error> {
        match self.choose(round) {
            Choice::Launch => round.iter().try_for_each(|(cut, arguments)| {
                self.counts.launched += 1;
                calls.launch(cut, arguments)
            }),
            Choice::Build => self.build(calls, round),
            Choice::Change(index) => {
                let mut kept = self.graphs.remove(index);
                match change(calls, &mut kept, round) {
                    Ok(changed) => self.counts.changed += changed,
                    Err(_) => {
                        self.counts.rebuilt += 1;
                        return self.build(calls, round);
                    }
                }
                self.replay(calls, kept)
            }
        }
    }

    fn build<C: Calls<Graph = G>>(&mut self, calls: &mut C, round: &Recorded) -> Result<(), C::Error> {
        let graph = calls.build(round)?;
        self.counts.built += 1;
        self.graphs.truncate(GRAPHS_MAX - 1);
        self.replay(calls, Kept { round: round.clone(), graph })
    }

    fn replay<C: Calls<Graph = G>>(&mut self, calls: &mut C, kept: Kept<G>) -> Result<(), C::Error> {
        calls.replay(&kept.graph)?;
        self.counts.replayed += 1;
        self.graphs.insert(0, kept);
        Ok(())
    }

    fn choose(&mut self, round: &Recorded) -> Choice {
        if round.len() < GRAPH_LAUNCHES_MIN {
            return Choice::Launch;
        }
        let (mut of_kind, mut oldest) = (0, None);
        for (index, kept) in self.graphs.iter().enumerate().filter(|(_, kept)| kept.round.is_of_kind(round)) {
            if kept.round.differs_within(round, round.len() / CHANGED_SHARE) {
                return Choice::Change(index);
            }
            of_kind += 1;
            oldest = Some(index);
        }
        match oldest {
            Some(oldest) if of_kind >= GRAPHS_OF_A_KIND_MAX => Choice::Change(oldest),
            _ if self.was_met(round.kind(), of_kind) => Choice::Build,
            _ => Choice::Launch,
        }
    }

    /// Whether a list of this kind was launched before: what comes once is not worth a graph.
    fn was_met(&mut self, kind: u64, of_kind: usize) -> bool {
        if of_kind > 0 {
            return true;
        }
        if let Some(index) = self.met.iter().position(|met| *met == kind) {
            self.met.remove(index);
            return true;
        }
        self.met.truncate(MET_MAX - 1);
        self.met.insert(0, kind);
        false
    }
}

/// How many launches were changed.
fn change<C: Calls>(calls: &mut C, kept: &mut Kept<C::Graph>, round: &Recorded) -> Result<u64, C::Error> {
    let mut changed = 0;
    for index in 0..round.len() {
        if !kept.round.equals_at(round, index) {
            let (cut, arguments) = round.at(index);
            calls.change(&mut kept.graph, index, cut, arguments)?;
            changed += 1;
        }
    }
    kept.round.clone_from(round);
    Ok(changed)
}

#[cfg(test)]
mod tests;
