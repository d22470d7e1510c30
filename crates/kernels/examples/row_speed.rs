//! Times the row kernels at the demo's and the release's shapes: `cargo run --release -p tf-kernels --example row_speed [threads]`.
//!
//! Prints microseconds a launch (the best of many), for launches of 1, 6 and 256 rows. Values are arbitrary; the tests judge them.

use std::time::Instant;
use tf_device::{Buffer, Device, Queue};
use tf_kernels::rows::{EntryInfo, Pages, RowInfo, WindowInfo, completed_entries};
use tf_kernels::top_k::Candidates;
use tf_kernels::*;
use tf_numerics::lanes::Level;

struct Model {
    name: &'static str,
    hidden: usize,
    heads: usize,
    head_dim: usize,
    rope_dim: usize,
    window: usize,
    top_k: usize,
    index_heads: usize,
    index_dim: usize,
    experts: usize,
    chosen: usize,
}

const DEMO: Model = Model {
    name: "demo",
    hidden: 160,
    heads: 8,
    head_dim: 64,
    rope_dim: 16,
    window: 64,
    top_k: 64,
    index_heads: 4,
    index_dim: 32,
    experts: 16,
    chosen: 3,
};
const RELEASE: Model = Model {
    name: "release",
    hidden: 5120,
    heads: 64,
    head_dim: 512,
    rope_dim: 64,
    window: 128,
    top_k: 512,
    index_heads: 32,
    index_dim: 128,
    experts: 384,
    chosen: 6,
};

fn filled(count: usize) -> Buffer {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        tf_numerics::bf16::round(state as i32 as f32 / 2147483648.0)
    };
    let values: Vec<f32> = (0..count).map(|_| next()).collect();
    Buffer::from_slice(&Device::cpu(), &values).expect("memory")
}

fn bytes(count: usize) -> Buffer {
    Buffer::zeroed(&Device::cpu(), count).expect("memory")
}

