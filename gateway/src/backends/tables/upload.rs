//! Tables uploaded in a request body: written to disk chunk by chunk, so that no upload is buffered in memory.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::{BodyExt, Limited};

use crate::backends::{Backends, RequestError};

use super::change::{blocking, note, permit, refusal};
use super::file::Copy;
use super::spool;

/// Number of bytes buffered between writes.
const PIECE_BYTES: usize = 1 << 20;
/// Uploads are long, so their time limit is this multiple of `timeouts.body_seconds`.
const PATIENCE: u32 = 10;

/// Receives a tables upload for a backend.
pub(crate) async fn receive(backends: &Arc<Backends>, backend: &str, body: Body) -> Result<Copy, RequestError> {
    let received = spooled(backends, body).await;
    if let Err(error) = &received {
        note(backends, backend, "upload", Err(error));
    }
    received
}

async fn spooled(backends: &Arc<Backends>, body: Body) -> Result<Copy, RequestError> {
    let config = backends.config();
    let limit_bytes = config.limits.table_bytes;
    // Reject a body that is declared too long before reading it.
    if body.size_hint().lower() > limit_bytes as u64 {
        return Err(RequestError::BodyTooLong { limit_bytes });
    }
    let _permit = permit(&backends.lanes.uploads).await?;
    let spool = spool(&config);
    let copy = blocking(move || Copy::begin(&spool).map_err(refusal)).await?;
    let within = config.timeouts.body * PATIENCE;
    let received = tokio::time::timeout(within, pieces(copy, body, limit_bytes)).await;
    received.unwrap_or(Err(RequestError::BodyTimeout { seconds: within.as_secs_f64() }))
}

async fn pieces(mut copy: Copy, mut body: Body, limit_bytes: usize) -> Result<Copy, RequestError> {
    let mut piece = BytesMut::new();
    loop {
        let frame = body.frame().await.transpose().map_err(|error| RequestError::BodyRead { source: error.into() })?;
        let ended = frame.is_none();
        if let Some(data) = frame.and_then(|frame| frame.into_data().ok()) {
            piece.extend_from_slice(&data);
        }
        if piece.len() < PIECE_BYTES && !ended {
            continue;
        }
        let full = piece.split().freeze();
        copy = blocking(move || match copy.push(&full) {
            Ok(true) => Ok(copy),
            Ok(false) => Err(RequestError::BodyTooLong { limit_bytes }),
            Err(error) => Err(refusal(error)),
        })
        .await?;
        if ended {
            return Ok(copy);
        }
    }
}

/// Reads a short body within a time limit.
pub(crate) async fn read(body: Body, limit_bytes: usize, within: Duration) -> Result<Bytes, RequestError> {
    let whole = tokio::time::timeout(within, Limited::new(body, limit_bytes).collect()).await;
    match whole {
        Err(_) => Err(RequestError::BodyTimeout { seconds: within.as_secs_f64() }),
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            Err(RequestError::BodyTooLong { limit_bytes })
        }
        Ok(Err(error)) => Err(RequestError::BodyRead { source: error.into() }),
    }
}
