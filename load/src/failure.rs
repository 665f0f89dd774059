//! Failures of a single request, as they are counted.

use std::fmt;

/// Why a request failed. Never holds anything that the server wrote but numbers, so that no prompt gets into a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Failure {
    /// No connection.
    Connect(ConnectFailure),
    /// The request took longer than the limit.
    Timeout(Phase),
    /// The answer is not 2xx.
    Status(u16),
    /// The connection ended where an answer should have begun.
    Closed,
    /// The answer began and did not end as it should.
    Broken(Break),
    /// The server put an error into a stream, or answered 200 with one.
    ErrorEvent,
    /// The answer does not have the form of the route.
    Malformed(&'static str),
}

/// Why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ConnectFailure {
    /// No process listens.
    Refused,
    /// Not in time.
    TimedOut,
    /// TLS was not agreed on.
    Tls,
    /// This process may open no more files.
    NoFiles,
    /// Anything else.
    Other,
}

/// The phase that a request was waiting in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// The head of the answer.
    Head,
    /// The rest of the answer.
    Body,
}

/// How an answer broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Break {
    /// The connection ended before the body did: less than `Content-Length`, or no last chunk.
    Short,
    /// The body is whole, but the stream in it has no `[DONE]`.
    NoDone,
    /// The stream ended inside an event.
    InEvent,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(ConnectFailure::Refused) => f.write_str("connect: refused"),
            Self::Connect(ConnectFailure::TimedOut) => f.write_str("connect: timed out"),
            Self::Connect(ConnectFailure::Tls) => f.write_str("connect: TLS"),
            Self::Connect(ConnectFailure::NoFiles) => f.write_str("connect: too many open files in the load generator"),
            Self::Connect(ConnectFailure::Other) => f.write_str("connect: failed"),
            Self::Timeout(Phase::Head) => f.write_str("timeout: no answer"),
            Self::Timeout(Phase::Body) => f.write_str("timeout: answer not complete"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::Closed => f.write_str("closed before the answer"),
            Self::Broken(Break::Short) => f.write_str("broken: the body is shorter than announced"),
            Self::Broken(Break::NoDone) => f.write_str("broken: the stream ended without [DONE]"),
            Self::Broken(Break::InEvent) => f.write_str("broken: the stream ended inside an event"),
            Self::ErrorEvent => f.write_str("error event"),
            Self::Malformed(cause) => write!(f, "malformed: {cause}"),
        }
    }
}
