//! Every family beside the linears through its registered launch: what the host code of a GPU binds and how it cuts the work,
//! with the Metal and the CUDA sources on the emulated devices, against the CPU bit for bit.

mod common;

use std::collections::BTreeSet;
use tf_contract::families::{RELEASE, Sizes, TINY, check};
use tf_device::{Device, Queue};
use tf_metal_emulator::{Rigour, cuda_device, device_with, large_cuda_device};

#[test]
fn the_emulated_tensor_core_takes_the_steps_of_the_integer_mirror() {
    if common::ready("the_emulated_tensor_core_takes_the_steps_of_the_integer_mirror") {
        let Device::Gpu(gpu) = &cuda_device(Rigour::Proven).unwrap() else { panic!("the emulator is a GPU") };
        let Queue::Gpu(queue) = &mut Queue::gpu(gpu) else { panic!("a queue of it") };
        let found = tf_kernels::tensor_step::probe(queue, 24, 5, 7).unwrap();
        assert_eq!((found.compared, found.differ, found.first), (24 * 128, 0, None));
    }
}

/// Families that `only` names, all where it is empty.
fn hold(device: Device, sizes: Sizes, row_counts: &[usize], only: &str, families_wanted: usize) {
    let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
    let mut queue = Queue::gpu(gpu);
    let (mut families, mut problems) = (BTreeSet::new(), Vec::new());
    check(&device, &mut queue, sizes, row_counts, Some(only), None, &mut |outcome| {
        families.insert(outcome.family);
        if outcome.differ > 0 || outcome.compared == 0 {
            problems.push(outcome.to_string());
        }
    })
    .unwrap();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert_eq!(families.len(), families_wanted, "{families:?}");
}

#[test]
fn emulated_metal_has_the_bits_of_the_cpu() {
    if common::ready("emulated_metal_has_the_bits_of_the_cpu") {
        hold(device_with(Rigour::Once).unwrap(), TINY, &[1, 2, 9], "", 20);
    }
}

#[test]
fn emulated_cuda_has_the_bits_of_the_cpu() {
    if common::ready("emulated_cuda_has_the_bits_of_the_cpu") {
        hold(cuda_device(Rigour::Proven).unwrap(), TINY, &[2, 9], "", 20);
    }
}

#[test]
fn emulated_cuda_has_the_bits_of_the_cpu_for_many_rows() {
    if common::ready("emulated_cuda_has_the_bits_of_the_cpu_for_many_rows") {
        hold(cuda_device(Rigour::Once).unwrap(), TINY, &[1, 40], "", 20);
    }
}

#[test]
fn emulated_cuda_has_the_bits_of_the_cpu_at_the_sizes_of_the_release() {
    if common::ready("emulated_cuda_has_the_bits_of_the_cpu_at_the_sizes_of_the_release") {
        let sizes = Sizes { context: 9001, ..RELEASE };
        hold(cuda_device(Rigour::Once).unwrap(), sizes, &[1, 4], "", 20);
    }
}

#[test]
fn emulated_cuda_has_the_bits_of_the_cpu_where_a_row_fills_the_shared_memory_of_an_h200() {
    if common::ready("emulated_cuda_has_the_bits_of_the_cpu_where_a_row_fills_the_shared_memory_of_an_h200") {
        hold(large_cuda_device(Rigour::Once).unwrap(), RELEASE, &[1, 2], "attention", 2);
        hold(large_cuda_device(Rigour::Once).unwrap(), RELEASE, &[1, 3], "hyper", 3);
    }
}

#[test]
fn emulated_cuda_enters_a_sublayer_with_the_bits_of_its_mirror_in_every_tile() {
    if common::ready("emulated_cuda_enters_a_sublayer_with_the_bits_of_its_mirror_in_every_tile") {
        // Rows of one and of several tiles, the last of one row, made by the last block and by a launch of their own; a
        // segment and a chunk that end early.
        hold(cuda_device(Rigour::Proven).unwrap(), TINY, &[1, 2, 4, 5, 16, 17, 71], "hyper", 3);
        let sizes = Sizes { hidden: 1312, ..TINY };
        hold(cuda_device(Rigour::Once).unwrap(), sizes, &[3], "hyper", 3);
    }
}

#[test]
fn attention_on_emulated_cuda_takes_the_steps_of_its_mirror_however_it_is_cut() {
    if common::ready("attention_on_emulated_cuda_takes_the_steps_of_its_mirror_however_it_is_cut") {
        // Each number of heads a block, and rows that are many.
        for (heads, head_dim, rows) in
            [(8, 160, &[1, 3, 8][..]), (8, 128, &[6]), (40, 160, &[1, 2, 3, 5]), (21, 160, &[1, 4]), (1, 1024, &[2])]
        {
            let sizes = Sizes { heads, head_dim, selected: 37, window: 21, ..TINY };
            hold(cuda_device(Rigour::Proven).unwrap(), sizes, rows, "attention", 2);
        }
    }
}

#[test]
fn emulated_cuda_selects_from_parts_of_a_long_row_as_the_cpu_from_the_whole() {
    if common::ready("emulated_cuda_selects_from_parts_of_a_long_row_as_the_cpu_from_the_whole") {
        // Three and five parts; the second row sees a little more than the first.
        let sizes = Sizes { context: 70_001, blocks_max: 5000, ..TINY };
        hold(cuda_device(Rigour::Proven).unwrap(), sizes, &[2], "index_score", 3);
    }
}

#[test]
fn emulated_cuda_keeps_to_alignment_where_a_record_has_an_odd_number_of_bytes() {
    if common::ready("emulated_cuda_keeps_to_alignment_where_a_record_has_an_odd_number_of_bytes") {
        let sizes = Sizes { hidden: 96, head_dim: 96, index_head_dim: 96, engram_head_dim: 96, ..TINY };
        hold(cuda_device(Rigour::Proven).unwrap(), sizes, &[3], "", 20);
        hold(device_with(Rigour::Once).unwrap(), sizes, &[3], "", 20);
    }
}

#[test]
fn emulated_cuda_scores_any_number_of_heads_and_blocks_of_an_odd_number_of_entries() {
    if common::ready("emulated_cuda_scores_any_number_of_heads_and_blocks_of_an_odd_number_of_entries") {
        let sizes = Sizes { index_heads: 20, index_head_dim: 96, blocks_max: 9, block_size: 5, context: 301, ..TINY };
        hold(cuda_device(Rigour::Proven).unwrap(), sizes, &[8], "index_score", 3);
        let sizes = Sizes { index_heads: 64, index_head_dim: 128, blocks_max: 9, block_size: 12, context: 301, ..TINY };
        hold(cuda_device(Rigour::Once).unwrap(), sizes, &[7], "index_score", 3);
    }
}

#[test]
fn emulated_cuda_has_the_bits_of_the_cpu_where_a_block_computes_a_row() {
    if common::ready("emulated_cuda_has_the_bits_of_the_cpu_where_a_block_computes_a_row") {
        let sizes = Sizes { heads: 3, ..RELEASE };
        hold(large_cuda_device(Rigour::Once).unwrap(), sizes, &[33], "attention", 2);
    }
}
