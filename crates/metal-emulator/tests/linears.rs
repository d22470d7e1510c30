//! The Metal linears, as `kernels.rs` says, their bits being those of the mirror in `tf_numerics::sum`: FP8, and the experts.

mod common;

use common::*;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::{linear_bf16, linear_fp8, moe_experts, moe_route};
use tf_numerics::lanes::Level;

/// A weight of E4M3 codes with one scale a 32 x 32 block.
struct Fp8 {
    codes: Vec<u8>,
    scales: Vec<u8>,
    columns: usize,
}

impl Fp8 {
    fn new(values: &mut Values, outputs: usize, columns: usize) -> Fp8 {
        let code = |values: &mut Values| values.below(127) as u8 | (values.below(2) as u8 * 128);
        let codes = (0..outputs * columns).map(|_| code(values)).collect();
        let scales = (0..outputs.div_ceil(32) * columns.div_ceil(32)).map(|_| 114 + values.below(8) as u8).collect();
        Fp8 { codes, scales, columns }
    }
    /// The bits of one output.
    fn dot(&self, output: usize, x: &[f32]) -> f32 {
        let codes = &self.codes[output * self.columns..(output + 1) * self.columns];
        let blocks = self.columns.div_ceil(32);
        let w: Vec<f32> = codes.iter().map(|&code| tf_numerics::fp8::decode_e4m3(code)).collect();
        let scales = self.scales[output / 32 * blocks..][..blocks].iter().map(|&s| tf_numerics::fp8::decode_e8m0(s));
        tf_numerics::sum::dot_scaled(&w, &scales.collect::<Vec<_>>(), x)
    }
    fn exact(&self) -> Vec<f64> {
        linear_fp8::reference::dequantise(&self.codes, &self.scales, self.columns)
    }
}

/// A weight of E2M1 codes, two a byte as stored, with one scale for 32 columns.
struct Fp4 {
    codes: Vec<u8>,
    scales: Vec<u8>,
    columns: usize,
}

impl Fp4 {
    fn new(values: &mut Values, outputs: usize, columns: usize) -> Fp4 {
        let codes = (0..outputs * columns / 2).map(|_| values.below(256) as u8).collect();
        let scales = (0..outputs * columns / 32).map(|_| 116 + values.below(8) as u8).collect();
        Fp4 { codes, scales, columns }
    }
    fn code(&self, output: usize, column: usize) -> u8 {
        let at = output * self.columns + column;
        self.codes[at / 2] >> (4 * (at % 2)) & 15
    }
    /// Layout B, rows padded with zeros.
    fn packed(&self) -> Vec<u8> {
        let outputs = 2 * self.codes.len() / self.columns;
        let mut packed = Vec::new();
        for output in 0..outputs {
            for first in (0..self.columns).step_by(128) {
                let codes = std::array::from_fn(|i| match first + i {
                    column if column < self.columns => self.code(output, column),
                    _ => 0,
                });
                packed.extend(tf_numerics::mxfp4::pack_group(&codes));
            }
        }
        packed
    }
    fn dot(&self, output: usize, x: &[f32]) -> f32 {
        let w: Vec<f32> =
            (0..self.columns).map(|column| tf_numerics::mxfp4::E2M1[self.code(output, column) as usize]).collect();
        let groups = self.columns / 32;
        let scales = self.scales[output * groups..][..groups].iter().map(|&s| tf_numerics::fp8::decode_e8m0(s));
        tf_numerics::sum::dot_scaled(&w, &scales.collect::<Vec<_>>(), x)
    }
    /// Outputs `from..from + count`.
    fn exact(&self, from: usize, count: usize) -> Vec<f64> {
        let codes = &self.codes[from * self.columns / 2..(from + count) * self.columns / 2];
        let scales = &self.scales[from * self.columns / 32..(from + count) * self.columns / 32];
        moe_experts::reference::dequantise(codes, scales, self.columns)
    }
}

/// The dot products as a part of the text, so that their edits can be planted; the header is then included once.
fn with_dots(source: &str) -> String {
    let dots = include_str!("../../kernels/src/shared/linear.metal");
    [dots, "\n", source].concat().replace("#include \"linear.metal\"\n", "")
}

fn qdq8(row: &mut [f32]) {
    tf_numerics::qdq::round_row(Level::Scalar, tf_numerics::qdq::Format::Fp8, row);
}

