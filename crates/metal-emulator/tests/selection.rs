//! The Metal kernels that choose entries, as `kernels.rs` says: index keys, scores and the selection.

mod common;

use common::*;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::rows::{EntryInfo, Pages, RowInfo};
use tf_kernels::{index_key, index_query, index_score, rms_norm, top_k};

#[test]
fn indexer() {
    if !ready("indexer") {
        return;
    }
    let source = include_str!("../../kernels/src/index_key/kernel.metal");
    let (head_dim, heads, ratio, rope_dim, eps) = (64, 11, 2u32, 16, 1e-20f32);
    let entry_count = 44;
    let frequencies = tf_kernels::rope::reference::frequencies(1e4, rope_dim, None);
    let table = [3u32, 0, 5, 1, 4, 2];
    let pages = Pages { table: &table, pages_per_slot: 3, entries_per_page: 16 };
    let mut values = Values::new(7);
    let entries: Vec<EntryInfo> =
        (0..2 * entry_count).map(|i| EntryInfo { slot: i / entry_count, entry: i % entry_count, row: 0 }).collect();
    let (x, norm) = (values.bf16(entries.len() * head_dim, 2.0), values.bf16(head_dim, 2.0));
    let cache_before = vec![0xffu8; 6 * index_key::page_bytes(head_dim, 16)];
    let mut keys = device(&cache_before);
    let args = index_key::Args {
        x: &device(&x),
        norm: &device(&norm),
        eps,
        entries: &entries,
        ratio,
        frequencies: &frequencies,
        head_dim,
        cache: &mut keys,
        pages,
    };
    index_key::launch(&mut queue(), args).unwrap();
    let metal_keys = |program: &_, simdgroups| {
        let sizes = [entries.len() as u32, ratio, head_dim as u32, rope_dim as u32, 3, 16, eps.to_bits()];
        let (list, cache) = (input(&entry_words(&entries)), in_place(&cache_before));
        let mut args = [input(&x), input(&norm), list, input(&table), input(&frequencies), cache, shape(&sizes)];
        run(program, "index_key", entries.len(), simdgroups, &mut args).map(|()| outputs(&args, &[5]))
    };
    let edits = [
        ("swapped nibbles", "uchar(code | high << 4)", "uchar(high | code << 4)"),
        ("wrong place in the block", "place = inside % 16u", "place = (inside + 1u) % 16u"),
        ("scale a step too small", "(bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u)", "(bits >> 23)"),
        ("page of slot 0", "table[slot * shape.pages_per_slot", "table[0u * shape.pages_per_slot"),
    ];
    prove("index_key", source, &[keys.u8().to_vec()], &edits, metal_keys);

    let source = include_str!("../../kernels/src/index_score/kernel.metal");
    let (rows, _) = windows(&[(1, 40, 3), (0, 85, 2)]);
    let queries = values.bf16(rows.len() * heads * head_dim, 2.0);
    let weights = values.f32(rows.len() * heads, 0.5);
    let candidates = top_k::CandidateShape { blocks_max: 4, block_size: 5 };
    let blocks: Vec<u32> = [[0u32, 1, 2, 4], [9, 9, 9, 9], [0, 2, 3, 4], [1, 3, 5, 8], [0, 4, 6, 8]].concat();
    let block_counts = [4u32, top_k::ALL_BLOCKS, 4, 4, 4];
    let stride = 48;
    for restricted in [false, true] {
        let (block_buffer, count_buffer) = (device(&blocks), device(&block_counts));
        let list = top_k::CandidateList { shape: candidates, blocks: &block_buffer, counts: &count_buffer };
        let (query_buffer, weight_buffer) = (device(&queries), device(&weights));
        let mut scores = device(&vec![0f32; rows.len() * stride]);
        let args = index_score::Args {
            scored: index_score::Scored {
                queries: &query_buffer,
                weights: &weight_buffer,
                rows: &rows,
                ratio,
                keys: &keys,
                pages,
                heads,
                head_dim,
            },
            tile: 0..rows.len(),
            skip_visible: 0,
            restrict: restricted.then_some(list),
            scores: &mut scores,
            stride,
        };
        index_score::launch(&mut queue(), args).unwrap();
        // Entries that a row doesn't see stay as they were.
        let mut wanted = vec![f32::from_bits(0x7fc0_dead); rows.len() * stride];
        for (r, row) in rows.iter().enumerate() {
            let seen = tf_kernels::rows::visible(row.position, ratio);
            for j in 0..stride {
                let block = blocks.get(r * 4 + j / 5).filter(|_| j / 5 < 4);
                let entry = match (restricted && block_counts[r] != top_k::ALL_BLOCKS, block) {
                    (false, _) => j,
                    (true, Some(&block)) => block as usize * 5 + j % 5,
                    (true, None) => usize::MAX,
                };
                if entry < seen {
                    wanted[r * stride + j] = scores.f32()[r * stride + j];
                }
            }
        }
        let metal = |program: &_, simdgroups| {
            let sizes = [0, rows.len() as u32, heads as u32, head_dim as u32, ratio, 3, 16, 0, stride as u32];
            let mut args = [
                input(&queries),
                input(&weights),
                input(&row_words(&rows)),
                input(keys.u8()),
                input(&table),
                input(&blocks),
                input(&block_counts),
                output(rows.len() * stride),
                shape(&[&sizes[..], &[u32::from(restricted), 4, 5, stride as u32]].concat()),
            ];
            run(program, "index_score", (rows.len() * stride).div_ceil(32), simdgroups, &mut args)
                .map(|()| outputs(&args, &[7]))
        };
        let edits = [
            ("scores beyond what a row sees", "if (entry >= seen) return;", ""),
            ("missing rectifier", "max_second(dots[h], 0.0f)", "dots[h]"),
            ("wrong nibble", ">> 4u * (c % 8u) & 15u", ">> 4u * (c % 8u ^ 1u) & 15u"),
            ("stale scale", "scales[16u * (c / 32u)]", "scales[0]"),
            ("dropped last head", "first < shape.heads; first += TILE", "first + TILE < shape.heads; first += TILE"),
            (
                "heads in another order",
                "for (uint h = 0u; h < here; h++) {\n            total",
                "for (uint g = 0u; g < here; g++) {\n            const uint h = here - 1u - g;\n            total",
            ),
            ("candidates ignored", "shape.restricted != 0u &&", "shape.restricted == 2u &&"),
        ];
        let edits = if restricted { &edits[6..] } else { &edits[..6] };
        prove("index_score", source, &[bytes(&wanted).to_vec()], edits, metal);
        if !restricted {
            check_scores(&rows, &queries, &weights, &x, &norm, &frequencies, &wanted, (heads, head_dim, ratio, stride));
        }
    }
}

