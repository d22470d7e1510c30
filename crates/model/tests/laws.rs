//! The laws of exactness on the production model, bit for bit on logits and log-probabilities, and a planted fault for each
//! that must turn it red.

mod production;

use production::{
    Case, Drafter, Piece, RowBits, cases, equal, feed_all, feed_prompt, head_drafts, logits, plan, reply, tiny_a,
};
use tf_engine::model::{Drawn, Model, SequenceView, SlotIndex};
use tf_engine::request::Sampling;
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options};
use tf_numerics::lanes::Level;

type Law = fn(&Case, Fault) -> Result<(), String>;

/// Holds on every checkpoint without a fault, and breaks with each of `faults` on the golden one.
fn check(law: Law, faults: &[Fault]) {
    for case in cases() {
        if let Err(difference) = law(&case, Fault::None) {
            panic!("{}: {difference}", case.name);
        }
    }
    for fault in faults {
        assert!(law(&tiny_a(), *fault).is_err(), "the planted fault {fault:?} was not noticed");
    }
}

fn model(case: &Case, fault: Fault) -> DeepseekV41 {
    case.load(Options { fault, round_rows: 320, context: 1024, slots: 8, ..Options::default() })
}

fn sampled(seed: u64) -> Sampling {
    Sampling { temperature: 0.9, top_p: 0.95, top_k: 40, min_p: 0.01, seed, ..Sampling::greedy() }
}

fn samplings() -> [Sampling; 3] {
    let penalised = Sampling { frequency_penalty: 0.4, presence_penalty: 0.2, repetition_penalty: 1.1, ..sampled(77) };
    [Sampling::greedy(), sampled(5), penalised]
}

/// L4: one token at a time = chunks of 3, 7 and 64 = whole.
fn any_split(case: &Case, fault: Fault) -> Result<(), String> {
    let tokens = &case.tokens[..150];
    let mut model = model(case, fault);
    let whole = feed_all(&mut model, 0, 0, tokens, tokens.len());
    for chunk in [64, 7, 3, 1] {
        model.release(SlotIndex(0));
        let rows = feed_all(&mut model, 0, 0, tokens, chunk);
        equal(&format!("chunks of {chunk}"), &rows, &whole)?;
    }
    Ok(())
}

#[test]
fn any_split_of_a_sequence_gives_the_same_bits() {
    check(any_split, &[Fault::PairRowLost, Fault::RowCount]);
}

/// L2: 2, 3 and 8 sequences together = each alone, joining and leaving at different rounds.
fn company(case: &Case, fault: Fault) -> Result<(), String> {
    let mut alone = model(case, fault);
    let mut together = model(case, fault);
    for count in [2usize, 3, 8] {
        let sequences: Vec<&[u32]> =
            (0..count).map(|index| &case.tokens[13 * index..13 * index + 40 + 7 * (index % 3)]).collect();
        let wanted: Vec<Vec<RowBits>> = sequences
            .iter()
            .map(|tokens| {
                let rows = feed_all(&mut alone, 0, 0, tokens, 1);
                alone.release(SlotIndex(0));
                rows
            })
            .collect();
        let mut found: Vec<Vec<RowBits>> = vec![Vec::new(); count];
        for round in 0..200 {
            let mut pieces = Vec::new();
            for (index, tokens) in sequences.iter().enumerate().filter(|(index, _)| round >= 2 * index) {
                let done = found[index].len();
                // Prompt pieces of different lengths beside single rows.
                let rows = if round == 2 * index { 9 + index } else { 1 + (index + round) % 3 };
                let slot = (count - 1 - index) as u32;
                if done < tokens.len() {
                    let piece = &tokens[done..(done + rows).min(tokens.len())];
                    pieces.push((index, Piece::all(slot, done as u32, piece)));
                }
            }
            if pieces.is_empty() && round > 2 * count {
                break;
            }
            if round % 2 == 1 {
                pieces.reverse();
            }
            let (indices, pieces): (Vec<usize>, Vec<Piece<'_>>) = pieces.into_iter().unzip();
            let mut rows = logits(&mut together, &pieces).into_iter();
            for (index, piece) in indices.iter().zip(&pieces) {
                found[*index].extend(rows.by_ref().take(piece.tokens.len()));
                together.keep(SlotIndex(piece.slot), piece.start + piece.tokens.len() as u32);
            }
        }
        for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            equal(&format!("sequence {index} of {count}"), found, wanted)?;
            together.release(SlotIndex(index as u32));
        }
    }
    if together.counters().rows_shared == 0 {
        return Err("no row shared a round".into());
    }
    Ok(())
}

