//! What must hold of the drafter's context rows: a chain of registered launches, proved as one.
//!
//! A row's taps become a record in the draft ring of its sequence. All rows of a prompt at once, or one by one as a reply
//! grows, must leave the same records: later drafts attend over them.

use crate::contract::*;
use crate::kv_store::{self, record_bytes};
use crate::linear::contract::roundings;
use crate::linear_fp8::{self, Finish, Product};
use crate::numerics_policy::Numerics;
use crate::reference_formats::{bf16, e4m3_decode, e8m0_decode};
use crate::rms_norm;
use crate::rms_norm::contract::norm_spans;
use crate::rope::reference::frequencies;
use tf_device::Device;

pub const CONTEXT: Contract = Contract {
    name: "draft_head/context",
    formula: "ring[position] = kv_store(bf16(QDQ8(RMSNorm(bf16(taps @ main_proj^T))) @ wkv^T)): linear_fp8, rms_norm, \
        linear_fp8, kv_store, kv_store/ring in a chain",
    shapes: "taps [rows, columns] f32 after QDQ8; main_proj [hidden, columns], wkv [head_dim, hidden] FP8; ring [slots, \
        ring_len, record_bytes] bytes",
    order: "that of each launch",
    bound: "the intervals of each launch, one after the other",
    cases: &[
        Case {
            name: "wide",
            rows: 128,
            sizes: &[("columns", 192), ("hidden", 96), ("head_dim", 64), ("ring_len", 70)],
        },
        Case {
            name: "short ring",
            rows: 40,
            sizes: &[("columns", 96), ("hidden", 64), ("head_dim", 32), ("ring_len", 9)],
        },
    ],
    make,
    limits: &[],
    controls: &[
        Control::value("turns by the position before"),
        Control::value("takes the taps of the row before"),
        Control::value("eps in bf16"),
        Control::geometry("numbers the rows of a window from the launch's first"),
    ],
    edits: &[],
    standard: STANDARD_CONTROLS,
};

const EPS: f32 = 1e-6;
const BASE: f64 = 1e4;
/// Consecutive rows of one sequence, and where they start.
const SEQUENCE: usize = 32;
const START: u32 = 5;

/// A weight as stored, and its values.
struct Stored {
    rows: usize,
    columns: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f64>,
}

struct Context {
    head_dim: usize,
    ring_len: usize,
    taps: Vec<f32>,
    main_proj: Stored,
    main_norm: Vec<f32>,
    wkv: Stored,
    kv_norm: Vec<f32>,
    frequencies: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (columns, hidden, head_dim) = (case.size("columns"), case.size("hidden"), case.size("head_dim"));
    let mut stored = |rows: usize, columns: usize| {
        let codes = values.e4m3(rows * columns);
        let scales = values.e8m0(rows.div_ceil(32) * columns.div_ceil(32), -10);
        let decoded = linear_fp8::reference::dequantise(&codes, &scales, columns);
        Stored { rows, columns, codes, scales, values: decoded }
    };
    let (main_proj, wkv) = (stored(hidden, columns), stored(head_dim, hidden));
    // Rows so small that eps matters lie between ordinary ones.
    let taps = (0..case.rows).flat_map(|row| values.qdq8(columns, [2.0, 2e-3][row % 2])).collect();
    Box::new(Context {
        head_dim,
        ring_len: case.size("ring_len"),
        taps,
        main_proj,
        main_norm: values.bf16(hidden, 2.0),
        wkv,
        kv_norm: values.bf16(head_dim, 2.0),
        frequencies: frequencies(BASE, 16, None),
    })
}

impl Stored {
    fn pack(&self, device: &Device) -> Result<linear_fp8::Weights, String> {
        linear_fp8::Weights::pack(device, &self.codes, &self.scales, self.rows, self.columns)
            .map_err(|error| error.to_string())
    }

    /// The products with a row known to intervals.
    fn spans(&self, x: &[Span]) -> Vec<Span> {
        self.values.chunks(self.columns).map(|row| dot_span(x, row, roundings(self.columns)).bf16()).collect()
    }
}

fn place(row: usize) -> (usize, u32) {
    (row / SEQUENCE, START + (row % SEQUENCE) as u32)
}

