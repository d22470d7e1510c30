use super::*;

fn read(line: &str, environment: &[(&str, &str)]) -> Result<Arguments, Mistakes> {
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    match parse(&arguments, &Environment::of(environment))? {
        Request::Run(arguments) => Ok(*arguments),
        other => panic!("{other:?}"),
    }
}

#[test]
fn values_are_read_in_every_spelling() {
    let cases: [(Kind, &str, Value); 24] = [
        (count_kind(), "0", Value::Count(0)),
        (count_kind(), "32k", Value::Count(32_768)),
        (count_kind(), "1M", Value::Count(1_048_576)),
        (Kind::CountOrAuto { least: 1, most: 9 }, "auto", Value::Auto),
        (Kind::CountOrAuto { least: 1, most: 9 }, "9", Value::Count(9)),
        (Kind::Integer, "-7", Value::Integer(-7)),
        (Kind::Size, "512MiB", Value::Bytes(512 << 20)),
        (Kind::Size, "16g", Value::Bytes(16 << 30)),
        (Kind::Size, "16GiB", Value::Bytes(16 << 30)),
        (Kind::Size, "64GB", Value::Bytes(64_000_000_000)),
        (Kind::Size, "1.5KiB", Value::Bytes(1536)),
        (Kind::Size, "100", Value::Bytes(100)),
        (Kind::SizeOrFraction, "0.9", Value::Number(0.9)),
        (Kind::SizeOrFraction, "2GiB", Value::Bytes(2 << 30)),
        (Kind::Number { least: 0.0, most: 1.0 }, "1e-1", Value::Number(0.1)),
        (Kind::OnOffCount { most: 64 }, "on", Value::On(true)),
        (Kind::OnOffCount { most: 64 }, "5", Value::Count(5)),
        (Kind::OnOffCount { most: 64 }, "1", Value::Count(1)),
        (Kind::Switch, "true", Value::On(true)),
        (Kind::List, "1, 2", Value::List(vec!["1".into(), "2".into()])),
        (Kind::Effort, "ultra", Value::Text("ultra".into())),
        (Kind::EngramPlace, "mmap", Value::Text("mmap".into())),
        (Kind::EngramPlace, "disk:4GiB", Value::Text("disk:4GiB".into())),
        (Kind::TemplateArguments, "{\"thinking\": false}", Value::On(false)),
    ];
    for (kind, text, expected) in cases {
        assert_eq!(parse_value(kind, text), Ok(expected), "{kind:?} {text}");
    }
    for (kind, text) in [
        (count_kind(), "-1"),
        (count_kind(), "1.5"),
        (count_kind(), ""),
        (count_kind(), "+1"),
        (count_kind(), "99999999999999999999k"),
        (Kind::Size, "16x"),
        (Kind::Size, "GiB"),
        (Kind::Size, "9999999tb"),
        (Kind::Number { least: 0.0, most: 1.0 }, "nan"),
        (Kind::Number { least: 0.0, most: 1.0 }, "1.01"),
        (Kind::SizeOrFraction, "1.5"),
        (Kind::OnOffCount { most: 64 }, "65"),
        (Kind::Effort, "101"),
        (Kind::EngramPlace, "ram:1GiB"),
        (Kind::EngramPlace, "disk:"),
        (Kind::Effort, "+5"),
        (Kind::List, "1,,2"),
        (Kind::Text, ""),
        (Kind::TemplateArguments, "{\"thinking\": false, \"x\": 1}"),
    ] {
        assert!(parse_value(kind, text).is_err(), "{kind:?} {text}");
    }
}

fn count_kind() -> Kind {
    Kind::Count { least: 0, most: 1 << 40 }
}

