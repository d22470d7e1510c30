//! What must hold of the index queries.

use super::{Args, launch, reference};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::rope::reference::{frequencies, rotate as turn};

pub const INDEX_QUERY: Contract = Contract {
    name: "index_query",
    formula: "queries[r][h] = QDQ4(32, E8M0)(RoPE(queries[r][h], position)); weights[r][h] = bf16(weights[r][h] / \
        sqrt(head_dim heads))",
    shapes: "queries [rows, heads, head_dim] f32, weights [rows, heads] f32; both in place, bf16 values",
    order: "no sums; the rotation fuses nothing",
    bound: "the rotation as kv_store; the factor and its product 2 U; bf16, E2M1 under a power of two",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("heads", 8), ("head_dim", 128), ("rope_dim", 64)] },
        Case { name: "odd heads", rows: 7, sizes: &[("heads", 3), ("head_dim", 32), ("rope_dim", 16)] },
    ],
    make,
    limits: &[],
    controls: &[
        Control::value("turns by another base"),
        Control::value("turns by the position before"),
        Control::value("applies the factor twice"),
        Control::geometry("takes the position of the first row of the launch"),
    ],
    edits: &[
        metal(
            "turns by the row's index (Metal)",
            "shape.head_dim, rows[row].position, frequencies",
            "shape.head_dim, row, frequencies",
        ),
        metal(
            "takes the scale a step too small (Metal)",
            "(bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u)",
            "(bits >> 23)",
        ),
        metal(
            "leaves the weights unrounded (Metal)",
            "bf16_round(weights[item] * shape.factor)",
            "weights[item] * shape.factor",
        ),
    ],
    standard: IN_PLACE_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const BASE: f64 = 1.6e5;

struct Queries {
    heads: usize,
    head_dim: usize,
    queries: Vec<f32>,
    weights: Vec<f32>,
    positions: Vec<u32>,
    frequencies: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (heads, head_dim) = (case.size("heads"), case.size("head_dim"));
    Box::new(Queries {
        heads,
        head_dim,
        queries: values.bf16(case.rows * heads * head_dim, 3.0),
        weights: values.bf16(case.rows * heads, 1.0),
        positions: (0..case.rows).map(|_| values.word() % 100_000).collect(),
        frequencies: frequencies(BASE, case.size("rope_dim"), None),
    })
}

impl World for Queries {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let Queries { heads, head_dim, .. } = *self;
        let mut seats = Seats::of(picks, |row| (row, self.positions[row]));
        let mut turning = self.frequencies.clone();
        if fault.is("turns by another base") {
            turning = frequencies(1e4, 2 * turning.len(), None);
        }
        if fault.is("turns by the position before") {
            seats.rows.iter_mut().for_each(|row| row.position = row.position.saturating_sub(1));
        }
        if fault.is("takes the position of the first row of the launch") {
            let first = seats.rows[0].position;
            seats.rows.iter_mut().for_each(|row| row.position = first);
        }
        let mut weights = gather(picks, &self.weights, heads);
        if fault.is("applies the factor twice") {
            weights.iter_mut().for_each(|weight| *weight /= ((heads * head_dim) as f32).sqrt());
        }
        let mut queries = stage.in_place("queries", &gather(picks, &self.queries, heads * head_dim));
        let mut weights = stage.in_place("weights", &weights);
        let args = Args {
            queries: &mut queries.buffer,
            weights: &mut weights.buffer,
            rows: &seats.rows,
            frequencies: &turning,
            heads,
            head_dim,
        };
        stage.run(|queue| launch(queue, args))?;
        stage.rows::<f32>(queries, heads * head_dim);
        stage.rows::<f32>(weights, heads);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let Queries { heads, head_dim, .. } = *self;
        let queries = wide(&self.queries[row * heads * head_dim..][..heads * head_dim]);
        let weights = wide(&self.weights[row * heads..][..heads]);
        let (position, release) = (self.positions[row], Numerics::Release);
        let mut values = queries.clone();
        let mut spans = Span::all(&queries);
        for head in 0..heads {
            let at = head * head_dim..(head + 1) * head_dim;
            turn(&mut values[at.clone()], position, &self.frequencies, release);
            rotate(&mut spans[at], position, &self.frequencies, true);
        }
        let mut expected = Expected::zip(&release.qdq4_e8m0(&values, head_dim), &qdq_fp4(&spans));
        // The projection of the definition is another kernel's: here it is the identity, a weight at a time.
        let factor = 1.0 / ((heads * head_dim) as f64).sqrt();
        for (head, weight) in weights.iter().enumerate() {
            let mut alone = vec![0.0; heads * heads];
            alone[head * heads..(head + 1) * heads]
                .iter_mut()
                .enumerate()
                .for_each(|(i, w)| *w = f64::from(u8::from(i == head)));
            let value = reference::index_weights(&weights, &alone, head_dim, release)[head];
            expected.push(Expected { value, span: Span::exact(weight * factor).rounded(2.0).bf16() });
        }
        expected
    }

    fn work(&self) -> Work {
        Work { bytes: self.queries.len() * 8, multiply_adds: self.queries.len() * 4 }
    }
}