/// Scores against the definition, with the keys of the definition rounded as the release rounds them.
fn check_scores(
    rows: &[RowInfo],
    queries: &[f32],
    weights: &[f32],
    x: &[f32],
    norm: &[f32],
    frequencies: &[f32],
    scores: &[f32],
    (heads, head_dim, ratio, stride): (usize, usize, u32, usize),
) {
    let mut far = 0;
    for (r, row) in rows.iter().enumerate() {
        let seen = (row.position as usize + 1) / ratio as usize;
        let keys: Vec<f64> = (0..seen)
            .flat_map(|entry| {
                let at = (row.slot as usize * 44 + entry) * head_dim;
                let key = wide(&x[at..at + head_dim]);
                let mut key = rms_norm::reference::rms_norm(&key, &wide(norm), 1e-20, Numerics::Release);
                let position = entry as u32 * ratio;
                tf_kernels::rope::reference::rotate(&mut key, position, frequencies, Numerics::Release);
                Numerics::Release.qdq4_e8m0(&key, head_dim)
            })
            .collect();
        let of_row = |values: &[f32], width: usize| wide(&values[r * width..(r + 1) * width]);
        let (query, weight) = (of_row(queries, heads * head_dim), of_row(weights, heads));
        let wanted = index_score::reference::index_score(&query, &weight, &keys, head_dim);
        for (j, wanted) in wanted.iter().enumerate() {
            let key = &keys[j * head_dim..(j + 1) * head_dim];
            let magnitude: f64 = query
                .chunks(head_dim)
                .zip(&weight)
                .map(|(query, w)| w.abs() * query.iter().zip(key).map(|(q, k)| (q * k).abs()).sum::<f64>())
                .sum();
            let bound = F32 * (head_dim + heads) as f64 * magnitude;
            // A key whose bf16 rounding fell the other way in float32 may be off by a step: few may.
            far += usize::from((f64::from(scores[r * stride + j]) - wanted).abs() > bound);
        }
    }
    assert!(far <= 2, "{far} scores are beyond their bound");
}

