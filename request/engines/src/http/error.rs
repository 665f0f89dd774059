//! Errors between this process and an engine, and whether a retry elsewhere is safe.

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
    /// No connection: refused, unreachable, unknown name or time-out. Nothing was sent.
    #[error("cannot connect to {url}: {source}")]
    Connect {
        /// The destination.
        url: String,
        /// The operating system's reason.
        source: SharedError,
    },
    /// No connection, because this machine has run out of files, ports or memory. Nothing was sent, and no engine is to
    /// blame.
    #[error("no room for another connection to an engine: {0}")]
    Exhausted(#[source] SharedError),
    /// The engine reported twice over HTTP/2 that it did not process the request, which may be sent elsewhere.
    #[error("{url} did not take the request: {source}")]
    NotTaken {
        /// The destination.
        url: String,
        /// Hyper's error.
        source: SharedError,
    },
    /// The connection broke after the request may have been sent and before the head of an answer arrived.
    #[error("the connection to {url} broke before it answered: {source}")]
    Exchange {
        /// The destination.
        url: String,
        /// Hyper's error.
        source: SharedError,
    },
    /// The head of the answer is contradictory or unreliable about where the answer ends.
    #[error("the answer of {url} cannot be relied on: {cause}")]
    Framing {
        /// The source.
        url: String,
        /// The problem.
        cause: &'static str,
    },
    /// The answer, or part of it, did not arrive in time.
    #[error("{url} did not send {waiting_for} within {limit:?}")]
    Timeout {
        /// The source.
        url: String,
        /// The part of the answer that was awaited.
        waiting_for: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The answer's body ended early or was malformed.
    #[error("the answer of {url} broke off: {source}")]
    Body {
        /// The source.
        url: String,
        /// Hyper's error.
        source: SharedError,
    },
    /// The answer's body is longer than the caller accepts.
    #[error("the answer of {url} is longer than the limit of {limit_bytes} bytes")]
    TooLarge {
        /// The source.
        url: String,
        /// Maximum length of an answer.
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
    #[error("the answer of {url} is not what was expected: {source}")]
    Json {
        /// The source.
        url: String,
        /// The decoder's message.
        source: SharedError,
    },
}

impl HttpError {
    /// False if no part of the request can have reached the engine, so that it may be sent elsewhere.
    pub fn may_have_been_sent(&self) -> bool {
        !matches!(self, Self::Url(_) | Self::Encode { .. } | Self::Connect { .. } | Self::Exhausted { .. })
    }

    /// The status of an answer other than 2xx.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The message with paths instead of URLs, for clients, who must not learn the addresses of engines.
    pub fn reason(&self) -> String {
        match self {
            Self::Url(_) => "its address cannot be used".to_owned(),
            Self::Encode { source, .. } => format!("cannot encode the request: {source}"),
            Self::Connect { source, .. } => format!("cannot connect: {source}"),
            Self::Exhausted { .. } => self.to_string(),
            Self::NotTaken { source, .. } => format!("it did not take the request: {source}"),
            Self::Exchange { source, .. } => format!("the connection broke before it answered: {source}"),
            Self::Framing { cause, .. } => format!("its answer cannot be relied on: {cause}"),
            Self::Body { source, .. } => format!("its answer broke off: {source}"),
            Self::Timeout { url, .. }
            | Self::TooLarge { url, .. }
            | Self::Status { url, .. }
            | Self::Json { url, .. } => self.to_string().replacen(url, path(url), 1),
        }
    }

    /// The message without URLs and without the answer's body: for probes, whose answers are not for clients.
    pub fn reason_without_body(&self) -> String {
        match self {
            Self::Status { url, status, .. } => format!("{} answered {status}", path(url)),
            Self::Json { url, .. } => format!("the answer of {} is not what was expected", path(url)),
            _ => self.reason(),
        }
    }

    /// The error if a request to `uri` is not answered within `limit`.
    pub fn timeout(uri: &Uri, waiting_for: &'static str, limit: Duration) -> Self {
        Self::Timeout { url: without_query(uri), waiting_for, limit }
    }
}

/// Scheme, address and path. The query comes from a client, and may contain anything.
pub(super) fn without_query(uri: &Uri) -> String {
    let scheme = uri.scheme_str().map_or_else(String::new, |scheme| format!("{scheme}://"));
    format!("{scheme}{}{}", uri.authority().map_or("", |authority| authority.as_str()), uri.path())
}

/// The part of a URL after the address.
fn path(url: &str) -> &str {
    let after_scheme = url.split_once("://").map_or(url, |(_, rest)| rest);
    after_scheme.find('/').map_or("/", |at| &after_scheme[at..])
}
