//! The server's outer edge: who may ask, which route answers, what every reply carries, how it all ends.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tf_engine::{EngineHandle, Lifecycle};
use tf_text::json::Value as Json;
use tokio::net::TcpListener;
use tower_http::decompression::RequestDecompressionLayer;

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::health::{self, Condition};
use crate::ids;
use crate::openai::sampling::Rules;
use crate::openai::{chat, completions, models};
use crate::routes::Route;

/// How long replies that have ended may still take to reach their clients.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a drain looks whether the engine is done.
const DRAIN_POLL: Duration = Duration::from_millis(20);
const REQUEST_ID_CHARACTERS_MAX: usize = 128;

/// What every request sees.
pub struct Server {
    pub config: ServerConfig,
    pub engine: EngineHandle,
    started: Instant,
}

impl Server {
    pub fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    pub fn rules(&self) -> Rules {
        Rules {
            defaults: self.config.sampling,
            choices_max: self.config.choices_max,
            vocab_size: self.engine.model_limits().vocab_size,
        }
    }
}

/// Serves until `shutdown` is ready, then drains: what runs is finished within the configured time, what is cut hears so.
///
/// # Errors
/// The listener failed.
pub async fn serve(
    listener: TcpListener,
    config: ServerConfig,
    engine: EngineHandle,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let drain_timeout = config.shutdown_timeout;
    let server = Arc::new(Server { config, engine: engine.clone(), started: Instant::now() });
    let decompression = RequestDecompressionLayer::new().pass_through_unaccepted(true);
    let app = Router::new().fallback(handle).layer(decompression).with_state(server);
    let (close, closed) = tokio::sync::oneshot::channel::<()>();
    // While it drains the server still answers, so that clients hear why they are refused.
    let serving = axum::serve(listener, app).with_graceful_shutdown(async move {
        let _ = closed.await;
    });
    let serving = tokio::spawn(async move { serving.await });

    shutdown.await;
    engine.drain();
    let is_ended = || matches!(engine.lifecycle(), Lifecycle::Stopped(_));
    let deadline = tokio::time::Instant::now() + drain_timeout;
    while !is_ended() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(DRAIN_POLL).await;
    }
    engine.stop();
    let _ = close.send(());
    match tokio::time::timeout(FLUSH_TIMEOUT, serving).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => Err(io::Error::other(error)),
        // A client that doesn't read its last bytes can't hold up the end.
        Err(_) => Ok(()),
    }
}

async fn handle(State(server): State<Arc<Server>>, request: Request) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_string();
    let request_id = request_id(request.headers());
    let cors = allowed_origin(&server.config, request.headers());
    let mut response = match answer(&server, request).await {
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
    let id = request_id.to_str().unwrap_or_default();
    tracing::info!(id, %method, path, status = response.status().as_u16(), milliseconds, "request");
    response
}

