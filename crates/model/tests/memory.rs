//! A loaded model takes the memory that its plan says, and rounds take no more.
//!
//! Alone in its program, because the buffers of a process are counted together.

mod production;

use production::{cases, feed_prompt};
use tf_device::cpu::CpuBuffer;
use tf_model::deepseek_v41::Options;
use tf_model::deepseek_v41::memory::MemoryPlan;

#[test]
fn a_model_takes_what_its_plan_says() {
    let mut compared = 0;
    for case in cases() {
        for (slots, context, round_rows, threads) in [(1, 256, 64, 1), (4, 512, 128, 2), (8, 256, 512, 2)] {
            let options = Options { slots, context, round_rows, threads, ..Options::default() };
            let before = CpuBuffer::held_bytes();
            let mut model = case.load(options);
            let loaded = CpuBuffer::held_bytes() - before;
            let plan = MemoryPlan::new(model.shape(), slots, context, round_rows, threads, None);
            // The host's own lists aren't buffers.
            let planned = plan.total_bytes() - u64::from(slots) * plan.host_bytes();
            let what = format!("{}, {slots} slots of {context}, {round_rows} rows", case.name);
            assert!(loaded <= planned, "{what}: {loaded} of {planned}");
            for slot in 0..slots {
                feed_prompt(&mut model, slot, &case.tokens[..200], round_rows as usize);
            }
            let used = CpuBuffer::held_bytes() - before;
            assert!(used <= planned, "{what}: rounds took {used} of {planned}");
            // The scratch of threads is planned for shapes of any width.
            assert!(used + planned / 16 >= planned, "{what}: planned {planned} and took {used}");
            compared += 1;
        }
    }
    assert_eq!(compared, 6);
}
