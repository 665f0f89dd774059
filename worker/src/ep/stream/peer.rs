//! One connected peer: sends and receives frames incrementally over a non-blocking stream.

use std::io::{self, IoSlice};

use super::ByteStream;
use super::frame::{HEADER_BYTES, Header, MAX_CAUSE_BYTES};

/// Size of the read-ahead buffer, which lets several small messages share one system call. Large messages bypass it.
const BUFFER_BYTES: usize = 64 << 10;
/// How far a receive buffer may grow beyond the received bytes, so that a header by itself cannot cause a large
/// allocation.
const GROWTH_BYTES: usize = 1 << 20;
const _: () = assert!(HEADER_BYTES + MAX_CAUSE_BYTES <= BUFFER_BYTES);

/// The reason that a peer is no longer usable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    /// The peer closed the connection without giving a reason, or the connection broke.
    Closed(String),
    /// The peer gave up because a rank failed.
    Failure { rank: u16, cause: String },
    /// The peer sent invalid data.
    Protocol(String),
    /// The peer did not respond in time.
    Late,
}

/// The result of an operation on a stream that may not be ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    Done,
    /// The stream would block.
    Pending,
}

/// One peer's stream, with the bytes read ahead and the progress of the current message.
#[derive(Debug)]
pub struct Peer<S> {
    pub(crate) stream: S,
    buffer: Box<[u8]>,
    /// `buffer[start..end]` has been read but not yet consumed.
    start: usize,
    end: usize,
    /// Length of the message being received, and how many of its bytes are in the caller's buffer.
    receiving: Option<(usize, usize)>,
    header: [u8; HEADER_BYTES],
    /// Number of collectives begun with this peer.
    collective: u64,
    /// Number of header and message bytes sent so far.
    sent: usize,
}

impl<S: ByteStream> Peer<S> {
    pub(super) fn new(stream: S) -> Self {
        let buffer = if S::READ_AHEAD { BUFFER_BYTES } else { HEADER_BYTES + MAX_CAUSE_BYTES };
        Self {
            stream,
            buffer: vec![0; buffer].into_boxed_slice(),
            start: 0,
            end: 0,
            receiving: None,
            header: [0; HEADER_BYTES],
            collective: 0,
            sent: 0,
        }
    }

    /// Begins the next collective with this peer and its message of `length` bytes.
    pub(super) fn begin(&mut self, length: usize) {
        self.collective += 1;
        self.header = Header::Data { collective: self.collective, length }.encode();
        self.sent = 0;
    }

