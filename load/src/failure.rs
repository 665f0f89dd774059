//! Failures of a single request, by kind.

/// The reason that a request failed. It contains nothing written by the server except numbers, so that no prompt gets
/// into a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Failure {
    /// No connection.
    #[error("connect: {0}")]
    Connect(ConnectFailure),
    /// The request took longer than the limit.
    #[error("timeout: {0}")]
    Timeout(Phase),
    /// The status is not 2xx.
    #[error("status {0}")]
    Status(u16),
    /// The connection ended before a response began.
    #[error("closed before the answer")]
    Closed,
    /// The response began but did not end properly.
    #[error("broken: {0}")]
    Broken(Break),
    /// The server sent an error within a stream, or in a response with status 200.
    #[error("error event")]
    ErrorEvent,
    /// The response does not have the route's format.
    #[error("malformed: {0}")]
    Malformed(&'static str),
}

/// The reason that a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum ConnectFailure {
    /// No process is listening.
    #[error("refused")]
    Refused,
    /// The time limit passed.
    #[error("timed out")]
    TimedOut,
    /// The TLS handshake failed.
    #[error("TLS")]
    Tls,
    /// This process cannot open more files.
    #[error("too many open files in the load generator")]
    NoFiles,
    /// Anything else.
    #[error("failed")]
    Other,
}

/// The part of the response that a request was waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Phase {
    /// The head of the response.
    #[error("no answer")]
    Head,
    /// The rest of the response.
    #[error("answer not complete")]
    Body,
}

/// How a response ended prematurely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Break {
    /// The connection ended before the body was complete: fewer bytes than `Content-Length`, or no last chunk.
    #[error("the body is shorter than announced")]
    Short,
    /// The body is complete, but its event stream has no `[DONE]`.
    #[error("the stream ended without [DONE]")]
    NoDone,
    /// The stream ended inside an event.
    #[error("the stream ended inside an event")]
    InEvent,
}
