//! What must hold of the hyper-connections: entering a sublayer, expanding, collapsing, tapping.

use super::{
    CollapseArgs, Constants, EnterArgs, ExpandArgs, MIXES, MixWeights, STREAMS, TapArgs, launch_collapse, launch_enter,
    launch_expand, launch_tap, mirror, reference, scratch_floats,
};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::reference_formats::bf16;
use crate::rms_norm::contract::{norm_spans, spread, weights_on_edges};
use crate::rms_norm::reference::rms_norm;
use reference::{MixConstants, Mixes};
use tf_device::{Buffer, Device};

const COMB: usize = STREAMS * STREAMS;

pub const ENTER: Contract = Contract {
    name: "hyper/enter",
    formula: "X = expand(y, X, post, comb); u = collapse(X, carried mix); normed = RMSNorm(u), quantised = \
        QDQ8(normed); next mix, post, comb from (function @ X) / rms(X)",
    shapes: "y [rows, hidden] f32; streams [rows, 4, hidden], mix, post [rows, 4], comb [rows, 4, 4] f32 in place; \
        normed, quantised [rows, hidden] f32",
    order: "function @ X: one accumulator of 16 lanes; squares: 4 accumulators; lanes fold by halves; on CUDA chains \
        of 40 and of 4 to 16 columns, folded as its mirror says; streams added in index order, unfused",
    bound: "streams and u: 9 U of absolute terms, bf16; z: (hidden / 4 + 8) U of absolute products and the norm; \
        sinkhorn is nonexpansive in the projective metric, so errors of z and 12 U an iteration add up, times 4",
    cases: &[
        Case {
            name: "wide",
            rows: 128,
            sizes: &[("hidden", 128), ("expand", 1), ("iterations", 20), ("hc_eps_millionths", 1)],
        },
        Case {
            name: "first sublayer",
            rows: 9,
            sizes: &[("hidden", 96), ("expand", 0), ("iterations", 3), ("hc_eps_millionths", 10_000)],
        },
        // Wide enough for blocks to share a row, and for more chunks of products than a warp has lanes.
        Case {
            name: "many columns",
            rows: 20,
            sizes: &[("hidden", 2752), ("expand", 1), ("iterations", 2), ("hc_eps_millionths", 1)],
        },
    ],
    make: |case, seed| Box::new(Enter(make(case, seed))),
    limits: &[],
    controls: &[
        Control::value("takes comb transposed"),
        Control::value("eps in bf16"),
        Control::value("one normalisation too few"),
        Control::value("leaves eps of the mixes out"),
        Control::value("collapses with the mix of the next row"),
        Control::value("leaves post out"),
    ],
    edits: &[
        metal("shortens the products (Metal)", "c < width; c += 16u) sum", "c + 16u < width; c += 16u) sum"),
        metal("adds both halves of the SIMD group (Metal)", "output = 2u * pair + lane / 16u", "output = 2u * pair"),
        metal("drops the barrier before the new mix (Metal)", "    simdgroup_barrier(mem_flags::mem_device);\n", ""),
        metal("iterates once less (Metal)", "uint i = 1u; i < shape.iterations", "uint i = 2u; i < shape.iterations"),
        metal(
            "leaves eps out (Metal)",
            "value / sum4(value, row_base, 1u) + eps;",
            "value / sum4(value, row_base, 1u);",
        ),
        metal(
            "takes the maximum of three (Metal)",
            "max_second(max_second(max_second(v0, v1), v2), v3)",
            "max_second(max_second(v0, v1), v2)",
        ),
        metal("swaps the scales (Metal)", "* scale[2] + base[8u + at]", "* scale[1] + base[8u + at]"),
        metal("adds four in pairs (Metal)", "return ((v0 + v1) + v2) + v3;", "return (v0 + v1) + (v2 + v3);"),
        cuda("chains another lane's quads (CUDA)", "staged[r][slot + LANES * i]", "staged[r][(slot ^ 1) + LANES * i]"),
        cuda(
            "leaves the third output out (CUDA)",
            "slot == 1 ? sums[r][1] : sums[r][2]",
            "slot == 1 ? sums[r][1] : sums[r][0]",
        ),
        cuda(
            "chains a quad from its end (CUDA)",
            "    sum = fma_own(w.x, v.x, sum);\n",
            "    return fma_own(w.x, v.x, fma_own(w.y, v.y, fma_own(w.z, v.z, fma_own(w.w, v.w, sum))));\n",
        ),
        cuda("takes the first rows of a tile again (CUDA)", "= staged[team][group % STAGES];", "= staged[team][0];"),
        cuda("leaves the last chunk out (CUDA)", "< chunks ? left_quad", "+ 1 < chunks ? left_quad"),
        cuda("iterates once less (CUDA)", "u32 i = 1; i < shape.iterations", "u32 i = 2; i < shape.iterations"),
        cuda(
            "leaves a stream out of the squares (CUDA)",
            "u32 j = 0; j < 4; j++) all[i] = add_squares",
            "u32 j = 1; j < 4; j++) all[i] = add_squares",
        ),
        cuda("leaves the output before out (CUDA)", "inside ? out[quad] : zero_quad()", "zero_quad()"),
    ],
    standard: STANDARD_CONTROLS,
};

