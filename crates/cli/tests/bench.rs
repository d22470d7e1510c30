//! `bench` against a server of its own, as a user runs it.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorfold"));
    command.arg("bench").args(arguments).env_clear().stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A folder for records that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("tensorfold-bench-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_demo_model_replies_alike_together_alone_and_without_drafts() {
    let folder = Folder::new("concurrent");
    let (one, other) = (folder.file("one.json"), folder.file("other.json"));
    let common = ["concurrent", "--levels", "1,3", "--tokens", "8", "--reps", "1", "--mixed", "--threads", "2"];
    let law = run(&[&common[..], &["--alone", "--serial", "--output", &one]].concat());
    assert!(law.status.success(), "{}{}", text(&law.stdout), text(&law.stderr));
    let last = text(&law.stdout).lines().last().unwrap().to_owned();
    assert!(last.starts_with("PASS "), "{last}");
    for line in ["streams: 8 equal, 0 unequal, 0 failed, 0 unmeasured", "alone: 8 equal", "serial: 8 equal"] {
        assert!(text(&law.stdout).contains(line), "{}", text(&law.stdout));
    }
    // One thread and no drafts at all: other work, the same replies.
    let plain = ["concurrent", "--levels", "1,3", "--tokens", "8", "--reps", "1", "--mixed", "--threads", "1"];
    let again = run(&[&plain[..], &["--draft", "off", "--output", &other, "--format", "json"]].concat());
    assert!(again.status.success(), "{}", text(&again.stderr));
    let record: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(last, format!("PASS {}", record["digest"].as_str().unwrap()));
    assert_eq!(record, serde_json::from_slice::<Value>(&std::fs::read(&other).unwrap()).unwrap());

    let compared = run(&["compare", &one, &other]);
    assert!(compared.status.success(), "{}", text(&compared.stderr));
    assert!(text(&compared.stdout).contains(", equal\n"), "{}", text(&compared.stdout));
    assert!(text(&compared.stdout).contains("draft: A on, B off\n"), "{}", text(&compared.stdout));
}

#[test]
fn what_is_required_and_not_seen_fails_the_run() {
    let folder = Folder::new("cache");
    let ids = folder.file("ids.json");
    std::fs::write(&ids, "[5, 6, 7, 8, 9, 10, 11, 12]").unwrap();
    let common = ["cache", "--tokens", "4", "--threads", "2", "--prompt-file", &ids];
    let cold = run(&[&common[..], &["--require-cold", "--expected-prompt-tokens", "8"]].concat());
    assert!(cold.status.success(), "{}{}", text(&cold.stdout), text(&cold.stderr));
    assert!(text(&cold.stdout).ends_with("PASS\n"), "{}", text(&cold.stdout));
    let reused = run(&[&common[..], &["--require-reuse"]].concat());
    assert!(reused.status.success(), "{}{}", text(&reused.stdout), text(&reused.stderr));
    let off = run(&[&common[..], &["--require-reuse", "--prefix-cache", "off"]].concat());
    assert_eq!(off.status.code(), Some(1));
    assert!(text(&off.stdout).contains("repeated 1: cold instead of reused"), "{}", text(&off.stdout));
    let wrong = run(&[&common[..], &["--expected-prompt-tokens", "9"]].concat());
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stdout).ends_with("FAIL\n"), "{}", text(&wrong.stdout));
}

#[test]
fn a_load_on_the_demo_model_has_its_figures() {
    let arguments = ["serve", "--requests", "3", "--tokens", "4", "--prompt-tokens", "10", "--format", "csv"];
    let load = run(&arguments);
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    for part in ["\"prompt tokens\",\"30.00\"", "\"reply tokens\",\"12.00\"", "\"time to first token, percentile 99\""]
    {
        assert!(text(&load.stdout).contains(part), "{}", text(&load.stdout));
    }
}

#[test]
fn wrong_usage_ends_with_2_and_a_server_that_is_not_there_with_1() {
    let cases: [(&[&str], i32, &str); 7] = [
        (&["concurrent", "--url", "https://localhost"], 2, "--url"),
        (&["concurrent", "--levels", "1,x"], 2, "--levels takes counts"),
        (&["concurrent", "--temperatures", "hot"], 2, "--temperatures takes numbers"),
        (&["serve", "--rate", "1", "--concurrency", "2"], 2, "exclude each other"),
        (&["compare", "one.json"], 2, "takes two records"),
        (&["serve", "--minutes", "1"], 2, "--minutes has no effect on bench serve; it belongs to soak"),
        (&["cache", "--prompt-file", "/nowhere.json"], 2, "can't be read"),
    ];
    for (arguments, code, part) in cases {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(part), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
    // A port that was free a moment ago has no server.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let output = run(&["concurrent", "--url", &url]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("can't be reached"), "{}", text(&output.stderr));
}
