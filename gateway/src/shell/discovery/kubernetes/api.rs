//! Requests to the Kubernetes API server: list and watch.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use semmoe_engines::SharedError;
use semmoe_engines::http::{AnswerBody, AnswerLimits, ClientSettings, HttpClient, HttpError, RequestBody, request};
use semmoe_engines::tls::{ClientFiles, ClientTls, TlsError};
use tokio::task::JoinError;
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::KubernetesConfig;

use super::slices::{Event, List, Slices};

/// Number of EndpointSlices per page; a slice has up to a hundred endpoints and about 10 kB.
const PAGE: usize = 200;
const MAX_PAGES: usize = 50;
const LIST: AnswerLimits = AnswerLimits { timeout: Duration::from_secs(30), max_bytes: 32 << 20 };
/// Maximum event size, in bytes: one slice.
const MAX_EVENT: usize = 4 << 20;
/// Duration of a watch, after which the API server ends it and it is renewed; this reveals a silent API server.
const WATCH_SECONDS: u64 = 60;
/// Grace period beyond [`WATCH_SECONDS`] before the watch is abandoned.
const WATCH_GRACE: Duration = Duration::from_secs(15);
/// Maximum wait for a response head.
const HEAD: Duration = Duration::from_secs(15);
/// Maximum token size; tokens usually have one or two kB.
const MAX_TOKEN: u64 = 64 << 10;

/// Why there is no usable answer.
#[derive(Debug, thiserror::Error)]
pub(in crate::shell::discovery) enum ApiError {
    /// The resource version that a watch resumes from has expired.
    #[error("the watched resource version has expired (410)")]
    Gone,
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("cannot read the token {path}: {source}")]
    Token { path: String, source: SharedError },
    #[error("{0}")]
    Answer(String),
    #[error("not {expected}: {source}")]
    Json { expected: &'static str, source: serde_json::Error },
    #[error("{0}")]
    Panicked(#[from] JoinError),
    #[error("the service's endpoints have ports {known}, expected {wanted}")]
    Port { known: String, wanted: String },
}

/// A session with the API server, used until a request fails.
pub(super) struct Api<'a> {
    client: HttpClient,
    config: &'a KubernetesConfig,
}

impl<'a> Api<'a> {
    /// Opens a session. Reads the certificates, which may have been renewed since the last session.
    pub(super) async fn open(config: &'a KubernetesConfig) -> Result<Self, ApiError> {
        let files = ClientFiles { ca: Some(config.ca.clone()), ..ClientFiles::default() };
        let tls = config.api_server.is_secure().then(|| blocking(move || Ok(ClientTls::load(files, false)?)));
        let tls = match tls {
            Some(tls) => Some(Arc::new(tls.await?)),
            None => None,
        };
        let settings = ClientSettings { connect_timeout: HEAD, tls, ..ClientSettings::default() };
        Ok(Self { client: HttpClient::new(&settings), config })
    }

    async fn get(&self, query: &str) -> Result<Request<RequestBody>, ApiError> {
        let KubernetesConfig { namespace, service, .. } = self.config;
        let path = format!(
            "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D\
             {service}{query}"
        );
        let mut request = request(Method::GET, &self.config.api_server, &path, None)?;
        request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        if let Some(path) = self.config.token_file.clone() {
            request.headers_mut().insert(header::AUTHORIZATION, blocking(move || bearer(&path)).await?);
        }
        Ok(request)
    }

    /// Lists all current slices; returns the version to watch from.
    pub(super) async fn list(&self, slices: &mut Slices) -> Result<String, ApiError> {
        let mut next = String::new();
        for _ in 0..MAX_PAGES {
            let request = self.get(&format!("&limit={PAGE}{next}")).await?;
            let answered = self.client.whole(request, &LIST).await;
            let (_, body) = answered.map_err(|error| match error {
                HttpError::Status { status: 410, .. } => ApiError::Gone,
                other => other.into(),
            })?;
            let list: List = serde_json::from_slice(&body)
                .map_err(|source| ApiError::Json { expected: "a list of EndpointSlices", source })?;
            let (version, more) = slices.add(list)?;
            match more {
                None => return Ok(version),
                // The API server chose the token; it may contain characters that are special in queries.
                Some(token) => next = format!("&continue={}", escaped(&token)),
            }
        }
        Err(ApiError::Answer(format!("the service exceeds the limit of {} EndpointSlices", PAGE * MAX_PAGES)))
    }

