//! A backend's connections: a dedicated HTTP client with the engine's key and certificates. These functions block,
//! because they read files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use semmoe_engines::http::{ClientSettings, EngineKey, HttpClient, KeyError};
use semmoe_engines::tls::{ClientTls, TlsError};

use crate::backends::StartError;
use crate::backends::stamp::Seen;
use crate::config::BackendConfig;

/// Creates the client that a backend keeps across reloads, and its certificates.
pub(crate) fn client(config: &BackendConfig, connect_timeout: Duration) -> Result<Client, StartError> {
    let seen = Seen::of(files(config));
    let tls = config.tls.clone().map(|files| ClientTls::load(files, config.http2)).transpose();
    let tls = tls.map_err(|source| fail(config, source))?.map(Arc::new);
    let http2 = config.http2;
    let settings = ClientSettings { connect_timeout, tls: tls.clone(), http2, ..ClientSettings::default() };
    let http = HttpClient::new(&settings);
    http.set_authorization(key(config)?);
    Ok(Client { http, tls, seen })
}

/// A backend's client and the files behind it.
pub(crate) struct Client {
    pub(crate) http: HttpClient,
    pub(crate) tls: Option<Arc<ClientTls>>,
    /// The files' states when last read.
    pub(crate) seen: Seen,
}

/// Reads the engine's key from its file.
pub(crate) fn key(config: &BackendConfig) -> Result<Option<HeaderValue>, StartError> {
    config.api_key_file.as_deref().map(|path| bearer(&config.name, path)).transpose()
}

/// The files that [`refresh`] reads.
pub(crate) fn files(config: &BackendConfig) -> impl Iterator<Item = &Path> {
    let tls = config.tls.iter().flat_map(|files| [&files.ca, &files.cert, &files.key]);
    std::iter::once(&config.api_key_file).chain(tls).filter_map(|path| path.as_deref())
}

/// Rereads a backend's files, for later requests and connections. Unusable files change nothing.
pub(crate) fn refresh(config: &BackendConfig, client: &HttpClient, tls: Option<&ClientTls>) -> Result<(), StartError> {
    client.set_authorization(key(config)?);
    tls.map_or(Ok(()), ClientTls::reload).map_err(|source| fail(config, source))
}

fn fail(config: &BackendConfig, source: TlsError) -> StartError {
    StartError::Tls { place: format!("backend '{}'", config.name), source }
}

/// Reads a key from a file. Logs a warning if other users can read the file.
fn bearer(backend: &str, path: &Path) -> Result<HeaderValue, StartError> {
    let fail = |source: KeyError| StartError::KeyFile { backend: backend.to_owned(), path: path.to_owned(), source };
    let key = EngineKey::read(path).map_err(fail)?;
    if let Some(mode) = key.open_mode {
        let (path, mode) = (path.display(), format!("{mode:03o}"));
        tracing::warn!(backend, %path, mode, "users other than its owner can read the engine's key: chmod 600");
    }
    Ok(key.authorization)
}
