//! `stream_read`: reads a buffer once and keeps the XOR of its words. No part of any model: its speed is the ceiling that a
//! measurement compares kernels with, taken on the same device in the same run.
//!
//! XOR has no order, so every device gives one result.

use crate::gpu::program;
use std::sync::atomic::{AtomicU32, Ordering};
use tf_device::cpu::split;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes};
use tf_device::{Buffer, LaunchError, Queue};

static PROGRAM: Program = program("stream_read", Some(include_str!("kernel.metal")), true);
/// Blocks of a multiprocessor, and threads of a block: all that it can hold.
const BLOCKS: u32 = 4;
const THREADS: u32 = 512;
/// Bytes that a thread reads at once.
const VECTOR_BYTES: usize = 16;

/// Words that [`launch`] leaves.
pub fn folded_len(queue: &Queue) -> usize {
    match queue {
        Queue::Cpu(_) => 1,
        Queue::Gpu(queue) => (queue.limits().units.max(1) * BLOCKS * THREADS) as usize,
    }
}

/// Reads `from`, whose length is a multiple of 16 bytes; the XOR of all words of `folded` ([`folded_len`] u32) is that of the
/// words of `from`.
///
/// # Errors
/// [`LaunchError::Shape`] when a length disagrees, [`LaunchError::NoKernel`] on a backend without this kernel.
pub fn launch(queue: &mut Queue, from: &Buffer, folded: &mut Buffer) -> Result<(), LaunchError> {
    let bytes = from.len_bytes();
    LaunchError::check_shape("the bytes of a stream", bytes, bytes.next_multiple_of(VECTOR_BYTES))?;
    LaunchError::check_room("the words of a stream's fold", folded.len_of::<u32>(), folded_len(queue))?;
    match queue {
        Queue::Gpu(queue) => on_gpu(queue, from, folded),
        Queue::Cpu(queue) => {
            let (words, sum) = (from.u32(), AtomicU32::new(0));
            queue.pool.run_on(queue.pool.threads(), |index, count| {
                let own = &words[split(words.len(), count, index, 1024)];
                sum.fetch_xor(own.iter().fold(0, |sum, word| sum ^ word), Ordering::Relaxed);
            });
            folded.u32_mut()[0] = sum.into_inner();
            Ok(())
        }
    }
}

fn on_gpu(queue: &mut GpuQueue, from: &Buffer, folded: &mut Buffer) -> Result<(), LaunchError> {
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "stream_read",
        bindings: &mut [Binding::Read(from), Binding::Write(folded)],
        shape: ShapeBytes::new().ulong((from.len_bytes() / VECTOR_BYTES) as u64).bytes(),
        groups: queue.limits().units.max(1) * BLOCKS,
        threads: THREADS,
        shared_bytes: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Values, device, queues};

    #[test]
    fn every_word_is_read_once() {
        let mut values = Values::new(5);
        for count in [4, 1000, 70_000] {
            let words: Vec<u32> = (0..count).map(|_| values.next()).collect();
            let wanted = words.iter().fold(0, |sum, word| sum ^ word);
            for (name, mut queue) in queues() {
                let mut folded = device(&vec![7_u32; folded_len(&queue)]);
                launch(&mut queue, &device(&words), &mut folded).unwrap();
                assert_eq!(folded.u32()[0], wanted, "{name}, {count} words");
            }
        }
        let refused =
            launch(&mut Queue::cpu(1, tf_numerics::lanes::Level::Scalar), &device(&[1_u32]), &mut device(&[0_u32]));
        assert!(refused.is_err(), "half a vector");
    }
}
