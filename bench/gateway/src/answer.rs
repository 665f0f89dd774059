//! Reads an HTTP/1.1 answer incrementally and compares it byte for byte with the expected one.

/// Size limit of a head.
const HEAD_BYTES: usize = 16 << 10;

/// Faults of an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AnswerError {
    /// A status other than 2xx.
    #[error("status {status}: {excerpt}")]
    Status {
        /// The status.
        status: u16,
        /// The start of the body.
        excerpt: String,
    },
    /// Malformed HTTP.
    #[error("{what} cannot be read")]
    Syntax {
        /// The part.
        what: &'static str,
    },
    /// A body other than the engine's.
    #[error("the body differs from the engine's from byte {at} on")]
    Differs {
        /// Offset in the body.
        at: usize,
    },
    /// The body ended early.
    #[error("the body ended after {found} of {expected} bytes")]
    Short {
        /// Bytes received.
        found: usize,
        /// Bytes that the engine sent.
        expected: usize,
    },
    /// The connection closed in the middle of an answer.
    #[error("the connection ended in the middle of an answer")]
    Closed,
    /// The rank that the gateway reports is not the one that the engine received.
    #[error("the gateway reports rank {said:?}, the engine received {received:?}")]
    Misrouted {
        /// `x-semmoe-rank`.
        said: Option<u16>,
        /// `x-mock-rank`.
        received: Option<u16>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    Length { left: usize },
    ChunkSize,
    Chunk { left: usize },
    ChunkEnd,
    Trailer,
}

/// Fields of a complete answer's head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct AnswerHead {
    /// The server closes the connection after this answer.
    pub(crate) closes: bool,
    /// `x-semmoe-rank`.
    pub(crate) rank: Option<u16>,
    mock_rank: Option<u16>,
}

/// Reads consecutive answers.
#[derive(Debug)]
pub(crate) struct Reader {
    state: State,
    /// An incomplete head or chunk line.
    line: Vec<u8>,
    /// Bytes of the body received and verified.
    seen: usize,
    status: u16,
    received: AnswerHead,
}

impl Reader {
    pub(crate) fn new() -> Self {
        Self { state: State::Head, line: Vec::new(), seen: 0, status: 0, received: AnswerHead::default() }
    }

    /// Whether no byte of the next answer has arrived.
    pub(crate) fn is_fresh(&self) -> bool {
        self.state == State::Head && self.line.is_empty()
    }

    /// Takes the next bytes. `Some` when the answer is complete; further bytes are an error, because only one request
    /// is in flight.
    pub(crate) fn push(&mut self, mut bytes: &[u8], expected: &[u8]) -> Result<Option<AnswerHead>, AnswerError> {
        loop {
            let done = match self.state {
                State::Head => {
                    let Some(rest) = self.until(bytes, b"\r\n\r\n")? else { return Ok(None) };
                    bytes = rest;
                    self.head()?
                }
                State::Length { left } => {
                    let (data, rest) = bytes.split_at(left.min(bytes.len()));
                    bytes = rest;
                    self.data(data, expected)?;
                    self.state = State::Length { left: left - data.len() };
                    left == data.len()
                }
                State::ChunkSize => {
                    let Some(rest) = self.until(bytes, b"\r\n")? else { return Ok(None) };
                    bytes = rest;
                    let left = chunk_size(&self.line).ok_or(AnswerError::Syntax { what: "the size of a chunk" })?;
                    self.line.clear();
                    self.state = if left == 0 { State::Trailer } else { State::Chunk { left } };
                    false
                }
                State::Chunk { left } => {
                    let (data, rest) = bytes.split_at(left.min(bytes.len()));
                    bytes = rest;
                    self.data(data, expected)?;
                    self.state =
                        if left == data.len() { State::ChunkEnd } else { State::Chunk { left: left - data.len() } };
                    false
                }
                State::ChunkEnd => {
                    let Some(rest) = self.until(bytes, b"\r\n")? else { return Ok(None) };
                    bytes = rest;
                    if self.line != b"\r\n" {
                        return Err(AnswerError::Syntax { what: "the end of a chunk" });
                    }
                    self.line.clear();
                    self.state = State::ChunkSize;
                    false
                }
                State::Trailer => {
                    let Some(rest) = self.until(bytes, b"\r\n")? else { return Ok(None) };
                    bytes = rest;
                    let last = self.line == b"\r\n";
                    self.line.clear();
                    last
                }
            };
            if done {
                return self.finish(bytes, expected).map(Some);
            }
            if bytes.is_empty() {
                return Ok(None);
            }
        }
    }