#[test]
fn a_flag_beats_a_variable_beats_the_file_beats_the_default() {
    let file = std::env::temp_dir().join(format!("tensorfold-config-{}.toml", std::process::id()));
    std::fs::write(&file, "# all\nport = 3\nqueue = 5\nname = [\"a\", \"b\"]\n\nwatchdog = 7.5\nmax_tokens = \"4k\"\n")
        .unwrap();
    let line = format!("serve --port 1 --config {}", file.display());
    let found = read(&line, &[("TENSORFOLD_PORT", "2"), ("TENSORFOLD_QUEUE", "4")]).unwrap();
    let setting = |flag: &str| found.setting(flag).unwrap().clone();
    assert_eq!(setting("port"), Setting { value: Value::Count(1), source: Source::Flag });
    let variable = Source::Variable("TENSORFOLD_QUEUE".to_owned());
    assert_eq!(setting("queue"), Setting { value: Value::Count(4), source: variable });
    let place = |line| Source::File { file: file.display().to_string(), line };
    assert_eq!(setting("watchdog"), Setting { value: Value::Number(7.5), source: place(6) });
    assert_eq!(setting("max-tokens"), Setting { value: Value::Count(4096), source: place(7) });
    assert_eq!(found.list("name").unwrap(), ["a", "b"]);
    assert_eq!(setting("host"), Setting { value: Value::Text("127.0.0.1".into()), source: Source::Default });
    assert!(found.is_given("queue") && !found.is_given("host") && found.setting("temperature").is_none());
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn names_of_other_programs_mean_the_same() {
    let found = read(
        "serve m --max-model-len 8k -np 3 --no-drafts -t 2 --served-model-name x -a y --no-thinking \
         --gpu-memory-utilization 0.9 --trust-remote-code --tool-call-parser deepseek_v41 --device cpu",
        &[],
    )
    .unwrap();
    assert_eq!(found.positionals, ["m"]);
    assert_eq!(
        (found.count("context"), found.count("parallel"), found.count("threads")),
        (Some(8192), Some(3), Some(2))
    );
    assert_eq!(found.setting("draft").unwrap().value, Value::On(false));
    assert_eq!(found.list("name").unwrap(), ["x", "y"]);
    assert!(!found.is_on("thinking") && found.is_given("thinking"));
    assert_eq!(found.number("memory"), Some(0.9));
    assert_eq!(found.text("backend"), Some("cpu"));
    assert_eq!(found.notes.len(), 2, "{:?}", found.notes);
    let kwargs = read("serve --chat-template-kwargs={\"thinking\":false}", &[]).unwrap();
    assert!(kwargs.is_given("thinking") && !kwargs.is_on("thinking"));
    assert_eq!(read("run --seed -1", &[]).unwrap().integer("seed"), Some(-1));
    assert_eq!(read("run -- --not-a-flag", &[]).unwrap().positionals, ["--not-a-flag"]);
}

#[cfg(not(any(feature = "cuda", target_os = "macos")))]
#[test]
fn a_backend_of_another_build_is_refused_with_what_it_needs() {
    for command in ["serve", "run", "info", "logits", "selftest", "bench", "contract"] {
        for (backend, needs) in
            [("cuda", "cuda needs a build with `--features cuda`"), ("metal", "metal needs macOS on")]
        {
            let expected = format!("--backend {backend}: expected auto or cpu: {needs}");
            for (flag, part) in [("backend", expected.as_str()), ("device", needs)] {
                let error = read(&format!("{command} --{flag} {backend}"), &[]).unwrap_err().to_string();
                assert!(error.contains(part), "{command}: {error}");
            }
        }
    }
}

/// Each line has one mistake, and the text says which and what would be right.
#[test]
fn mistakes_are_named() {
    for (line, part) in [
        ("serve --prot 1", "--prot is not an option of serve. Did you mean --port?"),
        ("serve --hepl", "--hepl is not an option of serve. Did you mean --help?"),
        ("serve --zzzzzz 1", "--zzzzzz is not an option of serve."),
        ("run --port 1", "--port is not an option of run; it belongs to serve"),
        ("serve --port", "--port needs a value"),
        ("serve --port --host x", "--port needs a value"),
        ("serve --port 70000", "--port 70000: expected a whole number from 0 to 65535"),
        ("serve --port 1 --port 2", "--port is given twice"),
        ("serve --context 1 -c 2", "--context and -c are the same option"),
        ("serve --any-model=yes", "this flag takes no value"),
        (
            "serve --reasoning-effort huge",
            "expected none, minimal, low, medium, high, xhigh, max, ultra or an integer from 1 to 100",
        ),
        ("serve --backend tpu", "--backend tpu: expected auto or cpu"),
        ("serve --device 0", "--device 0 has no effect on the cpu backend"),
        ("serve --engram disc", "--engram disc: expected mmap, ram, disk, or disk with the size of its cache"),
        ("serve --numerics fast", "expected release"),
        ("serve --tls-cert a", "--tls-cert is refused: there is no TLS listener yet"),
        ("serve --speculative-config {}", "--speculative-config is refused: use --draft N"),
        ("serve --vision on", "--vision is not built yet"),
        ("serve --chat-template f", "--chat-template is refused: the encoding is code"),
        (
            "serve --tool-call-parser hermes",
            "--tool-call-parser hermes is refused: the name for this family is deepseek_v41",
        ),
        ("serve --dtype float16", "--dtype float16 is refused"),
        ("serve -ngl 99", "-ngl is refused: layers aren't split"),
        ("serve --mlock", "--mlock is refused: use --memory"),
        ("serve --enable-expert-parallel", "--enable-expert-parallel is refused: one host"),
        ("serve --pipeline-parallel-size 2", "--pipeline-parallel-size 2 is refused: one host"),
        ("serve --learning-rate 1", "--learning-rate is refused: one byte budget"),
        ("serve --split-mode row", "--split-mode is refused: one host"),
        ("serve --decode-share 0.5", "--decode-share is refused: use --decode-gap-ms"),
        ("serve a b", "b: more than `tensorfold serve [MODEL]` takes"),
        ("models x", "x: more than `tensorfold models` takes"),
        ("serve --config /nonexistent.toml", "--config /nonexistent.toml: "),
        ("--port 1 serve", "--port stands before the command"),
        ("", "no command"),
    ] {
        let error = read(line, &[]).unwrap_err();
        assert_eq!(error.0.len(), 1, "{line}: {error}");
        assert!(error.0[0].contains(part), "{line}: {error}");
    }
}

#[test]
fn all_mistakes_come_in_one_report_with_their_sources() {
    let file = std::env::temp_dir().join(format!("tensorfold-mistakes-{}.toml", std::process::id()));
    std::fs::write(&file, "chocies = 3\nqueue = -1\n").unwrap();
    let line = format!("serve --prot 1 --max-body 5x --config {}", file.display());
    let error = read(&line, &[("TENSORFOLD_CHOICES", "0"), ("TENSORFOLD_API_KEY", "")]).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    for part in [
        "--prot is not an option",
        "--max-body 5x: expected a size",
        "TENSORFOLD_CHOICES 0: expected a whole number from 1 to 128",
        ".toml:1 chocies is no option. Did you mean choices?",
        ".toml:2 queue -1: expected",
    ] {
        assert!(error.0.iter().any(|text| text.contains(part)), "{part}: {error}");
    }
    assert_eq!(error.0.len(), 5, "{error}");
}

#[test]
fn an_unknown_variable_is_noted_and_a_secret_is_never_shown() {
    let found = read("serve", &[("TENSORFOLD_CONTXT", "1")]).unwrap();
    assert!(found.notes[0].contains("Did you mean TENSORFOLD_CONTEXT?"), "{:?}", found.notes);
    let error = read("serve --api-key=", &[]).unwrap_err().to_string();
    assert!(error.contains("--api-key (hidden): expected a text"), "{error}");
}

#[test]
fn help_and_version_need_nothing_else() {
    let ask = |line: &str| {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&arguments, &Environment::of(&[])).unwrap()
    };
    assert!(matches!(ask("--version"), Request::Version));
    assert!(matches!(ask("-h"), Request::Help { command: None, long: false }));
    assert!(matches!(ask("serve --nonsense --help"), Request::Help { command: Some(Command::Serve), long: true }));
    assert!(matches!(ask("help run"), Request::Help { command: Some(Command::Run), long: true }));
}

