//! The server's outer edge: who may ask, which route answers, what every reply carries, how it all ends.

use std::future::Future;
use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tf_engine::{EngineHandle, Lifecycle};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_http::decompression::RequestDecompressionLayer;

use crate::body;
use crate::config::ServerConfig;
use crate::connections::{self, Arrival};
use crate::error::{ApiError, Window};
use crate::health::{self, Condition, Files, Rates};
use crate::ids;
use crate::info;
use crate::memory;
use crate::metrics::{self, Metrics, MetricsNames};
use crate::openai::sampling::Rules;
use crate::openai::{chat, completions, models, tokens};
use crate::openapi;
use crate::routes::Route;
use crate::work::Work;

/// How long replies that have ended may still take to reach their clients.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a drain looks whether the engine is done.
const DRAIN_POLL: Duration = Duration::from_millis(20);
const REQUEST_ID_CHARACTERS_MAX: usize = 128;

/// What every request sees once the model is there.
pub struct Server {
    pub config: Arc<ServerConfig>,
    pub engine: EngineHandle,
    pub metrics: Arc<Metrics>,
    pub rates: Rates,
    pub files: Files,
    pub work: Work,
    /// Connections that are open now.
    pub connections: Arc<AtomicU32>,
    pub started: Instant,
}

/// What every request sees from the first moment.
struct Edge {
    config: Arc<ServerConfig>,
    metrics: Arc<Metrics>,
    connections: Arc<AtomicU32>,
    server: OnceLock<Arc<Server>>,
}

/// Whether a server shall go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    No,
    /// What runs is finished within the configured time.
    Drain,
    /// What runs is cut.
    Stop,
}

impl Server {
    pub fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    /// How long a request may be.
    pub fn window(&self) -> Window {
        Window { tokens: self.engine.limits().context, most: self.config.identity.trained_context }
    }

    /// How the server is, from outside.
    pub fn condition(&self) -> Condition {
        Condition::of(&self.engine, self.config.watchdog, &self.files)
    }

    pub fn rules(&self) -> Rules {
        Rules {
            defaults: self.config.sampling,
            choices_max: self.config.choices_max,
            vocab_size: self.engine.model_limits().vocab_size,
        }
    }
}

/// Serves from the first moment: until `load` is done requests are refused as too early. Then, when `shutdown` says so,
/// drains: what runs is finished within the configured time, what is cut hears so.
///
/// # Errors
/// The model could not be loaded, or the listener failed.
pub async fn serve<E: From<io::Error>>(
    listener: TcpListener,
    config: ServerConfig,
    load: impl Future<Output = Result<EngineHandle, E>>,
    on_ready: impl FnOnce(),
    mut shutdown: watch::Receiver<Shutdown>,
) -> Result<(), E> {
    let drain_timeout = config.shutdown_timeout;
    let started = Instant::now();
    let (config, metrics) = (Arc::new(config), Arc::new(Metrics::default()));
    let connections = Arc::new(AtomicU32::new(0));
    let edge = Arc::new(Edge { config, metrics, connections: connections.clone(), server: OnceLock::new() });
    let decompression = RequestDecompressionLayer::new().pass_through_unaccepted(true);
    let app = Router::new().fallback(handle).layer(decompression).with_state(edge.clone());
    let (close, closed) = watch::channel(false);
    // While it drains the server still answers, so that clients hear why they are refused.
    let serving = tokio::spawn(connections::serve(listener, app, connections, closed));
    let loaded = tokio::select! {
        loaded = load => Some(loaded?),
        () = asked(&mut shutdown) => None,
    };
    if let Some(engine) = loaded {
        let server = Arc::new(Server {
            config: edge.config.clone(),
            engine: engine.clone(),
            metrics: edge.metrics.clone(),
            rates: Rates::default(),
            files: Files::default(),
            work: Work::new(edge.config.max_body_bytes, edge.config.work_bytes),
            connections: edge.connections.clone(),
            started,
        });
        let watches = [tokio::spawn(health::watch(server.clone())), tokio::spawn(health::watch_files(server.clone()))];
        edge.server.get_or_init(|| server);
        on_ready();
        asked(&mut shutdown).await;
        drain(&engine, drain_timeout, &shutdown).await;
        watches.iter().for_each(tokio::task::JoinHandle::abort);
    }
    let _ = close.send(true);
    match tokio::time::timeout(FLUSH_TIMEOUT, serving).await {
        Ok(Ok(result)) => Ok(result?),
        Ok(Err(error)) => Err(io::Error::other(error).into()),
        // A client that doesn't read its last bytes can't hold up the end.
        Err(_) => Ok(()),
    }
}

