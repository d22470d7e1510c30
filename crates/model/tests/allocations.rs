//! In the steady state a round allocates nothing: decode, verify windows, drafting.

mod production;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use production::{Piece, feed_prompt, plan, tiny_a};
use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, SequenceView, SlotIndex};
use tf_engine::request::Sampling;
use tf_model::deepseek_v41::Options;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counter does not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise about `pointer` and `layout` is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_round_in_the_steady_state_allocates_nothing() {
    let case = tiny_a();
    let mut model = case.load(Options { threads: 2, slots: 2, context: 1024, round_rows: 128, ..Options::default() });
    let prompt = &case.tokens[..100];
    for slot in [0, 1] {
        feed_prompt(&mut model, slot, prompt, 64);
    }
    let samplings = [Sampling::greedy(), Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, ..Sampling::greedy() }];
    let views = samplings.each_ref().map(|sampling| SequenceView { sampling, prompt, reply: &[], given: &[] });
    let (mut drawn, mut drafts) = (Drawn::default(), Drafts::default());
    let mut length = prompt.len() as u32;
    let mut before = 0;
    // Pages of both slots are taken at 128 and 256; the lists reach their size in the first rounds.
    for round in 0..100 {
        if round == 10 {
            before = ALLOCATIONS.load(Ordering::Relaxed);
            drop(std::hint::black_box(Box::new(0u64)));
            assert!(ALLOCATIONS.load(Ordering::Relaxed) > before, "the counter counts");
            before = ALLOCATIONS.load(Ordering::Relaxed);
        }
        let planned = ALLOCATIONS.load(Ordering::Relaxed);
        let tokens = [7, 8, 9, 10, 11, 12];
        let mut plan = plan(&[Piece::reply(0, length, &tokens), Piece::reply(1, length, &tokens[..1 + round % 3])]);
        plan.windows.iter_mut().for_each(|window| window.logprobs = Some(4));
        // The plan belongs to the engine, which reuses its own.
        before += ALLOCATIONS.load(Ordering::Relaxed) - planned;
        model.forward(&plan, &views, &mut drawn).expect("the forward runs");
        length += 1;
        model.keep(SlotIndex(0), length);
        model.keep(SlotIndex(1), length);
        let wanted = [0, 1].map(|slot| DraftRequest {
            slot: SlotIndex(slot),
            anchor: 5,
            position: length,
            count_max: 5,
            sampling: &samplings[slot as usize],
        });
        model.draft(&wanted, &mut drafts).expect("drafting runs");
        assert_eq!(drafts.tokens.len(), 10);
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "allocations in 90 rounds");
}