pub const EXPAND: Contract = Contract {
    name: "hyper/expand",
    formula: "X'[j] = bf16(sum_i comb[i][j] X[i] + post[j] y)",
    shapes: "y [rows, hidden], post [rows, 4], comb [rows, 4, 4] f32; streams [rows, 4, hidden] f32 in place",
    order: "streams in index order, then y; unfused",
    bound: "9 U of the absolute terms, then bf16",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("hidden", 256)] },
        Case { name: "small", rows: 5, sizes: &[("hidden", 32)] },
    ],
    make: |case, seed| Box::new(Expand(make(case, seed))),
    limits: &[],
    controls: &[
        Control::value("takes comb transposed"),
        Control::value("leaves post out"),
        Control::geometry("takes post of the first row"),
    ],
    edits: &[
        metal(
            "turns comb around (Metal)",
            "device const float *weights = comb + row * 16u + j;",
            "device const float *weights = comb + row * 16u + 3u - j;",
        ),
        metal(
            "takes a stream twice (Metal)",
            "x2 = x[2u * hidden], x3 = x[3u * hidden], out",
            "x2 = x[2u * hidden], x3 = x[2u * hidden], out",
        ),
        metal(
            "leaves the rounding out (Metal)",
            "bf16_round(sum + post[row * 4u + j] * out)",
            "sum + post[row * 4u + j] * out",
        ),
    ],
    standard: IN_PLACE_CONTROLS,
};

pub const COLLAPSE: Contract = Contract {
    name: "hyper/collapse",
    formula: "u = bf16(sum_i mix[i] X[i]); normed = RMSNorm(u; norm); quantised = QDQ8(normed)",
    shapes: "streams [rows, 4, hidden], mix [rows, 4], norm [hidden] f32; collapsed, normed, quantised [rows, \
        hidden] f32",
    order: "streams in index order, unfused; squares as rms_norm, on CUDA as on entering",
    bound: "7 U of the absolute terms, bf16; then the norm's interval",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("hidden", 256)] },
        Case { name: "small", rows: 5, sizes: &[("hidden", 32)] },
        Case { name: "on the edges of bf16", rows: 16, sizes: &[("hidden", 512), ("edges", 1)] },
        Case { name: "quads on the edges", rows: 40, sizes: &[("hidden", 256), ("quads", 1)] },
        Case { name: "streams that cancel", rows: 9, sizes: &[("hidden", 128), ("cancelling", 1)] },
    ],
    make: |case, seed| Box::new(Collapse(quads_on_edges(case, on_edges(cancel(case, make(case, seed)), case)))),
    limits: &[],
    controls: &[
        Control::value("collapses with the mix of the next row"),
        Control::value("eps in bf16"),
        Control::geometry("takes the mix of the first row"),
    ],
    edits: &[
        metal("leaves the last stream out (Metal)", "    sum = sum + m3 * x[3u * hidden];\n", ""),
        metal(
            "adds the streams in pairs (Metal)",
            "    sum = sum + m2 * x[2u * hidden];\n    sum = sum + m3 * x[3u * hidden];\n",
            "    sum = sum + (m2 * x[2u * hidden] + m3 * x[3u * hidden]);\n",
        ),
        metal(
            "adds the third stream first (Metal)",
            "float sum = m0 * x[0];\n    sum = sum + m1 * x[hidden];\n    sum = sum + m2 * x[2u * hidden];",
            "float sum = m2 * x[2u * hidden];\n    sum = sum + m1 * x[hidden];\n    sum = sum + m0 * x[0];",
        ),
        metal("drops a half of the squares (Metal)", "if (c + 32u < hidden) {", "if (c + 64u < hidden) {"),
        metal("adds the halves before the lanes (Metal)", "fold_four(even, odd)", "fold_four(even + odd, 0.0f)"),
        cuda("squares a quad from its end (CUDA)", "    sum = fma_own(v.x, v.x, sum);\n", SQUARES_BACKWARDS),
    ],
    standard: STANDARD_CONTROLS,
};