    /// Moves bytes up to and including `end` to `line`; `None` while `end` is missing.
    fn until<'a>(&mut self, bytes: &'a [u8], end: &[u8]) -> Result<Option<&'a [u8]>, AnswerError> {
        let before = self.line.len();
        let look_from = before.saturating_sub(end.len() - 1);
        self.line.extend_from_slice(&bytes[..bytes.len().min(HEAD_BYTES)]);
        let Some(at) = memchr::memmem::find(&self.line[look_from..], end) else {
            if self.line.len() >= HEAD_BYTES {
                return Err(AnswerError::Syntax { what: "an unterminated head or line" });
            }
            return Ok(None);
        };
        let line = look_from + at + end.len();
        self.line.truncate(line);
        Ok(Some(&bytes[line - before..]))
    }

    /// True if no body follows the head.
    fn head(&mut self) -> Result<bool, AnswerError> {
        let head = std::mem::take(&mut self.line);
        let wrong = || AnswerError::Syntax { what: "the head" };
        let mut lines = std::str::from_utf8(&head).map_err(|_| wrong())?.split("\r\n");
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok());
        self.status = status.ok_or_else(wrong)?;
        (self.received, self.seen) = (AnswerHead::default(), 0);
        let (mut length, mut chunked) = (None, false);
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match name.len() {
                14 if name.eq_ignore_ascii_case("content-length") => {
                    length = Some(value.parse().map_err(|_| wrong())?);
                }
                17 if name.eq_ignore_ascii_case("transfer-encoding") => chunked = value.eq_ignore_ascii_case("chunked"),
                10 if name.eq_ignore_ascii_case("connection") => {
                    self.received.closes = value.eq_ignore_ascii_case("close")
                }
                13 if name.eq_ignore_ascii_case("x-semmoe-rank") => self.received.rank = value.parse().ok(),
                11 if name.eq_ignore_ascii_case("x-mock-rank") => self.received.mock_rank = value.parse().ok(),
                _ => {}
            }
        }
        self.line = head;
        self.line.clear();
        self.state = match (chunked, length) {
            (true, _) => State::ChunkSize,
            (false, Some(left)) => State::Length { left },
            (false, None) => return Err(AnswerError::Syntax { what: "an answer without a content length" }),
        };
        Ok(self.state == State::Length { left: 0 })
    }

    fn data(&mut self, data: &[u8], expected: &[u8]) -> Result<(), AnswerError> {
        if !(200..300).contains(&self.status) {
            let excerpt = String::from_utf8_lossy(&data[..data.len().min(200)]).into_owned();
            return Err(AnswerError::Status { status: self.status, excerpt });
        }
        if expected.get(self.seen..self.seen + data.len()) != Some(data) {
            let right = expected[self.seen..].iter().zip(data).take_while(|(a, b)| a == b).count();
            return Err(AnswerError::Differs { at: self.seen + right });
        }
        self.seen += data.len();
        Ok(())
    }

    fn finish(&mut self, rest: &[u8], expected: &[u8]) -> Result<AnswerHead, AnswerError> {
        self.state = State::Head;
        if !(200..300).contains(&self.status) {
            return Err(AnswerError::Status { status: self.status, excerpt: String::new() });
        }
        if self.seen != expected.len() {
            return Err(AnswerError::Short { found: self.seen, expected: expected.len() });
        }
        if !rest.is_empty() {
            return Err(AnswerError::Syntax { what: "data after the answer" });
        }
        let AnswerHead { rank: said, mock_rank: received, .. } = self.received;
        if said.is_some() && said != received {
            return Err(AnswerError::Misrouted { said, received });
        }
        Ok(self.received)
    }
}

fn chunk_size(line: &[u8]) -> Option<usize> {
    let digits = line.iter().position(|byte| !byte.is_ascii_hexdigit()).filter(|digits| (1..=8).contains(digits))?;
    usize::from_str_radix(std::str::from_utf8(&line[..digits]).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]], expected: &[u8]) -> Result<Option<AnswerHead>, AnswerError> {
        let mut reader = Reader::new();
        for (at, piece) in pieces.iter().enumerate() {
            let received = reader.push(piece, expected)?;
            if received.is_some() || at + 1 == pieces.len() {
                return Ok(received);
            }
        }
        Ok(None)
    }

    const CHUNKED: &[u8] =
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n10;x=1\r\n0123456789abcdef\r\n0\r\n\r\n";
    const LENGTH: &[u8] =
        b"HTTP/1.1 200 OK\r\ncontent-length: 19\r\nX-Semmoe-Rank: 3\r\nx-mock-rank: 3\r\n\r\nabc0123456789abcdef";

    #[test]
    fn cuts_do_not_matter() {
        for answer in [CHUNKED, LENGTH] {
            for first in 0..answer.len() {
                for second in first..answer.len() {
                    let pieces = [&answer[..first], &answer[first..second], &answer[second..]];
                    let received = read(&pieces, b"abc0123456789abcdef").unwrap().unwrap();
                    assert_eq!(received.rank, (answer == LENGTH).then_some(3));
                }
            }
        }
    }

    #[test]
    fn what_is_not_the_engine_s_answer_is_seen() {
        for (answer, expected, error) in [
            (CHUNKED, &b"abc0123456789abcdefX"[..], AnswerError::Short { found: 19, expected: 20 }),
            (CHUNKED, b"abc01234X6789abcdef", AnswerError::Differs { at: 8 }),
            (LENGTH, b"abc", AnswerError::Differs { at: 3 }),
            (
                b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy",
                b"",
                AnswerError::Status { status: 503, excerpt: "busy".into() },
            ),
            (
                b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
                b"",
                AnswerError::Status { status: 404, excerpt: String::new() },
            ),
            (b"HTTP/1.1 200 OK\r\n\r\n", b"", AnswerError::Syntax { what: "an answer without a content length" }),
            (
                b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-semmoe-rank: 1\r\nx-mock-rank: 2\r\n\r\n",
                b"",
                AnswerError::Misrouted { said: Some(1), received: Some(2) },
            ),
            (
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
                b"",
                AnswerError::Syntax { what: "the size of a chunk" },
            ),
            (
                b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\naHTTP",
                b"a",
                AnswerError::Syntax { what: "data after the answer" },
            ),
        ] {
            assert_eq!(read(&[answer], expected), Err(error), "{}", String::from_utf8_lossy(answer));
        }
        assert_eq!(read(&[&CHUNKED[..CHUNKED.len() - 1]], b"abc0123456789abcdef"), Ok(None));
    }
}
