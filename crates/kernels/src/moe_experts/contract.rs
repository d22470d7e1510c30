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
        // Whole pieces of columns, and pairs enough for the kernels of many rows.
        Case {
            name: "whole pieces",
            rows: 66,
            sizes: &[("hidden", 256), ("intermediate", 256), ("experts", 3), ("picks", 1), ("limit", 3)],
        },
        Case {
            name: "odd shapes",
            rows: 11,
            sizes: &[("hidden", 96), ("intermediate", 160), ("experts", 5), ("picks", 4), ("limit", 3)],
        },
        // Fewer picks than experts, of which several rows choose some.
        Case {
            name: "few picks",
            rows: 5,
            sizes: &[("hidden", 160), ("intermediate", 64), ("experts", 24), ("picks", 4), ("limit", 3)],
        },
        Case {
            name: CANCELLING,
            rows: 12,
            sizes: &[("hidden", 160), ("intermediate", 32), ("experts", 3), ("picks", 3), ("limit", 0)],
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
        // More rows than Metal gives the shared expert at once.
        Case {
            name: "two tiles of rows",
            rows: 34,
            sizes: &[("hidden", 32), ("intermediate", 32), ("experts", 1), ("picks", 1), ("limit", 0), ALL_ROWS],
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
        tiles(
            "takes an expert's first row for all, in tiles (CUDA)",
            "args.pair_row[tile.pair + row]",
            "args.pair_row[tile.pair]",
        ),
        tiles("leaves QDQ8 out, in tiles (CUDA)", "                round_eight(w);\n", ""),
        tiles(
            "leaves a block's columns in their order, in tiles (CUDA)",
            "make_uint4(w[0], w[2], other0, other1)",
            "make_uint4(w[0], w[1], other0, other1)",
        ),
        tiles(
            "takes the first pair's routing weight, in tiles (CUDA)",
            "weight[1], shape.limit",
            "weight[0], shape.limit",
        ),
        metal_dot(
            "takes a byte's nibbles in the other order (Metal)",
            "e2m1_value(first & 15u), odd0 = e2m1_value(first >> 4)",
            "e2m1_value(first >> 4), odd0 = e2m1_value(first & 15u)",
        ),
        metal_dot(
            "takes the next group's scale (Metal)",
            "const float scale = e8m0_value(scales[g]);",
            "const float scale = e8m0_value(scales[g ^ 1u]);",
        ),
        metal_dot("drops the last block (Metal)", "if (128u * whole < columns) add_mxfp4", "if (false) add_mxfp4"),
        Control::metal(
            "adds the accumulators in another order (Metal)",
            Gate::Value,
            crate::gpu::LINEAR,
            "    sum += simd_shuffle_xor(sum, ushort(16));\n    sum += simd_shuffle_xor(sum, ushort(4));",
            "    sum += simd_shuffle_xor(sum, ushort(4));\n    sum += simd_shuffle_xor(sum, ushort(16));",
        ),
        metal(
            "clamps one side only (Metal)",
            "up = up < -limit ? -limit : up > limit ? limit : up;",
            "up = up > limit ? limit : up;",
        ),
        metal(
            "leaves the routing weight out (Metal)",
            "bf16_round(ups[r]), shape.limit) * up.weights[pairs[r]];",
            "bf16_round(ups[r]), shape.limit);",
        ),
        metal(
            "leaves QDQ8 out (Metal)",
            "up.activations[to] = fp8_round(bf16_round(value));",
            "up.activations[to] = bf16_round(value);",
        ),
        metal("takes the first expert's w2 for all (Metal)", "experts + place[2]", "experts + places[2]"),
        metal(
            "leaves the shared expert out (Metal)",
            "bf16_round(sum + value_of(own[ulong(shape.picks) * shape.hidden]))",
            "bf16_round(sum)",
        ),
        metal(
            "leaves the shared expert out of a tile's last row (Metal)",
            "* shape.tile_rows, end = min(row0 + shape.tile_rows, shape.rows);\n        down.w2",
            "* shape.tile_rows, end = min(row0 + shape.tile_rows - 1u, shape.rows);\n        down.w2",
        ),
        metal(
            "cuts an expert's output to bf16 (Metal)",
            "ushort(to_bits(bf16_round(product)) >> 16)",
            "ushort(to_bits(product) >> 16)",
        ),
        metal(
            "forgets the rows behind eight (Metal)",
            "        pair = next_pair(picks, pairs, pair + 1u, expert, lane);",
            "        pair = count < 8u ? next_pair(picks, pairs, pair + 1u, expert, lane) : NONE;",
        ),
        metal(
            "adds the picks as they come (Metal)",
            "if (other >= least && other < id) {",
            "if (p == added && least < NONE) {",
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

/// An edit of the CUDA kernels of many rows, which gate 1 must notice.
const fn tiles(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("tiles.cu"), find, replace)
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

/// Rows and columns of w1, w3 and w2.
fn matrices(hidden: usize, intermediate: usize) -> [(usize, usize); 3] {
    [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
}

impl Stored {
    /// `sizes`: hidden and intermediate.
    fn of(
        codes: [Vec<u8>; 3],
        scales: [Vec<u8>; 3],
        sizes: (usize, usize),
        decode: fn(&[u8], &[u8], usize) -> Vec<f64>,
    ) -> Stored {
        let matrices = matrices(sizes.0, sizes.1);
        let [w1, w3, w2] = std::array::from_fn(|i| decode(&codes[i], &scales[i], matrices[i].1));
        Stored { codes, scales, values: reference::Expert { w1, w2, w3 } }
    }
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

/// A case whose sums are nothing but roundings, so that another order gives another value altogether: the columns of w1 and w3
/// cancel in pairs, and the second expert takes away what the first gives.
const CANCELLING: &str = "terms that cancel";

/// Makes `world` that case.
fn cancel(world: &mut Experts, values: &mut Values) {
    let (hidden, groups) = (world.hidden, world.hidden / 32);
    let order = values.distinct(hidden, hidden);
    let pairs: Vec<(usize, usize)> = order.as_chunks().0.iter().map(|&[a, b]| (a as usize, b as usize)).collect();
    // Of all rows alike; a pair's inputs make up for it, over many binades, and all inputs for what the scales have less: CUDA
    // takes codes up to 128.
    const LESS: u32 = 2;
    let exponents: Vec<i32> = (0..groups).map(|_| values.below(7) as i32 - 3).collect();
    for row in world.x.chunks_exact_mut(hidden) {
        for &(a, b) in &pairs {
            row[a] *= f32::from_bits((127 + LESS + values.below(16) as u32) << 23);
            row[b] = row[a] * 2f32.powi(exponents[a / 32] - exponents[b / 32]);
        }
    }
    for stored in &mut world.routed {
        for matrix in 0..2 {
            for scales in stored.scales[matrix].chunks_exact_mut(groups) {
                scales
                    .iter_mut()
                    .zip(&exponents)
                    .for_each(|(scale, exponent)| *scale = (127 - LESS as i32 + exponent) as u8);
            }
            for row in stored.codes[matrix].chunks_exact_mut(hidden / 2) {
                for &(a, b) in &pairs {
                    let negative = (row[a / 2] >> (4 * (a % 2)) & 15) ^ 8;
                    let shift = 4 * (b % 2);
                    row[b / 2] = row[b / 2] & !(15 << shift) | negative << shift;
                }
            }
        }
    }
    let sizes = (world.hidden, world.intermediate);
    for index in 0..world.routed.len() {
        let Stored { codes, scales, .. } = &world.routed[if index == 1 { 0 } else { index }];
        let (mut codes, scales) = (codes.clone(), scales.clone());
        if index == 1 {
            codes[2].iter_mut().for_each(|byte| *byte ^= 0x88);
        }
        world.routed[index] = Stored::of(codes, scales, sizes, reference::dequantise);
    }
    for (weight, expert) in world.routing.iter_mut().zip(&world.selected) {
        *weight = if *expert < 2 { 1.0 } else { 2f32.powi(-22) };
    }
    // Next to nothing.
    let mut quiet = world.shared.scales.clone();
    quiet.iter_mut().flatten().for_each(|scale| *scale -= 20 + LESS as u8);
    world.shared = Stored::of(world.shared.codes.clone(), quiet, sizes, linear_fp8::reference::dequantise);
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (hidden, intermediate, picks) = (case.size("hidden"), case.size("intermediate"), case.size("picks"));
    let (sizes, matrices) = ((hidden, intermediate), matrices(hidden, intermediate));
    let routed = (0..case.size("experts"))
        .map(|_| {
            let codes = matrices.map(|(rows, columns)| values.bytes(rows * columns / 2));
            let scales = matrices.map(|(rows, columns)| values.e8m0(rows * columns / 32, -5));
            Stored::of(codes, scales, sizes, reference::dequantise)
        })
        .collect();
    let codes = matrices.map(|(rows, columns)| values.e4m3(rows * columns));
    let scales = matrices.map(|(rows, columns)| values.e8m0(rows.div_ceil(32) * (columns / 32), -11));
    let shared = Stored::of(codes, scales, sizes, linear_fp8::reference::dequantise);
    let selected = (0..case.rows).flat_map(|_| values.distinct(picks, case.size("experts"))).collect();
    let routing = (0..case.rows * picks).map(|_| values.unit().abs() + 0.125).collect();
    let x = values.qdq8(case.rows * hidden, 2.0);
    let limit = case.size("limit") as f32;
    let mut world =
        Experts { hidden, intermediate, picks, limit, rows: case.rows, x, routed, shared, selected, routing };
    if case.name == CANCELLING {
        cancel(&mut world, &mut values);
    }
    Box::new(world)
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