/// Ready when the server shall not go on. Nobody left to say so means that it shall.
async fn asked(shutdown: &mut watch::Receiver<Shutdown>) {
    if shutdown.wait_for(|shutdown| *shutdown != Shutdown::No).await.is_err() {
        std::future::pending().await
    }
}

async fn drain(engine: &EngineHandle, timeout: Duration, shutdown: &watch::Receiver<Shutdown>) {
    engine.drain();
    let is_ended = || matches!(engine.lifecycle(), Lifecycle::Stopped(_)) || *shutdown.borrow() == Shutdown::Stop;
    let deadline = tokio::time::Instant::now() + timeout;
    while !is_ended() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(DRAIN_POLL).await;
    }
    engine.stop();
}

async fn handle(State(edge): State<Arc<Edge>>, request: Request) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_string();
    let request_id = request_id(request.headers());
    let cors = allowed_origin(&edge.config, request.headers());
    let label = route_of(&edge.config, &path).map_or("unknown", |route| route.label());
    let key = key_of(&edge.config, request.headers()).unwrap_or_default().to_string();
    let mut response = match answer(&edge, request).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    };
    let headers = response.headers_mut();
    for name in ["x-request-id", "request-id"] {
        headers.insert(HeaderName::from_static(name), request_id.clone());
    }
    let milliseconds = began.elapsed().as_millis() as u64;
    headers.insert(HeaderName::from_static("openai-processing-ms"), HeaderValue::from(milliseconds));
    if let Some(origin) = cors {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        headers.append(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id"));
    }
    edge.metrics.answered(label, response.status().as_u16(), &key);
    if edge.config.access_log {
        let id = request_id.to_str().unwrap_or_default();
        tracing::info!(id, %method, path, status = response.status().as_u16(), milliseconds, key, "request");
    }
    response
}

/// What a path means below the configured prefix.
fn route_of(config: &ServerConfig, path: &str) -> Option<Route> {
    let below = path.strip_prefix(config.api_prefix.trim_end_matches('/'))?;
    if below.is_empty() || below.starts_with('/') { Route::find(below) } else { None }
}

async fn answer(edge: &Arc<Edge>, request: Request) -> Result<Response, ApiError> {
    let config = &edge.config;
    check_host(config, request.headers(), request.uri().host())?;
    let path = request.uri().path();
    let method = request.method().clone();
    if method == Method::OPTIONS {
        return Ok(preflight(config, request.headers()));
    }
    let route = route_of(config, path);
    let has_key = config.api_keys.is_empty() || key_of(config, request.headers()).is_some();
    let is_open =
        |route: &Route| route.is_open() || config.metrics_open && matches!(route, Route::Metrics | Route::Memory);
    if !has_key && !route.as_ref().is_some_and(is_open) {
        return Err(ApiError::invalid_key());
    }
    let Some(route) = route else { return Err(ApiError::unknown_route(path)) };
    if let Route::Unsupported(reason) = route {
        return Err(ApiError::unsupported_route(reason));
    }
    let is_reading = method == Method::GET || method == Method::HEAD;
    let allowed = if route.allow().starts_with("POST") { method == Method::POST } else { is_reading };
    if !allowed {
        return Err(ApiError::method_not_allowed(method.as_str(), path, route.allow()));
    }

    let response = match route {
        Route::Root => json_response(&json!({"name": "tensorfold", "version": config.identity.version})),
        Route::Version => json_response(&json!({"version": config.identity.version, "commit": config.identity.commit})),
        Route::Metrics => metrics_response(edge)?,
        Route::OpenApi => json_response(&openapi::document(config)),
        route => match edge.server.get() {
            Some(server) => answer_loaded(server, route, request, has_key).await?,
            None => too_early(&route)?,
        },
    };
    Ok(if method == Method::HEAD { without_body(response) } else { response })
}

