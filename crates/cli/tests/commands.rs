//! The program from outside: exit codes, streams, and what a checkpoint's faults look like to its user.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use serde_json::Value;

/// Runs the program with these arguments and no variables but those given.
fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorfold"));
    command.args(arguments).env_clear().envs(variables.iter().copied()).stdin(Stdio::null()).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden/dsv41-tiny-a/model")
}

/// A copy of the golden checkpoint that is removed at the end.
struct Copy(PathBuf);

impl Copy {
    fn new(name: &str) -> Copy {
        let path = std::env::temp_dir().join(format!("tensorfold-cli-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        for entry in std::fs::read_dir(golden()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
        }
        Copy(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.0.join(file);
        let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        std::fs::write(&path, value.to_string()).unwrap();
    }

    /// Sets every byte of a tensor.
    fn fill_tensor(&self, tensor: &str, byte: u8) {
        let mut filled = 0;
        for entry in std::fs::read_dir(&self.0).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let mut contents = std::fs::read(&path).unwrap();
            let length = u64::from_le_bytes(contents[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&contents[8..8 + length]).unwrap();
            let at = |end: usize| header[tensor]["data_offsets"][end].as_u64().map(|at| 8 + length + at as usize);
            if let (Some(start), Some(end)) = (at(0), at(1)) {
                contents[start..end].fill(byte);
                std::fs::write(&path, contents).unwrap();
                filled += end - start;
            }
        }
        assert!(filled > 0, "{tensor} is in no shard");
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn results_go_to_stdout_and_wrong_usage_ends_with_2() {
    let version = run(&["--version"], &[]);
    assert_eq!(code(&version), 0);
    for part in ["tensorfold 0.1.0 (", "backends: cpu", "families: deepseek_v41"] {
        assert!(stdout(&version).contains(part), "{}", stdout(&version));
    }
    let help = run(&["--help"], &[]);
    assert!(code(&help) == 0 && stdout(&help).contains("Usage: tensorfold COMMAND"));
    for arguments in [&["serv"][..], &[], &["info", "a", "b"], &["serve", "--prot", "1"], &["info", "./none"]] {
        let output = run(arguments, &[]);
        assert_eq!(code(&output), 2, "{arguments:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty() && stderr(&output).starts_with("error: "), "{arguments:?}");
    }
    for (arguments, part) in
        [(&["pull", "a/b"][..], "pull is not built yet"), (&["info", "a/b"], "is not in the cache")]
    {
        let output = run(arguments, &[("HOME", "/nonexistent")]);
        assert_eq!(code(&output), 1, "{arguments:?}");
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn every_mistake_is_reported_with_its_source() {
    let output = run(&["serve", "--prot", "1", "--max-body", "x"], &[("TENSORFOLD_QUEUE", "-1")]);
    assert_eq!(code(&output), 2);
    let lines: Vec<&str> = stderr(&output).lines().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("TENSORFOLD_QUEUE -1: expected a whole number")), "{lines:?}");
}

#[test]
fn options_show_what_won_and_where_it_came_from() {
    let variables = [("TENSORFOLD_PORT", "1234"), ("TENSORFOLD_API_KEY", "very-secret"), ("TENSORFOLD_PROT", "1")];
    let output = run(&["info", "--options", "--json", "--context", "2k"], &variables);
    let options: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(options["--port"], serde_json::json!({"value": "1234", "source": "TENSORFOLD_PORT"}));
    assert_eq!(options["--context"], serde_json::json!({"value": "2048", "source": "flag"}));
    assert_eq!(options["--host"], serde_json::json!({"value": "127.0.0.1", "source": "default"}));
    assert_eq!(options["--api-key"]["value"], "(set)");
    assert!(!stdout(&output).contains("very-secret"));
    assert!(stderr(&output).contains("TENSORFOLD_PROT is no variable of this program"), "{}", stderr(&output));
}

#[test]
fn info_says_what_a_checkpoint_is_and_what_it_takes() {
    for model in ["tiny-dsv41", golden().to_str().unwrap()] {
        let started = Instant::now();
        let output = run(&["info", model, "--json", "--parallel", "2"], &[]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let model = &serde_json::from_slice::<Value>(&output.stdout).unwrap()["model"];
        assert_eq!((&model["family"], model["plan"]["parallel"].as_u64()), (&"deepseek_v41".into(), Some(2)));
        let parts = model["plan"]["bytes"].as_object().unwrap();
        let mapped = parts["engram (mapped)"].as_u64().unwrap();
        let sum: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(model["plan"]["total_bytes"].as_u64(), Some(sum - mapped), "parts are the plan");
        assert_eq!(model["special_tokens"].as_object().unwrap().len(), 10);
        assert!(started.elapsed().as_secs() < 20);
    }
    let plain = run(&["info"], &[]);
    assert!(code(&plain) == 0 && stdout(&plain).contains("hub cache"), "{}", stdout(&plain));
    let capabilities: Value = serde_json::from_slice(&run(&["info", "--capabilities"], &[]).stdout).unwrap();
    assert_eq!(capabilities["schema_version"], 1);
    assert!(capabilities["options"].as_array().unwrap().len() > 40);
}

/// Each fault ends with 1 and every reason, before a weight is read.
#[test]
fn what_could_not_be_served_is_told_with_every_reason() {
    type Break = fn(&Copy);
    let cases: [(&str, Break, &[&str]); 8] = [
        (
            "truncated",
            |copy| {
                let path = copy.0.join("model-00002-of-00003.safetensors");
                let bytes = std::fs::read(&path).unwrap();
                std::fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
            },
            &["model-00002-of-00003.safetensors ends at byte 1972002, its header needs 1972102"],
        ),
        (
            "missing-shard",
            |copy| std::fs::remove_file(copy.0.join("model-00003-of-00003.safetensors")).unwrap(),
            &["1 of 3 shards are missing", "model-00003-of-00003.safetensors"],
        ),
        (
            "gguf",
            |copy| std::fs::write(copy.0.join("model-00001-of-00003.safetensors"), b"GGUF\x03\0\0\0\xff\xff").unwrap(),
            &["model-00001-of-00003.safetensors is a GGUF file, a format that is not read"],
        ),
        (
            "config",
            |copy| {
                copy.edit_json("config.json", |config| {
                    config["text_config"].as_object_mut().unwrap().remove("engram_vocab_size");
                    config["text_config"]["hidden_size"] = 100.into();
                })
            },
            &["text_config.engram_vocab_size is missing", "text_config.hidden_size is 100, expected a multiple of 32"],
        ),
        (
            "draft-blocks",
            |copy| {
                copy.edit_json("config.json", |config| {
                    config["text_config"]["num_nextn_predict_layers"] = 2.into();
                    config["text_config"]["compress_ratios"].as_array_mut().unwrap().pop();
                })
            },
            &["mtp.1.norm.weight is missing", "mtp.2.attn.wq_a.weight is unknown"],
        ),
        (
            "tokenizer",
            |copy| std::fs::remove_file(copy.0.join("tokenizer.json")).unwrap(),
            &["tokenizer.json is missing"],
        ),
        (
            "other-tokenizer",
            |copy| {
                copy.edit_json("config.json", |config| {
                    config["text_config"]["engram_compressed_vocab_size"] = 288.into()
                })
            },
            &["the tokenizer folds to 289 Engram ids, expected engram_compressed_vocab_size 288"],
        ),
        (
            "ids",
            |copy| copy.edit_json("config.json", |config| config["eos_token_id"] = 7.into()),
            &["<｜end▁of▁sentence｜> the id 1, config.json's eos_token_id is 7"],
        ),
    ];
    for (name, break_it, parts) in cases {
        let copy = Copy::new(name);
        break_it(&copy);
        let started = Instant::now();
        let output = run(&["info", copy.path()], &[]);
        assert_eq!(code(&output), 1, "{name}: {}", stderr(&output));
        for part in parts {
            assert!(stderr(&output).contains(part), "{name}, {part}: {}", stderr(&output));
        }
        assert!(started.elapsed().as_secs() < 20, "{name}");
    }
    for (arguments, expected, part) in [
        (["--context", "5000"], 2, "--context 5000 is larger than this model's 4096 positions"),
        (["--memory", "2MiB"], 1, "the weights, the activations and the program itself need"),
    ] {
        let output = run(&[&["info", golden().to_str().unwrap()], &arguments[..]].concat(), &[]);
        assert!(code(&output) == expected && stderr(&output).contains(part), "{}", stderr(&output));
    }
}

#[test]
fn models_lists_the_built_in_and_the_hub_cache() {
    let root = std::env::temp_dir().join(format!("tensorfold-cli-{}-hub", std::process::id()));
    let repository = root.join("hub/models--org--tiny");
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::create_dir_all(repository.join("snapshots")).unwrap();
    std::fs::write(repository.join("refs/main"), "abc123").unwrap();
    let copy = Copy::new("hub-copy");
    std::fs::rename(&copy.0, repository.join("snapshots/abc123")).unwrap();
    let other = root.join("hub/models--org--other/snapshots/def");
    std::fs::create_dir_all(&other).unwrap();
    std::fs::write(other.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();

    let home = [("HF_HOME", root.to_str().unwrap())];
    let output = run(&["models", "--json"], &home);
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let summary: Vec<_> = listed["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| (model["name"].as_str().unwrap(), model["complete"].as_bool().unwrap()))
        .collect();
    assert_eq!(summary, [("tiny-dsv41", true), ("org/other", false), ("org/tiny", true)]);
    assert!(stdout(&output).contains("the family llama can't be loaded"));
    assert!(stdout(&run(&["ls"], &home)).contains("org/tiny"));
    let info = run(&["show", "org/tiny@main"], &home);
    assert!(code(&info) == 0 && stdout(&info).starts_with("org/tiny (hub cache, main"), "{}", stderr(&info));
    let missing = run(&["info", "org/tiny@v9"], &home);
    assert!(code(&missing) == 1 && stderr(&missing).contains("there is main"), "{}", stderr(&missing));
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn a_closed_pipe_is_a_normal_ending() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tensorfold"))
        .args(["info", "--capabilities"])
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
}

/// Reported as: every decode step gives the same token and the same log-probability.
#[test]
fn a_model_whose_every_row_is_the_same_is_not_served() {
    // Weights that are numbers, and a model that has nothing to say.
    let silent = Copy::new("silent");
    silent.fill_tensor("norm.weight", 0);
    let output = run(&["serve", silent.path(), "--port", "0"], &[]);
    assert_eq!(code(&output), 1, "{}", stderr(&output));
    assert_eq!(stdout(&output), "", "it never says that it is ready");
    let text = stderr(&output);
    assert!(text.contains("self-check") && text.contains("all logits at position 0 are 0"), "{text}");
    assert!(text.contains("fetch it again"), "{text}");

    let damaged = Copy::new("scales");
    damaged.fill_tensor("layers.3.attn.wq_b.scale", 0xff);
    let output = run(&["serve", damaged.path(), "--port", "0"], &[]);
    let text = stderr(&output);
    assert_eq!((code(&output), stdout(&output)), (1, ""), "{text}");
    assert!(text.contains("layers.3.attn.wq_b.scale") && text.contains(".safetensors"), "{text}");
}

/// Reported as: `serve --chunk 0` ends with 1, other wrong values with 2.
#[test]
fn wrong_values_end_with_2_whatever_the_command() {
    let cases: [&[&str]; 18] = [
        &["serve", "--chunk", "0"],
        &["serve", "--chunk", "7,8"],
        &["serve", "--context", "99999"],
        &["info", "tiny-dsv41", "--context", "99999"],
        &["serve", "--round-rows", "1"],
        &["serve", "--max-body", "0"],
        &["serve", "--memory", "99999999TiB"],
        &["serve", "--engram", "disk"],
        &["logits", "--ids", "1", "--rows", "999"],
        &["logits", "--ids-file", "/none"],
        &["logits", "--request", "/none"],
        &["logits", "--ids", "1", "--output", "/none/rows.safetensors"],
        &["bench", "compare", "/none", "/none"],
        &["bench", "cache", "--prompt-file", "/none"],
        &["bench", "decode", "--output", "/none/record.json"],
        &["selftest", "--laws", "L9"],
        &["contract", "--only", "none"],
        &["render", "tiny-dsv41", "/none"],
    ];
    for words in cases {
        let output = run(words, &[]);
        assert_eq!(code(&output), 2, "{words:?}: {}", stderr(&output));
        // What could be found out about a model is shown all the same.
        let is_quiet = output.stdout.is_empty() || words[0] == "info";
        assert!(is_quiet && stderr(&output).starts_with("error: "), "{words:?}");
    }
}

/// Reported as: `info --devices 5` is accepted, and `--devices 0`, the default, is refused.
#[cfg(not(any(feature = "cuda", target_os = "macos")))]
#[test]
fn a_device_that_is_not_there_is_refused_and_the_default_is_not() {
    for words in
        [&["info", "--devices", "5"][..], &["info", "--devices", "x"], &["info", "tiny-dsv41", "--devices", "5"]]
    {
        let output = run(words, &[]);
        assert_eq!(code(&output), 2, "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("--devices"), "{words:?}: {}", stderr(&output));
    }
    for words in [&["info", "--devices", "0"][..], &["serve", "--devices", "0", "--dry-run", "--port", "0"]] {
        let output = run(words, &[]);
        assert_eq!(code(&output), 0, "{words:?}: {}", stderr(&output));
    }
}

/// Reported as: `--dry-run` passes `--engram disk` for the built-in model and cache folders that can't be used.
#[test]
fn a_dry_run_refuses_what_the_real_run_refuses() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let root = std::env::temp_dir().join(format!("tensorfold-cli-{}-dry", std::process::id()));
    std::fs::create_dir_all(&root).unwrap();
    let (file, fresh) = (root.join("file"), root.join("a/b"));
    std::fs::write(&file, b"").unwrap();
    let (file, fresh) = (file.to_str().unwrap(), fresh.to_str().unwrap());
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--engram", "disk"], 2, "has no file to read n-gram rows from"),
        (&["--cache-dir", file], 1, "Name a directory that this user may write"),
        (&["--cache-dir-bytes", "5MiB"], 2, "--cache-dir-bytes has no effect without --cache-dir"),
        (&["--cache-dir", fresh, "--prefix-cache", "off"], 2, "has no effect while no prefix is kept"),
        (&["--port", &port], 1, "can't be listened on"),
    ];
    for (words, expected, part) in cases {
        let port = if words.contains(&"--port") { &[][..] } else { &["--port", "0"] };
        let dry = run(&[&["serve", "--dry-run"], words, port].concat(), &[]);
        let real = run(&[&["serve"], words, port].concat(), &[]);
        assert_eq!((code(&dry), code(&real)), (expected, expected), "{words:?}: {}", stderr(&dry));
        assert_eq!(stderr(&dry), stderr(&real), "{words:?}");
        assert!(stderr(&dry).contains(part) && dry.stdout.is_empty(), "{words:?}: {}", stderr(&dry));
    }
    let good = run(&["serve", "--dry-run", "--port", "0", "--cache-dir", fresh], &[]);
    assert!(code(&good) == 0 && stdout(&good).contains("in all"), "{}", stderr(&good));
    assert!(!root.join("a").exists(), "a dry run leaves everything as it is");
    std::fs::remove_dir_all(&root).unwrap();
}

/// Reported as: a damaged config.json is told in the words of a library.
#[test]
fn damaged_json_files_are_told_in_plain_words() {
    let cases: [(&str, &[u8], &str); 7] = [
        (
            "config.json",
            b"{\"a\": ",
            "config.json is not valid JSON: it ends at line 1, column 6, before it is complete",
        ),
        ("config.json", b"null", "config.json: the text is not an object"),
        (
            "config.json",
            b"{\"a\": nul}",
            "config.json is not valid JSON: expected true, false or null at line 1, column 10",
        ),
        ("tokenizer.json", b"null", "tokenizer.json: the file is null, expected an object"),
        (
            "tokenizer.json",
            b"{",
            "tokenizer.json is not valid JSON: it ends at line 1, column 1, before the value is complete",
        ),
        ("generation_config.json", b"[1", "generation_config.json is not valid JSON: it ends at line 1, column 2"),
        ("model.safetensors.index.json", b"{\"weight_map\": 5}", "found `5`, expected an object from tensor to shard"),
    ];
    for (file, contents, part) in cases {
        let copy = Copy::new("plain-words");
        std::fs::write(copy.0.join(file), contents).unwrap();
        let output = run(&["serve", copy.path(), "--dry-run", "--port", "0"], &[]);
        let text = stderr(&output);
        assert!(code(&output) == 1 && text.contains(part), "{file}: {text}");
        for word in ["EOF", "invalid type", "ident", "missing field"] {
            assert!(!text.contains(word), "{file}: {text}");
        }
    }
}

/// Reported as: `logits --request` panics in a build with assertions.
#[test]
fn logits_of_a_request_are_those_of_its_prompt() {
    let body = std::env::temp_dir().join(format!("tensorfold-cli-{}-request.json", std::process::id()));
    let body = body.to_str().unwrap();
    std::fs::write(body, r#"{"messages": [{"role": "user", "content": "hi"}]}"#).unwrap();
    let rendered = run(&["render", "tiny-dsv41", body], &[]);
    let of_request = run(&["logits", "--request", body], &[]);
    let of_prompt = run(&["logits", "--prompt", stdout(&rendered)], &[]);
    std::fs::remove_file(body).unwrap();
    assert_eq!((code(&rendered), code(&of_request)), (0, 0), "{}", stderr(&of_request));
    assert_eq!(stdout(&of_request), stdout(&of_prompt));
}
