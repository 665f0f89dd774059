//! One worker's connections, reused between requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;

use super::target::Target;
use crate::Failure;

/// Uvicorn, which SGLang and vLLM use, closes idle connections after 5 s, so connections that are about to be closed
/// are not reused.
const MAX_IDLE: Duration = Duration::from_secs(4);

pub(crate) type Sender = SendRequest<Full<Bytes>>;

/// Idle connections of one worker, most recently used first.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(super) target: Arc<Target>,
    idle: Mutex<Vec<(Sender, Instant)>>,
    counts: Arc<ConnectionCounts>,
}

/// Connection counts of a run.
#[derive(Debug, Default)]
pub(crate) struct ConnectionCounts {
    pub(crate) opened: AtomicU64,
    /// Connections on which the server sent unexpected bytes, such as more than it announced.
    pub(crate) stray: AtomicU64,
}

impl Connections {
    pub(crate) fn new(target: Arc<Target>, counts: Arc<ConnectionCounts>) -> Self {
        Self { target, idle: Mutex::new(Vec::new()), counts }
    }

    /// Returns an idle connection that is still open.
    pub(crate) async fn idle(&self) -> Option<Sender> {
        loop {
            let (mut sender, since) = self.lock().pop()?;
            if since.elapsed() < MAX_IDLE && !sender.is_closed() && sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    /// Opens a connection. Its task ends with the connection, or with the worker's runtime.
    pub(crate) async fn open(&self) -> Result<Sender, Failure> {
        let stream = self.target.connect().await.map_err(Failure::Connect)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|_| Failure::Closed)?;
        self.counts.opened.fetch_add(1, Ordering::Relaxed);
        let counts = Arc::clone(&self.counts);
        tokio::spawn(async move {
            // A request in flight receives the error itself; bytes after a complete response belong to no request.
            if connection.await.is_err_and(|error| is_unexpected(&error)) {
                counts.stray.fetch_add(1, Ordering::Relaxed);
            }
        });
        Ok(sender)
    }

    /// Returns a connection to the idle list after a complete response.
    pub(crate) fn keep(&self, sender: Sender) {
        if !sender.is_closed() {
            self.lock().push((sender, Instant::now()));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Sender, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// hyper has no accessor for this kind of error.
fn is_unexpected(error: &hyper::Error) -> bool {
    !error.is_incomplete_message() && !error.is_closed() && !error.is_canceled() && !error.is_body_write_aborted() && {
        use std::error::Error;
        error.source().is_none() || error.is_parse()
    }
}
