//! Which path means what. A table, so that every path of the contract has its answer, built or not.

/// What a path means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    Root,
    Health,
    Ready,
    Ping,
    Version,
    Models,
    Model(String),
    Chat,
    Completions,
    Tokenize,
    Detokenize,
    ApplyTemplate,
    TokenizerInfo,
    Memory,
    Metrics,
    ServerInfo,
    OpenApi,
    /// Known and not there: the reason.
    Unsupported(&'static str),
}

const LATER: &str = "This route is not built yet in this version of the server.";
const EMBEDDINGS: &str = "This model has no embedding output; point the client's embedding setting at another server.";
const MEDIA: &str = "This model reads and writes text only.";
const MODERATION: &str = "There is no moderation model here.";

/// Paths that are known but not served, after `/v1` is taken off; a trailing `*` matches what begins so.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("/embeddings", EMBEDDINGS),
    ("/rerank", EMBEDDINGS),
    ("/score", EMBEDDINGS),
    ("/api/embed*", EMBEDDINGS),
    ("/audio/*", MEDIA),
    ("/images/*", MEDIA),
    ("/moderations", MODERATION),
    ("/responses", LATER),
    ("/responses/*", LATER),
    ("/messages", LATER),
    ("/messages/*", LATER),
    ("/decisions", LATER),
    ("/batches*", LATER),
    ("/files*", LATER),
    ("/dashboard", LATER),
    ("/stats", LATER),
    ("/chat", LATER),
    ("/api/*", LATER),
    ("/sleep", LATER),
    ("/wake_up", LATER),
    ("/is_sleeping", LATER),
];

impl Route {
    /// Finds what `path` (without a query) means; a trailing slash and a leading `/v1` make no difference.
    pub fn find(path: &str) -> Option<Route> {
        let path = path.trim_end_matches('/');
        let short = match path.strip_prefix("/v1") {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => rest,
            Some(_) | None => path,
        };
        let is_short = short.len() < path.len();
        Some(match short {
            "" if !is_short => Route::Root,
            "/health" | "/live" if !is_short => Route::Health,
            "/ready" if !is_short => Route::Ready,
            "/ping" if !is_short => Route::Ping,
            "/version" if !is_short => Route::Version,
            "/server_info" if !is_short => Route::ServerInfo,
            "/openapi.json" if !is_short => Route::OpenApi,
            "/models" => Route::Models,
            "/chat/completions" => Route::Chat,
            "/completions" => Route::Completions,
            "/tokenize" => Route::Tokenize,
            "/detokenize" => Route::Detokenize,
            "/apply-template" => Route::ApplyTemplate,
            "/tokenizer_info" => Route::TokenizerInfo,
            "/memory" => Route::Memory,
            "/metrics" => Route::Metrics,
            _ => match short.strip_prefix("/models/") {
                Some(id) => Route::Model(percent_decoded(id)),
                None => Route::Unsupported(Self::unsupported(short)?),
            },
        })
    }

    fn unsupported(path: &str) -> Option<&'static str> {
        let found = UNSUPPORTED.iter().find(|(pattern, _)| match pattern.strip_suffix('*') {
            Some(start) => path.starts_with(start),
            None => path == *pattern,
        });
        found.map(|&(_, reason)| reason)
    }

    /// The methods of the path, as `Allow` lists them.
    pub fn allow(&self) -> &'static str {
        match self {
            Route::Chat | Route::Completions | Route::Tokenize | Route::Detokenize | Route::ApplyTemplate => {
                "POST, OPTIONS"
            }
            Route::Root
            | Route::Health
            | Route::Ready
            | Route::Ping
            | Route::Version
            | Route::TokenizerInfo
            | Route::Memory
            | Route::Metrics
            | Route::ServerInfo
            | Route::OpenApi
            | Route::Models
            | Route::Model(_) => "GET, HEAD, OPTIONS",
            // The answer is the same for all.
            Route::Unsupported(_) => "",
        }
    }

    /// All labels of what is served.
    #[cfg(test)]
    pub const LABELS: [&'static str; 16] = [
        "/",
        "/health",
        "/ready",
        "/ping",
        "/version",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/tokenizer_info",
        "/memory",
        "/metrics",
        "/server_info",
        "/openapi.json",
    ];

    /// The path as figures are labelled with it: as few as there are routes, whatever is asked for.
    pub fn label(&self) -> &'static str {
        match self {
            Route::Root => "/",
            Route::Health => "/health",
            Route::Ready => "/ready",
            Route::Ping => "/ping",
            Route::Version => "/version",
            Route::Models | Route::Model(_) => "/v1/models",
            Route::Chat => "/v1/chat/completions",
            Route::Completions => "/v1/completions",
            Route::Tokenize => "/tokenize",
            Route::Detokenize => "/detokenize",
            Route::ApplyTemplate => "/apply-template",
            Route::TokenizerInfo => "/tokenizer_info",
            Route::Memory => "/memory",
            Route::Metrics => "/metrics",
            Route::ServerInfo => "/server_info",
            Route::OpenApi => "/openapi.json",
            Route::Unsupported(_) => "unsupported",
        }
    }

    /// Whether the path is answered without a key.
    pub fn is_open(&self) -> bool {
        matches!(self, Route::Root | Route::Health | Route::Ready | Route::Ping)
    }
}

/// A path's text with `%2F` and the like read; what is no such code, or no UTF-8 then, stays as it is.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = (byte == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(code.unwrap_or(byte));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_path_means() {
        let cases = [
            ("/", Some(Route::Root)),
            ("", Some(Route::Root)),
            ("/health", Some(Route::Health)),
            ("/health/", Some(Route::Health)),
            ("/live", Some(Route::Health)),
            ("/v1/models", Some(Route::Models)),
            ("/models/", Some(Route::Models)),
            ("/v1/models/org/name", Some(Route::Model("org/name".to_string()))),
            ("/v1/models/org%2Fname", Some(Route::Model("org/name".to_string()))),
            ("/v1/models/50%25%zz%", Some(Route::Model("50%%zz%".to_string()))),
            ("/server_info", Some(Route::ServerInfo)),
            ("/openapi.json", Some(Route::OpenApi)),
            ("/v1/chat/completions", Some(Route::Chat)),
            ("/chat/completions", Some(Route::Chat)),
            ("/v1/completions/", Some(Route::Completions)),
            ("/tokenize", Some(Route::Tokenize)),
            ("/v1/detokenize", Some(Route::Detokenize)),
            ("/apply-template", Some(Route::ApplyTemplate)),
            ("/tokenizer_info", Some(Route::TokenizerInfo)),
            ("/v1/memory", Some(Route::Memory)),
            ("/v1/metrics", Some(Route::Metrics)),
            ("/v1/embeddings", Some(Route::Unsupported(EMBEDDINGS))),
            ("/v1/audio/speech", Some(Route::Unsupported(MEDIA))),
            ("/v1/responses", Some(Route::Unsupported(LATER))),
            ("/api/embed", Some(Route::Unsupported(EMBEDDINGS))),
            ("/api/chat", Some(Route::Unsupported(LATER))),
            ("/v1", None),
            ("/v1/health", None),
            ("/v12/models", None),
            ("/nonsense", None),
        ];
        for (path, expected) in cases {
            assert_eq!(Route::find(path), expected, "{path}");
        }
    }
}