#[test]
fn selection() {
    if !ready("selection") {
        return;
    }
    let source = include_str!("../../kernels/src/top_k/kernel.metal");
    let (stride, k) = (112usize, 10usize);
    let candidates = top_k::CandidateShape { blocks_max: 3, block_size: 6 };
    let mut values = Values::new(8);
    let seen = [111u32, 100, 9, 70, 96];
    let rows: Vec<RowInfo> = seen.iter().map(|&n| RowInfo { slot: 0, position: n - 1, window: 0 }).collect();
    let mut scores = values.f32(rows.len() * stride, 3.0);
    // Many ties across lanes and steps, both zeros, and what is never kept.
    for j in 0..stride {
        scores[stride + j] = [0.0, -0.0, 1.0, -1.0, -2.0, -0.5, -0.25, -3.0][values.below(8) as usize];
        scores[3 * stride + j] = if j % 9 == 0 { 1.0 + j as f32 } else { [f32::NAN, f32::NEG_INFINITY][j % 2] };
    }
    scores[4 * stride + 50] = f32::INFINITY;
    for mode in 0..3u32 {
        let blocks_before = [[0u32, 7, 15], [1, 2, 16], [0, 1, 2], [0, 5, 11], [3, 9, 15]].concat();
        let counts_before = [3u32, 3, top_k::ALL_BLOCKS, 3, top_k::ALL_BLOCKS];
        let (mut blocks, mut block_counts) = (device(&blocks_before), device(&counts_before));
        let (mut selected, mut counts) = (device(&vec![0x7fc0_dead_u32; rows.len() * k]), device(&[0u32; 5]));
        let args = top_k::Args {
            scores: &device(&scores),
            stride,
            rows: &rows,
            tile: 0..rows.len(),
            ratio: 1,
            top_k: k,
            candidates: match mode {
                0 => top_k::Candidates::None,
                1 => top_k::Candidates::Publish { shape: candidates, blocks: &mut blocks, counts: &mut block_counts },
                _ => top_k::Candidates::Restrict(top_k::CandidateList {
                    shape: candidates,
                    blocks: &blocks,
                    counts: &block_counts,
                }),
            },
            selected: &mut selected,
            counts: &mut counts,
        };
        top_k::launch(&mut queue(), args).unwrap();
        let metal = |program: &_, simdgroups| {
            let sizes = [0, rows.len() as u32, stride as u32, 1, k as u32, mode, 3, 6];
            let mut args = [
                input(&scores),
                input(&row_words(&rows)),
                output(rows.len() * k),
                output(rows.len()),
                in_place(&blocks_before),
                in_place(&counts_before),
                input(&blocks_before),
                input(&counts_before),
                shape(&sizes),
            ];
            run(program, "top_k", rows.len(), simdgroups, &mut args).map(|()| outputs(&args, &[2, 3, 4, 5]))
        };
        // Behind a row's count nothing is promised on the CPU; both leave it as it was.
        let wanted: Vec<Vec<u8>> =
            [&selected, &counts, &blocks, &block_counts].iter().map(|buffer| buffer.u8().to_vec()).collect();
        let edits = [
            (
                "tie to the larger index",
                "equal_seen + simd_prefix_exclusive_sum(is_equal) < equal_left",
                "equal_seen + simd_prefix_exclusive_sum(is_equal) >= equal_left",
            ),
            ("one key too few", "wanted - simd_sum(above)", "wanted - simd_sum(above) - 1u"),
            ("NaN kept", "least = 0x00800000u;", "least = 0u;"),
            (
                "equal ones of the first step alone",
                "equal_seen += simd_sum(is_equal);",
                "equal_seen = simd_sum(is_equal);",
            ),
            (
                "newest block not kept",
                "if ((i + 1u) * block_size >= n) return order_key(INFINITY);",
                "if ((i + 1u) * block_size >= n) return 0x00800000u;",
            ),
            ("dropped barrier", "        simdgroup_barrier(mem_flags::mem_device);\n", ""),
            ("tail of the last block", "entries -= min(end > seen ? end - seen : 0u, shape.block_size);", ""),
        ];
        let edits = match mode {
            0 => &edits[..4],
            1 => &edits[4..5],
            _ => &edits[5..],
        };
        prove("top_k", source, &wanted, edits, metal);
        if mode == 0 {
            for (r, row) in scores.chunks(stride).enumerate() {
                let row = &row[..seen[r] as usize];
                let all: Vec<u32> = (0..seen[r]).collect();
                // The definition orders NaN and the zeros otherwise; those never tie here but for the zeros of row 1.
                let known: Vec<f64> =
                    row.iter().map(|&s| if s.is_nan() { f64::NEG_INFINITY } else { f64::from(s + 0.0) }).collect();
                let wanted = if row.len() <= k { all } else { top_k::reference::top_k(&known, k) };
                let count = counts.u32()[r] as usize;
                assert_eq!(selected.u32()[r * k..][..count], wanted, "row {r}");
            }
        }
    }
}

