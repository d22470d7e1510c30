//! The Metal kernels: equal bits with the CPU's launch, whose order they share, within a bound of the float64 definition,
//! equal over threadgroup sizes and fiber orders, a row alone as in company; and planted edits that must be caught.
//! Here: norms, hyper-connections, router and n-gram memory.

mod common;

use common::*;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::{embed, engram, hyper, moe_route, rms_norm};
use tf_numerics::lanes::Level;
use tf_numerics::qdq::Format;

#[test]
fn rms_norm() {
    if !ready("rms_norm") {
        return;
    }
    let source = include_str!("../../kernels/src/rms_norm/kernel.metal");
    let (rows, columns, eps) = (5, 160, 1e-20f32);
    let mut values = Values::new(1);
    let (x, weight) = (values.bf16(rows * columns, 3.0), values.bf16(columns, 2.0));
    let (mut normed, mut quantised) = (device(&vec![0f32; x.len()]), device(&vec![0f32; x.len()]));
    let args = rms_norm::Args {
        x: &device(&x),
        weight: &device(&weight),
        rows,
        columns,
        eps,
        normed: Some(&mut normed),
        quantised: Some(&mut quantised),
    };
    rms_norm::launch(&mut queue(), args).unwrap();
    let metal = |program: &_, simdgroups, x: &[f32]| {
        let rows = x.len() / columns;
        let shape = shape(&[rows as u32, columns as u32, eps.to_bits(), 3]);
        let mut args = [input(x), input(&weight), output(x.len()), output(x.len()), shape];
        run(program, "rms_norm", rows, simdgroups, &mut args).map(|()| outputs(&args, &[2, 3]))
    };
    let edits = [
        ("dropped last columns", "first < columns; first += 32u", "first + 32u < columns; first += 32u"),
        ("wrong SIMD width", "first < columns; first += 32u", "first < columns; first += 16u"),
        ("row off by one", "x + row * columns", "x + (row ^ 1u) * columns"),
        ("missing bf16 rounding", "bf16_round(weight[c] * (in[c] * factor))", "weight[c] * (in[c] * factor)"),
        ("another mean", "columns, lane), columns, shape.eps)", "columns, lane), columns - 1u, shape.eps)"),
        ("missing row bound", "    if (row >= shape.rows) return;\n", ""),
    ];
    let wanted = [bytes(normed.f32()).to_vec(), bytes(quantised.f32()).to_vec()];
    prove("rms_norm", source, &wanted, &edits, |program, simdgroups| metal(program, simdgroups, &x));
    let program = build("rms_norm", source);
    let alone = metal(&program, 2, &x[3 * columns..4 * columns]).unwrap();
    assert_eq!(floats(&alone[0]), normed.f32()[3 * columns..4 * columns], "a row alone");
    let exact = rms_norm::reference::rms_norm(&wide(&x), &wide(&weight), eps.into(), Numerics::Exact);
    // Of the sum of squares half of its relative error enters the factor; then four roundings and one to bf16.
    let relative = BF16 + F32 * (columns as f64 / 64.0 + 6.0 + 8.0);
    assert_close("rms_norm", normed.f32(), &exact, |i| exact[i].abs() * relative);
    // A row with a NaN, an infinity or zeros keeps to itself.
    let mut damaged = x.clone();
    damaged[7] = f32::NAN;
    damaged[columns + 9] = f32::INFINITY;
    damaged[2 * columns..3 * columns].fill(0.0);
    let got = metal(&program, 3, &damaged).unwrap();
    assert_eq!(floats(&got[0])[3 * columns..], normed.f32()[3 * columns..], "neighbours");
    assert_eq!(floats(&got[0])[2 * columns..3 * columns], vec![0.0; columns], "a row of zeros");
}

