//! The draft head on its own: how its context rows came and who shares its pass changes no proposal and no confidence.

use tf_engine::model::{DraftRequest, Drafts, Model, SlotIndex};
use tf_engine::request::Sampling;

use super::loops::{Piece, RowBits, equal, feed_all, head_drafts, logits};
use super::{DeepseekV41, Evidence, Fault, Subject, sampled};

/// Slots of the largest pass.
const SLOTS: usize = 8;
/// Proposals that are asked for: the release's block.
const COUNT: usize = 5;

/// Tokens and confidences of the ranges, a row each.
fn bits(drafts: &Drafts) -> Vec<RowBits> {
    let row = |range: &std::ops::Range<usize>| {
        let confidence = drafts.confidence[range.clone()].iter().map(|value| value.to_bits());
        drafts.tokens[range.clone()].iter().copied().chain(confidence).collect()
    };
    drafts.ranges.iter().map(row).collect()
}

/// Feeds a sequence as verify windows whose last two drafts are wrong and are computed again.
fn feed_with_rejections(model: &mut DeepseekV41, slot: u32, tokens: &[u32], vocab: u32) -> Result<u64, String> {
    let (mut start, mut rejected) = (0, 0);
    while start < tokens.len() {
        let right = 2.min(tokens.len() - start);
        let mut window = tokens[start..start + right].to_vec();
        window.extend([1, 2].map(|more| (tokens[start] + more) % vocab));
        logits(model, &[Piece::reply(slot, start as u32, &window)])?;
        start += right;
        model.keep(SlotIndex(slot), start as u32);
        rejected += 2;
    }
    Ok(rejected)
}

/// Context rows that entered the rings together, or after rejected ones, = one at a time; 2, 3 and 8 slots in one pass = each
/// alone, greedy and sampled, past the window's end.
pub(super) fn together(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let mut evidence = Evidence::new();
    let mut model = subject.plain(fault)?;
    let window = model.shape().sliding_window;
    // Contexts on both sides of the ring's length.
    let length = |index: usize| if index.is_multiple_of(4) { 2 * window + 3 } else { window / 2 + index };
    let lengths: Vec<usize> = (0..SLOTS).map(|index| length(index).min(subject.tokens.len() - 13 * SLOTS)).collect();
    let context = |index: usize| &subject.tokens[13 * index..13 * index + lengths[index]];
    let sampling = |index: usize| if index % 3 == 1 { sampled(index as u64) } else { Sampling::greedy() };
    let anchor = |index: usize| (7 + 11 * index as u32) % subject.vocab;
    let mut wanted: Vec<RowBits> = Vec::new();
    for index in 0..SLOTS {
        // One row at a time is slow; the others are fed in chunks, here and below of different lengths.
        let chunk = if index < subject.extent.pick(1, 3, SLOTS) { 1 } else { 4 };
        feed_all(&mut model, 0, 0, context(index), chunk)?;
        let drafts = head_drafts(&mut model, 0, anchor(index), lengths[index] as u32, &sampling(index), COUNT)?;
        wanted.extend(bits(&drafts));
        model.release(SlotIndex(0));
    }
    let slot = |index: usize| (SLOTS - 1 - index) as u32;
    for index in 0..SLOTS {
        if index == 1 {
            let rejected = feed_with_rejections(&mut model, slot(index), context(index), subject.vocab)?;
            evidence.count("rejected rows in the rings", rejected);
        } else {
            feed_all(&mut model, slot(index), 0, context(index), 4 + index)?;
        }
    }
    let samplings: Vec<Sampling> = (0..SLOTS).map(sampling).collect();
    let mut drafts = Drafts::default();
    for together in [vec![1, 0], vec![2, 1, 4], (0..SLOTS).collect()] {
        let requests: Vec<DraftRequest<'_>> = together
            .iter()
            .map(|&index| DraftRequest {
                slot: SlotIndex(slot(index)),
                anchor: anchor(index),
                position: lengths[index] as u32,
                count_max: COUNT as u32,
                sampling: &samplings[index],
            })
            .collect();
        model.draft(&requests, &mut drafts).map_err(|error| error.to_string())?;
        let alone: Vec<RowBits> = together.iter().map(|&index| wanted[index].clone()).collect();
        equal(&format!("{} slots in one pass", together.len()), &bits(&drafts), &alone)?;
        let sampled = samplings.iter().filter(|sampling| sampling.temperature > 0.0).count();
        evidence.count("proposals in a shared pass", drafts.tokens.len() as u64);
        evidence.count("sampled slots", sampled as u64);
    }
    evidence.bits(&wanted);
    evidence.complete()
}
