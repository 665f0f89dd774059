//! The one HTTP client: the gateway, the profiler, the command line and tests all speak through it.
//!
//! Plain TCP, HTTP/1.1, pooled, `TCP_NODELAY`, no redirects, no environment proxies. [`HttpClient::send`] hands
//! back a streaming response; the `get_*`/`post_*` helpers read a whole answer under a time-out and a size limit.
//! Dropping a response (or the future that waits for one) closes its connection, so that the engine sees at once
//! that nobody listens any more.

mod error;
mod url;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::{Serialize, de::DeserializeOwned};

pub use error::HttpError;
pub use url::{BaseUrl, UrlError};

/// Body of a request: complete bytes, cheap to clone for a second attempt.
pub type RequestBody = Full<Bytes>;

/// How connections are made and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientSettings {
    /// Longest wait for a TCP connection.
    pub connect_timeout: Duration,
    /// An idle connection is closed after this time; keep it below the engine's own keep-alive time, or a request
    /// may meet a connection that the engine is just closing.
    pub pool_idle_timeout: Duration,
    /// Idle connections kept per engine.
    pub max_idle_per_host: usize,
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            // Uvicorn, which SGLang and vLLM run on, closes idle connections after 5 s.
            pool_idle_timeout: Duration::from_secs(4),
            max_idle_per_host: 1024,
        }
    }
}

/// Bounds on reading one whole answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// From the start of the request to the last byte of the answer.
    pub timeout: Duration,
    /// Longest body accepted, in bytes.
    pub max_bytes: usize,
}

impl Default for AnswerLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), max_bytes: 16 << 20 }
    }
}

/// A pooled HTTP/1.1 client. Cloning shares the pool.
#[derive(Clone, Debug)]
pub struct HttpClient {
    inner: Client<HttpConnector, RequestBody>,
    /// Replaces what a request carries.
    authorization: Arc<ArcSwapOption<HeaderValue>>,
}

impl Default for HttpClient {
    fn default() -> Self {
        Self::new(&ClientSettings::default())
    }
}

impl HttpClient {
    /// A client with its own pool. Must be used inside a Tokio runtime with timers and I/O.
    pub fn new(settings: &ClientSettings) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(settings.connect_timeout));
        let inner = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(settings.pool_idle_timeout)
            .pool_max_idle_per_host(settings.max_idle_per_host)
            .pool_timer(TokioTimer::new())
            .build(connector);
        Self { inner, authorization: Arc::default() }
    }

    /// From now on every request of this client and of its clones carries this `authorization`, in place of its own if it
    /// has one; `None`: requests go as they are.
    pub fn set_authorization(&self, value: Option<HeaderValue>) {
        self.authorization.store(value.map(Arc::new));
    }

    /// Sends one request and returns as soon as the head of the answer is there; the body streams.
    ///
    /// No time-out but the one for connecting: wrap the call, or use [`HttpClient::send_within`]. A request that
    /// met a pooled connection already closed by the engine is sent again by the pool, as nothing was processed.
    pub async fn send(&self, mut request: Request<RequestBody>) -> Result<Response<Incoming>, HttpError> {
        let url = request.uri().to_string();
        if let Some(value) = self.authorization.load().as_deref() {
            request.headers_mut().insert(header::AUTHORIZATION, value.clone());
        }
        self.inner.request(request).await.map_err(|error| HttpError::from_client(url, &error))
    }

    /// [`HttpClient::send`] with a limit on the time to the head of the answer.
    pub async fn send_within(
        &self,
        request: Request<RequestBody>,
        limit: Duration,
    ) -> Result<Response<Incoming>, HttpError> {
        let url = request.uri().to_string();
        match tokio::time::timeout(limit, self.send(request)).await {
            Ok(answer) => answer,
            Err(_) => Err(HttpError::Timeout { url, waiting_for: "the head of the answer", limit }),
        }
    }

    /// GET, answer 2xx and JSON.
    pub async fn get_json<T: DeserializeOwned>(
        &self,
        base: &BaseUrl,
        path: &str,
        limits: &AnswerLimits,
    ) -> Result<T, HttpError> {
        let (url, body) = self.whole(request(Method::GET, base, path, None)?, limits).await?;
        parse_json(url, &body)
    }

    /// GET, answer 2xx and text (invalid UTF-8 is replaced).
    pub async fn get_text(&self, base: &BaseUrl, path: &str, limits: &AnswerLimits) -> Result<String, HttpError> {
        let (_, body) = self.whole(request(Method::GET, base, path, None)?, limits).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// POST of a JSON document, answer 2xx and JSON.
    pub async fn post_json<B: Serialize + ?Sized, T: DeserializeOwned>(
        &self,
        base: &BaseUrl,
        path: &str,
        body: &B,
        limits: &AnswerLimits,
    ) -> Result<T, HttpError> {
        let bytes = serde_json::to_vec(body)
            .map_err(|error| HttpError::Encode { url: format!("{base}{path}"), cause: error.to_string() })?;
        let (url, body) = self.whole(request(Method::POST, base, path, Some(bytes.into()))?, limits).await?;
        parse_json(url, &body)
    }

    /// Sends, reads the whole answer under `limits`, and refuses anything but 2xx.
    pub async fn whole(
        &self,
        request: Request<RequestBody>,
        limits: &AnswerLimits,
    ) -> Result<(String, Bytes), HttpError> {
        let url = request.uri().to_string();
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

/// A request for `path` (which starts with `/`) below `base`; a body is sent as JSON.
pub fn request(
    method: Method,
    base: &BaseUrl,
    path: &str,
    json: Option<Bytes>,
) -> Result<Request<RequestBody>, HttpError> {
    let mut request = Request::new(Full::new(json.clone().unwrap_or_default()));
    *request.method_mut() = method;
    *request.uri_mut() = base.join(path).map_err(|cause| HttpError::Url { cause })?;
    if json.is_some() {
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    Ok(request)
}

/// Reads a body to its end, at most `max_bytes`.
pub async fn read_body(url: &str, mut body: Incoming, max_bytes: usize) -> Result<Bytes, HttpError> {
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| HttpError::Body { url: url.to_owned(), cause: error::causes(&error) })?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len().saturating_add(data.len()) > max_bytes {
            return Err(HttpError::TooLarge { url: url.to_owned(), limit_bytes: max_bytes });
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

fn parse_json<T: DeserializeOwned>(url: String, body: &[u8]) -> Result<T, HttpError> {
    serde_json::from_slice(body).map_err(|error| HttpError::Json { url, cause: error.to_string() })
}

/// The start of an error answer, on one line, for a message.
fn excerpt(body: &[u8]) -> String {
    const LONGEST: usize = 300;
    let text = String::from_utf8_lossy(&body[..body.len().min(LONGEST)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}
