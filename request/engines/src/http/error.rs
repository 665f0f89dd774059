//! Errors in exchanges with an engine, and whether a retry elsewhere is safe.

use std::time::Duration;

use ::http::Uri;

use super::UrlError;
use crate::SharedError;

/// A failed exchange with an engine. URLs in variants omit the query, which comes from a client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The address is invalid.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The document to send cannot be encoded as JSON.
    #[error("cannot encode the request for {url}: {source}")]
    Encode {
        /// The destination.
        url: String,
        /// The encoder's message.
        source: SharedError,
    },
    /// The connection failed: refused, unreachable, unknown host or time-out. Nothing was sent.
    #[error("cannot connect to {url}: {source}")]
    Connect {
        /// The destination.
        url: String,
        /// The operating system's reason.
        source: SharedError,
    },
    /// The connection failed because this machine ran out of file descriptors, ports or memory. Nothing was sent, and
    /// the engine is not at fault.
    #[error("cannot open another connection to an engine: {0}")]
    Exhausted(#[source] SharedError),
    /// The engine reported twice over HTTP/2 that it did not process the request, so the request may be sent elsewhere.
    #[error("{url} did not process the request: {source}")]
    NotTaken {
        /// The destination.
        url: String,
        /// Hyper's error.
        source: SharedError,
    },
    /// The connection broke after the request may have been sent, but before the response head arrived.
    #[error("the connection to {url} broke before a response arrived: {source}")]
    Exchange {
        /// The destination.
        url: String,
        /// Hyper's error.
        source: SharedError,
    },
    /// The response head is contradictory or ambiguous about where the response ends.
    #[error("unreliable response from {url}: {cause}")]
    Framing {
        /// The source.
        url: String,
        /// The problem.
        cause: &'static str,
    },
    /// The response, or part of it, did not arrive in time.
    #[error("{url} did not send {waiting_for} within {limit:?}")]
    Timeout {
        /// The source.
        url: String,
        /// The part of the response that was awaited.
        waiting_for: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The response body ended early or was malformed.
    #[error("the response from {url} was cut off: {source}")]
    Body {
        /// The source.
        url: String,
        /// Hyper's error.
        source: SharedError,
    },
    /// The response body exceeds the caller's limit.
    #[error("the response from {url} exceeds the limit of {limit_bytes} bytes")]
    TooLarge {
        /// The source.
        url: String,
        /// Maximum length of a response.
        limit_bytes: usize,
    },
    /// The status is not 2xx.
    #[error("{url} answered {status}: {excerpt}")]
    Status {
        /// The source.
        url: String,
        /// HTTP status.
        status: u16,
        /// Start of the body, on one line.
        excerpt: String,
    },
    /// The body is not the expected JSON.
    #[error("unexpected response from {url}: {source}")]
    Json {
        /// The source.
        url: String,
        /// The decoder's message.
        source: SharedError,
    },
}

impl HttpError {
    /// Returns false if no part of the request can have reached the engine, so that sending it elsewhere is safe.
    pub fn may_have_been_sent(&self) -> bool {
        !matches!(self, Self::Url(_) | Self::Encode { .. } | Self::Connect { .. } | Self::Exhausted { .. })
    }

    /// Returns the status of a non-2xx response.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Returns the message with paths instead of URLs, for clients, which must not learn the engines' addresses.
    pub fn reason(&self) -> String {
        match self {
            Self::Url(_) => "its address is invalid".to_owned(),
            Self::Encode { source, .. } => format!("cannot encode the request: {source}"),
            Self::Connect { source, .. } => format!("cannot connect: {source}"),
            Self::Exhausted { .. } => self.to_string(),
            Self::NotTaken { source, .. } => format!("it did not process the request: {source}"),
            Self::Exchange { source, .. } => format!("the connection broke before a response arrived: {source}"),
            Self::Framing { cause, .. } => format!("its response is unreliable: {cause}"),
            Self::Body { source, .. } => format!("its response was cut off: {source}"),
            Self::Timeout { url, .. }
            | Self::TooLarge { url, .. }
            | Self::Status { url, .. }
            | Self::Json { url, .. } => self.to_string().replacen(url, path(url), 1),
        }
    }

    /// Returns the message without URLs and without the response body, for probes: their responses are not meant for
    /// clients.
    pub fn reason_without_body(&self) -> String {
        match self {
            Self::Status { url, status, .. } => format!("{} answered {status}", path(url)),
            Self::Json { url, .. } => format!("unexpected response from {}", path(url)),
            _ => self.reason(),
        }
    }

    /// Creates the error for a request to `uri` that was not answered within `limit`.
    pub fn timeout(uri: &Uri, waiting_for: &'static str, limit: Duration) -> Self {
        Self::Timeout { url: without_query(uri), waiting_for, limit }
    }
}

/// Returns scheme, address and path. Omits the query, which comes from a client and may contain anything.
pub(super) fn without_query(uri: &Uri) -> String {
    let scheme = uri.scheme_str().map_or_else(String::new, |scheme| format!("{scheme}://"));
    format!("{scheme}{}{}", uri.authority().map_or("", |authority| authority.as_str()), uri.path())
}

/// Returns the part of a URL after the address.
fn path(url: &str) -> &str {
    let after_scheme = url.split_once("://").map_or(url, |(_, rest)| rest);
    after_scheme.find('/').map_or("/", |at| &after_scheme[at..])
}
