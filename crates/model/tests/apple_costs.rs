//! What a round asks of an Apple GPU, counted and computed: launches from the list that the model gives a device, bytes and
//! operations from the release's sizes. The tables of `docs/performance/apple.md` are made here.

mod production;
#[path = "../../metal-emulator/tests/common/ready.rs"]
mod ready;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tf_device::apple::chip::{Figures, PUBLISHED};
use tf_device::gpu::{Backend, Block, Call, Driver, GpuDevice, GpuLimits, Span};
use tf_device::{Device, HostBytes, LaunchError};
use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, SequenceView, SlotIndex};
use tf_engine::request::Sampling;
use tf_model::deepseek_v41::load::WeightBytes;
use tf_model::deepseek_v41::shape::{FLASH, Shape};
use tf_model::deepseek_v41::{DeepseekV41, Options, random};

/// One thing that a model asked of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Launch(&'static str),
    /// Work between launches, in the same stream.
    Copy,
    /// What the host waits for.
    Wait,
    /// What the host gives.
    Write,
}

/// A device that notes what it is asked for: of another one, or of none, which computes nothing and reads as zeros.
#[derive(Debug)]
struct Listing {
    inner: Option<Arc<dyn Driver>>,
    limits: GpuLimits,
    blocks: Mutex<u64>,
    list: List,
}

#[derive(Clone, Debug, Default)]
struct List(Arc<Mutex<(Vec<Asked>, usize)>>);

impl List {
    fn note(&self, asked: Asked) {
        self.0.lock().expect("no test panics while it notes").0.push(asked);
    }

    /// What was noted since the last time.
    fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut self.0.lock().expect("no test panics while it notes").0)
    }

    /// Buffers over bytes of the file.
    fn maps(&self) -> usize {
        self.0.lock().expect("no test panics while it notes").1
    }
}

impl Driver for Listing {
    fn backend(&self) -> Backend {
        Backend::Metal
    }
    fn name(&self) -> &str {
        "a list"
    }
    fn limits(&self) -> &GpuLimits {
        &self.limits
    }
    fn free_bytes(&self) -> Result<u64, LaunchError> {
        Ok(self.limits.memory_bytes)
    }
    fn allocate(&self, bytes: usize) -> Result<Block, LaunchError> {
        if let Some(inner) = &self.inner {
            return inner.allocate(bytes);
        }
        let mut blocks = self.blocks.lock().expect("no test panics while it counts");
        *blocks += 1;
        Ok(Block(*blocks))
    }
    fn map(&self, host: &HostBytes<'_>, element_bytes: usize) -> Result<Option<(Block, usize)>, LaunchError> {
        let mapped = self.inner.as_ref().map_or(Ok(None), |inner| inner.map(host, element_bytes))?;
        self.list.0.lock().expect("no test panics while it notes").1 += usize::from(mapped.is_some());
        Ok(mapped)
    }
    fn free(&self, block: Block) {
        if let Some(inner) = &self.inner {
            inner.free(block);
        }
    }
    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError> {
        self.list.note(Asked::Launch(call.entry));
        self.inner.as_ref().map_or(Ok(()), |inner| inner.launch(call))
    }
    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError> {
        self.list.note(Asked::Copy);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.copy(from, to))
    }
    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.list.note(Asked::Copy);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.zero(span))
    }
    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        self.list.note(Asked::Wait);
        to.fill(0);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.read(from, to))
    }
    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError> {
        self.list.note(Asked::Write);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.write(to, from))
    }
    fn finish(&self) -> Result<(), LaunchError> {
        self.list.note(Asked::Wait);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.finish())
    }
}

fn listing(inner: Option<Arc<dyn Driver>>) -> (Device, List) {
    let limits = GpuLimits {
        threads_max: 1024,
        shared_bytes_max: 32 << 10,
        buffers_max: 31,
        units: 8,
        memory_bytes: 1 << 40,
        target: "apple7".into(),
    };
    let list = List::default();
    let driver = Listing { inner, limits, blocks: Mutex::default(), list: list.clone() };
    (Device::Gpu(GpuDevice::new(Arc::new(driver))), list)
}