#[test]
fn company_does_not_change_a_sequence() {
    check(company, &[Fault::RowCount]);
}

/// L5: every level of this CPU, 1, 2 and 3 threads.
fn processors(case: &Case, fault: Fault) -> Result<(), String> {
    let tokens = &case.tokens[..100];
    let run = |level, threads| {
        let options = Options { fault, level, threads, round_rows: 128, context: 256, slots: 1, ..Options::default() };
        let mut model = case.load(options);
        let mut rows = feed_all(&mut model, 0, 0, &tokens[..70], 70);
        rows.extend(feed_all(&mut model, 0, 70, &tokens[70..], 1));
        let drafts = head_drafts(&mut model, 0, 7, 100, &sampled(3), 5);
        rows.push(drafts.tokens);
        rows.push(drafts.confidence.iter().map(|value| value.to_bits()).collect());
        rows
    };
    let wanted = run(Level::best(), 1);
    for level in Level::available() {
        for threads in [1, 2, 3] {
            equal(&format!("{level:?}, {threads} threads"), &run(level, threads), &wanted)?;
        }
    }
    Ok(())
}

#[test]
fn every_level_and_thread_count_gives_the_same_bits() {
    check(processors, &[Fault::Threads]);
}

/// The exact halo: skipping changes nothing that can be asked for afterwards.
fn halo(case: &Case, fault: Fault) -> Result<(), String> {
    let prompt = &case.tokens[..case.halo_prompt];
    let reply = &case.tokens[case.halo_prompt..case.halo_prompt + 40];
    let run = |halo, chunk| {
        let mut model = case.load(Options {
            fault,
            halo,
            round_rows: case.halo_prompt as u32,
            context: 1024,
            slots: 1,
            ..Options::default()
        });
        let mut rows = vec![feed_prompt(&mut model, 0, prompt, chunk)];
        let skipped = model.counters().layer_rows_skipped;
        let position = prompt.len() as u32;
        let drafts = head_drafts(&mut model, 0, reply[0], position, &Sampling::greedy(), 5);
        rows.push(drafts.tokens);
        rows.push(drafts.confidence.iter().map(|value| value.to_bits()).collect());
        for (index, token) in reply.iter().enumerate() {
            let start = position + index as u32;
            rows.extend(logits(&mut model, &[Piece::reply(0, start, &[*token])]));
            model.keep(SlotIndex(0), start + 1);
        }
        (rows, skipped)
    };
    let (wanted, skipped) = run(false, prompt.len());
    if skipped != 0 {
        return Err(format!("{skipped} rows were skipped without the halo"));
    }
    for chunk in [prompt.len(), 50, 7] {
        let (rows, skipped) = run(true, chunk);
        equal(&format!("halo, chunks of {chunk}"), &rows, &wanted)?;
        if skipped == 0 {
            return Err("no row was skipped".into());
        }
    }
    Ok(())
}

#[test]
fn the_halo_skips_rows_and_changes_nothing() {
    check(halo, &[Fault::HaloShort]);
}

/// Verify windows whose drafts are kept up to the first wrong one = plain decode; drafting between them changes nothing.
fn rejected(case: &Case, fault: Fault) -> Result<(), String> {
    let tokens = &case.tokens[..120];
    let mut model = model(case, fault);
    let wanted = feed_all(&mut model, 0, 0, tokens, 1);
    model.release(SlotIndex(0));
    let prompt = 21;
    let mut rows = feed_all(&mut model, 0, 0, &tokens[..prompt], prompt);
    let (mut accepted, mut wrong) = (0, 0);
    let mut start = prompt;
    while start < tokens.len() {
        // The window's first `right` drafts are the true continuation, the others are not.
        let right = (start * 7 / 3) % 6;
        let right = right.min(tokens.len() - start - 1);
        let mut window: Vec<u32> = tokens[start..=start + right].to_vec();
        while window.len() < 6 {
            let position = start + window.len();
            window.push((tokens.get(position).copied().unwrap_or(0) + 1 + position as u32) % 384);
        }
        let computed = logits(&mut model, &[Piece::reply(0, start as u32, &window)]);
        rows.extend_from_slice(&computed[..=right]);
        (accepted, wrong) = (accepted + right, wrong + 5 - right);
        start += right + 1;
        model.keep(SlotIndex(0), start as u32);
        head_drafts(&mut model, 0, 3, start as u32, &Sampling::greedy(), 5);
    }
    if accepted == 0 || wrong == 0 {
        return Err(format!("{accepted} drafts accepted, {wrong} rejected: nothing was shown"));
    }
    equal("verify windows", &rows, &wanted)
}