#[test]
fn hyper_connections() {
    if !ready("hyper_connections") {
        return;
    }
    let source = include_str!("../../kernels/src/hyper/kernel.metal");
    let (rows, hidden) = (3, 96);
    let constants = hyper::Constants { iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 };
    let mut values = Values::new(2);
    let y = values.bf16(rows * hidden, 2.0);
    let streams = values.bf16(rows * 4 * hidden, 3.0);
    let mix: Vec<f32> = values.f32(rows * 4, 0.4).iter().map(|v| v + 0.5).collect();
    let post: Vec<f32> = values.f32(rows * 4, 0.9).iter().map(|v| v + 1.0).collect();
    let comb: Vec<f32> = values.f32(rows * 16, 0.2).iter().map(|v| v + 0.25).collect();
    let function = values.f32(24 * 4 * hidden, 0.3);
    let (base, scale, norm) = (values.f32(24, 1.0), values.f32(3, 0.7), values.bf16(hidden, 2.0));

    let mut of = (device(&streams), device(&mix), device(&post), device(&comb));
    let (mut normed, mut quantised) = (device(&vec![0f32; rows * hidden]), device(&vec![0f32; rows * hidden]));
    let mut scratch = device(&vec![0f32; rows * hyper::SCRATCH_FLOATS]);
    let (y_buffer, norm_buffer) = (device(&y), device(&norm));
    let (function_buffer, base_buffer, scale_buffer) = (device(&function), device(&base), device(&scale));
    let args = hyper::EnterArgs {
        y: Some(&y_buffer),
        streams: &mut of.0,
        mix: &mut of.1,
        post: &mut of.2,
        comb: &mut of.3,
        weights: hyper::MixWeights { function: &function_buffer, base: &base_buffer, scale: &scale_buffer },
        norm: &norm_buffer,
        constants,
        rows,
        hidden,
        normed: Some(&mut normed),
        quantised: Some(&mut quantised),
        scratch: &mut scratch,
    };
    hyper::launch_enter(&mut queue(), args).unwrap();

    // The three launches on rows `from..to`: streams, mix, post, comb, normed, quantised, collapsed.
    let metal = |program: &_, simdgroups: u32, from: usize, to: usize| -> Result<Vec<Vec<u8>>, String> {
        let rows = to - from;
        let part = |values: &[f32], width: usize| values[from * width..to * width].to_vec();
        let bits = [constants.hc_eps.to_bits(), constants.norm_eps.to_bits(), 0, 0];
        let shape = shape(&[&[rows as u32, hidden as u32, constants.iterations, 15][..], &bits].concat());
        let (streams, mix) = (in_place(&part(&streams, 4 * hidden)), in_place(&part(&mix, 4)));
        let (post, comb) = (in_place(&part(&post, 4)), in_place(&part(&comb, 16)));
        let mut expand =
            [input(&part(&y, hidden)), streams, input(bytes_of(&post)), input(bytes_of(&comb)), shape.clone()];
        run(program, "hyper_expand", (rows * hidden).div_ceil(32), simdgroups, &mut expand)?;
        let streams = bytes_of(&expand[1]).to_vec();
        let mut products = [input(&streams), input(&function), output(rows * 32), shape.clone()];
        run(program, "hyper_products", rows * 13, simdgroups, &mut products)?;
        let scratch = input(bytes_of(&products[2]));
        let out = || output(rows * hidden);
        let (base, scale, norm) = (input(&base), input(&scale), input(&norm));
        let mut finish = [input(&streams), mix, post, comb, base, scale, norm, scratch, out(), out(), out(), shape];
        run(program, "hyper_finish", rows, simdgroups, &mut finish)?;
        let mut all = vec![streams];
        all.extend(outputs(&finish, &[1, 2, 3, 8, 9, 10]));
        Ok(all)
    };
    let collapsed: Vec<f32> = (0..rows)
        .flat_map(|r| {
            let row = wide(&of.0.f32()[r * 4 * hidden..(r + 1) * 4 * hidden]);
            hyper::reference::collapse(&row, &wide(&mix[r * 4..r * 4 + 4]), Numerics::Release)
        })
        .map(|value| value as f32)
        .collect();
    let mut wanted: Vec<Vec<u8>> =
        [&of.0, &of.1, &of.2, &of.3, &normed, &quantised].iter().map(|buffer| bytes(buffer.f32()).to_vec()).collect();
    wanted.push(bytes(&collapsed).to_vec());
    let edits = [
        (
            "transposed comb",
            "device const float *weights = comb + row * 16u + j;",
            "device const float *weights = comb + row * 16u + 3u - j;",
        ),
        (
            "stale stream",
            "x2 = x[2u * hidden], x3 = x[3u * hidden], out",
            "x2 = x[2u * hidden], x3 = x[2u * hidden], out",
        ),
        ("unrounded expand", "bf16_round(sum + post[row * 4u + j] * out)", "sum + post[row * 4u + j] * out"),
        ("shortened product", "c < width; c += 16u) sum", "c + 16u < width; c += 16u) sum"),
        ("product over both halves", "output = 2u * pair + lane / 16u", "output = 2u * pair"),
        ("dropped barrier before the new mix", "    simdgroup_barrier(mem_flags::mem_device);\n", ""),
        ("one iteration fewer", "uint i = 1u; i < shape.iterations", "uint i = 2u; i < shape.iterations"),
        ("missing eps", "value / sum4(value, row_base, 1u) + eps;", "value / sum4(value, row_base, 1u);"),
        ("wrong maximum", "max_second(max_second(max_second(v0, v1), v2), v3)", "max_second(max_second(v0, v1), v2)"),
        ("swapped scales", "* scale[2] + base[8u + at]", "* scale[1] + base[8u + at]"),
        ("reassociated sum of four", "return ((v0 + v1) + v2) + v3;", "return (v0 + v1) + (v2 + v3);"),
    ];
    prove("hyper", source, &wanted, &edits, |program, simdgroups| metal(program, simdgroups, 0, rows));
    let program = build("hyper", source);
    let alone = metal(&program, 2, 2, 3).unwrap();
    for (i, (alone, wanted)) in alone.iter().zip(&wanted).enumerate() {
        assert_eq!(alone[..], wanted[wanted.len() / rows * 2..], "a row alone: output {i}");
    }

    for r in 0..rows {
        let at = |values: &[f32], width: usize| wide(&values[r * width..(r + 1) * width]);
        let old = hyper::reference::Mixes { pre: Vec::new(), post: at(&post, 4), comb: at(&comb, 16) };
        let x = hyper::reference::expand(&at(&y, hidden), &at(&streams, 4 * hidden), &old, Numerics::Exact);
        // Five products and sums in float32 of values below 3 * 0.45 * 4 + 2 * 2, then bf16.
        assert_close("expand", &of.0.f32()[r * 4 * hidden..][..4 * hidden], &x, |i| {
            x[i].abs() * BF16 + 10.0 * F32 * 10.0
        });
        let constants = hyper::reference::MixConstants { hc: 4, iterations: 20, hc_eps: 1e-6, rms_eps: 1e-20 };
        let stored = at(of.0.f32(), 4 * hidden);
        let mixes = hyper::reference::mixes(&stored, &wide(&function), &wide(&scale), &wide(&base), constants);
        // z: a chain of hidden / 4 steps over products whose magnitudes add up to at most 0.3 * sqrt(4 hidden) * sqrt(4 hidden)
        // relative to the root mean square; the sinkhorn contracts, each of its steps adds some roundings.
        let z_bound = F32 * (hidden as f64 / 4.0 + 16.0) * 0.3 * 4.0 * hidden as f64 * 0.7;
        let bound = 2.0 * z_bound + 400.0 * F32;
        for (name, got, wanted) in
            [("pre", &of.1, &mixes.pre), ("post", &of.2, &mixes.post), ("comb", &of.3, &mixes.comb)]
        {
            let width = wanted.len();
            assert_close(name, &got.f32()[r * width..(r + 1) * width], wanted, |_| bound);
        }
    }
}

