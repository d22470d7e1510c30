//! What must hold of the routed and the shared experts.

use super::{Args, Expert, ExpertBytes, Shared, Weights, launch, reference};
use crate::contract::*;
use crate::linear::contract::{ORDER, metal_dot, roundings};
use crate::linear_fp8;
use crate::moe_route::reference::Route;
use crate::numerics_policy::Numerics;
use tf_device::Device;

pub const MOE_EXPERTS: Contract = Contract {
    name: "moe_experts",
    formula: "out = bf16(sum over picks in ascending id of bf16(QDQ8(bf16(silu(min(g, limit)) * clamp(u) * w)) @ \
        w2^T), shared expert last)",
    shapes: "x [rows, hidden] f32 after QDQ8; MXFP4 w1, w3 [intermediate, hidden], w2 [hidden, intermediate]; \
        shared in FP8; selected, routing [rows, picks]; out [rows, hidden] f32",
    order: ORDER,
    bound: "each product as a linear's; silu 6 U, of slope below 1.1; intervals through bf16, E4M3 and the second \
        product; the sum rounds once an expert",
    cases: &[
        Case {
            name: "wide",
            rows: 128,
            sizes: &[("hidden", 128), ("intermediate", 64), ("experts", 12), ("picks", 3), ("limit", 3)],
        },
        Case {
            name: "odd shapes",
            rows: 11,
            sizes: &[("hidden", 96), ("intermediate", 160), ("experts", 5), ("picks", 4), ("limit", 3)],
        },
        Case {
            name: "few rows",
            rows: 4,
            sizes: &[("hidden", 160), ("intermediate", 96), ("experts", 6), ("picks", 3), ("limit", 3)],
        },
        Case {
            name: "one expert",
            rows: 65,
            sizes: &[("hidden", 32), ("intermediate", 32), ("experts", 1), ("picks", 1), ("limit", 0)],
        },
        Case {
            name: "shared only",
            rows: 6,
            sizes: &[("hidden", 64), ("intermediate", 32), ("experts", 1), ("picks", 0), ("limit", 3)],
        },
    ],
    make,
    limits: &[Limit { what: "hidden size", most: super::COLUMNS_MAX, accepts, beyond: super::COLUMNS_MAX + 32 }],
    controls: &[
        Control::value("swaps the nibbles of w2"),
        Control::value("takes the scale of the next group of w1"),
        Control::value("applies the routing weight twice"),
        Control::value("leaves the limit out"),
        Control::value("drops the last pick"),
        Control::value("gate and up change places"),
    ],
    edits: &[
        cuda("leaves the routing weight out (CUDA)", "(g * sigmoid_own(g)) * u * weight", "(g * sigmoid_own(g)) * u"),
        cuda("forgets the clamp of the gate (CUDA)", "g = min_second(limit, bf16_round(gate))", "g = bf16_round(gate)"),
        few(
            "takes the first row for all, in one launch (CUDA)",
            "lists.pair_row[rank] = row",
            "lists.pair_row[rank] = 0",
        ),
        few(
            "takes a neighbour's routing weight, in one launch (CUDA)",
            "lists.pair_weight[rank] = weight",
            "lists.pair_weight[rank ^ 1] = weight",
        ),
        few(
            "takes the pairs' activations for the shared expert's, in one launch (CUDA)",
            "spare_row + row - pairs",
            "row - pairs",
        ),
        metal_dot(
            "takes the other half's nibbles (Metal)",
            "codes[16u * block + l] >> 8u * h",
            "codes[16u * block + l] >> 8u * (1u - h)",
        ),
        metal_dot(
            "takes a scale twice (Metal)",
            "const uint g0 = 4u * block + h, g1 = g0 + 2u;",
            "const uint g0 = 4u * block + h, g1 = g0;",
        ),
        metal_dot(
            "drops the last block (Metal)",
            "    if (128u * whole < columns) add_mxfp4<false>(even, odd, codes, scales, x, whole, columns, l, h);\n",
            "",
        ),
        metal(
            "clamps one side only (Metal)",
            "up = up < -limit ? -limit : up > limit ? limit : up;",
            "up = up > limit ? limit : up;",
        ),
        metal(
            "leaves the routing weight out (Metal)",
            "if (!is_shared) value = value * weights[row * shape.picks + pick];",
            "",
        ),
        metal(
            "leaves QDQ8 out (Metal)",
            "activations[to] = fp8_round(bf16_round(value));",
            "activations[to] = bf16_round(value);",
        ),
        metal("takes the first expert for all (Metal)", "experts + ulong(id) * places.stride", "experts"),
        metal(
            "leaves the shared expert out (Metal)",
            "    sum = sum + bf16_round(dot_fp8(shared2",
            "    sum = sum + 0.0f * bf16_round(dot_fp8(shared2",
        ),
        metal(
            "leaves an expert's output unrounded (Metal)",
            "sum = sum + bf16_round(product);",
            "sum = sum + product;",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of what this family's CUDA kernels share, which gate 1 must notice.
const fn cuda(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("../shared/experts.cuh"), find, replace)
}

/// An edit of the CUDA kernel of few rows, which gate 1 must notice.
const fn few(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("few.cu"), find, replace)
}

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

/// Bytes of one expert's tensors, in the order of [`ExpertBytes`].
struct Stored {
    codes: [Vec<u8>; 3],
    scales: [Vec<u8>; 3],
    values: reference::Expert,
}

struct Experts {
    hidden: usize,
    intermediate: usize,
    picks: usize,
    limit: f32,
    rows: usize,
    x: Vec<f32>,
    routed: Vec<Stored>,
    shared: Stored,
    selected: Vec<u32>,
    routing: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (hidden, intermediate, picks) = (case.size("hidden"), case.size("intermediate"), case.size("picks"));
    let matrices = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)];
    let expert_of = |codes: [Vec<u8>; 3], scales: [Vec<u8>; 3], decode: fn(&[u8], &[u8], usize) -> Vec<f64>| {
        let [w1, w3, w2] = std::array::from_fn(|i| decode(&codes[i], &scales[i], matrices[i].1));
        Stored { codes, scales, values: reference::Expert { w1, w2, w3 } }
    };
    let routed = (0..case.size("experts"))
        .map(|_| {
            let codes = matrices.map(|(rows, columns)| values.bytes(rows * columns / 2));
            let scales = matrices.map(|(rows, columns)| values.e8m0(rows * columns / 32, -5));
            expert_of(codes, scales, reference::dequantise)
        })
        .collect();
    let codes = matrices.map(|(rows, columns)| values.e4m3(rows * columns));
    let scales = matrices.map(|(rows, columns)| values.e8m0(rows.div_ceil(32) * (columns / 32), -11));
    let shared = expert_of(codes, scales, linear_fp8::reference::dequantise);
    let selected = (0..case.rows).flat_map(|_| values.distinct(picks, case.size("experts"))).collect();
    let routing = (0..case.rows * picks).map(|_| values.unit().abs() + 0.125).collect();
    let x = values.qdq8(case.rows * hidden, 2.0);
    let limit = case.size("limit") as f32;
    Box::new(Experts { hidden, intermediate, picks, limit, rows: case.rows, x, routed, shared, selected, routing })
}

