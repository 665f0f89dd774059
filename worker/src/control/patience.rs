//! Blocking calls that end at a deadline, or when the process stops.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;

use super::error::{BoxedError, RendezvousError};
use crate::ep::poll_until;
use crate::unit::Shutdown;

/// Interval at which a waiting call checks whether to give up.
const SLICE: Duration = Duration::from_millis(100);
/// Pause between two attempts to reach a rank that is not listening yet.
const RETRY: Duration = Duration::from_millis(50);

/// An idle connection is probed after `KEEPALIVE_IDLE`, and considered lost after `KEEPALIVE_PROBES` unanswered probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// A deadline, and a shutdown request as an earlier reason to give up.
#[derive(Clone)]
pub(crate) struct Patience {
    /// The original limit.
    pub(super) limit: Duration,
    deadline: Instant,
    shutdown: Shutdown,
}

/// The reason that a blocking call gave up.
#[derive(Debug)]
pub(crate) enum Impatience {
    /// The deadline has passed.
    Deadline,
    /// The process is stopping.
    Stopped,
    /// A call to the operating system failed.
    Io(io::Error),
}

impl From<io::Error> for Impatience {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Impatience {
    /// Converts this into a rendezvous error: `failed` builds it from the cause, which is `late` if the deadline has
    /// passed.
    pub(super) fn or(self, late: &str, failed: impl FnOnce(BoxedError) -> RendezvousError) -> RendezvousError {
        match self {
            Self::Stopped => RendezvousError::Stopped,
            Self::Deadline => failed(late.into()),
            Self::Io(error) => failed(error.into()),
        }
    }
}

impl Patience {
    pub(crate) fn new(limit: Duration, shutdown: &Shutdown) -> Self {
        Self { limit, deadline: Instant::now() + limit, shutdown: shutdown.clone() }
    }

    /// Returns a copy with an earlier deadline.
    pub(crate) fn at_most(&self, limit: Duration) -> Self {
        Self { deadline: self.deadline.min(Instant::now() + limit), ..self.clone() }
    }

    /// Returns the length of the next wait; an error if no time is left.
    pub(crate) fn slice(&self) -> Result<Duration, Impatience> {
        if self.shutdown.is_requested() {
            return Err(Impatience::Stopped);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Impatience::Deadline) } else { Ok(left.min(SLICE)) }
    }

    /// Accepts one connection. The listener must be non-blocking; the stream is blocking, with Nagle's algorithm
    /// disabled.
    pub(crate) fn accept(&self, listener: &TcpListener) -> Result<TcpStream, Impatience> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Ok(prepared(stream)?),
                Err(error) if is_wait(&error) => {
                    let until = Instant::now() + self.slice()?;
                    poll_until(&mut [PollFd::new(listener, PollFlags::IN)], Some(until));
                }
                // The client disconnected before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(Impatience::Io(error)),
            }
        }
    }

    /// Connects, retrying while nothing listens on the address or the network is not up yet.
    pub(crate) fn connect(&self, address: SocketAddr) -> Result<TcpStream, Impatience> {
        loop {
            let slice = self.slice()?;
            match TcpStream::connect_timeout(&address, slice) {
                Ok(stream) => return Ok(prepared(stream)?),
                Err(error) if is_wait(&error) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::NetworkUnreachable => std::thread::sleep(RETRY.min(slice)),
                    _ => return Err(Impatience::Io(error)),
                },
            }
        }
    }

    /// Returns a reader over `stream` that fails at the deadline (with `TimedOut`) or when the process stops.
    pub(crate) fn reader<'a>(&'a self, stream: &'a TcpStream) -> PatientReader<'a> {
        PatientReader { patience: self, stream }
    }
}

/// A non-blocking listener.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    // Keepalive detects a host that vanished silently, even on an idle connection.
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_PROBES)?;
    Ok(stream)
}

fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// A reader with a deadline; see [`Patience::reader`]. It leaves a read timeout set on the stream; [`unlimited`]
/// removes it.
pub(crate) struct PatientReader<'a> {
    patience: &'a Patience,
    stream: &'a TcpStream,
}

impl Read for PatientReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let slice = self.patience.slice().map_err(|reason| match reason {
                Impatience::Deadline => io::Error::from(io::ErrorKind::TimedOut),
                Impatience::Stopped => io::Error::other("the process is stopping"),
                Impatience::Io(error) => error,
            })?;
            self.stream.set_read_timeout(Some(slice))?;
            match (&mut &*self.stream).read(buffer) {
                Err(error) if is_wait(&error) => {}
                outcome => return outcome,
            }
        }
    }
}

/// Removes read timeouts after the handshake.
pub(crate) fn unlimited(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)
}