#[test]
fn router() {
    if !ready("router") {
        return;
    }
    let source = include_str!("../../kernels/src/moe_route/kernel.metal");
    let (rows, experts, top_k, factor) = (5, 72, 6, 1.5f32);
    let mut values = Values::new(3);
    let mut logits = values.f32(rows * experts, 4.0);
    let (mut bias, bias_image) = (values.f32(experts, 0.5), values.f32(experts, 0.5));
    // Ties across lanes and slots, decided by the smaller id; a NaN and infinities in another row.
    for id in [3, 35, 40, 70, 5, 37, 69, 41] {
        logits[experts + id] = 9.0;
        bias[id] = 0.25;
    }
    for id in 0..experts {
        logits[2 * experts + id] = if id % 3 == 0 { f32::NAN } else { -200.0 };
    }
    logits[3 * experts + 9] = f32::INFINITY;
    let image = [false, false, false, false, true];
    let (mut chosen, mut weights) = (device(&vec![0u32; rows * top_k]), device(&vec![0f32; rows * top_k]));
    let args = moe_route::Args {
        logits: &device(&logits),
        bias: &device(&bias),
        bias_image: Some(&device(&bias_image)),
        image: &image,
        rows,
        experts,
        top_k,
        factor,
        chosen: &mut chosen,
        weights: &mut weights,
    };
    moe_route::launch(&mut queue(), args).unwrap();
    let metal = |program: &_, simdgroups, from: usize, to: usize| {
        let image: Vec<u8> = image[from..to].iter().map(|&is| u8::from(is)).collect();
        let mut args = [
            input(&logits[from * experts..to * experts]),
            input(&bias),
            input(&bias_image),
            input(&image),
            output((to - from) * top_k),
            output((to - from) * top_k),
            shape(&[(to - from) as u32, experts as u32, top_k as u32, factor.to_bits(), 1]),
        ];
        run(program, "moe_route", to - from, simdgroups, &mut args).map(|()| outputs(&args, &[4, 5]))
    };
    let wanted = [bytes(chosen.u32()).to_vec(), bytes(weights.f32()).to_vec()];
    let edits = [
        ("tie to the larger id", "id = simd_min(id);", "id = simd_max(id == 0xffffffffu ? 0u : id);"),
        (
            "tie within a lane",
            "for (uint s = slots; s > 0u; s--) {\n            if (keys[s - 1u] == best) id = 32u * (s - 1u) + lane;",
            "for (uint s = 1u; s <= slots; s++) {\n            if (keys[s - 1u] == best) id = 32u * (s - 1u) + lane;",
        ),
        ("bias in the weight", "weights[place] = scores[s] /", "weights[place] = (scores[s] + bias[32u * s + lane]) /"),
        (
            "image rows without their bias",
            "image[row] != 0 ? bias_image[id] : bias[id]",
            "image[row] == 2 ? bias_image[id] : bias[id]",
        ),
        ("expert tail", "if (id < shape.experts) {", "if (id + 8u < shape.experts) {"),
        ("unsorted output", "popcount(mask & ((1u << lane) - 1u))", "popcount(mask & ~((2u << lane) - 1u))"),
        ("NaN above all", "max(order_key(value), 0x007fffffu)", "value != value ? 0xffffffffu : order_key(value)"),
    ];
    prove("moe_route", source, &wanted, &edits, |program, simdgroups| metal(program, simdgroups, 0, rows));
    let alone = metal(&build("moe_route", source), 2, 4, 5).unwrap();
    assert_eq!(words(&alone[0]), chosen.u32()[4 * top_k..], "a row alone");
    for row in [0, 1] {
        let one = wide(&logits[row * experts..(row + 1) * experts]);
        // The definition multiplies by a gate: here the unit matrix's single column a logit.
        let route = moe_route::reference::route(&[1.0], &one, &wide(&bias), top_k, factor.into());
        assert_eq!(chosen.u32()[row * top_k..(row + 1) * top_k], route.experts);
        // softplus 2 ulp, square root, five additions, a division and a product.
        let got = &weights.f32()[row * top_k..(row + 1) * top_k];
        assert_close("weights", got, &route.weights, |i| route.weights[i].abs() * 24.0 * F32);
    }
}

