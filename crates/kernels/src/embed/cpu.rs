//! Plain copies; nothing to vectorise by hand.

use super::Args;
use crate::parallel::threads_for;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::bf16;

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { ids, table, columns, streams, out, mix } = args;
    let (rows, table) = (ids.len(), table.u16());
    let width = streams * columns;
    let out = Parts::new(&mut out.f32_mut()[..rows * width]);
    queue.pool.run_on(threads_for(rows * width), |index, count| {
        let range = split(rows, count, index, 1);
        // SAFETY: `split` gives every thread rows of its own.
        let out = unsafe { out.part(range.start * width..range.end * width) };
        for (&id, out) in ids[range].iter().zip(out.chunks_exact_mut(width)) {
            let (first, copies) = out.split_at_mut(columns);
            bf16::widen(&table[id as usize * columns..][..columns], first);
            for copy in copies.chunks_exact_mut(columns) {
                copy.copy_from_slice(first);
            }
        }
    });
    if let Some(mix) = mix {
        for mix in mix.f32_mut()[..rows * streams].chunks_exact_mut(streams) {
            mix.fill(0.0);
            mix[0] = 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::embed::{Args, launch, reference};
    use crate::testing::*;
    use tf_device::{LaunchError, Queue};
    use tf_numerics::bf16;
    use tf_numerics::lanes::Level;

    #[test]
    fn every_stream_starts_as_the_token_s_row() {
        let mut values = Values::new(1);
        for (columns, streams, ids) in [(160, 4, &[3u32, 0, 9, 3][..]), (32, 1, &[9][..]), (5, 4, &[1, 2][..])] {
            let table = values.bf16(10 * columns, 3.0);
            let wide: Vec<f64> = table.iter().map(|&v| v.into()).collect();
            let wanted = reference::embed(&wide, columns, ids, streams);
            let table = device(&table.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>());
            let got = on_all_queues(|queue| {
                let (mut out, mut mix) = (dirty(ids.len() * streams * columns), dirty(ids.len() * streams));
                let args = Args { ids, table: &table, columns, streams, out: &mut out, mix: Some(&mut mix) };
                launch(queue, args).unwrap();
                for mix in mix.f32().chunks(streams) {
                    assert_eq!(mix[0], 1.0);
                    assert!(mix[1..].iter().all(|&m| m == 0.0));
                }
                out.f32().to_vec()
            });
            assert!(got.iter().zip(&wanted).all(|(&got, &wanted)| f64::from(got) == wanted));
        }
    }

    #[test]
    fn an_id_outside_the_table_is_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let (table, mut out) = (device(&[0u16; 40]), dirty(8));
        let mut run = |ids: &[u32]| {
            launch(&mut queue, Args { ids, table: &table, columns: 4, streams: 1, out: &mut out, mix: None })
        };
        assert_eq!(run(&[9, 10]), Err(LaunchError::Limit { what: "a token id", found: 10, max: 9 }));
        assert_eq!(run(&[]), Ok(()));
        assert!(run(&[1, 2, 3]).is_err(), "the output holds two rows");
    }
}