/// What one step of the model asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Step {
    launches: BTreeMap<&'static str, usize>,
    /// Times that the host waits for work that it gave.
    waits: usize,
    /// Whether nothing was given after the first wait: all of it was encoded at once.
    encoded_at_once: bool,
}

impl Step {
    fn of(asked: &[Asked]) -> Step {
        let mut step = Step { encoded_at_once: true, ..Step::default() };
        let mut under_way = false;
        for asked in asked {
            match asked {
                Asked::Launch(entry) => {
                    *step.launches.entry(entry).or_default() += 1;
                    step.encoded_at_once &= step.waits == 0;
                    under_way = true;
                }
                Asked::Copy => under_way = true,
                Asked::Wait => step.waits += usize::from(std::mem::take(&mut under_way)),
                Asked::Write => {}
            }
        }
        step
    }

    fn count(&self) -> usize {
        self.launches.values().sum()
    }
}

/// One token of a reply at the position behind `tokens`, then a pass of the draft head for each count of slots.
fn steps(model: &mut DeepseekV41, list: &List, tokens: &[u32], slots: &[u32]) -> (Step, Vec<Step>) {
    let greedy = Sampling::greedy();
    let last = tokens.len() - 1;
    let most = slots.iter().copied().max().unwrap_or(1);
    for slot in 0..most {
        production::feed_prompt(model, slot, &tokens[..last], 512);
    }
    list.take();
    let piece = production::Piece::reply(0, last as u32, &tokens[last..]);
    let view = SequenceView { sampling: &greedy, prompt: &tokens[..last], reply: &tokens[last..], given: &[] };
    let mut drawn = Drawn::default();
    model.forward(&production::plan(&[piece]), &[view], &mut drawn).expect("the forward runs");
    let round = Step::of(&list.take());
    assert_eq!(drawn.rows.len(), 1);
    let mut passes = Vec::new();
    for &count in slots {
        let position = last as u32;
        model.keep(SlotIndex(0), position);
        let of_slot =
            |slot| DraftRequest { slot: SlotIndex(slot), anchor: 7, position, count_max: 5, sampling: &greedy };
        let requests: Vec<_> = (0..count).map(of_slot).collect();
        list.take();
        let mut drafts = Drafts::default();
        model.draft(&requests, &mut drafts).expect("drafting runs");
        assert_eq!(drafts.tokens.len(), 5 * count as usize, "every slot got proposals");
        passes.push(Step::of(&list.take()));
    }
    (round, passes)
}

/// The release's layers, sources, window and selections, which decide what is launched, at widths that load in no time.
fn narrow() -> Shape {
    let narrow = Shape {
        vocab_size: 384,
        hidden_size: 128,
        num_attention_heads: 4,
        head_dim: 64,
        qk_rope_head_dim: 32,
        q_lora_rank: 64,
        o_groups: 2,
        o_lora_rank: 32,
        index_n_heads: 2,
        index_head_dim: 64,
        moe_intermediate_size: 64,
        n_routed_experts: 12,
        num_experts_per_tok: 3,
        engram_head_dim: 32,
        engram_vocab_size: 97,
        engram_compressed_vocab_size: 200,
        dspark_noise_token_id: 383,
        dspark_markov_rank: 32,
        dspark_n_routed_experts: 6,
        ..FLASH
    };
    random::cut(&narrow, 0..FLASH.num_hidden_layers).expect("all layers")
}

/// Positions at which costs are counted.
const POSITIONS: usize = 4096;

