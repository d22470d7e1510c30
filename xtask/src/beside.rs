//! Our times beside those of peers, from the records of one run: a section of the report, and a picture of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// The picture, beside the report.
const PICTURE: &str = "operators.svg";
/// In the order of the table, named as in the peers' record.
const OPS: [&str; 16] = [
    "wq_a+wkv",
    "wq_b",
    "wo_a",
    "wo_b",
    "shared w2",
    "index wq_b",
    "engram wkv",
    "main_proj",
    "router",
    "compressor",
    "head",
    "attention",
    "hyper",
    "index select",
    "experts",
    "layer",
];
/// What the other kernels' record calls them.
const FAMILIES: [(&str, &str); 2] = [("hyper/enter", "hyper"), ("index_score/select", "index select")];
/// The peer that keeps its rows' bits by taking one tile for every number of rows.
const ONE_TILE: &str = "one tile for all rows";
/// In the name of a peer that multiplies inputs rounded to FP8, with fewer scales than the release has.
const OTHER_PRODUCTS: &str = "FP8, ";
/// Operators of a layer whose order has a price, as the record of costs calls them.
const LAYER: [&str; 7] = ["wq_a+wkv", "wq_b", "attention", "wo_a", "wo_b", "router", "experts"];
const BYTES_A_MICROSECOND: f64 = 4.3e6;
/// Rows that the picture shows.
const SHOWN: [(u64, &str); 3] = [(1, "#9ecae1"), (16, "#4292c6"), (128, "#08519c")];

type Key = (String, u64);

#[derive(Clone, Debug, PartialEq)]
struct Ours {
    us: f64,
    floor: f64,
}

#[derive(Clone, Debug, PartialEq)]
struct Peer {
    name: String,
    us: f64,
    invariant: String,
}

/// What the records of a folder hold.
#[derive(Debug, Default)]
struct Figures {
    ours: BTreeMap<Key, Ours>,
    peers: BTreeMap<Key, Vec<Peer>>,
    /// Microseconds in the declared order and in the quickest one.
    costs: BTreeMap<Key, (f64, f64)>,
}

/// The section, which has the picture beside it in `folder`; nothing where the records hold nothing to set side by side.
///
/// # Errors
/// A picture that can't be written.
pub fn section(folder: &Path) -> Result<Option<String>> {
    let figures = Figures::read(folder);
    let mut text = String::new();
    if let Some(picture) = figures.picture() {
        let path = folder.join(PICTURE);
        fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(text, "\n![part of the floor by operator]({PICTURE})")?;
    }
    let table = figures.table();
    if !table.is_empty() {
        text += "\n## Beside peers\n\nBoth of this run. The floor: packed bytes over 4.3 TB/s, or operations over 790 TFLOP/s. \
                 Ours keeps every row's bits whatever its\ncompany; of a peer's first row it is said whether its bits are the \
                 same alone and together. The quickest is often cuBLASLt on\ninputs rounded to FP8 with one scale a tensor: as \
                 many bytes, other products, twice the arithmetic peak; where it is, the quickest\nof the products that the \
                 release asks for (bf16 inputs, the weights' own values) stands beside it. A layer of peers is the quickest\n\
                 of each operator with nothing between them: no norm, rotation, rounding, store or index.\n\n";
        text += &table;
    }
    text += &figures.prices();
    Ok((!text.is_empty()).then_some(text))
}

