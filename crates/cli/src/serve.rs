//! `serve`: checks, opens the socket, loads, says that it is ready, and drains when it is asked to end.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tf_engine::{EngineHandle, WallClock};
use tf_numerics::draw;
use tf_server::{ApiKey, Seeds, ServerConfig};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::{Arguments, Mistakes};
use crate::failure::Failure;
use crate::load::{self, Checked};
use crate::options::Environment;
use crate::resolve::{self, show_bytes};

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    crate::logs::start(arguments);
    let (located, _) = load::located(arguments, environment, false)?;
    let address = address(arguments)?;
    let checked = load::checked(&located, arguments)?;
    if arguments.is_on("dry-run") {
        return Ok(crate::failure::print(&plan_text(&checked))?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(arguments, checked, address))
}

async fn serve(arguments: &Arguments, checked: Checked, address: SocketAddr) -> Result<(), Failure> {
    // The socket opens before the weights are read, so that a taken port is known at once.
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::run_time(format!(
            "{address} can't be listened on: {error}. Choose another --port, or 0 for any free one"
        ))
    })?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && arguments.text("api-key").is_none() && arguments.list("api-key").is_none() {
        eprintln!(
            "warning: {address} is reachable from other machines without a key. --api-key asks for one, --host 127.0.0.1 keeps it here"
        );
    }
    let mut config = config(arguments, &checked);
    if config.allowed_hosts.is_none() && address.ip().is_loopback() {
        config.allowed_hosts = Some(["localhost", "127.0.0.1", "[::1]"].map(str::to_owned).to_vec());
    }
    eprint!("{}", plan_text(&checked));
    let model = checked.model(checked.loading.options.clone())?;
    let limits = resolve::engine_limits(arguments, &tf_engine::model::Model::limits(&model), &checked.loading);
    let (engine, thread) = tf_engine::spawn(model, limits, Arc::new(WallClock::new()))
        .map_err(|error| Failure::run_time(error.to_string()))?;

    let ready = format!("ready http://{address}{} {}", config.api_prefix, config.names[0]);
    println!("{ready}");
    std::io::stdout().flush()?;
    eprintln!("{ready}");
    tf_server::serve(listener, config, engine.clone(), asked_to_end(engine)).await?;
    let _ = thread.join();
    Ok(())
}

/// Ready at the first SIGTERM or Ctrl-C; a second one stops the engine at once.
async fn asked_to_end(engine: EngineHandle) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    eprintln!("draining: running replies are finished, no new ones are taken; once more to stop at once");
    tokio::spawn(async move {
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        engine.stop();
    });
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

fn config(arguments: &Arguments, checked: &Checked) -> ServerConfig {
    let names = match arguments.list("name") {
        Some(names) if !names.is_empty() => names.to_vec(),
        _ => arguments.text("name").map_or_else(|| vec![checked.name.clone()], |name| vec![name.to_owned()]),
    };
    let salt = arguments.text("seed-salt").unwrap_or_default().as_bytes().to_vec();
    let seconds = |flag, default| resolve::seconds(arguments, flag).unwrap_or(Duration::from_secs(default));
    let prefix = arguments.text("api-prefix").unwrap_or_default().trim_matches('/');
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
        seeds: Seeds {
            of_prompt: Arc::new(move |prompt| draw::seed_from_prompt(prompt, &salt)),
            of_choice: draw::choice_seed,
        },
        api_keys: keys(arguments),
        allowed_origins: arguments.list("allowed-origins").map(<[String]>::to_vec),
        allowed_hosts: arguments.list("allowed-hosts").map(<[String]>::to_vec),
        api_prefix: if prefix.is_empty() { String::new() } else { format!("/{prefix}") },
        max_body_bytes: arguments.bytes("max-body").map_or(64 << 20, |bytes| bytes as usize),
        sse_ping: seconds("sse-ping", 5),
        shutdown_timeout: seconds("shutdown-timeout", 30),
        watchdog: seconds("watchdog", 60),
    }
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
