//! The cases of the families: inputs from a seed, and the launch that takes them.

use super::Role::{Bytes, Floats, Input, Work};
use super::{Case, Mirror, Role, Run, Sizes};
use std::rc::Rc;
use tf_device::gpu::{Plain, bytes_of};
use tf_device::{Buffer, Queue};
use tf_kernels::rows::{EntryInfo, Pages, RowInfo, WindowInfo, completed_entries, visible};
use tf_kernels::top_k::{CandidateList, CandidateShape, Candidates};
use tf_kernels::{
    attention, embed, engram, hyper, index_key, index_query, index_score, kv_compress, kv_store, moe_route, quantise,
    rms_norm,
};
use tf_numerics::lanes::Level;

/// Makes a family's cases for a number of rows and the CPU's threads.
pub type Make = fn(Sizes, usize, usize) -> Vec<Case>;

pub const ALL: &[Make] = &[embedding, norms, connections, window_keys, compressed_keys, index, attend, router, memory];

const EPS: f32 = 1e-20;
/// Rows of a verify window.
const WINDOW_ROWS: usize = 6;

/// Numbers from a counter.
pub(super) struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.word() as usize % bound
    }

    /// In `-scale..scale`.
    pub fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| ((self.word() >> 7) as f32 / 8_388_608.0 - 1.0 + 1e-4) * scale).collect()
    }

    /// As `floats`, rounded to bf16.
    pub fn bf16(&mut self, count: usize, scale: f32) -> Vec<f32> {
        self.floats(count, scale).into_iter().map(tf_numerics::bf16::round).collect()
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.word() as u8).collect()
    }

    /// E4M3 codes without a NaN.
    fn fp8(&mut self, count: usize) -> Vec<u8> {
        self.bytes(count).into_iter().map(|code| if code & 0x7f == 0x7f { code ^ 1 } else { code }).collect()
    }

    /// Codes around `middle`.
    fn scales(&mut self, count: usize, middle: u8) -> Vec<u8> {
        (0..count).map(|_| middle + self.below(5) as u8).collect()
    }
}

pub(super) fn bytes<T: Plain>(values: &[T]) -> Vec<u8> {
    bytes_of(values).to_vec()
}

pub(super) fn zeros(count: usize) -> Vec<u8> {
    vec![0; 4 * count]
}

fn case(family: &'static str, rows: usize, buffers: Vec<(Role, Vec<u8>)>, moved_bytes: usize, run: Run) -> Case {
    Case { family, rows, buffers, run, mirror: None, moved_bytes, waits: false }
}

impl Case {
    fn mirrored(self, mirror: Mirror) -> Case {
        Case { mirror: Some(mirror), ..self }
    }
}

/// Rows of windows of sequences of their own, all after `context` positions.
struct Rows {
    rows: Vec<RowInfo>,
    windows: Vec<WindowInfo>,
    slots: usize,
}

fn rows_of(count: usize, context: usize) -> Rows {
    let (mut rows, mut windows) = (Vec::new(), Vec::new());
    while rows.len() < count {
        let slot = windows.len() as u32;
        let row_count = WINDOW_ROWS.min(count - rows.len()) as u32;
        // Odd and even starts.
        let start = (context + windows.len()) as u32;
        windows.push(WindowInfo { slot, start, first_row: rows.len() as u32, row_count });
        rows.extend((start..start + row_count).map(|position| RowInfo { slot, position, window: slot }));
    }
    let slots = windows.len();
    Rows { rows, windows, slots }
}

/// Physical pages of every slot in a mixed order.
struct Table {
    table: Vec<u32>,
    pages_per_slot: usize,
    entries_per_page: usize,
}

impl Table {
    fn new(slots: usize, entries: usize, entries_per_page: usize) -> Table {
        let pages_per_slot = entries.div_ceil(entries_per_page);
        let count = (slots * pages_per_slot) as u32;
        // An odd step through a number of pages: each is met once.
        let step = (1..).map(|i| 2 * i + 1).find(|step| gcd(*step, count) == 1).unwrap_or(1);
        let table = (0..count).map(|i| ((u64::from(i) * u64::from(step) + 3) % u64::from(count)) as u32).collect();
        Table { table, pages_per_slot, entries_per_page }
    }

