//! The bookkeeping on a device that keeps what it was told.

use super::*;
use std::slice::from_ref;

/// What a device has run: kernel, blocks and arguments of each launch.
type Ran = Vec<(u32, u32, Vec<u8>)>;

#[derive(Default)]
struct Fake {
    ran: Ran,
    /// What was asked for, in words.
    calls: Vec<&'static str>,
    /// The call that fails, counted from now on.
    fails: Option<(&'static str, usize)>,
}

impl Fake {
    fn call(&mut self, name: &'static str) -> Result<(), &'static str> {
        if let Some((wanted, left)) = &mut self.fails
            && *wanted == name
        {
            if *left == 0 {
                self.fails = None;
                return Err(name);
            }
            *left -= 1;
        }
        self.calls.push(name);
        Ok(())
    }

    fn count(&self, name: &str) -> usize {
        self.calls.iter().filter(|call| **call == name).count()
    }
}

fn ran(cut: &Cut, arguments: &[u8]) -> (u32, u32, Vec<u8>) {
    (cut.kernel, cut.blocks, arguments.to_vec())
}

impl Calls for Fake {
    type Graph = Ran;
    type Error = &'static str;

    fn launch(&mut self, cut: &Cut, arguments: &[u8]) -> Result<(), &'static str> {
        self.call("launch")?;
        self.ran.push(ran(cut, arguments));
        Ok(())
    }

    fn build(&mut self, round: &Recorded) -> Result<Ran, &'static str> {
        self.call("build")?;
        Ok(round.iter().map(|(cut, arguments)| ran(cut, arguments)).collect())
    }

    fn change(&mut self, graph: &mut Ran, index: usize, cut: &Cut, arguments: &[u8]) -> Result<(), &'static str> {
        self.call("change")?;
        assert_eq!(graph[index].0, cut.kernel, "a graph keeps its kernels");
        graph[index] = ran(cut, arguments);
        Ok(())
    }

    fn replay(&mut self, graph: &Ran) -> Result<(), &'static str> {
        self.call("replay")?;
        self.ran.extend(graph.iter().cloned());
        Ok(())
    }
}

/// `count` launches of kernels 0, 1, 2 and so on; `grid` of all, and the arguments that `of` gives.
fn list(count: u32, grid: u32, of: impl Fn(u32) -> u8) -> Recorded {
    let mut list = Recorded::default();
    for kernel in 0..count {
        list.argument(&u64::from(kernel).to_ne_bytes());
        list.argument(&[of(kernel)]);
        list.push(Cut {
            kernel,
            blocks: grid,
            threads: 128,
            shared_bytes: 0,
            cluster: 1,
            overlap: kernel % 2 == 1,
            line: Line::Main,
        });
    }
    list
}

fn expected(list: &Recorded) -> Ran {
    list.iter().map(|(cut, arguments)| ran(cut, arguments)).collect()
}

/// Runs a list and checks that the device ran exactly its launches, in order.
fn run(rounds: &mut Rounds<Ran>, fake: &mut Fake, list: &Recorded) {
    fake.ran.clear();
    fake.calls.clear();
    rounds.run(fake, list).unwrap();
    assert_eq!(fake.ran, expected(list));
}

#[test]
fn a_list_that_comes_again_becomes_a_graph_that_is_only_told_what_changed() {
    let (mut rounds, mut fake) = (Rounds::default(), Fake::default());
    run(&mut rounds, &mut fake, &list(40, 3, |_| 1));
    assert_eq!((fake.count("launch"), fake.calls.len()), (40, 40), "what comes once is launched");
    run(&mut rounds, &mut fake, &list(40, 3, |_| 1));
    assert_eq!(fake.calls, ["build", "replay"]);
    run(&mut rounds, &mut fake, &list(40, 3, |_| 1));
    assert_eq!(fake.calls, ["replay"]);
    run(&mut rounds, &mut fake, &list(40, 3, |kernel| if kernel == 7 || kernel == 39 { 2 } else { 1 }));
    assert_eq!(fake.calls, ["change", "change", "replay"]);
    run(&mut rounds, &mut fake, &list(40, 3, |kernel| if kernel == 7 { 2 } else { 1 }));
    assert_eq!(fake.calls, ["change", "replay"], "one went back");
    let counts = Counts { launched: 40, built: 1, rebuilt: 0, replayed: 4, changed: 3, given_ns: 0 };
    assert_eq!(Counts { given_ns: 0, ..rounds.counts() }, counts);
}

