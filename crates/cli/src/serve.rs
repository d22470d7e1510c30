//! `serve`: checks, opens the socket, loads, says that it is ready, and drains when it is asked to end.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tf_engine::disk::{Disk, Folder};
use tf_engine::{EngineHandle, WallClock};
use tf_model::deepseek_v41::DeepseekV41;
use tf_model::deepseek_v41::engram_rows::check_files;
use tf_numerics::draw;
use tf_server::{ApiKey, FilesCheck, MetricsNames, Seeds, ServerConfig, Shutdown};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::arguments::{Arguments, Mistakes};
use crate::device;
use crate::disk;
use crate::failure::Failure;
use crate::load::{self, Checked};
use crate::logs::say;
use crate::options::Environment;
use crate::resolve::{self, show_bytes};

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    crate::logs::start(arguments);
    let (located, _) = load::located(arguments, environment, false)?;
    let address = address(arguments)?;
    let checked = load::checked(&located, arguments)?;
    if arguments.is_on("dry-run") {
        disk::check(arguments, &checked)?;
        // Whoever could not listen now could not serve.
        std::net::TcpListener::bind(address).map_err(|error| taken(address, &error))?;
        return Ok(crate::failure::print(&plan_text(&checked))?);
    }
    let disk = disk::open(arguments, &checked)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let ended = runtime.block_on(serve(arguments, checked, disk, address));
    // Weights that are still being read don't hold up the end.
    runtime.shutdown_background();
    ended
}

async fn serve(
    arguments: &Arguments,
    checked: Checked,
    disk: Option<Disk<Folder>>,
    address: SocketAddr,
) -> Result<(), Failure> {
    // The socket opens before the weights are read, so that a taken port is known at once.
    let listener = listen(address).await?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && arguments.text("api-key").is_none() && arguments.list("api-key").is_none() {
        let text = format!(
            "warning: {address} is reachable from other machines without a key. --api-key asks for one, --host \
             127.0.0.1 keeps it here\n"
        );
        say(arguments, &text);
    }
    let config = config(arguments, &checked, address);
    say(arguments, &plan_text(&checked));
    let ready = format!("ready http://{address}{} {}", config.api_prefix, config.names[0]);
    let people = arguments.clone();
    let say_ready = move || {
        // Nobody has to listen; a closed pipe doesn't end a server.
        let mut stdout = std::io::stdout().lock();
        let _ = writeln!(stdout, "{ready}").and_then(|()| stdout.flush());
        say(&people, &format!("{ready}\n"));
    };
    let (asked, shutdown) = watch::channel(Shutdown::No);
    tokio::spawn(signals(asked, arguments.clone()));
    host(listener, config, arguments.clone(), (checked, disk), say_ready, shutdown).await
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| taken(address, &error))
}

fn taken(address: SocketAddr, error: &std::io::Error) -> Failure {
    Failure::run_time(format!("{address} can't be listened on: {error}. Choose another --port, or 0 for any free one"))
}

/// Loads beside the open socket, serves until `shutdown` says otherwise, and waits for the engine's thread.
async fn host(
    listener: TcpListener,
    config: ServerConfig,
    arguments: Arguments,
    (checked, disk): (Checked, Option<Disk<Folder>>),
    on_ready: impl FnOnce(),
    shutdown: watch::Receiver<Shutdown>,
) -> Result<(), Failure> {
    let mut thread = None;
    let load = async {
        let loaded = tokio::task::spawn_blocking(move || engine(&arguments, &checked, disk)).await;
        let (engine, joins) = loaded.map_err(|error| Failure::run_time(format!("loading broke down: {error}")))??;
        thread = Some(joins);
        Ok::<_, Failure>(engine)
    };
    tf_server::serve(listener, config, load, on_ready, shutdown).await?;
    if let Some(thread) = thread {
        let _ = tokio::task::spawn_blocking(|| thread.join()).await;
    }
    Ok(())
}