    fn pages(&self) -> Pages<'_> {
        let Table { table, pages_per_slot, entries_per_page } = self;
        Pages { table, pages_per_slot: *pages_per_slot, entries_per_page: *entries_per_page }
    }

    fn entries(&self) -> usize {
        self.table.len() * self.entries_per_page
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn frequencies(sizes: Sizes) -> Vec<f32> {
    tf_kernels::rope::reference::frequencies(1e4, sizes.rope_dim, None)
}

/// The buffers of a case by name; a case that names another number than it has is a bug.
macro_rules! take {
    ([$($name:pat),* $(,)?] = $buffers:expr) => {
        let [$($name),*] = $buffers else { unreachable!("a case names every buffer it has") };
    };
}

fn embedding(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(1);
    let (columns, streams) = (sizes.hidden, 4);
    let ids: Vec<u32> = (0..rows).map(|_| random.below(sizes.vocabulary) as u32).collect();
    let table: Vec<u16> =
        random.bf16(sizes.vocabulary * columns, 3.0).into_iter().map(tf_numerics::bf16::from_f32).collect();
    let buffers =
        vec![(Input, bytes(&table)), (Floats, zeros(rows * streams * columns)), (Floats, zeros(rows * streams))];
    let moved = rows * columns * (2 + 4 * streams);
    vec![case(
        "embed",
        rows,
        buffers,
        moved,
        Box::new(move |queue, buffers| {
            take!([table, out, mix] = buffers);
            embed::launch(queue, embed::Args { ids: &ids, table, columns, streams, out, mix: Some(mix) })
        }),
    )]
}

fn norms(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(2);
    let columns = sizes.hidden;
    let x = random.bf16(rows * columns, 3.0);
    let weight = random.bf16(columns, 2.0);
    let count = rows * columns;
    let norm = vec![(Input, bytes(&x)), (Input, bytes(&weight)), (Floats, zeros(count)), (Floats, zeros(count))];
    let apart = vec![(Input, bytes(&x)), (Floats, zeros(count))];
    let in_place = vec![(Floats, bytes(&x))];
    vec![
        case(
            "rms_norm",
            rows,
            norm,
            12 * count,
            Box::new(move |queue, buffers| {
                take!([x, weight, normed, quantised] = buffers);
                let (normed, quantised) = (Some(normed), Some(quantised));
                rms_norm::launch(queue, rms_norm::Args { x, weight, rows, columns, eps: EPS, normed, quantised })
            }),
        ),
        case(
            "quantise",
            rows,
            apart,
            8 * count,
            Box::new(move |queue, buffers| {
                take!([x, out] = buffers);
                quantise::launch(queue, quantise::Args { x, out, rows, columns })
            }),
        ),
        case(
            "quantise/in_place",
            rows,
            in_place,
            8 * count,
            Box::new(move |queue, buffers| {
                take!([values] = buffers);
                quantise::launch_in_place(queue, quantise::ArgsInPlace { values, rows, columns })
            }),
        ),
    ]
}

fn connections(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(3);
    let hidden = sizes.hidden;
    let count = rows * hidden;
    let streams = random.bf16(4 * count, 3.0);
    let near = |random: &mut Random, count: usize, middle: f32| -> Vec<f32> {
        random.floats(count, 0.4).into_iter().map(|value| value + middle).collect()
    };
    let mix = near(&mut random, 4 * rows, 0.5);
    let (post, comb) = (near(&mut random, 4 * rows, 1.0), near(&mut random, 16 * rows, 0.25));
    let y = random.bf16(count, 2.0);
    let function = random.floats(24 * 4 * hidden, 0.02);
    let (base, scale, norm) = (random.floats(24, 1.0), random.floats(3, 0.7), random.bf16(hidden, 2.0));
    let enter = vec![
        (Input, bytes(&y)),
        (Floats, bytes(&streams)),
        (Floats, bytes(&mix)),
        (Floats, bytes(&post)),
        (Floats, bytes(&comb)),
        (Input, bytes(&function)),
        (Input, bytes(&base)),
        (Input, bytes(&scale)),
        (Input, bytes(&norm)),
        (Floats, zeros(count)),
        (Floats, zeros(count)),
        (Work, zeros(rows * hyper::scratch_floats(hidden))),
    ];
    let collapse = vec![
        (Input, bytes(&streams)),
        (Input, bytes(&mix)),
        (Input, bytes(&norm)),
        (Floats, zeros(count)),
        (Floats, zeros(count)),
        (Floats, zeros(count)),
    ];
    let tap = vec![(Input, bytes(&streams)), (Floats, zeros(2 * count))];
    let function_bytes = 24 * 4 * hidden * 4;
    vec![
        case("hyper/enter", rows, enter, 4 * count * (1 + 4 + 4 + 2) + function_bytes, launch_enter(rows, hidden))
            .mirrored(Box::new(move |buffers| hyper::mirror::enter(enter_args(buffers, rows, hidden)))),
        case("hyper/collapse", rows, collapse, 4 * count * 7, launch_collapse(rows, hidden))
            .mirrored(Box::new(move |buffers| hyper::mirror::collapse_rows(collapse_args(buffers, rows, hidden)))),
        case("hyper/tap", rows, tap, 4 * count * 6, launch_tap(rows, hidden)),
    ]
}

fn enter_args(buffers: &mut [Buffer], rows: usize, hidden: usize) -> hyper::EnterArgs<'_> {
    take!([y, streams, mix, post, comb, function, base, scale, norm, normed, quantised, scratch] = buffers);
    hyper::EnterArgs {
        y: Some(y),
        streams,
        mix,
        post,
        comb,
        weights: hyper::MixWeights { function, base, scale },
        norm,
        constants: hyper::Constants { iterations: 20, hc_eps: 1e-6, norm_eps: EPS },
        rows,
        hidden,
        normed: Some(normed),
        quantised: Some(quantised),
        scratch,
    }
}

