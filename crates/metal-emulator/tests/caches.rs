//! The Metal kernels of the caches, as `kernels.rs` says: window entries and the compressor.

mod common;

use common::*;
use tf_device::Buffer;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::rows::{Pages, completed_entries};
use tf_kernels::{kv_compress, kv_store};

#[test]
fn window_entries() {
    if !ready("window_entries") {
        return;
    }
    let source = include_str!("../../kernels/src/kv_store/kernel.metal");
    let (head_dim, rope_dim, ring_len, eps) = (96, 16, 5, 1e-20f32);
    let mut values = Values::new(5);
    let (rows, windows) = windows(&[(1, 3, 4), (0, 70_001, 8)]);
    let (x, norm) = (values.bf16(rows.len() * head_dim, 3.0), values.bf16(head_dim, 2.0));
    let frequencies = tf_kernels::rope::reference::frequencies(1e4, rope_dim, None);
    let record = kv_store::record_bytes(head_dim);
    let mut records = device(&vec![0u8; rows.len() * record]);
    let args = kv_store::Args {
        x: &device(&x),
        norm: &device(&norm),
        eps,
        rows: &rows,
        frequencies: &frequencies,
        head_dim,
        records: &mut records,
    };
    kv_store::launch(&mut queue(), args).unwrap();
    let before: Vec<u8> = (0..2 * ring_len * record).map(|i| i as u8 | 1).collect();
    let mut ring = device(&before);
    let args = kv_store::RingArgs { records: &records, windows: &windows, head_dim, ring: &mut ring, ring_len };
    kv_store::launch_ring(&mut queue(), args).unwrap();
    let metal = |program: &_, simdgroups| -> Result<Vec<Vec<u8>>, String> {
        let shape = shape(&[rows.len() as u32, head_dim as u32, rope_dim as u32, ring_len as u32, eps.to_bits()]);
        let row_list = input(&row_words(&rows));
        let out = in_place(&vec![0xa5u8; rows.len() * record]);
        let mut store = [input(&x), input(&norm), row_list.clone(), input(&frequencies), out, shape.clone()];
        run(program, "kv_store", rows.len(), simdgroups, &mut store)?;
        let records = bytes_of(&store[4]).to_vec();
        let mut keep = [input(&records), in_place(&before), row_list, input(&window_words(&windows)), shape];
        run(program, "kv_store_ring", rows.len(), simdgroups, &mut keep)?;
        Ok(vec![records, bytes_of(&keep[1]).to_vec()])
    };
    let wanted = [records.u8().to_vec(), ring.u8().to_vec()];
    let edits = [
        ("wrong ring slot", "rows[row].position % shape.ring_len) * bytes", "(row + 1u) % shape.ring_len) * bytes"),
        ("rows that meet in a slot", "> shape.ring_len) return;", "> 2u * shape.ring_len) return;"),
        (
            "scale of another block",
            "record[head_dim + block] = uchar(scale)",
            "record[head_dim + block] = uchar(scale + 1u)",
        ),
        ("position of the row index", "head_dim, rows[row].position, frequencies", "head_dim, row, frequencies"),
        ("no rotation", "value = rope_turn(value, c, head_dim, rows[row].position, frequencies, shape.rope_dim);", ""),
        ("slot ignored", "rows[row].slot * shape.ring_len", "0u * shape.ring_len"),
    ];
    prove("kv_store", source, &wanted, &edits, metal);
    let positions: Vec<u32> = rows.iter().map(|row| row.position).collect();
    let release = kv_store::reference::window_entries(
        &wide(&x),
        &wide(&norm),
        eps.into(),
        &positions,
        &frequencies,
        Numerics::Exact,
    );
    for (r, wanted) in release.chunks(head_dim).enumerate() {
        let bytes = &wanted_record(&records, r, record);
        for (block, wanted) in wanted.chunks(32).enumerate() {
            let scale = tf_numerics::fp8::decode_e8m0(bytes[head_dim + block]);
            let got: Vec<f32> = (0..32).map(|i| tf_numerics::fp8::decode_e4m3(bytes[32 * block + i]) * scale).collect();
            // bf16 twice and E4M3 once, whose step in a block is at most 1/16 of its largest value.
            let largest = wanted.iter().fold(0f64, |max, v| max.max(v.abs())) * 1.02;
            assert_close("record", &got, wanted, |_| largest * (1.0 / 16.0 + 3.0 * BF16));
        }
    }
}

fn wanted_record(records: &Buffer, row: usize, bytes: usize) -> Vec<u8> {
    records.u8()[row * bytes..(row + 1) * bytes].to_vec()
}

