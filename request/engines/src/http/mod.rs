//! The HTTP client used by the gateway, the profiler, the command line and tests.
//!
//! TCP or TLS, HTTP/1.1 or HTTP/2, pooled, `TCP_NODELAY`, no redirects, no environment proxies. [`HttpClient::send`]
//! returns a streaming response; the `get_*`/`post_*` helpers read a complete answer within a time-out and a size
//! limit. Dropping a response (or the future that waits for one) closes its connection, so the engine notices at once
//! that the client is gone.

mod body;
mod connect;
mod connection;
mod error;
mod h2;
mod key;
mod pool;
mod url;

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::{Bytes, BytesMut};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use serde::{Serialize, de::DeserializeOwned};

use crate::tls::{ClientFiles, ClientTls};

pub use body::{AnswerBody, RequestBody};
use connection::Connection;
pub use error::HttpError;
use h2::Http2;
pub use key::{EngineKey, KeyError};
use pool::{Origin, Pool};
pub use url::{BaseUrl, UrlError, names_loopback};

/// How connections are made and kept.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    /// Time limit for a TCP connection.
    pub connect_timeout: Duration,
    /// An idle connection is closed after this time. Keep it below the engine's own keep-alive time, or a request may
    /// be sent on a connection that the engine is just closing.
    pub pool_idle_timeout: Duration,
    /// Maximum idle connections, over all engines.
    pub max_idle: usize,
    /// For https URLs.
    pub tls: Option<Arc<ClientTls>>,
    /// HTTP/2 instead of HTTP/1.1; without TLS the engine must expect it from the first byte ("prior knowledge").
    pub http2: bool,
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            // Uvicorn, which SGLang and vLLM use, closes idle connections after 5 s.
            pool_idle_timeout: Duration::from_secs(4),
            max_idle: 1024,
            tls: None,
            http2: false,
        }
    }
}

/// Limits on reading a complete answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// From the start of the request to the last byte of the answer.
    pub timeout: Duration,
    /// Maximum size of the body, in bytes.
    pub max_bytes: usize,
}

impl Default for AnswerLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), max_bytes: 16 << 20 }
    }
}

/// A pooled HTTP client. Cloning shares the pool.
#[derive(Clone)]
pub struct HttpClient {
    pool: Arc<Pool>,
    /// The HTTP/2 client, used instead of the pool.
    http2: Option<Arc<Http2>>,
    tls: Option<Arc<ClientTls>>,
    connect_timeout: Duration,
    /// The `authorization` header of all requests, instead of their own.
    authorization: Arc<ArcSwapOption<HeaderValue>>,
}

impl std::fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpClient").field("connect_timeout", &self.connect_timeout).finish_non_exhaustive()
    }
}

impl Default for HttpClient {
    fn default() -> Self {
        Self::new(&ClientSettings::default())
    }
}

impl HttpClient {
    /// A client for one address with default settings; for https it trusts the system's authorities, and reads their
    /// files (blocking).
    ///
    /// # Errors
    /// If the system has no trusted authorities.
    pub fn for_url(url: &BaseUrl) -> Result<Self, HttpError> {
        let tls = url.is_secure().then(|| ClientTls::load(ClientFiles::default(), false)).transpose();
        let tls = tls.map_err(|error| HttpError::Connect { url: url.to_string(), source: error.into() })?;
        Ok(Self::new(&ClientSettings { tls: tls.map(Arc::new), ..ClientSettings::default() }))
    }

    /// A client with its own pool. Must be used inside a Tokio runtime with timers and I/O.
    pub fn new(settings: &ClientSettings) -> Self {
        let pool = Arc::new(Pool::new(settings.max_idle, settings.pool_idle_timeout));
        Self {
            pool,
            http2: settings.http2.then(|| Arc::new(Http2::new(settings))),
            tls: settings.tls.clone(),
            connect_timeout: settings.connect_timeout,
            authorization: Arc::default(),
        }
    }

    /// Sets the `authorization` header of all further requests of this client and its clones, overriding their own;
    /// `None` leaves requests unchanged.
    pub fn set_authorization(&self, value: Option<HeaderValue>) {
        self.authorization.store(value.map(Arc::new));
    }

    /// Number of idle connections closed since the last call because the engine had sent bytes that belong to no
    /// answer, which the next request would have received.
    pub fn take_strays(&self) -> u64 {
        self.pool.strays.swap(0, Ordering::Relaxed)
    }

    /// Whether the engine closed connections since the last call, as a restarting one does. This client closes idle
    /// connections before an engine would ([`ClientSettings::pool_idle_timeout`]). Ignores HTTP/2.
    pub fn take_broken(&self) -> bool {
        self.pool.broken.swap(0, Ordering::Relaxed) > 0
    }