fn launch_enter(rows: usize, hidden: usize) -> Run {
    Box::new(move |queue, buffers| hyper::launch_enter(queue, enter_args(buffers, rows, hidden)))
}

fn collapse_args(buffers: &mut [Buffer], rows: usize, hidden: usize) -> hyper::CollapseArgs<'_> {
    take!([streams, mix, norm, collapsed, normed, quantised] = buffers);
    hyper::CollapseArgs {
        streams,
        mix,
        norm,
        norm_eps: EPS,
        rows,
        hidden,
        collapsed: Some(collapsed),
        normed: Some(normed),
        quantised: Some(quantised),
    }
}

fn launch_collapse(rows: usize, hidden: usize) -> Run {
    Box::new(move |queue, buffers| hyper::launch_collapse(queue, collapse_args(buffers, rows, hidden)))
}

fn launch_tap(rows: usize, hidden: usize) -> Run {
    Box::new(move |queue, buffers| {
        take!([streams, out] = buffers);
        for part in 0..2 {
            hyper::launch_tap(
                queue,
                hyper::TapArgs {
                    streams,
                    rows,
                    hidden,
                    out,
                    out_columns: 2 * hidden,
                    out_offset: part * hidden,
                    quantise: part == 1,
                },
            )?;
        }
        Ok(())
    })
}

fn window_keys(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(4);
    let Sizes { head_dim, window, .. } = sizes;
    let of = rows_of(rows, sizes.context);
    let (record, ring_len) = (kv_store::record_bytes(head_dim), window + WINDOW_ROWS + 1);
    let frequencies = frequencies(sizes);
    let buffers = vec![
        (Input, bytes(&random.bf16(rows * head_dim, 2.0))),
        (Input, bytes(&random.bf16(head_dim, 2.0))),
        (Bytes, vec![0; rows * record]),
        (Bytes, vec![0; of.slots * ring_len * record]),
    ];
    vec![case(
        "kv_store",
        rows,
        buffers,
        rows * (4 * head_dim + 3 * record),
        Box::new(move |queue, buffers| {
            take!([x, norm, records, ring] = buffers);
            let args =
                kv_store::Args { x, norm, eps: EPS, rows: &of.rows, frequencies: &frequencies, head_dim, records };
            kv_store::launch(queue, args)?;
            kv_store::launch_ring(queue, kv_store::RingArgs { records, windows: &of.windows, head_dim, ring, ring_len })
        }),
    )]
}

