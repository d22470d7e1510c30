//! A measurement's record: commit, device, options and all samples, so that two runs can be compared as data.

use serde::{Deserialize, Serialize};

use crate::load::Reply;

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

    /// The smallest sample that at least `percent` of all samples don't exceed. `None` without samples.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.max(1) - 1).copied()
    }

    pub(crate) fn least(&self) -> f64 {
        self.samples.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(crate) fn most(&self) -> f64 {
        self.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

/// Whether a prompt's rows were computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheState {
    Cold,
    Reused,
    /// The server didn't say.
    Unverified,
}

impl CacheState {
    /// What a reply shows of it; a failed one shows nothing.
    pub fn of(reply: &Reply) -> CacheState {
        match reply.cached_tokens {
            _ if reply.failure.is_some() => CacheState::Unverified,
            Some(0) => CacheState::Cold,
            Some(_) => CacheState::Reused,
            None => CacheState::Unverified,
        }
    }

    /// The word in tables and records.
    pub fn as_str(self) -> &'static str {
        match self {
            CacheState::Cold => "cold",
            CacheState::Reused => "reused",
            CacheState::Unverified => "unverified",
        }
    }
}

/// One reply. What the server didn't say is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplyRow {
    pub name: String,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub reply_tokens: Option<u64>,
    pub state: CacheState,
    pub token_sha: Option<String>,
    /// Equal to the reply that it belongs to; absent where there is none, or where either is unknown.
    pub equal: Option<bool>,
    pub first_token_ms: Option<f64>,
    pub failure: Option<String>,
}

impl ReplyRow {
    /// A row that is compared with nothing yet.
    pub fn new(name: &str, reply: &Reply) -> ReplyRow {
        ReplyRow {
            name: name.to_owned(),
            prompt_tokens: reply.prompt_tokens,
            cached_tokens: reply.cached_tokens,
            reply_tokens: reply.reply_tokens,
            state: CacheState::of(reply),
            token_sha: reply.token_sha.clone(),
            equal: None,
            first_token_ms: reply.first_token().map(|time| 1e3 * time.as_secs_f64()),
            failure: reply.failure.clone(),
        }
    }
}

/// How many cases of one kind came out as they must.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub equal: u64,
    pub unequal: u64,
    /// There was no whole reply.
    pub failed: u64,
    /// There was a reply, and the server didn't say what is needed to judge it.
    pub unmeasured: u64,
    /// The first of those that weren't equal.
    pub problems: Vec<String>,
}

/// Most problems that a check tells one by one.
const PROBLEMS_MAX: usize = 8;

impl Check {
    /// A check that has counted nothing, and so doesn't pass.
    pub fn new(name: &str) -> Check {
        Check { name: name.to_owned(), ..Check::default() }
    }

    /// Counts one case; `None` is unmeasured.
    pub fn count(&mut self, case: &str, is_right: Option<bool>, problem: impl Fn() -> String) {
        match is_right {
            Some(true) => self.equal += 1,
            Some(false) => {
                self.unequal += 1;
                self.tell(case, &problem());
            }
            None => {
                self.unmeasured += 1;
                self.tell(case, "the server doesn't say");
            }
        }
    }

    pub(crate) fn fail(&mut self, case: &str, failure: &str) {
        self.failed += 1;
        self.tell(case, failure);
    }