#[test]
fn engram_memory() {
    if !ready("engram_memory") {
        return;
    }
    let source = include_str!("../../kernels/src/engram/kernel.metal");
    let (rows, hidden, eps) = (3, 96, 1e-20f32);
    let mut values = Values::new(4);
    let (table_rows, head_dim) = (9, 64);
    let codes: Vec<u8> =
        (0..table_rows * head_dim).map(|_| values.below(127) as u8 | (values.below(2) as u8 * 128)).collect();
    let scales: Vec<u8> = (0..table_rows * head_dim / 32).map(|_| 92 + values.below(38) as u8).collect();
    let ids = [8u32, 0, 3, 3, 5, 7, 1];
    let streams = values.bf16(rows * 4 * hidden, 3.0);
    let kv = values.bf16(rows * 5 * hidden, 2.0);
    let (q_weight, k_weight) = (values.bf16(4 * hidden, 1.5), values.bf16(4 * hidden, 1.5));
    let image = [false, true, false];

    let mut gathered = device(&vec![0f32; ids.len() * head_dim]);
    let args = engram::GatherArgs {
        codes: &codes,
        scales: &scales,
        ids: &ids,
        columns: ids.len(),
        head_dim,
        quantise: true,
        out: &mut gathered,
    };
    engram::launch_gather(&mut queue(), args).unwrap();
    let mut updated = device(&streams);
    let args = engram::GateArgs {
        streams: &mut updated,
        kv: &device(&kv),
        q_weight: &device(&q_weight),
        k_weight: &device(&k_weight),
        eps,
        image: &image,
        rows,
        hidden,
    };
    engram::launch_gate(&mut queue(), args).unwrap();

    let metal = |program: &_, simdgroups, from: usize, to: usize| -> Result<Vec<Vec<u8>>, String> {
        let gather_shape = shape(&[ids.len() as u32, head_dim as u32, 1, 0, 0]);
        let out = output(ids.len() * head_dim);
        let mut gather = [input(&codes), input(&scales), input(&ids), out, gather_shape];
        run(program, "engram_gather", ids.len(), simdgroups, &mut gather)?;
        let image: Vec<u8> = image[from..to].iter().map(|&is| u8::from(is)).collect();
        let mut gate = [
            in_place(&streams[from * 4 * hidden..to * 4 * hidden]),
            input(&kv[from * 5 * hidden..to * 5 * hidden]),
            input(&q_weight),
            input(&k_weight),
            input(&image),
            shape(&[4 * (to - from) as u32, hidden as u32, 0, eps.to_bits(), 1]),
        ];
        run(program, "engram_gate", 4 * (to - from), simdgroups, &mut gate)?;
        Ok(vec![bytes_of(&gather[3]).to_vec(), bytes_of(&gate[0]).to_vec()])
    };
    let wanted = [bytes(gathered.f32()).to_vec(), bytes(updated.f32()).to_vec()];
    let edits = [
        ("stale scale", "scales[row * (shape.columns / 32u) + block]", "scales[row * (shape.columns / 32u)]"),
        ("row of the item", "const ulong row = ids[item];", "const ulong row = item;"),
        ("missing QDQ8", "if (shape.quantise != 0u) value = fp8_round(value);", ""),
        ("key of the next stream", "kv + (row * 5u + i) * hidden", "kv + (row * 5u + (i + 1u) % 4u) * hidden"),
        ("value of a key", "kv + (row * 5u + 4u) * hidden", "kv + (row * 5u + 3u) * hidden"),
        ("off-by-one tail", "c += 64u) {\n        even", "c += 64u) {\n        if (c + 1u < hidden) even"),
        ("missing tail bound", "if (d < hidden) odd", "odd"),
        ("image rows changed", "    if (shape.has_images != 0u && image[row] != 0) return;\n", ""),
        ("missing root of the width", " / sqrt(float(hidden));", ";"),
        ("lost sign", "| (to_bits(d) & 0x80000000u)", "| 0u"),
    ];
    prove("engram", source, &wanted, &edits, |program, simdgroups| metal(program, simdgroups, 0, rows));
    let program = build("engram", source);
    let alone = metal(&program, 2, 2, 3).unwrap();
    assert_eq!(floats(&alone[1]), updated.f32()[8 * hidden..], "a row alone");
    for r in [0, 2] {
        let at = |values: &[f32], width: usize| wide(&values[r * width..(r + 1) * width]);
        let (x, projected) = (at(&streams, 4 * hidden), at(&kv, 5 * hidden));
        let (q, k) = (wide(&q_weight), wide(&k_weight));
        let exact = engram::reference::gate(&x, &projected, &q, &k, hidden, eps.into(), Numerics::Exact);
        // |d| is at most about sqrt(hidden) * 1.5^2; its root enters a sigmoid whose slope is at most 1/4, times |V| <= 2.
        assert_close("gate", &updated.f32()[r * 4 * hidden..][..4 * hidden], &exact, |i| {
            exact[i].abs() * BF16 + 2.0 * F32 * (hidden as f64 / 16.0 + 40.0) * 24.0
        });
    }
}

