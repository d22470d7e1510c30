use super::*;

/// The release's config.json as spec section 2 lists it.
const FLASH_CONFIG: &str = r#"{
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536},
        "max_position_embeddings": 1048576, "moe_intermediate_size": 2304,
        "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": true,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256,
        "engram_vocab_size": 16000000, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
        "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false},
    "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024,
        "num_attention_heads": 16, "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000,
        "downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": null}
}"#;

/// The same values in the spelling of inference/config.json.
const FLASH_FLAT: &str = r#"{
    "image_token_id": 129264, "vocab_size": 129280, "dim": 5120, "n_layers": 40, "n_mtp_layers": 3,
    "n_heads": 64, "head_dim": 512, "rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024,
    "window_size": 128, "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layers": [2, 8, 14, 20], "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "original_seq_len": 65536, "moe_inter_dim": 2304,
    "n_routed_experts": 384, "n_activated_experts": 6, "n_shared_experts": 1, "score_func": "sqrtsoftplus",
    "route_scale": 1.5, "swiglu_limit": 10.0, "norm_eps": 1e-20, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256, "engram_vocab_size": 16000000,
    "engram_pad_id": 2, "engram_compressed_vocab_size": 99092, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_n_activated_experts": 3, "vision_n_layers": 32, "vision_dim": 1024,
    "vision_n_heads": 16, "vision_inter_dim": 2816, "vision_patch_size": 14, "vision_downsample_ratio": 3,
    "vision_max_n_token": 1024, "vision_min_pixels": 295936
}"#;

fn read(text: &str) -> Result<Shape, ShapeError> {
    Shape::from_config(&Config::parse("config.json", text.as_bytes()).unwrap())
}

fn edited(edit: impl FnOnce(&mut Value)) -> Result<Shape, ShapeError> {
    let mut value: Value = serde_json::from_str(FLASH_CONFIG).unwrap();
    edit(&mut value);
    read(&value.to_string())
}

#[test]
fn flash_is_what_the_release_says_in_both_spellings() {
    assert_eq!(read(FLASH_CONFIG).unwrap(), FLASH);
    assert_eq!(read(FLASH_FLAT).unwrap(), FLASH);
}

#[test]
fn test_checkpoints_are_sizes_of_the_same_family() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for (folder, hidden, vision) in
        [("tests/golden/dsv41-tiny-a/model", 128, true), ("../../models/tiny-dsv41", 160, false)]
    {
        let text = std::fs::read_to_string(root.join(folder).join("config.json")).unwrap();
        let shape = read(&text).unwrap();
        assert_eq!((shape.hidden_size, shape.vision.is_some()), (hidden, vision), "{folder}");
    }
}

#[test]
fn layers_read_the_sources_of_the_role_table() {
    // (layers, ratio, kv source, index source)
    let table = [
        (0..2, 0, None, None),
        (2..8, 2, Some(2), Some(2)),
        (8..14, 2, Some(8), Some(8)),
        (14..20, 2, Some(14), Some(14)),
        (20..24, 1, Some(20), Some(20)),
        (24..28, 1, Some(20), Some(24)),
        (28..32, 1, Some(20), Some(28)),
        (32..36, 1, Some(20), Some(32)),
        (36..40, 1, Some(20), Some(36)),
    ];
    for (layers, ratio, kv, index) in table {
        for layer in layers {
            let found = (FLASH.ratio(layer), FLASH.kv_source(layer), FLASH.index_source(layer));
            assert_eq!(found, (ratio, kv, index), "layer {layer}");
            let masked = [24, 28, 32, 36].contains(&layer);
            assert_eq!(FLASH.masks_candidates(layer), masked, "layer {layer}");
        }
    }
    assert_eq!((FLASH.entries(0, 9), FLASH.entries(2, 9), FLASH.entries(20, 9)), (0, 4, 9));
    assert_eq!((FLASH.engram_index(14), FLASH.engram_index(2), FLASH.tap_index(38)), (Some(1), None, Some(1)));
    assert_eq!((FLASH.engram_width(), FLASH.tap_width(), FLASH.group_width()), (6144, 15_360, 4096));
    assert_eq!((FLASH.hc_mix_count(), FLASH.stream_width()), (24, 20_480));
}

#[test]
fn candidates_can_be_switched_off() {
    let shape = edited(|config| config["text_config"]["candidate_source_layer_id"] = (-1).into()).unwrap();
    assert_eq!(shape.candidate_source_layer_id, None);
    assert!(!shape.masks_candidates(24));
}