#[test]
fn index_queries() {
    if !ready("index_queries") {
        return;
    }
    let source = include_str!("../../kernels/src/index_query/kernel.metal");
    let (heads, head_dim, rope_dim) = (3, 96, 16);
    let mut values = Values::new(13);
    let (rows, _) = windows(&[(0, 7, 2), (1, 90_000, 1)]);
    let frequencies = tf_kernels::rope::reference::frequencies(1e4, rope_dim, None);
    let (queries, weights) = (values.bf16(rows.len() * heads * head_dim, 2.0), values.bf16(rows.len() * heads, 1.0));
    let mut of = (device(&queries), device(&weights));
    let args = index_query::Args {
        queries: &mut of.0,
        weights: &mut of.1,
        rows: &rows,
        frequencies: &frequencies,
        heads,
        head_dim,
    };
    index_query::launch(&mut queue(), args).unwrap();
    let factor = (1.0 / ((heads * head_dim) as f64).sqrt()) as f32;
    let edits = [
        ("position of the row index", "head_dim, rows[row].position, frequencies", "head_dim, row, frequencies"),
        ("scale a step too small", "(bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u)", "(bits >> 23)"),
        ("unrounded weights", "bf16_round(weights[item] * shape.factor)", "weights[item] * shape.factor"),
    ];
    let wanted = [bytes(of.0.f32()).to_vec(), bytes(of.1.f32()).to_vec()];
    prove("index_query", source, &wanted, &edits, |program, simdgroups| {
        let sizes = [rows.len() as u32, heads as u32, head_dim as u32, rope_dim as u32, factor.to_bits()];
        let list = input(&row_words(&rows));
        let mut args = [in_place(&queries), in_place(&weights), list, input(&frequencies), shape(&sizes)];
        run(program, "index_query", rows.len() * heads, simdgroups, &mut args).map(|()| outputs(&args, &[0, 1]))
    });
}
