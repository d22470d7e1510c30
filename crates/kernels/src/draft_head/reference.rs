//! The definition of the draft head: proposals one after the other, each biased by the one before, and their confidence.

use crate::reference_formats::dot;

/// The proposals of one draft round.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposals {
    /// `[rows]`: the most likely token of each row.
    pub ids: Vec<u32>,
    /// `[rows, vocabulary]`, with the bias of the token before.
    pub logits: Vec<f64>,
    /// `[rows]`: raw logits; the sigmoid is the probability that the target agrees.
    pub confidence: Vec<f64>,
}

/// `logits_i = base_i + head @ embed[previous]`, `ids_i = argmax(logits_i)` (the smaller id among equals), which is the next
/// `previous`; `confidence_i = proj . [hidden_i, embed[previous]]`. Nothing is rounded.
///
/// `base`: `[rows, vocabulary]`; `hidden`: `[rows, columns]`, *before* the final norm; `embed`, `head`: `[vocabulary, rank]`;
/// `proj`: `[columns + rank]`; `anchor`: the token in front of the first proposal.
pub fn proposals(
    base: &[f64],
    hidden: &[f64],
    embed: &[f64],
    head: &[f64],
    proj: &[f64],
    rank: usize,
    anchor: u32,
) -> Proposals {
    let (vocabulary, columns) = (head.len() / rank, proj.len() - rank);
    let mut out = Proposals { ids: Vec::new(), logits: Vec::new(), confidence: Vec::new() };
    let mut previous = anchor;
    for (base, hidden) in base.chunks(vocabulary).zip(hidden.chunks(columns)) {
        let state = &embed[previous as usize * rank..][..rank];
        let logits: Vec<f64> = base.iter().zip(head.chunks(rank)).map(|(base, row)| base + dot(row, state)).collect();
        out.confidence.push(dot(&proj[..columns], hidden) + dot(&proj[columns..], state));
        previous = argmax(&logits);
        out.ids.push(previous);
        out.logits.extend(logits);
    }
    out
}

/// The index of the largest value, the smaller one among equals.
pub fn argmax(values: &[f64]) -> u32 {
    (1..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best }) as u32
}
