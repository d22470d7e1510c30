//! Teacher-forced checks: each part of a model gets the recorded input of one sublayer and must return its recorded output.
//!
//! A random network amplifies a flipped rounding until whole runs no longer compare; one sublayer does not. The parts
//! are closures over rows `[positions, ...]`, so any model that can run a part alone can be checked.

use super::safetensors::File;
use super::{directory, golden, index_rows, sequence};

/// A recorded run of the release numerics, and where its layers are.
pub struct Trace {
    file: File,
    pub ids: Vec<u32>,
    layers: usize,
    columns: usize,
    streams: usize,
    engram_layers: Vec<usize>,
    kv_sources: Vec<usize>,
    index_sources: Vec<usize>,
    candidate_source: usize,
    ratios: Vec<usize>,
}

/// What the attention of one layer reads.
pub struct AttentionInputs {
    pub layer: usize,
    /// `[positions, hidden_size]`.
    pub x: Vec<f64>,
    /// `[entries, head_dim]`: the compressed entries of the layer's source; empty without a long-range cache.
    pub entries: Vec<f64>,
    /// For each position the entries it reads, ascending.
    pub selections: Vec<Vec<u32>>,
}

/// What the compressor and the index keys of a source make of its rows.
pub struct Compressed {
    pub latent: Vec<f64>,
    pub entries: Vec<f64>,
    pub index_keys: Vec<f64>,
}

/// What an index source reads.
pub struct SelectionInputs {
    pub layer: usize,
    pub x: Vec<f64>,
    /// `[entries, index_head_dim]`.
    pub keys: Vec<f64>,
    /// For each position which entries may be chosen; `None` when all visible ones may.
    pub candidates: Option<Vec<Vec<bool>>>,
}

/// What an index source makes of it, for each position.
pub struct Selected {
    /// Over the visible entries; negative infinity outside the candidates.
    pub scores: Vec<Vec<f64>>,
    /// How far a recorded score may lie from an unrounded one: the release rounds them to bfloat16.
    pub bounds: Vec<Vec<f64>>,
    pub selections: Vec<Vec<u32>>,
    /// Only from the source of candidates.
    pub candidates: Option<Vec<Vec<bool>>>,
}

/// What the mixes of a block's two halves read.
pub struct MixInputs {
    pub layer: usize,
    pub streams: Vec<f64>,
    /// From the sublayer before; `None` in front of the first layer.
    pub mix: Option<Vec<f64>>,
    pub attn_out: Vec<f64>,
    pub ffn_out: Vec<f64>,
}

/// What they make.
pub struct Mixed {
    pub attn_in: Vec<f64>,
    pub ffn_in: Vec<f64>,
    pub streams: Vec<f64>,
    pub mix: Vec<f64>,
}

/// How a part's rows compare with the recorded ones.
#[derive(Debug)]
pub struct Tally {
    pub name: String,
    pub rows: usize,
    /// Rows whose every value is equal.
    pub equal: usize,
    /// The largest difference, in bfloat16 steps of the recorded row's largest value.
    pub worst_steps: f64,
    worst: String,
}

impl Tally {
    fn new(name: String, found: &[f64], expected: &[f64], columns: usize) -> Tally {
        assert_eq!(found.len(), expected.len(), "{name}: number of values");
        assert!(!found.is_empty(), "{name}: nothing to compare");
        let mut tally = Tally { name, rows: 0, equal: 0, worst_steps: 0.0, worst: "none differs".to_string() };
        for (found, expected) in found.chunks(columns).zip(expected.chunks(columns)) {
            tally.rows += 1;
            tally.equal += usize::from(found == expected);
            let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
            let step = 2f64.powi(largest.max(1e-30).log2().floor() as i32 - 7);
            for (column, (found, expected)) in found.iter().zip(expected).enumerate() {
                let steps = (found - expected).abs() / step;
                // NaN stays the worst and fails every bound.
                if steps.is_nan() || steps > tally.worst_steps {
                    tally.worst_steps = steps;
                    tally.worst = format!("row {} column {column}: {found} instead of {expected}", tally.rows - 1);
                }
            }
        }
        println!(
            "{}: {} of {} rows equal, worst {:.2} steps, {}",
            tally.name, tally.equal, tally.rows, tally.worst_steps, tally.worst
        );
        tally
    }

    /// Fails unless at least `equal` rows are equal and no value is more than `steps` away.
    pub fn require(&self, equal: usize, steps: f64) {
        assert!(
            self.equal >= equal.min(self.rows),
            "{}: {} of {} rows equal, {equal} wanted; {}",
            self.name,
            self.equal,
            self.rows,
            self.worst
        );
        assert!(
            self.worst_steps <= steps,
            "{}: {:.2} steps, {steps} allowed; {}",
            self.name,
            self.worst_steps,
            self.worst
        );
    }
}

