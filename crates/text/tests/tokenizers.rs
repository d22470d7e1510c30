//! Tokenizers: round trips, damaged files, and the folded vocabulary.

use serde_json::{Value, json};
use tf_text::TokenId;
use tf_text::chat::Marker;
use tf_text::tokenizer::{Tokenizer, TokenizerError};
use tf_text::vocabulary::FoldedVocabulary;

const TINY_TOKENIZER: &[u8] = include_bytes!("../../model/tests/golden/dsv41-tiny-a/model/tokenizer.json");
const TINY_LAYOUT: &str = include_str!("../../model/tests/golden/dsv41-tiny-a/model/engram_layout.debug.json");
const DEMO_TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-dsv41/tokenizer.json");

fn both() -> [(&'static str, Tokenizer); 2] {
    [("tiny", TINY_TOKENIZER), ("demo", DEMO_TOKENIZER)]
        .map(|(name, json)| (name, Tokenizer::from_bytes(json).unwrap_or_else(|error| panic!("{name}: {error}"))))
}

#[test]
fn markers_are_found_by_their_spelling() {
    let [(_, tiny), (_, demo)] = both();
    assert_eq!((tiny.vocab_size(), demo.vocab_size()), (384, 4096));
    let ids = |tokenizer: &Tokenizer| Marker::ALL.map(|marker| tokenizer.markers().id(marker));
    assert_eq!(ids(&tiny), [0, 1, 5, 3, 4, 9, 6, 7, 8, 10]);
    assert_eq!(ids(&demo), [0, 1, 4080, 4081, 4082, 4086, 4083, 4084, 4085, 4093]);
    assert_eq!(demo.markers().of(4085), Some(Marker::Dsml));
    assert_eq!(demo.markers().of(4094), None);
    // The demo flags only some of its added tokens as special, as the release does.
    assert!(demo.is_added(4083) && !demo.is_special(4083));
    assert!(demo.is_special(1) && tiny.is_special(6) && !tiny.is_added(20));
    assert!(!demo.is_added(1 << 20) && demo.token_bytes(1 << 20).is_none());
}

#[test]
fn text_comes_back_as_it_was() {
    let texts = [
        "",
        " ",
        "Hello, world! 12345",
        "Émile dit « ça va ? »\n\n\t👋🏽 ok",
        "规则：\n- 保持简洁",
        "\u{0}\u{1}\u{7f}\u{ad}\u{feff}\u{e000}\u{10ffff}",
        "a\r\nb   c\t\t d  \n\n\n",
        "e\u{301} é ﬁ ²",
    ];
    for (name, tokenizer) in both() {
        for text in texts {
            let ids = tokenizer.encode_plain(text).expect("encodes");
            assert_eq!(tokenizer.decode(&ids, false).as_deref().ok(), Some(text), "{name}: {text:?}");
            let bytes: Vec<u8> =
                ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap_or_default()).copied().collect();
            assert_eq!(bytes, text.as_bytes(), "{name}: {text:?}");
        }
        let marked = tokenizer.encode_with_markers("a<think>b").expect("encodes");
        assert!(marked.contains(&tokenizer.markers().id(Marker::ThinkStart)), "{name}");
        assert_eq!(tokenizer.decode(&marked, false).expect("known"), "a<think>b", "{name}");
        let shown = if name == "tiny" { "ab" } else { "a<think>b" };
        assert_eq!(tokenizer.decode(&marked, true).expect("known"), shown, "{name}: special tokens are left out");
        let size = tokenizer.vocab_size();
        assert!(matches!(tokenizer.decode(&[size as TokenId], false), Err(TokenizerError::UnknownId { .. })));
    }
}

