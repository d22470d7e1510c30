//! A small HTTP client over `hyper`: one connection a request, plain HTTP, server-sent events as they come.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use thiserror::Error;
use tokio::net::TcpStream;

/// Longest time without a byte, comments of a stream included.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// Longest body of a whole answer, and longest event of a stream.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why a request has no answer.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error("{url:?} is no address of a server: expected http://HOST:PORT, found {found}")]
    Url { url: String, found: &'static str },
    #[error("{address} can't be reached: {cause}. Start the server, or leave --url out")]
    Connect { address: String, cause: std::io::Error },
    #[error("{path} was broken off: {cause}")]
    Broken { path: String, cause: String },
    #[error("{path} was silent for {} seconds", SILENCE_MAX.as_secs())]
    Silent { path: String },
    #[error("{path} answered {status}: {message}")]
    Refused { path: String, status: u16, message: String },
    #[error("{path} answered what is no JSON: {cause}")]
    NoJson { path: String, cause: serde_json::Error },
}

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Host and port.
    address: String,
    /// All paths are below it; empty or `/path`.
    prefix: String,
}

impl Client {
    /// Reads `http://HOST:PORT`, with a path in front of `/v1` or none.
    ///
    /// # Errors
    /// An address of another kind; TLS among them.
    pub fn new(url: &str) -> Result<Client, ClientError> {
        let wrong = |found| ClientError::Url { url: url.to_owned(), found };
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => return Err(wrong("https, which this client doesn't speak")),
            Some(_) => return Err(wrong("another scheme")),
            None => url,
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err(wrong("no host"));
        }
        let port = if host.starts_with('[') { host.split_once("]:") } else { host.rsplit_once(':') };
        let address = match port {
            Some((_, port)) if port.parse::<u16>().is_err() => return Err(wrong("a port that is no number")),
            Some(_) => host.to_owned(),
            None => format!("{host}:80"),
        };
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("v1").unwrap_or(path).trim_matches('/');
        Ok(Client { address, prefix: if path.is_empty() { String::new() } else { format!("/{path}") } })
    }

    /// Asks for a document.
    ///
    /// # Errors
    /// No answer, or one that isn't 200.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        let response = self.send("GET", path, Bytes::new()).await?;
        let body = self.whole(path, response).await?;
        serde_json::from_slice(&body).map_err(|cause| ClientError::NoJson { path: path.to_owned(), cause })
    }

    /// Sends a body and reads the whole answer.
    ///
    /// # Errors
    /// No answer, or one that isn't 200.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        let response = self.send("POST", path, Bytes::from(body.to_string())).await?;
        let body = self.whole(path, response).await?;
        serde_json::from_slice(&body).map_err(|cause| ClientError::NoJson { path: path.to_owned(), cause })
    }

    /// Sends a body and hands on the data of each event of the answer, until `[DONE]` or the end.
    ///
    /// # Errors
    /// No answer, one that isn't 200, a stream that ends without `[DONE]`, or what `event` returns.
    pub async fn stream(
        &self,
        path: &str,
        body: &Value,
        mut event: impl FnMut(Value) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let broken = |cause: String| ClientError::Broken { path: path.to_owned(), cause };
        let response = self.send("POST", path, Bytes::from(body.to_string())).await?;
        if response.status() != 200 {
            self.whole(path, response).await?;
            return Err(broken("a status without a body".to_owned()));
        }
        let mut body = response.into_body();
        let mut events = Events::default();
        loop {
            let frame = tokio::time::timeout(SILENCE_MAX, body.frame()).await;
            let frame = frame.map_err(|_| ClientError::Silent { path: path.to_owned() })?;
            let Some(frame) = frame else { return Err(broken("the stream ended without [DONE]".to_owned())) };
            let frame = frame.map_err(|error| broken(error.to_string()))?;
            let Ok(bytes) = frame.into_data() else { continue };
            events.push(&bytes);
            if events.rest.len() > ANSWER_BYTES_MAX {
                return Err(broken("an event is too long".to_owned()));
            }
            while let Some(data) = events.next() {
                if data == "[DONE]" {
                    return Ok(());
                }
                let value = serde_json::from_str(&data)
                    .map_err(|cause| ClientError::NoJson { path: path.to_owned(), cause })?;
                event(value)?;
            }
        }
    }

    async fn send(&self, method: &str, path: &str, body: Bytes) -> Result<Response<Incoming>, ClientError> {
        let broken = |cause: String| ClientError::Broken { path: path.to_owned(), cause };
        let stream = TcpStream::connect(&self.address)
            .await
            .map_err(|cause| ClientError::Connect { address: self.address.clone(), cause })?;
        // Small writes are measured here, so they must not wait for company.
        stream.set_nodelay(true).map_err(|error| broken(error.to_string()))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| broken(error.to_string()))?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, &self.address)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Full::new(body))
            .map_err(|error| broken(error.to_string()))?;
        let response = tokio::time::timeout(SILENCE_MAX, sender.send_request(request)).await;
        let response = response.map_err(|_| ClientError::Silent { path: path.to_owned() })?;
        response.map_err(|error| broken(error.to_string()))
    }

    /// The whole body of a 200.
    async fn whole(&self, path: &str, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let status = response.status().as_u16();
        let body = tokio::time::timeout(SILENCE_MAX, Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect());
        let body = body.await.map_err(|_| ClientError::Silent { path: path.to_owned() })?;
        let body = body.map_err(|error| ClientError::Broken { path: path.to_owned(), cause: error.to_string() })?;
        let body = body.to_bytes();
        if status == 200 {
            return Ok(body);
        }
        let message = serde_json::from_slice::<Value>(&body)
            .ok()
            .and_then(|body| Some(body["error"]["message"].as_str()?.to_owned()))
            .unwrap_or_else(|| String::from_utf8_lossy(&body).chars().take(200).collect());
        Err(ClientError::Refused { path: path.to_owned(), status, message })
    }
}

