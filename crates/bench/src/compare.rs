//! Two records side by side, with their spread.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::record::{Format, Record, Row, show, table};

/// Why a file can't be compared.
#[derive(Debug, Error)]
pub enum CompareError {
    #[error("{path} can't be read: {cause}")]
    Read { path: PathBuf, cause: std::io::Error },
    #[error("{path} is no record of bench. Write one with --output")]
    NoRecord { path: PathBuf, source: serde_json::Error },
    #[error("{one} and {other} have no figure in common: they are of {one_command:?} and {other_command:?}")]
    NothingInCommon { one: PathBuf, other: PathBuf, one_command: String, other_command: String },
}

fn read(path: &Path) -> Result<Record, CompareError> {
    let text = std::fs::read(path).map_err(|cause| CompareError::Read { path: path.to_owned(), cause })?;
    serde_json::from_slice(&text).map_err(|source| CompareError::NoRecord { path: path.to_owned(), source })
}

/// Reads two records and prints them side by side.
///
/// # Errors
/// A file that is no record, or two records without a common figure.
pub fn compare(one: &Path, other: &Path, format: Format) -> Result<String, CompareError> {
    let (first, second) = (read(one)?, read(other)?);
    let pairs = pairs(&first, &second);
    if pairs.is_empty() {
        return Err(CompareError::NothingInCommon {
            one: one.to_owned(),
            other: other.to_owned(),
            one_command: first.command,
            other_command: second.command,
        });
    }
    Ok(print(&first, &second, &pairs, format))
}

/// Figures that both have, by name and unit.
fn pairs<'a>(first: &'a Record, second: &'a Record) -> Vec<(&'a Row, &'a Row)> {
    let twin = |row: &Row| second.rows.iter().find(|other| other.name == row.name && other.unit == row.unit);
    first.rows.iter().filter_map(|row| Some((row, twin(row)?))).collect()
}

fn print(first: &Record, second: &Record, pairs: &[(&Row, &Row)], format: Format) -> String {
    let figure = |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), show);
    let spread = |row: &Row| match row.samples.is_empty() {
        true => "unknown".to_owned(),
        false => format!("{} to {}", show(row.least()), show(row.most())),
    };
    let rows = pairs.iter().map(|(one, other)| {
        let ratio = one.median().zip(other.median()).filter(|(one, _)| *one != 0.0).map(|(one, other)| other / one);
        let is_known = !one.samples.is_empty() && !other.samples.is_empty();
        // Spreads that meet say nothing about which is faster.
        let are_apart = is_known.then(|| one.most() < other.least() || other.most() < one.least());
        vec![
            one.name.clone(),
            one.unit.clone(),
            figure(one.median()),
            spread(one),
            figure(other.median()),
            spread(other),
            figure(ratio),
            are_apart.map_or("unknown", |apart| if apart { "yes" } else { "no" }).to_owned(),
        ]
    });
    let head = ["what", "unit", "A", "A spread", "B", "B spread", "B / A", "spreads apart"];
    let mut text = match format {
        Format::Json => {
            let rows: Vec<serde_json::Map<String, serde_json::Value>> = rows
                .map(|row| head.iter().map(|name| (*name).to_owned()).zip(row.into_iter().map(Into::into)).collect())
                .collect();
            return serde_json::to_string_pretty(&rows).map_or_else(|_| String::new(), |text| text + "\n");
        }
        other => table(other, &head, &[0, 1, 7], rows),
    };
    if format == Format::Csv {
        return text;
    }
    let facts = [
        ("command", &first.command, &second.command),
        ("commit", &first.commit, &second.commit),
        ("model", &first.model, &second.model),
        ("device", &first.device, &second.device),
    ];
    text.push('\n');
    for (name, one, other) in facts.into_iter().filter(|(_, one, other)| one != other) {
        text += &format!("{name}: A {one}, B {other}\n");
    }
    let value = |record: &Record, name: &str| {
        let found = record.options.iter().find(|(other, _)| other == name);
        found.map_or_else(|| "not set".to_owned(), |(_, value)| value.clone())
    };
    let mut names: Vec<&String> = first.options.iter().chain(&second.options).map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    for name in names {
        let (one, other) = (value(first, name), value(second, name));
        if one != other {
            text += &format!("{name}: A {one}, B {other}\n");
        }
    }
    if let (Some(one), Some(other)) = (&first.digest, &second.digest) {
        text += &format!("replies: A {one}, B {other}, {}\n", if one == other { "equal" } else { "not equal" });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(samples: &[f64], commit: &str) -> Record {
        let row = Row { name: "decode".into(), unit: "tokens/s".into(), samples: samples.to_vec() };
        Record { commit: commit.into(), rows: vec![row], digest: Some("d".into()), ..Record::default() }
    }

    #[test]
    fn a_difference_is_told_with_its_spread() {
        let cases: [(&[f64], &[f64], &str, &str); 4] = [
            (&[1.0, 2.0, 3.0], &[4.0, 5.0], "2.25", "yes"),
            (&[1.0, 2.0, 3.0], &[3.0, 5.0], "2.00", "no"),
            (&[], &[1.0], "unknown", "unknown"),
            (&[0.0], &[1.0], "unknown", "yes"),
        ];
        for (one, other, ratio, apart) in cases {
            let (one, other) = (record(one, "a"), record(other, "b"));
            let text = print(&one, &other, &pairs(&one, &other), Format::Csv);
            assert!(text.ends_with(&format!("\"{ratio}\",\"{apart}\"\n")), "{text}");
        }
    }

    #[test]
    fn what_differs_besides_is_told() {
        let (one, mut other) = (record(&[1.0], "a"), record(&[1.0], "b"));
        other.options.push(("threads".into(), "2".into()));
        other.digest = Some("e".into());
        let text = print(&one, &other, &pairs(&one, &other), Format::Table);
        for line in ["commit: A a, B b\n", "threads: A not set, B 2\n", "replies: A d, B e, not equal\n"] {
            assert!(text.contains(line), "{text}");
        }
        assert!(!text.contains("model:"));
    }

    #[test]
    fn other_units_and_other_figures_have_no_twin() {
        let one = record(&[1.0], "a");
        let mut other = record(&[1.0], "a");
        other.rows[0].unit = "ms".into();
        assert!(pairs(&one, &other).is_empty());
    }
}
