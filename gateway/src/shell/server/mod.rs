//! Listeners: accepting, limiting and closing connections.

mod connection;
mod files;
mod peers;
mod places;
mod protocol;
mod tls;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::{BoxError, Router};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backends::StartError;
use crate::data::DataPlane;
use connection::Shared;
use peers::Peers;
use places::Places;

pub use files::raise_file_limit;
pub(crate) use files::{STATUS_CONNECTIONS, connections};
pub(crate) use tls::{ListenerTls, ServerTls};

/// Maximum number of connections that the kernel queues until they are accepted.
const BACKLOG: u32 = 1024;
/// Pause after an accept failed for lack of file descriptors or memory, so that connections can end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const COMPLAIN_EVERY: Duration = Duration::from_secs(1);

/// A bound address that refuses connections until it listens.
pub(crate) struct Bound {
    socket: TcpSocket,
    pub(crate) address: SocketAddr,
    what: &'static str,
}

/// Binds an address; for port 0 the system chooses a free one.
pub(crate) fn bind(what: &'static str, address: SocketAddr) -> Result<Bound, StartError> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A previous process's connections may linger.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Bound { address: socket.local_addr()?, socket, what })
    };
    bound().map_err(|source| StartError::Bind { what, address, source })
}

impl Bound {
    /// Starts accepting connections.
    pub(crate) fn listen(self) -> Result<TcpListener, StartError> {
        let Self { socket, address, what } = self;
        socket.listen(BACKLOG).map_err(|source| StartError::Bind { what, address, source })
    }
}

/// One listener and its connections.
pub(crate) struct Server {
    /// Ends the accept loop.
    closing: CancellationToken,
    /// Cancelled to close all connections immediately.
    aborting: CancellationToken,
    connections: TaskTracker,
    accepting: tokio::task::JoinHandle<GracefulShutdown>,
}

impl Server {
    /// Serves requests until [`Server::shutdown`], with at most `connections_limit` concurrent connections.
    pub(crate) fn start<S: Serves>(
        listener: TcpListener,
        service: S,
        plane: &Arc<DataPlane>,
        tls: Option<Arc<ServerTls>>,
        connections_limit: usize,
    ) -> Self {
        let closing = CancellationToken::new();
        let aborting = CancellationToken::new();
        let connections = TaskTracker::new();
        let limits = &plane.backends.config().limits;
        let accept = Accept {
            places: Arc::new(Places::new(connections_limit, aborting.clone())),
            per_address: limits.connections_per_address,
            peers: Arc::default(),
            connections: connections.clone(),
            shared: Arc::new(Shared {
                service,
                plane: Arc::clone(plane),
                tls,
                handshakes: Semaphore::new(limits.handshakes),
                closing: closing.clone(),
                aborting: aborting.clone(),
            }),
        };
        let accepting = tokio::spawn(accept.run(listener, closing.clone()));
        Self { closing, aborting, connections, accepting }
    }

    /// Stops accepting connections, lets running requests finish for at most `grace`, then calls `close` and ends the
    /// rest, which may still send their clients an error.
    pub(crate) async fn shutdown(self, grace: Duration, close: impl FnOnce()) {
        self.closing.cancel();
        if let Ok(graceful) = self.accepting.await {
            // Idle connections close now, busy ones after their response.
            let _ = tokio::time::timeout(grace, graceful.shutdown()).await;
        }
        close();
        self.aborting.cancel();
        self.connections.close();
        self.connections.wait().await;
    }
}

/// A listener's service.
pub(crate) trait Serves:
    Service<
        Request<Incoming>,
        Response = Response<Self::Body>,
        Future: Send + 'static,
        Error: Into<BoxError> + Send + 'static,
    > + Clone
    + Send
    + Sync
    + 'static
{
    /// The body of its responses.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static;
}

impl<S, B> Serves for S
where
    S: Service<
            Request<Incoming>,
            Response = Response<B>,
            Future: Send + 'static,
            Error: Into<BoxError> + Send + 'static,
        > + Clone
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    type Body = B;
}

/// Serves the routes of a plane without latency requirements.
pub(crate) fn routes(router: Router) -> impl Serves {
    TowerToHyperService::new(router)
}

struct Accept<S> {
    places: Arc<Places>,
    /// Maximum number of connections per address; `None` for no limit.
    per_address: Option<usize>,
    peers: Arc<Peers>,
    connections: TaskTracker,
    shared: Arc<Shared<S>>,
}

impl<S: Serves> Accept<S> {
    async fn run(self, listener: TcpListener, closing: CancellationToken) -> GracefulShutdown {
        let graceful = GracefulShutdown::new();
        let mut complaints = Complaints::default();
        let accept = async {
            loop {
                match listener.accept().await {
                    Ok((stream, from)) => {
                        let trust = &self.shared.plane.metrics.trust;
                        let peer = self.per_address.map(|limit| self.peers.enter(from.ip(), limit));
                        if matches!(peer, Some(None)) {
                            trust.connection_refused();
                            continue;
                        }
                        // Further connections wait in the kernel's queue meanwhile.
                        let place = self.places.take(|| trust.connection_displaced()).await;
                        let (shared, watcher) = (Arc::clone(&self.shared), graceful.watcher());
                        self.connections.spawn(async move {
                            let _held = (peer, shared.plane.metrics.trust.open_connection());
                            shared.serve(stream, &place, watcher).await;
                        });
                    }
                    Err(error) => {
                        complaints.warn(&error);
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            () = accept => {}
            () = closing.cancelled() => {}
        }
        graceful
    }
}

/// Limits logging of accept errors, which can repeat without pause, to one line per second.
#[derive(Default)]
struct Complaints {
    last: Option<Instant>,
    /// Number of errors not logged since the last line.
    unsaid: u64,
}

impl Complaints {
    fn warn(&mut self, error: &std::io::Error) {
        self.unsaid += 1;
        if self.last.is_none_or(|last| last.elapsed() >= COMPLAIN_EVERY) {
            tracing::warn!(%error, times = self.unsaid, "cannot accept a connection");
            *self = Self { last: Some(Instant::now()), unsaid: 0 };
        }
    }
}
