//! A server on loopback with the history model behind it, and a client that sees every byte.
#![allow(dead_code)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;
use tf_engine::model::{
    DraftRequest, Drafts, Drawn, ForwardError, Model, ModelLimits, RoundPlan, SequenceView, SlotIndex,
};
use tf_engine::testing::random::mix;
use tf_engine::testing::{Drafter, HistoryModel, HistoryOptions};
use tf_engine::{Clock, DraftPolicy, EngineHandle, EngineLimits, WallClock};
use tf_server::{
    Identity, MetricsNames, ReasoningField, ReasoningLimits, SamplingDefaults, Seeds, ServerConfig, Shutdown,
};
use tf_text::TokenId;
use tf_text::chat::Marker;
use tf_text::tokenizer::Tokenizer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{oneshot, watch};

pub const MODEL: &str = "history";

pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load = || {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-dsv41/tokenizer.json");
        let bytes = std::fs::read(path).expect("the demo checkpoint is part of the repository");
        Arc::new(Tokenizer::from_bytes(&bytes).expect("the demo tokenizer is whole"))
    };
    TOKENIZER.get_or_init(load).clone()
}

/// The ids of a reply written with its markers, end token included.
pub fn script(text: &str) -> Vec<TokenId> {
    let tokenizer = tokenizer();
    let mut ids = tokenizer.encode_with_markers(text).expect("scripts can be encoded");
    ids.push(tokenizer.markers().id(Marker::EndOfSentence));
    ids
}

/// A history model that computes only while its gate is open.
pub struct Gated {
    model: HistoryModel,
    pub gate: Arc<Gate>,
}

#[derive(Default)]
pub struct Gate {
    is_closed: AtomicBool,
    /// The next forward fails.
    pub is_failing: AtomicBool,
    /// Forwards can't read what they need.
    pub is_unreadable: AtomicBool,
    thread: std::sync::Mutex<()>,
    changed: std::sync::Condvar,
}

impl Gate {
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    pub fn open(&self) {
        let _guard = self.thread.lock().expect("no test panics while it holds the gate");
        self.is_closed.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut guard = self.thread.lock().expect("no test panics while it holds the gate");
        while self.is_closed.load(Ordering::SeqCst) {
            guard = self.changed.wait(guard).expect("no test panics while it holds the gate");
        }
    }
}

impl Model for Gated {
    type Snapshot = <HistoryModel as Model>::Snapshot;

    fn limits(&self) -> ModelLimits {
        self.model.limits()
    }