/// While the model is loading.
fn too_early(route: &Route) -> Result<Response, ApiError> {
    match route {
        Route::Health | Route::Ready => Ok(refusal(Condition::Loading, None)),
        Route::Ping => Ok(empty(Condition::Loading)),
        _ => Err(ApiError::loading()),
    }
}

fn metrics_response(edge: &Edge) -> Result<Response, ApiError> {
    if edge.config.metrics == MetricsNames::Off {
        return Err(ApiError::unsupported_route(
            "Figures are off; start the server with --metrics on to have them here.",
        ));
    }
    let server = edge.server.get();
    let condition = server.map_or(Condition::Loading, |server| server.condition());
    let page = metrics::page(&edge.config, server.map(|server| &server.engine), &edge.metrics, condition.name());
    let mut response = Response::new(Body::from(page));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
    Ok(response)
}

async fn answer_loaded(
    server: &Arc<Server>,
    route: Route,
    request: Request,
    has_key: bool,
) -> Result<Response, ApiError> {
    let config = &server.config;
    let (context, vocab_size) = (server.engine.limits().context, server.engine.model_limits().vocab_size);
    Ok(match route {
        Route::Memory => json_response(&memory::report(config, &server.engine)),
        Route::TokenizerInfo => json_response(&tokens::info(&config.tokenizer)),
        Route::Tokenize | Route::Detokenize | Route::ApplyTemplate => {
            let body = body::read(server, &route, request).await?;
            let config = config.clone();
            let answered = body.read_by(move |body| match route {
                Route::Tokenize => tokens::tokenize(&config, body, context),
                Route::Detokenize => tokens::detokenize(&config, body),
                _ => tokens::apply_template(&config, body),
            });
            json_response(&answered.await?)
        }
        Route::Health => match server.condition() {
            Condition::Ok => {
                if has_key && resets_peak(request.uri().query()) {
                    memory::reset_peak();
                }
                json_response(&health::report(server, has_key))
            }
            condition => refusal(condition, server.files.fault().filter(|_| has_key)),
        },
        Route::Ready | Route::Ping => match readiness(server) {
            Condition::Ok if route == Route::Ping => Response::new(Body::empty()),
            Condition::Ok => json_response(&json!({"status": "ready"})),
            condition if route == Route::Ping => empty(condition),
            condition => refusal(condition, server.files.fault().filter(|_| has_key)),
        },
        Route::Models => json_response(&models::list(config, context, vocab_size)),
        Route::Model(id) => json_response(&models::one(config, &id, context, vocab_size)?),
        Route::ServerInfo => json_response(&info::report(server)),
        Route::Chat => {
            check_accepting(server)?;
            let arrival = arrival_of(&request, server);
            let body = body::read(server, &route, request).await?;
            chat::answer(server.clone(), body, arrival).await?
        }
        Route::Completions => {
            check_accepting(server)?;
            let arrival = arrival_of(&request, server);
            let body = body::read(server, &route, request).await?;
            completions::answer(server.clone(), body, arrival).await?
        }
        // Answered before the model is asked for.
        Route::Root | Route::Version | Route::Metrics | Route::OpenApi => {
            return Err(ApiError::internal("a route has two answers"));
        }
        Route::Unsupported(reason) => return Err(ApiError::unsupported_route(reason)),
    })
}

/// The request's connection, one of its own where the request came another way, and the time now.
fn arrival_of(request: &Request, server: &Server) -> Arrival {
    Arrival { peer: request.extensions().get().cloned().unwrap_or_default(), at: server.engine.now() }
}

fn resets_peak(query: Option<&str>) -> bool {
    query.is_some_and(|query| query.split('&').any(|pair| pair == "reset_peak=1" || pair == "reset_peak=true"))
}

/// A whole reply.
pub fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn refusal(condition: Condition, fault: Option<String>) -> Response {
    let mut response = json_response(&condition.refusal(fault));
    *response.status_mut() = condition.status();
    response
}

fn empty(condition: Condition) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = condition.status();
    response
}

/// The head of the same reply, with the length that its body would have.
fn without_body(response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    Response::from_parts(parts, Body::empty())
}

