//! The server: its addresses, resolved once, and the head sent with every request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use http_body_util::Full;
use semmoe_engines::http::{AnswerLimits, BaseUrl, ClientSettings, HttpClient, HttpError, request};
use semmoe_engines::tls::ClientTls;
use semmoe_engines::vllm::{MODELS, Model, Models};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use crate::failure::ConnectFailure;
use crate::{Api, LoadError, LoadOptions};

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Header that names the model if the body does not; semmoe's gateway reads it.
const MODEL_HEADER: &str = "x-semmoe-model";

#[derive(Debug)]
pub(crate) struct Target {
    addresses: Vec<SocketAddr>,
    /// Index of the address that last worked.
    good: AtomicUsize,
    uri: Uri,
    headers: HeaderMap,
    /// TLS settings and the host name, for https.
    tls: Option<(Arc<ClientTls>, String)>,
}

/// The transport of a connection.
pub(crate) type Stream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

impl Target {
    /// Resolves the server and connects once, so that a wrong address causes a single error rather than one per
    /// request.
    pub(crate) async fn find(options: &LoadOptions, tls: Option<Arc<ClientTls>>) -> Result<Self, LoadError> {
        let url = &options.url;
        let unreachable = |source: std::io::Error| LoadError::Connect { url: url.to_string(), source };
        let authority = url.authority();
        let name: Authority = authority.parse().expect("a URL's authority is valid");
        let port = name.port_u16().unwrap_or(if url.is_secure() { 443 } else { 80 });
        let host = name.host().trim_start_matches('[').trim_end_matches(']');
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port)).await.map_err(unreachable)?.collect();
        let whole = url.join(options.api.path())?;
        let uri = whole.path().parse().expect("a URL's path is a valid URI");
        let mut headers = options.headers.clone();
        let host_header = HeaderValue::from_str(authority).expect("an authority is visible ASCII");
        headers.insert(header::HOST, host_header);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers
            .entry(header::USER_AGENT)
            .or_insert(HeaderValue::from_static(concat!("semmoe-load/", env!("CARGO_PKG_VERSION"))));
        if let (Api::Generate, Some(model)) = (options.api, &options.model) {
            let wrong = |_| LoadError::option("the model's name", model, "visible ASCII");
            let value = HeaderValue::from_str(model).map_err(wrong)?;
            headers.insert(MODEL_HEADER, value);
        }
        let tls = tls.filter(|_| url.is_secure()).map(|tls| (tls, host.to_owned()));
        let target = Self { addresses, good: AtomicUsize::new(0), uri, headers, tls };
        let stream = target.connect_cause().await.map_err(unreachable)?;
        target.secure(stream).await.map_err(unreachable)?;
        Ok(target)
    }

    /// Opens a connection.
    pub(crate) async fn connect(&self) -> Result<Stream, ConnectFailure> {
        let stream = self.connect_cause().await.map_err(|error| {
            match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => ConnectFailure::NoFiles,
                Some(rustix::io::Errno::CONNREFUSED) => ConnectFailure::Refused,
                _ if error.kind() == std::io::ErrorKind::TimedOut => ConnectFailure::TimedOut,
                _ => ConnectFailure::Other,
            }
        })?;
        self.secure(stream).await.map_err(|error| match error.kind() {
            std::io::ErrorKind::TimedOut => ConnectFailure::TimedOut,
            _ => ConnectFailure::Tls,
        })
    }

    async fn secure(&self, stream: TcpStream) -> std::io::Result<Stream> {
        let Some((tls, host)) = &self.tls else { return Ok(Stream::Left(stream)) };
        let secured = tokio::time::timeout(CONNECT_TIMEOUT, tls.connect(host, stream)).await;
        let secured = secured.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))?;
        Ok(Stream::Right(Box::new(secured)))
    }

    /// Tries every address, starting with the one that last worked.
    async fn connect_cause(&self) -> std::io::Result<TcpStream> {
        let first = self.good.load(Ordering::Relaxed);
        let mut last = std::io::Error::other("the name has no address");
        for offset in 0..self.addresses.len() {
            let index = (first + offset) % self.addresses.len();
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(self.addresses[index])).await;
            match connected.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
                Ok(stream) => {
                    self.good.store(index, Ordering::Relaxed);
                    stream.set_nodelay(true)?;
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Builds the request with this body.
    pub(crate) fn request(&self, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// Returns the only model that the server lists on `/v1/models`, queried with these headers.
///
/// # Errors
/// [`LoadError::Models`] if the list cannot be read; [`LoadError::Model`] if it does not contain exactly one model.
pub async fn only_model(url: &BaseUrl, headers: &HeaderMap, tls: Option<Arc<ClientTls>>) -> Result<String, LoadError> {
    let mut request = request(Method::GET, url, MODELS, None)?;
    request.headers_mut().extend(headers.clone());
    let (found_at, body) = HttpClient::new(&ClientSettings { tls, ..ClientSettings::default() })
        .whole(request, &AnswerLimits::default())
        .await?;
    let models: Models = serde_json::from_slice(&body)
        .map_err(|error| LoadError::Models(HttpError::Json { url: found_at, source: error.into() }))?;
    match <[Model; 1]>::try_from(models.data) {
        Ok([model]) => Ok(model.id),
        Err(models) => Err(LoadError::Model { url: url.to_string(), found: models.len() }),
    }
}
