//! Listeners: accepting, bounding and closing connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::{BoxError, Router};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::HttpService;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::error::StartError;
use crate::state::Core;

/// After an accept failed for want of file descriptors or memory, some time for connections to end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Binds an address; port 0 takes a free one.
pub(crate) async fn bind(what: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let fail = |source| StartError::Bind { what, address, source };
    let listener = TcpListener::bind(address).await.map_err(fail)?;
    let bound = listener.local_addr().map_err(fail)?;
    Ok((listener, bound))
}

/// For an error to be sent on a connection that is closed in the middle of a request.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// hyper's own limit.
const HEADERS_ON_STACK: usize = 100;

/// One listener and the connections that it accepted.
pub(crate) struct Server {
    /// Ends the accept loop.
    closing: CancellationToken,
    /// Ends connections in the middle of what they do.
    aborting: CancellationToken,
    connections: TaskTracker,
    accepting: tokio::task::JoinHandle<GracefulShutdown>,
}

impl Server {
    /// Serves requests until [`Server::shutdown`].
    pub(crate) fn start<S: Serves>(listener: TcpListener, service: S, core: Arc<Core>) -> Self {
        let closing = CancellationToken::new();
        let aborting = CancellationToken::new();
        let connections = TaskTracker::new();
        let accept = Accept {
            service,
            permits: Arc::new(Semaphore::new(core.config().limits.connections)),
            core,
            aborting: aborting.clone(),
            connections: connections.clone(),
        };
        let accepting = tokio::spawn(accept.run(listener, closing.clone()));
        Self { closing, aborting, connections, accepting }
    }

    /// Stops accepting, lets running requests end for at most `grace`, then calls `close` and ends what is left, which may
    /// still say so to its client.
    pub(crate) async fn shutdown(self, grace: Duration, close: impl FnOnce()) {
        self.closing.cancel();
        if let Ok(graceful) = self.accepting.await {
            // Idle connections close now, busy ones after their answer.
            let _ = tokio::time::timeout(grace, graceful.shutdown()).await;
        }
        close();
        self.aborting.cancel();
        self.connections.close();
        self.connections.wait().await;
    }
}

/// What answers the requests of a listener.
pub(crate) trait Serves:
    HttpService<
        Incoming,
        Future: Send,
        ResBody: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
        Error: Into<BoxError>,
    > + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S> Serves for S where
    S: HttpService<
            Incoming,
            Future: Send,
            ResBody: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
            Error: Into<BoxError>,
        > + Clone
        + Send
        + Sync
        + 'static
{
}

/// The routes of a plane on which nobody is in a hurry.
pub(crate) fn routes(router: Router) -> impl Serves {
    TowerToHyperService::new(router)
}

fn http(config: &Config) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(config.timeouts.header)
        .max_header_size(config.limits.header_bytes);
    // hyper keeps up to this many on the stack; any number that is set costs an allocation per request.
    if config.limits.headers != HEADERS_ON_STACK {
        http.max_headers(config.limits.headers);
    }
    http
}

struct Accept<S> {
    service: S,
    core: Arc<Core>,
    permits: Arc<Semaphore>,
    aborting: CancellationToken,
    connections: TaskTracker,
}

impl<S: Serves> Accept<S> {
    async fn run(self, listener: TcpListener, closing: CancellationToken) -> GracefulShutdown {
        let graceful = GracefulShutdown::new();
        let accept = async {
            loop {
                // Without a free permit connections wait in the kernel's queue. The semaphore is never closed.
                let permit = Arc::clone(&self.permits).acquire_owned().await;
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let connection = self.connection(stream, graceful.watcher());
                        self.connections.spawn(async move {
                            let _permit = permit;
                            connection.await;
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
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

    fn connection(&self, stream: TcpStream, watcher: Watcher) -> impl Future<Output = ()> + use<S> {
        // Events are small and urgent. A socket that refuses is closing anyway.
        let _ = stream.set_nodelay(true);
        let service = self.service.clone();
        let connection = watcher.watch(http(&self.core.config()).serve_connection(TokioIo::new(stream), service));
        let aborting = self.aborting.clone();
        async move {
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                // Errors here are the client's: it went away or spoke no HTTP.
                _ = &mut connection => {}
                () = aborting.cancelled() => {
                    let _ = tokio::time::timeout(LAST_WORDS, connection).await;
                }
            }
        }
    }
}