    fn forward(&mut self, plan: &RoundPlan, views: &[SequenceView<'_>], drawn: &mut Drawn) -> Result<(), ForwardError> {
        self.gate.pass();
        if self.gate.is_failing.swap(false, Ordering::SeqCst) {
            return Err(ForwardError::Failed("as planned".to_string()));
        }
        if self.gate.is_unreadable.load(Ordering::SeqCst) {
            return Err(ForwardError::Unreadable("as planned".to_string()));
        }
        self.model.forward(plan, views, drawn)
    }

    fn keep(&mut self, slot: SlotIndex, length: u32) {
        self.model.keep(slot, length);
    }

    fn draft(&mut self, wanted: &[DraftRequest<'_>], drafts: &mut Drafts) -> Result<(), ForwardError> {
        self.model.draft(wanted, drafts)
    }

    fn snapshot(&mut self, slot: SlotIndex, position: u32) -> Self::Snapshot {
        self.model.snapshot(slot, position)
    }

    fn snapshot_reach(&self) -> u32 {
        self.model.snapshot_reach()
    }

    fn can_resume(&self, snapshot: &Self::Snapshot, prompt_end: u32) -> bool {
        self.model.can_resume(snapshot, prompt_end)
    }

    fn can_continue(&self, slot: SlotIndex, prompt_end: u32) -> bool {
        self.model.can_continue(slot, prompt_end)
    }

    fn snapshot_bytes(&self, snapshot: &Self::Snapshot) -> u64 {
        self.model.snapshot_bytes(snapshot)
    }

    fn snapshot_pages(&self, snapshot: &Self::Snapshot, pages: &mut Vec<u32>) {
        self.model.snapshot_pages(snapshot, pages);
    }

    fn pages(&self) -> tf_engine::model::PageCounts {
        self.model.pages()
    }

    fn pages_needed(&self, slot: SlotIndex, end: u32) -> u32 {
        self.model.pages_needed(slot, end)
    }

    fn encode(&mut self, snapshot: &Self::Snapshot, bytes: &mut Vec<u8>) {
        self.model.encode(snapshot, bytes);
    }

    fn read_pages(&mut self, snapshot: &Self::Snapshot, pages: std::ops::Range<u32>, bytes: &mut Vec<u8>) -> bool {
        self.model.read_pages(snapshot, pages, bytes)
    }

    fn decode(
        &mut self,
        bytes: &[u8],
        base: Option<(&Self::Snapshot, u32)>,
    ) -> Result<Self::Snapshot, tf_engine::model::DecodeError> {
        self.model.decode(bytes, base)
    }

    fn write_pages(&mut self, snapshot: &Self::Snapshot, first: u32, bytes: &[u8]) -> bool {
        self.model.write_pages(snapshot, first, bytes)
    }

    fn restore(&mut self, slot: SlotIndex, snapshot: &Self::Snapshot) {
        self.model.restore(slot, snapshot);
    }

    fn release(&mut self, slot: SlotIndex) {
        self.model.release(slot);
    }
}

/// How a test server differs from the usual one.
pub struct Setup {
    pub model: HistoryOptions,
    pub limits: fn(&mut EngineLimits),
    pub config: fn(&mut ServerConfig),
    pub clock: Arc<dyn Clock>,
}

impl Default for Setup {
    fn default() -> Self {
        let model = HistoryOptions {
            limits: ModelLimits {
                vocab_size: tokenizer().vocab_size() as u32,
                context: 1 << 20,
                slots: 4,
                round_rows: 256,
                draft_block: 5,
            },
            seed: 3,
            drafter: Drafter::Mixed,
            ..HistoryOptions::default()
        };
        Setup { model, limits: |_| {}, config: |_| {}, clock: Arc::new(WallClock::new()) }
    }
}

impl Setup {
    /// Replies that follow these texts, one a prompt in the order of first sight.
    pub fn scripted(texts: &[&str]) -> Self {
        let mut setup = Setup::default();
        setup.model.scripts = texts.iter().map(|text| script(text)).collect();
        setup
    }
}

pub struct TestServer {
    pub address: std::net::SocketAddr,
    pub engine: EngineHandle,
    pub gate: Arc<Gate>,
    shutdown: watch::Sender<Shutdown>,
    load: Option<oneshot::Sender<()>>,
    serving: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// A server that is ready.
pub async fn start(setup: Setup) -> TestServer {
    let (mut server, ready) = start_loading(setup).await;
    server.finish_loading();
    ready.await.expect("nothing keeps a test server from being ready");
    server
}

/// A server whose model is loaded when the test says so; ready when the receiver hears it.
pub async fn start_loading(setup: Setup) -> (TestServer, oneshot::Receiver<()>) {
    let gate = Arc::new(Gate::default());
    let mut limits = EngineLimits::for_model(&setup.model.limits);
    limits.draft = DraftPolicy { max: 5, adaptive: false, ..DraftPolicy::default() };
    (setup.limits)(&mut limits);
    let model = Gated { model: HistoryModel::new(setup.model), gate: gate.clone() };
    let (engine, thread) = tf_engine::spawn(model, limits, setup.clock).expect("test limits fit");
    let mut config = ServerConfig {
        names: vec![MODEL.to_string(), "alias".to_string()],
        any_model: false,
        identity: Identity {
            version: "0.0.0".to_string(),
            commit: "none".to_string(),
            backend: "history".to_string(),
            numerics: "release".to_string(),
            fingerprint: "tf-0000000000000000".to_string(),
            created: 1,
            trained_context: 1 << 20,
            size_bytes: None,
        },
        tokenizer: tokenizer(),
        chat: tf_text::chat::openai::Defaults::default(),
        sampling: SamplingDefaults { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 },
        max_tokens: Some(60),
        choices_max: 16,
        reasoning_field: ReasoningField::ReasoningContent,
        reasoning: ReasoningLimits::default(),
        seeds: Seeds {
            of_prompt: Arc::new(|tokens| tokens.iter().fold(1, |seed, &token| mix(seed ^ u64::from(token)))),
            of_choice: |seed, choice| if choice == 0 { seed } else { mix(seed ^ u64::from(choice)) },
        },
        api_keys: Vec::new(),
        allowed_origins: None,
        allowed_hosts: Some(vec!["localhost".to_string(), "127.0.0.1".to_string(), "[::1]".to_string()]),
        api_prefix: String::new(),
        max_body_bytes: 1 << 20,
        work_bytes: 64 << 20,
        files: Arc::new(|| Ok(())),
        sse_ping: Duration::from_secs(5),
        shutdown_timeout: Duration::from_secs(30),
        access_log: true,
        watchdog: Duration::from_secs(60),
        metrics: MetricsNames::Own,
        metrics_open: false,
        memory_plan: vec![("weights", 1000), ("kv", 24)],
        memory_plan_total: 1024,
        info: serde_json::json!({"build": {"version": "test"}}),
    };
    (setup.config)(&mut config);
    let socket = small_socket();
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("loopback has a free port");
    let listener: TcpListener = socket.listen(64).expect("a bound socket can listen");
    let address = listener.local_addr().expect("the listener is bound");
    let (shutdown, stopping) = watch::channel(Shutdown::No);
    let (load, loading) = oneshot::channel();
    let (on_ready, ready) = oneshot::channel();
    let loaded = engine.clone();
    let load_model = async move {
        let _ = loading.await;
        Ok::<_, std::io::Error>(loaded)
    };
    let on_ready = move || {
        let _ = on_ready.send(());
    };
    let serving = tokio::spawn(tf_server::serve(listener, config, load_model, on_ready, stopping));
    let (load, serving, thread) = (Some(load), Some(serving), Some(thread));
    (TestServer { address, engine, gate, shutdown, load, serving, thread }, ready)
}

fn small_socket() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("sockets can be made");
    socket.set_recv_buffer_size(16 * 1024).expect("buffers can be small");
    socket.set_send_buffer_size(16 * 1024).expect("buffers can be small");
    socket
}

pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("replies are UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The data of each event of a stream; comments left out.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        events.map(str::to_string).collect()
    }
}

impl TestServer {
    pub async fn connect(&self) -> TcpStream {
        // A small buffer, so that a client that doesn't read is soon noticed.
        let socket = small_socket();
        socket.connect(self.address).await.expect("the server listens")
    }

