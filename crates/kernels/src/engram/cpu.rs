//! A gather decodes whole table rows; a gate takes three sums a stream and one pass over it.

use super::{EngramError, GateArgs, GatherArgs};
use crate::hyper::STREAMS;
use crate::order::{Four, sum_squares};
use crate::parallel::threads_for;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::fp8::decode_e8m0;
use tf_numerics::lanes::{Kernel, Lanes, Mask, WIDTH, dispatch};
use tf_numerics::{math, qdq};

pub(super) fn run_gather(queue: &mut CpuQueue, args: GatherArgs<'_>) -> Result<(), EngramError> {
    let GatherArgs { codes, scales, ids, columns: _, head_dim, quantise, out } = args;
    let damaged = AtomicUsize::new(usize::MAX);
    let job = Gather {
        codes,
        scales,
        ids,
        head_dim,
        quantise,
        out: Parts::new(&mut out.f32_mut()[..ids.len() * head_dim]),
        damaged: &damaged,
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(ids.len() * head_dim * 8), |index, count| {
        dispatch(level, GatherItems { job: &job, items: split(ids.len(), count, index, 1) });
    });
    match damaged.into_inner() {
        usize::MAX => Ok(()),
        item => Err(name_damage(codes, scales, ids[item], head_dim)),
    }
}

/// Refuses a damaged table row.
pub(super) fn check_row(row: u32, codes: &[u8], scales: &[u8], head_dim: usize) -> Result<(), EngramError> {
    let groups = head_dim / 32;
    let is_damaged = scales[row as usize * groups..][..groups].contains(&255)
        || codes[row as usize * head_dim..][..head_dim].iter().any(|code| code & 0x7f == 0x7f);
    if is_damaged { Err(name_damage(codes, scales, row, head_dim)) } else { Ok(()) }
}

/// Finds the NaN of a damaged table row again.
fn name_damage(codes: &[u8], scales: &[u8], row: u32, head_dim: usize) -> EngramError {
    let groups = head_dim / 32;
    let scales = &scales[row as usize * groups..][..groups];
    let codes = &codes[row as usize * head_dim..][..head_dim];
    let (what, byte) = match scales.iter().position(|&scale| scale == 255) {
        Some(group) => ("scale", row as usize * groups + group),
        None => {
            let column = codes.iter().position(|&code| code & 0x7f == 0x7f).unwrap_or(0);
            ("code", row as usize * head_dim + column)
        }
    };
    EngramError::NotANumber { what, row, byte }
}

struct Gather<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    ids: &'a [u32],
    head_dim: usize,
    quantise: bool,
    out: Parts<'a, f32>,
    /// The first item whose table row holds a NaN.
    damaged: &'a AtomicUsize,
}

struct GatherItems<'a> {
    job: &'a Gather<'a>,
    items: Range<usize>,
}

impl Kernel for GatherItems<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Gather { codes, scales, ids, head_dim, quantise, out, damaged } = self.job;
        let groups = head_dim / 32;
        for item in self.items {
            let row = ids[item] as usize;
            let codes = &codes[row * head_dim..(row + 1) * head_dim];
            let scales = &scales[row * groups..(row + 1) * groups];
            // SAFETY: item `item` belongs to this thread.
            let out = unsafe { out.part(item * head_dim..(item + 1) * head_dim) };
            let mut bad = false;
            let blocks = codes.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<32>().0);
            for ((codes, out), &scale) in blocks.zip(scales) {
                let scale = L::splat(decode_e8m0(scale));
                let (low, high) = (L::load_fp8(codes) * scale, L::load_fp8(&codes[WIDTH..]) * scale);
                bad |= low.is_nan().or(high.is_nan()).any();
                let (low, high) = if *quantise { qdq::fp8_round_block(low, high) } else { (low, high) };
                low.store(out);
                high.store(&mut out[WIDTH..]);
            }
            if bad {
                damaged.fetch_min(item, Ordering::Relaxed);
            }
        }
    }
}

pub(super) fn run_gate(queue: &mut CpuQueue, args: GateArgs<'_>) {
    let GateArgs { streams, kv, q_weight, k_weight, eps, image, rows, hidden } = args;
    let job = Gate {
        streams: Parts::new(&mut streams.f32_mut()[..rows * STREAMS * hidden]),
        kv: kv.f32(),
        q_weight: q_weight.f32(),
        k_weight: k_weight.f32(),
        eps,
        image,
        hidden,
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows * STREAMS * hidden * 8), |index, count| {
        dispatch(level, GateItems { job: &job, items: split(rows * STREAMS, count, index, 1) });
    });
}

struct Gate<'a> {
    streams: Parts<'a, f32>,
    kv: &'a [f32],
    q_weight: &'a [f32],
    k_weight: &'a [f32],
    eps: f32,
    image: &'a [bool],
    hidden: usize,
}

struct GateItems<'a> {
    job: &'a Gate<'a>,
    /// Of `rows * STREAMS`.
    items: Range<usize>,
}

