//! Failures of a single request, as they are counted.

/// Why a request failed. Never holds anything that the server wrote but numbers, so that no prompt gets into a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Failure {
    /// No connection.
    #[error("connect: {0}")]
    Connect(ConnectFailure),
    /// The request took longer than the limit.
    #[error("timeout: {0}")]
    Timeout(Phase),
    /// The answer is not 2xx.
    #[error("status {0}")]
    Status(u16),
    /// The connection ended where an answer should have begun.
    #[error("closed before the answer")]
    Closed,
    /// The answer began and did not end as it should.
    #[error("broken: {0}")]
    Broken(Break),
    /// The server put an error into a stream, or answered 200 with one.
    #[error("error event")]
    ErrorEvent,
    /// The answer does not have the form of the route.
    #[error("malformed: {0}")]
    Malformed(&'static str),
}

/// Why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum ConnectFailure {
    /// No process listens.
    #[error("refused")]
    Refused,
    /// Not in time.
    #[error("timed out")]
    TimedOut,
    /// TLS was not agreed on.
    #[error("TLS")]
    Tls,
    /// This process may open no more files.
    #[error("too many open files in the load generator")]
    NoFiles,
    /// Anything else.
    #[error("failed")]
    Other,
}

/// The phase that a request was waiting in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Phase {
    /// The head of the answer.
    #[error("no answer")]
    Head,
    /// The rest of the answer.
    #[error("answer not complete")]
    Body,
}

/// How an answer broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum Break {
    /// The connection ended before the body did: less than `Content-Length`, or no last chunk.
    #[error("the body is shorter than announced")]
    Short,
    /// The body is whole, but the stream in it has no `[DONE]`.
    #[error("the stream ended without [DONE]")]
    NoDone,
    /// The stream ended inside an event.
    #[error("the stream ended inside an event")]
    InEvent,
}
