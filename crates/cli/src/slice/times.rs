//! Where the time of a round of a slice goes: rows of a record, and their table.

use std::fmt::Write as _;

use tf_bench::{Record, Row};
use tf_device::gpu::rounds::RoundTimes;

/// The unit of what a kernel's launches take alone.
const ALONE: &str = "us a layer, alone";
/// The unit of what the round takes less without them.
const SAVED: &str = "us a layer, saved";

/// Adds the times of a round of `layers` layers to the record, in microseconds of a layer.
pub fn push(record: &mut Record, round: &str, times: &RoundTimes, layers: f64) {
    let mut row = |name: String, unit: &str, us: f64| {
        record.rows.push(Row { name, unit: unit.to_owned(), samples: vec![us / layers] });
    };
    row(format!("{round}, by kernel"), "us a layer", times.whole_us);
    for part in &times.parts {
        let name = format!("{round}: {}, {} blocks, {} times", part.kernel, part.blocks, part.launches);
        row(name.clone(), ALONE, part.alone_us);
        row(name, SAVED, part.saved_us);
    }
}

/// The tables of all rounds in the record, for a terminal; empty where there are none.
pub fn table(record: &Record) -> String {
    let mut text = String::new();
    for whole in record.rows.iter().filter(|row| row.name.ends_with(", by kernel")) {
        let round = whole.name.trim_end_matches(", by kernel");
        let part = |unit: &'static str| {
            let rows = record.rows.iter().filter(move |row| row.unit == unit);
            rows.filter_map(|row| Some((row.name.strip_prefix(round)?.strip_prefix(": ")?, row.median()?)))
        };
        let (alone, saved) = (|| part(ALONE), || part(SAVED));
        let sum = |of: &mut dyn Iterator<Item = (&str, f64)>| of.map(|(_, us)| us).sum::<f64>();
        let whole_us = whole.median().unwrap_or(0.0);
        _ = writeln!(text, "\n{:<58}{:>8}{:>8}", format!("{round}, us a layer"), "alone", "saved");
        for ((name, alone), (_, saved)) in alone().zip(saved()) {
            _ = writeln!(text, "{name:<58}{alone:>8.2}{saved:>8.2}");
        }
        let (alone, saved) = (sum(&mut alone()), sum(&mut saved()));
        _ = writeln!(text, "{:<58}{alone:>8.2}{saved:>8.2}", format!("sum; the round takes {whole_us:.2}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use tf_device::gpu::rounds::PartTimes;

    #[test]
    fn a_table_has_a_line_for_each_kernel_and_their_sums() {
        let part = |kernel: &str, alone_us: f64, saved_us: f64| PartTimes {
            kernel: kernel.to_owned(),
            blocks: 7,
            launches: 4,
            alone_us,
            saved_us,
        };
        let parts = vec![part("first", 8.0, 6.0), part("second", 4.0, 1.0)];
        let mut record = Record::default();
        push(&mut record, "decode, 1 rows", &RoundTimes { whole_us: 10.0, parts: parts.clone() }, 2.0);
        push(&mut record, "decode, 16 rows", &RoundTimes { whole_us: 30.0, parts }, 2.0);
        let table = table(&record);
        let lines: Vec<&str> = table.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(lines.len(), 8, "{table}");
        assert!(lines[0].starts_with("decode, 1 rows, us a layer"), "{table}");
        assert!(lines[1].starts_with("first, 7 blocks, 4 times") && lines[1].ends_with("    4.00    3.00"), "{table}");
        assert!(lines[3].starts_with("sum; the round takes 5.00") && lines[3].ends_with("    6.00    3.50"), "{table}");
        assert!(lines[7].starts_with("sum; the round takes 15.00"), "{table}");
        assert_eq!(super::table(&Record::default()), "");
    }
}