/// What the release's layers ask for at [`POSITIONS`]: a round of one row, and a pass of the draft head for one slot.
fn release_steps() -> (Step, Step) {
    let (device, list) = listing(None);
    let shape = narrow();
    let weights = random::weights(&shape, &device, 1).expect("the list has room");
    let hash = random::hash(&shape).expect("the counts agree");
    let options = Options { round_rows: 512, context: 2 * POSITIONS as u32, slots: 1, ..Options::default() };
    let mut model = DeepseekV41::new(shape, weights, hash, options).expect("the list has room");
    let tokens: Vec<u32> = (0..POSITIONS as u32).map(|index| index * 37 % 384).collect();
    let (round, passes) = steps(&mut model, &list, &tokens, &[1]);
    (round, passes[0].clone())
}

/// The small checkpoint on the emulated device behind a list.
fn emulated(test: &str) -> Option<(DeepseekV41, List, Vec<u32>)> {
    if !ready::ready(test) {
        return None;
    }
    let Device::Gpu(gpu) = tf_metal_emulator::device().expect("the compiler is installed") else {
        panic!("the emulator is a GPU")
    };
    let (device, list) = listing(Some(gpu.driver().clone()));
    let case = production::tiny_a();
    let model = case.load_on(&device, Options { slots: 8, ..Options::default() });
    Some((model, list, case.tokens))
}

#[test]
fn a_list_is_what_the_emulated_device_is_asked_for() {
    let Some((mut model, list, tokens)) = emulated("a_list_is_what_the_emulated_device_is_asked_for") else { return };
    let found = steps(&mut model, &list, &tokens[..24], &[1, 3]);
    let (device, list) = listing(None);
    let mut model = production::tiny_a().load_on(&device, Options { slots: 8, ..Options::default() });
    assert_eq!(steps(&mut model, &list, &tokens[..24], &[1, 3]), found);
}

#[test]
fn a_round_and_a_pass_of_the_draft_head_are_encoded_without_waits() {
    let (device, list) = listing(None);
    let case = production::tiny_a();
    let mut model = case.load_on(&device, Options { slots: 8, ..Options::default() });
    let (round, passes) = steps(&mut model, &list, &case.tokens[..24], &[1, 2, 3, 8]);
    assert!(round.encoded_at_once);
    assert_eq!(round.waits, 1);
    for pass in &passes {
        assert!(pass.encoded_at_once);
        assert_eq!(pass.waits, 1);
        // One pass, however many slots there are.
        assert_eq!(pass.launches, passes[0].launches);
    }
}

#[test]
fn weights_that_a_file_stores_as_kernels_read_them_are_not_copied() {
    let Some((model, list, _)) = emulated("weights_are_not_copied") else { return };
    let shape = model.shape();
    let layers = shape.num_hidden_layers + shape.num_nextn_predict_layers;
    // Codes and scales of eight FP8 linears a layer, and its experts at once.
    assert!(list.maps() > (2 * 8 + 1) * layers, "{} buffers for {layers} layers", list.maps());
}

const CODES: f64 = 1.0 + 1.0 / 1024.0;
const NIBBLES: f64 = 0.5 + 1.0 / 32.0;

/// What one kind of weight costs in its source's inner loop, in operations of one lane: to decode it once, and for each row.
#[derive(Clone, Copy)]
struct Weight {
    bytes: f64,
    decode: f64,
    row: f64,
}

/// Two codes: two loads, twice nine to decode, four for the scale, two for addresses. A row: two loads, a product, two fused.
const FP8: Weight = Weight { bytes: CODES, decode: 13.0, row: 2.5 };
/// Four nibbles: two loads, four to part them, four times eight to decode, four for the scale, two for addresses. A row: two
/// loads of two values, two products, four fused.
const MXFP4: Weight = Weight { bytes: NIBBLES, decode: 11.0, row: 2.0 };
/// A load, a shift, half an address. A row: a load and a fused product.
const BF16: Weight = Weight { bytes: 2.0, decode: 2.5, row: 2.0 };
const F32: Weight = Weight { bytes: 4.0, decode: 1.5, row: 2.0 };

/// Bytes read and operations of a round.
#[derive(Clone, Copy, Default)]
struct Cost {
    bytes: f64,
    operations: f64,
}

