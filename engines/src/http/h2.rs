//! HTTP/2 to an engine: one connection for many requests, kept by hyper-util's client.

use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::{Request, Response, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tower::Service;

use super::connect::{NoConnection, open};
use super::connection::Stream;
use super::error::{causes, without_query};
use super::pool::Origin;
use super::{AnswerBody, ClientSettings, HttpError, RequestBody, check_framing};
use crate::tls::ClientTls;

/// Bytes that an engine may send ahead of one client that does not read. The connection's window is a thousand of them,
/// so that slow clients do not hold the others' answers up.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// An engine that does not answer a ping within this time is gone.
const PING: Duration = Duration::from_secs(10);

pub(super) struct Http2 {
    client: Client<Connector, RequestBody>,
}

impl Http2 {
    pub(super) fn new(settings: &ClientSettings) -> Self {
        let connector = Connector { tls: settings.tls.clone(), limit: settings.connect_timeout };
        let client = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(settings.pool_idle_timeout)
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(PING)
            .http2_keep_alive_timeout(PING)
            .build(connector);
        Self { client }
    }

    pub(super) async fn send(&self, request: Request<RequestBody>) -> Result<Response<AnswerBody>, HttpError> {
        let uri = request.uri().clone();
        match self.client.request(request).await {
            Ok(answer) => match check_framing(answer.status(), answer.headers()) {
                Ok(()) => Ok(answer.map(AnswerBody::shared)),
                Err(cause) => Err(HttpError::Framing { url: without_query(&uri), cause }),
            },
            Err(error) => {
                let url = without_query(&uri);
                // The outermost message only says which step failed, and the variant says that already.
                let cause = error.source().map_or_else(|| error.to_string(), causes);
                let connecting = error.is_connect();
                Err(match no_connection(&error) {
                    Some(no_connection) => no_connection.into_http(url),
                    None if connecting => HttpError::Connect { url, cause },
                    None => HttpError::Exchange { url, cause },
                })
            }
        }
    }
}

/// The connector's error, inside the client's.
fn no_connection(error: &(dyn std::error::Error + 'static)) -> Option<NoConnection> {
    std::iter::successors(Some(error), |error| (*error).source()).find_map(|error| error.downcast_ref().cloned())
}

#[derive(Clone)]
struct Connector {
    tls: Option<Arc<ClientTls>>,
    limit: Duration,
}

impl Service<Uri> for Connector {
    type Response = Io;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Io, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Self { tls, limit } = self.clone();
        Box::pin(async move {
            let origin = Origin::of(uri.scheme(), uri.authority().cloned()).ok_or("no host")?;
            let stream = open(&origin, tls.as_deref(), limit).await?;
            Ok(Io(TokioIo::new(stream)))
        })
    }
}

/// A stream in the form that the client wants.
struct Io(TokioIo<Box<dyn Stream>>);

impl Connection for Io {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl Write for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
