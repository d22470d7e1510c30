//! The definition of the selections: the largest scores, equal ones by the smaller index, and the candidate blocks.

/// The indices of the `count` largest scores above negative infinity, ascending. Fewer when there are not so many.
pub fn top_k(scores: &[f64], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).filter(|&j| scores[j as usize] > f64::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// Which entries lie in the `keep` best blocks of `block` entries. `scores` holds the visible entries; the block of the
/// newest one is always kept. The mask covers whole blocks, so it may reach beyond the visible entries.
pub fn candidates(scores: &[f64], block: usize, keep: usize) -> Vec<bool> {
    let best = |entries: &[f64]| entries.iter().fold(f64::NEG_INFINITY, |max, &score| max.max(score));
    let mut blocks: Vec<f64> = scores.chunks(block).map(best).collect();
    if let Some(newest) = blocks.last_mut() {
        *newest = f64::INFINITY;
    }
    let kept = top_k(&blocks, keep);
    (0..blocks.len() * block).map(|j| kept.binary_search(&((j / block) as u32)).is_ok()).collect()
}

/// `scores` with everything outside the candidates at negative infinity.
pub fn masked(scores: &[f64], candidates: &[bool]) -> Vec<f64> {
    scores.iter().zip(candidates).map(|(&score, &kept)| if kept { score } else { f64::NEG_INFINITY }).collect()
}