impl Trace {
    pub fn open() -> Trace {
        let config = super::config();
        let text = &config["text_config"];
        let list = |key: &str| -> Vec<usize> { super::numbers(&text[key]).into_iter().map(|id| id as usize).collect() };
        let count =
            |key: &str| text[key].as_u64().unwrap_or_else(|| panic!("{}: {key}", directory().display())) as usize;
        Trace {
            file: golden("trace_official_len64"),
            ids: sequence("len64"),
            layers: count("num_hidden_layers"),
            columns: count("hidden_size"),
            streams: count("hc_mult") * count("hidden_size"),
            engram_layers: list("engram_layer_ids"),
            kv_sources: list("kv_source_layer_ids"),
            index_sources: list("index_source_layer_ids"),
            candidate_source: count("candidate_source_layer_id"),
            ratios: list("compress_ratios"),
        }
    }

    /// A recorded tensor of a layer.
    pub fn layer(&self, layer: usize, part: &str) -> Vec<f64> {
        self.file.floats(&format!("L{layer:02}.{part}"))
    }

    /// A recorded tensor that belongs to no layer.
    pub fn values(&self, name: &str) -> Vec<f64> {
        self.file.floats(name)
    }

    fn lists(&self, layer: usize, part: &str) -> Vec<Vec<u32>> {
        index_rows(&self.file, &format!("L{layer:02}.{part}"))
    }

    fn source(&self, sources: &[usize], layer: usize) -> Option<usize> {
        sources.iter().copied().filter(|&source| source <= layer && self.ratios[layer] > 0).max()
    }

    /// The streams that enter a layer's block, after its n-gram memory.
    pub fn stream_in(&self, layer: usize) -> Vec<f64> {
        if layer == 0 || self.engram_layers.contains(&layer) {
            self.layer(layer, "stream_in")
        } else {
            self.layer(layer - 1, "stream")
        }
    }

    fn candidates(&self) -> Vec<Vec<bool>> {
        let stored = self.file.get(&format!("L{:02}.candidates", self.candidate_source));
        stored.integers().chunks(stored.shape[1]).map(|row| row.iter().map(|&bit| bit == 1).collect()).collect()
    }

    /// The attention of every layer, with recorded entries and selections.
    pub fn attention(&self, part: impl Fn(&AttentionInputs) -> Vec<f64>) -> Vec<Tally> {
        let of_layer = |layer| {
            let entries = self.source(&self.kv_sources, layer).map(|source| self.layer(source, "compressed_kv"));
            let selections = self.source(&self.index_sources, layer).map(|source| self.lists(source, "topk"));
            let inputs = AttentionInputs {
                layer,
                x: self.layer(layer, "attn_in"),
                entries: entries.unwrap_or_default(),
                selections: selections.unwrap_or_else(|| vec![Vec::new(); self.ids.len()]),
            };
            let expected = self.layer(layer, "attn_out");
            Tally::new(format!("L{layer:02}.attn_out"), &part(&inputs), &expected, self.columns)
        };
        (0..self.layers).map(of_layer).collect()
    }

    /// The mixture of experts of every layer; the part returns its rows and each row's experts, ascending.
    pub fn moe(&self, part: impl Fn(usize, &[f64]) -> (Vec<f64>, Vec<Vec<u32>>)) -> Vec<Tally> {
        let of_layer = |layer| {
            let (found, experts) = part(layer, &self.layer(layer, "ffn_in"));
            super::check_lists(&format!("L{layer:02}.moe_idx"), &experts, &self.lists(layer, "moe_idx"));
            Tally::new(format!("L{layer:02}.ffn_out"), &found, &self.layer(layer, "ffn_out"), self.columns)
        };
        (0..self.layers).map(of_layer).collect()
    }

    /// The compressor and the index keys of every source: three tallies for each.
    pub fn compressor(&self, part: impl Fn(usize, &[f64]) -> Compressed) -> Vec<Tally> {
        let of_layer = |&layer: &usize| {
            let found = part(layer, &self.layer(layer, "attn_in"));
            let parts = [("latent", found.latent), ("compressed_kv", found.entries), ("index_keys", found.index_keys)];
            parts.map(|(name, found)| {
                let expected = self.file.get(&format!("L{layer:02}.{name}"));
                Tally::new(format!("L{layer:02}.{name}"), &found, &expected.floats(), expected.shape[1])
            })
        };
        self.kv_sources.iter().flat_map(of_layer).collect()
    }

