//! Gate 1: is every element inside the interval that the float64 definition allows?

use crate::probe::{Failure, Probe, Setting};
use tf_kernels::contract::Expected;

pub fn check(probe: &mut Probe<'_>) -> Result<(), Failure> {
    let picks = probe.all_rows();
    let outcome = probe.launch(Setting::plain(), &picks)?;
    for (row, words) in outcome.rows.iter().enumerate() {
        // A row may leave no output in this launch, as one that a ring has no more room for.
        if words.is_empty() {
            continue;
        }
        let (got, expected) = (probe.world.decode(row, words), probe.world.expected(row));
        if got.len() != expected.len() {
            let text = format!("row {row} has {} elements, and its definition {}", got.len(), expected.len());
            return Err(Failure::Red(text));
        }
        for (element, (got, expected)) in got.into_iter().zip(expected).enumerate() {
            judge(probe, row, element, got, expected)?;
        }
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