    fn tell(&mut self, case: &str, problem: &str) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(format!("{case}: {problem}"));
        }
    }

    /// Compares two replies to the same request by their tokens.
    pub fn compare(&mut self, case: &str, one: &Reply, other: &Reply) {
        if let Some(failure) = one.failure.as_ref().or(other.failure.as_ref()) {
            return self.fail(case, failure);
        }
        let shas = one.token_sha.as_ref().zip(other.token_sha.as_ref());
        let text = || shas.map_or_else(String::new, |(one, other)| format!("{one} and {other}"));
        self.count(case, shas.map(|(one, other)| one == other), text);
    }

    /// A reply whose tokens, count and times are all known.
    pub fn measured(&mut self, case: &str, reply: &Reply) {
        if let Some(failure) = &reply.failure {
            return self.fail(case, failure);
        }
        let is_known = reply.token_sha.is_some() && reply.reply_tokens.is_some() && !reply.progress.is_empty();
        self.count(case, is_known.then_some(true), String::new);
    }

    /// A reply with an end.
    pub fn answered(&mut self, case: &str, reply: &Reply) {
        match &reply.failure {
            Some(failure) => self.fail(case, failure),
            None => self.count(case, Some(true), String::new),
        }
    }

    /// A check that counted nothing has shown nothing.
    pub fn passes(&self) -> bool {
        self.equal > 0 && self.unequal + self.failed + self.unmeasured == 0
    }
}

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub command: String,
    pub version: String,
    pub commit: String,
    pub model: String,
    pub device: String,
    /// Name and value, as the run resolved them.
    pub options: Vec<(String, String)>,
    pub rows: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replies: Vec<ReplyRow>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
    /// Over all replies in order: equal in two runs of the same requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl Record {
    /// Whether every check passes; `None` where nothing was checked.
    pub fn passes(&self) -> Option<bool> {
        (!self.checks.is_empty()).then(|| self.checks.iter().all(Check::passes))
    }

    /// The record as people or programs read it; ends with a line end.
    pub fn print(&self, format: Format) -> String {
        if format == Format::Json {
            return serde_json::to_string_pretty(self).map_or_else(|_| String::new(), |text| text + "\n");
        }
        let mut text = String::new();
        if format == Format::Table {
            text += &format!("{} on {} ({})\n", self.model, self.device, self.commit);
        }
        // Where there are figures, single replies are in the JSON form alone.
        text += &match self.rows.is_empty() && !self.replies.is_empty() {
            true => table(format, &REPLY_HEAD, &[0, 4, 5, 6], self.replies.iter().map(reply_cells)),
            false => table(format, &ROW_HEAD, &[0, 4], self.rows.iter().map(row_cells)),
        };
        if format != Format::Csv {
            text += &self.verdict();
        }
        text
    }

    /// The checks, a line each, their problems, and the outcome; empty where nothing was checked.
    pub fn verdict(&self) -> String {
        let Some(passes) = self.passes() else { return String::new() };
        let mut text = String::from("\n");
        for check in &self.checks {
            text += &format!(
                "{}: {} equal, {} unequal, {} failed, {} unmeasured\n",
                check.name, check.equal, check.unequal, check.failed, check.unmeasured
            );
            text.extend(check.problems.iter().map(|problem| format!("  {problem}\n")));
        }
        let digest = self.digest.as_ref().map_or_else(String::new, |digest| format!(" {digest}"));
        text + &format!("{}{digest}\n", if passes { "PASS" } else { "FAIL" })
    }
}

const ROW_HEAD: [&str; 6] = ["what", "median", "least", "most", "unit", "samples"];
const REPLY_HEAD: [&str; 8] = ["reply", "prompt", "cached", "tokens", "state", "token_sha", "equal", "first token ms"];

fn row_cells(row: &Row) -> Vec<String> {
    let figure = |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), show);
    let is_known = !row.samples.is_empty();
    vec![
        row.name.clone(),
        figure(row.median()),
        figure(is_known.then(|| row.least())),
        figure(is_known.then(|| row.most())),
        row.unit.clone(),
        row.samples.len().to_string(),
    ]
}

fn reply_cells(reply: &ReplyRow) -> Vec<String> {
    let count = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), |value| value.to_string());
    vec![
        reply.name.clone(),
        count(reply.prompt_tokens),
        count(reply.cached_tokens),
        count(reply.reply_tokens),
        reply.state.as_str().to_owned(),
        reply.token_sha.clone().unwrap_or_else(|| "unknown".to_owned()),
        reply.equal.map_or("", |equal| if equal { "yes" } else { "no" }).to_owned(),
        reply.first_token_ms.map_or_else(|| "unknown".to_owned(), show),
    ]
}

