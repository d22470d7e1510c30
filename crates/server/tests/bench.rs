//! The measuring client against a real server: what it counts as equal, unequal, failed, unmeasured, cold and reused.

mod common;

use std::time::Duration;

use common::{MODEL, Setup, TestServer, start};
use tf_bench::concurrent::{self, Plan};
use tf_bench::record::CacheState;
use tf_bench::serve::Arrival;
use tf_bench::workload::{self, Numbers, Settings};
use tf_bench::{Check, Client, Record, cache, load, serve};

fn client(server: &TestServer) -> Client {
    Client::new(&format!("http://{}/v1", server.address)).expect("an address")
}

fn plan() -> Plan {
    Plan {
        levels: vec![1, 6],
        temperatures: vec![1.0, 0.0],
        repetitions: 2,
        settings: Settings { seed: 5, tokens: 24, temperature: 1.0, mixed: true, same_prompt: false, no_seed: false },
        stagger: Duration::from_millis(1),
        alone: true,
        serial: true,
    }
}

async fn measure(server: &TestServer, plan: &Plan) -> Record {
    let mut record = Record::default();
    concurrent::run(&client(server), plan, &mut record).await;
    record
}

fn counts(check: &Check) -> (u64, u64, u64, u64) {
    (check.equal, check.unequal, check.failed, check.unmeasured)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_are_the_same_together_alone_and_without_drafts() {
    let server = start(Setup::default()).await;
    let record = measure(&server, &plan()).await;
    // Two levels, two temperatures, two repetitions.
    let replies = (1 + 6) * 2 * 2;
    assert_eq!(record.checks.iter().map(counts).collect::<Vec<_>>(), [(replies, 0, 0, 0); 3], "{}", record.verdict());
    assert_eq!(record.passes(), Some(true));
    assert_eq!(record.replies.len() as u64, replies);
    for row in &record.rows {
        assert!(row.samples.iter().all(|sample| *sample > 0.0), "{row:?}");
        // A short reply may come in one piece, and then it has no rate.
        let has_rate = row.name.contains("while all write") || row.name.contains("each stream");
        assert!(!row.samples.is_empty() || has_rate, "{row:?}");
    }
    // The check isn't empty: there were drafts, and without them there are none.
    // A reply ends before its round's counters are published.
    server.until("the end of the last round", |stats| stats.round_since.is_none()).await;
    let drafted = server.engine.stats().drafted;
    assert!(drafted > 0);
    let request = workload::requests(&plan().settings, 0, 1).remove(0);
    let reply = load::ask(&client(&server), &request.undrafted(), std::time::Instant::now()).await;
    assert_eq!((server.engine.stats().drafted, reply.drafted), (drafted, Some(0)));

    // The same requests give the same digest, others another.
    let again = Plan { alone: false, serial: false, ..plan() };
    assert_eq!(measure(&server, &again).await.digest, record.digest);
    let settings = Settings { seed: 6, ..again.settings.clone() };
    assert_ne!(measure(&server, &Plan { settings, ..again.clone() }).await.digest, record.digest);
    let settings = Settings { no_seed: true, ..again.settings.clone() };
    assert!(measure(&server, &Plan { settings, ..again }).await.passes().expect("checks"));
    server.stop().await;
}

#[tokio::test]
async fn a_failed_forward_is_a_failed_reply_and_fails_the_run() {
    let server = start(Setup::default()).await;
    server.gate.is_failing.store(true, std::sync::atomic::Ordering::SeqCst);
    let one = Plan { levels: vec![1], temperatures: vec![1.0], repetitions: 1, ..plan() };
    let record = measure(&server, &one).await;
    assert_eq!(record.checks.iter().map(counts).collect::<Vec<_>>(), [(0, 0, 1, 0); 3], "{}", record.verdict());
    assert_eq!(record.passes(), Some(false));
    assert!(record.verdict().contains("The engine could not finish this reply"), "{}", record.verdict());
    server.stop().await;
}

/// A server of another make: it answers, and says nothing of tokens.
async fn silent_server() -> Client {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut buffer = vec![0; 1 << 16];
            let _ = stream.read(&mut buffer).await;
            let events = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n\
                          data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
            let _ = stream.write_all(format!("{head}{events}").as_bytes()).await;
        }
    });
    Client::new(&address.to_string()).expect("an address")
}

