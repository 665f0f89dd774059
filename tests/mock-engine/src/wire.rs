//! Requests of HTTP/1.1 read from bare sockets, for engines that answer as no library would.

use tokio::io::{AsyncRead, AsyncReadExt};

/// One request as it came.
#[derive(Clone, Debug)]
pub struct RawRequest {
    /// The first line and the headers, in lower case.
    pub head: String,
    pub body: Vec<u8>,
}

impl RawRequest {
    /// The next one of a connection; `None` at its end. `read` keeps what came behind it.
    pub async fn next(stream: &mut (impl AsyncRead + Unpin), read: &mut Vec<u8>) -> Option<Self> {
        let head = loop {
            if let Some(at) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(read).await.ok()? == 0 {
                return None;
            }
        };
        let text = String::from_utf8(read[..head].to_vec()).unwrap().to_ascii_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let end = head + length.unwrap_or(0usize);
        while read.len() < end {
            if stream.read_buf(read).await.ok()? == 0 {
                return None;
            }
        }
        let rest = read.split_off(end);
        let body = std::mem::replace(read, rest).split_off(head);
        Some(Self { head: text, body })
    }

    pub fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap()
    }
}