    /// Sends more of the current message.
    pub(super) fn send(&mut self, message: &[u8]) -> Result<Progress, Fault> {
        while self.sent < HEADER_BYTES + message.len() {
            let header = &self.header[self.sent.min(HEADER_BYTES)..];
            let rest = &message[self.sent.saturating_sub(HEADER_BYTES)..];
            let written = at_once(|| self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(rest)]));
            match written? {
                None => return Ok(Progress::Pending),
                Some(0) => return Err(Fault::Closed("the connection accepts no more bytes".to_owned())),
                Some(count) => self.sent += count,
            }
        }
        Ok(Progress::Done)
    }

    /// Whether a message has been sent in part; nothing else may be sent until it is complete.
    pub(super) fn is_mid_send(&self, length: usize) -> bool {
        self.sent > 0 && self.sent < HEADER_BYTES + length
    }

    /// Sends a failure frame if the stream accepts it immediately; otherwise gives up.
    pub(super) fn send_failure(&mut self, rank: u16, cause: &str) {
        let cut = cause.floor_char_boundary(MAX_CAUSE_BYTES);
        let mut frame = Header::Failure { rank, length: cut }.encode().to_vec();
        frame.extend_from_slice(&cause.as_bytes()[..cut]);
        let _unsent = self.stream.write(&frame);
        self.stream.finish();
    }

    /// Receives more of the current collective's message; when done, `to` contains exactly that message.
    pub(super) fn receive(&mut self, to: &mut Vec<u8>) -> Result<Progress, Fault> {
        let collective = self.collective;
        loop {
            let Some((length, have)) = self.receiving else {
                match self.next_header()? {
                    None => return Ok(Progress::Pending),
                    Some((found, length)) if found == collective => self.receiving = Some((length, 0)),
                    Some((found, _)) => {
                        let detail = format!("a message of collective {found}, expected {collective}");
                        return Err(Fault::Protocol(detail));
                    }
                }
                continue;
            };
            if have == length {
                to.truncate(length);
                self.receiving = None;
                return Ok(Progress::Done);
            }
            let wanted = (length - have).min(GROWTH_BYTES);
            if to.len() < have + wanted {
                to.resize(have + wanted, 0);
            }
            match self.read(&mut to[have..have + wanted])? {
                0 => return Ok(Progress::Pending),
                count => self.receiving = Some((length, have + count)),
            }
        }
    }

    /// Whether a message has begun to arrive. A failure frame is returned as an error.
    pub(super) fn has_message(&mut self) -> Result<bool, Fault> {
        if self.receiving.is_none() {
            match self.next_header()? {
                None => return Ok(false),
                // Put the header back for `receive`.
                Some(_) => self.start -= HEADER_BYTES,
            }
        }
        Ok(true)
    }

    /// Reads and discards bytes until the peer reports a failure, closes, or has nothing more for now.
    pub(super) fn search_failure(&mut self) -> Option<Fault> {
        let mut scratch = [0; 4096];
        loop {
            let step = match self.receiving {
                None => self.next_header().map(|header| header.map(|(_, length)| (length, 0))),
                Some((length, have)) if have == length => Ok(Some((length, have))),
                Some((length, have)) => {
                    let wanted = (length - have).min(scratch.len());
                    let read = self.read(&mut scratch[..wanted]);
                    read.map(|count| (count > 0).then_some((length, have + count)))
                }
            };
            match step {
                Err(fault) => return Some(fault),
                Ok(Some((length, have))) => self.receiving = (have < length).then_some((length, have)),
                Ok(None) => return None,
            }
        }
    }

    /// Consumes and returns the next data header, `(collective, length)`, if it has arrived.
    fn next_header(&mut self) -> Result<Option<(u64, usize)>, Fault> {
        if !self.fill(HEADER_BYTES)? {
            return Ok(None);
        }
        let header = self.buffer[self.start..].first_chunk().expect("the buffer was just filled");
        match Header::decode(header).map_err(|error| Fault::Protocol(error.to_string()))? {
            Header::Data { collective, length } => {
                self.start += HEADER_BYTES;
                Ok(Some((collective, length)))
            }
            Header::Failure { rank, length } => {
                if !self.fill(HEADER_BYTES + length)? {
                    return Ok(None);
                }
                let cause = &self.buffer[self.start + HEADER_BYTES..][..length];
                Err(Fault::Failure { rank, cause: String::from_utf8_lossy(cause).into_owned() })
            }
        }
    }

    /// Reads until the buffer contains `count` unconsumed bytes; returns false if they have not arrived yet.
    fn fill(&mut self, count: usize) -> Result<bool, Fault> {
        while self.end - self.start < count {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let until = if S::READ_AHEAD { self.buffer.len() } else { count };
            match read_some(&mut self.stream, &mut self.buffer[self.end..until])? {
                0 => return Ok(false),
                read => self.end += read,
            }
        }
        Ok(true)
    }

    /// Reads message bytes, first from the read-ahead buffer, then from the stream; returns 0 if there are none for
    /// now.
    fn read(&mut self, to: &mut [u8]) -> Result<usize, Fault> {
        let ahead = self.end - self.start;
        if ahead == 0 {
            return read_some(&mut self.stream, to);
        }
        let count = ahead.min(to.len());
        to[..count].copy_from_slice(&self.buffer[self.start..][..count]);
        self.start += count;
        Ok(count)
    }
}

impl Fault {
    fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Protocol(error.to_string()),
            _ => Self::Closed(error.to_string()),
        }
    }
}

/// Reads available bytes; returns 0 if there are none for now. The end of the stream is a fault, because ranks never
/// disconnect in normal operation.
fn read_some(stream: &mut impl ByteStream, to: &mut [u8]) -> Result<usize, Fault> {
    match at_once(|| stream.read(to))? {
        None => Ok(0),
        Some(0) => Err(Fault::Closed("it closed its connection".to_owned())),
        Some(count) => Ok(count),
    }
}

/// Runs a stream call and returns the number of bytes transferred; `None` if it would have blocked.
fn at_once(mut call: impl FnMut() -> io::Result<usize>) -> Result<Option<usize>, Fault> {
    loop {
        match call() {
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(Fault::of(&error)),
        }
    }
}