#[test]
fn fp8_linear() {
    if !ready("fp8_linear") {
        return;
    }
    let source = include_str!("../../kernels/src/linear_fp8/kernel.metal");
    let mut values = Values::new(9);
    for (rows, outputs, columns, groups) in [(3, 70, 200, 1), (2, 64, 96, 2)] {
        let weight = Fp8::new(&mut values, outputs, columns);
        let mut x = values.bf16(rows * groups * columns, 2.0);
        x.chunks_mut(columns).for_each(qdq8);
        let input_of = |row: usize, n: usize| {
            let part = n / (outputs / groups);
            &x[(row * groups + part) * columns..][..columns]
        };
        let sums: Vec<f32> =
            (0..rows * outputs).map(|i| weight.dot(i % outputs, input_of(i / outputs, i % outputs))).collect();
        let wanted: Vec<f32> = sums.iter().map(|&sum| tf_numerics::bf16::round(sum)).collect();
        let metal = |program: &_, simdgroups, x: &[f32], round: u32| {
            let rows = x.len() / (groups * columns);
            let sizes = shape(&[rows as u32, outputs as u32, columns as u32, groups as u32, round]);
            let mut args = [input(x), input(&weight.codes), input(&weight.scales), output(rows * outputs), sizes];
            run(program, "linear_fp8", outputs, simdgroups, &mut args).map(|()| outputs_of(&args, 3))
        };
        let edits = [
            ("scale of another block row", "scales + n / 32u * (", "scales + (n + 1u) / 32u * ("),
            ("input of group 0", "ulong(row * shape.groups + part) * columns", "ulong(row * shape.groups) * columns"),
            ("missing rounding", "shape.round != 0u ? bf16_round(sum) : sum", "sum"),
            ("one row for all", "x + ulong(row * shape.groups + part)", "x + ulong(part)"),
        ];
        let edits = if groups == 1 { vec![edits[0], edits[2], edits[3]] } else { vec![edits[1]] };
        prove("linear_fp8", source, &[bytes(&wanted).to_vec()], &edits, |program, simdgroups| {
            metal(program, simdgroups, &x, 1).map(|out| vec![out])
        });
        let program = build("linear_fp8", source);
        let alone = metal(&program, 2, &x[groups * columns..2 * groups * columns], 0).unwrap();
        assert_eq!(floats(&alone), sums[outputs..2 * outputs], "a row alone, unrounded");
        let exact = weight.exact();
        for (i, sum) in sums.iter().enumerate() {
            let (w, x) = (&exact[i % outputs * columns..][..columns], input_of(i / outputs, i % outputs));
            let wanted: f64 = w.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum();
            let magnitude: f64 = w.iter().zip(x).map(|(w, x)| (w * f64::from(*x)).abs()).sum();
            // Two roundings a group of a lane, one a group of an accumulator, six of the folds.
            let bound = F32 * (2.0 + columns as f64 / 128.0 + 7.0) * magnitude;
            assert!((f64::from(*sum) - wanted).abs() <= bound, "output {i}");
        }
    }
}