pub const TAP: Contract = Contract {
    name: "hyper/tap",
    formula: "out[r][offset ..] = bf16(mean of the streams), then QDQ8",
    shapes: "streams [rows, 4, hidden] f32; out [rows, out_columns] f32, of which a launch writes hidden columns",
    order: "streams in index order, unfused; the quarter is exact",
    bound: "4 U of the absolute terms, bf16, E4M3",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("hidden", 256)] },
        Case { name: "small", rows: 5, sizes: &[("hidden", 32)] },
    ],
    make: |case, seed| Box::new(Tap(cancelling(make(case, seed)))),
    limits: &[],
    controls: &[Control::value("leaves the last stream out"), Control::value("sums instead of the mean")],
    edits: &[
        metal("takes three streams (Metal)", "+ x[3u * hidden]) * 0.25f", ") * 0.25f"),
        metal(
            "adds four in pairs (Metal)",
            "(((x[0] + x[hidden]) + x[2u * hidden]) + x[3u * hidden])",
            "((x[0] + x[hidden]) + (x[2u * hidden] + x[3u * hidden]))",
        ),
        metal("leaves the offset out (Metal)", "shape.out_columns + shape.out_offset + c", "shape.out_columns + c"),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const SQUARES_BACKWARDS: &str =
    "    return fma_own(v.x, v.x, fma_own(v.y, v.y, fma_own(v.z, v.z, fma_own(v.w, v.w, sum))));\n";

/// The same of its CUDA source.
const fn cuda(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("kernel.cu"), find, replace)
}

const NORM_EPS: f32 = 1e-6;