#[test]
fn a_list_of_another_grid_gets_a_graph_of_its_own_while_there_is_room() {
    let (mut rounds, mut fake) = (Rounds::default(), Fake::default());
    run(&mut rounds, &mut fake, &list(20, 1, |_| 0));
    for grid in 1..=GRAPHS_OF_A_KIND_MAX as u32 {
        run(&mut rounds, &mut fake, &list(20, grid, |_| 0));
        assert_eq!(fake.calls, ["build", "replay"], "grid {grid}");
    }
    run(&mut rounds, &mut fake, &list(20, 2, |_| 0));
    assert_eq!(fake.calls, ["replay"]);
    run(&mut rounds, &mut fake, &list(20, 1000, |_| 0));
    assert_eq!((fake.count("change"), fake.count("build")), (20, 0), "the oldest of the kind follows");
    run(&mut rounds, &mut fake, &list(20, 2, |_| 0));
    assert_eq!(fake.calls, ["replay"], "and the others stay");
    run(&mut rounds, &mut fake, &list(20, 1, |_| 0));
    assert_eq!(fake.count("change"), 20, "grid 1 was the oldest");
}

#[test]
fn pieces_start_early_and_grow() {
    let starts = |giving: Giving, launches: usize| {
        let (mut pieces, mut collected, mut sizes) = (0, 0, Vec::new());
        for _ in 0..launches {
            collected += 1;
            if giving.starts(pieces, collected) {
                sizes.push(std::mem::take(&mut collected));
                pieces += 1;
            }
        }
        (sizes, collected)
    };
    assert_eq!(starts(Giving::Pieces, 15), (vec![], 15));
    assert_eq!(starts(Giving::Pieces, 1000), (vec![16, 64, 256], 664));
    assert_eq!(starts(Giving::Pieces, 5000), (vec![16, 64, 256], 4664));
    assert_eq!(starts(Giving::Whole, 1000), (vec![], 1000));
    assert_eq!(starts(Giving::OneByOne, 3), (vec![1, 1, 1], 0));
}

#[test]
fn short_lists_are_launched_and_kinds_are_kept_apart() {
    let (mut rounds, mut fake) = (Rounds::default(), Fake::default());
    for _ in 0..3 {
        let short = list(GRAPH_LAUNCHES_MIN as u32 - 1, 1, |_| 0);
        run(&mut rounds, &mut fake, &short);
        assert_eq!(fake.count("launch"), short.len());
    }
    let mut other = list(30, 1, |_| 0);
    other.argument(&[0; 9]);
    other.push(Cut {
        kernel: 5,
        blocks: 1,
        threads: 32,
        shared_bytes: 0,
        cluster: 1,
        overlap: false,
        line: Line::Main,
    });
    for _ in 0..2 {
        run(&mut rounds, &mut fake, &list(31, 1, |_| 0));
        run(&mut rounds, &mut fake, &other);
    }
    assert_eq!(rounds.counts().built, 2, "equal lengths, other kernels");
}

