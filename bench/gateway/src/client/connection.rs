//! One connection of the client.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::time::Instant;

use crate::answer::{AnswerError, Reader};
use crate::error::BenchError;

/// The outcome of a request on a connection.
pub(super) enum Step {
    /// No request, or its answer is incomplete.
    Waits,
    /// The answer is complete; its latency counts from `since`.
    Done { since: Instant },
}

pub(super) struct Connection {
    socket: TcpStream,
    reader: Reader,
    /// The request, and how much of it has been sent.
    request: Vec<u8>,
    sent: usize,
    number: u64,
    /// Start of the request in flight.
    since: Option<Instant>,
    closed: bool,
}

fn connect(target: SocketAddr) -> Result<TcpStream, BenchError> {
    let fail = BenchError::io("connect");
    let socket = TcpStream::connect(target).map_err(&fail)?;
    socket.set_nodelay(true).map_err(&fail)?;
    socket.set_nonblocking(true).map_err(&fail)?;
    Ok(socket)
}

impl Connection {
    pub(super) fn open(target: SocketAddr) -> Result<Self, BenchError> {
        Ok(Self {
            socket: connect(target)?,
            reader: Reader::new(),
            request: Vec::new(),
            sent: 0,
            number: 0,
            since: None,
            closed: false,
        })
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Opens a new socket, for a request of which nothing has been sent.
    pub(super) fn reopen(&mut self, target: SocketAddr) -> Result<(), BenchError> {
        self.socket = connect(target)?;
        self.reader = Reader::new();
        self.closed = false;
        Ok(())
    }

    pub(super) fn begin(&mut self, number: u64, since: Instant, request: &[u8]) {
        self.request.clear();
        self.request.extend_from_slice(request);
        (self.number, self.since, self.sent) = (number, Some(since), 0);
    }

    /// Writes the number into the request.
    pub(super) fn write_mark(&mut self, mark: Range<usize>, number: u64) {
        let mut number = number;
        for digit in self.request[mark].iter_mut().rev() {
            *digit = b'0' + (number % 10) as u8;
            number /= 10;
        }
    }

    /// Sends as much as the socket accepts.
    pub(super) fn flush(&mut self) -> Result<(), BenchError> {
        while self.since.is_some() && self.sent < self.request.len() {
            match self.socket.write(&self.request[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(self.failed(AnswerError::Closed)),
            }
        }
        Ok(())
    }

    /// Reads what is available; `buffer` is scratch.
    pub(super) fn read(&mut self, buffer: &mut [u8], expected: &[u8]) -> Result<Step, BenchError> {
        loop {
            let count = match self.socket.read(buffer) {
                Ok(0) => return self.ended(),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Step::Waits),
                Err(_) => return self.ended(),
            };
            let reported = self.reader.push(&buffer[..count], expected).map_err(|error| self.failed(error))?;
            if let Some(reported) = reported {
                let Some(since) = self.since.take() else {
                    return Err(self.failed(AnswerError::Syntax { what: "an unsolicited answer" }));
                };
                self.closed = reported.closes;
                return Ok(Step::Done { since });
            }
            // A short read has emptied the socket; new bytes raise a new event.
            if count < buffer.len() {
                return Ok(Step::Waits);
            }
        }
    }

    fn ended(&mut self) -> Result<Step, BenchError> {
        self.closed = true;
        if self.since.is_some() || !self.reader.is_fresh() {
            return Err(self.failed(AnswerError::Closed));
        }
        Ok(Step::Waits)
    }

    fn failed(&self, source: AnswerError) -> BenchError {
        BenchError::Answer { request: self.number, source }
    }
}