struct Streams {
    hidden: usize,
    expand: bool,
    iterations: u32,
    hc_eps: f32,
    y: Vec<f32>,
    streams: Vec<f32>,
    mix: Vec<f32>,
    post: Vec<f32>,
    comb: Vec<f32>,
    function: Vec<f32>,
    base: Vec<f32>,
    scale: Vec<f32>,
    norm: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Streams {
    let mut values = Values::new(seed);
    let (rows, hidden) = (case.rows, case.size("hidden"));
    // Rows so small that eps matters lie between ordinary ones.
    let rows_of = |values: &mut Values, width: usize| -> Vec<f32> {
        (0..rows).flat_map(|row| values.bf16(width, [2.0, 2e-3, 1.0][row % 3])).collect()
    };
    let positive = |values: &mut Values, count: usize| -> Vec<f32> {
        values.floats(count, 1.0).into_iter().map(|value| value.abs() + 0.05).collect()
    };
    let mut base = values.floats(MIXES, 1.0);
    if case.size("expand") == 0 {
        // Beyond what an exponential holds without its maximum.
        base[2 * STREAMS + 5] = 95.0;
    }
    Streams {
        hidden,
        expand: case.size("expand") == 1,
        iterations: case.size("iterations") as u32,
        hc_eps: case.size("hc_eps_millionths") as f32 * 1e-6,
        y: rows_of(&mut values, hidden),
        streams: rows_of(&mut values, STREAMS * hidden),
        mix: positive(&mut values, rows * STREAMS),
        post: positive(&mut values, rows * STREAMS),
        comb: positive(&mut values, rows * COMB),
        function: values.floats(MIXES * STREAMS * hidden, 0.3),
        base,
        scale: vec![0.75, 1.25, 0.875],
        norm: values.bf16(hidden, 2.0),
    }
}

/// With the norm's weights of [`weights_on_edges`], where the case asks for them.
fn on_edges(mut streams: Streams, case: &Case) -> Streams {
    if case.size("edges") == 1 {
        spread(&mut streams.streams, streams.hidden);
        let collapsed = |row| {
            let mix = wide(streams.row(&streams.mix, row, STREAMS));
            reference::collapse(&streams.streams(row), &mix, Numerics::Release)
        };
        streams.norm = weights_on_edges(&(0..case.rows).map(collapsed).collect::<Vec<_>>(), f64::from(NORM_EPS));
    }
    streams
}

/// A sum in index order of products, each known to an interval in its first factor.
fn mixed(terms: &[(Span, f64)], roundings: f64) -> Span {
    let absolute: f64 = terms.iter().map(|(value, weight)| value.largest() * weight.abs()).sum();
    let sum = terms.iter().fold(Span::exact(0.0), |sum, (value, weight)| sum.plus(value.scaled(*weight)));
    sum.widened(absolute * roundings * U)
}

impl Streams {
    fn row<'a>(&self, values: &'a [f32], row: usize, width: usize) -> &'a [f32] {
        &values[row * width..][..width]
    }

    fn streams(&self, row: usize) -> Vec<f64> {
        wide(self.row(&self.streams, row, STREAMS * self.hidden))
    }

    fn mixes(&self, row: usize) -> Mixes {
        Mixes {
            pre: wide(self.row(&self.mix, row, STREAMS)),
            post: wide(self.row(&self.post, row, STREAMS)),
            comb: wide(self.row(&self.comb, row, COMB)),
        }
    }

    /// The streams after expanding, by the definition and as intervals.
    fn expanded(&self, row: usize) -> (Vec<f64>, Vec<Span>) {
        let (hidden, mixes) = (self.hidden, self.mixes(row));
        let (y, streams) = (wide(self.row(&self.y, row, hidden)), self.streams(row));
        let values = reference::expand(&y, &streams, &mixes, Numerics::Release);
        let mut spans = Vec::new();
        for j in 0..STREAMS {
            for c in 0..hidden {
                let mut terms: Vec<(Span, f64)> =
                    (0..STREAMS).map(|i| (Span::exact(streams[i * hidden + c]), mixes.comb[i * STREAMS + j])).collect();
                terms.push((Span::exact(y[c]), mixes.post[j]));
                spans.push(mixed(&terms, 9.0).bf16());
            }
        }
        (values, spans)
    }

    /// Collapsed, normalised and quantised rows of streams known to intervals.
    fn collapsed(&self, row: usize, values: &[f64], spans: &[Span]) -> [(Vec<f64>, Vec<Span>); 3] {
        let (hidden, mix) = (self.hidden, wide(self.row(&self.mix, row, STREAMS)));
        let collapsed = reference::collapse(values, &mix, Numerics::Release);
        let column = |c: usize| {
            let terms: Vec<(Span, f64)> = (0..STREAMS).map(|i| (spans[i * hidden + c], mix[i])).collect();
            mixed(&terms, 7.0).bf16()
        };
        let collapsed_spans: Vec<Span> = (0..hidden).map(column).collect();
        let (norm, eps) = (wide(&self.norm), f64::from(NORM_EPS));
        let normed = rms_norm(&collapsed, &norm, eps, Numerics::Release);
        let normed_spans = norm_spans(&collapsed_spans, &norm, eps);
        let quantised = Numerics::Release.qdq8(&normed, hidden);
        let quantised_spans = qdq_e4m3(&normed_spans);
        [(collapsed, collapsed_spans), (normed, normed_spans), (quantised, quantised_spans)]
    }

    /// The next mixes, and the radius of each.
    fn next_mixes(&self, values: &[f64], spans: &[Span]) -> (Vec<f64>, Vec<Span>) {
        let (function, base, scale) = (wide(&self.function), wide(&self.base), wide(&self.scale));
        let constants = MixConstants {
            hc: STREAMS,
            iterations: self.iterations as usize,
            hc_eps: f64::from(self.hc_eps),
            rms_eps: f64::from(NORM_EPS),
        };
        let mixes = reference::mixes(values, &function, &scale, &base, constants);
        let columns = values.len();
        let mean =
            |square: fn(&Span) -> f64| spans.iter().map(square).sum::<f64>() / columns as f64 + constants.rms_eps;
        let (least, most) = (mean(|span| span.smallest().powi(2)), mean(|span| span.largest().powi(2)));
        let factor = Span { low: 1.0 / most.sqrt(), high: 1.0 / least.sqrt() };
        let factor = factor.widened(factor.high * (sum_error(columns) / 2.0 + 4.0 * U));
        let z: Vec<Span> = function
            .chunks(columns)
            .map(|row| dot_span(spans, row, (columns / 16 + 8) as f64).times(factor).rounded(1.0))
            .collect();
        let logit = |i: usize| {
            let scale = scale[(i / STREAMS).min(2)];
            z[i].scaled(scale).rounded(1.0).plus(Span::exact(base[i])).rounded(1.0)
        };
        let sigmoid = |span: Span| span.map(|x| 1.0 / (1.0 + (-x).exp())).rounded(5.0);
        let mut out: Vec<Span> = (0..STREAMS)
            .map(|i| sigmoid(logit(i)).plus(Span::exact(constants.hc_eps)).rounded(1.0))
            .chain((STREAMS..2 * STREAMS).map(|i| sigmoid(logit(i)).scaled(2.0)))
            .collect();
        let worst = (2 * STREAMS..MIXES).map(|i| logit(i).radius() + 2.0 * U * logit(i).largest()).fold(0.0, f64::max);
        let relative = 4.0 * (2.0 * worst + 12.0 * U * f64::from(self.iterations));
        out.extend(mixes.comb.iter().map(|value| Span::around(*value, value * relative)));
        let values = mixes.pre.iter().chain(&mixes.post).chain(&mixes.comb).copied().collect();
        (values, out)
    }

    /// The carried mixes of a launch's rows under a fault.
    fn planted_mix(&self, picks: &[Pick], fault: Fault) -> Vec<f32> {
        let mut mix = gather(picks, &self.mix, STREAMS);
        if fault.is("collapses with the mix of the next row") {
            mix.iter_mut().for_each(|value| *value = 1.0 - *value * 0.5);
        }
        if fault.is("takes the mix of the first row") {
            let first = mix[..STREAMS].to_vec();
            mix.chunks_mut(STREAMS).for_each(|row| row.copy_from_slice(&first));
        }
        mix
    }

    fn planted_comb(&self, picks: &[Pick], fault: Fault) -> Vec<f32> {
        let mut comb = gather(picks, &self.comb, COMB);
        if fault.is("takes comb transposed") {
            for row in comb.chunks_mut(COMB) {
                let was = row.to_vec();
                (0..COMB).for_each(|at| row[at] = was[at % STREAMS * STREAMS + at / STREAMS]);
            }
        }
        comb
    }

    fn planted_post(&self, picks: &[Pick], fault: Fault) -> Vec<f32> {
        let mut post = gather(picks, &self.post, STREAMS);
        if fault.is("leaves post out") {
            post.fill(1.0);
        }
        if fault.is("takes post of the first row") {
            let first = post[..STREAMS].to_vec();
            post.chunks_mut(STREAMS).for_each(|row| row.copy_from_slice(&first));
        }
        post
    }

    fn planted_eps(fault: Fault) -> f32 {
        let eps = NORM_EPS;
        if fault.is("eps in bf16") { bf16(f64::from(eps)) as f32 } else { eps }
    }

    fn work(&self, floats: usize, operations: usize) -> Work {
        let rows = self.y.len() / self.hidden;
        Work { bytes: rows * floats * self.hidden * 4, multiply_adds: rows * operations * self.hidden }
    }
}

