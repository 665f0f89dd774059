//! HTTP/2 connections to engines. One connection carries many requests; hyper-util's client manages it.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use ::http::{Request, Response, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tower::service_fn;
use tower::util::BoxCloneSyncService;

use super::connect::{NoConnection, open};
use super::connection::Stream;
use super::error::without_query;
use super::pool::Origin;
use super::{AnswerBody, ClientSettings, HttpError, RequestBody, check_framing};
use crate::tls::ClientTls;

/// Flow control window of a stream: bytes that an engine may send ahead of a slow client. The connection's window is a
/// thousand times larger, so that slow clients do not stall responses to others.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// An engine that does not respond to a ping within this time is considered gone.
const PING: Duration = Duration::from_secs(10);

type BoxError = Box<dyn Error + Send + Sync>;
type Connector = BoxCloneSyncService<Uri, TokioIo<Box<dyn Stream>>, BoxError>;

pub(super) struct Http2 {
    client: Client<Connector, RequestBody>,
}

impl Http2 {
    pub(super) fn new(settings: &ClientSettings) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(settings.pool_idle_timeout)
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(PING)
            .http2_keep_alive_timeout(PING)
            .build(connector(settings.tls.clone(), settings.connect_timeout));
        Self { client }
    }

    /// Sends a request, and retries once if the engine did not process it because it was closing this connection or had
    /// reached its stream limit.
    pub(super) async fn send(&self, request: Request<RequestBody>) -> Result<Response<AnswerBody>, HttpError> {
        match self.try_send(request.clone()).await {
            Err(HttpError::NotTaken { .. }) => self.try_send(request).await,
            sent => sent,
        }
    }

    async fn try_send(&self, request: Request<RequestBody>) -> Result<Response<AnswerBody>, HttpError> {
        let uri = request.uri().clone();
        match self.client.request(request).await {
            Ok(answer) => match check_framing(answer.status(), answer.headers()) {
                Ok(()) => Ok(answer.map(AnswerBody::shared)),
                Err(cause) => Err(HttpError::Framing { url: without_query(&uri), cause }),
            },
            Err(error) => {
                let url = without_query(&uri);
                if let Some(no_connection) = no_connection(&error) {
                    return Err(no_connection.into_http(url));
                }
                let (connecting, not_taken) = (error.is_connect(), was_not_taken(&error));
                let is_reset = of_engine(&error).is_some_and(h2::Error::is_reset);
                let source = error.into();
                Err(match () {
                    () if connecting => HttpError::Connect { url, source },
                    () if not_taken => HttpError::NotTaken { url, source },
                    // Only this request failed; the connection remains usable.
                    () if is_reset => HttpError::Body { url, source },
                    () => HttpError::Exchange { url, source },
                })
            }
        }
    }
}

/// Extracts the connector's error from the client's.
fn no_connection(error: &(dyn Error + 'static)) -> Option<NoConnection> {
    chain(error).find_map(|error| error.downcast_ref().cloned())
}

/// Returns whether the engine reported that it did not process the request: REFUSED_STREAM, or GOAWAY with an earlier
/// last stream (RFC 9113, 8.7). Streams that the engine still processes never fail with these errors.
fn was_not_taken(error: &(dyn Error + 'static)) -> bool {
    of_engine(error).is_some_and(|error| error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM))
}

/// Returns the error that the engine itself sent in an HTTP/2 frame, if any.
fn of_engine<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a h2::Error> {
    chain(error).find_map(|error| error.downcast_ref()).filter(|error: &&h2::Error| error.is_remote())
}

fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

fn connector(tls: Option<Arc<ClientTls>>, limit: Duration) -> Connector {
    BoxCloneSyncService::new(service_fn(move |uri: Uri| {
        let tls = tls.clone();
        async move {
            let origin = Origin::of(uri.scheme(), uri.authority().cloned()).ok_or("no host")?;
            let stream = open(&origin, tls.as_deref(), limit).await?;
            Ok::<_, BoxError>(TokioIo::new(stream))
        }
    }))
}

impl Connection for Box<dyn Stream> {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}
