//! Errors between this process and an engine, and whether a retry elsewhere is safe.

use std::time::Duration;

use ::http::Uri;

use super::UrlError;

/// A failed exchange with an engine. Variants that name a URL leave out its query, which is a client's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The address itself cannot be used.
    #[error("{cause}")]
    Url {
        /// The problem.
        cause: UrlError,
    },
    /// The document to send cannot be written as JSON.
    #[error("cannot encode the request for {url}: {cause}")]
    Encode {
        /// Where it was to go.
        url: String,
        /// The encoder's message.
        cause: String,
    },
    /// No connection: refused, unreachable, unknown name or time-out while connecting. Nothing was sent.
    #[error("cannot connect to {url}: {cause}")]
    Connect {
        /// Where to.
        url: String,
        /// The operating system's reason.
        cause: String,
    },
    /// No connection, as this machine has no file, port or memory left for it. Nothing was sent, and no engine is to
    /// blame.
    #[error("no room for another connection to an engine: {cause}")]
    Exhausted {
        /// The operating system's reason.
        cause: String,
    },
    /// The engine said over HTTP/2 that it did not process the request, twice: it may be sent elsewhere.
    #[error("{url} did not take the request: {cause}")]
    NotTaken {
        /// Where to.
        url: String,
        /// Hyper's error.
        cause: String,
    },
    /// The connection broke after the request may have been sent and before the head of an answer came.
    #[error("the connection to {url} broke before it answered: {cause}")]
    Exchange {
        /// Where to.
        url: String,
        /// Hyper's error.
        cause: String,
    },
    /// The head of the answer says two things about where the answer ends, or nothing that can be relied on.
    #[error("the answer of {url} cannot be relied on: {cause}")]
    Framing {
        /// Where from.
        url: String,
        /// The problem.
        cause: &'static str,
    },
    /// Nothing, or not everything, came in time.
    #[error("{url} did not send {waiting_for} within {limit:?}")]
    Timeout {
        /// Where from.
        url: String,
        /// The event awaited.
        waiting_for: &'static str,
        /// How long.
        limit: Duration,
    },
    /// The answer's body ended early or was malformed.
    #[error("the answer of {url} broke off: {cause}")]
    Body {
        /// Where from.
        url: String,
        /// Hyper's error.
        cause: String,
    },
    /// The answer's body is longer than the caller accepts.
    #[error("the answer of {url} is longer than the limit of {limit_bytes} bytes")]
    TooLarge {
        /// Where from.
        url: String,
        /// The limit.
        limit_bytes: usize,
    },
    /// An answer that is not 2xx.
    #[error("{url} answered {status}: {excerpt}")]
    Status {
        /// Where from.
        url: String,
        /// HTTP status.
        status: u16,
        /// Start of the body, on one line.
        excerpt: String,
    },
    /// The body is not the JSON that was expected.
    #[error("the answer of {url} is not what was expected: {cause}")]
    Json {
        /// Where from.
        url: String,
        /// The decoder's message.
        cause: String,
    },
}

impl HttpError {
    /// False when it is certain that the engine saw nothing of the request, so that it may be sent elsewhere.
    pub fn may_have_been_sent(&self) -> bool {
        !matches!(self, Self::Url { .. } | Self::Encode { .. } | Self::Connect { .. } | Self::Exhausted { .. })
    }

    /// The status of an answer that is not 2xx.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The same with paths in place of URLs: for clients, who must not learn where engines are.
    pub fn reason(&self) -> String {
        match self {
            Self::Url { .. } => "its address cannot be used".to_owned(),
            Self::Encode { cause, .. } => format!("cannot encode the request: {cause}"),
            Self::Connect { cause, .. } => format!("cannot connect: {cause}"),
            Self::Exhausted { .. } => self.to_string(),
            Self::NotTaken { cause, .. } => format!("it did not take the request: {cause}"),
            Self::Exchange { cause, .. } => format!("the connection broke before it answered: {cause}"),
            Self::Framing { cause, .. } => format!("its answer cannot be relied on: {cause}"),
            Self::Body { cause, .. } => format!("its answer broke off: {cause}"),
            Self::Timeout { url, .. }
            | Self::TooLarge { url, .. }
            | Self::Status { url, .. }
            | Self::Json { url, .. } => self.to_string().replacen(url, path(url), 1),
        }
    }

    /// The same without a word of the answer's body: of a probe, whose answer is for no client.
    pub fn reason_without_body(&self) -> String {
        match self {
            Self::Status { url, status, .. } => format!("{} answered {status}", path(url)),
            Self::Json { url, .. } => format!("the answer of {} is not what was expected", path(url)),
            _ => self.reason(),
        }
    }

    /// No answer to a request to `uri` within `limit`.
    pub fn timeout(uri: &Uri, waiting_for: &'static str, limit: Duration) -> Self {
        Self::Timeout { url: without_query(uri), waiting_for, limit }
    }
}

/// Scheme, address and path. A query is a client's, and may hold anything.
pub(super) fn without_query(uri: &Uri) -> String {
    let scheme = uri.scheme_str().map_or_else(String::new, |scheme| format!("{scheme}://"));
    format!("{scheme}{}{}", uri.authority().map_or("", |authority| authority.as_str()), uri.path())
}

/// The part of a URL after the address.
fn path(url: &str) -> &str {
    let after_scheme = url.split_once("://").map_or(url, |(_, rest)| rest);
    after_scheme.find('/').map_or("/", |at| &after_scheme[at..])
}

/// An error with all its sources, outermost first, each message once.
pub(super) fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    for source in std::iter::successors(error.source(), |error| error.source()) {
        let message = source.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
    }
    text
}
