//! The Metal attention, as `kernels.rs` says.

mod common;

use common::*;
use tf_kernels::attention::{Args, Compressed, Shape, Span, launch, reference, scratch_floats};
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::reference_formats as formats;
use tf_kernels::rows::Pages;
use tf_kernels::{kv_compress, kv_store};
use tf_metal_emulator::{Argument, Launch};

#[test]
fn attention() {
    if !ready("attention") {
        return;
    }
    let source = include_str!("../../kernels/src/attention/kernel.metal");
    let (heads, head_dim, rope_dim) = (3usize, 64usize, 16);
    let mut values = Values::new(14);
    let frequencies = tf_kernels::rope::reference::frequencies(1e4, rope_dim, None);
    let table = [3u32, 0, 5, 1, 4, 2];
    let pages = Pages { table: &table, pages_per_slot: 3, entries_per_page: 4 };
    let (key_bytes, entry_bytes) = (kv_store::record_bytes(head_dim), kv_compress::record_bytes(head_dim));
    let ring_len = 16;
    let mut keys = |count: usize| -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            bytes.extend((0..head_dim).map(|_| values.below(127) as u8 | (values.below(2) as u8 * 128)));
            bytes.extend((0..head_dim / 32).map(|_| 117 + values.below(3) as u8));
        }
        bytes
    };
    let (records, ring) = (keys(8), keys(2 * ring_len));
    let mut cache = Vec::new();
    for _ in 0..6 * 4 {
        cache.extend((0..head_dim / 2).map(|_| values.below(256) as u8));
        cache.extend((0..head_dim / 16).map(|_| 0x28 + values.below(16) as u8));
    }
    let (rows, infos) = windows(&[(1, 9, 3), (0, 2, 5)]);
    let q = values.bf16(rows.len() * heads * head_dim, 1.0);
    let sinks = values.f32(heads, 1.0);
    let counts = [4u32, 3, 5, 0, 1, 1, 2, 2];
    let selected: Vec<u32> = (0..rows.len() as u32 * 5).map(|i| 2 * (i % 5) + i / 5 % 2).collect();

    for span in [Span::Causal, Span::Block] {
        let shape_of = Shape {
            heads,
            head_dim,
            window: 6,
            ring_len,
            selected_max: 5,
            block_rows: if span == Span::Block { 5 } else { 0 },
        };
        let (cache_buffer, selected_buffer, count_buffer) = (device(&cache), device(&selected), device(&counts));
        let mut scratch = device(&vec![0f32; scratch_floats(shape_of, 1)]);
        let mut out = device(&vec![0f32; q.len()]);
        let compressed = Compressed { cache: &cache_buffer, pages, selected: &selected_buffer, counts: &count_buffer };
        let args = Args {
            shape: shape_of,
            span,
            q: &device(&q),
            rows: &rows,
            windows: &infos,
            records: &device(&records),
            ring: &device(&ring),
            compressed: Some(compressed),
            sinks: &device(&sinks),
            frequencies: &frequencies,
            scratch: &mut scratch,
            out: &mut out,
        };
        launch(&mut queue(), args).unwrap();

        let scale = 1.0 / (head_dim as f32).sqrt();
        let metal = |program: &tf_metal_emulator::Program, simdgroups: u32| -> Result<Vec<Vec<u8>>, String> {
            let is_block = u32::from(span == Span::Block);
            let sizes = [rows.len() as u32, heads as u32, head_dim as u32, rope_dim as u32, 6, ring_len as u32, 5];
            let sizes = [&sizes[..], &[is_block, 3, 4, scale.to_bits()]].concat();
            let (row_list, window_list) = (row_words(&rows), window_words(&infos));
            let mut out = bytes(&vec![0x7fc0_dead_u32; q.len()]).to_vec();
            let arguments = vec![
                read(&q),
                read(&row_list),
                read(&window_list),
                read(&records),
                read(&ring),
                read(&cache),
                read(&table),
                read(&selected),
                read(&counts),
                read(&sinks),
                read(&frequencies),
                Argument::Write(&mut out),
                read(&sizes),
            ];
            let mut launch = Launch {
                kernel: "attention",
                arguments,
                grid: [(rows.len() * heads) as u32, 1, 1],
                threads: [32 * simdgroups, 1, 1],
                threadgroup: Vec::new(),
            };
            let report = program.run(&mut launch).map_err(|error| error.to_string())?;
            // What the header says.
            assert!(report.threadgroup_bytes <= 12_304, "{} bytes", report.threadgroup_bytes);
            Ok(vec![out])
        };
        let edits = [
            (
                "dropped barrier",
                "1.0f);\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n\n    for (uint j",
                "1.0f);\n    }\n    for (uint j",
            ),
            ("wrong ring slot", "position % shape.ring_len", "(position + 1u) % shape.ring_len"),
            (
                "window one too long",
                "reach > shape.window ? reach - shape.window : 0u",
                "reach > shape.window ? reach - shape.window - 1u : 0u",
            ),
            ("missing sink", "denominator[0] = sum + exp_own(sinks[head] - most);", "denominator[0] = sum;"),
            ("unrounded probabilities", "fma(bf16_round(scores[j]),", "fma(scores[j],"),
            ("output not turned back", "shape.rope_dim, -1.0f)", "shape.rope_dim, 1.0f)"),
            ("swapped nibbles", "c % 32u < 16u ? byte & 15u : byte >> 4", "c % 32u >= 16u ? byte & 15u : byte >> 4"),
            (
                "missing mask of the future",
                "shape.is_block != 0u ? start + windows[window].row_count : position + 1u",
                "start + windows[window].row_count",
            ),
            ("stale scale", "record[head_dim / 2u + c / 16u]", "record[head_dim / 2u + c / 32u]"),
        ];
        let edits = if span == Span::Causal { &edits[..] } else { &edits[1..3] };
        prove("attention", source, &[bytes(out.f32()).to_vec()], edits, metal);

        for (r, row) in rows.iter().enumerate() {
            let window = infos[row.window as usize];
            let key = |position: u32| -> Vec<f64> {
                let record = match position.checked_sub(window.start) {
                    Some(i) => &records[(window.first_row + i) as usize * key_bytes..][..key_bytes],
                    None => {
                        &ring[(window.slot as usize * ring_len + position as usize % ring_len) * key_bytes..]
                            [..key_bytes]
                    }
                };
                let value =
                    |c: usize| formats::e4m3_decode(record[c]) * formats::e8m0_decode(record[head_dim + c / 32]);
                (0..head_dim).map(value).collect()
            };
            let entry = |id: u32| -> Vec<f64> {
                let record = &cache[pages.index(row.slot, id as usize) * entry_bytes..][..entry_bytes];
                let value = |c: usize| {
                    let byte = record[16 * (c / 32) + c % 16];
                    let code = if c % 32 < 16 { byte & 15 } else { byte >> 4 };
                    formats::e2m1_decode(code) * formats::e4m3_decode(record[head_dim / 2 + c / 16])
                };
                (0..head_dim).map(value).collect()
            };
            let (start, end) = match span {
                Span::Causal => ((row.position + 1).saturating_sub(6), row.position + 1),
                Span::Block => (window.start.saturating_sub(6), window.start + window.row_count),
            };
            let mut keys: Vec<Vec<f64>> =
                selected[r * 5..r * 5 + counts[r] as usize].iter().map(|&id| entry(id)).collect();
            keys.extend((start..end).map(key));
            let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
            let mut query = wide(&q[r * heads * head_dim..(r + 1) * heads * head_dim]);
            for head in query.chunks_mut(head_dim) {
                tf_kernels::rope::reference::rotate(head, row.position, &frequencies, Numerics::Release);
            }
            let exact = reference::attention(&query, &keys, &wide(&sinks), row.position, &frequencies, Numerics::Exact);
            // Probabilities are rounded to bf16 and weigh values up to the largest; then two roundings of the output, whose
            // magnitude a turn may raise by the root of 2.
            let largest = keys.iter().flat_map(|key| key.iter()).fold(0f64, |max, v| max.max(v.abs()));
            let got = &out.f32()[r * heads * head_dim..(r + 1) * heads * head_dim];
            assert_close("attention", got, &exact, |_| largest * 1.5 * 3.0 * BF16);
        }
    }
}