fn compressed_keys(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let Sizes { head_dim, context, index_head_dim, .. } = sizes;
    // A short context will do: no entry but the new ones is touched.
    let context = context.min(300);
    let mut cases = Vec::new();
    for ratio in [1u32, 2] {
        let mut random = Random(5 + u64::from(ratio));
        let of = rows_of(rows, context);
        let raw_len = WINDOW_ROWS + 2;
        let mut entries = Vec::new();
        completed_entries(&of.rows, ratio, &mut entries);
        let table = Table::new(of.slots, (context + rows + of.slots + WINDOW_ROWS) / ratio as usize + 1, 32);
        let columns = kv_compress::raw_columns(head_dim, ratio);
        let frequencies = frequencies(sizes);
        let record = kv_compress::record_bytes(head_dim);
        let buffers = vec![
            (Input, bytes(&random.bf16(rows * columns, 2.0))),
            (Input, bytes(&random.bf16(head_dim, 2.0))),
            (Floats, bytes(&random.bf16(of.slots * raw_len * 2 * head_dim, 2.0))),
            (Bytes, vec![0; table.entries() * record]),
            (Floats, zeros(rows * head_dim)),
        ];
        let moved = rows * 4 * columns + entries.len() * (record + 4 * head_dim);
        let family = if ratio == 1 { "kv_compress/ratio1" } else { "kv_compress/ratio2" };
        let keys = entries.clone();
        cases.push(case(
            family,
            rows,
            buffers,
            moved,
            Box::new(move |queue, buffers| {
                take!([raw, norm, ring, cache, latents] = buffers);
                kv_compress::launch(
                    queue,
                    kv_compress::Args {
                        raw,
                        rows: &of.rows,
                        windows: &of.windows,
                        entries: &entries,
                        ratio,
                        norm,
                        eps: EPS,
                        frequencies: &frequencies,
                        head_dim,
                        raw_ring: (ratio == 2).then_some(ring),
                        raw_len,
                        cache,
                        pages: table.pages(),
                        latents,
                    },
                )
            }),
        ));
        if ratio == 1 || keys.is_empty() {
            continue;
        }
        cases.push(index_keys(sizes, rows, keys, index_head_dim, context));
    }
    cases
}

fn index_keys(sizes: Sizes, rows: usize, entries: Vec<EntryInfo>, head_dim: usize, context: usize) -> Case {
    let mut random = Random(8);
    let slots = entries.iter().map(|entry| entry.slot as usize + 1).max().unwrap_or(0);
    let table = Table::new(slots, (context + rows + slots + WINDOW_ROWS) / 2 + 1, 32);
    let frequencies = frequencies(sizes);
    let record = index_key::record_bytes(head_dim);
    let buffers = vec![
        (Input, bytes(&random.bf16(entries.len() * head_dim, 2.0))),
        (Input, bytes(&random.bf16(head_dim, 2.0))),
        (Bytes, vec![0; table.entries() * record]),
    ];
    case(
        "index_key",
        rows,
        buffers,
        entries.len() * (4 * head_dim + record),
        Box::new(move |queue, buffers| {
            take!([x, norm, cache] = buffers);
            index_key::launch(
                queue,
                index_key::Args {
                    x,
                    norm,
                    eps: EPS,
                    entries: &entries,
                    ratio: 2,
                    frequencies: &frequencies,
                    head_dim,
                    cache,
                    pages: table.pages(),
                },
            )
        }),
    )
}

/// Pages of index keys with random codes; now and then a scale is large, zero or none.
fn index_pages(random: &mut Random, entries: usize, head_dim: usize) -> Vec<u8> {
    let mut pages = Vec::new();
    for _ in 0..entries / index_key::BLOCK {
        pages.extend(random.bytes(index_key::BLOCK * head_dim / 2));
        let scales = random.scales(index_key::BLOCK * head_dim / 32, 122);
        pages.extend(
            scales
                .into_iter()
                .map(|scale| if random.below(60) > 0 { scale } else { [0, 140, 200, 255][random.below(4)] }),
        );
    }
    pages
}

/// Blocks of entries that each row keeps to, spread over what it sees and with the last one, and how many they are.
fn candidate_blocks(rows: &[RowInfo], ratio: u32, shape: CandidateShape) -> (Vec<u32>, Vec<u32>) {
    let (mut blocks, mut counts) = (Vec::new(), Vec::new());
    for row in rows {
        let seen = visible(row.position, ratio).div_ceil(shape.block_size);
        let mut list: Vec<u32> = (0..shape.blocks_max).map(|i| (i * (seen - 1) / shape.blocks_max) as u32).collect();
        if let Some(last) = list.last_mut() {
            *last = seen as u32 - 1;
        }
        list.dedup();
        counts.push(list.len() as u32);
        list.resize(shape.blocks_max, 0);
        blocks.extend(list);
    }
    (blocks, counts)
}

