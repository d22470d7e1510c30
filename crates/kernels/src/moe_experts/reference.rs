//! The definition of the experts: gated linear units of the chosen experts and of the shared one, added in a fixed order.

use crate::linear_fp8::reference::linear_fp8;
use crate::moe_route::reference::Route;
use crate::numerics_policy::Numerics;
use crate::reference_formats::{e2m1_decode, e8m0_decode};

/// The weights of one expert, dequantised. `w1` (gate) and `w3` (up): `[inner, columns]`; `w2` (down): `[columns, inner]`.
#[derive(Clone, Debug)]
pub struct Expert {
    pub w1: Vec<f64>,
    pub w2: Vec<f64>,
    pub w3: Vec<f64>,
}

/// One expert's output for one row: `w2(silu(min(g, limit)) * clamp(u, -limit, limit) * weight)`.
///
/// The routing weight multiplies before the rounding of the activation. A limit of 0 means none.
pub fn expert(x: &[f64], expert: &Expert, weight: f64, limit: f64, numerics: Numerics) -> Vec<f64> {
    let limit = if limit == 0.0 { f64::INFINITY } else { limit };
    let gate = linear_fp8(x, &expert.w1, x.len(), numerics);
    let up = linear_fp8(x, &expert.w3, x.len(), numerics);
    let activation = gate.iter().zip(&up).map(|(&gate, &up)| {
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
        numerics.bf16(gate / (1.0 + (-gate).exp()) * up * weight)
    });
    let activation: Vec<f64> = activation.collect();
    linear_fp8(&activation, &expert.w2, activation.len(), numerics)
}

/// The mixture of one row: the chosen experts in ascending id, the shared expert last, rounded once.
pub fn moe(x: &[f64], route: &Route, experts: &[Expert], shared: &Expert, limit: f64, numerics: Numerics) -> Vec<f64> {
    let mut sum = vec![0.0; x.len()];
    let mut add = |out: Vec<f64>| sum.iter_mut().zip(out).for_each(|(sum, value)| *sum += value);
    for (&id, &weight) in route.experts.iter().zip(&route.weights) {
        add(expert(x, &experts[id as usize], weight, limit, numerics));
    }
    add(expert(x, shared, 1.0, limit, numerics));
    numerics.bf16_all(sum)
}

/// A stored FP4 weight: two columns a byte, the even one in the low half, and one E8M0 scale for 32 columns of a row.
pub fn dequantise(packed: &[u8], scales: &[u8], inner: usize) -> Vec<f64> {
    let value = |i: usize| {
        let code = if i.is_multiple_of(2) { packed[i / 2] } else { packed[i / 2] >> 4 };
        e2m1_decode(code) * e8m0_decode(scales[i / inner * (inner / 32) + i % inner / 32])
    };
    (0..2 * packed.len()).map(value).collect()
}
