//! The Engram hash against values recorded from the release's own code.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tf_checkpoint::Checkpoint;
use tf_model::deepseek_v41::engram::{EngramHash, buckets, multipliers};
use tf_model::deepseek_v41::shape::Shape;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/dsv41-tiny-a").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).unwrap()).unwrap()
}

fn shape() -> Shape {
    Shape::from_config(&Checkpoint::open(&golden("model")).unwrap().config().unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
}

#[test]
fn primes_and_multipliers_are_the_recorded_ones() {
    let (shape, layout) = (shape(), json("model/engram_layout.debug.json"));
    for (layer, buckets) in buckets(&shape).iter().enumerate() {
        let recorded: Vec<u64> = layout["primes"][layer].as_array().unwrap().iter().flat_map(numbers).collect();
        assert_eq!(buckets.primes, recorded, "Engram layer {layer}");
        assert_eq!(buckets.rows, shape.engram_num_embeddings[layer]);
    }
    let recorded = &json("golden.json")["engram_multipliers"];
    for layer in shape.engram_layer_ids.iter() {
        let found = multipliers(*layer, shape.engram_compressed_vocab_size, shape.engram_max_ngram_size);
        assert_eq!(found, numbers(&recorded[layer.to_string()]), "layer {layer}");
    }
}

#[test]
fn every_row_id_of_the_recorded_trace_is_found() {
    let (shape, layout) = (shape(), json("model/engram_layout.debug.json"));
    let map = numbers(&layout["token_map"]).into_iter().map(|id| id as u32).collect();
    let hash = EngramHash::new(&shape, map).unwrap();
    let tokens: Vec<Option<u32>> =
        numbers(&json("golden.json")["sequences"]["len64"]).into_iter().map(|token| Some(token as u32)).collect();

    let trace = std::fs::read(golden("trace_f32_len64.safetensors")).unwrap();
    let trace = safetensors::SafeTensors::deserialize(&trace).unwrap();
    let recorded = trace.tensor("engram_hash").unwrap();
    assert_eq!(recorded.shape(), [64, 2, 6]);
    let mut recorded = recorded.data().as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));

    for position in 0..tokens.len() {
        let recent: Vec<Option<u32>> = tokens[..=position].iter().rev().take(hash.lookback()).copied().collect();
        for layer in 0..2 {
            let mut rows = vec![0; hash.columns()];
            hash.row_ids(layer, &recent, &mut rows);
            let expected: Vec<i64> = recorded.by_ref().take(rows.len()).collect();
            let found: Vec<i64> = rows.iter().map(|row| i64::from(*row)).collect();
            assert_eq!(found, expected, "position {position}, Engram layer {layer}");
        }
    }
    assert!(recorded.next().is_none());
}