    /// Sends a request without waiting for its answer.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut stream = self.connect().await;
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            head += "host: localhost\r\n";
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() {
            head += &format!("content-length: {}\r\n", body.len());
        }
        head += "\r\n";
        stream.write_all(head.as_bytes()).await.expect("the server reads");
        // A server may refuse before it has read all of a body.
        let _ = stream.write_all(body).await;
        stream
    }

    pub async fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        read_answer(self.send(method, path, headers, body).await).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, &[], b"").await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        self.call("POST", path, &[("content-type", "application/json")], body.as_bytes()).await
    }

    pub async fn post_open(&self, path: &str, body: &Value) -> TcpStream {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes()).await
    }

    /// Waits until the engine's counters satisfy `condition`.
    pub async fn until(&self, what: &str, condition: impl Fn(&tf_engine::EngineStats) -> bool) {
        for _ in 0..2000 {
            if condition(&self.engine.stats()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("waited in vain for {what}: {:?}", self.engine.stats());
    }

    pub fn finish_loading(&mut self) {
        if let Some(load) = self.load.take() {
            let _ = load.send(());
        }
    }

    pub fn begin_shutdown(&mut self) {
        self.shutdown.send_replace(Shutdown::Drain);
    }

    pub fn stop_now(&mut self) {
        self.shutdown.send_replace(Shutdown::Stop);
    }

    /// Shuts down and waits for server and engine.
    pub async fn stop(mut self) {
        self.begin_shutdown();
        let serving = self.serving.take().expect("a server is stopped once");
        serving.await.expect("the server does not break down").expect("the listener does not fail");
        // A server that was ended while it loaded never had the engine.
        self.engine.stop();
        let thread = self.thread.take().expect("a server is stopped once");
        tokio::task::spawn_blocking(|| thread.join()).await.expect("joins").expect("the engine does not break down");
    }
}

pub async fn read_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A refused body may end in a reset after the answer.
    let _ = stream.read_to_end(&mut bytes).await;
    parse_answer(&bytes)
}

pub fn parse_answer(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head in {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_string()))
        .collect();
    let mut rest = &bytes[end + 4..];
    let is_chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let mut body = Vec::new();
    if is_chunked {
        while let Some(line_end) = rest.windows(2).position(|window| window == b"\r\n") {
            let size = usize::from_str_radix(&String::from_utf8_lossy(&rest[..line_end]), 16).expect("a chunk size");
            let from = line_end + 2;
            if size == 0 || rest.len() < from + size {
                break;
            }
            body.extend_from_slice(&rest[from..from + size]);
            rest = &rest[from + size + 2..];
        }
    } else {
        body.extend_from_slice(rest);
    }
    Answer { status: status.expect("a status line"), headers, body }
}
