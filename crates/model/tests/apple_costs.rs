//! What a round asks of an Apple GPU, counted and computed: launches from the list that the model gives a device, bytes and
//! operations from the release's sizes. The tables of `docs/performance/apple.md` are made here.

#[path = "apple_costs/costs.rs"]
mod costs;
mod production;
#[path = "../../metal-emulator/tests/common/ready.rs"]
mod ready;

use costs::{BF16, Cost, FP8, MXFP4, PROMPT, kernels, kernels_of_pass, parts, parts_of_pass, total};
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

/// Operations a second of all lanes of a chip.
fn lanes(chip: &Figures) -> f64 {
    f64::from(chip.cores) * LANES * clock(chip) * 1e9
}

/// Seconds that a cost's bytes and its operations take at full speed.
fn times(chip: &Figures, cost: &Cost) -> [f64; 2] {
    [cost.bytes / (f64::from(chip.bandwidth) * 1e9), cost.operations / lanes(chip)]
}

/// Seconds that a launch takes beside its work, and the share of the floor that is reached: assumed.
const LAUNCH: f64 = 2e-6;
const REACHED: f64 = 0.6;
/// Rows that a window of drafts has, and tokens that it gives on average: assumed.
const WINDOW: usize = 6;
const TOKENS_A_WINDOW: f64 = 3.0;

/// A round of so many rows.
fn round_of(rows: usize) -> BTreeMap<&'static str, Cost> {
    kernels(&FLASH, rows, POSITIONS)
}

/// Bytes and operations as a table shows them.
fn figures(cost: &Cost) -> String {
    let operations = cost.operations / 1e9;
    let digits = if operations < 0.1 { 4 } else { 1 };
    let megabytes = cost.bytes / 1e6;
    format!("{megabytes:.*} | {operations:.digits$}", if megabytes < 1.0 { 2 } else { 0 })
}