fn engine(
    arguments: &Arguments,
    checked: &Checked,
    disk: Option<Disk<Folder>>,
) -> Result<(EngineHandle, std::thread::JoinHandle<()>), Failure> {
    let model = proven(checked)?;
    let limits = resolve::engine_limits(arguments, &tf_engine::model::Model::limits(&model), &checked.loading);
    tf_engine::spawn_with_disk(model, limits, Arc::new(WallClock::new()), disk)
        .map_err(|error| Failure::run_time(error.to_string()))
}

/// The model, loaded and tried: every kernel on a known vector, then a few rows of its own.
fn proven(checked: &Checked) -> Result<DeepseekV41, Failure> {
    let started = Instant::now();
    let tried = tf_contract::self_check::try_all(&checked.device).map_err(|text| {
        let backend = device::backend(&checked.device);
        Failure::run_time(format!(
            "the self-check failed: {text}. Nothing is served from this device; `tensorfold contract --backend {backend}` \
             says more"
        ))
    })?;
    tracing::debug!(kernels = tried.kernels, elements = tried.elements, elapsed = ?started.elapsed(), "self-check");
    let mut model = checked.model(checked.loading.options.clone())?;
    model
        .self_check()
        .map_err(|fault| Failure::run_time(format!("the self-check of {} failed: {fault}", checked.name)))?;
    Ok(model)
}

/// Asks for a drain at the first SIGTERM or Ctrl-C, and for the end at the second.
async fn signals(asked: watch::Sender<Shutdown>, arguments: Arguments) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    say(&arguments, "draining: running replies are finished, no new ones are taken; once more to stop at once\n");
    asked.send_replace(Shutdown::Drain);
    tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    asked.send_replace(Shutdown::Stop);
}

/// A server of this process on a loopback port, for as long as something is measured.
pub struct Local {
    pub url: String,
    shutdown: watch::Sender<Shutdown>,
    serving: JoinHandle<Result<(), Failure>>,
}

impl Local {
    /// Loads the model and serves it. `arguments` are those of `serve`.
    ///
    /// # Errors
    /// As loading.
    pub async fn start(arguments: Arguments, checked: Checked) -> Result<Local, Failure> {
        let listener = listen(SocketAddr::new(IpAddr::from([127, 0, 0, 1]), 0)).await?;
        let address = listener.local_addr()?;
        let config = config(&arguments, &checked, address);
        let (on_ready, ready) = oneshot::channel();
        let (shutdown, asked) = watch::channel(Shutdown::No);
        let say_ready = move || {
            let _ = on_ready.send(());
        };
        let disk = disk::open(&arguments, &checked)?;
        let hosted = (checked, disk);
        let serving = tokio::spawn(async move { host(listener, config, arguments, hosted, say_ready, asked).await });
        let local = Local { url: format!("http://{address}"), shutdown, serving };
        match ready.await {
            Ok(()) => Ok(local),
            Err(_) => Err(local.stop().await.err().unwrap_or_else(|| Failure::run_time("the server never got ready"))),
        }
    }

    /// # Errors
    /// What ended the server early.
    pub async fn stop(self) -> Result<(), Failure> {
        self.shutdown.send_replace(Shutdown::Drain);
        self.serving.await.map_err(|error| Failure::run_time(format!("the server broke down: {error}")))?
    }
}

fn address(arguments: &Arguments) -> Result<SocketAddr, Failure> {
    let host = arguments.text("host").unwrap_or("127.0.0.1");
    let name = if host == "localhost" { "127.0.0.1" } else { host.trim_matches(['[', ']']) };
    let ip: IpAddr = name.parse().map_err(|_| {
        Mistakes(vec![format!(
            "--host {host} is no IP address. Use 127.0.0.1 for this machine, 0.0.0.0 for all interfaces"
        )])
    })?;
    let port = arguments.count("port").unwrap_or(8080) as u16;
    Ok(SocketAddr::new(ip, port))
}