struct Enter(Streams);

impl World for Enter {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let world = &self.0;
        let (rows, hidden) = (picks.len(), world.hidden);
        let y = stage.rows_in("y", &gather(picks, &world.y, hidden));
        let mut streams = stage.in_place("streams", &gather(picks, &world.streams, STREAMS * hidden));
        let mut mix = stage.in_place("mix", &world.planted_mix(picks, fault));
        let mut post = stage.in_place("post", &world.planted_post(picks, fault));
        let mut comb = stage.in_place("comb", &world.planted_comb(picks, fault));
        let (function, base) = (stage.input("function", &world.function), stage.input("base", &world.base));
        let (scale, norm) = (stage.input("scale", &world.scale), stage.input("norm", &world.norm));
        let mut normed = stage.output::<f32>("normed", rows * hidden);
        let mut quantised = stage.output::<f32>("quantised", rows * hidden);
        let mut scratch = stage.poisoned::<f32>("scratch", rows * scratch_floats(hidden));
        let iterations = world.iterations - u32::from(fault.is("one normalisation too few"));
        let hc_eps = if fault.is("leaves eps of the mixes out") { 0.0 } else { world.hc_eps };
        let args = EnterArgs {
            y: world.expand.then_some(&y.buffer),
            streams: &mut streams.buffer,
            mix: &mut mix.buffer,
            post: &mut post.buffer,
            comb: &mut comb.buffer,
            weights: MixWeights { function: &function.buffer, base: &base.buffer, scale: &scale.buffer },
            norm: &norm.buffer,
            constants: Constants { iterations, hc_eps, norm_eps: Streams::planted_eps(fault) },
            rows,
            hidden,
            normed: Some(&mut normed.buffer),
            quantised: Some(&mut quantised.buffer),
            scratch: &mut scratch.buffer,
        };
        stage.run(|queue| launch_enter(queue, args))?;
        for input in [y, function, base, scale, norm] {
            stage.read(input);
        }
        stage.discard(scratch);
        stage.rows::<f32>(streams, STREAMS * hidden);
        stage.rows::<f32>(mix, STREAMS);
        stage.rows::<f32>(post, STREAMS);
        stage.rows::<f32>(comb, COMB);
        stage.rows::<f32>(normed, hidden);
        stage.rows::<f32>(quantised, hidden);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let world = &self.0;
        let (values, spans) = match world.expand {
            true => world.expanded(row),
            false => (world.streams(row), Span::all(&world.streams(row))),
        };
        let mut expected = Expected::zip(&values, &spans);
        let (mixes, mix_spans) = world.next_mixes(&values, &spans);
        expected.extend(Expected::zip(&mixes, &mix_spans));
        let [_, normed, quantised] = world.collapsed(row, &values, &spans);
        expected.extend(Expected::zip(&normed.0, &normed.1));
        expected.extend(Expected::zip(&quantised.0, &quantised.1));
        expected
    }

    fn stepped(&self, row: usize) -> Option<Vec<u32>> {
        let world = &self.0;
        let hidden = world.hidden;
        let host = |values: &[f32]| Buffer::from_slice(&Device::cpu(), values).ok();
        let y = host(world.row(&world.y, row, hidden))?;
        let mut streams = host(world.row(&world.streams, row, STREAMS * hidden))?;
        let mut mix = host(world.row(&world.mix, row, STREAMS))?;
        let mut post = host(world.row(&world.post, row, STREAMS))?;
        let mut comb = host(world.row(&world.comb, row, COMB))?;
        let (function, base) = (host(&world.function)?, host(&world.base)?);
        let (scale, norm) = (host(&world.scale)?, host(&world.norm)?);
        let (mut normed, mut quantised) = (host(&vec![0.0; hidden])?, host(&vec![0.0; hidden])?);
        mirror::enter(EnterArgs {
            y: world.expand.then_some(&y),
            streams: &mut streams,
            mix: &mut mix,
            post: &mut post,
            comb: &mut comb,
            weights: MixWeights { function: &function, base: &base, scale: &scale },
            norm: &norm,
            constants: Constants { iterations: world.iterations, hc_eps: world.hc_eps, norm_eps: NORM_EPS },
            rows: 1,
            hidden,
            normed: Some(&mut normed),
            quantised: Some(&mut quantised),
            scratch: &mut host(&[])?,
        });
        let outs = [&streams, &mix, &post, &comb, &normed, &quantised];
        Some(outs.iter().flat_map(|out| out.f32()).map(|value| value.to_bits()).collect())
    }

    fn work(&self) -> Work {
        self.0.work(11, 4 * (MIXES + 10))
    }
}