    /// Returns when the engine has closed an idle connection, as it does on exit; noticed within half a second. Ignores
    /// HTTP/2.
    pub async fn connection_lost(&self) {
        self.pool.lost.notified().await;
    }

    /// Sends one request and returns as soon as the head of the answer arrives; the body streams.
    ///
    /// Has no time-out except for connecting: wrap the call, or use [`HttpClient::send_within`]. If the engine has
    /// already closed a pooled connection and no part of the request was sent, the request is sent on another one.
    ///
    /// # Errors
    /// `HttpError`: no connection, none in time, or the engine broke the protocol.
    pub async fn send(&self, mut request: Request<RequestBody>) -> Result<Response<AnswerBody>, HttpError> {
        if let Some(value) = self.authorization.load().as_deref() {
            request.headers_mut().insert(header::AUTHORIZATION, value.clone());
        }
        if let Some(http2) = &self.http2 {
            return Box::pin(http2.send(request)).await;
        }
        let address = Address::take_from(&mut request)?;
        // The engine may have closed any number of idle connections. Each iteration takes one out of the pool; a new
        // one ends the loop, whatever the outcome.
        loop {
            let pooled = self.pool.take(&address.origin);
            let is_new = pooled.is_none();
            let mut connection = match pooled {
                Some(connection) => connection,
                // Boxed: most requests find a pooled connection, and all would reserve memory for this.
                None => Box::pin(connect::connect(&address.origin, self.tls.as_deref(), self.connect_timeout))
                    .await
                    .map_err(|cause| cause.into_http(address.url()))?,
            };
            if !is_new && !poll_fn(|cx| Poll::Ready(connection.is_usable(cx))).await {
                self.pool.note_stray(&connection);
                self.pool.note_broken();
                continue;
            }
            let mut failed = match connection.send(request).await {
                Ok(answer) => return self.answered(answer, connection, address).await,
                Err(failed) => failed,
            };
            self.pool.note_broken();
            match failed.take_message().filter(|_| !is_new) {
                Some(unsent) => request = unsent,
                None => return Err(HttpError::Exchange { url: address.url(), source: failed.into_error().into() }),
            }
        }
    }

    async fn answered(
        &self,
        answer: Response<hyper::body::Incoming>,
        connection: Box<Connection>,
        address: Address,
    ) -> Result<Response<AnswerBody>, HttpError> {
        let (head, body) = answer.into_parts();
        if let Err(cause) = check_framing(head.status, &head.headers) {
            // Closes the connection, whose remaining content is unknown.
            return Err(HttpError::Framing { url: address.url(), cause });
        }
        let mut body = AnswerBody::new(body, connection, address.origin, Arc::clone(&self.pool));
        poll_fn(|cx| {
            body.settle(cx);
            Poll::Ready(())
        })
        .await;
        Ok(Response::from_parts(head, body))
    }

    /// [`HttpClient::send`] with a limit on the time until the head of the answer.
    ///
    /// # Errors
    /// Those of [`HttpClient::send`], or a time-out.
    pub async fn send_within(
        &self,
        request: Request<RequestBody>,
        limit: Duration,
    ) -> Result<Response<AnswerBody>, HttpError> {
        let uri = request.uri().clone();
        match tokio::time::timeout(limit, self.send(request)).await {
            Ok(answer) => answer,
            Err(_) => Err(HttpError::timeout(&uri, "the head of the answer", limit)),
        }
    }

    /// GET; expects 2xx and JSON.
    ///
    /// # Errors
    /// Those of [`HttpClient::send`]; a status other than 2xx; an answer that is too long or not the expected JSON.
    pub async fn get_json<T: DeserializeOwned>(
        &self,
        base: &BaseUrl,
        path: &str,
        limits: &AnswerLimits,
    ) -> Result<T, HttpError> {
        let (url, body) = self.whole(request(Method::GET, base, path, None)?, limits).await?;
        parse_json(url, &body)
    }

