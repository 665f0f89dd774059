//! Serves one accepted connection until it ends: TLS if the listener uses it, then HTTP/1.1 or HTTP/2.
//!
//! Every wait is bounded: a handshake by `timeouts.handshake_seconds`; the first byte, a request head and the time
//! between two requests by `timeouts.header_seconds`, which also bounds an HTTP/2 connection without a stream. A
//! waiting connection makes room for a new one that finds no place ([`super::places`]).

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::Watcher;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Serves;
use super::places::Place;
use super::protocol::{Protocol, http1, http2};
use super::tls::ServerTls;
use crate::config::Config;
use crate::data::DataPlane;
use crate::data::outflow::{OF_STREAM, Outflow, Paced};
use crate::data::stall::{AnswerMemory, Holding, StalledStream, Stalling};

/// Time to send an error on a connection that is closed during a request.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Number of bytes that the kernel buffers beyond those it has sent to a client.
#[cfg(target_os = "linux")]
const UNSENT_BYTES: u32 = 16 << 10;

/// State shared by all of a listener's connections.
pub(super) struct Shared<S> {
    pub(super) service: S,
    pub(super) plane: Arc<DataPlane>,
    pub(super) tls: Option<Arc<ServerTls>>,
    /// Limits concurrent handshake computations, which cost much more than requests.
    pub(super) handshakes: Semaphore,
    /// Cancelled to accept no new connections, and no new requests on open ones.
    pub(super) closing: CancellationToken,
    /// Cancelled to close all connections immediately.
    pub(super) aborting: CancellationToken,
}

impl<S: Serves> Shared<S> {
    /// Serves the connection until it ends. The watcher delivers a shutdown request, and delays the shutdown until
    /// then.
    pub(super) async fn serve(&self, stream: TcpStream, place: &Place, watcher: Watcher) {
        // Events are small and urgent, and unsent data is better buffered here. A socket that rejects the option is
        // closing anyway.
        let _ = stream.set_nodelay(true);
        #[cfg(target_os = "linux")]
        let _ = socket2::SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT_BYTES);
        let mut open = pin!(self.open(stream, place, watcher));
        // Errors are caused by the client: it disconnected or did not send HTTP.
        tokio::select! {
            biased;
            () = open.as_mut() => {}
            () = place.ended() => last_words(open, &self.aborting).await,
        }
    }

    async fn open(&self, stream: TcpStream, place: &Place, watcher: Watcher) {
        let config = self.plane.backends.config();
        if let Some(tls) = &self.tls {
            // Boxed, because the connection far outlives the handshake.
            let handshake = Box::pin(self.handshake(tls, stream, config.timeouts.handshake));
            let secured = tokio::select! {
                secured = handshake => secured,
                () = self.closing.cancelled() => return,
            };
            let Some(stream) = secured else { return };
            let protocol = Protocol::of_alpn(stream.get_ref().1.alpn_protocol());
            return Box::pin(self.http(&config, stream, protocol, place, watcher)).await;
        }
        let first = tokio::time::timeout(config.timeouts.header, Protocol::of_plain(&stream));
        let protocol = tokio::select! {
            protocol = first => protocol,
            () = self.closing.cancelled() => return,
        };
        if let Ok(Ok(protocol)) = protocol {
            Box::pin(self.http(&config, stream, protocol, place, watcher)).await;
        }
    }

    /// Performs the handshake; returns `None` if it failed or exceeded `limit`. Both are the client's fault, and
    /// counted.
    async fn handshake(&self, tls: &ServerTls, stream: TcpStream, limit: Duration) -> Option<TlsStream<TcpStream>> {
        let accepted = async {
            // A silent client must not occupy a slot of the semaphore.
            stream.readable().await?;
            while_it_works(&self.handshakes, pin!(tls.accept(stream))).await
        };
        let (outcome, stream) = match tokio::time::timeout(limit, accepted).await {
            Ok(Ok(stream)) => ("ok", Some(stream)),
            Ok(Err(error)) => {
                tracing::debug!(%error, "TLS handshake failed");
                ("failed", None)
            }
            Err(_) => ("timeout", None),
        };
        self.plane.metrics.trust.handshake(outcome);
        stream
    }

    async fn http<I>(&self, config: &Config, stream: I, protocol: Protocol, place: &Place, watcher: Watcher)
    where
        I: AsyncRead + AsyncWrite + Unpin + 'static,
    {
        let (service, outflow) = (self.service.clone(), Arc::clone(place.outflow()));
        let (limit, holding) = (config.timeouts.client, Holding::new(Arc::clone(&self.plane.answer_memory)));
        match protocol {
            Protocol::Http1 => {
                let io = TokioIo::new(Stalling::new(stream, limit, holding, Some(Arc::clone(&outflow))));
                let paced = service_fn(move |request: Request<Incoming>| {
                    let running = outflow.run();
                    let answer = service.call(request);
                    answer.map(move |answer| {
                        answer.map(move |head| head.map(move |body| Paced::new(body, Some(running))))
                    })
                });
                let _ = watcher.watch(http1(config).serve_connection(io, paced)).await;
            }
            Protocol::Http2 => {
                let io = TokioIo::new(Stalling::new(stream, limit, holding, None));
                let paced = service_fn(move |request: Request<Incoming>| {
                    let answer = service.call(request);
                    answer.map(|answer| answer.map(|head| head.map(|body| Paced::new(body, None))))
                });
                let memory = Arc::clone(&self.plane.answer_memory);
                let tasks = StreamTasks::new(&self.aborting, outflow, limit, memory);
                let idle = config.timeouts.header;
                let mut connection = pin!(http2(config, tasks.clone()).serve_connection(io, paced));
                tokio::select! {
                    _ = connection.as_mut() => return,
                    () = tasks.idle(idle) => {}
                    () = self.closing.cancelled() => {}
                }
                connection.as_mut().graceful_shutdown();
                // A client may ignore the request to close.
                tokio::select! {
                    _ = connection => {}
                    () = tasks.idle(idle) => {}
                }
                drop(watcher);
            }
        }
    }
}