#[test]
fn compressor() {
    if !ready("compressor") {
        return;
    }
    let source = include_str!("../../kernels/src/kv_compress/kernel.metal");
    let (head_dim, rope_dim, raw_len, eps) = (96, 16, 6, 1e-20f32);
    let frequencies = tf_kernels::rope::reference::frequencies(1.6e5, rope_dim, None);
    let table = [5u32, 0, 3, 1, 4, 2];
    let pages = Pages { table: &table, pages_per_slot: 3, entries_per_page: 4 };
    let record = kv_compress::record_bytes(head_dim);
    let mut values = Values::new(6);
    let norm = values.bf16(head_dim, 2.0);
    for ratio in [2u32, 1] {
        let (rows, windows) = windows(&[(1, 5, 4), (0, 0, 9)]);
        let mut entries = Vec::new();
        completed_entries(&rows, ratio, &mut entries);
        let columns = kv_compress::raw_columns(head_dim, ratio);
        let raw =
            if ratio == 1 { values.bf16(rows.len() * columns, 3.0) } else { values.f32(rows.len() * columns, 3.0) };
        let ring_before = values.f32(2 * raw_len * 2 * head_dim, 3.0);
        let cache_before = vec![0x11u8; 6 * 4 * record];
        let (mut ring, mut cache) = (device(&ring_before), device(&cache_before));
        let mut latents = device(&vec![0f32; entries.len() * head_dim]);
        let args = kv_compress::Args {
            raw: &device(&raw),
            rows: &rows,
            windows: &windows,
            entries: &entries,
            ratio,
            norm: &device(&norm),
            eps,
            frequencies: &frequencies,
            head_dim,
            raw_ring: if ratio == 2 { Some(&mut ring) } else { None },
            raw_len,
            cache: &mut cache,
            pages,
            latents: &mut latents,
        };
        kv_compress::launch(&mut queue(), args).unwrap();
        // Entries `from..to` of the launch; the ring afterwards.
        let metal = |program: &_, simdgroups, from: usize, to: usize| -> Result<Vec<Vec<u8>>, String> {
            let shape = |items: usize| {
                let sizes = [ratio, head_dim as u32, rope_dim as u32, raw_len as u32, 3, 4];
                shape(&[&[items as u32][..], &sizes, &[eps.to_bits()]].concat())
            };
            let (row_list, window_list) = (input(&row_words(&rows)), input(&window_words(&windows)));
            let entry_list = input(&entry_words(&entries[from..to]));
            let mut pool = [
                input(&raw),
                input(&ring_before),
                row_list.clone(),
                window_list.clone(),
                entry_list,
                input(&table),
                input(&norm),
                input(&frequencies),
                in_place(&cache_before),
                output((to - from) * head_dim),
                shape(to - from),
            ];
            run(program, "kv_compress", to - from, simdgroups, &mut pool)?;
            let mut all = outputs(&pool, &[8, 9]);
            if ratio == 2 {
                let mut keep = [input(&raw), in_place(&ring_before), row_list, window_list, shape(rows.len())];
                run(program, "kv_keep_raw", rows.len(), simdgroups, &mut keep)?;
                all.push(bytes_of(&keep[1]).to_vec());
            }
            Ok(all)
        };
        let mut wanted = vec![cache.u8().to_vec(), bytes(latents.f32()).to_vec()];
        if ratio == 2 {
            wanted.push(bytes(ring.f32()).to_vec());
        }
        let edits = [
            (
                "partner from the launch, not the ring",
                "position <= windows[rows[row].window].start",
                "position < windows[rows[row].window].start",
            ),
            (
                "wrong ring slot",
                "slot * shape.raw_len + (position - 1u) % shape.raw_len",
                "slot * shape.raw_len + position % shape.raw_len",
            ),
            (
                "weights of the other row",
                "first[c] * (e0 / sum) + second[c] * (e1 / sum)",
                "first[c] * (e1 / sum) + second[c] * (e0 / sum)",
            ),
            ("swapped nibbles", "uchar(code | high << 4)", "uchar(high | code << 4)"),
            ("rotation at the entry's number", "entry * shape.ratio, frequencies", "entry, frequencies"),
            ("stale scale", "2u * b + lane / 16u] = uchar(scale)", "2u * b + 1u - lane / 16u] = uchar(scale)"),
            ("maximum of eight", "ushort step = 8; step > 0", "ushort step = 4; step > 0"),
            (
                "page not looked up",
                "const uint page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];",
                "const uint page = slot * shape.pages_per_slot + entry / shape.entries_per_page;",
            ),
            ("odd rows in the ring", "position % 2u != 0u ||", "position % 2u == 0u ||"),
            ("old rows of a long window", "left > shape.raw_len) return;", "left > 2u * shape.raw_len) return;"),
            ("dropped block", "for (uint b = 0u; b < blocks; b += 2u)", "for (uint b = 0u; b + 1u < blocks; b += 2u)"),
        ];
        let edits = if ratio == 2 { &edits[..] } else { &edits[10..] };
        prove("kv_compress", source, &wanted, edits, |program, simdgroups| {
            metal(program, simdgroups, 0, entries.len())
        });
        let program = build("kv_compress", source);
        let alone = metal(&program, 2, 2, 3).unwrap();
        assert_eq!(floats(&alone[1]), latents.f32()[2 * head_dim..3 * head_dim], "an entry alone");

        for (e, entry) in entries.iter().enumerate() {
            let row = entry.row as usize;
            let at = |r: usize| wide(&raw[r * columns..(r + 1) * columns]);
            let (values, scores) = if ratio == 1 {
                (at(row), vec![0.0; head_dim])
            } else {
                let position = rows[row].position;
                let first = if position > windows[rows[row].window as usize].start {
                    at(row - 1)
                } else {
                    let place = entry.slot as usize * raw_len + (position as usize - 1) % raw_len;
                    wide(&ring_before[place * columns..(place + 1) * columns])
                };
                let second = at(row);
                ([&first[..head_dim], &second[..head_dim]].concat(), [&first[head_dim..], &second[head_dim..]].concat())
            };
            let pooled = kv_compress::reference::pool(&values, &scores, head_dim, Numerics::Exact);
            let latent = kv_compress::reference::latent(&pooled, &wide(&norm), eps.into(), Numerics::Exact);
            let largest = latent.iter().fold(0f64, |max, v| max.max(v.abs()));
            // Two bf16 roundings; the pooled row's errors also enter the norm's factor.
            let got = &latents.f32()[e * head_dim..(e + 1) * head_dim];
            assert_close("latent", got, &latent, |_| largest * 3.0 * BF16);
        }
    }
}