impl World for Context {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let (rows, hidden, head_dim) = (picks.len(), self.main_proj.rows, self.head_dim);
        let mut seats = Seats::of(picks, place);
        let windows = seats.windows.clone();
        if fault.is("turns by the position before") {
            seats.rows.iter_mut().for_each(|row| row.position -= 1);
        }
        if fault.is("numbers the rows of a window from the launch's first") {
            let first = seats.rows[0].position;
            seats.rows.iter_mut().enumerate().for_each(|(index, row)| row.position = first + index as u32);
        }
        let mut taps = gather(picks, &self.taps, self.main_proj.columns);
        if fault.is("takes the taps of the row before") {
            taps.rotate_right(self.main_proj.columns);
        }
        let eps = if fault.is("eps in bf16") { bf16(f64::from(EPS)) as f32 } else { EPS };
        let device = stage.device();
        let (main_proj, wkv) = (self.main_proj.pack(&device)?, self.wkv.pack(&device)?);
        let taps = stage.rows_in("taps", &taps);
        let (main_norm, kv_norm) = (stage.input("main norm", &self.main_norm), stage.input("kv norm", &self.kv_norm));
        let mut projected = stage.output::<f32>("projected", rows * hidden);
        let mut quantised = stage.output::<f32>("quantised", rows * hidden);
        let mut keys = stage.output::<f32>("keys", rows * head_dim);
        let bytes = record_bytes(head_dim);
        let mut records = stage.output::<u8>("records", rows * bytes);
        let mut ring = stage.poisoned::<u8>("ring", seats.slots * self.ring_len * bytes);

        let linear = |stage: &mut Stage<'_>, x: &tf_device::Buffer, weights: &linear_fp8::Weights, out: &mut Output| {
            let mut products = [Product { weights, out: &mut out.buffer, finish: Finish::Bf16 }];
            let args = linear_fp8::Args { x, rows, groups: 1, products: &mut products };
            stage.run(|queue| linear_fp8::launch(queue, args))
        };
        linear(stage, &taps.buffer, &main_proj, &mut projected)?;
        let args = rms_norm::Args {
            x: &projected.buffer,
            weight: &main_norm.buffer,
            rows,
            columns: hidden,
            eps,
            normed: None,
            quantised: Some(&mut quantised.buffer),
        };
        stage.run(|queue| rms_norm::launch(queue, args))?;
        linear(stage, &quantised.buffer, &wkv, &mut keys)?;
        let args = kv_store::Args {
            x: &keys.buffer,
            norm: &kv_norm.buffer,
            eps,
            rows: &seats.rows,
            frequencies: &self.frequencies,
            head_dim,
            records: &mut records.buffer,
        };
        stage.run(|queue| kv_store::launch(queue, args))?;
        let args = kv_store::RingArgs {
            records: &records.buffer,
            windows: &windows,
            head_dim,
            ring: &mut ring.buffer,
            ring_len: self.ring_len,
        };
        stage.run(|queue| kv_store::launch_ring(queue, args))?;

        let mut kept = Vec::new();
        for window in &windows {
            let count = window.row_count as usize;
            for i in count.saturating_sub(self.ring_len)..count {
                let at = window.slot as usize * self.ring_len + (window.start as usize + i) % self.ring_len;
                kept.push((window.first_row as usize + i, at * bytes..(at + 1) * bytes));
            }
        }
        for input in [taps, main_norm, kv_norm] {
            stage.read(input);
        }
        for between in [projected, quantised, keys, records] {
            stage.discard(between);
        }
        stage.ranges::<u8>(ring, kept);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let (release, eps, position) = (Numerics::Release, f64::from(EPS), place(row).1);
        let taps = wide(&self.taps[row * self.main_proj.columns..][..self.main_proj.columns]);
        let (main_norm, kv_norm) = (wide(&self.main_norm), wide(&self.kv_norm));
        let linear =
            |x: &[f64], weight: &Stored| linear_fp8::reference::linear_fp8(x, &weight.values, weight.columns, release);
        let projected = linear(&taps, &self.main_proj);
        let keys = linear(&rms_norm::reference::rms_norm(&projected, &main_norm, eps, release), &self.wkv);
        let values = kv_store::reference::window_entries(&keys, &kv_norm, eps, &[position], &self.frequencies, release);

        let projected = self.main_proj.spans(&Span::all(&taps));
        let keys = self.wkv.spans(&qdq_e4m3(&norm_spans(&projected, &main_norm, eps)));
        let mut spans = norm_spans(&keys, &kv_norm, eps);
        rotate(&mut spans, position, &self.frequencies, true);
        Expected::zip(&values, &qdq_e4m3(&spans))
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        let (codes, scales) = words.split_at(self.head_dim);
        codes.iter().enumerate().map(|(i, code)| e4m3_decode(*code as u8) * e8m0_decode(scales[i / 32] as u8)).collect()
    }

    fn work(&self) -> Work {
        let rows = self.taps.len() / self.main_proj.columns;
        let weights = self.main_proj.codes.len() + self.wkv.codes.len();
        Work { bytes: weights + self.taps.len() * 4, multiply_adds: rows * weights }
    }
}
