//! `[server.tls]`, `[server.admin_tls]` and `[models.backends.tls]`: certificates, keys and trusted CAs.

use std::path::{Path, PathBuf};

use semmoe_engines::http::BaseUrl;
use semmoe_engines::tls::ClientFiles;
use serde::Deserialize;

use super::ConfigError;

/// `[server.tls]` and `[server.admin_tls]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawServerTls {
    /// The listener's certificate chain (PEM), starting with its own certificate.
    pub cert: PathBuf,
    /// Private key of the listener's certificate (PEM).
    pub key: PathBuf,
    /// CA certificates (PEM) for verifying client certificates, which are then required. Absent: clients need none.
    pub client_ca: Option<PathBuf>,
    /// `1.2` or `1.3`.
    #[serde(default)]
    pub min_version: TlsVersion,
}

/// Minimum TLS version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum TlsVersion {
    /// TLS 1.2 or 1.3.
    #[default]
    #[serde(rename = "1.2")]
    V1_2,
    /// Only TLS 1.3.
    #[serde(rename = "1.3")]
    V1_3,
}

impl RawServerTls {
    /// Resolves relative paths against `base`. The files are read at start.
    pub(super) fn below(self, base: &Path) -> Self {
        let client_ca = self.client_ca.map(|path| base.join(path));
        Self { cert: base.join(self.cert), key: base.join(self.key), client_ca, ..self }
    }
}

/// Returns the TLS settings for connections to these URLs; `None` if all are plain text.
pub(super) fn client(
    key: &str,
    raw: Option<ClientFiles>,
    urls: &[BaseUrl],
    base: &Path,
) -> Result<Option<ClientFiles>, ConfigError> {
    let secure = urls.iter().any(BaseUrl::is_secure);
    let Some(raw) = raw else { return Ok(secure.then(ClientFiles::default)) };
    let wrong = |field: &str, cause: &str| Err(ConfigError::value(format!("{key}.{field}"), cause));
    if !secure {
        return wrong("tls", "set, but no URL of this backend starts with https://");
    }
    match (&raw.cert, &raw.key) {
        (Some(_), None) => return wrong("tls.key", "must be set, because `cert` is set"),
        (None, Some(_)) => return wrong("tls.cert", "must be set, because `key` is set"),
        _ => {}
    }
    let below = |path: Option<PathBuf>| path.map(|path| base.join(path));
    Ok(Some(ClientFiles { ca: below(raw.ca), cert: below(raw.cert), key: below(raw.key), ..raw }))
}
