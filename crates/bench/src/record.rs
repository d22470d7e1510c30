//! A measurement's record: commit, device, options and all samples, so that two runs can be compared as data.

use serde::{Deserialize, Serialize};

/// How a table is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Table,
    Json,
    Csv,
    Markdown,
}

impl Format {
    /// Reads `table`, `json`, `csv` or `md`.
    pub fn parse(name: &str) -> Option<Format> {
        match name {
            "table" => Some(Format::Table),
            "json" => Some(Format::Json),
            "csv" => Some(Format::Csv),
            "md" => Some(Format::Markdown),
            _ => None,
        }
    }
}

/// One measured figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub name: String,
    /// Of every sample.
    pub unit: String,
    /// In the order in which they were taken; none left out.
    pub samples: Vec<f64>,
}

impl Row {
    /// The middle sample; the mean of both middle ones. `None` without samples.
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => None,
            length if length % 2 == 1 => Some(sorted[middle]),
            _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
        }
    }

    fn least(&self) -> f64 {
        self.samples.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn most(&self) -> f64 {
        self.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub command: String,
    pub version: String,
    pub commit: String,
    pub model: String,
    pub device: String,
    /// Name and value, as the run resolved them.
    pub options: Vec<(String, String)>,
    pub rows: Vec<Row>,
}

impl Record {
    /// The record as people or programs read it; ends with a line end.
    pub fn print(&self, format: Format) -> String {
        let cells = |row: &Row| {
            let median = row.median().unwrap_or(f64::NAN);
            [
                row.name.clone(),
                show(median),
                show(row.least()),
                show(row.most()),
                row.unit.clone(),
                row.samples.len().to_string(),
            ]
        };
        let head = ["what", "median", "least", "most", "unit", "samples"].map(str::to_owned);
        match format {
            Format::Json => serde_json::to_string_pretty(self).map_or_else(|_| String::new(), |text| text + "\n"),
            Format::Csv => {
                let line =
                    |cells: [String; 6]| cells.map(|cell| format!("\"{}\"", cell.replace('"', "\"\""))).join(",");
                let rows = self.rows.iter().map(|row| line(cells(row)));
                std::iter::once(line(head)).chain(rows).map(|line| line + "\n").collect()
            }
            Format::Markdown => {
                let line = |cells: [String; 6]| format!("| {} |\n", cells.join(" | "));
                let rows: String = self.rows.iter().map(|row| line(cells(row))).collect();
                format!("{}| --- | ---: | ---: | ---: | --- | ---: |\n{rows}", line(head))
            }
            Format::Table => {
                let lines: Vec<[String; 6]> = std::iter::once(head).chain(self.rows.iter().map(cells)).collect();
                let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
                let widths: Vec<usize> = (0..6).map(width).collect();
                let mut text = format!("{} on {} ({})\n", self.model, self.device, self.commit);
                for line in &lines {
                    let mut cells = String::new();
                    for (column, cell) in line.iter().enumerate() {
                        cells += &match column {
                            0 | 4 => format!("{cell:<width$}  ", width = widths[column]),
                            _ => format!("{cell:>width$}  ", width = widths[column]),
                        };
                    }
                    text += cells.trim_end();
                    text.push('\n');
                }
                text
            }
        }
    }
}

fn show(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            command: "bench decode".into(),
            version: "1".into(),
            commit: "abc".into(),
            model: "m".into(),
            device: "d".into(),
            options: vec![("threads".into(), "2".into())],
            rows: vec![Row {
                name: "decode, 1 row".into(),
                unit: "tokens/s".into(),
                samples: vec![3.0, 1.0, 200.0, 2.0],
            }],
        }
    }

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        assert_eq!(record().rows[0].median(), Some(2.5));
        let odd = Row { samples: vec![5.0, 1.0, 4.0], ..record().rows[0].clone() };
        assert_eq!(odd.median(), Some(4.0));
        assert_eq!(Row { samples: vec![], ..odd }.median(), None);
    }

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let text = record().print(Format::Json);
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record());
    }

    #[test]
    fn every_form_shows_median_and_spread() {
        for (format, part) in [
            (Format::Table, "decode, 1 row    2.50  1.00   200  tokens/s        4"),
            (Format::Csv, "\"decode, 1 row\",\"2.50\",\"1.00\",\"200\",\"tokens/s\",\"4\""),
            (Format::Markdown, "| decode, 1 row | 2.50 | 1.00 | 200 | tokens/s | 4 |"),
        ] {
            let text = record().print(format);
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(Format::parse("yaml"), None);
    }
}