#[test]
fn what_a_graph_cannot_change_makes_another_kind() {
    let base = Cut { kernel: 1, blocks: 4, threads: 64, shared_bytes: 8, cluster: 2, overlap: true, line: Line::Main };
    let of = |cut: Cut, bytes: usize| {
        let mut list = Recorded::default();
        list.argument(&vec![0; bytes]);
        list.push(cut);
        list
    };
    let first = of(base, 8);
    for (same, cut, bytes) in [
        (true, Cut { blocks: 8, threads: 32, shared_bytes: 0, ..base }, 8),
        (false, Cut { kernel: 2, ..base }, 8),
        (false, Cut { cluster: 4, ..base }, 8),
        (false, Cut { overlap: false, ..base }, 8),
        (false, Cut { line: Line::Side, ..base }, 8),
        (false, Cut { line: Line::Joined, ..base }, 8),
        (false, base, 16),
    ] {
        let other = of(cut, bytes);
        assert_eq!(first.is_of_kind(&other), same, "{cut:?}, {bytes} bytes");
        assert_eq!(first.kind() == other.kind(), same, "{cut:?}, {bytes} bytes");
    }
    assert!(!first.equals_at(&of(Cut { threads: 32, ..base }, 8), 0));
}

#[test]
fn the_graphs_that_are_kept_are_bounded_and_the_oldest_goes() {
    let (mut rounds, mut fake) = (Rounds::default(), Fake::default());
    let first = GRAPH_LAUNCHES_MIN as u32;
    let kinds = GRAPHS_MAX as u32 + 5;
    for _ in 0..2 {
        for count in first..first + kinds {
            run(&mut rounds, &mut fake, &list(count, 1, |_| 0));
        }
    }
    assert_eq!(rounds.graphs.len(), GRAPHS_MAX);
    run(&mut rounds, &mut fake, &list(first + kinds - 1, 1, |_| 0));
    assert_eq!(fake.calls, ["replay"]);
    run(&mut rounds, &mut fake, &list(first, 1, |_| 0));
    assert_eq!(fake.count("launch"), first as usize, "its graph is gone");
    for kind in 0..2 * MET_MAX as u32 {
        run(&mut rounds, &mut fake, &list(100 + kind, 1, |_| 0));
    }
    assert_eq!(rounds.met.len(), MET_MAX);
}

#[test]
fn a_graph_that_cannot_be_changed_is_made_anew() {
    let (mut rounds, mut fake) = (Rounds::default(), Fake::default());
    let of = |value: u8| list(20, 1, move |kernel| if kernel < 3 { value } else { 0 });
    for _ in 0..2 {
        run(&mut rounds, &mut fake, &of(1));
    }
    fake.fails = Some(("change", 1));
    run(&mut rounds, &mut fake, &of(2));
    assert_eq!(fake.calls, ["change", "build", "replay"]);
    assert_eq!((rounds.counts().rebuilt, rounds.graphs.len()), (1, 1));
    run(&mut rounds, &mut fake, &of(2));
    assert_eq!(fake.calls, ["replay"]);
}

#[test]
fn a_failure_is_told_and_leaves_no_graph_that_may_be_half_changed() {
    for (call, value, graphs) in [("launch", None, 1), ("build", Some(9), 1), ("replay", Some(1), 0)] {
        let (mut rounds, mut fake) = (Rounds::default(), Fake::default());
        for _ in 0..2 {
            run(&mut rounds, &mut fake, &list(20, 1, |_| 1));
        }
        fake.fails = Some((call, 0));
        let failing = match value {
            Some(value) => list(20, 1, |_| value),
            None => list(3, 1, |_| 1),
        };
        assert_eq!(rounds.run(&mut fake, &failing), Err(call));
        assert_eq!(rounds.graphs.len(), graphs, "{call}");
        for _ in 0..3 {
            run(&mut rounds, &mut fake, &list(20, 1, |_| 1));
        }
        assert_eq!(fake.calls, ["replay"], "{call}");
    }
}

#[test]
fn a_cleared_list_is_as_new() {
    let mut list = list(2, 1, |_| 1);
    assert_eq!((list.len(), list.at(1).1.len()), (2, 9));
    list.clear();
    assert!(list.is_empty());
    assert_eq!(list.kind(), Recorded::default().kind());
    list.argument(&[6]);
    list.push(Cut { kernel: 9, blocks: 1, threads: 1, shared_bytes: 0, cluster: 1, overlap: false, line: Line::Main });
    assert_eq!(list.at(0).1, [6]);
}