struct Expand(Streams);

impl World for Expand {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let world = &self.0;
        let hidden = world.hidden;
        let y = stage.rows_in("y", &gather(picks, &world.y, hidden));
        let mut streams = stage.in_place("streams", &gather(picks, &world.streams, STREAMS * hidden));
        let post = stage.rows_in("post", &world.planted_post(picks, fault));
        let comb = stage.rows_in("comb", &world.planted_comb(picks, fault));
        let args = ExpandArgs {
            y: &y.buffer,
            streams: &mut streams.buffer,
            post: &post.buffer,
            comb: &comb.buffer,
            rows: picks.len(),
            hidden,
        };
        stage.run(|queue| launch_expand(queue, args))?;
        for input in [y, post, comb] {
            stage.read(input);
        }
        stage.rows::<f32>(streams, STREAMS * hidden);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let (values, spans) = self.0.expanded(row);
        Expected::zip(&values, &spans)
    }

    fn work(&self) -> Work {
        self.0.work(9, 20)
    }
}

struct Collapse(Streams);

/// In a case of quads three squares of a quad are each a bit less than what the first would notice, and together more; and
/// every weight of the norm puts one row's output into the middle between two bf16 values, so that the last bit of that row's
/// sum of squares shows.
fn quads_on_edges(case: &Case, mut streams: Streams) -> Streams {
    if case.size("quads") == 0 {
        return streams;
    }
    let (hidden, mut values) = (streams.hidden, Values::new(case.rows as u64));
    for (row, mix) in streams.streams.chunks_mut(STREAMS * hidden).zip(streams.mix.chunks(STREAMS)) {
        row.fill(0.0);
        for (column, first) in row[..hidden].iter_mut().enumerate() {
            let wanted = match column % 4 {
                0 => 1.1 + 0.25 * values.unit(),
                _ => (0.94 + 0.03 * values.unit()) / 4096.0,
            };
            *first = bf16(f64::from(wanted / mix[0])) as f32;
        }
    }
    let weights = streams.norm.clone();
    for row in 0..case.rows {
        let own = streams.row(&streams.streams, row, STREAMS * hidden);
        let edges = mirror::edges(own, streams.row(&streams.mix, row, STREAMS), &weights, NORM_EPS);
        for column in (row..hidden).step_by(case.rows) {
            streams.norm[column] = edges[column];
        }
    }
    streams
}