#[test]
fn an_option_of_two_commands_is_set_for_each_by_its_own_name() {
    let environment =
        [("TENSORFOLD_BENCH_FORMAT", "csv"), ("TENSORFOLD_BENCH_ROWS", "1,2"), ("TENSORFOLD_LOGITS_ROWS", "3")];
    let bench = read("bench decode", &environment).unwrap();
    assert_eq!(bench.text("format"), Some("csv"));
    assert_eq!(bench.list("rows").unwrap(), ["1", "2"]);
    assert_eq!(read("logits", &environment).unwrap().count("rows"), Some(3));
    assert!(read("run", &environment).unwrap().notes.is_empty());
    let notes = read("bench decode", &[("TENSORFOLD_FORMAT", "csv")]).unwrap().notes;
    assert!(notes[0].ends_with("It is called TENSORFOLD_RUN_FORMAT or TENSORFOLD_BENCH_FORMAT."), "{notes:?}");
    let notes = read("serve", &[("TENSORFOLD_CTX_SIZE", "4k")]).unwrap().notes;
    assert!(notes[0].ends_with("It is called TENSORFOLD_CONTEXT."), "{notes:?}");
}

#[test]
fn a_key_below_a_command_counts_for_that_command_alone() {
    let file = std::env::temp_dir().join(format!("tensorfold-tables-{}.toml", std::process::id()));
    let load = |text: &str, line: &str| {
        std::fs::write(&file, text).unwrap();
        read(&format!("{line} --config {}", file.display()), &[])
    };
    let text = "threads = 2\n\n[bench]\nthreads = 1\nformat = \"md\"\nrows = [1, 4]\n\n[logits]\nrows = 2\n";
    let bench = load(text, "bench decode").unwrap();
    assert_eq!((bench.count("threads"), bench.text("format")), (Some(1), Some("md")));
    let place = Source::File { file: file.display().to_string(), line: 5 };
    assert_eq!(bench.setting("format").unwrap().source, place);
    assert_eq!(load(text, "logits").unwrap().count("rows"), Some(2));
    assert_eq!(load(text, "serve").unwrap().count("threads"), Some(2));
    let mistakes = load("format = \"md\"\n", "bench decode").unwrap_err().to_string();
    assert!(mistakes.ends_with("write it below [run] or [bench]"), "{mistakes}");
    let mistakes = load("[bench]\nprot = 1\n", "bench decode").unwrap_err().to_string();
    assert!(mistakes.contains(".toml:2 prot is no option of bench."), "{mistakes}");
    std::fs::remove_file(&file).unwrap();
}
