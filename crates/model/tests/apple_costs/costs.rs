//! Bytes and operations of every kernel of a round and of a pass of the draft head, from the release's sizes: bytes are what
//! memory has to give or take once, operations what the lanes do in the sources' inner loops.

use std::collections::BTreeMap;
use tf_model::deepseek_v41::shape::Shape;

const CODES: f64 = 1.0 + 1.0 / 1024.0;
const NIBBLES: f64 = 0.5 + 1.0 / 32.0;

/// What one kind of weight costs in its source's inner loop, in operations of one lane: to decode it once, and for each row.
#[derive(Clone, Copy)]
pub struct Weight {
    pub bytes: f64,
    pub decode: f64,
    pub row: f64,
}

/// Two codes: two loads, twice nine to decode, four for the scale, two for addresses. A row: two loads, a product, two fused.
pub const FP8: Weight = Weight { bytes: CODES, decode: 13.0, row: 2.5 };
/// Four nibbles: two loads, four to part them, four times eight to decode, four for the scale, two for addresses. A row: two
/// loads of two values, two products, four fused.
pub const MXFP4: Weight = Weight { bytes: NIBBLES, decode: 11.0, row: 2.0 };
/// A load, a shift, half an address. A row: a load and a fused product.
pub const BF16: Weight = Weight { bytes: 2.0, decode: 2.5, row: 2.0 };
const F32: Weight = Weight { bytes: 4.0, decode: 1.5, row: 2.0 };

/// Operations a value: rounded to bf16, to FP8 in blocks with its scale, normed (squares, then the product of three), turned
/// where sine and cosine are made, a comparison of a pass over scores or logits.
const ROUND: f64 = 7.0;
const QDQ8: f64 = 35.0;
const NORM: f64 = 8.0;
const TURN: f64 = 50.0;
const LOOK: f64 = 5.0;

/// Bytes and operations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub bytes: f64,
    pub operations: f64,
}

impl Cost {
    /// The sum of both.
    pub fn plus(self, other: Cost) -> Cost {
        Cost { bytes: self.bytes + other.bytes, operations: self.operations + other.operations }
    }
}

/// `count` values, each with so many bytes and operations.
fn each(count: usize, bytes: f64, operations: f64) -> Cost {
    Cost { bytes: count as f64 * bytes, operations: count as f64 * operations }
}

impl Weight {
    /// `count` weights for `rows` rows.
    pub fn cost(self, count: usize, rows: usize) -> Cost {
        let each = self.decode * decodes(rows) + self.row * rows as f64;
        Cost { bytes: count as f64 * self.bytes, operations: count as f64 * each }
    }
}

/// As often a weight is decoded for `rows` rows: for 8, 4, 2 or 1 of them together.
fn decodes(rows: usize) -> f64 {
    (rows / 8 + (rows % 8).count_ones() as usize) as f64
}

/// What differs between layers of the model and those of the draft head.
#[derive(Clone, Copy)]
struct Stack {
    layers: usize,
    rows: usize,
    experts: usize,
    picks: usize,
    /// Compressed entries and window keys that a row attends to.
    entries: usize,
    window: usize,
    /// Rows whose logits are computed.
    drawn: usize,
}