/// The CPU scores every row: many rows see less.
fn scored_context(sizes: Sizes, rows: usize) -> usize {
    sizes.context.min(1_200_000 / rows)
}

fn index(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(9);
    let Sizes { index_heads: heads, index_head_dim: head_dim, .. } = sizes;
    let of = rows_of(rows, scored_context(sizes, rows));
    let queries = random.bf16(rows * heads * head_dim, 2.0);
    let weights = random.bf16(rows * heads, 1.0);
    let query_rows = of.rows.clone();
    let turned = frequencies(sizes);
    let query = vec![(Floats, bytes(&queries)), (Floats, bytes(&weights))];
    let mut cases = vec![case(
        "index_query",
        rows,
        query,
        8 * rows * heads * head_dim,
        Box::new(move |queue, buffers| {
            take!([queries, weights] = buffers);
            let (rows, frequencies) = (&query_rows[..], &turned[..]);
            index_query::launch(queue, index_query::Args { queries, weights, rows, frequencies, heads, head_dim })
        }),
    )];
    for mode in ["index_score/select", "index_score/publish", "index_score/restrict"] {
        cases.push(selection(sizes, rows, mode, &mut random, (&queries, &weights)));
    }
    cases
}

/// One launch that scores and selects.
struct Select {
    of: Rows,
    ratio: u32,
    table: Table,
    heads: usize,
    head_dim: usize,
    top_k: usize,
    mode: &'static str,
    shape: CandidateShape,
}

impl Select {
    fn args<'a>(&'a self, buffers: &'a mut [Buffer]) -> index_score::SelectArgs<'a> {
        take!([queries, weights, keys, scratch, selected, counts, blocks, block_counts] = buffers);
        let scored = index_score::Scored {
            queries,
            weights,
            rows: &self.of.rows,
            ratio: self.ratio,
            keys,
            pages: self.table.pages(),
            heads: self.heads,
            head_dim: self.head_dim,
        };
        let shape = self.shape;
        let candidates = match self.mode {
            "index_score/select" => Candidates::None,
            "index_score/publish" => Candidates::Publish { shape, blocks, counts: block_counts },
            _ => Candidates::Restrict(CandidateList { shape, blocks, counts: block_counts }),
        };
        index_score::SelectArgs { scored, top_k: self.top_k, candidates, scratch, selected, counts }
    }
}

/// Rows that a tile of scores holds: few, so that there are several, and of many rows as many as the model's.
fn tile_rows(rows: usize) -> usize {
    if rows > 100 { rows } else { rows.min(8) }
}

/// One launch that scores and selects, of queries and their weights.
fn selection(
    sizes: Sizes,
    rows: usize,
    mode: &'static str,
    random: &mut Random,
    (queries, weights): (&[f32], &[f32]),
) -> Case {
    let Sizes { index_heads: heads, index_head_dim: head_dim, selected: top_k, .. } = sizes;
    let shape = CandidateShape { blocks_max: sizes.blocks_max, block_size: sizes.block_size };
    let ratio = if mode == "index_score/select" { 2 } else { 1 };
    let of = rows_of(rows, scored_context(sizes, rows));
    let most = of.rows.iter().map(|row| visible(row.position, ratio)).max().unwrap_or(0);
    // Half of the sequences share the keys of the other half, to keep the cache small.
    let table = Table::new(of.slots.min(2), most, 64);
    let mut shared = table.table.clone();
    while shared.len() < of.slots * table.pages_per_slot {
        shared.extend_from_slice(&table.table);
    }
    let table = Table { table: shared, ..table };
    let entries = of.slots.min(2) * table.pages_per_slot * table.entries_per_page;
    let keys = index_pages(random, entries, head_dim);
    let (blocks, block_counts) = candidate_blocks(&of.rows, ratio, shape);
    let stride = most.next_multiple_of(16);
    let scratch = stride * tile_rows(rows);
    let role = if mode == "index_score/publish" { Bytes } else { Input };
    let candidates = |kept: Vec<u32>| if role == Bytes { vec![0; 4 * kept.len()] } else { bytes(&kept) };
    let buffers = vec![
        (Input, bytes(queries)),
        (Input, bytes(weights)),
        (Input, keys),
        (Work, zeros(scratch)),
        (Bytes, zeros(rows * top_k)),
        (Bytes, zeros(rows)),
        (role, candidates(blocks)),
        (role, candidates(block_counts)),
    ];
    let looked_at = if mode == "index_score/restrict" { shape.blocks_max * shape.block_size } else { most };
    let moved = of.slots * looked_at * index_key::record_bytes(head_dim) + rows * looked_at * 8;
    let select = Rc::new(Select { of, ratio, table, heads, head_dim, top_k, mode, shape });
    let mirrored = Rc::clone(&select);
    let run: Run = Box::new(move |queue, buffers| index_score::launch_select(queue, select.args(buffers)));
    case(mode, rows, buffers, moved, run).mirrored(Box::new(move |buffers| {
        let host = &mut Queue::cpu(1, Level::best());
        index_score::select_in_steps(host, mirrored.args(buffers)).expect("the device takes the same arguments");
    }))
}

