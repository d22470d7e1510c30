//! A body's replies on their way to the client, whole or as a stream. Both come from the same steps, so a stream, folded,
//! is the whole reply.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use futures_util::stream::unfold;
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::connections::Peer;
use crate::error::ApiError;
use crate::generate::{Choice, Step, failure, next_step};
use crate::http::Server;
use crate::openai::blocks::{self, Facts};

/// How a route writes its choices.
pub trait Shape: Send + 'static {
    /// Entries of `choices` that a stream begins with.
    fn opening(&mut self, choices: &[Choice]) -> Vec<Value>;

    /// Entries of `choices` for one step, one a chunk; the choice's last one is its finish.
    fn chunks(&mut self, step: &Step, choices: &[Choice]) -> Vec<Value>;

    /// Entries of `choices` of the whole reply, from all steps.
    fn whole(&mut self, steps: Vec<Step>, choices: &[Choice]) -> Vec<Value>;
}

/// The replies to one body.
pub struct Session<S> {
    pub server: Arc<Server>,
    pub facts: Facts,
    pub choices: Vec<Choice>,
    pub shape: S,
    /// Keys beside `choices`: in a whole reply, or on the first chunk.
    pub extra: Map<String, Value>,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub peer: Peer,
}

/// Longest silence towards a client of whom only a write tells whether it is there.
const SILENCE_UNSURE: Duration = Duration::from_millis(100);

impl<S: Shape> Session<S> {
    /// Waits for all replies.
    ///
    /// # Errors
    /// The first reply that was broken off.
    pub async fn whole(mut self) -> Result<Value, ApiError> {
        let mut steps = Vec::new();
        while let Some(step) = next_step(&mut self.choices, &self.server.config.tokenizer).await {
            if let Some(error) = failure(&self.choices) {
                return Err(error);
            }
            steps.push(step);
        }
        let config = &self.server.config;
        let mut reply = blocks::head(config, &self.facts, self.facts.object);
        reply.insert("choices".into(), self.shape.whole(steps, &self.choices).into());
        reply.insert("usage".into(), blocks::usage(&self.facts, &self.choices));
        reply.extend(std::mem::take(&mut self.extra));
        blocks::add_extensions(config, &self.facts, &self.choices, &mut reply);
        Ok(Value::Object(reply))
    }

    /// Answers with a stream, as soon as a reply has its slot or has waited for one ping.
    ///
    /// # Errors
    /// A reply that was broken off before then: the client gets a plain status.
    pub async fn stream(mut self) -> Result<Response, ApiError> {
        let ping = self.server.config.sse_ping;
        let head_due = Instant::now() + ping;
        let mut early = Vec::new();
        while self.choices.iter().all(|choice| !choice.has_started && choice.ended.is_none()) {
            let step = next_step(&mut self.choices, &self.server.config.tokenizer);
            match tokio::time::timeout_at(head_due, step).await {
                Ok(Some(step)) => early.push(step),
                Ok(None) | Err(_) => break,
            }
        }
        if let Some(error) = failure(&self.choices) {
            return Err(error);
        }
        let mut stream =
            Stream { session: self, queue: VecDeque::new(), is_over: false, last_sent: Instant::now(), ping };
        stream.open();
        for step in early {
            stream.step(&step);
        }
        let body = unfold(stream, |mut stream| async move {
            let bytes = stream.next().await?;
            Some((Ok::<Bytes, Infallible>(bytes), stream))
        });
        let mut response = Response::new(Body::from_stream(body));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        Ok(response)
    }
}

impl<S> Drop for Session<S> {
    /// A session that is dropped before its replies are whole has lost its client.
    fn drop(&mut self) {
        let is_open = self.choices.iter().any(|choice| choice.ended.is_none());
        if is_open && failure(&self.choices).is_none() {
            self.server.metrics.disconnected();
        }
    }
}

struct Stream<S> {
    session: Session<S>,
    queue: VecDeque<Bytes>,
    is_over: bool,
    last_sent: Instant,
    ping: Duration,
}

impl<S: Shape> Stream<S> {
    fn open(&mut self) {
        let entries = self.session.shape.opening(&self.session.choices);
        let mut extra = std::mem::take(&mut self.session.extra);
        for entry in entries {
            self.push_chunk(entry, std::mem::take(&mut extra));
        }
        // A shape without an opening puts them on its first chunk.
        self.session.extra = extra;
    }

    /// The next bytes to send; `None` when the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.queue.pop_front() {
                self.last_sent = Instant::now();
                return Some(bytes);
            }
            if self.is_over {
                return None;
            }
            let is_unsure = self.session.peer.is_half_closed();
            let due = self.last_sent + if is_unsure { SILENCE_UNSURE.min(self.ping) } else { self.ping };
            // A client may close its side meanwhile.
            let look = due.min(Instant::now() + SILENCE_UNSURE);
            let step = next_step(&mut self.session.choices, &self.session.server.config.tokenizer);
            match tokio::time::timeout_at(look, step).await {
                Ok(Some(step)) => self.step(&step),
                Ok(None) => self.close(),
                Err(_) if Instant::now() < due => {}
                Err(_) => self.queue.push_back(Bytes::from_static(b": keep-alive\n\n")),
            }
        }
    }

    fn step(&mut self, step: &Step) {
        if let Some(error) = failure(&self.session.choices) {
            // No `[DONE]`: a broken reply must not look finished.
            self.push_event(&error.to_json());
            self.session.server.metrics.stream_failed();
            self.is_over = true;
            return;
        }
        let mut entries = self.session.shape.chunks(step, &self.session.choices);
        let is_last = step.is_end && self.session.choices.iter().all(|choice| choice.ended.is_some());
        let last = if is_last { entries.pop() } else { None };
        for entry in entries {
            let extra = std::mem::take(&mut self.session.extra);
            self.push_chunk(entry, extra);
        }
        if let Some(entry) = last {
            let Session { server, facts, choices, .. } = &self.session;
            let mut extra = Map::new();
            blocks::add_extensions(&server.config, facts, choices, &mut extra);
            extra.extend(std::mem::take(&mut self.session.extra));
            self.push_chunk(entry, extra);
        }
    }

    fn close(&mut self) {
        if self.session.include_usage {
            let Session { server, facts, choices, .. } = &self.session;
            let mut chunk = blocks::head(&server.config, facts, facts.chunk_object);
            chunk.insert("choices".into(), Value::Array(Vec::new()));
            chunk.insert("usage".into(), blocks::usage(facts, choices));
            self.push_event(&Value::Object(chunk));
        }
        self.queue.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.is_over = true;
    }

    fn push_chunk(&mut self, entry: Value, extra: Map<String, Value>) {
        let Session { server, facts, choices, include_usage, continuous_usage, .. } = &self.session;
        let mut chunk = blocks::head(&server.config, facts, facts.chunk_object);
        chunk.insert("choices".into(), Value::Array(vec![entry]));
        if *continuous_usage {
            chunk.insert("usage".into(), blocks::usage(facts, choices));
        } else if *include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk.extend(extra);
        self.push_event(&Value::Object(chunk));
    }

    fn push_event(&mut self, event: &Value) {
        self.queue.push_back(Bytes::from(format!("data: {event}\n\n")));
    }
}
