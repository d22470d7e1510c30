//! Gate 4: does history matter? The same launch again, after other work, from dirty scratch, and interleaved with another
//! queue's launches, in turn and at the same time.

use crate::gates::memory::dirty_scratch;
use crate::probe::{Counted, Failure, Probe, compare_rows, launch_on};
use tf_kernels::contract::{Fill, Pick};

pub fn check(probe: &mut Probe<'_>) -> Result<(), Failure> {
    let all = probe.all_rows();
    let target = probe.queues.target.clone();
    let [setting, other_setting] = target.pair();
    let fill = setting.fill;
    let mut queue = Counted::new(&target, setting);
    let base = probe.launch_on(&mut queue, fill, &all)?.rows;
    let mut other: Vec<Pick> = all.iter().rev().copied().step_by(2).collect();
    other.extend((0..Pick::POISON_KINDS).map(Pick::Poison));

    let again = probe.launch_on(&mut queue, fill, &all)?.rows;
    compare_rows(&all, &again, &base, "again", &mut probe.tally)?;
    probe.launch_on(&mut queue, fill, &other)?;
    let after = probe.launch_on(&mut queue, fill, &all)?.rows;
    compare_rows(&all, &after, &base, "after other work", &mut probe.tally)?;
    for dirt in [Fill::NAN, Fill::LARGE] {
        dirty_scratch(&mut queue.queue, dirt);
        let dirty = probe.launch_on(&mut queue, dirt, &all)?.rows;
        compare_rows(&all, &dirty, &base, "from dirty scratch", &mut probe.tally)?;
    }

    let mut second = Counted::new(&target, other_setting);
    for turn in 0..2 {
        let theirs = probe.launch_on(&mut second, fill, &other)?.rows;
        compare_rows(&other, &theirs, &base, &format!("on another queue, turn {turn}"), &mut probe.tally)?;
        let ours = probe.launch_on(&mut queue, fill, &all)?.rows;
        compare_rows(&all, &ours, &base, &format!("between another queue's launches, turn {turn}"), &mut probe.tally)?;
    }

    let (world, planted) = (probe.world, probe.planted);
    let (ours, theirs) = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| launch_on(world, &mut second, planted, fill, &other));
        let ours = launch_on(world, &mut queue, planted, fill, &all);
        (ours, theirs.join().expect("a launch catches its panics"))
    });
    probe.tally.launches += 2;
    compare_rows(&all, &ours?.rows, &base, "beside another queue's launch", &mut probe.tally)?;
    compare_rows(&other, &theirs?.rows, &base, "beside another queue's launch", &mut probe.tally)
}