#[test]
fn rejected_drafts_leave_no_trace() {
    check(rejected, &[Fault::StaleRing, Fault::StaleTokens, Fault::PairRowLost, Fault::DraftWrites, Fault::RowCount]);
}

/// L3: a slot restored from a snapshot goes on as the sequence itself does, also beside the one it was taken from.
fn resumed(case: &Case, fault: Fault) -> Result<(), String> {
    let tokens = &case.tokens[..200];
    let mut model = model(case, fault);
    let wanted = feed_all(&mut model, 0, 0, tokens, tokens.len());
    model.release(SlotIndex(0));
    for length in [1usize, 15, 16, 17, 64, 127, 128, 129, 130, 163] {
        feed_prompt(&mut model, 0, &tokens[..length], 50);
        let snapshot = model.snapshot(SlotIndex(0));
        // The original writes on into its pages while the snapshot is held, with other tokens.
        let other: Vec<u32> = tokens[length..].iter().map(|token| (token + 5) % 384).collect();
        let original = feed_all(&mut model, 0, length as u32, &other[..20], 7);
        model.restore(SlotIndex(3), &snapshot);
        model.restore(SlotIndex(5), &snapshot);
        let rows = feed_all(&mut model, 3, length as u32, &tokens[length..], 9);
        equal(&format!("resumed at {length}"), &rows, &wanted[length..])?;
        let drafts = head_drafts(&mut model, 3, 9, 200, &Sampling::greedy(), 5).tokens;
        // The original goes on after the first copy wrote, and before the second does.
        let further = feed_all(&mut model, 0, length as u32 + 20, &tokens[..10], 1);
        let again = feed_all(&mut model, 5, length as u32, &other[..20], 3);
        equal(&format!("resumed at {length} once more"), &again, &original)?;
        let rest = feed_all(&mut model, 5, length as u32 + 20, &tokens[..10], 5);
        equal(&format!("both ways on from {length}"), &further, &rest)?;
        for slot in [0, 3, 5] {
            model.release(SlotIndex(slot));
        }
        feed_all(&mut model, 0, 0, tokens, 64);
        if head_drafts(&mut model, 0, 9, 200, &Sampling::greedy(), 5).tokens != drafts {
            return Err(format!("resumed at {length}: other drafts"));
        }
        model.release(SlotIndex(0));
    }
    if model.counters().restores == 0 {
        return Err("nothing was restored".into());
    }
    Ok(())
}

#[test]
fn resumed_sequences_go_on_with_the_same_bits() {
    check(resumed, &[Fault::SnapshotShort, Fault::SharedPage]);
}

