//! What must hold of the window records and of their rings.

use super::{Args, RingArgs, launch, launch_ring, record_bytes, reference};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::reference_formats::{bf16, e4m3_decode, e8m0_decode};
use crate::rms_norm::contract::norm_spans;
use crate::rope::reference::frequencies;

pub const KV_STORE: Contract = Contract {
    name: "kv_store",
    formula: "record[r] = QDQ8(RoPE(RMSNorm(x[r]; norm), position)), stored as E4M3 codes and E8M0 scales",
    shapes: "x [rows, head_dim] f32, bf16 values; norm [head_dim] f32; records [rows, head_dim + head_dim / 32] bytes",
    order: "sum of squares as rms_norm; the rotation fuses nothing",
    bound: "the norm's interval; each turned column two products with sine and cosine (2 U) and a sum; bf16 twice, \
        E4M3 once",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("head_dim", 256), ("rope_dim", 64)] },
        Case { name: "small", rows: 17, sizes: &[("head_dim", 64), ("rope_dim", 16)] },
        Case { name: "all columns turn", rows: 5, sizes: &[("head_dim", 32), ("rope_dim", 32)] },
    ],
    make,
    limits: &[Limit { what: "head_dim", most: super::HEAD_DIM_MAX, accepts, beyond: super::HEAD_DIM_MAX + 32 }],
    controls: &[
        Control::value("turns by another base"),
        Control::value("turns by the position before"),
        Control::value("turns the first columns"),
        Control::value("eps in bf16"),
        Control::value("takes the scale of the block before"),
        Control::geometry("takes the position of the first row of the launch"),
    ],
    edits: &[
        metal(
            "takes the scale one too large (Metal)",
            "record[head_dim + block] = uchar(scale)",
            "record[head_dim + block] = uchar(scale + 1u)",
        ),
        metal(
            "turns by the row's index (Metal)",
            "head_dim, rows[row].position, frequencies",
            "head_dim, row, frequencies",
        ),
        metal(
            "leaves the rotation out (Metal)",
            "value = rope_turn(value, c, head_dim, rows[row].position, frequencies, shape.rope_dim);",
            "",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

pub const RING: Contract = Contract {
    name: "kv_store/ring",
    formula: "ring[slot][position % ring_len] = record of the row; of a longer window the last ring_len rows",
    shapes: "records [rows, record_bytes] bytes; ring [slots, ring_len, record_bytes] bytes",
    order: "no sums",
    bound: "exact: bytes are copied",
    cases: &[
        Case { name: "windows within the ring", rows: 128, sizes: &[("ring_len", 21), ("window", 16)] },
        Case { name: "windows longer than the ring", rows: 60, sizes: &[("ring_len", 9), ("window", 20)] },
    ],
    make: make_ring,
    limits: &[],
    controls: &[
        Control::value("keeps the first rows of a long window"),
        Control::value("writes the record of the row before"),
        Control::geometry("writes by the row's place in the launch"),
    ],
    edits: &[
        metal(
            "writes to the slot of the row's index (Metal)",
            "rows[row].position % shape.ring_len) * bytes",
            "(row + 1u) % shape.ring_len) * bytes",
        ),
        metal("lets rows meet in one place (Metal)", "> shape.ring_len) return;", "> 2u * shape.ring_len) return;"),
        metal("writes to the first sequence (Metal)", "rows[row].slot * shape.ring_len", "0u * shape.ring_len"),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const EPS: f32 = 1e-6;
const BASE: f64 = 1e4;

struct Records {
    head_dim: usize,
    x: Vec<f32>,
    norm: Vec<f32>,
    positions: Vec<u32>,
    frequencies: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let head_dim = case.size("head_dim");
    let x = (0..case.rows).flat_map(|row| values.bf16(head_dim, [3.0, 2e-3][row % 2])).collect();
    let positions = (0..case.rows).map(|row| if row % 4 == 3 { 1_000_000 + row as u32 } else { values.word() % 5000 });
    let positions = positions.collect();
    let frequencies = frequencies(BASE, case.size("rope_dim"), None);
    Box::new(Records { head_dim, x, norm: values.bf16(head_dim, 2.0), positions, frequencies })
}

impl World for Records {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let head_dim = self.head_dim;
        let mut seats = Seats::of(picks, |row| (row, self.positions[row]));
        let mut turning = self.frequencies.clone();
        let mut eps = EPS;
        if fault.is("turns by another base") {
            turning = frequencies(1.6e5, 2 * turning.len(), None);
        }
        if fault.is("turns by the position before") {
            seats.rows.iter_mut().for_each(|row| row.position = row.position.saturating_sub(1));
        }
        if fault.is("takes the position of the first row of the launch") {
            let first = seats.rows[0].position;
            seats.rows.iter_mut().for_each(|row| row.position = first);
        }
        if fault.is("turns the first columns") {
            turning.rotate_right(1);
        }
        if fault.is("eps in bf16") {
            eps = bf16(f64::from(eps)) as f32;
        }
        let x = stage.rows_in("x", &gather(picks, &self.x, head_dim));
        let norm = stage.input("norm", &self.norm);
        let bytes = record_bytes(head_dim);
        let mut records = stage.output::<u8>("records", picks.len() * bytes);
        let args = Args {
            x: &x.buffer,
            norm: &norm.buffer,
            eps,
            rows: &seats.rows,
            frequencies: &turning,
            head_dim,
            records: &mut records.buffer,
        };
        stage.run(|queue| launch(queue, args))?;
        if fault.is("takes the scale of the block before") {
            records.edit::<u8>(|records| {
                for record in records[..picks.len() * bytes].chunks_mut(bytes) {
                    let (codes, scales) = record.split_at_mut(head_dim);
                    scales.rotate_right(1);
                    codes[0] ^= u8::from(scales.len() == 1);
                }
            });
        }
        stage.read(x);
        stage.read(norm);
        stage.rows::<u8>(records, bytes);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let x = wide(&self.x[row * self.head_dim..][..self.head_dim]);
        let (norm, eps, position) = (wide(&self.norm), f64::from(EPS), self.positions[row]);
        let release = Numerics::Release;
        let values = reference::window_entries(&x, &norm, eps, &[position], &self.frequencies, release);
        let mut spans = norm_spans(&Span::all(&x), &norm, eps);
        rotate(&mut spans, position, &self.frequencies, true);
        Expected::zip(&values, &qdq_e4m3(&spans))
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        let (codes, scales) = words.split_at(self.head_dim);
        codes.iter().enumerate().map(|(i, code)| e4m3_decode(*code as u8) * e8m0_decode(scales[i / 32] as u8)).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: self.x.len() * 5, multiply_adds: self.x.len() * 8 }
    }
}

fn accepts(head_dim: usize) -> bool {
    use tf_device::{Buffer, Device, Queue};
    let zeros = |bytes| Buffer::zeroed(&Device::cpu(), bytes).expect("a record fits into memory");
    let (x, norm, mut records) = (zeros(4 * head_dim), zeros(4 * head_dim), zeros(record_bytes(head_dim)));
    let rows = Seats::of(&[Pick::Row(0)], |_| (0, 0)).rows;
    let frequencies = frequencies(BASE, 16, None);
    let mut queue = Queue::cpu(1, tf_numerics::lanes::Level::Scalar);
    let args =
        Args { x: &x, norm: &norm, eps: EPS, rows: &rows, frequencies: &frequencies, head_dim, records: &mut records };
    launch(&mut queue, args).is_ok()
}

/// Sequences of consecutive rows whose records go into rings.
struct Rings {
    ring_len: usize,
    window: usize,
    records: Vec<u8>,
}

const RING_HEAD_DIM: usize = 32;

fn make_ring(case: &Case, seed: u64) -> Box<dyn World> {
    let records = Values::new(seed).bytes(case.rows * record_bytes(RING_HEAD_DIM));
    Box::new(Rings { ring_len: case.size("ring_len"), window: case.size("window"), records })
}

impl World for Rings {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let bytes = record_bytes(RING_HEAD_DIM);
        let seats = Seats::of(picks, |row| (row / self.window, (3 + row % self.window) as u32));
        let mut records: Vec<u8> = Vec::new();
        for pick in picks {
            match *pick {
                Pick::Row(row) => records.extend(&self.records[row * bytes..][..bytes]),
                Pick::Poison(kind) => records.extend(vec![0x7f + kind as u8; bytes]),
            }
        }
        if fault.is("writes the record of the row before") {
            records.rotate_right(bytes);
        }
        let mut windows = seats.windows.clone();
        if fault.is("keeps the first rows of a long window") {
            for window in &windows {
                let first = window.first_row as usize;
                for i in self.ring_len..window.row_count as usize {
                    let from = (first + i % self.ring_len) * bytes;
                    records.copy_within(from..from + bytes, (first + i) * bytes);
                }
            }
        }
        let by_place = fault.is("writes by the row's place in the launch");
        if by_place {
            for window in &mut windows {
                let row = window.first_row;
                *window = crate::rows::WindowInfo { start: window.start + row % 2, ..*window };
            }
        }
        let input = stage.rows_in("records", &records);
        let mut ring = stage.poisoned::<u8>("ring", seats.slots * self.ring_len * bytes);
        let args = RingArgs {
            records: &input.buffer,
            windows: &windows,
            head_dim: RING_HEAD_DIM,
            ring: &mut ring.buffer,
            ring_len: self.ring_len,
        };
        stage.run(|queue| launch_ring(queue, args))?;
        let mut ranges = Vec::new();
        for window in &seats.windows {
            let count = window.row_count as usize;
            for i in count.saturating_sub(self.ring_len)..count {
                let place = window.slot as usize * self.ring_len + (window.start as usize + i) % self.ring_len;
                ranges.push((window.first_row as usize + i, place * bytes..(place + 1) * bytes));
            }
        }
        stage.read(input);
        stage.ranges::<u8>(ring, ranges);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let bytes = record_bytes(RING_HEAD_DIM);
        self.records[row * bytes..][..bytes].iter().map(|byte| Expected::exactly(f64::from(*byte))).collect()
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        words.iter().map(|word| f64::from(*word)).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: 2 * self.records.len(), multiply_adds: 0 }
    }
}
