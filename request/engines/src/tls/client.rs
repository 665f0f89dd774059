//! The client side of TLS: trusted authorities, and the client's own certificate.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{OwnCertificates, TlsError, certificates, private_key, provider, system_roots};

/// TLS files and names for connections to an engine. In a configuration file, a table with exactly these keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientFiles {
    /// Authorities that may sign the engine's certificate, or that certificate itself (PEM); defaults to the system's
    /// trusted authorities.
    pub ca: Option<PathBuf>,
    /// The client's certificate chain (PEM), starting with its own certificate; requires `key`.
    pub cert: Option<PathBuf>,
    /// The private key of the first certificate in `cert` (PEM).
    pub key: Option<PathBuf>,
    /// The name that the engine's certificate must match; defaults to the host of the URL.
    pub server_name: Option<String>,
}

/// Secures connections with TLS. Its files can be reloaded; existing connections are unaffected.
pub struct ClientTls {
    files: ClientFiles,
    http2: bool,
    config: ArcSwap<ClientConfig>,
}

impl ClientTls {
    /// Loads the files. Offers HTTP/2 if `http2` is set, otherwise HTTP/1.1. Blocking.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn load(files: ClientFiles, http2: bool) -> Result<Self, TlsError> {
        // Reject a name that no certificate can have at load time rather than on each connection.
        files.server_name.as_deref().map(name).transpose()?;
        let config = ArcSwap::from_pointee(config(&files, http2)?);
        Ok(Self { files, http2, config })
    }

    /// Reloads the files for new connections. On an error, nothing changes. Blocking.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.config.store(Arc::new(config(&self.files, self.http2)?));
        Ok(())
    }

    /// Performs the handshake with `host`, spelled as in a URL.
    ///
    /// # Errors
    /// If the engine's certificate is not trusted, or the engine does not support the offered protocol.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = name(self.files.server_name.as_deref().unwrap_or(host)).map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.config.load_full()).connect(name, stream).await?;
        if self.http2 && stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(io::Error::other("the engine does not offer HTTP/2 over TLS (ALPN 'h2')"));
        }
        Ok(stream)
    }
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientTls").field("files", &self.files).field("http2", &self.http2).finish_non_exhaustive()
    }
}

fn name(host: &str) -> Result<ServerName<'static>, TlsError> {
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    ServerName::try_from(plain.to_owned()).map_err(|_| TlsError::Name(host.to_owned()))
}

fn config(files: &ClientFiles, http2: bool) -> Result<ClientConfig, TlsError> {
    let settings = |error: rustls::Error| TlsError::Settings(error.into());
    let builder =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(settings)?;
    let builder = match &files.ca {
        None => builder.with_root_certificates(system_roots()?),
        // Rustls marks every custom verifier as dangerous.
        Some(ca) => builder.dangerous().with_custom_certificate_verifier(Arc::new(OwnCertificates::load(ca)?)),
    };
    let mut config = match (&files.cert, &files.key) {
        (Some(cert), Some(key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|error| TlsError::Pair { cert: cert.clone(), key: key.clone(), source: error.into() })?,
        (None, None) => builder.with_no_client_auth(),
        _ => return Err(TlsError::Settings("`cert` and `key` must be set together".into())),
    };
    config.alpn_protocols = vec![if http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}
