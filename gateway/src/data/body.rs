//! Reading a request body: whole, within a size and a time.

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
/// Room reserved before anything arrived, whatever the client announces.
const FIRST_RESERVATION_BYTES: usize = 64 << 10;

pub(crate) async fn read(core: &Core, headers: &HeaderMap, body: Incoming) -> Result<Bytes, RequestError> {
    let (limit_bytes, limit) = core.body_limits();
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|announced| announced > limit_bytes) {
        return Err(RequestError::BodyTooLong { limit_bytes });
    }
    tokio::time::timeout(limit, collect(body, limit_bytes, announced))
        .await
        .unwrap_or_else(|_| Err(RequestError::BodyTimeout { seconds: limit.as_secs_f64() }))
}

/// Takes the rest of a request that is refused, if it is short and comes soon: its connection can be used again then, and a client
/// of HTTP/2 that is still sending sees the answer and not a reset stream.
pub(crate) async fn discard(body: Incoming) {
    let rest = collect(body, DISCARDED_BYTES, None);
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}

async fn collect(mut body: Incoming, limit_bytes: usize, announced: Option<usize>) -> Result<Bytes, RequestError> {
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
            whole.extend_from_slice(&std::mem::take(&mut first));
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() { first } else { whole.freeze() })
}