/// The objects of a file with one a line; a missing file has none.
fn lines(folder: &Path, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn word(record: &Value, field: &str) -> Option<String> {
    record[field].as_str().map(str::to_owned)
}

/// The value in the middle of a row's samples.
fn median(row: &Value) -> Option<f64> {
    let mut samples: Vec<f64> = row["samples"].as_array()?.iter().filter_map(Value::as_f64).collect();
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied()
}

impl Figures {
    fn read(folder: &Path) -> Figures {
        let mut figures = Figures::default();
        for record in lines(folder, "linears-time.jsonl") {
            figures.timed(&record);
            figures.cost(&record);
        }
        for record in lines(folder, "families.jsonl") {
            figures.family(&record);
        }
        for record in lines(folder, "peers.jsonl") {
            figures.peer(&record);
        }
        // Where both have a figure, the second's stands: the first is of a longer context.
        for name in ["slice-long.json", "slice.json"] {
            let slice = fs::read_to_string(folder.join(name)).unwrap_or_default();
            figures.slice(&serde_json::from_str(&slice).unwrap_or_default());
        }
        figures
    }

    fn timed(&mut self, record: &Value) {
        let (Some(op), Some(rows)) = (word(record, "op"), record["rows"].as_u64()) else { return };
        let (Some(us), Some(floor)) = (record["us_median"].as_f64(), record["floor_us"].as_f64()) else { return };
        // The experts' name says how many were met.
        let op = op.split(" (").next().unwrap_or_default().to_owned();
        self.ours.insert((op, rows), Ours { us, floor });
    }

    fn cost(&mut self, record: &Value) {
        let (Some(op), Some(rows)) = (word(record, "cost_of"), record["rows"].as_u64()) else { return };
        let (declared, quickest) = (record["declared_us"].as_f64(), record["quickest_us"].as_f64());
        if let (Some(declared), Some(quickest)) = (declared, quickest) {
            self.costs.insert((op, rows), (declared, quickest));
        }
    }

    fn family(&mut self, record: &Value) {
        let (Some(family), Some(rows), Some(us)) =
            (word(record, "family"), record["rows"].as_u64(), record["us"].as_f64())
        else {
            return;
        };
        let named = FAMILIES.iter().find(|(name, _)| *name == family);
        if let Some((_, op)) = named.filter(|_| record["sizes"] == "release") {
            let floor = record["moved_bytes"].as_f64().unwrap_or_default() / BYTES_A_MICROSECOND;
            self.ours.insert(((*op).to_owned(), rows), Ours { us, floor });
        }
    }

    fn peer(&mut self, record: &Value) {
        let (Some(op), Some(rows), Some(us)) = (word(record, "op"), record["rows"].as_u64(), record["us"].as_f64())
        else {
            return;
        };
        let (name, invariant) = (word(record, "peer"), word(record, "row_invariant"));
        let peer = Peer { name: name.unwrap_or_default(), us, invariant: invariant.unwrap_or_default() };
        self.peers.entry((op, rows)).or_default().push(peer);
    }

    fn slice(&mut self, record: &Value) {
        let rows = record["rows"].as_array().cloned().unwrap_or_default();
        for row in &rows {
            let name = row["name"].as_str().unwrap_or_default();
            let Some(kind) = name.strip_suffix(": a layer") else { continue };
            let decoded = kind.strip_prefix("decode, ").and_then(|rest| rest.strip_suffix(" rows"));
            let count = decoded.or_else(|| kind.strip_prefix("prompt of ")).and_then(|count| count.parse().ok());
            let (Some(count), Some(us)) = (count, median(row)) else { continue };
            let has_fraction = |other: &&Value| {
                let named = other["name"]
                    .as_str()
                    .is_some_and(|name| name.strip_suffix(", bytes alone").unwrap_or(name) == kind);
                named && other["unit"] == "of the floor"
            };
            let fraction = rows.iter().find(has_fraction).and_then(median).unwrap_or_default();
            self.ours.insert(("layer".to_owned(), count), Ours { us, floor: us * fraction });
        }
    }

    /// Ours and the quickest peer of an operator and number of rows.
    fn pair(&self, op: &str, rows: u64) -> Option<(&Ours, &Peer)> {
        Some((self.ours.get(&(op.to_owned(), rows))?, self.quickest(op, rows, |_| true)?))
    }

    fn quickest(&self, op: &str, rows: u64, wanted: impl Fn(&str) -> bool) -> Option<&Peer> {
        let peers = self.peers.get(&(op.to_owned(), rows))?.iter();
        peers.filter(|peer| wanted(&peer.name)).min_by(|a, b| a.us.total_cmp(&b.us))
    }

    /// Numbers of rows for which an operator has both.
    fn rows_of(&self, op: &str) -> Vec<u64> {
        let rows = self.ours.keys().filter(|(name, _)| name == op).map(|(_, rows)| *rows);
        rows.filter(|rows| self.pair(op, *rows).is_some()).collect()
    }

    fn table(&self) -> String {
        let mut text = String::new();
        for op in OPS {
            for rows in self.rows_of(op) {
                let Some((ours, best)) = self.pair(op, rows) else { continue };
                let of = |peer: &Peer| {
                    format!("{} | {:.1} | {:.2} | {}", peer.name, peer.us, peer.us / ours.us, peer.invariant)
                };
                let same = self.quickest(op, rows, |name| !name.contains(OTHER_PRODUCTS)).filter(|peer| *peer != best);
                let same = same.map_or_else(|| " | | |".to_owned(), of);
                let one_tile = self.quickest(op, rows, |name| name.contains(ONE_TILE));
                let one_tile = one_tile.map(|peer| format!("{:.1}", peer.us)).unwrap_or_default();
                text += &format!(
                    "| {op} | {rows} | {:.1} | {:.1} | {:.2} | {} | {same} | {one_tile} |\n",
                    ours.us,
                    ours.floor,
                    ours.floor / ours.us,
                    of(best),
                );
            }
        }
        if text.is_empty() {
            return text;
        }
        let head = "| op | rows | ours, us | floor, us | of floor | quickest peer | us | / ours | alone = together \
                    | quickest of these products | us | / ours | alone = together | Triton, one tile for all rows, us |\n\
                    | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
        format!("{head}{text}")
    }

    /// What one order for every number of rows costs a layer.
    fn prices(&self) -> String {
        let mut text = String::new();
        let mut counts: Vec<u64> = self.costs.keys().map(|(_, rows)| *rows).collect();
        counts.sort_unstable();
        counts.dedup();
        for rows in counts {
            let found = LAYER.iter().filter_map(|op| self.costs.get(&((*op).to_owned(), rows)));
            let (count, declared, quickest) = found
                .fold((0, 0.0, 0.0), |(count, a, b), (declared, quickest)| (count + 1, a + declared, b + quickest));
            let price = declared - quickest;
            let layer = self.ours.get(&("layer".to_owned(), rows)).map(|layer| {
                let cost = 100.0 * price / (layer.us - price);
                format!("{:.1} | {cost:.1} %", layer.us)
            });
            let layer = layer.unwrap_or_else(|| " | ".to_owned());
            let share = 100.0 * price / quickest;
            text += &format!("| {rows} | {count} | {declared:.1} | {quickest:.1} | {share:.1} % | {layer} |\n");
        }
        if text.is_empty() {
            return text;
        }
        let names = LAYER.join(", ");
        format!(
            "\n## What one order for every number of rows costs a layer\n\nSums over {names}\n(those that were asked), in the \
             declared order and each in the quickest one for that number of rows; attention's\nquickest leaves out that its \
             parts would have to be put together. A layer: of the slice of this run; its cost is the\ndifference by the \
             layer's time without it.\n\n| rows | operators | declared, us | quickest, us | of these | a layer, us | of a \
             layer |\n| --- | --- | --- | --- | --- | --- | --- |\n{text}"
        )
    }

    /// Bars of ours and ticks of the quickest peer's, as parts of the floor.
    fn picture(&self) -> Option<String> {
        let (mut bars, mut y) = (String::new(), TOP + 8.0);
        for op in OPS {
            let ours = |rows: u64| self.ours.get(&(op.to_owned(), rows));
            let shown: Vec<_> =
                SHOWN.iter().filter_map(|(rows, colour)| Some((*rows, *colour, ours(*rows)?))).collect();
            let middle = y + BAR * shown.len() as f64 / 2.0 + 4.0;
            for (rows, colour, ours) in &shown {
                let peer = self.quickest(op, *rows, |_| true).map(|peer| ours.floor / peer.us);
                bars += &bar(y, colour, ours.floor / ours.us, peer);
                y += BAR;
            }
            if !shown.is_empty() {
                bars += &format!("<text x='{}' y='{middle}' text-anchor='end'>{op}</text>\n", LEFT - 8.0);
                y += 8.0;
            }
        }
        if bars.is_empty() {
            return None;
        }
        let mut axes = String::new();
        for quarter in 0..=4 {
            let value = f64::from(quarter) / 4.0;
            let x = LEFT + value / MOST * WIDTH;
            axes += &format!("<line x1='{x:.1}' y1='{TOP}' x2='{x:.1}' y2='{y}' stroke='#ddd'/>\n");
            axes += &format!("<text class='n' x='{x:.1}' y='{}' text-anchor='middle'>{value:.2}</text>\n", TOP - 4.0);
        }
        for (index, (rows, colour)) in SHOWN.iter().enumerate() {
            let (x, plural) = (LEFT + 90.0 * index as f64, if *rows == 1 { "" } else { "s" });
            axes += &format!("<rect x='{x}' y='10' width='12' height='12' fill='{colour}'/>\n");
            axes += &format!("<text x='{}' y='20'>{rows} row{plural}</text>\n", x + 17.0);
        }
        axes += &format!("<rect x='{}' y='9' width='2.5' height='14' fill='{TICK}'/>\n", LEFT + 285.0);
        axes += &format!("<text x='{}' y='20'>quickest peer, part of the same floor</text>\n", LEFT + 294.0);
        Some(format!(
            "<svg xmlns='http://www.w3.org/2000/svg' width='740' height='{0}' viewBox='0 0 740 {0}'>\n\
             <style>text {{ font: 12px sans-serif }} text.n {{ font-size: 10px; fill: #555 }}</style>\n\
             <rect width='740' height='{0}' fill='white'/>\n{axes}{bars}</svg>\n",
            y + 8.0
        ))
    }
}

/// Of the picture: where bars begin, how long the longest is, how high each; the part of the floor at its end.
const LEFT: f64 = 110.0;
const WIDTH: f64 = 560.0;
const TOP: f64 = 48.0;
const BAR: f64 = 11.0;
const MOST: f64 = 1.1;
const TICK: &str = "#d94801";

fn bar(y: f64, colour: &str, ours: f64, peer: Option<f64>) -> String {
    let length = |fraction: f64| fraction.clamp(0.0, MOST) * WIDTH / MOST;
    let (long, high) = (length(ours), BAR - 2.0);
    let mut text = format!("<rect x='{LEFT}' y='{y}' width='{long:.1}' height='{high}' fill='{colour}'/>\n");
    if let Some(peer) = peer {
        let (x, y) = (LEFT + length(peer) - 1.0, y - 1.0);
        text += &format!("<rect x='{x:.1}' y='{y}' width='2.5' height='{BAR}' fill='{TICK}'/>\n");
    }
    text += &format!("<text class='n' x='{}' y='{}'>{ours:.2}</text>\n", LEFT + WIDTH + 8.0, y + 8.0);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str, files: &[(&str, &str)]) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("tensorfold-beside-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        folder
    }

    const TIMES: &str = r#"{"device":"one"}
{"op":"wq_b","rows":1,"us_median":12.5,"floor_us":10.0}
{"op":"experts (6 distinct)","rows":1,"us_median":50.0,"floor_us":35.0}
{"op":"wo_b","rows":1,"us_median":1.0,"floor_us":1.0}
{"cost_of":"wq_b","rows":1,"declared_us":12.5,"quickest_us":12.0}
{"cost_of":"experts","rows":1,"declared_us":50.0,"quickest_us":49.5}
{"cost_of":"index wq_b","rows":1,"declared_us":50.0,"quickest_us":1.0}"#;
    const PEERS: &str = r#"{"machine":"one"}
{"op":"wq_b","peer":"cuBLAS bf16","rows":1,"us":25.0,"row_invariant":"no"}
{"op":"wq_b","peer":"Triton bf16, one tile for all rows","rows":1,"us":40.0,"row_invariant":"yes"}
{"op":"wq_b","peer":"cuBLASLt FP8, one scale","rows":1,"us":10.0,"row_invariant":"yes"}
{"op":"wq_b","peer":"refused","rows":1,"unsupported":"by this build"}
{"op":"experts","peer":"Triton","rows":1,"us":100.0,"row_invariant":"yes"}
{"op":"hyper","peer":"compiled","rows":6,"us":20.0,"row_invariant":"no"}
{"op":"layer","peer":"the quickest of each","rows":1,"us":300.0,"row_invariant":"-"}
{"op":"wq_b","peer":"cut off","ro"#;
    const FAMILIES_TEXT: &str = r#"{"family":"hyper/enter","sizes":"release","rows":6,"moved_bytes":4300000,"us":8.0}
{"family":"hyper/enter","sizes":"tiny","rows":6,"moved_bytes":43,"us":1.0}"#;
    const SLICE: &str = r#"{"rows":[{"name":"decode, 1 rows: a layer","unit":"us","samples":[99.0,101.0,100.0]},
        {"name":"decode, 1 rows","unit":"of the floor","samples":[0.5]}]}"#;

    #[test]
    fn what_both_have_is_set_side_by_side_with_the_quickest_peer() {
        let files = [
            ("linears-time.jsonl", TIMES),
            ("peers.jsonl", PEERS),
            ("families.jsonl", FAMILIES_TEXT),
            ("slice.json", SLICE),
            ("slice-long.json", r#"{"rows":[{"name":"decode, 1 rows: a layer","unit":"us","samples":[999.0]}]}"#),
        ];
        let folder = folder("both", &files);
        let text = section(&folder).unwrap().unwrap();
        let rows: Vec<&str> = text.lines().filter(|line| line.contains(" | ") && !line.contains("us |")).collect();
        assert_eq!(
            rows[1],
            "| wq_b | 1 | 12.5 | 10.0 | 0.80 | cuBLASLt FP8, one scale | 10.0 | 0.80 | yes | cuBLAS bf16 | 25.0 | 2.00 | no | 40.0 |"
        );
        assert_eq!(rows[2], "| hyper | 6 | 8.0 | 1.0 | 0.12 | compiled | 20.0 | 2.50 | no |  | | | |  |");
        assert_eq!(rows[3], "| experts | 1 | 50.0 | 35.0 | 0.70 | Triton | 100.0 | 2.00 | yes |  | | | |  |");
        assert_eq!(
            rows[4],
            "| layer | 1 | 100.0 | 50.0 | 0.50 | the quickest of each | 300.0 | 3.00 | - |  | | | |  |"
        );
        assert!(text.contains("| 1 | 2 | 62.5 | 61.5 | 1.6 % | 100.0 | 1.0 % |"), "{text}");
        let picture = fs::read_to_string(folder.join(PICTURE)).unwrap();
        assert_eq!(picture.matches(TICK).count(), 1 + 3, "the legend's and one for each peer at 1 row");
        assert!(picture.contains(">0.80</text>") && picture.ends_with("</svg>\n"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn records_that_are_missing_or_hold_something_else_give_no_section() {
        let nothing = folder("nothing", &[]);
        assert_eq!(section(&nothing).unwrap(), None);
        let else_where = folder("else", &[("peers.jsonl", "[]\n7\n{\"op\":3}"), ("slice.json", "{\"rows\":{}}")]);
        assert_eq!(section(&else_where).unwrap(), None);
        let alone = folder("alone", &[("peers.jsonl", PEERS)]);
        assert_eq!(section(&alone).unwrap(), None, "nothing of ours");
        assert!(!alone.join(PICTURE).exists());
        fs::remove_file(alone.join("peers.jsonl")).unwrap();
        fs::write(alone.join("slice.json"), SLICE).unwrap();
        let ours = section(&alone).unwrap().unwrap();
        assert!(ours.contains(PICTURE) && !ours.contains("Beside peers"), "{ours}");
        for folder in [nothing, else_where, alone] {
            fs::remove_dir_all(folder).unwrap();
        }
    }
}