#[test]
fn experts() {
    if !ready("experts") {
        return;
    }
    let source = with_dots(include_str!("../../kernels/src/moe_experts/kernel.metal"));
    let (rows, hidden, intermediate, picks, expert_count, limit) = (2, 160, 96, 2, 4, 7.0f32);
    let mut values = Values::new(10);
    let [w1, w3] = [0, 1].map(|_| Fp4::new(&mut values, expert_count * intermediate, hidden));
    let w2 = Fp4::new(&mut values, expert_count * hidden, intermediate);
    let [shared1, shared3] = [0, 1].map(|_| Fp8::new(&mut values, intermediate, hidden));
    let shared2 = Fp8::new(&mut values, hidden, intermediate);
    let mut x = values.bf16(rows * hidden, 1.0);
    x.chunks_mut(hidden).for_each(qdq8);
    // One row's picks ascend, the other's don't.
    let chosen = [0u32, 2, 3, 1];
    let weights = [0.7f32, 1.3, 0.4, 0.9];

    let silu = |x: f32| tf_numerics::math::silu::<f32>(x);
    let gated = |gate: f32, up: f32| {
        let (gate, up) = (tf_numerics::bf16::round(gate), tf_numerics::bf16::round(up));
        silu(gate.min(limit)) * up.clamp(-limit, limit)
    };
    let (mut activations, mut wanted) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let x = &x[row * hidden..(row + 1) * hidden];
        for pick in 0..=picks {
            let mut activation: Vec<f32> = (0..intermediate)
                .map(|i| {
                    if pick == picks {
                        return tf_numerics::bf16::round(gated(shared1.dot(i, x), shared3.dot(i, x)));
                    }
                    let at = chosen[row * picks + pick] as usize * intermediate + i;
                    tf_numerics::bf16::round(gated(w1.dot(at, x), w3.dot(at, x)) * weights[row * picks + pick])
                })
                .collect();
            qdq8(&mut activation);
            activations.extend(activation);
        }
        for n in 0..hidden {
            let of = |pick: usize| &activations[(row * (picks + 1) + pick) * intermediate..][..intermediate];
            let mut sum = 0f32;
            let mut order: Vec<usize> = (0..picks).collect();
            order.sort_by_key(|pick| chosen[row * picks + pick]);
            for pick in order {
                sum += tf_numerics::bf16::round(w2.dot(chosen[row * picks + pick] as usize * hidden + n, of(pick)));
            }
            sum += tf_numerics::bf16::round(shared2.dot(n, of(picks)));
            wanted.push(tf_numerics::bf16::round(sum));
        }
    }
    let mut packed = Vec::new();
    let part = |bytes: &[u8], expert: usize| {
        bytes[bytes.len() / expert_count * expert..][..bytes.len() / expert_count].to_vec()
    };
    for expert in 0..expert_count {
        for weight in [&w1, &w3, &w2] {
            packed.extend(part(&weight.packed(), expert));
        }
        for weight in [&w1, &w3, &w2] {
            packed.extend(part(&weight.scales, expert));
        }
    }
    let metal = |program: &_, simdgroups, from: usize, to: usize| -> Result<Vec<Vec<u8>>, String> {
        let rows = to - from;
        let sizes = shape(&[rows as u32, hidden as u32, intermediate as u32, picks as u32, limit.to_bits()]);
        let chosen = input(&chosen[from * picks..to * picks]);
        let mut up = [
            input(&x[from * hidden..to * hidden]),
            chosen.clone(),
            input(&weights[from * picks..to * picks]),
            input(&packed),
            input(&shared1.codes),
            input(&shared1.scales),
            input(&shared3.codes),
            input(&shared3.scales),
            output(rows * (picks + 1) * intermediate),
            sizes.clone(),
        ];
        run(program, "moe_up", rows * (picks + 1) * intermediate / 32, simdgroups, &mut up)?;
        let activations = bytes_of(&up[8]).to_vec();
        let (codes, code_scales) = (input(&shared2.codes), input(&shared2.scales));
        let mut down = [input(&activations), chosen, input(&packed), codes, code_scales, output(rows * hidden), sizes];
        run(program, "moe_down", rows * hidden, simdgroups, &mut down)?;
        Ok(vec![activations, outputs_of(&down, 5)])
    };
    let edits = [
        ("wrong nibble", "codes[16u * block + l] >> 8u * h", "codes[16u * block + l] >> 8u * (1u - h)"),
        ("stale scale", "const uint g0 = 4u * block + h, g1 = g0 + 2u;", "const uint g0 = 4u * block + h, g1 = g0;"),
        ("dropped group", "block < (columns + 127u) / 128u; block++", "block < columns / 128u; block++"),
        ("missing clamp", "up = up < -limit ? -limit : up > limit ? limit : up;", "up = up > limit ? limit : up;"),
        ("missing routing weight", "if (!is_shared) value = value * weights[row * shape.picks + pick];", ""),
        ("missing QDQ8", "activations[to] = fp8_round(bf16_round(value));", "activations[to] = bf16_round(value);"),
        ("expert 0 for all", "experts + ulong(id) * places.stride", "experts"),
        (
            "shared expert left out",
            "    sum = sum + bf16_round(dot_fp8(shared2",
            "    sum = sum + 0.0f * bf16_round(dot_fp8(shared2",
        ),
        ("unrounded experts", "sum = sum + bf16_round(product);", "sum = sum + product;"),
        ("order of the picks", "if (other >= least && other < id)", "if (p == added)"),
    ];
    let outputs = [bytes(&activations).to_vec(), bytes(&wanted).to_vec()];
    prove("moe_experts", &source, &outputs, &edits, |program, simdgroups| metal(program, simdgroups, 0, rows));
    let alone = metal(&build("moe_experts", &source), 2, 1, 2).unwrap();
    assert_eq!(floats(&alone[1]), wanted[hidden..], "a row alone");

    // Whole rows against the definition; the clamp must have been met, or it proves nothing.
    let mut clamped = 0;
    for row in 0..rows {
        let x = wide(&x[row * hidden..(row + 1) * hidden]);
        let expert = |id: usize| moe_experts::reference::Expert {
            w1: w1.exact(id * intermediate, intermediate),
            w2: w2.exact(id * hidden, hidden),
            w3: w3.exact(id * intermediate, intermediate),
        };
        let experts: Vec<_> = (0..expert_count).map(expert).collect();
        let shared = moe_experts::reference::Expert { w1: shared1.exact(), w2: shared2.exact(), w3: shared3.exact() };
        let route = moe_route::reference::Route {
            experts: chosen[row * picks..(row + 1) * picks].to_vec(),
            weights: wide(&weights[row * picks..(row + 1) * picks]),
        };
        let release = moe_experts::reference::moe(&x, &route, &experts, &shared, limit.into(), Numerics::Release);
        let largest = release.iter().fold(0f64, |max, v| max.max(v.abs()));
        // A bf16 rounding that falls the other way in float32 moves an activation by a step; the outputs stay within a few.
        assert_close("moe", &wanted[row * hidden..(row + 1) * hidden], &release, |_| largest * 4.0 * BF16);
        let up = tf_kernels::reference_formats::product(&x, &shared.w3, hidden);
        clamped += up.iter().filter(|up| up.abs() > limit.into()).count();
    }
    println!("moe_experts: {clamped} values were clamped");
    assert!(clamped > 0, "no value met the clamp");
}

