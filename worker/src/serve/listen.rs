//! Connection handling for rank 0's HTTP server: limits on the number of connections and on the time to receive a
//! request's head and body.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use http_body_util::LengthLimitError;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// Maximum number of connections; further ones wait in the kernel's accept queue. A gateway keeps one per running
/// request.
const CONNECTIONS: usize = 4096;
/// Time limit for receiving the first request's head, and for each later head after the previous request.
const HEAD_LIMIT: Duration = Duration::from_secs(30);
const BODY_LIMIT: Duration = Duration::from_secs(60);
/// Largest request body, in bytes.
const BODY_BYTES: usize = 4 << 20;
/// Pause after `accept` fails for lack of file descriptors or memory, which gives open connections time to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `stop` resolves and all open requests have finished.
pub(super) async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) -> io::Result<()> {
    serve_with(listener, router, HEAD_LIMIT, stop).await
}

async fn serve_with(
    listener: TcpListener,
    router: Router,
    head_limit: Duration,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let (places, graceful, mut stop) = (Arc::new(Semaphore::new(CONNECTIONS)), GracefulShutdown::new(), pin!(stop));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_limit);
    loop {
        let (stream, place) = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            () = &mut stop => break,
        };
        // Small events must be sent immediately; if the option cannot be set, the connection still works.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            let _place = place;
            // Any error is the client's fault: it disconnected, timed out, or sent invalid HTTP.
            let _ = connection.await;
        });
    }
    graceful.shutdown().await;
    Ok(())
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> (TcpStream, Option<OwnedSemaphorePermit>) {
    // The semaphore is never closed.
    let place = Arc::clone(places).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, place),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// A complete request body, within the time and size limits.
pub(super) struct WholeBody(pub(super) Bytes);

impl<S: Sync> FromRequest<S> for WholeBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let too_long =
            || ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {BODY_BYTES} bytes"));
        let late = || {
            let seconds = BODY_LIMIT.as_secs();
            ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {seconds} s"))
        };
        let body = to_bytes(request.into_body(), BODY_BYTES);
        let body = tokio::time::timeout(BODY_LIMIT, body).await.map_err(|_| late())?;
        body.map(Self).map_err(|error| {
            let limited =
                std::error::Error::source(&error).is_some_and(<dyn std::error::Error>::is::<LengthLimitError>);
            if limited { too_long() } else { ApiError::bad(format!("cannot read the body: {error}")) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Clients that send nothing, or half a head.
    #[tokio::test]
    async fn who_sends_no_head_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, stop) = tokio::sync::oneshot::channel::<()>();
        let served = tokio::spawn(serve_with(listener, Router::new(), Duration::from_millis(50), async move {
            let _ = stop.await;
        }));
        for half in ["", "GET / HTTP/1.1\r\nhost: a\r\n"] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(half.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let read = client.read_to_end(&mut answer);
            let _ = tokio::time::timeout(Duration::from_secs(60), read).await.expect("closed in time");
        }
        end.send(()).unwrap();
        served.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_body_that_is_too_long_is_refused_as_json() {
        let long = Request::new(axum::body::Body::from(vec![0; BODY_BYTES + 1]));
        let answer = WholeBody::from_request(long, &()).await.err().unwrap().json();
        assert_eq!(answer["error"]["code"], 413, "{answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        let fits = Request::new(axum::body::Body::from(vec![0; BODY_BYTES]));
        assert_eq!(WholeBody::from_request(fits, &()).await.unwrap().0.len(), BODY_BYTES);
    }
}