impl Experts {
    fn pack(&self, device: &Device, fault: Fault) -> Result<Weights, String> {
        let pack = |stored: &Stored| {
            let [mut w1, mut w3, mut w2] = stored.codes.clone();
            let [mut w1_scale, w3_scale, w2_scale] = stored.scales.clone();
            if fault.is("swaps the nibbles of w2") {
                w2.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
            }
            if fault.is("takes the scale of the next group of w1") {
                w1_scale.rotate_left(1);
            }
            if fault.is("gate and up change places") {
                std::mem::swap(&mut w1, &mut w3);
            }
            let bytes = ExpertBytes {
                w1: &w1,
                w1_scale: &w1_scale,
                w3: &w3,
                w3_scale: &w3_scale,
                w2: &w2,
                w2_scale: &w2_scale,
            };
            Expert::pack(device, bytes, self.hidden, self.intermediate)
        };
        let routed = self.routed.iter().map(pack).collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        let linear = |i: usize, rows: usize, columns: usize| {
            linear_fp8::Weights::pack(device, &self.shared.codes[i], &self.shared.scales[i], rows, columns)
                .map_err(|error| error.to_string())
        };
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let shared = Shared {
            w1: linear(0, intermediate, hidden)?,
            w3: linear(1, intermediate, hidden)?,
            w2: linear(2, hidden, intermediate)?,
        };
        Weights::new(routed, shared).map_err(|error| error.to_string())
    }

