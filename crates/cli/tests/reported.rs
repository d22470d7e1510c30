//! What users of other servers have reported, tried on this one with the demo model: each test is named after what they
//! saw. Every reply is compared, log-probabilities included, with the one of a server that keeps nothing, drafts nothing
//! and serves one request at a time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tf_bench::Client;
use tf_bench::child::Server;
use tf_bench::workload::{Numbers, ids};

/// A server with the demo model, and a client for it.
struct Demo {
    server: Server,
    client: Client,
}

impl Demo {
    fn start(words: &[&str]) -> Demo {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let log = std::env::temp_dir().join(format!("tensorfold-reported-{}-{number}.log", std::process::id()));
        let words = ["serve", "--port=0", "--access-log=off", "--threads=1"].iter().chain(words);
        let words: Vec<String> = words.map(|word| (*word).to_owned()).collect();
        let server = Server::start(Path::new(env!("CARGO_BIN_EXE_tensorfold")), &words, &[], &log).unwrap();
        let _ = std::fs::remove_file(log);
        let client = Client::new(&server.url).unwrap();
        Demo { server, client }
    }

    /// The standard: nothing kept, nothing drafted, one at a time.
    fn cold() -> Demo {
        Demo::start(&["--prefix-cache=off", "--draft=off", "--parallel=1"])
    }

    async fn ask(&self, body: &Value) -> Value {
        let path = if body["messages"].is_array() { "/v1/chat/completions" } else { "/v1/completions" };
        self.client.post(path, body).await.unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    /// All at once, in the order of `bodies`.
    async fn ask_together(&self, bodies: &[Value]) -> Vec<Value> {
        futures(bodies.iter().map(|body| self.ask(body))).await
    }
}

async fn futures<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = all.map(|one| Box::pin(one)).map(Some).collect();
    let mut done: Vec<Option<T>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (slot, result) in pending.iter_mut().zip(&mut done) {
            if let Some(one) = slot
                && let std::task::Poll::Ready(value) = one.as_mut().poll(context)
            {
                (*result, *slot) = (Some(value), None);
            }
        }
        if pending.iter().all(Option::is_none) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

fn tokens(seed: u64, count: u64) -> Vec<u32> {
    ids(&mut Numbers::new(seed), 4096, count)
}

/// A greedy or drawn reply with everything that can be compared.
fn body(prompt: &[u32], temperature: f64, max_tokens: u64) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": 42, "ignore_eos": true,
           "logprobs": 2, "return_token_ids": true})
}