fn config(arguments: &Arguments, checked: &Checked, address: SocketAddr) -> ServerConfig {
    let names = match arguments.list("name") {
        Some(names) if !names.is_empty() => names.to_vec(),
        _ => arguments.text("name").map_or_else(|| vec![checked.name.clone()], |name| vec![name.to_owned()]),
    };
    let salt = arguments.text("seed-salt").unwrap_or_default().as_bytes().to_vec();
    let seconds = |flag, default| resolve::seconds(arguments, flag).unwrap_or(Duration::from_secs(default));
    let prefix = arguments.text("api-prefix").unwrap_or_default().trim_matches('/');
    // Pages of other sites can't reach a server of this machine under a name of their own.
    let own_hosts =
        || address.ip().is_loopback().then(|| ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned).to_vec());
    let metrics = match (arguments.is_on("metrics"), arguments.text("metrics-names")) {
        (false, _) => MetricsNames::Off,
        (true, Some("all")) => MetricsNames::All,
        (true, _) => MetricsNames::Own,
    };
    ServerConfig {
        names,
        any_model: arguments.is_on("any-model"),
        identity: checked.identity(),
        tokenizer: Arc::clone(&checked.tokenizer),
        chat: resolve::chat(arguments),
        sampling: resolve::sampling(arguments, &checked.generation),
        max_tokens: arguments.count("max-tokens").map(|count| count as u32),
        choices_max: arguments.count("choices").unwrap_or(16) as u32,
        reasoning_field: resolve::reasoning_field(arguments),
        reasoning: resolve::reasoning_limits(arguments),
        seeds: Seeds {
            of_prompt: Arc::new(move |prompt| draw::seed_from_prompt(prompt, &salt)),
            of_choice: draw::choice_seed,
        },
        api_keys: keys(arguments),
        allowed_origins: arguments.list("allowed-origins").map(<[String]>::to_vec),
        allowed_hosts: arguments.list("allowed-hosts").map(<[String]>::to_vec).or_else(own_hosts),
        api_prefix: if prefix.is_empty() { String::new() } else { format!("/{prefix}") },
        max_body_bytes: checked.loading.body_bytes as usize,
        work_bytes: checked.loading.work_bytes,
        files: files(checked),
        sse_ping: seconds("sse-ping", 5),
        shutdown_timeout: seconds("shutdown-timeout", 30),
        access_log: arguments.is_on("access-log"),
        watchdog: seconds("watchdog", 60),
        metrics,
        metrics_open: arguments.is_on("metrics-open"),
        memory_plan: crate::info::memory_plan(&checked.loading.plan).to_vec(),
        info: crate::info::served(checked, arguments),
        memory_plan_total: checked.loading.plan.total_bytes(),
    }
}

/// Whether the files that the model reads while it runs are what they were.
fn files(checked: &Checked) -> Arc<FilesCheck> {
    let (checkpoint, shape) = (Arc::clone(&checked.checkpoint), checked.shape.clone());
    let (place, backend) = (checked.loading.engram, checked.device.backend());
    Arc::new(move || check_files(&checkpoint, &shape, place, backend).map_err(|error| error.to_string()))
}

fn keys(arguments: &Arguments) -> Vec<ApiKey> {
    let given = arguments.list("api-key").map(<[String]>::to_vec);
    let given = given.or_else(|| arguments.text("api-key").map(|key| vec![key.to_owned()])).unwrap_or_default();
    given.into_iter().enumerate().map(|(index, key)| ApiKey { label: format!("key-{}", index + 1), key }).collect()
}

fn plan_text(checked: &Checked) -> String {
    let (plan, options) = (&checked.loading.plan, &checked.loading.options);
    let mut text = format!("{}: {}\n", checked.name, checked.fingerprint);
    for (part, bytes) in crate::info::parts(plan) {
        text += &format!("  {part:<24} {:>12}\n", show_bytes(bytes));
    }
    text += &format!(
        "  {:<24} {:>12}\n  context {} tokens, {} requests at once, {} rows a round, {} threads, {}\n",
        "in all",
        show_bytes(plan.total_bytes()),
        options.context,
        options.slots,
        options.round_rows,
        options.threads,
        options.level.name()
    );
    text
}