/// Whether a request would be taken now.
fn readiness(server: &Server) -> Condition {
    let condition = server.condition();
    let (stats, limits) = (server.engine.stats(), server.engine.limits());
    let is_full = limits.queue > 0 && stats.waiting >= limits.queue;
    if condition == Condition::Ok && is_full { Condition::Full } else { condition }
}

fn check_accepting(server: &Server) -> Result<(), ApiError> {
    match server.condition() {
        // An engine that has stopped says why when it is asked, and what could not be read may be there again.
        Condition::Ok | Condition::Full | Condition::Failed | Condition::Unreadable => Ok(()),
        Condition::Changed => Err(ApiError::checkpoint_changed(&server.files.fault().unwrap_or_default())),
        Condition::Loading => Err(ApiError::loading()),
        Condition::Draining => Err(ApiError::draining()),
        Condition::Stalled => Err(ApiError::stalled()),
    }
}

fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get("x-request-id").filter(|value| {
        let text = value.to_str().unwrap_or_default();
        (1..=REQUEST_ID_CHARACTERS_MAX).contains(&text.len())
    });
    let made = || HeaderValue::from_str(&ids::id("req_", 24)).unwrap_or(HeaderValue::from_static("req_"));
    given.cloned().unwrap_or_else(made)
}

fn check_host(config: &ServerConfig, headers: &HeaderMap, uri_host: Option<&str>) -> Result<(), ApiError> {
    let Some(allowed) = &config.allowed_hosts else { return Ok(()) };
    // A browser always names the host, and only one could be led here under a foreign name.
    if uri_host.is_none() && !headers.contains_key(header::HOST) {
        return Ok(());
    }
    let header = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let host = uri_host.or(header).unwrap_or_default();
    let name = host_name(host);
    let is_allowed = allowed.iter().any(|allowed| allowed == "*" || host_name(allowed).eq_ignore_ascii_case(name));
    if is_allowed { Ok(()) } else { Err(ApiError::host_not_allowed(host)) }
}

/// A host without its port; an address in brackets stays whole.
fn host_name(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None if host.matches(':').count() == 1 => host.split(':').next().unwrap_or(host),
        None => host,
    }
}

/// The label of the key that the request carries, where it is one of the server's.
fn key_of<'a>(config: &'a ServerConfig, headers: &HeaderMap) -> Option<&'a str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| value.split_once(' ')).filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
    let plain = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    let given = [bearer.map(|(_, key)| key.trim()), plain];
    // Every key is compared in full, so that the time taken says nothing about any of them.
    let mut found = None;
    for given in given.into_iter().flatten() {
        for key in &config.api_keys {
            if equal_in_constant_time(given.as_bytes(), key.key.as_bytes()) {
                found = Some(key.label.as_str());
            }
        }
    }
    found
}

fn equal_in_constant_time(left: &[u8], right: &[u8]) -> bool {
    use sha2::{Digest, Sha256};
    let (left, right) = (Sha256::digest(left), Sha256::digest(right));
    left.iter().zip(&right).fold(0, |difference, (left, right)| difference | (left ^ right)) == 0
}

/// The origin to allow in a reply, where the browser's may read it.
fn allowed_origin(config: &ServerConfig, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let text = origin.to_str().ok()?;
    let is_allowed = match &config.allowed_origins {
        Some(allowed) => allowed.iter().any(|allowed| allowed == "*" || allowed == text),
        None => {
            let host = text.split_once("://").map_or(text, |(_, host)| host);
            matches!(host_name(host), "localhost" | "127.0.0.1" | "::1")
        }
    };
    is_allowed.then(|| origin.clone())
}

fn preflight(config: &ServerConfig, headers: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    if allowed_origin(config, headers).is_some() {
        let reply = response.headers_mut();
        reply
            .insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD, POST, DELETE, OPTIONS"));
        reply.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
        if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            reply.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_compared_without_its_port() {
        let cases = [
            ("localhost:8080", "localhost"),
            ("localhost", "localhost"),
            ("[::1]:8080", "::1"),
            ("[::1]", "::1"),
            ("::1", "::1"),
            ("127.0.0.1:1", "127.0.0.1"),
        ];
        for (host, name) in cases {
            assert_eq!(host_name(host), name);
        }
    }
}
