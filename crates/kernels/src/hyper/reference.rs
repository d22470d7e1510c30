//! The definition of the hyper-connections: how a sublayer reads the parallel residual streams and writes them back.

use crate::numerics_policy::Numerics;
use crate::reference_formats::dot;
use crate::rms_norm::reference::inverse_rms;

/// The mixes of one row. `comb[source][target]` is row-major; its first index is the stream that is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixes {
    /// `[hc]`: weights of the streams in the input of the *next* sublayer.
    pub pre: Vec<f64>,
    /// `[hc]`: weight of the sublayer's output in each stream.
    pub post: Vec<f64>,
    /// `[hc, hc]`: close to doubly stochastic.
    pub comb: Vec<f64>,
}

/// The constants of the mixes.
#[derive(Clone, Copy, Debug)]
pub struct MixConstants {
    /// Number of streams.
    pub hc: usize,
    /// Normalisations of the combination matrix, the first (softmax) included.
    pub iterations: usize,
    /// Added to `pre`, to the softmax and to every divisor.
    pub hc_eps: f64,
    /// Added to the mean square of the streams.
    pub rms_eps: f64,
}

/// The mixes of one row from its streams `[hc, columns]`. `weight`: `[2 hc + hc^2, hc columns]`.
pub fn mixes(streams: &[f64], weight: &[f64], scale: &[f64], base: &[f64], constants: MixConstants) -> Mixes {
    let factor = inverse_rms(streams, constants.rms_eps);
    let z: Vec<f64> = weight.chunks(streams.len()).map(|row| dot(row, streams) * factor).collect();
    mixes_of_logits(&z, scale, base, constants)
}

/// The mixes from `z`, which already carries the RMS factor.
pub fn mixes_of_logits(z: &[f64], scale: &[f64], base: &[f64], constants: MixConstants) -> Mixes {
    let MixConstants { hc, iterations, hc_eps, .. } = constants;
    let pre = (0..hc).map(|i| sigmoid(z[i] * scale[0] + base[i]) + hc_eps).collect();
    let post = (hc..2 * hc).map(|i| 2.0 * sigmoid(z[i] * scale[1] + base[i])).collect();
    let mut comb: Vec<f64> = (2 * hc..2 * hc + hc * hc).map(|i| z[i] * scale[2] + base[i]).collect();

    for row in comb.chunks_mut(hc) {
        let max = row.iter().fold(f64::NEG_INFINITY, |max, &value| max.max(value));
        let sum: f64 = row.iter().map(|value| (value - max).exp()).sum();
        row.iter_mut().for_each(|value| *value = (*value - max).exp() / sum + hc_eps);
    }
    divide_columns(&mut comb, hc, hc_eps);
    for _ in 1..iterations {
        for row in comb.chunks_mut(hc) {
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|value| *value /= sum + hc_eps);
        }
        divide_columns(&mut comb, hc, hc_eps);
    }
    Mixes { pre, post, comb }
}

fn divide_columns(comb: &mut [f64], hc: usize, eps: f64) {
    for j in 0..hc {
        let sum: f64 = (0..hc).map(|i| comb[i * hc + j]).sum();
        for i in 0..hc {
            comb[i * hc + j] /= sum + eps;
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The input of a sublayer: `sum_i mix[i] * streams[i]`, rounded. `streams`: `[hc, columns]` of one row.
pub fn collapse(streams: &[f64], mix: &[f64], numerics: Numerics) -> Vec<f64> {
    let columns = streams.len() / mix.len();
    (0..columns)
        .map(|c| numerics.bf16(mix.iter().enumerate().map(|(i, weight)| weight * streams[i * columns + c]).sum()))
        .collect()
}

/// The streams after a sublayer: `out[j] = post[j] * y + sum_i comb[i][j] * streams[i]`, rounded.
pub fn expand(y: &[f64], streams: &[f64], mixes: &Mixes, numerics: Numerics) -> Vec<f64> {
    let (hc, columns) = (mixes.post.len(), y.len());
    let mut out = Vec::with_capacity(streams.len());
    for j in 0..hc {
        for c in 0..columns {
            let carried: f64 = (0..hc).map(|i| mixes.comb[i * hc + j] * streams[i * columns + c]).sum();
            out.push(numerics.bf16(mixes.post[j] * y[c] + carried));
        }
    }
    out
}

/// The mean of the streams of one row, rounded: what a draft block reads of a target layer.
pub fn tap(streams: &[f64], hc: usize, numerics: Numerics) -> Vec<f64> {
    let columns = streams.len() / hc;
    (0..columns).map(|c| numerics.bf16((0..hc).map(|i| streams[i * columns + c]).sum::<f64>() / hc as f64)).collect()
}