/// The streams, mixes and weights of a case.
#[cfg(test)]
pub(super) fn collapse_inputs(case: &Case, seed: u64) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let Streams { streams, mix, norm, .. } = quads_on_edges(case, make(case, seed));
    (streams, mix, norm)
}

impl World for Collapse {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let world = &self.0;
        let (rows, hidden) = (picks.len(), world.hidden);
        let streams = stage.rows_in("streams", &gather(picks, &world.streams, STREAMS * hidden));
        let mix = stage.rows_in("mix", &world.planted_mix(picks, fault));
        let norm = stage.input("norm", &world.norm);
        let mut outs: Vec<Output> =
            ["collapsed", "normed", "quantised"].map(|name| stage.output::<f32>(name, rows * hidden)).into();
        let [collapsed, normed, quantised] = &mut outs[..] else { unreachable!("three were made") };
        let args = CollapseArgs {
            streams: &streams.buffer,
            mix: &mix.buffer,
            norm: &norm.buffer,
            norm_eps: Streams::planted_eps(fault),
            rows,
            hidden,
            collapsed: Some(&mut collapsed.buffer),
            normed: Some(&mut normed.buffer),
            quantised: Some(&mut quantised.buffer),
        };
        stage.run(|queue| launch_collapse(queue, args))?;
        for input in [streams, mix, norm] {
            stage.read(input);
        }
        outs.into_iter().for_each(|out| stage.rows::<f32>(out, hidden));
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let streams = self.0.streams(row);
        let parts = self.0.collapsed(row, &streams, &Span::all(&streams));
        parts.iter().flat_map(|(values, spans)| Expected::zip(values, spans)).collect()
    }

    fn stepped(&self, row: usize) -> Option<Vec<u32>> {
        let world = &self.0;
        let hidden = world.hidden;
        let host = |values: &[f32]| Buffer::from_slice(&Device::cpu(), values).ok();
        let streams = host(world.row(&world.streams, row, STREAMS * hidden))?;
        let mix = host(world.row(&world.mix, row, STREAMS))?;
        let norm = host(&world.norm)?;
        let outs = [0, 1, 2].map(|_| host(&vec![0.0; hidden]));
        let [mut collapsed, mut normed, mut quantised] = outs;
        mirror::collapse_rows(CollapseArgs {
            streams: &streams,
            mix: &mix,
            norm: &norm,
            norm_eps: NORM_EPS,
            rows: 1,
            hidden,
            collapsed: collapsed.as_mut(),
            normed: normed.as_mut(),
            quantised: quantised.as_mut(),
        });
        let outs = [collapsed?, normed?, quantised?];
        Some(outs.iter().flat_map(|out| out.f32()).map(|value| value.to_bits()).collect())
    }

    fn work(&self) -> Work {
        self.0.work(7, 7)
    }
}