#[test]
fn no_text_has_fewer_tokens_than_its_length_allows() {
    for (name, tokenizer) in both() {
        let longest =
            (0..tokenizer.vocab_size() as TokenId).filter_map(|id| tokenizer.token_bytes(id)).max_by_key(|b| b.len());
        let longest = String::from_utf8(longest.unwrap().to_vec()).unwrap();
        for text in ["", "a", "Hello, world! 12345", &longest.repeat(50), &" ".repeat(999), &"规则".repeat(300)] {
            let (least, found) = (tokenizer.least_tokens(text), tokenizer.encode_with_markers(text).unwrap().len());
            assert!(least <= found, "{name}: {least} of {found} tokens in {} bytes", text.len());
        }
        assert_eq!(tokenizer.least_tokens(&longest.repeat(50)), 50, "{name}: the bound is as good as it can be");
    }
    // What may vanish or swallow blanks gives no bound.
    for edit in
        [json!({"normalizer": {"type": "Strip", "strip_left": true, "strip_right": true}}), json!({"rstrip": true})]
    {
        let mut file: Value = serde_json::from_slice(TINY_TOKENIZER).unwrap();
        match edit.get("normalizer") {
            Some(normalizer) => file["normalizer"] = normalizer.clone(),
            None => file["added_tokens"][0]["rstrip"] = json!(true),
        }
        let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.least_tokens(&"word ".repeat(1000)), 0);
    }
}

#[test]
fn long_runs_of_one_character_encode_completely() {
    let [_, (_, demo)] = both();
    for text in [" ", "\n", "a", "漢", " \n", "!", "｜DSML｜", "\u{301}"] {
        let text = format!("x{}x", text.repeat(200_000 / text.len()));
        let ids = demo.encode_plain(&text).expect("encodes");
        assert!(demo.decode(&ids, false).expect("known") == text, "{:?}...", &text[..10]);
    }
}

