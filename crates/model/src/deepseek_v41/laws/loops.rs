//! Small loops over a model that return bits: how a prompt, a reply or a company of sequences is fed.

use std::ops::Range;

use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, RoundPlan, SequenceView, SlotIndex, Window};
use tf_engine::request::Sampling;

use crate::deepseek_v41::DeepseekV41;

/// One row's logits as bits.
pub type RowBits = Vec<u32>;

/// Cuts a buffer of logits into rows of bits.
pub fn row_bits(logits: &[f32], vocab: usize) -> Vec<RowBits> {
    logits.chunks_exact(vocab).map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}

/// A window over some tokens of a sequence.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    pub slot: u32,
    pub start: u32,
    pub tokens: &'a [u32],
    pub prompt_end: u32,
    pub whole: bool,
    pub draw: Range<usize>,
}

impl<'a> Piece<'a> {
    /// Rows of a reply, or of a prompt whose every row is wanted.
    pub fn all(slot: u32, start: u32, tokens: &'a [u32]) -> Piece<'a> {
        Piece { slot, start, tokens, prompt_end: start + tokens.len() as u32, whole: true, draw: 0..tokens.len() }
    }

    /// A verify window.
    pub fn reply(slot: u32, start: u32, tokens: &'a [u32]) -> Piece<'a> {
        Piece { slot, start, tokens, prompt_end: start, whole: false, draw: 0..tokens.len() }
    }
}

/// One round of pieces.
pub fn plan(pieces: &[Piece<'_>]) -> RoundPlan {
    let mut plan = RoundPlan::default();
    for (index, piece) in pieces.iter().enumerate() {
        let first = plan.tokens.len();
        plan.tokens.extend_from_slice(piece.tokens);
        plan.windows.push(Window {
            slot: SlotIndex(piece.slot),
            start: piece.start,
            rows: first..plan.tokens.len(),
            prompt_end: piece.prompt_end,
            whole: piece.whole,
            draw: piece.draw.clone(),
            logprobs: None,
            sequence: index,
        });
    }
    plan
}

/// The logits of all drawn rows of a round.
///
/// # Errors
/// A forward that failed, as text; so for every loop here.
pub fn logits(model: &mut DeepseekV41, pieces: &[Piece<'_>]) -> Result<Vec<RowBits>, String> {
    let mut out = Vec::new();
    model.logits_rows(&plan(pieces), &mut out).map_err(|error| error.to_string())?;
    Ok(row_bits(&out, model.limits().vocab_size as usize))
}

/// Feeds `tokens` from position `start` in chunks of `chunk` rows, every row's logits wanted.
///
/// # Errors
/// As [`logits`].
pub fn feed_all(
    model: &mut DeepseekV41,
    slot: u32,
    start: u32,
    tokens: &[u32],
    chunk: usize,
) -> Result<Vec<RowBits>, String> {
    let mut rows = Vec::new();
    let mut start = start;
    for piece in tokens.chunks(chunk) {
        rows.extend(logits(model, &[Piece::all(slot, start, piece)])?);
        start += piece.len() as u32;
        model.keep(SlotIndex(slot), start);
    }
    Ok(rows)
}

/// Feeds a prompt in chunks as a server does, only the last row's logits wanted.
///
/// # Errors
/// As [`logits`].
pub fn feed_prompt(model: &mut DeepseekV41, slot: u32, tokens: &[u32], chunk: usize) -> Result<RowBits, String> {
    let prompt_end = tokens.len() as u32;
    let mut last = Vec::new();
    let mut start = 0;
    for piece in tokens.chunks(chunk) {
        let end = start + piece.len() as u32;
        let draw = if end == prompt_end { piece.len() - 1..piece.len() } else { 0..0 };
        last = logits(model, &[Piece { slot, start, tokens: piece, prompt_end, whole: false, draw }])?;
        model.keep(SlotIndex(slot), end);
        start = end;
    }
    last.pop().ok_or_else(|| "the prompt's last row was not drawn".to_owned())
}

/// `Ok` when both lists of rows have equal bits.
///
/// # Errors
/// The first difference, by row and logit.
pub fn equal(what: &str, found: &[RowBits], wanted: &[RowBits]) -> Result<(), String> {
    if found.len() != wanted.len() {
        return Err(format!("{what}: {} rows, expected {}", found.len(), wanted.len()));
    }
    for (row, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        if found.len() != wanted.len() {
            return Err(format!("{what}: row {row} has {} values, expected {}", found.len(), wanted.len()));
        }
        if let Some(column) = (0..wanted.len()).find(|column| found[*column] != wanted[*column]) {
            let (found, wanted) = (f32::from_bits(found[column]), f32::from_bits(wanted[column]));
            return Err(format!("{what}: row {row}, value {column} is {found:e}, expected {wanted:e}"));
        }
    }
    Ok(())
}

/// Where the drafts of a reply come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafter<'a> {
    Absent,
    /// The draft head.
    Head,
    /// The right reply.
    Right(&'a [u32]),
    /// Never the right token.
    Wrong(&'a [u32]),
    /// The right reply with every third token wrong.
    Mixed(&'a [u32]),
}

/// A reply as a client sees it, and what drafting did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    pub tokens: Vec<u32>,
    /// Bits of the drawn token's and the likeliest tokens' log-probabilities.
    pub logprobs: Vec<u32>,
    pub accepted: usize,
    pub rejected: usize,
    pub rounds: usize,
}

impl Reply {
    /// `Ok` when a client could not tell the two apart.
    ///
    /// # Errors
    /// What differs.
    pub fn same(&self, other: &Reply) -> Result<(), String> {
        if self.tokens != other.tokens {
            return Err(format!("tokens {:?}, expected {:?}", self.tokens, other.tokens));
        }
        if self.logprobs != other.logprobs {
            return Err("equal tokens, other log-probabilities".into());
        }
        Ok(())
    }
}

/// The draft head's proposals for one sequence.
///
/// # Errors
/// A launch that was refused.
pub fn head_drafts(
    model: &mut DeepseekV41,
    slot: u32,
    anchor: u32,
    position: u32,
    sampling: &Sampling,
    count: usize,
) -> Result<Drafts, String> {
    let mut drafts = Drafts::default();
    let wanted = DraftRequest { slot: SlotIndex(slot), anchor, position, count_max: count as u32, sampling };
    model.draft(&[wanted], &mut drafts).map_err(|error| error.to_string())?;
    Ok(drafts)
}

fn drafts_of(
    model: &mut DeepseekV41,
    drafter: Drafter<'_>,
    anchor: u32,
    position: u32,
    sampling: &Sampling,
    done: usize,
    count: usize,
) -> Result<Vec<u32>, String> {
    let vocab = model.limits().vocab_size;
    let ahead = |reply: &[u32]| reply[done.min(reply.len())..(done + count).min(reply.len())].to_vec();
    Ok(match drafter {
        Drafter::Absent => Vec::new(),
        Drafter::Right(reply) => ahead(reply),
        Drafter::Wrong(reply) => ahead(reply).into_iter().map(|token| (token + 1) % vocab).collect(),
        Drafter::Mixed(reply) => ahead(reply)
            .into_iter()
            .enumerate()
            .map(|(index, token)| if (done + index) % 3 == 2 { (token + 1) % vocab } else { token })
            .collect(),
        Drafter::Head => head_drafts(model, 0, anchor, position, sampling, count)?.tokens,
    })
}

/// Replies to `prompt` in slot 0, as an engine would: prompt in chunks, then verify windows of drafts.
///
/// # Errors
/// As [`logits`].
pub fn reply(
    model: &mut DeepseekV41,
    prompt: &[u32],
    count: usize,
    sampling: &Sampling,
    drafter: Drafter<'_>,
    chunk: usize,
) -> Result<Reply, String> {
    let slot = SlotIndex(0);
    let mut out = Reply::default();
    let mut drawn = Drawn::default();
    let mut start = 0u32;
    let mut window: Vec<u32> = prompt[..chunk.min(prompt.len())].to_vec();
    while out.tokens.len() < count {
        let end = start + window.len() as u32;
        let in_prompt = (start as usize) < prompt.len();
        let last_piece = end as usize >= prompt.len();
        let draw = match (in_prompt, last_piece) {
            (true, false) => 0..0,
            (true, true) => window.len() - 1..window.len(),
            (false, _) => 0..window.len(),
        };
        let prompt_end = if in_prompt { prompt.len() as u32 } else { start };
        let piece = Piece { slot: 0, start, tokens: &window, prompt_end, whole: false, draw: draw.clone() };
        let mut round = plan(&[piece]);
        round.windows[0].logprobs = Some(3);
        let view = SequenceView { sampling, prompt, reply: &out.tokens, given: &[] };
        model.forward(&round, &[view], &mut drawn).map_err(|error| error.to_string())?;
        out.rounds += 1;
        if draw.is_empty() {
            model.keep(slot, end);
            start = end;
            window = prompt[start as usize..(start as usize + chunk).min(prompt.len())].to_vec();
            continue;
        }
        let drafts = if in_prompt { &[][..] } else { &window[1..] };
        let mut kept = 0;
        for (index, row) in drawn.rows.iter().enumerate() {
            if out.tokens.len() == count {
                break;
            }
            out.tokens.push(row.token);
            out.logprobs.push(row.logprob.to_bits());
            let top = row.top_start as usize..(row.top_start + row.top_count) as usize;
            out.logprobs.extend(drawn.top[top].iter().flat_map(|(token, logprob)| [*token, logprob.to_bits()]));
            kept = index;
            if index < drafts.len() {
                match drafts[index] == row.token {
                    true => out.accepted += 1,
                    false => {
                        out.rejected += 1;
                        break;
                    }
                }
            }
        }
        let length = if in_prompt { end } else { start + 1 + kept as u32 };
        model.keep(slot, length);
        start = length;
        let anchor = *out.tokens.last().ok_or("no row was drawn")?;
        let room = count - out.tokens.len();
        let depth = model.limits().draft_block as usize;
        let proposals = drafts_of(model, drafter, anchor, start, sampling, out.tokens.len(), depth.min(room))?;
        window = std::iter::once(anchor).chain(proposals).collect();
    }
    model.release(slot);
    Ok(out)
}