/// Lines of cells under a head; the columns in `left` are text. Every line has as many cells as the head.
pub(crate) fn table(format: Format, head: &[&str], left: &[usize], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(|cell| (*cell).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let mut text = String::new();
    match format {
        Format::Csv => {
            for line in &lines {
                let cells: Vec<String> = line.iter().map(|cell| format!("\"{}\"", cell.replace('"', "\"\""))).collect();
                text += &(cells.join(",") + "\n");
            }
        }
        Format::Markdown => {
            for (index, line) in lines.iter().enumerate() {
                text += &format!("| {} |\n", line.join(" | "));
                if index == 0 {
                    let rule = |column| if left.contains(&column) { "---" } else { "---:" };
                    text += &format!("| {} |\n", (0..line.len()).map(rule).collect::<Vec<_>>().join(" | "));
                }
            }
        }
        Format::Table | Format::Json => {
            let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
            let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
            for line in &lines {
                let mut cells = String::new();
                for (column, cell) in line.iter().enumerate() {
                    cells += &match left.contains(&column) {
                        true => format!("{cell:<width$}  ", width = widths[column]),
                        false => format!("{cell:>width$}  ", width = widths[column]),
                    };
                }
                text += cells.trim_end();
                text.push('\n');
            }
        }
    }
    text
}

pub(crate) fn show(value: f64) -> String {
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
            ..Record::default()
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
            (Format::Table, "decode, 1 row    2.50   1.00   200  tokens/s        4"),
            (Format::Csv, "\"decode, 1 row\",\"2.50\",\"1.00\",\"200\",\"tokens/s\",\"4\""),
            (Format::Markdown, "| decode, 1 row | 2.50 | 1.00 | 200 | tokens/s | 4 |"),
        ] {
            let text = record().print(format);
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(Format::parse("yaml"), None);
    }

    #[test]
    fn percentiles_are_samples() {
        let row = Row { samples: (1..=10).map(f64::from).collect(), ..record().rows[0].clone() };
        for (percent, expected) in [(0.0, 1.0), (10.0, 1.0), (50.0, 5.0), (90.0, 9.0), (91.0, 10.0), (100.0, 10.0)] {
            assert_eq!(row.percentile(percent), Some(expected), "{percent}");
        }
        assert_eq!(Row { samples: vec![], ..row }.percentile(50.0), None);
    }

    fn reply(sha: Option<&str>, failure: Option<&str>) -> Reply {
        Reply {
            token_sha: sha.map(str::to_owned),
            failure: failure.map(str::to_owned),
            reply_tokens: Some(1),
            progress: vec![(std::time::Duration::ZERO, 1)],
            ..Reply::default()
        }
    }

    #[test]
    fn only_known_and_equal_replies_pass() {
        let good = reply(Some("a"), None);
        let cases = [
            (good.clone(), (1, 0, 0, 0)),
            (reply(Some("b"), None), (0, 1, 0, 0)),
            (reply(Some("a"), Some("broken")), (0, 0, 1, 0)),
            (reply(None, None), (0, 0, 0, 1)),
        ];
        for (other, counts) in cases {
            for (one, other) in [(&good, &other), (&other, &good)] {
                let mut check = Check::new("alone");
                check.compare("case", one, other);
                assert_eq!((check.equal, check.unequal, check.failed, check.unmeasured), counts, "{other:?}");
                let passes = counts == (1, 0, 0, 0);
                assert_eq!((check.passes(), check.problems.is_empty()), (passes, passes));
                let record = Record { checks: vec![check], digest: Some("d1".into()), ..record() };
                assert!(record.verdict().ends_with(if passes { "PASS d1\n" } else { "FAIL d1\n" }));
            }
        }
        let mut both_unknown = Check::new("alone");
        both_unknown.compare("case", &reply(None, None), &reply(None, None));
        assert!(!both_unknown.passes());
        assert!(!Check::new("nothing was counted").passes());
        assert_eq!(record().passes(), None);
    }

    #[test]
    fn what_is_unknown_is_neither_measured_nor_cold() {
        for (reply, is_measured) in [
            (reply(Some("a"), None), true),
            (reply(None, None), false),
            (reply(Some("a"), Some("broken")), false),
            (Reply { reply_tokens: None, ..reply(Some("a"), None) }, false),
            (Reply { progress: vec![], ..reply(Some("a"), None) }, false),
        ] {
            let mut check = Check::new("streams");
            check.measured("case", &reply);
            assert_eq!(check.passes(), is_measured, "{reply:?}");
        }
        let cached = |cached_tokens| Reply { cached_tokens, ..reply(Some("a"), None) };
        assert_eq!(CacheState::of(&cached(Some(0))), CacheState::Cold);
        assert_eq!(CacheState::of(&cached(Some(3))), CacheState::Reused);
        assert_eq!(CacheState::of(&cached(None)), CacheState::Unverified);
        let failed = Reply { failure: Some("broken".into()), ..cached(Some(0)) };
        assert_eq!(CacheState::of(&failed), CacheState::Unverified);
    }

    #[test]
    fn replies_are_a_table_of_their_own() {
        let replies = vec![ReplyRow::new("first", &reply(Some("ab"), None))];
        let record = Record { rows: vec![], replies, ..record() };
        let text = record.print(Format::Table);
        assert!(text.contains("first  unknown  unknown       1  unverified  ab"), "{text}");
    }
}