fn parts_table() -> String {
    let mut page = format!(
        "| what is read | by | MB, 1 row | 10^9 operations | MB, {WINDOW} rows | 10^9 operations | MB, {PROMPT} rows | \
         10^9 operations |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    );
    let all = [1, WINDOW, PROMPT].map(|rows| parts(&FLASH, rows));
    for (index, (part, entries, _)) in all[0].iter().enumerate() {
        let costs = all.each_ref().map(|parts| figures(&parts[index].2));
        page += &format!("| {part} | {} | {} |\n", entries.join(", "), costs.join(" | "));
    }
    page
}

/// The largest chip of each generation.
const SHOWN: [&str; 5] = ["Apple M1 Ultra", "Apple M2 Ultra", "Apple M3 Ultra", "Apple M4 Max", "Apple M5 Max"];

fn shown() -> [&'static Figures; 5] {
    SHOWN.map(|name| PUBLISHED.iter().find(|chip| chip.name == name).expect("a published chip"))
}

/// The larger of a cost's two times on a chip, in microseconds, and which it is.
fn micros(chip: &Figures, cost: &Cost) -> String {
    let [bytes, operations] = times(chip, cost);
    let micros = bytes.max(operations) * 1e6;
    let digits = if micros < 10.0 { 2 } else { 0 };
    format!("{micros:.digits$} {}", if bytes > operations { "b" } else { "o" })
}

/// A row a kernel; the times are those of `of`.
fn kernel_rows(step: &Step, columns: &[&BTreeMap<&'static str, Cost>], of: &BTreeMap<&'static str, Cost>) -> String {
    let none = Cost::default();
    let cost = |kernels: &BTreeMap<&'static str, Cost>, entry| figures(kernels.get(entry).unwrap_or(&none));
    let mut page = String::new();
    for (entry, launches) in &step.launches {
        let costs: Vec<String> = columns.iter().map(|kernels| cost(kernels, entry)).collect();
        let times = shown().map(|chip| micros(chip, of.get(entry).unwrap_or(&none)));
        page += &format!("| `{entry}` | {launches} | {} | {} |\n", costs.join(" | "), times.join(" | "));
    }
    let costs: Vec<String> = columns.iter().map(|kernels| figures(&total(kernels))).collect();
    let times = shown().map(|chip| micros(chip, &total(of)));
    page + &format!("| together | {} | {} | {} |\n", step.count(), costs.join(" | "), times.join(" | "))
}

fn kernels_table(round: &Step, pass: &Step) -> String {
    let [one, window, prompt] = [1, WINDOW, PROMPT].map(round_of);
    let chips = SHOWN.map(|name| format!("us, {}", name.trim_start_matches("Apple "))).join(" | ");
    let head = |columns: &str, count: usize| {
        format!("| kernel | launches | {columns} | {chips} |\n|{}\n", " --- |".repeat(2 + count + SHOWN.len()))
    };
    let columns = format!(
        "MB, 1 row | 10^9 operations | MB, {WINDOW} rows | 10^9 operations | MB, {PROMPT} rows | 10^9 operations"
    );
    let of_round = kernel_rows(round, &[&one, &window, &prompt], &one);
    let of_pass = kernels_of_pass(&FLASH);
    format!(
        "Every kernel of a round, its launches together; times of one row, b where bytes and o where operations decide:\n\n{}{}\n\
         Every kernel of a pass of the draft head for one slot, a block of {} rows:\n\n{}{}",
        head(&columns, 6),
        of_round,
        FLASH.dspark_block_size,
        head("MB | 10^9 operations", 2),
        kernel_rows(pass, &[&of_pass], &of_pass)
    )
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
    let [one, window, prompt] = [1, WINDOW, PROMPT].map(|rows| total(&round_of(rows)));
    let of_pass = total(&kernels_of_pass(&FLASH));
    let resident = WeightBytes::plan(&FLASH).resident() as f64;
    for chip in PUBLISHED {
        let floor = |cost: &Cost| times(chip, cost).into_iter().fold(0.0, f64::max);
        let [bytes, operations] = times(chip, &one);
        let overhead = round.count() as f64 * LAUNCH;
        let expected = |cost: &Cost| floor(cost) / REACHED + overhead;
        let drafting = floor(&of_pass) / REACHED + pass.count() as f64 * LAUNCH;
        let drafted = TOKENS_A_WINDOW / (expected(&window) + drafting);
        // What a Mac recommends as the working set of its GPU.
        let holds = f64::from(chip.memory) * f64::from(1 << 30) * 0.75 >= resident;
        page += &format!(
            "| {} | {} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.0} | {} |\n",
            chip.name,
            chip.bandwidth,
            chip.cores,
            lanes(chip) / 1e12,
            bytes * 1e3,
            operations * 1e3,
            overhead * 1e3,
            1.0 / floor(&one),
            1.0 / expected(&one),
            drafted,
            PROMPT as f64 / expected(&prompt),
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
         the draft head for one slot; prompts in pieces\nof {PROMPT} rows.\n",
        FP8.decode,
        MXFP4.decode,
        BF16.decode,
        FP8.row,
        MXFP4.row,
        BF16.row,
        100.0 * REACHED,
        LAUNCH * 1e6,
    );
    let page = [
        assumed,
        parts_table(),
        launches_text(&round, &pass),
        kernels_table(&round, &pass),
        chips_table(&round, &pass),
    ];
    page.join("\n")
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
fn every_kernel_that_is_launched_has_a_cost() {
    let (round, pass) = release_steps();
    for (step, kernels) in [(round, round_of(1)), (pass, kernels_of_pass(&FLASH))] {
        assert_eq!(step.launches.keys().collect::<Vec<_>>(), kernels.keys().collect::<Vec<_>>());
        assert!(kernels.values().all(|cost| cost.bytes > 0.0 && cost.operations > 0.0));
    }
    // What a kernel is read for is part of what it costs.
    let read = parts(&FLASH, 1).iter().fold(0.0, |sum, (_, _, cost)| sum + cost.bytes);
    assert!((0.98..1.0).contains(&(read / total(&round_of(1)).bytes)));
    let read = parts_of_pass(&FLASH).iter().fold(0.0, |sum, (_, _, cost)| sum + cost.bytes);
    assert!((0.98..1.0).contains(&(read / total(&kernels_of_pass(&FLASH)).bytes)));
}

#[test]
fn the_costs_follow_the_sizes() {
    let of = |rows| total(&round_of(rows)).bytes;
    let one = of(1);
    // 8.6 GB of dense weights and 4.5 GB of experts, as the release's sizes have it.
    assert!((13.0e9..13.4e9).contains(&one), "{one}");
    let window = of(WINDOW);
    assert!(window > 1.8 * one && window < 2.2 * one, "{window}");
    // A prompt reads every weight once.
    let prompt = of(PROMPT);
    assert!(prompt > 0.9 * WeightBytes::plan(&FLASH).experts as f64, "{prompt}");
    let count = 1 << 20;
    assert_eq!(FP8.cost(count, 8).operations, (count as f64) * (13.0 + 8.0 * 2.5));
    assert_eq!(FP8.cost(count, 7).operations, (count as f64) * (3.0 * 13.0 + 7.0 * 2.5));
}