/// L1: a drafted reply = the plain one, greedy and sampled, tokens and log-probabilities.
fn drafted(case: &Case, fault: Fault) -> Result<(), String> {
    let prompt = &case.tokens[..45];
    let count = 48;
    let mut model = model(case, fault);
    for sampling in samplings() {
        let plain = reply(&mut model, prompt, count, &sampling, Drafter::Absent, 64);
        if plain.tokens.len() != count || plain.logprobs.is_empty() {
            return Err("the plain reply is not complete".into());
        }
        let right = plain.tokens.clone();
        let drafters = [
            (Drafter::Right(&right), true, false),
            (Drafter::Wrong(&right), false, true),
            (Drafter::Mixed(&right), true, true),
            (Drafter::Head, false, true),
        ];
        for (drafter, accepts, rejects) in drafters {
            for chunk in [64, 8] {
                let drafted = reply(&mut model, prompt, count, &sampling, drafter, chunk);
                drafted.same(&plain).map_err(|difference| format!("{drafter:?}, {sampling:?}: {difference}"))?;
                if accepts && drafted.accepted == 0 || rejects && drafted.rejected == 0 {
                    return Err(format!("{drafter:?}: {} accepted, {} rejected", drafted.accepted, drafted.rejected));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn drafts_never_change_a_reply() {
    check(drafted, &[Fault::StaleRing, Fault::StaleTokens, Fault::RowCount, Fault::PairRowLost]);
}

/// L2 for draws: a round of several windows draws what each window draws alone, with its own settings and key.
fn drawn_together(case: &Case, fault: Fault) -> Result<(), String> {
    let prompts = [&case.tokens[..33], &case.tokens[20..41], &case.tokens[5..52]];
    let samplings = samplings();
    let draw = |model: &mut DeepseekV41, sequences: &[usize]| {
        let pieces: Vec<Piece<'_>> = sequences
            .iter()
            .map(|sequence| {
                let tokens = prompts[*sequence];
                let draw = tokens.len() - 1..tokens.len();
                let prompt_end = tokens.len() as u32;
                Piece { slot: *sequence as u32, start: 0, tokens, prompt_end, whole: false, draw }
            })
            .collect();
        let mut plan = plan(&pieces);
        plan.windows.iter_mut().for_each(|window| window.logprobs = Some(5));
        let views: Vec<SequenceView<'_>> = sequences
            .iter()
            .map(|sequence| SequenceView { sampling: &samplings[*sequence], prompt: prompts[*sequence], reply: &[] })
            .collect();
        let mut drawn = Drawn::default();
        model.forward(&plan, &views, &mut drawn).expect("the forward runs");
        sequences.iter().for_each(|sequence| model.release(SlotIndex(*sequence as u32)));
        let of_window = |window: &std::ops::Range<usize>| -> RowBits {
            drawn.rows[window.clone()]
                .iter()
                .flat_map(|row| {
                    let top = &drawn.top[row.top_start as usize..(row.top_start + row.top_count) as usize];
                    let top = top.iter().flat_map(|(token, logprob)| [*token, logprob.to_bits()]);
                    [row.token, row.logprob.to_bits()].into_iter().chain(top).collect::<Vec<_>>()
                })
                .collect()
        };
        drawn.windows.iter().map(of_window).collect::<Vec<_>>()
    };
    let mut model = model(case, fault);
    let alone: Vec<RowBits> = (0..3).flat_map(|sequence| draw(&mut model, &[sequence])).collect();
    if alone.iter().any(|row| row.len() != 12) {
        return Err("a row lacks its log-probabilities".into());
    }
    for order in [[0, 1, 2], [2, 0, 1]] {
        let wanted: Vec<RowBits> = order.iter().map(|sequence| alone[*sequence].clone()).collect();
        equal(&format!("order {order:?}"), &draw(&mut model, &order), &wanted)?;
    }
    Ok(())
}

#[test]
fn a_shared_round_draws_what_each_sequence_draws_alone() {
    check(drawn_together, &[]);
}

/// A window that doesn't continue its slot, or would read rows that are gone, is refused and named.
#[test]
fn windows_that_cannot_be_exact_are_refused() {
    let case = tiny_a();
    let mut model = model(&case, Fault::None);
    let mut out = Vec::new();
    let mut refused = |model: &mut DeepseekV41, pieces: &[Piece<'_>], text: &str| {
        let error = model.logits_rows(&plan(pieces), &mut out).expect_err("this cannot be computed");
        assert!(error.to_string().contains(text), "{error}");
    };
    let tokens = &case.tokens[..160];
    refused(&mut model, &[Piece::all(0, 4, &tokens[..3])], "starts at position 4");
    refused(&mut model, &[Piece::all(9, 0, &tokens[..3])], "slot 9");
    refused(&mut model, &[Piece::all(0, 0, &[384])], "token 384");
    refused(&mut model, &[Piece::all(1, 0, &tokens[..2]), Piece::all(1, 0, &tokens[..2])], "two windows");
    // A piece of a long prompt skipped its late layers; ending the prompt earlier would need them.
    let piece = Piece { slot: 2, start: 0, tokens: &tokens[..40], prompt_end: 1000, whole: false, draw: 0..0 };
    assert!(logits(&mut model, &[piece]).is_empty());
    model.keep(SlotIndex(2), 40);
    refused(&mut model, &[Piece::all(2, 40, &tokens[40..50])], "resume from a snapshot");
    model.release(SlotIndex(2));
    // Keeping far fewer positions than were computed: the ring has lost the rows before them.
    feed_all(&mut model, 3, 0, tokens, 160);
    model.keep(SlotIndex(3), 100);
    refused(&mut model, &[Piece::all(3, 100, &tokens[100..101])], "needs window keys");
}

#[test]
fn every_page_returns() {
    let case = tiny_a();
    let mut model = model(&case, Fault::None);
    let free = model.pages_free();
    feed_all(&mut model, 0, 0, &case.tokens, 64);
    let snapshot = model.snapshot(SlotIndex(0));
    assert_eq!(model.pages_free(), free - 3);
    model.release(SlotIndex(0));
    assert_eq!(model.pages_free(), free - 3, "the snapshot holds its pages");
    model.restore(SlotIndex(1), &snapshot);
    feed_all(&mut model, 1, 300, &case.tokens[..2], 1);
    assert_eq!(model.pages_free(), free - 4, "only the page that is written was copied");
    drop(snapshot);
    assert_eq!(model.pages_free(), free - 3);
    model.release(SlotIndex(1));
    assert_eq!(model.pages_free(), free);
}