/// Cuts server-sent events out of pieces of any size.
#[derive(Default)]
struct Events {
    rest: Vec<u8>,
}

impl Events {
    fn push(&mut self, bytes: &[u8]) {
        self.rest.extend(bytes.iter().filter(|byte| **byte != b'\r'));
    }

    /// The data of the next whole event; comments are left out.
    fn next(&mut self) -> Option<String> {
        loop {
            let end = self.rest.windows(2).position(|pair| pair == b"\n\n")?;
            let event: Vec<u8> = self.rest.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&event);
            let data = text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start);
            let data: Vec<&str> = data.collect();
            if !data.is_empty() {
                return Some(data.join("\n"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_with_and_without_its_path() {
        let cases = [
            ("http://127.0.0.1:8080", "127.0.0.1:8080", ""),
            ("http://127.0.0.1:8080/v1/", "127.0.0.1:8080", ""),
            ("localhost:1/v1", "localhost:1", ""),
            ("http://host/a/b/v1", "host:80", "/a/b"),
            ("http://[::1]:9", "[::1]:9", ""),
            ("http://[::1]/", "[::1]:80", ""),
        ];
        for (url, address, prefix) in cases {
            let client = Client::new(url).unwrap();
            assert_eq!((client.address.as_str(), client.prefix.as_str()), (address, prefix), "{url}");
        }
        for url in ["https://host", "ftp://host", "http://", "http://host:port"] {
            assert!(Client::new(url).is_err(), "{url}");
        }
    }

    #[test]
    fn events_are_the_same_whatever_the_pieces() {
        let text = "data: {\"a\":1}\n\n: keep-alive\n\nevent: x\ndata: two\ndata: lines\n\ndata: [DONE]\r\n\r\n";
        for size in [1, 2, 3, 7, text.len()] {
            let mut events = Events::default();
            let mut found = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                events.push(piece);
                found.extend(std::iter::from_fn(|| events.next()));
            }
            assert_eq!(found, ["{\"a\":1}", "two\nlines", "[DONE]"], "pieces of {size}");
        }
    }
}
