//! The HTTP client used by the gateway, the profiler, the command line and tests.
//!
//! Supports TCP and TLS, HTTP/1.1 and HTTP/2. Connections are pooled and use `TCP_NODELAY`; redirects and proxies from
//! the environment are not followed. [`HttpClient::send`] returns a streaming response; the `get_*`/`post_*` helpers
//! read a complete response within a time-out and a size limit. Dropping a response (or the future that waits for one)
//! closes its connection, so the engine notices immediately that the client is gone.

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

/// Settings for opening and pooling connections.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    /// Time limit for a TCP connection.
    pub connect_timeout: Duration,
    /// Idle connections are closed after this time. It must be shorter than the engine's keep-alive time, or a request
    /// may be sent on a connection that the engine is about to close.
    pub pool_idle_timeout: Duration,
    /// Maximum number of idle connections over all engines.
    pub max_idle: usize,
    /// For https URLs.
    pub tls: Option<Arc<ClientTls>>,
    /// Whether to use HTTP/2 instead of HTTP/1.1; without TLS, the engine must support it with prior knowledge.
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

/// Limits on reading a complete response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// Maximum time from the start of the request to the last byte of the response.
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
    /// The `authorization` header for all requests, which replaces their own.
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
    /// Creates a client for one address with default settings. For https, it trusts the system's certificate
    /// authorities and reads their files (blocking).
    ///
    /// # Errors
    /// If the system has no trusted authorities.
    pub fn for_url(url: &BaseUrl) -> Result<Self, HttpError> {
        let tls = url.is_secure().then(|| ClientTls::load(ClientFiles::default(), false)).transpose();
        let tls = tls.map_err(|error| HttpError::Connect { url: url.to_string(), source: error.into() })?;
        Ok(Self::new(&ClientSettings { tls: tls.map(Arc::new), ..ClientSettings::default() }))
    }

    /// Creates a client with its own pool. Must be used inside a Tokio runtime with timers and I/O.
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

    /// Sets the `authorization` header of all subsequent requests from this client and its clones, overriding their
    /// own; `None` leaves requests unchanged.
    pub fn set_authorization(&self, value: Option<HeaderValue>) {
        self.authorization.store(value.map(Arc::new));
    }

    /// Returns the number of idle connections closed since the last call because the engine had sent bytes outside any
    /// response, which the next request would have received.
    pub fn take_strays(&self) -> u64 {
        self.pool.strays.swap(0, Ordering::Relaxed)
    }

    /// Returns whether the engine closed any connection since the last call, as it does on a restart. Otherwise this
    /// client closes idle connections before an engine would ([`ClientSettings::pool_idle_timeout`]). Ignores HTTP/2.
    pub fn take_broken(&self) -> bool {
        self.pool.broken.swap(0, Ordering::Relaxed) > 0
    }

    /// Waits until the engine closes an idle connection, as it does on exit; this is detected within half a second.
    /// Ignores HTTP/2.
    pub async fn connection_lost(&self) {
        self.pool.lost.notified().await;
    }

    /// Sends one request and returns as soon as the response head arrives; the body is streamed.
    ///
    /// Only connecting has a time-out; to limit the rest, wrap the call or use [`HttpClient::send_within`]. If the
    /// engine has already closed a pooled connection and no part of the request was sent, the request is sent on
    /// another one.
    ///
    /// # Errors
    /// [`HttpError`] if connecting fails or times out, or if the engine violates the protocol.
    pub async fn send(&self, mut request: Request<RequestBody>) -> Result<Response<AnswerBody>, HttpError> {
        if let Some(value) = self.authorization.load().as_deref() {
            request.headers_mut().insert(header::AUTHORIZATION, value.clone());
        }
        if let Some(http2) = &self.http2 {
            return Box::pin(http2.send(request)).await;
        }
        let address = Address::take_from(&mut request)?;
        // The engine may have closed any number of idle connections. Each iteration removes one from the pool; a new
        // connection ends the loop, whether it succeeds or fails.
        loop {
            let pooled = self.pool.take(&address.origin);
            let is_new = pooled.is_none();
            let mut connection = match pooled {
                Some(connection) => connection,
                // Boxed because most requests find a pooled connection, but the future of every request would reserve
                // memory for a new one.
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
            // Returning here closes the connection, whose remaining content is unknown.
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

    /// Like [`HttpClient::send`], with a limit on the time until the response head arrives.
    ///
    /// # Errors
    /// The errors of [`HttpClient::send`], or a time-out.
    pub async fn send_within(
        &self,
        request: Request<RequestBody>,
        limit: Duration,
    ) -> Result<Response<AnswerBody>, HttpError> {
        let uri = request.uri().clone();
        match tokio::time::timeout(limit, self.send(request)).await {
            Ok(answer) => answer,
            Err(_) => Err(HttpError::timeout(&uri, "the response head", limit)),
        }
    }

    /// Sends a GET request; expects a 2xx status and JSON.
    ///
    /// # Errors
    /// The errors of [`HttpClient::send`]; a non-2xx status; a response that is too long or not the expected JSON.
    pub async fn get_json<T: DeserializeOwned>(
        &self,
        base: &BaseUrl,
        path: &str,
        limits: &AnswerLimits,
    ) -> Result<T, HttpError> {
        let (url, body) = self.whole(request(Method::GET, base, path, None)?, limits).await?;
        parse_json(url, &body)
    }

    /// Sends a GET request; expects a 2xx status and text (invalid UTF-8 is replaced).
    ///
    /// # Errors
    /// The errors of [`HttpClient::get_json`], except for invalid JSON.
    pub async fn get_text(&self, base: &BaseUrl, path: &str, limits: &AnswerLimits) -> Result<String, HttpError> {
        let (_, body) = self.whole(request(Method::GET, base, path, None)?, limits).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Posts a JSON document; expects a 2xx status and JSON.
    ///
    /// # Errors
    /// The errors of [`HttpClient::get_json`].
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

    /// Posts a JSON document; expects a 2xx status. Returns the URL and the raw response body.
    ///
    /// # Errors
    /// The errors of [`HttpClient::send`]; a non-2xx status; a response that is too long.
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

    /// Sends a request, reads the complete response within `limits`, and rejects any non-2xx status.
    ///
    /// # Errors
    /// The errors of [`HttpClient::post`].
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
            Err(_) => Err(HttpError::Timeout { url, waiting_for: "the whole response", limit: limits.timeout }),
        }
    }
}

/// Rejects a response whose end other HTTP implementations might locate elsewhere, and a protocol switch, which was not
/// requested.
pub(super) fn check_framing(status: StatusCode, headers: &HeaderMap) -> Result<(), &'static str> {
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err("it switches protocols (101), which was not requested");
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(_), None) if headers.contains_key(header::CONTENT_LENGTH) => {
            Err("it has both content-length and transfer-encoding")
        }
        (Some(coding), None) if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("its transfer-encoding is not exactly 'chunked'"),
    }
}

/// The destination of a request.
struct Address {
    origin: Origin,
    path: PathAndQuery,
}

impl Address {
    /// Rewrites a request into the form that is sent: the path in the request line, the address in `Host`.
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
/// The body's own error, or `None` if the body is too long.
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

/// Returns the start of an error response, on one line, for use in a message.
fn excerpt(body: &[u8]) -> String {
    const LONGEST: usize = 300;
    let text = String::from_utf8_lossy(&body[..body.len().min(LONGEST)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}