#[tokio::test]
async fn what_a_server_does_not_say_never_passes() {
    let client = silent_server().await;
    let mut record = Record::default();
    let one = Plan { levels: vec![2], temperatures: vec![1.0], repetitions: 1, ..plan() };
    concurrent::run(&client, &one, &mut record).await;
    assert_eq!(record.checks.iter().map(counts).collect::<Vec<_>>(), [(0, 0, 0, 2); 3], "{}", record.verdict());
    assert_eq!(record.passes(), Some(false));

    let mut record = Record::default();
    let plan = cache::Plan {
        request: workload::of_ids(&[1, 2], 2, 1),
        repeats: 1,
        streams: 1,
        expected_prompt_tokens: Some(2),
        require_cold: true,
        require_reuse: true,
    };
    cache::run(&client, &plan, &mut record).await;
    assert!(record.replies.iter().all(|reply| reply.state == CacheState::Unverified && reply.equal != Some(true)));
    assert!(record.checks.iter().all(|check| !check.passes() && check.equal == 0), "{}", record.verdict());
    let mut names: Vec<&str> = record.checks.iter().map(|check| check.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["cache state as required", "equal to the first", "measured", "prompt length as expected"]);
}

#[tokio::test]
async fn a_prompt_again_and_again_is_the_same_reply() {
    let server = start(Setup::default()).await;
    let ids = workload::ids(&mut Numbers::new(3), u64::from(server.engine.model_limits().vocab_size), 300);
    let plan = cache::Plan {
        request: workload::of_ids(&ids, 16, 9),
        repeats: 2,
        streams: 3,
        expected_prompt_tokens: Some(300),
        require_cold: true,
        require_reuse: false,
    };
    let mut record = Record::default();
    cache::run(&client(&server), &plan, &mut record).await;
    assert_eq!(record.passes(), Some(true), "{}", record.verdict());
    let names: Vec<&str> = record.replies.iter().map(|reply| reply.name.as_str()).collect();
    assert_eq!(names, ["first", "repeated 1", "repeated 2", "concurrent 1", "concurrent 2", "concurrent 3"]);
    assert_eq!(record.replies[0].state, CacheState::Cold);
    assert!(record.replies[1..].iter().all(|reply| reply.equal == Some(true)));
    // A length that isn't the expected one fails the run.
    let mut record = Record::default();
    cache::run(&client(&server), &cache::Plan { expected_prompt_tokens: Some(299), ..plan }, &mut record).await;
    assert_eq!(record.passes(), Some(false));
    server.stop().await;
}

#[tokio::test]
async fn a_load_has_its_figures() {
    let server = start(Setup::default()).await;
    let models = client(&server).get("/v1/models").await.expect("models");
    assert_eq!(models["data"][0]["id"], MODEL);
    let requests: Vec<_> = (0..9).map(|index| workload::of_ids(&[5, 6, 7 + index], 12, u64::from(index))).collect();
    for arrival in [Arrival::Concurrency(3), Arrival::Rate { per_second: 500.0, seed: 1 }] {
        let mut record = Record::default();
        serve::run(&client(&server), &requests, arrival, &mut record).await;
        assert_eq!(record.passes(), Some(true), "{}", record.verdict());
        let figure = |name: &str| record.rows.iter().find(|row| row.name == name).expect("a row").samples.clone();
        assert_eq!(figure("time to first token").len(), 9);
        assert_eq!(figure("latency").len(), 9);
        assert!(!figure("inter-token gap").is_empty());
        assert_eq!((figure("prompt tokens"), figure("reply tokens")), (vec![27.0], vec![108.0]));
        assert!(figure("accepted drafts")[0] > 0.0 && figure("accepted drafts")[0] < 1.0);
    }
    server.stop().await;
}