async fn answer(server: &Arc<Server>, request: Request) -> Result<Response, ApiError> {
    let config = &server.config;
    check_host(config, request.headers(), request.uri().host())?;
    let path = request.uri().path();
    let below = path.strip_prefix(config.api_prefix.trim_end_matches('/'));
    let below = below.filter(|rest| rest.is_empty() || rest.starts_with('/'));
    let method = request.method().clone();
    if method == Method::OPTIONS {
        return Ok(preflight(config, request.headers()));
    }
    let route = below.and_then(Route::find);
    let has_key = has_key(config, request.headers());
    if !has_key && !route.as_ref().is_some_and(Route::is_open) {
        return Err(ApiError::invalid_key());
    }
    let Some(route) = route else { return Err(ApiError::unknown_route(path)) };
    if let Route::Unsupported(reason) = route {
        return Err(ApiError::unsupported_route(reason));
    }
    let is_reading = method == Method::GET || method == Method::HEAD;
    let allowed = if matches!(route, Route::Chat | Route::Completions) { method == Method::POST } else { is_reading };
    if !allowed {
        return Err(ApiError::method_not_allowed(method.as_str(), path, route.allow()));
    }

    let (context, vocab_size) = (server.engine.limits().context, server.engine.model_limits().vocab_size);
    let response = match route {
        Route::Root => json_response(&json!({"name": "tensorfold", "version": config.identity.version})),
        Route::Version => json_response(&json!({"version": config.identity.version, "commit": config.identity.commit})),
        Route::Health => match Condition::of(&server.engine, config.watchdog) {
            Condition::Ok => {
                let is_shown = config.api_keys.is_empty() || has_key;
                json_response(&health::report(config, &server.engine, server.started.elapsed(), is_shown))
            }
            condition => refusal(condition),
        },
        Route::Ready | Route::Ping => match readiness(server) {
            Condition::Ok if route == Route::Ping => Response::new(Body::empty()),
            Condition::Ok => json_response(&json!({"status": "ready"})),
            condition if route == Route::Ping => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = condition.status();
                response
            }
            condition => refusal(condition),
        },
        Route::Models => json_response(&models::list(config, context, vocab_size)),
        Route::Model(id) => json_response(&models::one(config, &id, context, vocab_size)?),
        Route::Chat => {
            check_accepting(server)?;
            let body = read_body(config, request).await?;
            chat::answer(server.clone(), body).await?
        }
        Route::Completions => {
            check_accepting(server)?;
            let body = read_body(config, request).await?;
            completions::answer(server.clone(), body).await?
        }
        Route::Unsupported(reason) => return Err(ApiError::unsupported_route(reason)),
    };
    Ok(if method == Method::HEAD { without_body(response) } else { response })
}

/// A whole reply.
pub fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn refusal(condition: Condition) -> Response {
    let mut response = json_response(&condition.refusal());
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
    let condition = Condition::of(&server.engine, server.config.watchdog);
    let (stats, limits) = (server.engine.stats(), server.engine.limits());
    let is_full = limits.queue > 0 && stats.waiting >= limits.queue;
    if condition == Condition::Ok && is_full { Condition::Full } else { condition }
}

fn check_accepting(server: &Server) -> Result<(), ApiError> {
    match Condition::of(&server.engine, server.config.watchdog) {
        // An engine that has stopped says why when it is asked.
        Condition::Ok | Condition::Full | Condition::Failed => Ok(()),
        Condition::Draining => Err(ApiError::draining()),
        Condition::Stalled => Err(ApiError::stalled()),
    }
}

async fn read_body(config: &ServerConfig, request: Request) -> Result<Json, ApiError> {
    let headers = request.headers();
    if let Some(kind) = headers.get(header::CONTENT_TYPE) {
        let kind = kind.to_str().unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if essence != "application/json" && !essence.ends_with("+json") {
            return Err(ApiError::unsupported_media_type(kind));
        }
    }
    // What the layer below could read is decoded and has lost this header.
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING).filter(|&encoding| encoding != "identity") {
        return Err(ApiError::unsupported_media_type(encoding.to_str().unwrap_or_default()));
    }
    let limit = config.max_body_bytes;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::too_large(limit));
    }
    let bytes: Bytes = match to_bytes(request.into_body(), limit).await {
        Ok(bytes) => bytes,
        Err(error) if is_length_limit(&error) => return Err(ApiError::too_large(limit)),
        Err(error) => return Err(ApiError::invalid_json(format!("the body could not be read: {error}"))),
    };
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| ApiError::invalid_json(format!("the body is not UTF-8 at byte {}", error.valid_up_to())))?;
    Ok(Json::parse(text).map_err(tf_text::fields::BodyError::from)?)
}

fn is_length_limit(error: &axum::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if current.to_string().contains("length limit exceeded") {
            return true;
        }
        cause = current.source();
    }
    false
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

/// Whether the request carries one of the keys, or none is needed.
fn has_key(config: &ServerConfig, headers: &HeaderMap) -> bool {
    if config.api_keys.is_empty() {
        return true;
    }
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| value.split_once(' ')).filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
    let plain = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    let given = [bearer.map(|(_, key)| key.trim()), plain];
    // Every key is compared in full, so that the time taken says nothing about any of them.
    let mut found = false;
    for given in given.into_iter().flatten() {
        for key in &config.api_keys {
            found |= equal_in_constant_time(given.as_bytes(), key.key.as_bytes());
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