    /// The interval of one expert's output for one row.
    fn spans(&self, x: &[f64], expert: &reference::Expert, weight: Option<f64>) -> Vec<Span> {
        let product = |w: &[f64]| {
            let exact: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
            Span::around(exact, dot_error(x, w, roundings(self.hidden))).bf16()
        };
        let limit = if self.limit == 0.0 { f64::INFINITY } else { f64::from(self.limit) };
        let rows = expert.w1.chunks(self.hidden).zip(expert.w3.chunks(self.hidden));
        let activations: Vec<Span> = rows
            .map(|(w1, w3)| {
                let gate = product(w1).map(|gate| gate.min(limit));
                let up = product(w3).clamp(-limit, limit);
                let centre = gate.centre();
                let silu = Span::around(centre / (1.0 + (-centre).exp()), 1.1 * gate.radius()).rounded(6.0);
                let value = silu.times(up).rounded(1.0);
                weight.map_or(value, |weight| value.scaled(weight).rounded(1.0)).bf16()
            })
            .collect();
        let activations = qdq_e4m3(&activations);
        let rows = expert.w2.chunks(self.intermediate);
        rows.map(|w2| dot_span(&activations, w2, roundings(self.intermediate)).bf16()).collect()
    }

    fn route(&self, row: usize) -> Route {
        let at = row * self.picks..(row + 1) * self.picks;
        let picks = self.selected[at.clone()].iter().copied().zip(self.routing[at].iter().copied());
        let mut picks: Vec<(u32, f32)> = picks.collect();
        picks.sort_by_key(|(id, _)| *id);
        Route {
            experts: picks.iter().map(|(id, _)| *id).collect(),
            weights: picks.iter().map(|(_, weight)| f64::from(*weight)).collect(),
        }
    }
}

impl World for Experts {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let (hidden, per_row) = (self.hidden, self.picks);
        let mut selected: Vec<u32> = Vec::new();
        let mut routing = gather(picks, &self.routing, per_row);
        for pick in picks {
            selected.extend(&self.selected[row_of(*pick) * per_row..][..per_row]);
        }
        if fault.is("applies the routing weight twice") {
            routing.iter_mut().for_each(|weight| *weight *= *weight);
        }
        if fault.is("drops the last pick") {
            routing.chunks_mut(per_row.max(1)).for_each(|row| row[per_row - 1] = 0.0);
        }
        let limit = if fault.is("leaves the limit out") { 0.0 } else { self.limit };
        let x = stage.rows_in("x", &gather(picks, &self.x, hidden));
        let (selected, routing) = (stage.rows_in("selected", &selected), stage.rows_in("routing", &routing));
        let mut out = stage.output::<f32>("out", picks.len() * hidden);
        let weights = self.pack(&stage.device(), fault)?;
        let args = Args {
            weights: &weights,
            x: &x.buffer,
            rows: picks.len(),
            picks: per_row,
            selected: &selected.buffer,
            routing: &routing.buffer,
            limit,
            out: &mut out.buffer,
        };
        stage.run(|queue| launch(queue, args))?;
        stage.read(x);
        stage.read(selected);
        stage.read(routing);
        stage.rows::<f32>(out, hidden);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let x = wide(&self.x[row * self.hidden..][..self.hidden]);
        let route = self.route(row);
        let experts: Vec<reference::Expert> = self.routed.iter().map(|stored| stored.values.clone()).collect();
        let limit = f64::from(self.limit);
        let values = reference::moe(&x, &route, &experts, &self.shared.values, limit, Numerics::Release);
        let mut sums = vec![Span::exact(0.0); self.hidden];
        let mut add = |spans: Vec<Span>| {
            sums.iter_mut().zip(spans).for_each(|(sum, span)| *sum = sum.plus(span).rounded(1.0));
        };
        for (&id, &weight) in route.experts.iter().zip(&route.weights) {
            add(self.spans(&x, &self.routed[id as usize].values, Some(weight)));
        }
        add(self.spans(&x, &self.shared.values, None));
        sums.iter_mut().for_each(|sum| *sum = sum.bf16());
        Expected::zip(&values, &sums)
    }

    fn work(&self) -> Work {
        let one = 3 * self.hidden * self.intermediate;
        let bytes = self.routed.len() * one / 2 + one + self.x.len() * 8;
        Work { bytes, multiply_adds: self.rows * (self.picks + 1) * one }
    }
}

fn accepts(hidden: usize) -> bool {
    let (codes, scales) = (vec![0x22; 32 * hidden / 2], vec![127; hidden]);
    let bytes =
        ExpertBytes { w1: &codes, w1_scale: &scales, w3: &codes, w3_scale: &scales, w2: &codes, w2_scale: &scales };
    Expert::pack(&Device::cpu(), bytes, hidden, 32).is_ok()
}