fn time(name: &str, mut launch: impl FnMut()) {
    launch();
    let mut best = f64::INFINITY;
    let start = Instant::now();
    let mut runs = 0;
    while runs < 10 || start.elapsed().as_millis() < 60 {
        let start = Instant::now();
        launch();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    println!("  {name:24} {:10.2} us", best * 1e6);
}

fn measure(model: &Model, rows: usize, start: u32, queue: &mut Queue) {
    let Model { hidden, heads, head_dim, rope_dim, window, top_k, index_heads, index_dim, experts, chosen, .. } =
        *model;
    println!("{}, {rows} rows at position {start}", model.name);
    let infos: Vec<RowInfo> = (0..rows as u32).map(|i| RowInfo { slot: 0, position: start + i, window: 0 }).collect();
    let windows = [WindowInfo { slot: 0, start, first_row: 0, row_count: rows as u32 }];
    let frequencies = vec![0.01f32; rope_dim / 2];
    let wide = filled(rows * hidden);

    let mut streams = filled(rows * 4 * hidden);
    let (mut mix, mut post, mut comb) = (filled(rows * 4), filled(rows * 4), filled(rows * 16));
    let (function, base, scale, norm) = (filled(24 * 4 * hidden), filled(24), filled(3), filled(hidden));
    let (mut normed, mut quantised) = (filled(rows * hidden), filled(rows * hidden));
    let mut scratch = filled(rows * hyper::scratch_floats(hidden));
    time("hyper enter (with y)", || {
        let args = hyper::EnterArgs {
            y: Some(&wide),
            streams: &mut streams,
            mix: &mut mix,
            post: &mut post,
            comb: &mut comb,
            weights: hyper::MixWeights { function: &function, base: &base, scale: &scale },
            norm: &norm,
            constants: hyper::Constants { iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 },
            rows,
            hidden,
            normed: Some(&mut normed),
            quantised: Some(&mut quantised),
            scratch: &mut scratch,
        };
        hyper::launch_enter(queue, args).expect("shapes agree");
    });
    time("rms_norm + QDQ8", || {
        let args = rms_norm::Args {
            x: &wide,
            weight: &norm,
            rows,
            columns: hidden,
            eps: 1e-20,
            normed: None,
            quantised: Some(&mut quantised),
        };
        rms_norm::launch(queue, args).expect("shapes agree");
    });

    let x = filled(rows * 2 * head_dim);
    let key_norm = filled(head_dim);
    let mut records = bytes(rows * kv_store::record_bytes(head_dim));
    time("kv_store", || {
        let args = kv_store::Args {
            x: &x,
            norm: &key_norm,
            eps: 1e-20,
            rows: &infos,
            frequencies: &frequencies,
            head_dim,
            records: &mut records,
        };
        kv_store::launch(queue, args).expect("shapes agree");
    });

    let per_page = 128;
    let entries = (start as usize + rows).next_multiple_of(per_page);
    let table: Vec<u32> = (0..(entries / per_page) as u32).collect();
    let pages = Pages { table: &table, pages_per_slot: table.len(), entries_per_page: per_page };
    let mut cache = bytes(entries * kv_compress::record_bytes(head_dim));
    let mut raw_ring = filled(16 * 2 * head_dim);
    let mut completed: Vec<EntryInfo> = Vec::new();
    completed_entries(&infos, 2, &mut completed);
    let mut latents = filled(rows * head_dim);
    time("kv_compress, ratio 2", || {
        let args = kv_compress::Args {
            raw: &x,
            rows: &infos,
            windows: &windows,
            entries: &completed,
            ratio: 2,
            norm: &key_norm,
            eps: 1e-20,
            frequencies: &frequencies,
            head_dim,
            raw_ring: Some(&mut raw_ring),
            raw_len: 16,
            cache: &mut cache,
            pages,
            latents: &mut latents,
        };
        kv_compress::launch(queue, args).expect("shapes agree");
    });

    completed_entries(&infos, 1, &mut completed);
    let mut keys = bytes(index_key::page_bytes(index_dim, entries));
    let index_norm = filled(index_dim);
    time("index_key, ratio 1", || {
        let args = index_key::Args {
            x: &x,
            norm: &index_norm,
            eps: 1e-20,
            entries: &completed,
            ratio: 1,
            frequencies: &frequencies,
            head_dim: index_dim,
            cache: &mut keys,
            pages,
        };
        index_key::launch(queue, args).expect("shapes agree");
    });
    let (mut queries, mut weights) = (filled(rows * index_heads * index_dim), filled(rows * index_heads));
    time("index_query", || {
        let args = index_query::Args {
            queries: &mut queries,
            weights: &mut weights,
            rows: &infos,
            frequencies: &frequencies,
            heads: index_heads,
            head_dim: index_dim,
        };
        index_query::launch(queue, args).expect("shapes agree");
    });
    let queries = filled(rows * index_heads * index_dim);
    let weights = filled(rows * index_heads);
    // Scores that differ, for the selection: keys are arbitrary codes.
    for (i, byte) in keys.u8_mut().iter_mut().enumerate() {
        *byte = (i * 37 + i / 251) as u8 & 0x7f;
    }
    let stride = entries.next_multiple_of(16);
    let mut scores = filled(rows.min(64) * stride);
    let scored = index_score::Scored {
        queries: &queries,
        weights: &weights,
        rows: &infos,
        ratio: 1,
        keys: &keys,
        pages,
        heads: index_heads,
        head_dim: index_dim,
    };
    let zeros = vec![0u32; rows * top_k];
    let mut selected = Buffer::from_slice(&Device::cpu(), &zeros).expect("memory");
    let mut counts = Buffer::from_slice(&Device::cpu(), &zeros[..rows]).expect("memory");
    time("index scores of a tile", || {
        let tile = 0..rows.min(64);
        let args = index_score::Args { scored, tile, skip_visible: 0, restrict: None, scores: &mut scores, stride };
        index_score::launch(queue, args).expect("shapes agree");
    });
    time("index scores and top_k", || {
        let args = index_score::SelectArgs {
            scored,
            top_k,
            candidates: Candidates::None,
            scratch: &mut scores,
            selected: &mut selected,
            counts: &mut counts,
        };
        index_score::launch_select(queue, args).expect("shapes agree");
    });

    let ring_len = window + 6;
    let ring = bytes(ring_len * kv_store::record_bytes(head_dim));
    let q = filled(rows * heads * head_dim);
    let sinks = filled(heads);
    let mut out = filled(rows * heads * head_dim);
    for compressed in [false, true] {
        let shape = attention::Shape {
            heads,
            head_dim,
            window,
            ring_len,
            selected_max: if compressed { top_k } else { 0 },
            block_rows: 0,
        };
        let threads = queue.threads();
        let mut scratch = filled(attention::scratch_floats(shape, threads));
        time(if compressed { "attention, compressed" } else { "attention, window" }, || {
            let args = attention::Args {
                shape,
                span: attention::Span::Causal,
                q: &q,
                rows: &infos,
                windows: &windows,
                records: &records,
                ring: &ring,
                compressed: compressed.then_some(attention::Compressed {
                    cache: &cache,
                    pages,
                    selected: &selected,
                    counts: &counts,
                }),
                sinks: &sinks,
                frequencies: &frequencies,
                scratch: &mut scratch,
                out: &mut out,
            };
            attention::launch(queue, args).expect("shapes agree");
        });
    }

    let (logits, bias) = (filled(rows * experts), filled(experts));
    let (mut ids, mut expert_weights) = (bytes(rows * chosen * 4), filled(rows * chosen));
    time("moe_route", || {
        let args = moe_route::Args {
            logits: &logits,
            bias: &bias,
            bias_image: None,
            image: &[],
            rows,
            experts,
            top_k: chosen,
            factor: 1.5,
            chosen: &mut ids,
            weights: &mut expert_weights,
        };
        moe_route::launch(queue, args).expect("shapes agree");
    });
    let kv = filled(rows * 5 * hidden);
    let (q_weight, k_weight) = (filled(4 * hidden), filled(4 * hidden));
    time("engram gate", || {
        let args = engram::GateArgs {
            streams: &mut streams,
            kv: &kv,
            q_weight: &q_weight,
            k_weight: &k_weight,
            eps: 1e-20,
            image: &[],
            rows,
            hidden,
        };
        engram::launch_gate(queue, args).expect("shapes agree");
    });
}

fn draft(vocabulary: usize, rank: usize, hidden: usize, queue: &mut Queue) {
    let base = filled(5 * vocabulary);
    let hidden_rows = filled(5 * hidden);
    let (embed, head) = (bytes(vocabulary * rank * 2), bytes(draft_head::pack::packed_len(vocabulary, rank) * 2));
    let proj = filled(hidden + rank);
    let mut logits = filled(vocabulary);
    let (mut tokens, mut confidence) = ([0; 5], [0.0; 5]);
    time("draft_head, 5 steps", || {
        let args = draft_head::Args {
            base: &base,
            hidden_rows: &hidden_rows,
            anchors: &[1],
            embed: &embed,
            head: &head,
            proj: &proj,
            vocabulary,
            rank,
            hidden,
            block: 5,
            steps: 5,
            sampled: &|_| None,
            logits: &mut logits,
            tokens: &mut tokens,
            confidence: &mut confidence,
            scratch: &mut tf_kernels::sample::Scratch::default(),
        };
        draft_head::launch(queue, args).expect("shapes agree");
    });
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(2);
    let mut queue = Queue::cpu(threads, Level::best());
    println!("{threads} threads, {}", Level::best());
    for (rows, start) in [(1, 300), (1, 4000), (6, 1000), (256, 1000)] {
        measure(&DEMO, rows, start, &mut queue);
    }
    draft(4096, 32, 160, &mut queue);
    for (rows, start) in [(1, 2000), (6, 2000)] {
        measure(&RELEASE, rows, start, &mut queue);
    }
    draft(129280, 256, 5120, &mut queue);
}