/// The first stream is large and taken away by the third, or by the second in every other column: what the sums leave are
/// roundings, which another order changes.
fn cancel(case: &Case, mut streams: Streams) -> Streams {
    if case.size("cancelling") == 0 {
        return streams;
    }
    let hidden = streams.hidden;
    for mix in streams.mix.chunks_mut(STREAMS) {
        (mix[1], mix[2]) = (mix[0], mix[0]);
    }
    for (row, own) in streams.streams.chunks_mut(STREAMS * hidden).enumerate() {
        let large = [262_144.0, 256.0, 131_072.0][row % 3];
        for column in 0..hidden {
            own[column] = large;
            own[(2 - column % 2) * hidden + column] = -large;
        }
    }
    streams
}

struct Tap(Streams);

/// Sums of four bf16 values are nearly always exact: in some columns large ones cancel, so that their order shows.
fn cancelling(mut streams: Streams) -> Streams {
    let hidden = streams.hidden;
    for row in streams.streams.chunks_mut(STREAMS * hidden) {
        for column in (5..hidden).step_by(TAP_OFFSET) {
            (row[column], row[2 * hidden + column]) = (4_194_304.0, -4_194_304.0);
        }
    }
    streams
}

/// Columns in front of the tap's own and behind them, which are nobody's.
const TAP_OFFSET: usize = 32;

impl World for Tap {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let world = &self.0;
        let (rows, hidden) = (picks.len(), world.hidden);
        let out_columns = hidden + 3 * TAP_OFFSET;
        let mut values = gather(picks, &world.streams, STREAMS * hidden);
        if fault.is("leaves the last stream out") {
            values.chunks_mut(STREAMS * hidden).for_each(|row| row[3 * hidden..].fill(0.0));
        }
        if fault.is("sums instead of the mean") {
            values.iter_mut().for_each(|value| *value *= 4.0);
        }
        let streams = stage.rows_in("streams", &values);
        let mut out = stage.output::<f32>("out", rows * out_columns);
        let args = TapArgs {
            streams: &streams.buffer,
            rows,
            hidden,
            out: &mut out.buffer,
            out_columns,
            out_offset: TAP_OFFSET,
            quantise: true,
        };
        stage.run(|queue| launch_tap(queue, args))?;
        stage.read(streams);
        let start = |row: usize| row * out_columns + TAP_OFFSET;
        stage.ranges::<f32>(out, (0..rows).map(|row| (row, start(row)..start(row) + hidden)).collect());
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let (hidden, streams) = (self.0.hidden, self.0.streams(row));
        let values = reference::tap(&streams, STREAMS, Numerics::Release);
        let column = |c: usize| {
            let terms: Vec<(Span, f64)> = (0..STREAMS).map(|i| (Span::exact(streams[i * hidden + c]), 0.25)).collect();
            mixed(&terms, 4.0).bf16()
        };
        let spans: Vec<Span> = (0..hidden).map(column).collect();
        Expected::zip(&Numerics::Release.qdq8(&values, hidden), &qdq_e4m3(&spans))
    }

    fn work(&self) -> Work {
        self.0.work(5, 4)
    }
}