/// What must be equal: tokens, text, bits of log-probabilities, ending, counts.
fn reply(answer: &Value) -> Value {
    let usage = &answer["usage"];
    json!([answer["choices"], usage["prompt_tokens"], usage["completion_tokens"], answer["tensorfold"]["token_sha"]])
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

fn accepted(answer: &Value) -> u64 {
    answer["timings"]["draft_n_accepted"].as_u64().unwrap_or(0)
}

async fn assert_cold(cold: &Demo, body: &Value, answer: &Value, what: &str) {
    assert_eq!(reply(answer), reply(&cold.ask(body).await), "{what}");
}

#[tokio::test]
async fn greedy_output_does_not_depend_on_how_busy_the_server_is() {
    let (busy, cold) = (Demo::start(&["--parallel=16"]), Demo::cold());
    let fixed = body(&tokens(1, 60), 0.0, 40);
    let alone = cold.ask(&fixed).await;
    for answer in busy.ask_together(&vec![fixed.clone(); 12]).await {
        assert_eq!(reply(&answer), reply(&alone));
    }
    // Among others of other lengths.
    let mut mixed: Vec<Value> = (0..11).map(|other| body(&tokens(50 + other, 5 + 37 * other), 1.0, 20)).collect();
    mixed.insert(5, fixed);
    let answers = busy.ask_together(&mixed).await;
    assert_eq!(reply(&answers[5]), reply(&alone));
    for (body, answer) in mixed.iter().zip(&answers) {
        assert_cold(&cold, body, answer, "a neighbour").await;
    }
}

#[tokio::test]
async fn drafts_change_neither_tokens_nor_logprobs_nor_usage() {
    let (drafting, cold) = (Demo::start(&["--draft=5"]), Demo::cold());
    let mut landed = 0;
    for (seed, length) in [(1, 30), (2, 300), (3, 1100)] {
        for temperature in [0.0, 1.0] {
            for limit in [10, 50] {
                let body = body(&tokens(seed, length), temperature, limit);
                let answer = drafting.ask(&body).await;
                landed += accepted(&answer);
                assert_cold(&cold, &body, &answer, &format!("{length} tokens at {temperature}")).await;
            }
        }
    }
    // Chats too: the demo knows these well, so drafts land.
    for question in ["3+4", "What is 17+25?", "Spell the word river.", "Reverse abc.", "10-7"] {
        let body = json!({"messages": [{"role": "user", "content": question}], "max_tokens": 60, "temperature": 0,
                          "logprobs": true, "top_logprobs": 2, "return_token_ids": true});
        let answer = drafting.ask(&body).await;
        landed += accepted(&answer);
        assert_cold(&cold, &body, &answer, question).await;
    }
    assert!(landed > 5, "{landed} accepted drafts show little");
}

#[tokio::test]
async fn the_same_long_prompt_again_is_answered_and_not_ended_at_once() {
    let (warm, cold) = (Demo::start(&[]), Demo::cold());
    let prompt = tokens(7, 1000);
    let again = body(&prompt, 0.0, 24);
    let alone = cold.ask(&again).await;
    for call in 0..4 {
        let answer = warm.ask(&again).await;
        assert_eq!(reply(&answer), reply(&alone), "call {call}");
        assert!(call == 0 || cached(&answer) > 800, "call {call}: {}", cached(&answer));
    }
    let longer = body(&[&prompt[..], &tokens(8, 10)].concat(), 0.0, 24);
    let answer = warm.ask(&longer).await;
    assert!(cached(&answer) > 800, "{}", cached(&answer));
    assert_cold(&cold, &longer, &answer, "one sentence more").await;
    // Where a prompt leaves another, the next one that leaves there resumes.
    for other in 0..2 {
        let changed = body(&[&prompt[..900], &tokens(9 + other, 100)].concat(), 0.0, 8);
        let answer = warm.ask(&changed).await;
        assert!(other == 0 || cached(&answer) > 800, "{}", cached(&answer));
        assert_cold(&cold, &changed, &answer, "another last sentence").await;
    }
}

#[tokio::test]
async fn a_shared_system_prompt_gives_no_token_salad() {
    let (warm, cold) = (Demo::start(&["--parallel=6", "--draft=5"]), Demo::cold());
    let shared = tokens(20, 2000);
    let tails: Vec<Value> = (0..12)
        .map(|user| body(&[&shared[..], &tokens(100 + user, 3 + 5 * user)].concat(), (user % 2) as f64, 16))
        .collect();
    let mut resumed = 0;
    for group in tails.chunks(6) {
        for (body, answer) in group.iter().zip(warm.ask_together(group).await) {
            resumed += cached(&answer);
            assert_cold(&cold, body, &answer, "a user of the shared prompt").await;
        }
    }
    assert!(resumed > 10 * 1900, "{resumed} tokens were resumed");
}

/// Also: a prefix cache that keeps entries and not the state of compressors and rings.
#[tokio::test]
async fn a_hit_at_any_offset_gives_the_fresh_reply() {
    let (warm, cold) = (Demo::start(&[]), Demo::cold());
    let text = tokens(30, 700);
    let mut resumed = 0;
    // Around the edges of windows, pages and chunks, on every residue of a group.
    let cuts = (125..=133).chain(254..=259).chain(510..=514).chain([16, 17, 300]);
    for cut in cuts {
        let first = body(&text[..cut], 1.0, 3);
        assert_cold(&cold, &first, &warm.ask(&first).await, &format!("a prompt of {cut}")).await;
        let grown = body(&[&text[..cut], &tokens(cut as u64, 9)].concat(), 1.0, 8);
        let answer = warm.ask(&grown).await;
        resumed += u64::from(cached(&answer) > 0);
        assert_cold(&cold, &grown, &answer, &format!("resumed after {cut}")).await;
    }
    assert!(resumed > 15, "{resumed} prompts were resumed");
}

#[tokio::test]
async fn eight_long_prompts_at_once_get_their_own_answers() {
    let (busy, cold) = (Demo::start(&["--parallel=8"]), Demo::cold());
    // Each has its own pass phrase at its own depth among the same filler.
    let filler = tokens(40, 1200);
    let bodies: Vec<Value> = (0..8)
        .map(|request| {
            let (at, phrase) = (131 * request as usize % 1100, tokens(1000 + request, 6));
            body(&[&filler[..at], &phrase, &filler[at..]].concat(), 0.0, 12)
        })
        .collect();
    for (body, answer) in bodies.iter().zip(busy.ask_together(&bodies).await) {
        assert_cold(&cold, body, &answer, "a prompt among eight").await;
    }
}

#[tokio::test]
async fn the_next_turn_resumes_with_and_without_the_old_reasoning() {
    let (warm, cold) = (Demo::start(&[]), Demo::cold());
    let question = json!({"role": "user", "content": "What is 17+25?"});
    let chat = |messages: &[Value]| {
        let mut body = json!({"max_tokens": 60, "temperature": 0, "logprobs": true, "return_token_ids": true});
        body["messages"] = json!(messages);
        body
    };
    let first = chat(std::slice::from_ref(&question));
    let answer = warm.ask(&first).await;
    assert_cold(&cold, &first, &answer, "the first turn").await;
    let message = &answer["choices"][0]["message"];
    for reasoning in [message["reasoning_content"].clone(), Value::Null] {
        let old = json!({"role": "assistant", "content": message["content"], "reasoning_content": reasoning});
        let next = chat(&[question.clone(), old, json!({"role": "user", "content": "And 3 more?"})]);
        let answer = warm.ask(&next).await;
        assert!(cached(&answer) > 0, "nothing was resumed");
        assert_cold(&cold, &next, &answer, "the second turn").await;
    }
}

#[tokio::test]
async fn a_journal_that_grows_recomputes_what_is_new() {
    let (warm, cold) = (Demo::start(&[]), Demo::cold());
    let journal = tokens(60, 200 + 40 * 12);
    for call in 0..12 {
        let body = body(&journal[..200 + 40 * call], 0.0, 4);
        let answer = warm.ask(&body).await;
        let computed = (200 + 40 * call) as u64 - cached(&answer);
        assert!(call == 0 || computed <= 40 + 128, "call {call} computed {computed}");
        assert_cold(&cold, &body, &answer, "the journal").await;
    }
}

#[tokio::test]
async fn short_prompts_are_found_again_too() {
    let warm = Demo::start(&[]);
    for length in [300, 1000, 3000] {
        let body = body(&tokens(length, length), 0.0, 2);
        warm.ask(&body).await;
        let hit = cached(&warm.ask(&body).await);
        assert!(10 * hit > 8 * length, "{hit} of {length}");
    }
}

#[tokio::test]
async fn conversations_are_found_on_disk_after_a_restart_and_stay_there() {
    let folder = std::env::temp_dir().join(format!("tensorfold-reported-{}-kept", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let dir = format!("--cache-dir={}", folder.display());
    let cold = Demo::cold();
    let turns: Vec<Value> = [70, 71].iter().map(|&seed| body(&tokens(seed, 900), 0.0, 8)).collect();
    let warm = Demo::start(&[&dir]);
    for body in &turns {
        warm.ask(body).await;
    }
    assert_eq!(warm.server.terminate(), Some(0), "a drain ends well");
    for start in 0..2 {
        let warm = Demo::start(&[&dir]);
        for body in &turns {
            let mut next = body.clone();
            let prompt = next["prompt"].as_array_mut().expect("ids");
            prompt.extend([json!(1000 + start), json!(1001)]);
            let answer = warm.ask(&next).await;
            assert_eq!(answer["tensorfold"]["cache"]["source"], "disk", "start {start}: {}", answer["tensorfold"]);
            assert!(cached(&answer) > 700, "start {start}: {}", cached(&answer));
            assert_cold(&cold, &next, &answer, "after a restart").await;
        }
        assert_eq!(warm.server.terminate(), Some(0));
    }
    let _ = std::fs::remove_dir_all(&folder);
}

#[tokio::test]
async fn requests_that_share_too_little_memory_all_end() {
    // Pages for about two full requests, and eight that grow, share prefixes and leave.
    let words = ["--parallel=8", "--context=2k", "--prefix-cache-bytes=600KiB", "--draft=5"];
    let (tight, cold) = (Demo::start(&words), Demo::cold());
    let shared = tokens(80, 700);
    let bodies: Vec<Value> = (0..8)
        .map(|request| body(&[&shared[..], &tokens(800 + request, 60 * (1 + request))].concat(), 1.0, 200))
        .collect();
    for round in 0..2 {
        let leaving = tokio::time::timeout(Duration::from_millis(150 * (round + 1)), tight.ask_together(&bodies[..3]));
        let (answers, _) = tokio::join!(tight.ask_together(&bodies[2..]), leaving);
        for (body, answer) in bodies[2..].iter().zip(&answers) {
            assert_cold(&cold, body, answer, "a request in little memory").await;
        }
    }
    let health = tight.client.get("/health").await.unwrap();
    assert_eq!((&health["requests_running"], &health["requests_waiting"]), (&json!(0), &json!(0)), "{health}");
}

#[tokio::test]
async fn bits_do_not_depend_on_the_configured_window() {
    let (wide, narrow) = (Demo::start(&["--context=8k"]), Demo::start(&["--context=1k"]));
    for seed in 0..3 {
        let body = body(&tokens(90 + seed, 500), 1.0, 30);
        assert_eq!(reply(&wide.ask(&body).await), reply(&narrow.ask(&body).await));
    }
}

#[tokio::test]
async fn a_title_request_beside_the_work_costs_it_nothing() {
    // Room for the conversation and little else.
    let (warm, cold) = (Demo::start(&["--prefix-cache-bytes=700KiB"]), Demo::cold());
    let text = "Please add a test for the parser, and say what it covers. ".repeat(20);
    let tools = json!([{"type": "function", "function": {"name": "write_file", "description": "Writes a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}]);
    let user = json!({"role": "user", "content": text});
    let mut work = json!({"messages": [user], "tools": tools, "max_tokens": 24, "temperature": 0, "logprobs": true,
                          "thinking": {"type": "disabled"}});
    let title = json!({"messages": [{"role": "system", "content": "Write a title."}, user], "max_tokens": 8,
                       "temperature": 0, "logprobs": true, "thinking": {"type": "disabled"}});
    let answers = warm.ask_together(&[work.clone(), title.clone()]).await;
    assert_cold(&cold, &work, &answers[0], "the work").await;
    assert_cold(&cold, &title, &answers[1], "the title").await;
    for other in 0..4 {
        let mut side = title.clone();
        side["messages"][0]["content"] = json!(format!("Write title {other}."));
        warm.ask(&side).await;
    }
    let prompt = answers[0]["usage"]["prompt_tokens"].as_u64().expect("a count");
    let messages = work["messages"].as_array_mut().expect("messages");
    messages.push(json!({"role": "assistant", "content": answers[0]["choices"][0]["message"]["content"]}));
    messages.push(json!({"role": "user", "content": "Go on."}));
    let answer = warm.ask(&work).await;
    assert!(cached(&answer) + 128 > prompt, "{} of {prompt} were resumed", cached(&answer));
    assert_cold(&cold, &work, &answer, "the next turn").await;
}

#[tokio::test]
async fn the_advertised_window_is_accepted_and_resumed() {
    let demo = Demo::start(&["--context=600"]);
    let model = demo.client.get("/v1/models").await.unwrap()["data"][0].clone();
    assert_eq!((&model["max_model_len"], &model["meta"]["n_ctx"]), (&json!(600), &json!(600)));
    let text = tokens(95, 601);
    let full = body(&text[..599], 0.0, 1000);
    for call in 0..2 {
        let answer = demo.ask(&full).await;
        assert_eq!(
            (&answer["usage"]["completion_tokens"], &answer["tensorfold"]["max_tokens"]),
            (&json!(1), &json!(1))
        );
        assert!(call == 0 || cached(&answer) > 500, "{}", cached(&answer));
    }
    // The whole window as a prompt is computed where no reply is wanted; one token more is refused with both numbers.
    let mut scored = body(&text[..600], 0.0, 0);
    scored["echo"] = true.into();
    assert_eq!(demo.ask(&scored).await["usage"]["prompt_tokens"], 600);
    let error = demo.client.post("/v1/completions", &body(&text, 0.0, 1)).await.unwrap_err().to_string();
    assert!(error.contains("400") && error.contains("600 tokens") && error.contains("601 tokens"), "{error}");
}

#[tokio::test]
async fn a_loaded_server_stays_within_its_plan() {
    let demo = Demo::start(&["--parallel=8"]);
    let bodies: Vec<Value> = (0..32).map(|request| body(&tokens(300 + request, 1500), 1.0, 24)).collect();
    for group in bodies.chunks(8) {
        demo.ask_together(group).await;
    }
    let memory = demo.client.get("/memory").await.unwrap();
    let bytes = |value: &Value| value.as_u64().expect("bytes");
    let plan = bytes(&memory["plan_bytes"]);
    let parts: u64 = memory["plan"]
        .as_object()
        .expect("parts")
        .iter()
        .filter(|part| part.0 != "engram")
        .map(|part| bytes(part.1))
        .sum();
    assert_eq!(parts, plan, "{memory}");
    if let Some(held) = memory["process"]["anonymous_bytes"].as_u64() {
        assert!(held <= plan, "{held} bytes held, {plan} planned");
    }
}

#[test]
fn a_model_larger_than_the_memory_is_refused_at_once_with_the_flag() {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden/dsv41-tiny-a/model");
    let golden = golden.to_str().unwrap();
    for words in [
        &["serve", golden, "--memory", "4MiB"][..],
        &["serve", "--memory", "100MiB", "--parallel", "200", "--context", "8k"],
        &["serve", "--memory", "80MiB", "--prefix-cache-bytes", "1GiB"],
        &["info", "tiny-dsv41", "--memory", "4MiB", "--context", "8k"],
    ] {
        let started = std::time::Instant::now();
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_tensorfold")).args(words).env_clear().output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {text}");
        assert!(text.contains("--memory") && text.contains("MiB"), "{words:?}: {text}");
        assert!(started.elapsed() < Duration::from_secs(2), "{words:?} took {:?}", started.elapsed());
    }
}

/// The scratch of the indexer is listed before anything is loaded, and the plan of `info` is the plan of `serve`.
#[test]
fn the_plan_lists_the_indexers_scratch_and_is_the_servers_own() {
    let run = |words: &[&str]| {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_tensorfold")).args(words).env_clear().output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let sizes = ["--context", "4k", "--parallel", "3", "--threads", "2", "--memory", "8GiB"];
    let info: Value = serde_json::from_str(&run(&[&["info", "tiny-dsv41", "--json"][..], &sizes].concat())).unwrap();
    let plan = &info["model"]["plan"];
    assert!(plan["bytes"]["indexer scratch"].as_u64() > Some(0), "{plan}");
    for part in ["request_bytes", "token_bytes", "snapshot_bytes", "largest_context", "full_requests"] {
        assert!(plan[part].as_u64() > Some(0), "{part}: {plan}");
    }
    let serve = run(&[&["serve", "--dry-run"][..], &sizes].concat());
    let text = run(&[&["info", "tiny-dsv41"][..], &sizes].concat());
    let line = |text: &str, name: &str| {
        let line =
            text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        line.trim_start()[name.len()..].trim().to_owned()
    };
    for part in ["indexer scratch", "activations", "cache pages", "kept states", "experts"] {
        assert_eq!(line(&serve, part), line(&text, part), "{part}");
    }
}

/// Reported as: the server is gone (SIGBUS) after its checkpoint was written anew in place, with n-gram rows mapped.
#[tokio::test]
async fn a_checkpoint_that_shrinks_under_the_server_does_not_end_it() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden/dsv41-tiny-a/model");
    for engram in ["mmap", "disk:0MiB", "ram"] {
        let copy = std::env::temp_dir().join(format!("tensorfold-reported-{}-{}", std::process::id(), &engram[..3]));
        std::fs::create_dir_all(&copy).unwrap();
        for entry in std::fs::read_dir(&golden).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
        }
        let demo = Demo::start(&[copy.to_str().unwrap(), "--engram", engram]);
        let body = json!({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": true});
        let before = demo.ask(&body).await;
        for entry in std::fs::read_dir(&copy).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                std::fs::File::options().write(true).open(path).unwrap().set_len(16).unwrap();
            }
        }
        if engram == "ram" {
            assert_eq!(reply(&demo.ask(&body).await), reply(&before), "nothing is read from the files any more");
            assert!(demo.client.get("/health").await.is_ok());
        } else {
            let other = json!({"prompt": [50, 60, 70, 80], "max_tokens": 4, "ignore_eos": true});
            let error = demo.client.post("/v1/completions", &other).await.expect_err(engram).to_string();
            assert!(error.contains("answered 50"), "{engram}: {error}");
            let mut health = String::new();
            for _ in 0..1000 {
                health = demo.client.get("/health").await.map_or_else(|error| error.to_string(), |_| String::new());
                if health.contains("it has 16 bytes and had") {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(
                health.contains("answered 503") && health.contains("it has 16 bytes and had"),
                "{engram}: {health}"
            );
        }
        std::fs::remove_dir_all(&copy).unwrap();
    }
}