impl Weight {
    /// `count` weights for `rows` rows.
    fn cost(self, count: usize, rows: usize) -> Cost {
        let each = self.decode * decodes(rows) + self.row * rows as f64;
        Cost { bytes: count as f64 * self.bytes, operations: count as f64 * each }
    }
}

/// Distinct experts a layer that so many rows read: each further row of a window meets 44 % of its experts again, as one
/// published measurement of this model's family has it; a prompt reads all.
fn experts(shape: &Shape, rows: usize) -> f64 {
    let picks = shape.num_experts_per_tok as f64;
    (picks * (1.0 + 0.56 * (rows - 1) as f64)).min(shape.n_routed_experts as f64)
}

/// As often a weight is decoded for `rows` rows: for 8, 4, 2 or 1 of them together.
fn decodes(rows: usize) -> f64 {
    (rows / 8 + (rows % 8).count_ones() as usize) as f64
}

/// The parts of a round of `rows` rows of one sequence at 4,096 positions: launches that read it, layers, and the cost of all
/// layers together.
fn parts(shape: &Shape, rows: usize) -> Vec<(&'static str, &'static str, usize, Cost)> {
    let (hidden, layers, inner) = (shape.hidden_size, shape.num_hidden_layers, shape.moe_intermediate_size);
    let (low, wide, groups) = (shape.q_lora_rank, shape.query_width(), shape.o_groups * shape.o_lora_rank);
    let attention = hidden * (low + shape.head_dim) + low * wide + groups * shape.group_width() + groups * hidden;
    let expert = 3 * hidden * inner;
    let sources = shape.kv_source_layer_ids.iter();
    let raw: usize = sources.map(|layer| shape.ratio(*layer).min(2) * shape.head_dim * hidden).sum();
    let keys = shape.kv_source_layer_ids.len() * shape.index_head_dim * shape.head_dim;
    let selections = shape.index_source_layer_ids.len();
    let queries = selections * low * shape.index_n_heads * shape.index_head_dim;
    let of_index = selections * hidden * shape.index_n_heads;
    let engrams = shape.engram_layer_ids.len();
    let wkv = shape.engram_width() * (shape.hc_mult + 1) * hidden;
    let mixes = 2 * shape.stream_width() * shape.hc_mix_count();
    // Of one expert, then of all that are read: each by its share of the picks.
    let distinct = experts(shape, rows);
    let its_rows = (shape.num_experts_per_tok * rows) as f64 / distinct;
    let each = MXFP4.decode * decodes(its_rows.ceil() as usize) + MXFP4.row * its_rows;
    let weights = (layers * expert) as f64 * distinct;
    let routed = Cost { bytes: weights * MXFP4.bytes, operations: weights * each };
    // A key of the window or of a selection: decoded for the score and for the value by every head.
    let reads = shape.sliding_window + shape.index_topk;
    let key_bytes = shape.sliding_window * 528 + shape.index_topk * 288;
    let attended = Cost {
        bytes: (layers * rows * key_bytes) as f64,
        operations: (layers * rows * shape.num_attention_heads * 2 * reads * shape.head_dim) as f64 * 14.0,
    };
    // Every row takes the mixes' weights on its own.
    let mixed = F32.cost(layers * mixes, 1);
    let mixed = Cost { operations: mixed.operations * rows as f64, ..mixed };
    // The streams, read three times and written once by the launches of a sublayer.
    let streams = (layers * 2 * 4 * shape.stream_width() * 4 * rows) as f64;
    vec![
        ("attention linears", "linear_fp8", layers, FP8.cost(layers * attention, rows)),
        ("shared expert", "moe_up, moe_down", layers, FP8.cost(layers * expert, rows)),
        ("routed experts", "moe_up, moe_down", layers, routed),
        ("router", "linear_bf16", layers, BF16.cost(layers * hidden * shape.n_routed_experts, rows)),
        ("mixes of the streams", "hyper_products", layers, mixed),
        ("streams", "hyper_*", layers, Cost { bytes: streams, operations: streams }),
        ("Engram projection", "linear_fp8", engrams, FP8.cost(engrams * wkv, rows)),
        ("compressors", "linear_bf16", shape.kv_source_layer_ids.len(), BF16.cost(raw + keys, rows)),
        ("indexers' queries", "linear_fp8", selections, FP8.cost(queries, rows)),
        ("indexers' weights", "linear_bf16", selections, BF16.cost(of_index, rows)),
        ("attention", "attention", layers, attended),
        ("head", "lm_head", 1, BF16.cost(shape.vocab_size * hidden, if rows == PROMPT { 1 } else { rows })),
    ]
}