impl Kernel for GateItems<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Gate { streams, kv, q_weight, k_weight, eps, image, hidden } = self.job;
        for item in self.items {
            let (r, i) = (item / STREAMS, item % STREAMS);
            if image.get(r).copied().unwrap_or(false) {
                continue;
            }
            // SAFETY: this stream of row `r` belongs to this thread.
            let stream = unsafe { streams.part(item * hidden..(item + 1) * hidden) };
            let kv = &kv[r * (STREAMS + 1) * hidden..][..(STREAMS + 1) * hidden];
            let (key, value) = (&kv[i * hidden..][..*hidden], &kv[STREAMS * hidden..]);
            let weight = i * hidden..(i + 1) * hidden;
            let gate = gate::<L>(stream, key, &q_weight[weight.clone()], &k_weight[weight], *eps);
            let gate = L::splat(gate);
            for (x, value) in stream.as_chunks_mut::<WIDTH>().0.iter_mut().zip(value.as_chunks::<WIDTH>().0) {
                (L::load_array(x) + gate * L::load_array(value)).bf16_round().store_array(x);
            }
        }
    }
}

#[inline(always)]
fn gate<L: Lanes>(stream: &[f32], key: &[f32], q_weight: &[f32], k_weight: &[f32], eps: f32) -> f32 {
    let columns = stream.len() as f32;
    let dot = weighted_products::<L>(stream, q_weight, k_weight, key);
    let inverse = |squares: f32| 1.0 / (squares / columns + eps).sqrt();
    let (q, k) = (inverse(sum_squares::<L>(stream)), inverse(sum_squares::<L>(key)));
    let d = dot * q * k / columns.sqrt();
    math::sigmoid(d.abs().max(1e-6).sqrt().copysign(d))
}

/// `sum((a * b) * (c * d))` in the order of [`crate::order::sum_products`].
#[inline(always)]
fn weighted_products<L: Lanes>(a: &[f32], b: &[f32], c: &[f32], d: &[f32]) -> f32 {
    let mut sum = Four::<L>::zero();
    let (a, b) = (a.as_chunks::<WIDTH>().0, b.as_chunks::<WIDTH>().0);
    let (c, d) = (c.as_chunks::<WIDTH>().0, d.as_chunks::<WIDTH>().0);
    for t in 0..a.len() {
        let left = L::load_array(&a[t]) * L::load_array(&b[t]);
        let right = L::load_array(&c[t]) * L::load_array(&d[t]);
        sum.0[t % 4] = left.fma(right, sum.0[t % 4]);
    }
    sum.fold()
}

#[cfg(test)]
mod tests {
    use crate::engram::{EngramError, GateArgs, GatherArgs, launch_gate, launch_gather, reference};
    use crate::numerics_policy::Numerics;
    use crate::testing::*;
    use tf_device::{LaunchError, Queue};
    use tf_numerics::lanes::Level;
    use tf_numerics::{bf16, fp8, qdq};

    /// A table of `rows` rows without NaN.
    fn table(rows: usize, head_dim: usize) -> (Vec<u8>, Vec<u8>) {
        let mut values = Values::new(60);
        let code = |v: &mut Values| Some(v.below(256) as u8).filter(|c| c & 0x7f != 0x7f).unwrap_or(0x38);
        let codes = (0..rows * head_dim).map(|_| code(&mut values)).collect();
        let scales = (0..rows * head_dim / 32).map(|_| 110 + values.below(20) as u8).collect();
        (codes, scales)
    }

    fn gather(
        queue: &mut Queue,
        table: &(Vec<u8>, Vec<u8>),
        ids: &[u32],
        quantise: bool,
    ) -> Result<Vec<f32>, EngramError> {
        let mut out = dirty(ids.len() * 32);
        let (codes, scales) = (&table.0, &table.1);
        launch_gather(queue, GatherArgs { codes, scales, ids, columns: 6, head_dim: 32, quantise, out: &mut out })?;
        Ok(out.f32().to_vec())
    }

    #[test]
    fn gathered_rows_are_the_table_s_values_side_by_side() {
        let table = table(50, 32);
        let ids: Vec<u32> = (0..12).map(|i| i * 17 % 50).collect();
        let wanted: Vec<f32> = ids
            .iter()
            .flat_map(|&id| {
                let scale = fp8::decode_e8m0(table.1[id as usize]);
                table.0[id as usize * 32..][..32].iter().map(move |&c| fp8::decode_e4m3(c) * scale).collect::<Vec<_>>()
            })
            .collect();
        let got = on_all_queues(|queue| gather(queue, &table, &ids, false).unwrap());
        assert_eq!(bits(&got), bits(&wanted));
        assert!(got.iter().all(|&v| bf16::round(v) == v), "exact in bf16");
        let mut rounded = wanted;
        qdq::round_row(Level::Scalar, qdq::Format::Fp8, &mut rounded);
        let got = on_all_queues(|queue| gather(queue, &table, &ids, true).unwrap());
        assert_eq!(bits(&got), bits(&rounded));
    }