#[test]
fn a_broken_tokenizer_file_is_refused_with_what_is_wrong() {
    type Change = fn(&mut Value);
    let changes: Vec<(&str, Change, &str)> = vec![
        (
            "another model",
            |file| file["model"]["type"] = json!("Unigram"),
            "model.type is \"Unigram\", expected \"BPE\"",
        ),
        ("no model", |file| file["model"] = Value::Null, "model.type is missing"),
        ("another decoder", |file| file["decoder"] = Value::Null, "decoder.type is missing"),
        ("no bytes", |file| file["pre_tokenizer"] = json!({"type": "Whitespace"}), "pre_tokenizer is \"Whitespace\""),
        (
            "a prefix space",
            |file| file["pre_tokenizer"]["pretokenizers"][2]["add_prefix_space"] = json!(true),
            "add_prefix_space",
        ),
        ("random merges", |file| file["model"]["dropout"] = json!(0.1), "model.dropout"),
        (
            "a broken pattern",
            |file| file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("("),
            "cannot be loaded",
        ),
        ("a vocabulary that is a list", |file| file["model"]["vocab"] = json!([]), "model.vocab is a list"),
        ("an id that is no number", |file| file["model"]["vocab"]["a"] = json!("x"), "model.vocab[\"a\"] is \"x\""),
        ("an id that is too large", |file| file["model"]["vocab"]["zz"] = json!(1u64 << 40), "model.vocab[\"zz\"]"),
        ("an id used twice", |file| file["model"]["vocab"]["zz"] = json!(100), "id 100 is used for both"),
        ("a hole", |file| file["model"]["vocab"]["zz"] = json!(500), "no token has id 384"),
        (
            "a missing byte",
            |file| {
                let entries = file["model"]["vocab"].as_object_mut().expect("object");
                let id = entries.remove("Ā").expect("byte 0");
                entries.insert("zz".into(), id);
            },
            "lacks 1 of the 256 single bytes, the first is 0x00",
        ),
        (
            "added tokens that are no list",
            |file| file["added_tokens"] = Value::Null,
            "added_tokens is null, expected a list",
        ),
        (
            "a file without added tokens",
            |file| drop(file.as_object_mut().expect("object").remove("added_tokens")),
            "added_tokens is missing",
        ),
        (
            "a step of no known kind",
            |file| file["pre_tokenizer"]["pretokenizers"][1] = json!({"a": 1}),
            "pre_tokenizer is of another form, expected that of a byte-level BPE tokenizer",
        ),
        ("a decoder with a text", |file| file["decoder"]["trim_offsets"] = json!("x"), "decoder is of another form"),
        (
            "an added token with a text",
            |file| file["added_tokens"][1]["single_word"] = json!(""),
            "added_tokens is of another form",
        ),
        ("a model with a text", |file| file["model"]["byte_fallback"] = json!("x"), "model is of another form"),
        ("a file that is null", |file| *file = Value::Null, "the file is null, expected an object"),
        ("merges that are null", |file| file["model"]["merges"] = Value::Null, "model.merges is null, expected a list"),
        ("a merge of one token", |file| file["model"]["merges"][7] = json!("ab"), "model.merges[7] is \"ab\""),
        (
            "an added token without an id",
            |file| file["added_tokens"][3]["id"] = Value::Null,
            "added_tokens[3].id is null",
        ),
        (
            "an added token without text",
            |file| file["added_tokens"][3]["content"] = json!(""),
            "added_tokens[3].content",
        ),
        (
            "an added token twice",
            |file| file["added_tokens"][15]["content"] = json!("<think>"),
            "\"<think>\" has two ids",
        ),
        ("an added token on a byte", |file| file["added_tokens"][6]["id"] = json!(20), "id 20 is used for both"),
        (
            "a missing marker",
            |file| {
                for place in [6, 8] {
                    let id = file["added_tokens"][place]["id"].clone();
                    let entries = file["model"]["vocab"].as_object_mut().expect("object");
                    entries.retain(|_, other| *other != id);
                    entries.insert(format!("[{place}]"), id);
                    file["added_tokens"][place]["content"] = json!(format!("[{place}]"));
                }
            },
            "the chat markers <think>, ｜DSML｜ are missing",
        ),
        ("a merge of unknown tokens", |file| file["model"]["merges"][0] = json!(["zz", "y"]), "cannot be loaded"),
        (
            "a merge that makes a marker",
            |file| {
                file["model"]["vocab"]["<t"] = json!(384);
                file["model"]["vocab"]["hink>"] = json!(385);
                file["model"]["merges"].as_array_mut().expect("list").push(json!(["<t", "hink>"]));
            },
            "cannot be loaded",
        ),
    ];
    for (name, change, message) in changes {
        let mut file: Value = serde_json::from_slice(TINY_TOKENIZER).expect("JSON");
        change(&mut file);
        match Tokenizer::from_bytes(file.to_string().as_bytes()) {
            Ok(_) => panic!("{name}: accepted"),
            Err(error) => assert!(error.to_string().contains(message), "{name}: {error}"),
        }
    }
    for at in [0, 1, 100, TINY_TOKENIZER.len() / 2, TINY_TOKENIZER.len() - 2] {
        assert!(matches!(Tokenizer::from_bytes(&TINY_TOKENIZER[..at]), Err(TokenizerError::Json(_))), "cut at {at}");
    }
    for text in ["[]", "null", "5", "{}", "\u{ff}"] {
        assert!(Tokenizer::from_bytes(text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn a_file_cannot_turn_text_into_markers() {
    // Even a vocabulary whose words are matched whole has no marker for caller text.
    let mut file: Value = serde_json::from_slice(TINY_TOKENIZER).expect("JSON");
    file["model"]["ignore_merges"] = json!(true);
    file["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<think>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {"<think>": {"id": "<think>", "ids": [6], "tokens": ["<think>"]}}});
    file["truncation"] = json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).expect("loads");
    for marker in Marker::ALL {
        let ids = tokenizer.encode_plain(marker.spelling()).expect("encodes");
        assert!(ids.len() > 1 && !ids.iter().any(|id| tokenizer.is_added(*id)), "{marker:?}");
    }
}

#[test]
fn the_folded_vocabulary_is_the_one_of_the_checkpoint() {
    let [(_, tiny), (_, demo)] = both();
    let layout: Value = serde_json::from_str(TINY_LAYOUT).expect("JSON");
    let folded = FoldedVocabulary::build(&tiny).expect("builds");
    assert_eq!(json!(folded.map), layout["token_map"]);
    assert_eq!(folded.count, 289);

    let folded = FoldedVocabulary::build(&demo).expect("builds");
    assert_eq!((folded.count, folded.map.len()), (3140, 4096));
    let sum: u64 = folded.map.iter().map(|id| u64::from(*id)).sum();
    assert_eq!((sum, folded.map[2]), (5_776_306, 2));
    let of = |text: &str| {
        let ids = demo.encode_plain(text).expect("encodes");
        assert_eq!(ids.len(), 1, "{text:?} is one token");
        folded.map[ids[0] as usize]
    };
    for (one, other) in [(" the", " The"), (" the", "the"), ("\n", " "), ("a", "A")] {
        assert_eq!(of(one), of(other), "{one:?} {other:?}");
    }
    assert_ne!(of("a"), of("b"));
}