/// Runs work that repeatedly waits for its client, with a permit only while it computes, so that a slow or silent
/// client does not block others.
async fn while_it_works<F: Future>(permits: &Semaphore, mut work: Pin<&mut F>) -> F::Output {
    loop {
        // The semaphore is never closed.
        let permit = permits.acquire().await;
        if let Poll::Ready(done) = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
            return done;
        }
        drop(permit);
        // Wait until the work is woken, which also wakes this task.
        let mut woken = false;
        std::future::poll_fn(|_| if std::mem::replace(&mut woken, true) { Poll::Ready(()) } else { Poll::Pending })
            .await;
    }
}

/// Once all connections are ending, lets their work continue for a moment so that clients can be sent an error; a
/// connection that makes room has no error to send. The caller pins the work: a future that takes another one by value
/// stores it twice.
async fn last_words<F: Future + ?Sized>(work: Pin<&mut F>, aborting: &CancellationToken) {
    if aborting.is_cancelled() {
        let _ = tokio::time::timeout(LAST_WORDS, work).await;
    }
}

/// Runs one HTTP/2 connection's streams, and tracks whether there are any.
#[derive(Clone)]
pub(super) struct StreamTasks {
    aborting: CancellationToken,
    running: TaskTracker,
    begun: Arc<AtomicU64>,
    /// The connection's outflow.
    outflow: Arc<Outflow>,
    /// Time within which a client must read some of a stream.
    client_limit: Duration,
    memory: Arc<AnswerMemory>,
}

impl StreamTasks {
    fn new(
        aborting: &CancellationToken,
        outflow: Arc<Outflow>,
        client_limit: Duration,
        memory: Arc<AnswerMemory>,
    ) -> Self {
        let (aborting, running, begun) = (aborting.clone(), TaskTracker::new(), Arc::default());
        Self { aborting, running, begun, outflow, client_limit, memory }
    }

    /// Completes once there has been no stream for `limit`, or for up to twice as long.
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
        let (aborting, running) = (self.aborting.clone(), self.outflow.run());
        let mut stalled = StalledStream::new(self.client_limit, Holding::new(Arc::clone(&self.memory)));
        let outflow = Arc::<Outflow>::default();
        // Boxed once here; otherwise the task stores the stream's state twice.
        let mut stream = Box::pin(OF_STREAM.scope(Arc::clone(&outflow), stream));
        self.running.spawn(async move {
            // A task that ends before its response is complete resets the stream.
            let mut work = pin!(std::future::poll_fn(|cx| match stream.as_mut().poll(cx) {
                Poll::Pending => stalled.poll(cx, &outflow),
                Poll::Ready(_) => Poll::Ready(()),
            }));
            tokio::select! {
                biased;
                () = work.as_mut() => {}
                () = aborting.cancelled() => last_words(work, &aborting).await,
            }
            drop(running);
        });
    }
}