/// Every field, removed or made impossible, is named with what was found and what was expected.
#[test]
fn impossible_fields_are_named() {
    let cases: [(&str, Value, &str); 34] = [
        ("hidden_size", 5121.into(), "hidden_size is 5121, expected a multiple of 32"),
        ("hidden_size", "5120".into(), "hidden_size is \"5120\", expected"),
        ("hidden_size", true.into(), "hidden_size is true, expected"),
        ("hidden_size", 0.5.into(), "hidden_size is 0.5, expected"),
        ("vocab_size", (-1).into(), "vocab_size is -1, expected"),
        ("num_hidden_layers", 41.into(), "compress_ratios is [0,0,2,"),
        ("num_hidden_layers", 0.into(), "num_hidden_layers is 0, expected a whole number from 1"),
        ("num_key_value_heads", 2.into(), "num_key_value_heads is 2, expected 1"),
        ("num_attention_heads", 60.into(), "o_groups is 8, expected a divisor of num_attention_heads 60"),
        ("qk_rope_head_dim", 63.into(), "qk_rope_head_dim is 63, expected an even number"),
        ("index_head_dim", 32.into(), "qk_rope_head_dim is 64, expected at most head_dim 512 and index_head_dim 32"),
        ("kv_source_layer_ids", vec![2, 8, 14, 14].into(), "kv_source_layer_ids is [2,8,14,14], expected"),
        ("kv_source_layer_ids", vec![2, 8, 14, 40].into(), "ascending layer numbers below 40"),
        ("kv_source_layer_ids", vec![2, 8, 14].into(), "compress_ratios[20] is 1, expected 2, the ratio of"),
        ("kv_source_layer_ids", vec![8, 14, 20].into(), "compress_ratios[2] is 2, expected 0: no kv"),
        ("kv_source_layer_ids", vec![1, 2, 8, 14, 20].into(), "kv_source_layer_ids is 1, expected layers with"),
        ("kv_source_layer_ids", vec![2, 8, 14, 20, 22].into(), "expected a list with the kv source 22"),
        ("index_source_layer_ids", Value::Null, "index_source_layer_ids is null, expected"),
        ("candidate_source_layer_id", 21.into(), "candidate_source_layer_id is 21, expected an index source"),
        ("candidate_source_layer_id", 14.into(), "expected a source whose cache the index source 20 reads"),
        ("candidate_topk_blocks", 64.into(), "candidate_topk_blocks is 64, expected candidate_topk_blocks *"),
        ("rope_scaling", Value::Null, "rope_scaling.factor is missing"),
        ("rms_norm_eps", 0.into(), "rms_norm_eps is 0, expected a number from"),
        ("scoring_func", "softmax".into(), "scoring_func is \"softmax\", expected \"sqrtsoftplus\""),
        ("n_routed_experts", 4.into(), "num_experts_per_tok is 6, expected at most the 4 routed"),
        ("hc_mult", 2.into(), "hc_mult is 2, expected 4"),
        ("engram_vocab_size", 16_000_100.into(), "engram_num_embeddings is 384006168, expected 38"),
        ("engram_num_embeddings", vec![384_006_168].into(), "engram_num_embeddings is a list of 1, expected one"),
        ("engram_pad_token_id", 129_280.into(), "engram_pad_token_id is 129280, expected a token id below 129280"),
        ("engram_compressed_vocab_size", 0.into(), "engram_compressed_vocab_size is 0, expected"),
        ("engram_max_ngram_size", 1.into(), "engram_max_ngram_size is 1, expected"),
        ("dspark_target_layer_ids", vec![37, 39, 38].into(), "dspark_target_layer_ids is [37,39,38], expected"),
        ("num_nextn_predict_layers", 0.into(), "num_nextn_predict_layers is 0, expected"),
        ("tie_word_embeddings", true.into(), "tie_word_embeddings is true, expected false"),
    ];
    for (field, value, part) in cases {
        let error = edited(|config| config["text_config"][field] = value.clone()).unwrap_err().to_string();
        assert!(error.contains(part), "{field} = {value}: {error}");
        assert!(error.contains("config.json: text_config."), "{error}");
    }
    let error = edited(|config| config["model_type"] = "deepseek_v3".into()).unwrap_err().to_string();
    assert!(error.contains("model_type is \"deepseek_v3\", expected \"deepseek_v41\""), "{error}");
    let error = edited(|config| config["vision_config"]["patch_size"] = Value::Null).unwrap_err().to_string();
    assert!(error.contains("vision_config.patch_size is null"), "{error}");
}