    #[test]
    fn a_damaged_row_is_named_when_it_is_read_and_only_then() {
        let (mut codes, mut scales) = table(50, 32);
        codes[33 * 32 + 5] = 0xff;
        scales[40] = 255;
        let table = (codes, scales);
        for (name, mut queue) in queues() {
            assert!(gather(&mut queue, &table, &[0, 1, 2, 3, 4, 5], false).is_ok(), "{name}");
            let code = EngramError::NotANumber { what: "code", row: 33, byte: 33 * 32 + 5 };
            assert_eq!(gather(&mut queue, &table, &[0, 1, 33, 3, 40, 5], true), Err(code), "{name}: the first one");
            let scale = EngramError::NotANumber { what: "scale", row: 40, byte: 40 };
            assert_eq!(gather(&mut queue, &table, &[0, 40, 33, 3, 40, 5], false), Err(scale), "{name}");
        }
    }

    #[test]
    fn an_id_outside_the_table_is_refused() {
        let table = table(50, 32);
        let wanted = LaunchError::Limit { what: "an n-gram row id", found: 50, max: 49 };
        let got = gather(&mut Queue::cpu(1, Level::Scalar), &table, &[0, 50, 0, 0, 0, 0], false);
        assert_eq!(got, Err(EngramError::Launch(wanted)));
    }

    fn gated(queue: &mut Queue, streams: &[f32], kv: &[f32], weights: &[Vec<f32>; 2], image: &[bool]) -> Vec<f32> {
        let hidden = weights[0].len() / 4;
        let mut streams = device(streams);
        let args = GateArgs {
            kv: &device(kv),
            q_weight: &device(&weights[0]),
            k_weight: &device(&weights[1]),
            eps: 1e-20,
            image,
            rows: streams.f32().len() / (4 * hidden),
            hidden,
            streams: &mut streams,
        };
        launch_gate(queue, args).unwrap();
        streams.f32().to_vec()
    }

    #[test]
    fn streams_gain_the_gated_value_of_the_definition() {
        let mut values = Values::new(61);
        for (rows, hidden) in [(1, 32), (5, 160), (2, 5120)] {
            let streams = values.bf16(rows * 4 * hidden, 2.0);
            let kv = values.bf16(rows * 5 * hidden, 2.0);
            let weights = [values.bf16(4 * hidden, 1.5), values.bf16(4 * hidden, 1.5)];
            let got = on_all_queues(|queue| gated(queue, &streams, &kv, &weights, &[]));
            let (mut equal, mut all) = (0, 0);
            for r in 0..rows {
                let row = |v: &[f32], n: usize| wide(&v[r * n * hidden..(r + 1) * n * hidden]);
                let definition = |numerics| {
                    let (x, kv) = (row(&streams, 4), row(&kv, 5));
                    reference::gate(&x, &kv, &wide(&weights[0]), &wide(&weights[1]), hidden, 1e-20, numerics)
                };
                let got = &got[r * 4 * hidden..(r + 1) * 4 * hidden];
                let exact = definition(Numerics::Exact);
                // The gate's argument is a root, so its error is that of the sums, halved, over a value of at least 1e-3; the
                // gate's slope is at most 1/4 and the value at most 2. Then one rounding to bf16.
                let bounds: Vec<f64> = exact.iter().map(|w| w.abs() * BF16_HALF_ULP + 1e-3).collect();
                assert_close(got, &exact, &bounds);
                let release = definition(Numerics::Release);
                equal += wide(got).iter().zip(&release).filter(|(got, wanted)| got == wanted).count();
                all += got.len();
            }
            assert!(equal * 1000 >= all * 995, "{equal} of {all} values as the release rounds them");
        }
    }

    #[test]
    fn rows_of_an_image_keep_their_streams() {
        let mut values = Values::new(62);
        let (streams, kv) = (values.bf16(3 * 4 * 32, 2.0), values.bf16(3 * 5 * 32, 2.0));
        let weights = [values.bf16(128, 1.5), values.bf16(128, 1.5)];
        let got = on_all_queues(|queue| gated(queue, &streams, &kv, &weights, &[false, true, false]));
        let all = on_all_queues(|queue| gated(queue, &streams, &kv, &weights, &[]));
        assert_eq!(got[128..256], streams[128..256]);
        assert_eq!(bits(&got[..128]), bits(&all[..128]));
        assert_eq!(bits(&got[256..]), bits(&all[256..]));
        assert_ne!(all[128..256], streams[128..256]);
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_any_neighbours() {
        let mut values = Values::new(63);
        let (streams, kv) = (values.bf16(4 * 160, 2.0), values.bf16(5 * 160, 2.0));
        let weights = [values.bf16(640, 1.5), values.bf16(640, 1.5)];
        let alone = on_all_queues(|queue| gated(queue, &streams, &kv, &weights, &[]));
        let mut many: Vec<f32> = (0..40 * 640).map(|_| values.poison()).collect();
        let mut many_kv: Vec<f32> = (0..40 * 800).map(|_| values.poison()).collect();
        many[20 * 640..21 * 640].copy_from_slice(&streams);
        many_kv[20 * 800..21 * 800].copy_from_slice(&kv);
        let together = on_all_queues(|queue| gated(queue, &many, &many_kv, &weights, &[]));
        assert_eq!(bits(&together[20 * 640..21 * 640]), bits(&alone));
    }
}