/// Entries of each row, spread over what it sees, of every fourth row few, and how many they are.
fn selected_entries(rows: &[RowInfo], selected_max: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut selected, mut counts) = (Vec::new(), Vec::new());
    for (r, row) in rows.iter().enumerate() {
        let seen = visible(row.position, 2);
        let count = if r % 4 == 3 { r % selected_max.max(1) } else { selected_max }.min(seen);
        let mut list: Vec<u32> = (0..count).map(|i| (i * seen / count) as u32).collect();
        list.resize(selected_max, 0);
        selected.extend(list);
        counts.push(count as u32);
    }
    (selected, counts)
}

fn attend(sizes: Sizes, rows: usize, threads: usize) -> Vec<Case> {
    let Sizes { heads, head_dim, window, selected: selected_max, .. } = sizes;
    let context = sizes.context.min(4 * (selected_max + window));
    let record = kv_store::record_bytes(head_dim);
    let ring_len = window + WINDOW_ROWS + 1;
    let mut cases = Vec::new();
    for span in [attention::Span::Causal, attention::Span::Block] {
        let mut random = Random(10);
        let block_rows = if span == attention::Span::Block { WINDOW_ROWS } else { 0 };
        let with_entries = span == attention::Span::Causal;
        let selected_max = if with_entries { selected_max } else { 0 };
        let shape = attention::Shape { heads, head_dim, window, ring_len, selected_max, block_rows };
        let of = rows_of(rows, context);
        let table = Table::new(of.slots, (context + rows + of.slots + WINDOW_ROWS) / 2 + 1, 32);
        let (mut keys, mut cache) = (Vec::new(), Vec::new());
        for _ in 0..rows + of.slots * ring_len {
            keys.extend(random.fp8(head_dim));
            keys.extend(random.scales(head_dim / 32, 117));
        }
        for _ in 0..table.entries() {
            cache.extend(random.bytes(head_dim / 2));
            cache.extend(random.scales(head_dim / 16, 0x28));
        }
        let ring = keys.split_off(rows * record);
        let (selected, counts) = selected_entries(&of.rows, selected_max);
        let scratch = attention::scratch_floats(shape, threads).max(attention::gpu_scratch_floats(shape, rows.min(64)));
        let keys_of_row = selected_max + window + block_rows;
        let moved = rows * heads * head_dim * 8 + of.slots * keys_of_row * record;
        let buffers = vec![
            (Input, bytes(&random.bf16(rows * heads * head_dim, 1.0))),
            (Input, keys),
            (Input, ring),
            (Input, cache),
            (Input, bytes(&selected)),
            (Input, bytes(&counts)),
            (Input, bytes(&random.floats(heads, 1.0))),
            (Work, zeros(scratch)),
            (Floats, zeros(rows * heads * head_dim)),
        ];
        let family = if with_entries { "attention/causal" } else { "attention/block" };
        let attend = Rc::new(Attend { shape, span, of, table, frequencies: frequencies(sizes) });
        let mirror = attend.clone();
        let run: Run = Box::new(move |queue, buffers| attention::launch(queue, attend.args(buffers)));
        let case = case(family, rows, buffers, moved, run);
        cases.push(case.mirrored(Box::new(move |buffers| attention::steps::run(mirror.args(buffers)))));
    }
    cases
}