/// Reported as: `tie_word_embeddings` and `activation_scheme` could say anything, and the replies stayed the same.
#[test]
fn a_value_that_would_be_ignored_is_refused_by_its_field() {
    for (section, field, value, expected) in [
        ("", "tie_word_embeddings", Value::from(true), "false"),
        ("", "dtype", "float16".into(), "\"bfloat16\""),
        ("", "torch_dtype", "float16".into(), "\"bfloat16\""),
        ("", "architectures", vec!["DeepseekV3ForCausalLM"].into(), "[\"DeepseekV41ForCausalLM\"]"),
        ("quantization_config", "activation_scheme", "static".into(), "\"dynamic\""),
        ("quantization_config", "fmt", "e5m2".into(), "\"e4m3\""),
        ("text_config", "model_type", "deepseek_v4".into(), "\"deepseek_v41_text\""),
        ("text_config", "mlp_bias", true.into(), "false"),
        ("text_config", "n_group", 8.into(), "1"),
        ("text_config", "topk_group", 4.into(), "1"),
        ("text_config", "moe_layer_freq", 2.into(), "1"),
        ("text_config", "first_k_dense_replace", 3.into(), "0"),
        ("text_config", "num_hash_layers", 3.into(), "0"),
        ("vision_config", "model_type", "clip".into(), "\"deepseek_v41_vision\""),
    ] {
        let place = if section.is_empty() { field.to_owned() } else { format!("{section}.{field}") };
        let write = |config: &mut Value, value: &Value| match section {
            "" => config[field] = value.clone(),
            section => config[section][field] = value.clone(),
        };
        let error = edited(|config| write(config, &value)).unwrap_err().reasons();
        assert_eq!(error, [format!("config.json: {place} is {value}, expected {expected}")]);
        let right: Value = serde_json::from_str(expected).unwrap();
        assert_eq!(edited(|config| write(config, &right)).as_ref(), Ok(&FLASH), "{place}");
    }
    let scaled = edited(|config| config["text_config"]["rope_scaling"]["mscale_all_dim"] = 1.0.into()).unwrap_err();
    assert_eq!(scaled.reasons(), ["config.json: text_config.rope_scaling.mscale_all_dim is 1.0, expected 0"]);
    let one = edited(|config| config["text_config"]["n_shared_experts"] = 1.0.into());
    assert_eq!(one.as_ref(), Ok(&FLASH), "1.0 is 1");
    let flat = read(&FLASH_FLAT.replace("\"dim\": 5120", "\"dim\": 5120, \"expert_dtype\": \"int4\"")).unwrap_err();
    assert_eq!(flat.reasons(), ["config.json: expert_dtype is \"int4\", expected \"fp4\""]);
}

#[test]
fn every_engram_constant_is_needed() {
    for key in [
        "engram_layer_ids",
        "engram_num_embeddings",
        "engram_max_ngram_size",
        "engram_n_heads",
        "engram_head_dim",
        "engram_vocab_size",
        "engram_pad_token_id",
        "engram_compressed_vocab_size",
    ] {
        let remove = |config: &mut Value| drop(config["text_config"].as_object_mut().unwrap().remove(key));
        let error = edited(remove).unwrap_err();
        let expected = format!("text_config.{key}");
        assert!(error.problems.iter().any(|problem| problem.field == expected), "{key}: {error}");
    }
}

#[test]
fn one_mistake_is_not_followed_by_others_that_are_none() {
    for (field, value) in [("vocab_size", Value::from("x")), ("num_hidden_layers", Value::Null)] {
        let error = edited(|config| config["text_config"][field] = value).unwrap_err();
        assert_eq!(error.problems.len(), 1, "{error}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let error = edited(|config| {
        config["text_config"]["hidden_size"] = 1.into();
        config["text_config"]["hc_mult"] = 2.into();
        config["quantization_config"]["expert_dtype"] = "int4".into();
    })
    .unwrap_err();
    assert_eq!(error.problems.len(), 3, "{error}");
    let flat = read(&FLASH_FLAT.replace("\"window_size\": 128", "\"window_size\": -1")).unwrap_err();
    assert_eq!(flat.problems[0].field, "window_size", "the file's own spelling");
}