    /// The selection of every index source. A score must lie within its bound of the recorded one, and a selection must
    /// be equal where the recorded distance between kept and dropped is larger than what the bounds can bridge.
    /// Returns the number of selections that were compared.
    pub fn selection(&self, part: impl Fn(&SelectionInputs) -> Selected) -> usize {
        let mut compared = 0;
        for &layer in &self.index_sources {
            let source = self.source(&self.kv_sources, layer).expect("an index source reads a key source");
            let candidates = (layer > self.candidate_source).then(|| self.candidates());
            let inputs = SelectionInputs {
                layer,
                x: self.layer(layer, "attn_in"),
                keys: self.layer(source, "index_keys"),
                candidates,
            };
            let found = part(&inputs);
            let (recorded, gaps) = (self.layer(layer, "index_score"), self.layer(layer, "topk_gap"));
            let (topk, entries) = (self.lists(layer, "topk"), recorded.len() / self.ids.len());
            let mut worst: f64 = 0.0;
            for (row, scores) in found.scores.iter().enumerate() {
                let recorded = &recorded[row * entries..][..entries];
                let bounds = &found.bounds[row];
                for (j, &expected) in recorded.iter().enumerate() {
                    let score = scores.get(j).copied().unwrap_or(f64::NEG_INFINITY);
                    let difference = if score == expected { 0.0 } else { (score - expected).abs() };
                    let bound = bounds.get(j).map_or(0.0, |bound| bound.max(0.0));
                    assert!(
                        difference <= bound,
                        "L{layer:02} row {row} entry {j}: score {score} instead of {expected}"
                    );
                    worst = worst.max(difference);
                }
                let bridge = 2.0 * bounds.iter().fold(0.0f64, |largest, &bound| largest.max(bound));
                if gaps[row] > bridge {
                    assert_eq!(
                        found.selections[row], topk[row],
                        "L{layer:02} row {row}: gap {} over {bridge}",
                        gaps[row]
                    );
                    compared += 1;
                }
            }
            println!("L{layer:02}.index_score: worst difference {worst:.2e}");
            if layer == self.candidate_source {
                let found = found.candidates.expect("the candidate source publishes candidates");
                let differing =
                    found.iter().zip(self.candidates()).filter(|(found, expected)| *found != expected).count();
                assert_eq!(differing, 0, "rows with other candidates");
            }
        }
        compared
    }

    /// The hyper-connections of every layer: attention input, expert input, streams, and the mix in float32 steps.
    pub fn mixes(&self, part: impl Fn(&MixInputs) -> Mixed) -> Vec<Tally> {
        let of_layer = |layer| {
            let inputs = MixInputs {
                layer,
                streams: self.stream_in(layer),
                mix: (layer > 0).then(|| self.layer(layer - 1, "pre_mix")),
                attn_out: self.layer(layer, "attn_out"),
                ffn_out: self.layer(layer, "ffn_out"),
            };
            let found = part(&inputs);
            let tally = |name: &str, found: &[f64], columns| {
                Tally::new(format!("L{layer:02}.{name}"), found, &self.layer(layer, name), columns)
            };
            [
                tally("attn_in", &found.attn_in, self.columns),
                tally("ffn_in", &found.ffn_in, self.columns),
                tally("stream", &found.streams, self.streams),
                tally("pre_mix", &found.mix, self.streams / self.columns),
            ]
        };
        (0..self.layers).flat_map(of_layer).collect()
    }

    /// The n-gram memory of its layers, from the streams before it and the token ids.
    pub fn engram(&self, part: impl Fn(usize, &[f64], &[u32]) -> Vec<f64>) -> Vec<Tally> {
        let of_layer = |&layer: &usize| {
            let found = part(layer, &self.layer(layer - 1, "stream"), &self.ids);
            Tally::new(format!("L{layer:02}.stream_in"), &found, &self.stream_in(layer), self.streams)
        };
        self.engram_layers.iter().map(of_layer).collect()
    }

    /// The streams and the mix that the last layer leaves.
    pub fn last(&self) -> (Vec<f64>, Vec<f64>) {
        (self.layer(self.layers - 1, "stream"), self.layer(self.layers - 1, "pre_mix"))
    }

    /// Any part's rows against a recorded tensor that belongs to no layer.
    pub fn tally(&self, name: &str, found: &[f64]) -> Tally {
        let columns = found.len() / self.ids.len();
        Tally::new(name.to_string(), found, &self.file.floats(name), columns)
    }
}

/// Rows of a part that has its own file, against the recorded ones.
pub fn tally(name: &str, found: &[f64], expected: &[f64], columns: usize) -> Tally {
    Tally::new(name.to_string(), found, expected, columns)
}