    /// GET; expects 2xx and text (invalid UTF-8 is replaced).
    ///
    /// # Errors
    /// Those of [`HttpClient::get_json`], except for the format.
    pub async fn get_text(&self, base: &BaseUrl, path: &str, limits: &AnswerLimits) -> Result<String, HttpError> {
        let (_, body) = self.whole(request(Method::GET, base, path, None)?, limits).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// POST of a JSON document; expects 2xx and JSON.
    ///
    /// # Errors
    /// Those of [`HttpClient::get_json`].
    pub async fn post_json<B: Serialize + ?Sized, T: DeserializeOwned>(
        &self,
        base: &BaseUrl,
        path: &str,
        body: &B,
        limits: &AnswerLimits,
    ) -> Result<T, HttpError> {
        let (url, body) = self.post(base, path, body, limits).await?;
        parse_json(url, &body)
    }

    /// POST of a JSON document; expects 2xx. Returns the URL and the raw answer.
    ///
    /// # Errors
    /// Those of [`HttpClient::send`]; a status other than 2xx; an answer that is too long.
    pub async fn post<B: Serialize + ?Sized>(
        &self,
        base: &BaseUrl,
        path: &str,
        body: &B,
        limits: &AnswerLimits,
    ) -> Result<(String, Bytes), HttpError> {
        let bytes = serde_json::to_vec(body)
            .map_err(|error| HttpError::Encode { url: format!("{base}{path}"), source: error.into() })?;
        self.whole(request(Method::POST, base, path, Some(bytes.into()))?, limits).await
    }

    /// Sends a request, reads the complete answer under `limits`, and rejects any status but 2xx.
    ///
    /// # Errors
    /// Those of [`HttpClient::post`].
    pub async fn whole(
        &self,
        request: Request<RequestBody>,
        limits: &AnswerLimits,
    ) -> Result<(String, Bytes), HttpError> {
        let url = error::without_query(request.uri());
        let read = async {
            let response = self.send(request).await?;
            let status = response.status();
            let body = read_body(&url, response.into_body(), limits.max_bytes).await?;
            if status.is_success() {
                Ok(body)
            } else {
                Err(HttpError::Status { url: url.clone(), status: status.as_u16(), excerpt: excerpt(&body) })
            }
        };
        match tokio::time::timeout(limits.timeout, read).await {
            Ok(body) => body.map(|body| (url, body)),
            Err(_) => Err(HttpError::Timeout { url, waiting_for: "the whole answer", limit: limits.timeout }),
        }
    }
}

/// Rejects an answer whose end other readers might place elsewhere, and a change of protocol, which was not requested.
pub(super) fn check_framing(status: StatusCode, headers: &HeaderMap) -> Result<(), &'static str> {
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err("it changes the protocol (101), which was not requested");
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(_), None) if headers.contains_key(header::CONTENT_LENGTH) => {
            Err("it has both content-length and transfer-encoding")
        }
        (Some(coding), None) if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("its transfer-encoding is not just 'chunked'"),
    }
}

/// Where to send a request.
struct Address {
    origin: Origin,
    path: PathAndQuery,
}

impl Address {
    /// Puts a request into the form that is sent: the path in its first line, the address in `Host`.
    fn take_from(request: &mut Request<RequestBody>) -> Result<Self, HttpError> {
        let parts = std::mem::take(request.uri_mut()).into_parts();
        let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
        let found = Origin::of(parts.scheme.as_ref(), parts.authority).and_then(|origin| {
            let host = HeaderValue::from_str(origin.authority.as_str()).ok()?;
            Some((origin, host))
        });
        let Some((origin, host)) = found else {
            return Err(UrlError::Syntax { url: path.path().to_owned(), source: "no host".into() }.into());
        };
        request.headers_mut().entry(header::HOST).or_insert(host);
        *request.uri_mut() = Uri::from(path.clone());
        Ok(Self { origin, path })
    }

    fn url(&self) -> String {
        format!("{}://{}{}", self.origin.scheme(), self.origin.authority, self.path.path())
    }
}

/// Builds a request for `path` (which starts with `/`) below `base`; a body is sent as JSON.
///
/// # Errors
/// `HttpError` if the URL or a header is invalid.
pub fn request(
    method: Method,
    base: &BaseUrl,
    path: &str,
    json: Option<Bytes>,
) -> Result<Request<RequestBody>, HttpError> {
    let mut request = Request::new(Full::new(json.clone().unwrap_or_default()));
    *request.method_mut() = method;
    *request.uri_mut() = base.join(path)?;
    if json.is_some() {
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    Ok(request)
}

/// Reads a body of at most `max_bytes` to its end.
///
/// # Errors
/// `HttpError` if the body is too long or ends early.
pub async fn read_body(url: &str, body: AnswerBody, max_bytes: usize) -> Result<Bytes, HttpError> {
    collect(body, max_bytes).await.map_err(|error| match error {
        Some(error) => HttpError::Body { url: url.to_owned(), source: error.into() },
        None => HttpError::TooLarge { url: url.to_owned(), limit_bytes: max_bytes },
    })
}

/// Reads any body of at most `max_bytes` to its end.
///
/// # Errors
/// The body's own error, or `None` if it is longer.
pub async fn collect<B>(mut body: B, max_bytes: usize) -> Result<Bytes, Option<B::Error>>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if whole.len().saturating_add(data.len()) > max_bytes {
            return Err(None);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

fn parse_json<T: DeserializeOwned>(url: String, body: &[u8]) -> Result<T, HttpError> {
    serde_json::from_slice(body).map_err(|error| HttpError::Json { url, source: error.into() })
}

/// The start of an error answer, on one line, for a message.
fn excerpt(body: &[u8]) -> String {
    const LONGEST: usize = 300;
    let text = String::from_utf8_lossy(&body[..body.len().min(LONGEST)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}
