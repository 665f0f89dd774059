//! Requests to the mock engine: the kind of answer and where the request ends.

/// Size limit of a head.
const HEAD_BYTES: usize = 64 << 10;
const STREAM: &[u8] = b"\"stream\"";

/// The kind of answer that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat {
        streams: bool,
    },
    Healthy,
    ServerInfo,
    Models,
    /// Not part of the engine's API: sets how events are sent from now on.
    Pace {
        single: bool,
    },
    Unknown,
}

/// A complete request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// The pin.
    pub(super) rank: Option<u16>,
    /// Length of head and body in bytes.
    pub(super) length: usize,
}

/// A request that the mock does not understand; the connection is closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotUnderstood;

impl Request {
    /// Parses the first request in `bytes`; `None` if it is incomplete.
    pub(super) fn first(bytes: &[u8]) -> Result<Option<Self>, NotUnderstood> {
        let within = &bytes[..bytes.len().min(HEAD_BYTES)];
        let Some(end) = memchr::memmem::find(within, b"\r\n\r\n") else {
            return if bytes.len() >= HEAD_BYTES { Err(NotUnderstood) } else { Ok(None) };
        };
        let head = std::str::from_utf8(&bytes[..end]).map_err(|_| NotUnderstood)?;
        let (first, headers) = head.split_once("\r\n").unwrap_or((head, ""));
        let (mut content_length, mut rank) = (0usize, None);
        for line in headers.split("\r\n") {
            let Some((name, value)) = line.split_once(':') else { continue };
            match name.len() {
                14 if name.eq_ignore_ascii_case("content-length") => {
                    content_length = value.trim().parse().map_err(|_| NotUnderstood)?;
                }
                20 if name.eq_ignore_ascii_case("x-data-parallel-rank") => rank = value.trim().parse().ok(),
                17 if name.eq_ignore_ascii_case("transfer-encoding") => return Err(NotUnderstood),
                _ => {}
            }
        }
        let begin = end + 4;
        let length = begin.checked_add(content_length).ok_or(NotUnderstood)?;
        let Some(body) = bytes.get(begin..length) else { return Ok(None) };
        let path = first.split(' ').nth(1).ok_or(NotUnderstood)?;
        Ok(Some(Self { kind: kind(path, body), rank, length }))
    }
}

fn kind(path: &str, body: &[u8]) -> Kind {
    match path {
        "/v1/chat/completions" => Kind::Chat { streams: streams(body) },
        "/health" | "/health_generate" => Kind::Healthy,
        "/server_info" | "/get_server_info" | "/model_info" | "/get_model_info" => Kind::ServerInfo,
        "/v1/models" => Kind::Models,
        "/bench/burst" => Kind::Pace { single: false },
        "/bench/single" => Kind::Pace { single: true },
        _ => Kind::Unknown,
    }
}

/// Whether a body has `"stream": true`. A prompt cannot contain it, because its quotes are escaped.
fn streams(body: &[u8]) -> bool {
    let mut rest = body;
    while let Some(at) = memchr::memmem::find(rest, STREAM) {
        let behind = &rest[at + STREAM.len()..];
        let value =
            behind.iter().position(|byte| !matches!(byte, b' ' | b':')).map_or(&b""[..], |start| &behind[start..]);
        if (at == 0 || rest[at - 1] != b'\\') && value.starts_with(b"true") {
            return true;
        }
        rest = behind;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_cut_and_distinguished() {
        for (bytes, kind, rank) in [
            ("GET /health HTTP/1.1\r\nhost: x\r\n\r\n", Kind::Healthy, None),
            (
                "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 15\r\nX-Data-Parallel-Rank: 3\r\n\r\n{\"stream\":true}",
                Kind::Chat { streams: true },
                Some(3),
            ),
            (
                "POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 35\r\n\r\n{\"a\":\"\\\"stream\\\":true\",\"stream\":0 }",
                Kind::Chat { streams: false },
                None,
            ),
            ("POST /flush_cache HTTP/1.1\r\n\r\n", Kind::Unknown, None),
        ] {
            let expected = Request { kind, rank, length: bytes.len() };
            assert_eq!(Request::first(bytes.as_bytes()), Ok(Some(expected)), "{bytes}");
            for cut in 0..bytes.len() {
                assert_eq!(Request::first(&bytes.as_bytes()[..cut]), Ok(None), "{bytes} {cut}");
            }
        }
        for bytes in [
            "POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
            "\r\n\r\n",
        ] {
            assert_eq!(Request::first(bytes.as_bytes()), Err(NotUnderstood), "{bytes}");
        }
    }
}
