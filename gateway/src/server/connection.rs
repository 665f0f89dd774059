//! One accepted connection: TLS where the listener has it, then HTTP/1.1 or HTTP/2, to its end.
//!
//! Every wait has an end: for a handshake `timeouts.handshake_seconds`; for the first byte, for the head of a request
//! and between two requests `timeouts.header_seconds`; an HTTP/2 connection without a stream ends after that, too.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::Watcher;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Serves;
use super::protocol::{Protocol, http1, http2};
use super::tls::ServerTls;
use crate::config::Config;
use crate::stall::Stalling;
use crate::state::Core;

/// For an error to be sent on a connection that is closed in the middle of a request.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The state that all connections of a listener share.
pub(super) struct Shared<S> {
    pub(super) service: S,
    pub(super) core: Arc<Core>,
    pub(super) tls: Option<Arc<ServerTls>>,
    /// Handshakes at a time: they cost much more than requests.
    pub(super) handshakes: Semaphore,
    /// No new connection and no new request on one.
    pub(super) closing: CancellationToken,
    /// Ends connections in the middle of what they do.
    pub(super) aborting: CancellationToken,
}

impl<S: Serves> Shared<S> {
    /// To the connection's end. The watcher reports when a stop was asked for, and holds it up until then.
    pub(super) async fn serve(&self, stream: TcpStream, watcher: Watcher) {
        // Events are small and urgent. A socket that refuses is closing anyway.
        let _ = stream.set_nodelay(true);
        // Errors are the client's: it went away or spoke no HTTP.
        with_last_words(pin!(self.open(stream, watcher)), &self.aborting).await;
    }

    async fn open(&self, stream: TcpStream, watcher: Watcher) {
        let config = self.core.config();
        if let Some(tls) = &self.tls {
            // Boxed, as the connection outlives it by far.
            let handshake = Box::pin(self.handshake(tls, stream, config.timeouts.handshake));
            let secured = tokio::select! {
                secured = handshake => secured,
                () = self.closing.cancelled() => return,
            };
            let Some(stream) = secured else { return };
            let protocol = Protocol::of_alpn(stream.get_ref().1.alpn_protocol());
            return Box::pin(self.http(&config, stream, protocol, watcher)).await;
        }
        let first = tokio::time::timeout(config.timeouts.header, Protocol::of_plain(&stream));
        let protocol = tokio::select! {
            protocol = first => protocol,
            () = self.closing.cancelled() => return,
        };
        if let Ok(Ok(protocol)) = protocol {
            Box::pin(self.http(&config, stream, protocol, watcher)).await;
        }
    }

    /// `None` where it failed or was not done within `limit`: the client's fault, and counted.
    async fn handshake(&self, tls: &ServerTls, stream: TcpStream, limit: Duration) -> Option<TlsStream<TcpStream>> {
        let accepted = async {
            let _permit = self.handshakes.acquire().await;
            tls.accept(stream).await
        };
        let (outcome, stream) = match tokio::time::timeout(limit, accepted).await {
            Ok(Ok(stream)) => ("ok", Some(stream)),
            Ok(Err(error)) => {
                tracing::debug!(%error, "TLS handshake failed");
                ("failed", None)
            }
            Err(_) => ("timeout", None),
        };
        self.core.metrics.trust.handshake(outcome);
        stream
    }

    async fn http<I>(&self, config: &Config, stream: I, protocol: Protocol, watcher: Watcher)
    where
        I: AsyncRead + AsyncWrite + Unpin + 'static,
    {
        let io = TokioIo::new(Stalling::new(stream, config.timeouts.client));
        match protocol {
            Protocol::Http1 => {
                let _ = watcher.watch(http1(config).serve_connection(io, self.service.clone())).await;
            }
            Protocol::Http2 => {
                let tasks = StreamTasks::new(&self.aborting);
                let limit = config.timeouts.header;
                let mut connection = pin!(http2(config, tasks.clone()).serve_connection(io, self.service.clone()));
                tokio::select! {
                    _ = connection.as_mut() => return,
                    () = tasks.idle(limit) => {}
                    () = self.closing.cancelled() => {}
                }
                connection.as_mut().graceful_shutdown();
                // A client need not agree.
                tokio::select! {
                    _ = connection => {}
                    () = tasks.idle(limit) => {}
                }
                drop(watcher);
            }
        }
    }
}

/// Work that goes on for a moment after it was to be ended, so that an error can be sent. It is pinned by the caller: a
/// future that takes another one by value holds it twice.
async fn with_last_words<F: Future + ?Sized>(mut work: Pin<&mut F>, aborting: &CancellationToken) {
    tokio::select! {
        _ = &mut work => {}
        () = aborting.cancelled() => {
            let _ = tokio::time::timeout(LAST_WORDS, work).await;
        }
    }
}

/// Runs the streams of one HTTP/2 connection, and knows whether there are any.
#[derive(Clone)]
pub(super) struct StreamTasks {
    aborting: CancellationToken,
    running: TaskTracker,
    begun: Arc<AtomicU64>,
}

impl StreamTasks {
    fn new(aborting: &CancellationToken) -> Self {
        Self { aborting: aborting.clone(), running: TaskTracker::new(), begun: Arc::default() }
    }

    /// Returns once there was no stream for `limit`, or for up to twice as long.
    async fn idle(&self, limit: Duration) {
        let mut seen = None;
        loop {
            let begun = self.begun.load(Ordering::Relaxed);
            if self.running.is_empty() && seen == Some(begun) {
                return;
            }
            seen = self.running.is_empty().then_some(begun);
            tokio::time::sleep(limit).await;
        }
    }
}

impl<F> hyper::rt::Executor<F> for StreamTasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, stream: F) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let aborting = self.aborting.clone();
        // One allocation here, or else the task holds the stream's state twice.
        let mut stream = Box::pin(stream);
        self.running.spawn(async move { with_last_words(stream.as_mut(), &aborting).await });
    }
}
