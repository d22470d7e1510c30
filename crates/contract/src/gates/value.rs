//! Gate 1: is every element inside the interval that the float64 definition allows? And where a GPU's kernel has the CPU's
//! bits, or CUDA's those of a mirror of its own order: has it?

use crate::options::Backend;
use crate::probe::{Counted, Failure, Planted, Probe, Setting, compare_rows, launch_on};
use crate::target::Target;
use tf_kernels::contract::Expected;

pub fn check(probe: &mut Probe<'_>) -> Result<(), Failure> {
    let picks = probe.all_rows();
    let plain = probe.queues.target.plain();
    let outcome = probe.launch(plain, &picks)?;
    // A row may leave no output in this launch, as one that a ring has no more room for.
    let written: Vec<usize> = (0..outcome.rows.len()).filter(|row| !outcome.rows[*row].is_empty()).collect();
    // What is wrong everywhere is wrong in the first row; the others are worth all cores.
    let (first, others) = written.split_at(written.len().min(1));
    for rows in [first, others] {
        let world = probe.world;
        for (row, expected) in rows.iter().zip(each_row(rows, |row| world.expected(row))) {
            judge_row(probe, *row, &outcome.rows[*row], expected)?;
        }
    }
    let steps: Option<Vec<Vec<u32>>> = match probe.queues.target.backend() {
        Backend::Cuda => {
            let (world, rows) = (probe.world, (0..outcome.rows.len()).collect::<Vec<_>>());
            each_row(&rows, |row| world.stepped(row)).into_iter().collect()
        }
        Backend::Cpu | Backend::Metal => None,
    };
    if let Some(steps) = steps {
        compare_rows(&picks, &outcome.rows, &steps, "beside the mirror of its order", &mut probe.tally)?;
    } else if probe.queues.target.has_cpu_bits(probe.kernel) {
        let mut cpu = Counted::new(&Target::Cpu, Setting::plain());
        let theirs = launch_on(probe.world, &mut cpu, Planted::NONE, Setting::plain().fill, &picks)?;
        compare_rows(&picks, &outcome.rows, &theirs.rows, "beside the CPU", &mut probe.tally)?;
    }
    Ok(())
}

/// What `make` makes of each row, on all cores.
fn each_row<T: Send>(rows: &[usize], make: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.len().div_ceil(cores);
    if share < 2 {
        return rows.iter().map(|row| make(*row)).collect();
    }
    std::thread::scope(|scope| {
        let make = &make;
        let share = |rows: &'_ [usize]| rows.iter().map(|row| make(*row)).collect::<Vec<T>>();
        let parts: Vec<_> =
            rows.chunks(rows.len().div_ceil(cores)).map(|rows| scope.spawn(move || share(rows))).collect();
        let parts = parts.into_iter().map(|part| part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        parts.flatten().collect()
    })
}

fn judge_row(probe: &mut Probe<'_>, row: usize, words: &[u32], expected: Vec<Expected>) -> Result<(), Failure> {
    let got = probe.world.decode(row, words);
    if got.len() != expected.len() {
        let text = format!("row {row} has {} elements, and its definition {}", got.len(), expected.len());
        return Err(Failure::Red(text));
    }
    for (element, (got, expected)) in got.into_iter().zip(expected).enumerate() {
        judge(probe, row, element, got, expected)?;
    }
    Ok(())
}

fn judge(probe: &mut Probe<'_>, row: usize, element: usize, got: f64, expected: Expected) -> Result<(), Failure> {
    let Expected { value, span } = expected;
    if !span.is_finite() {
        return Err(Failure::Broken(format!("row {row}, element {element}: its bound is not finite")));
    }
    if !span.contains(value) {
        let text = format!(
            "row {row}, element {element}: its bound [{:e}, {:e}] does not hold its value {value:e}",
            span.low, span.high
        );
        return Err(Failure::Broken(text));
    }
    probe.tally.compared += 1;
    if !span.contains(got) {
        let text = format!(
            "row {row}, element {element} is {got:e}, and the definition gives {value:e}, bound [{:e}, {:e}]",
            span.low, span.high
        );
        return Err(Failure::Red(text));
    }
    let reach = (span.high - value).max(value - span.low);
    let share = if reach > 0.0 { (got - value).abs() / reach } else { 0.0 };
    if share > probe.tally.worst {
        probe.tally.worst = share;
        probe.tally.worst_at = format!("row {row}, element {element}: {got:e} for {value:e}");
    }
    Ok(())
}
