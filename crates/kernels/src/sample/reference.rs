//! The definition of the draw: which tokens stay, with which probabilities, and which one the noise chooses.

/// The filters of a draw, applied in this order. The defaults of the fields' doc switch a filter off.
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// Divides the logits; 0 means the most likely token.
    pub temperature: f64,
    /// Keeps so many tokens; 0 is off.
    pub top_k: usize,
    /// Keeps the smallest prefix of the tokens that reaches this probability; 1 is off.
    pub top_p: f64,
    /// Keeps tokens of at least this probability relative to the likeliest; 0 is off.
    pub min_p: f64,
}

/// `logits - ln(sum(exp(logits)))`.
pub fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, &value| max.max(value));
    let sum: f64 = logits.iter().map(|value| (value - max).exp()).sum();
    logits.iter().map(|value| value - max - sum.ln()).collect()
}

/// The tokens in order of preference: the larger logit first, the smaller id among equals.
pub fn ranked(logits: &[f64]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    ids
}

/// The tokens that the filters leave, in order of preference. Never empty unless every logit is negative infinity.
pub fn kept(logits: &[f64], filters: Filters) -> Vec<u32> {
    let mut ids = ranked(logits);
    ids.retain(|&id| logits[id as usize] > f64::NEG_INFINITY);
    if filters.temperature == 0.0 {
        ids.truncate(1);
        return ids;
    }
    if filters.top_k > 0 {
        ids.truncate(filters.top_k);
    }
    let Some(&first) = ids.first() else { return ids };
    let weight = |id: u32| ((logits[id as usize] - logits[first as usize]) / filters.temperature).exp();
    let total: f64 = ids.iter().map(|&id| weight(id)).sum();
    let mut reached = 0.0;
    let prefix = ids.iter().take_while(|&&id| {
        let wanted = reached < filters.top_p * total;
        reached += weight(id);
        wanted
    });
    let count = if filters.top_p < 1.0 { prefix.count().max(1) } else { ids.len() };
    ids.truncate(count);
    ids.retain(|&id| weight(id) >= filters.min_p);
    ids
}

/// The drawn token: the largest `logit / temperature - ln(-ln(u))` of those kept, where `uniform` gives a token's `u` in
/// (0, 1); the earlier in order of preference among equals. `None` when nothing is kept.
pub fn draw(logits: &[f64], filters: Filters, uniform: impl Fn(u32) -> f64) -> Option<u32> {
    let mut best: Option<(u32, f64)> = None;
    for id in kept(logits, filters) {
        if filters.temperature == 0.0 {
            return Some(id);
        }
        let value = logits[id as usize] / filters.temperature - (-uniform(id).ln()).ln();
        if best.is_none_or(|(_, largest)| value > largest) {
            best = Some((id, value));
        }
    }
    best.map(|(id, _)| id)
}
