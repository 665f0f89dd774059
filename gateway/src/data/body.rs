//! Reading a request body: whole, within a size, a time, and the memory that all of them may take together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;

use crate::error::RequestError;
use crate::state::Core;

/// What is taken of a refused request at most.
const DISCARDED_BYTES: usize = 64 << 10;
const DISCARD_TIME: Duration = Duration::from_millis(500);
/// What [`Core::body_limits`] tells.
pub(crate) struct BodyLimits {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
    /// Of all bodies together.
    pub(crate) memory_bytes: usize,
}

/// Room reserved before anything arrived, whatever the client announces.
const FIRST_RESERVATION_BYTES: usize = 64 << 10;

/// What bodies of more than one piece hold; one of a single piece stays in its connection's own buffer.
#[derive(Default)]
pub(crate) struct BodyMemory(AtomicUsize);

/// A part of it, given back when this is dropped.
pub(crate) struct Held<'a> {
    memory: &'a BodyMemory,
    limit_bytes: usize,
    bytes: usize,
}

impl Held<'_> {
    fn take(&mut self, bytes: usize) -> Result<(), RequestError> {
        self.bytes += bytes;
        let before = self.memory.0.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.limit_bytes {
            return Err(RequestError::BodyMemory { limit_bytes: self.limit_bytes });
        }
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.0.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// A body, and what it holds until the request is sent.
pub(crate) async fn read<'a>(
    core: &'a Core,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<(Bytes, Held<'a>), RequestError> {
    let BodyLimits { bytes: limit_bytes, time: limit, memory_bytes } = core.body_limits();
    let mut held = Held { memory: &core.body_memory, limit_bytes: memory_bytes, bytes: 0 };
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|announced| announced > limit_bytes) {
        return Err(RequestError::BodyTooLong { limit_bytes });
    }
    let read = tokio::time::timeout(limit, collect(body, limit_bytes, announced, &mut held)).await;
    let bytes = read.unwrap_or_else(|_| Err(RequestError::BodyTimeout { seconds: limit.as_secs_f64() }))?;
    Ok((bytes, held))
}

/// Takes the rest of a request that is refused, if it is short and comes soon: its connection can be used again then, and a client
/// of HTTP/2 that is still sending sees the answer and not a reset stream.
pub(crate) async fn discard(body: Incoming) {
    // So little needs no account.
    let memory = BodyMemory::default();
    let mut held = Held { memory: &memory, limit_bytes: DISCARDED_BYTES, bytes: 0 };
    let rest = collect(body, DISCARDED_BYTES, None, &mut held);
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}

async fn collect(
    mut body: Incoming,
    limit_bytes: usize,
    announced: Option<usize>,
    held: &mut Held<'_>,
) -> Result<Bytes, RequestError> {
    let mut first = Bytes::new();
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| RequestError::BodyRead { cause: error.to_string() })?;
        let Ok(data) = frame.into_data() else { continue };
        if first.len().saturating_add(whole.len()).saturating_add(data.len()) > limit_bytes {
            return Err(RequestError::BodyTooLong { limit_bytes });
        }
        // Most bodies come in one piece, which is then passed on uncopied.
        if first.is_empty() && whole.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole.reserve(announced.unwrap_or(0).min(FIRST_RESERVATION_BYTES));
            held.take(first.len())?;
            whole.extend_from_slice(&std::mem::take(&mut first));
        }
        held.take(data.len())?;
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() { first } else { whole.freeze() })
}