#[test]
fn embeddings_taps_and_quantised_rows() {
    if !ready("embeddings_taps_and_quantised_rows") {
        return;
    }
    let mut values = Values::new(12);
    let (columns, streams, ids) = (40, 4, [3u32, 0, 9, 3]);
    let table: Vec<u16> = values.bf16(10 * columns, 3.0).iter().map(|&v| tf_numerics::bf16::from_f32(v)).collect();
    let out = ids.len() * streams * columns;
    let (mut rows, mut mix) = (device(&vec![0f32; out]), device(&vec![0f32; ids.len() * streams]));
    let args = embed::Args { ids: &ids, table: &device(&table), columns, streams, out: &mut rows, mix: Some(&mut mix) };
    embed::launch(&mut queue(), args).unwrap();
    let wanted = [bytes(rows.f32()).to_vec(), bytes(mix.f32()).to_vec()];
    let edits = [
        ("next token's row", "ids[row]) * shape.columns", "ids[row] + 1u) * shape.columns"),
        ("mix of the last stream", "copy % shape.streams == 0u", "copy % shape.streams == 3u"),
        ("missing bound", "    if (row >= shape.rows) return;\n", ""),
    ];
    prove("embed", include_str!("../../kernels/src/embed/kernel.metal"), &wanted, &edits, |program, simdgroups| {
        let sizes = shape(&[ids.len() as u32, streams as u32, columns as u32, 1]);
        let mut args = [input(&ids), input(&table), output(out), output(ids.len() * streams), sizes];
        run(program, "embed", out.div_ceil(32), simdgroups, &mut args).map(|()| outputs(&args, &[2, 3]))
    });

    let (rows, columns) = (3, 72);
    let mut x = values.bf16(rows * columns, 3.0);
    x.iter_mut().step_by(5).for_each(|v| *v *= 1e-3);
    x[columns + 3] = f32::NAN;
    let mut wanted = x.clone();
    wanted.chunks_mut(columns).for_each(|row| tf_numerics::qdq::round_row(Level::Scalar, Format::Fp8, row));
    let edits = [
        ("off-by-one tail", "if (c < shape.columns) out", "if (c + 1u < shape.columns) out"),
        ("blocks across rows", "x[row * shape.columns + c] : 0.0f", "x[row * shape.columns + (c ^ 1u)] : 0.0f"),
    ];
    let source = include_str!("../../kernels/src/quantise/kernel.metal");
    let wanted = [bytes(&wanted).to_vec(), bytes(&wanted).to_vec()];
    prove("quantise", source, &wanted, &edits, |program, simdgroups| {
        let items = rows * columns.div_ceil(32);
        let sizes = shape(&[rows as u32, columns as u32]);
        let mut args = [in_place(&x), sizes.clone()];
        run(program, "quantise_in_place", items, simdgroups, &mut args)?;
        let mut apart = [input(&x), output(x.len()), sizes];
        run(program, "quantise", items, simdgroups, &mut apart)?;
        Ok(vec![outputs_of(&args, 0), outputs_of(&apart, 1)])
    });

    let hidden = 96;
    let streams = values.bf16(rows * 4 * hidden, 3.0);
    let mut out = device(&vec![0f32; rows * 2 * hidden]);
    for offset in [0, hidden] {
        let args = hyper::TapArgs {
            streams: &device(&streams),
            rows,
            hidden,
            out: &mut out,
            out_columns: 2 * hidden,
            out_offset: offset,
            quantise: offset > 0,
        };
        hyper::launch_tap(&mut queue(), args).unwrap();
    }
    let edits = [("three streams", "+ x[3u * hidden]) * 0.25f", ") * 0.25f")];
    let source = include_str!("../../kernels/src/hyper/kernel.metal");
    prove("hyper_tap", source, &[bytes(out.f32()).to_vec()], &edits, |program, simdgroups| {
        let mut out = output(rows * 2 * hidden);
        for (offset, quantise) in [(0, 0), (hidden, 2)] {
            let sizes = [rows as u32, hidden as u32, 0, quantise, 0, 0, 2 * hidden as u32, offset as u32];
            let mut args = [input(&streams), out, shape(&sizes)];
            run(program, "hyper_tap", rows, simdgroups, &mut args)?;
            let [_, written, _] = args;
            out = written;
        }
        Ok(vec![bytes_of(&out).to_vec()])
    });
}