fn total(shape: &Shape, rows: usize) -> Cost {
    parts(shape, rows).into_iter().fold(Cost::default(), |sum, (.., cost)| Cost {
        bytes: sum.bytes + cost.bytes,
        operations: sum.operations + cost.operations,
    })
}

/// Lanes of a core, and 10^9 clocks a second of a family's chips: published, not verified.
const LANES: f64 = 128.0;
fn clock(chip: &Figures) -> f64 {
    match (chip.family, chip.name.contains("M4")) {
        (7, _) => 1.28,
        (9, true) => 1.47,
        (8 | 9, _) => 1.40,
        _ => 1.58,
    }
}

/// Seconds that a launch takes beside its work, and the share of the floor that is reached: assumed.
const LAUNCH: f64 = 2e-6;
const REACHED: f64 = 0.6;
/// Rows that a window of drafts has, and tokens that it gives on average: assumed.
const WINDOW: usize = 6;
const TOKENS_A_WINDOW: f64 = 3.0;

/// Rows of a prompt's piece.
const PROMPT: usize = 2048;

fn parts_table() -> String {
    let mut page = format!(
        "| part | launches | layers | MB, 1 row | 10^9 operations | MB, {WINDOW} rows | 10^9 operations | MB, {PROMPT} rows | \
         10^9 operations |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    );
    let row = |cost: &Cost| format!("{:.0} | {:.1}", cost.bytes / 1e6, cost.operations / 1e9);
    let all = [1, WINDOW, PROMPT].map(|rows| (parts(&FLASH, rows), total(&FLASH, rows)));
    for index in 0..all[0].0.len() {
        let (part, entries, layers, _) = &all[0].0[index];
        let costs = all.each_ref().map(|(parts, _)| row(&parts[index].3));
        page += &format!("| {part} | {entries} | {layers} | {} |\n", costs.join(" | "));
    }
    page + &format!("| together | | | {} |\n", all.map(|(_, total)| row(&total)).join(" | "))
}

fn launches_text(round: &Step, pass: &Step) -> String {
    let list = |step: &Step| {
        let entries: Vec<String> = step.launches.iter().map(|(entry, count)| format!("{count} `{entry}`")).collect();
        entries.chunks(7).map(|some| some.join(", ")).collect::<Vec<_>>().join(",\n")
    };
    let waits = |step: &Step| if step.waits == 1 { "once".to_owned() } else { format!("{} times", step.waits) };
    format!(
        "Launches of a round of one row, its draw included: {}; the host waits {}.\n{}.\n\nLaunches of a pass of the draft head, \
         for any number of slots: {}; the host waits {}.\n{}.\n",
        round.count(),
        waits(round),
        list(round),
        pass.count(),
        waits(pass),
        list(pass)
    )
}

fn chips_table(round: &Step, pass: &Step) -> String {
    let mut page =
        "| chip | GB/s | cores | 10^12 lane operations a second | bytes, ms | operations, ms | launches, ms | \
         tokens/s at most | expected | with drafts | prompt tokens/s expected | holds the weights |\n"
            .to_owned();
    page += "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    let [one, window, prompt] = [1, WINDOW, PROMPT].map(|rows| total(&FLASH, rows));
    let resident = WeightBytes::plan(&FLASH).resident() as f64;
    for chip in PUBLISHED {
        let lanes = f64::from(chip.cores) * LANES * clock(chip) * 1e9;
        let time = |cost: Cost| (cost.bytes / (f64::from(chip.bandwidth) * 1e9), cost.operations / lanes);
        let floor = |cost: Cost| time(cost).0.max(time(cost).1);
        let (bytes, operations) = time(one);
        let overhead = round.count() as f64 * LAUNCH;
        let expected = |cost: Cost| floor(cost) / REACHED + overhead;
        let drafted = TOKENS_A_WINDOW / (expected(window) + pass.count() as f64 * LAUNCH);
        // What a Mac recommends as the working set of its GPU.
        let holds = f64::from(chip.memory) * f64::from(1 << 30) * 0.75 >= resident;
        page += &format!(
            "| {} | {} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.0} | {} |\n",
            chip.name,
            chip.bandwidth,
            chip.cores,
            lanes / 1e12,
            bytes * 1e3,
            operations * 1e3,
            overhead * 1e3,
            1.0 / floor(one),
            1.0 / expected(one),
            drafted,
            PROMPT as f64 / expected(prompt),
            if holds { format!("with {} GiB", chip.memory) } else { "no".to_owned() },
        );
    }
    page
}

fn tables() -> String {
    let (round, pass) = release_steps();
    let assumed = format!(
        "Operations of one lane as counted in the sources' inner loops: {} to decode an FP8 weight, {} for MXFP4, {} for bf16, and \
         {}, {} and {}\na row to multiply and add. Rows share what is decoded by 8, 4, 2 or 1. Expected: the larger of the two times at \
         {:.0} % of what was said,\nand {:.0} us a launch; with drafts: {TOKENS_A_WINDOW} tokens a window of {WINDOW} rows and a pass of \
         the draft head's launches; prompts in pieces\nof {PROMPT} rows.\n",
        FP8.decode,
        MXFP4.decode,
        BF16.decode,
        FP8.row,
        MXFP4.row,
        BF16.row,
        100.0 * REACHED,
        LAUNCH * 1e6,
    );
    [assumed, parts_table(), launches_text(&round, &pass), chips_table(&round, &pass)].join("\n")
}

#[test]
fn generated_page_of_apple_costs_is_fresh() {
    const MARKS: [&str; 2] = ["<!-- costs: made by `cargo xtask gen` -->\n", "<!-- end of costs -->\n"];
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/performance/apple.md");
    let text = std::fs::read_to_string(&path).expect("the page is there");
    let (head, rest) = text.split_once(MARKS[0]).expect("the page marks its tables");
    let (found, tail) = rest.split_once(MARKS[1]).expect("the page marks their end");
    let expected = format!("\n{}\n", tables());
    if std::env::var_os("TENSORFOLD_GENERATE").is_some() {
        std::fs::write(&path, [head, MARKS[0], &expected, MARKS[1], tail].concat()).expect("the page is written");
        return;
    }
    assert!(found == expected, "docs/performance/apple.md is stale: run `cargo xtask gen`");
}

#[test]
fn the_costs_follow_the_sizes() {
    let one = total(&FLASH, 1);
    // 8.5 GB of dense weights and 4.5 GB of experts, as the release's sizes have it.
    assert!((12.9e9..13.2e9).contains(&one.bytes), "{}", one.bytes);
    let window = total(&FLASH, WINDOW);
    assert!(window.bytes > 1.8 * one.bytes && window.bytes < 2.2 * one.bytes, "{}", window.bytes);
    // A prompt reads every weight once.
    let prompt = total(&FLASH, PROMPT).bytes;
    assert!(prompt > 0.9 * WeightBytes::plan(&FLASH).experts as f64, "{prompt}");
    let count = 1 << 20;
    assert_eq!(FP8.cost(count, 8).operations, (count as f64) * (13.0 + 8.0 * 2.5));
    assert_eq!(FP8.cost(count, 7).operations, (count as f64) * (3.0 * 13.0 + 7.0 * 2.5));
}
