//! Reads the JSON body of a request, within its own limit and within the memory planned for all bodies.

use axum::body::Body as HttpBody;
use axum::extract::Request;
use axum::http::header;
use futures_util::StreamExt;
use tf_text::fields::BodyError;
use tf_text::json::Value as Json;

use crate::error::ApiError;
use crate::http::Server;
use crate::routes::Route;
use crate::work::{self, Arrived, Room, Work};

/// A body that was read, and the memory that work on it has.
#[derive(Debug)]
pub struct Body {
    json: Json,
    room: Room,
}

impl Body {
    /// What `work` makes of the body. It takes a while with a long text; other requests' tasks go on meanwhile. Body and memory
    /// are given back before the reply begins.
    ///
    /// # Errors
    /// Those of `work`.
    pub async fn read_by<T: Send + 'static>(
        self,
        work: impl FnOnce(&Json) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let Body { json, room } = self;
        let worked = tokio::task::spawn_blocking(move || {
            let worked = work(&json);
            drop((json, room));
            worked
        });
        worked.await.map_err(|error| ApiError::internal(&error.to_string()))?
    }
}

/// Reads the body of a request for `route`, and waits until there is memory for the work on it.
///
/// # Errors
/// A body of another kind, one that is too large or no JSON, or more bodies than there is memory for.
pub async fn read(server: &Server, route: &Route, request: Request) -> Result<Body, ApiError> {
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
        return Err(ApiError::unsupported_encoding(encoding.to_str().unwrap_or_default()));
    }
    let limit = server.config.max_body_bytes;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::too_large(limit));
    }
    let (bytes, arrived) = collect(request.into_body(), limit, &server.work).await?;
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| ApiError::invalid_json(format!("the body is not UTF-8 at byte {}", error.valid_up_to())))?;
    let room = server.work.room(arrived, work::bytes_of(text, cut_bytes(server, route))).await;
    Ok(Body { json: Json::parse(text).map_err(BodyError::from)?, room })
}

/// What of a body is cut into tokens at most: a text that can't fit is refused by its length.
fn cut_bytes(server: &Server, route: &Route) -> usize {
    match route {
        Route::Chat | Route::Completions => {
            server.config.tokenizer.most_bytes(server.window().tokens as usize).unwrap_or(usize::MAX)
        }
        Route::Tokenize => usize::MAX,
        _ => 0,
    }
}

async fn collect(body: HttpBody, limit: usize, work: &Work) -> Result<(Vec<u8>, Arrived), ApiError> {
    let (mut bytes, mut arrived) = (Vec::new(), work.begin());
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| ApiError::invalid_json(format!("the body could not be read: {error}")))?;
        if piece.len() > limit - bytes.len() {
            return Err(ApiError::too_large(limit));
        }
        if !work.add(&mut arrived, piece.len()) {
            return Err(ApiError::too_many_bodies());
        }
        bytes.extend_from_slice(&piece);
    }
    Ok((bytes, arrived))
}