/// Costs of one stack of layers by what they are for: name, entry points, cost.
type Parts = Vec<(&'static str, &'static [&'static str], Cost)>;

/// Rows of a prompt's piece, of which only the last is drawn.
pub const PROMPT: usize = 2048;

fn backbone(shape: &Shape, rows: usize) -> Stack {
    Stack {
        layers: shape.num_hidden_layers,
        rows,
        experts: shape.n_routed_experts,
        picks: shape.num_experts_per_tok,
        entries: shape.index_topk,
        window: shape.sliding_window,
        drawn: if rows == PROMPT { 1 } else { rows },
    }
}

/// One slot's block.
fn drafter(shape: &Shape) -> Stack {
    Stack {
        layers: shape.num_nextn_predict_layers,
        rows: shape.dspark_block_size,
        experts: shape.dspark_n_routed_experts,
        picks: shape.dspark_num_experts_per_tok,
        entries: 0,
        window: shape.sliding_window + shape.dspark_block_size,
        drawn: shape.dspark_block_size,
    }
}

/// Distinct experts a layer that the rows read: each further row of a window meets 44 % of its experts again, as one
/// published measurement of this model's family has it; a prompt reads all.
fn distinct(stack: Stack) -> f64 {
    (stack.picks as f64 * (1.0 + 0.56 * (stack.rows - 1) as f64)).min(stack.experts as f64)
}

/// What a stack's weights cost, and its attention.
fn weights(shape: &Shape, stack: Stack) -> Parts {
    let Stack { layers, rows, picks, .. } = stack;
    let (hidden, inner) = (shape.hidden_size, shape.moe_intermediate_size);
    let (low, wide, groups) = (shape.q_lora_rank, shape.query_width(), shape.o_groups * shape.o_lora_rank);
    let attention = hidden * (low + shape.head_dim) + low * wide + groups * shape.group_width() + groups * hidden;
    let expert = layers * 3 * hidden * inner;
    // Of one expert, then of all that are read: each by its share of the picks.
    let its_rows = (picks * rows) as f64 / distinct(stack);
    let of_weight = MXFP4.decode * decodes(its_rows.ceil() as usize) + MXFP4.row * its_rows;
    let read = expert as f64 * distinct(stack);
    let routed = Cost { bytes: read * MXFP4.bytes, operations: read * of_weight };
    // A key of the window or of a selection: decoded for the score and for the value by every head.
    let key_bytes = stack.window * 528 + stack.entries * 288;
    let reads = shape.num_attention_heads * 2 * (stack.window + stack.entries) * shape.head_dim;
    let attended = each(layers * rows, key_bytes as f64, reads as f64 * 14.0);
    let queries = each(layers * rows * wide, 8.0, TURN / 4.0 + ROUND);
    // Every row takes the mixes' weights on its own.
    let mixes = layers * 2 * shape.stream_width() * shape.hc_mix_count();
    let mixed = Cost { operations: F32.cost(mixes, 1).operations * rows as f64, ..F32.cost(mixes, 1) };
    vec![
        ("attention linears", &["linear_fp8"], FP8.cost(layers * attention, rows)),
        ("shared expert", &["moe_up", "moe_down"], FP8.cost(expert, rows)),
        ("routed experts", &["moe_up", "moe_down"], routed),
        ("router", &["linear_bf16"], BF16.cost(layers * hidden * stack.experts, rows)),
        ("mixes of the streams", &["hyper_products"], mixed.plus(streams(shape, stack, 1.0))),
        ("attention", &["attention"], attended.plus(queries)),
        ("head", &["lm_head"], BF16.cost(shape.vocab_size * hidden, stack.drawn)),
    ]
}

/// The streams of all sublayers, read or written so many times.
fn streams(shape: &Shape, stack: Stack, times: f64) -> Cost {
    each(stack.layers * 2 * stack.rows * shape.stream_width(), 4.0 * times, 0.0)
}

/// What a stack's kernels without weights cost.
fn others(shape: &Shape, stack: Stack) -> Parts {
    let Stack { layers, rows, picks, .. } = stack;
    let (hidden, sublayers) = (shape.hidden_size, 2 * layers * rows);
    let slots = stack.experts.div_ceil(32) * 32;
    let route = slots as f64 * (60.0 + 3.0 * picks as f64);
    let added = (picks * picks) as f64 * 4.0 + 3.0 * picks as f64 + ROUND;
    let expand = each(sublayers * hidden, 4.0, shape.hc_mult as f64 * (8.0 + ROUND));
    let finish = each(sublayers * hidden, 12.0, 2.0 * (8.0 + ROUND) + NORM + ROUND + QDQ8);
    vec![
        ("", &["embed"], each(rows * hidden, 2.0 + 4.0 * shape.hc_mult as f64, 2.0 + 2.0 * shape.hc_mult as f64)),
        ("", &["rms_norm"], each(layers * rows * shape.q_lora_rank, 12.0, NORM + ROUND + QDQ8)),
        ("", &["quantise_in_place"], each(layers * rows * shape.o_groups * shape.o_lora_rank, 8.0, QDQ8)),
        ("", &["kv_store"], stored(shape, layers, rows)),
        ("", &["hyper_expand"], expand.plus(streams(shape, stack, 2.0))),
        ("", &["hyper_finish"], finish.plus(streams(shape, stack, 1.0))),
        ("", &["hyper_collapse"], each(stack.drawn * hidden, 28.0, 2.0 * (8.0 + ROUND) + NORM + ROUND + QDQ8)),
        ("", &["moe_route"], each(layers * rows * stack.experts, 8.0, route / stack.experts as f64)),
        ("", &["moe_sum"], each(layers * rows * hidden, 2.0 * (picks + 1) as f64 + 4.0, added)),
    ]
}

/// Keys of so many layers as records.
fn stored(shape: &Shape, layers: usize, rows: usize) -> Cost {
    let turned = shape.qk_rope_head_dim as f64 / shape.head_dim as f64 * TURN;
    each(layers * rows * shape.head_dim, 4.0 + 1.0 + 1.0 / 32.0, NORM + ROUND + turned + QDQ8)
}

/// The weights of what a round has beside its layers, as it stands at `positions`.
fn sources(shape: &Shape, rows: usize) -> Parts {
    let (hidden, low) = (shape.hidden_size, shape.q_lora_rank);
    let raw: usize = shape.kv_source_layer_ids.iter().map(|layer| shape.ratio(*layer).min(2)).sum();
    let keys = shape.kv_source_layer_ids.len() * shape.index_head_dim * shape.head_dim;
    let selections = shape.index_source_layer_ids.len();
    let engrams = shape.engram_layer_ids.len() * shape.engram_width() * (shape.hc_mult + 1) * hidden;
    let context = shape.tap_width() * hidden + shape.num_nextn_predict_layers * hidden * shape.head_dim;
    let queries = selections * low * shape.index_n_heads * shape.index_head_dim;
    vec![
        ("Engram projection", &["linear_fp8"], FP8.cost(engrams, rows)),
        ("compressors", &["linear_bf16"], BF16.cost(raw * shape.head_dim * hidden + keys, rows)),
        ("indexers' queries", &["linear_fp8"], FP8.cost(queries, rows)),
        ("indexers' weights", &["linear_bf16"], BF16.cost(selections * hidden * shape.index_n_heads, rows)),
        ("the drafter's context", &["linear_fp8"], FP8.cost(context, rows)),
    ]
}

/// What a round's kernels beside its layers cost at `positions`.
fn beside(shape: &Shape, rows: usize, drawn: usize, positions: usize) -> Parts {
    let (hidden, head_dim, drafts) = (shape.hidden_size, shape.head_dim, shape.num_nextn_predict_layers);
    let ring = (shape.num_hidden_layers + drafts) * rows.min(shape.sliding_window) * (head_dim + head_dim / 32);
    let sources = shape.kv_source_layer_ids.iter().map(|layer| shape.ratio(*layer));
    let entries: usize = sources.clone().map(|ratio| rows.div_ceil(ratio)).sum();
    let pairs = sources.filter(|ratio| *ratio == 2).count() * rows.div_ceil(2) * 2 * head_dim;
    let (key, heads) = (shape.index_head_dim as f64, shape.index_n_heads as f64);
    let selections = shape.index_source_layer_ids.len();
    let seen: usize = shape.index_source_layer_ids.iter().map(|layer| shape.entries(*layer, positions)).sum();
    // A column of a key serves eight heads.
    let scored = key * heads * (2.5 + 12.0 / 8.0) + 3.0 * heads;
    let looked = 35.0 * LOOK;
    let (gathered, gated) = (shape.engram_width(), shape.stream_width());
    let engrams = shape.engram_layer_ids.len() * rows;
    let taps = shape.dspark_target_layer_ids.len() * rows * hidden;
    vec![
        ("", &["rms_norm"], each(rows * hidden, 12.0, NORM + ROUND + QDQ8)),
        ("", &["kv_store"], stored(shape, drafts, rows)),
        ("", &["kv_store_ring"], each(ring, 2.0, 2.0)),
        ("", &["kv_compress"], each(entries * head_dim, 20.0, NORM + 2.0 * ROUND + 90.0)),
        ("", &["kv_keep_raw"], each(pairs, 8.0, 2.0)),
        ("", &["index_key"], each(entries * shape.index_head_dim, 4.6, NORM + ROUND + TURN + 20.0)),
        ("", &["index_query"], each(selections * rows * shape.index_n_heads * shape.index_head_dim, 8.0, TURN + 20.0)),
        ("", &["index_score"], each(seen, key * (0.5 + 1.0 / 32.0), 0.0).plus(each(seen * rows, 4.0, scored))),
        ("", &["top_k"], each(seen * rows, 4.0, looked)),
        ("", &["hyper_tap"], each(taps, 20.0, 4.0 + ROUND + QDQ8)),
        ("", &["engram_gather"], each(engrams * gathered, 5.0 + 1.0 / 32.0, 12.0 + QDQ8)),
        ("", &["engram_gate"], each(engrams * gated, 21.0, 12.0 + ROUND)),
        // Two looks and a copy: a greedy draw.
        ("", &["sample"], each(drawn * shape.vocab_size, 8.0, 2.0 * LOOK + 2.0)),
    ]
}

/// What the chain of proposals costs.
fn chain(shape: &Shape) -> Parts {
    let (vocabulary, steps) = (shape.vocab_size, shape.dspark_block_size);
    let logits = BF16.cost(steps * vocabulary * shape.dspark_markov_rank, 1).plus(each(steps * vocabulary, 8.0, 2.0));
    vec![
        ("chain of proposals", &["draft_logits"], logits),
        ("", &["draft_confidence"], each(steps * (shape.hidden_size + shape.dspark_markov_rank), 8.0, 3.0)),
        ("", &["draft_argmax"], each(steps * vocabulary, 4.0, LOOK)),
    ]
}

/// What is read in a round of `rows` rows of one sequence, by what it is for.
pub fn parts(shape: &Shape, rows: usize) -> Parts {
    [weights(shape, backbone(shape, rows)), sources(shape, rows)].concat()
}

/// The same of a pass of the draft head for one slot.
pub fn parts_of_pass(shape: &Shape) -> Parts {
    [weights(shape, drafter(shape)), chain(shape)[..1].to_vec()].concat()
}

fn by_entry(parts: Parts) -> BTreeMap<&'static str, Cost> {
    let mut kernels: BTreeMap<&'static str, Cost> = BTreeMap::new();
    for (_, entries, cost) in parts {
        for entry in entries {
            // Two matrices of an expert go up and one down.
            let share = match *entry {
                "moe_up" => 2.0 / 3.0,
                "moe_down" => 1.0 / 3.0,
                _ => 1.0,
            };
            let cost = Cost { bytes: cost.bytes * share, operations: cost.operations * share };
            let sum = kernels.entry(entry).or_default();
            *sum = sum.plus(cost);
        }
    }
    kernels
}

/// Every kernel of a round, all its launches together.
pub fn kernels(shape: &Shape, rows: usize, positions: usize) -> BTreeMap<&'static str, Cost> {
    let stack = backbone(shape, rows);
    by_entry([parts(shape, rows), others(shape, stack), beside(shape, rows, stack.drawn, positions)].concat())
}

/// Every kernel of a pass of the draft head for one slot.
pub fn kernels_of_pass(shape: &Shape) -> BTreeMap<&'static str, Cost> {
    by_entry([weights(shape, drafter(shape)), others(shape, drafter(shape)), chain(shape)].concat())
}

/// All kernels together.
pub fn total(kernels: &BTreeMap<&'static str, Cost>) -> Cost {
    kernels.values().fold(Cost::default(), |sum, cost| sum.plus(*cost))
}
