//! Reads a whole request body, within limits on its size, its time and the total memory for bodies.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::{DataPlane, Ticket};
use crate::backends::RequestError;

/// Maximum number of bytes read from a rejected request.
const DISCARDED_BYTES: usize = 64 << 10;
const DISCARD_TIME: Duration = Duration::from_millis(500);

/// Reads a whole body and charges its memory to the ticket.
pub(crate) async fn read(
    plane: &DataPlane,
    headers: &HeaderMap,
    body: Incoming,
    ticket: &mut Ticket,
) -> Result<Bytes, RequestError> {
    let (limit_bytes, limit) = {
        let config = &plane.backends.current.load().config;
        (config.limits.body_bytes, config.timeouts.body)
    };
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|announced| announced > limit_bytes) {
        return Err(RequestError::BodyTooLong { limit_bytes });
    }
    let read = tokio::time::timeout(limit, collect(body, limit_bytes, announced.unwrap_or(0), ticket)).await;
    read.unwrap_or_else(|_| Err(RequestError::BodyTimeout { seconds: limit.as_secs_f64() }))
}

/// Discards the rest of a rejected request if it is short and arrives soon. The connection can then be reused, and an
/// HTTP/2 client that is still sending receives the response instead of a stream reset.
pub(crate) async fn discard(mut body: Incoming) {
    let rest = async {
        let mut taken = 0_usize;
        while let Some(Ok(frame)) = body.frame().await {
            taken = taken.saturating_add(frame.data_ref().map_or(0, Bytes::len));
            if taken > DISCARDED_BYTES {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}

async fn collect(
    mut body: Incoming,
    limit_bytes: usize,
    announced: usize,
    ticket: &mut Ticket,
) -> Result<Bytes, RequestError> {
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| RequestError::BodyRead { source: error.into() })?;
        let Ok(data) = frame.into_data() else { continue };
        let length = whole.len().saturating_add(data.len());
        if length > limit_bytes {
            return Err(RequestError::BodyTooLong { limit_bytes });
        }
        // Most bodies arrive as a single chunk, which is passed on without a copy.
        if whole.is_empty() && body.is_end_stream() {
            ticket.hold(data.len())?;
            return Ok(data);
        }
        // Copy even the first chunk: however short, it keeps the connection's entire buffer alive.
        if length > whole.capacity() {
            // Allocate at most twice the received size: a declared length alone claims no memory.
            let twice = length.saturating_mul(2).min(limit_bytes);
            let wanted = if (length..=twice).contains(&announced) { announced } else { twice };
            ticket.hold(wanted - whole.capacity())?;
            whole.reserve_exact(wanted - whole.len());
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.into())
}