/// Every launch takes ten times its kernel's number and ten more, four less behind another kernel.
impl Clock for Fake {
    fn name(&self, kernel: u32) -> String {
        format!("k{kernel}")
    }

    fn microseconds(&mut self, graph: &Ran, repetitions: u32) -> Result<f64, &'static str> {
        self.call("time")?;
        assert_eq!(repetitions, 3);
        self.ran.clone_from(graph);
        let overlaps = graph.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
        let sum: u32 = graph.iter().map(|(kernel, ..)| 10 + 10 * kernel).sum();
        Ok(f64::from(sum) - 4.0 * overlaps as f64)
    }
}

#[test]
fn a_round_is_timed_whole_and_by_kernel_and_grid() {
    let mut round = Recorded::default();
    for (kernel, blocks) in [(0, 1), (1, 7), (0, 1), (1, 7), (1, 9)] {
        round.argument(&[kernel as u8, blocks as u8]);
        round.push(Cut { kernel, blocks, threads: 32, shared_bytes: 0, cluster: 1, overlap: true, line: Line::Main });
    }
    let mut fake = Fake::default();
    let times = times(&mut fake, &round, 3).unwrap();
    assert_eq!(times.whole_us, 80.0 - 3.0 * 4.0);
    let found: Vec<_> = times.parts.iter().map(|part| (part.kernel.as_str(), part.blocks, part.launches)).collect();
    assert_eq!(found, [("k0", 1, 2), ("k1", 7, 2), ("k1", 9, 1)]);
    assert_eq!(times.parts.iter().map(|part| part.alone_us).collect::<Vec<_>>(), [20.0, 40.0, 20.0]);
    // Without the first all are of one kernel; without the second one change is left; without the last two are.
    assert_eq!(
        times.parts.iter().map(|part| part.saved_us).collect::<Vec<_>>(),
        [68.0 - 60.0, 68.0 - 36.0, 68.0 - 48.0]
    );
    assert_eq!(fake.count("time"), 1 + 3 * 3, "the whole is timed again beside each part");
    assert_eq!(fake.ran, expected(&round), "and runs last, so that buffers hold a round's values");
    assert_eq!(times, super::times(&mut Fake::default(), &round, 3).unwrap(), "and nothing else of it is kept");
    fake.fails = Some(("time", 2));
    assert_eq!(super::times(&mut fake, &round, 3), Err("time"));
}

#[test]
fn the_lines_meet_where_a_launch_touches_what_one_at_the_side_does() {
    let mut lines = Lines::default();
    let mut place = |to_side, reads, writes| lines.place(to_side, from_ref(&reads), from_ref(&writes));
    assert_eq!(place(false, 0..10, 20..30), Line::Main);
    let meetings =
        [("reads a write", 105..106, 0..0), ("writes a write", 0..0, 90..101), ("writes a read", 0..0, 29..40)];
    for (meeting, reads, writes) in meetings {
        assert_eq!(place(true, 20..30, 100..110), Line::Side, "{meeting}");
        assert_eq!(place(false, 20..30, 90..100), Line::Main, "{meeting}: reads a read, and a neighbour before");
        assert_eq!(place(false, 110..120, 0..20), Line::Main, "{meeting}: neighbours");
        assert_eq!(place(true, 100..110, 200..201), Line::Side, "{meeting}: the side is in order");
        assert_eq!(place(false, reads, writes), Line::Joined, "{meeting}");
        assert_eq!(place(false, 100..110, 20..30), Line::Main, "{meeting}: nothing is left at the side");
    }
    assert_eq!(place(true, 0..0, 100..110), Line::Side);
    lines.clear();
    assert_eq!(lines.place(false, from_ref(&(100..110)), &[]), Line::Main);
}