/// What a launch of attention takes beside its buffers.
struct Attend {
    shape: attention::Shape,
    span: attention::Span,
    of: Rows,
    table: Table,
    frequencies: Vec<f32>,
}

impl Attend {
    fn args<'a>(&'a self, buffers: &'a mut [Buffer]) -> attention::Args<'a> {
        take!([q, records, ring, cache, selected, counts, sinks, scratch, out] = buffers);
        let pages = self.table.pages();
        let compressed = attention::Compressed { cache, pages, selected, counts };
        attention::Args {
            shape: self.shape,
            span: self.span,
            q,
            rows: &self.of.rows,
            windows: &self.of.windows,
            records,
            ring,
            compressed: (self.shape.selected_max > 0).then_some(compressed),
            sinks,
            frequencies: &self.frequencies,
            scratch,
            out,
        }
    }
}

fn router(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(11);
    let (experts, top_k) = (sizes.experts, sizes.experts_of_row);
    let mut logits = random.floats(rows * experts, 4.0);
    // Ties across lanes.
    for row in logits.chunks_mut(experts) {
        (0..experts).step_by(5).for_each(|id| row[id] = 3.0);
    }
    let mut bias = random.floats(experts, 0.5);
    (0..experts).step_by(5).for_each(|id| bias[id] = 0.25);
    let image: Vec<bool> = (0..rows).map(|row| row % 5 == 4).collect();
    let buffers = vec![
        (Input, bytes(&logits)),
        (Input, bytes(&bias)),
        (Input, bytes(&random.floats(experts, 0.5))),
        (Bytes, zeros(rows * top_k)),
        (Floats, zeros(rows * top_k)),
    ];
    vec![case(
        "moe_route",
        rows,
        buffers,
        4 * rows * experts,
        Box::new(move |queue, buffers| {
            take!([logits, bias, bias_image, chosen, weights] = buffers);
            moe_route::launch(
                queue,
                moe_route::Args {
                    logits,
                    bias,
                    bias_image: Some(bias_image),
                    image: &image,
                    rows,
                    experts,
                    top_k,
                    factor: 2.5,
                    chosen,
                    weights,
                },
            )
        }),
    )]
}

fn memory(sizes: Sizes, rows: usize, _threads: usize) -> Vec<Case> {
    let mut random = Random(12);
    let Sizes { hidden, engram_columns: columns, engram_head_dim: head_dim, .. } = sizes;
    let table_rows = 97;
    let codes = random.fp8(table_rows * head_dim);
    let scales = random.scales(table_rows * head_dim / 32, 110);
    let ids: Vec<u32> = (0..rows * columns).map(|_| random.below(table_rows) as u32).collect();
    let image: Vec<bool> = (0..rows).map(|row| row % 5 == 4).collect();
    let gather = vec![(Floats, zeros(ids.len() * head_dim))];
    let gate = vec![
        (Floats, bytes(&random.bf16(rows * 4 * hidden, 3.0))),
        (Input, bytes(&random.bf16(rows * 5 * hidden, 2.0))),
        (Input, bytes(&random.bf16(4 * hidden, 1.5))),
        (Input, bytes(&random.bf16(4 * hidden, 1.5))),
    ];
    vec![
        case(
            "engram/gather",
            rows,
            gather,
            ids.len() * head_dim * 5,
            Box::new(move |queue, buffers| {
                take!([out] = buffers);
                let (codes, scales, ids) = (&codes[..], &scales[..], &ids[..]);
                let args = engram::GatherArgs { codes, scales, ids, columns, head_dim, quantise: true, out };
                engram::launch_gather(queue, args).map_err(|error| match error {
                    engram::EngramError::Launch(error) => error,
                    engram::EngramError::NotANumber { .. } => unreachable!("the table was made without NaN"),
                })
            }),
        ),
        case(
            "engram/gate",
            rows,
            gate,
            rows * hidden * 4 * 13,
            Box::new(move |queue, buffers| {
                take!([streams, kv, q_weight, k_weight] = buffers);
                let (eps, image) = (EPS, &image[..]);
                engram::launch_gate(
                    queue,
                    engram::GateArgs { streams, kv, q_weight, k_weight, eps, image, rows, hidden },
                )
            }),
        ),
    ]
}