    /// Watches for changes after a version.
    pub(super) async fn watch(&self, version: &str) -> Result<Watch, ApiError> {
        let version = escaped(version);
        let query =
            format!("&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}");
        let request = self.get(&query).await?;
        let url = request.uri().to_string();
        let response = self.client.send_within(request, HEAD).await?;
        let status = response.status();
        if status == StatusCode::OK {
            let end = Instant::now() + Duration::from_secs(WATCH_SECONDS) + WATCH_GRACE;
            return Ok(Watch { url, body: response.into_body(), rest: BytesMut::new(), end });
        }
        if status == StatusCode::GONE {
            return Err(ApiError::Gone);
        }
        let body = semmoe_engines::http::read_body(&url, response.into_body(), 64 << 10);
        let body = timeout(HEAD, body).await.ok().and_then(Result::ok).unwrap_or_default();
        let excerpt = String::from_utf8_lossy(&body[..body.len().min(300)]).replace(char::is_control, " ");
        Err(HttpError::Status { url, status: status.as_u16(), excerpt }.into())
    }
}

/// A stream of events, one per line.
pub(super) struct Watch {
    url: String,
    body: AnswerBody,
    rest: BytesMut,
    end: Instant,
}

impl Watch {
    /// Returns the next event; `None` if the API server ended the watch normally.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, ApiError> {
        let mut seen = 0;
        loop {
            if let Some(at) = self.rest[seen..].iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(seen + at);
                self.rest.advance(1);
                seen = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Event::parse(&line).map(Some);
            }
            seen = self.rest.len();
            if seen > MAX_EVENT {
                return Err(HttpError::TooLarge { url: self.url.clone(), limit_bytes: MAX_EVENT }.into());
            }
            let late = |_| ApiError::Answer("the API server fell silent during a watch".to_owned());
            match timeout_at(self.end, self.body.frame()).await.map_err(late)? {
                None if self.rest.is_empty() => return Ok(None),
                None => return Err(ApiError::Answer("a watch ended in the middle of an event".to_owned())),
                Some(Err(error)) => {
                    return Err(HttpError::Body { url: self.url.clone(), source: error.into() }.into());
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.rest.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

fn bearer(path: &Path) -> Result<HeaderValue, ApiError> {
    let fail = |source| ApiError::Token { path: path.display().to_string(), source };
    let length = std::fs::metadata(path).map_err(|error| fail(error.into()))?.len();
    if length > MAX_TOKEN {
        return Err(fail(format!("{length} bytes, expected at most {MAX_TOKEN}").into()));
    }
    let text = std::fs::read_to_string(path).map_err(|error| fail(error.into()))?;
    // The error does not repeat the file's content.
    let mut value = HeaderValue::try_from(format!("Bearer {}", text.trim()))
        .map_err(|_| fail("expected one line of printable characters".into()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Escapes the value of a query field.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// Runs blocking work off the network threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_escaped() {
        assert_eq!(escaped("aZ9-._~"), "aZ9-._~");
        assert_eq!(escaped("a=b&c d+é/"), "a%3Db%26c%20d%2B%C3%A9%2F");
    }

    #[test]
    fn tokens_are_one_line_and_stay_out_of_messages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        assert!(bearer(&path).unwrap_err().to_string().contains("cannot read the token"));
        std::fs::write(&path, "abc.def\n").unwrap();
        let value = bearer(&path).unwrap();
        assert_eq!((value.as_bytes(), value.is_sensitive()), (&b"Bearer abc.def"[..], true));
        std::fs::write(&path, "se\ncret").unwrap();
        let error = bearer(&path).unwrap_err().to_string();
        assert!(error.contains("one line") && !error.contains("cret"), "{error}");
        std::fs::write(&path, vec![b'x'; 70 << 10]).unwrap();
        assert!(bearer(&path).unwrap_err().to_string().contains("expected at most"));
    }
}