#[test]
fn unquantised_linears() {
    if !ready("unquantised_linears") {
        return;
    }
    let source = with_dots(include_str!("../../kernels/src/linear_bf16/kernel.metal"));
    let source = source.as_str();
    let (rows, outputs, columns) = (3, 11, 200);
    let mut values = Values::new(11);
    let x = values.f32(rows * columns, 2.0);
    let (rounded, full) = (values.bf16(outputs * columns, 1.0), values.f32(outputs * columns, 1.0));
    let codes: Vec<u16> = rounded.iter().map(|&w| tf_numerics::bf16::from_f32(w)).collect();
    let wanted = |w: &[f32]| -> Vec<f32> {
        let dot = |i: usize| {
            let (row, n) = (i / outputs, i % outputs);
            tf_numerics::sum::dot_plain(&w[n * columns..][..columns], &x[row * columns..][..columns])
        };
        (0..rows * outputs).map(dot).collect()
    };
    let metal = |program: &_, simdgroups, from: usize, to: usize| -> Result<Vec<Vec<u8>>, String> {
        let rows = to - from;
        let mut all = Vec::new();
        for (kernel, weights, round) in [("linear_bf16", input(&codes), 1), ("linear_f32", input(&full), 0)] {
            let sizes = shape(&[rows as u32, outputs as u32, columns as u32, round]);
            let part = input(&x[from * columns..to * columns]);
            let mut args = [part, weights, output(rows * outputs), sizes];
            run(program, kernel, outputs, simdgroups, &mut args)?;
            all.push(outputs_of(&args, 2));
        }
        Ok(all)
    };
    let bf16: Vec<f32> = wanted(&rounded).into_iter().map(tf_numerics::bf16::round).collect();
    let (plain, edits) = (
        wanted(&full),
        [
            (
                "off-by-one tail",
                "c0 < columns ? value_of(w[c0]) : 0.0f,",
                "c0 + 1u < columns ? value_of(w[c0]) : 0.0f,",
            ),
            ("reassociated sum", "if ((g & 2u) == 0u) even = fma(w1, x1", "if ((g & 4u) == 0u) even = fma(w1, x1"),
            ("product not fused", "odd = fma(w1, x1, fma(w0, x0, odd));", "odd = fma(w1, x1, w0 * x0 + odd);"),
        ],
    );
    let outputs_wanted = [bytes(&bf16).to_vec(), bytes(&plain).to_vec()];
    prove("linear_bf16", source, &outputs_wanted, &edits, |program, simdgroups| metal(program, simdgroups, 0, rows));
    let alone = metal(&build("linear_bf16", source), 2, 1, 2).unwrap();
    assert_eq!(floats(&alone[1]), plain[outputs..2 * outputs], "a row alone");
    let exact = linear_bf16::reference::linear_f32(&wide(&x), &wide(&full), columns);
    for (i, (got, wanted)) in plain.iter().zip(&exact).enumerate() {
        let (row, n) = (i / outputs, i % outputs);
        let (x, w) = (&x[row * columns..][..columns], &full[n * columns..][..columns]);
        let magnitude: f64 = x.iter().zip(w).map(|(x, w)| f64::from(x * w).abs()).sum();
        // Two roundings a group of an accumulator, six of the folds.
        assert!((f64::from(*got) - wanted).abs() <= F32 * (columns as f64 / 64.0 + 9.0) * magnitude, "output {i}");
    }
}
