//! The server side of TLS: certificates from files, which can be reloaded while the gateway serves.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use semmoe_engines::tls::{TlsError, certificates, private_key, provider, roots};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::backends::StartError;
use crate::backends::stamp::Seen;
use crate::config::{Config, RawServerTls, TlsVersion};

/// Maximum number of encrypted bytes waiting for a client's socket.
const BUFFER_BYTES: usize = 16 << 10;

/// Secures accepted connections. Reloading the files does not affect open connections.
pub(crate) struct ServerTls {
    files: RawServerTls,
    /// The files' states when last read.
    pub(crate) seen: Seen,
    config: ArcSwap<ServerConfig>,
}

impl ServerTls {
    /// Reads the files. Blocking.
    pub(crate) fn load(files: &RawServerTls) -> Result<Self, TlsError> {
        let seen = Seen::of(paths(files));
        Ok(Self { files: files.clone(), seen, config: ArcSwap::from_pointee(config(files)?) })
    }

    /// Reloads the files for later connections. On an error nothing changes. Blocking.
    pub(crate) fn reload(&self) -> Result<(), TlsError> {
        self.config.store(Arc::new(config(&self.files)?));
        Ok(())
    }

    /// Lists the files that [`ServerTls::reload`] reads.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        paths(&self.files)
    }

    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let mut stream = TlsAcceptor::from(self.config.load_full()).accept(stream).await?;
        stream.get_mut().1.set_buffer_limit(Some(BUFFER_BYTES));
        Ok(stream)
    }
}

fn paths(files: &RawServerTls) -> impl Iterator<Item = &Path> {
    let RawServerTls { cert, key, client_ca, .. } = files;
    [Some(cert), Some(key), client_ca.as_ref()].into_iter().flatten().map(PathBuf::as_path)
}

fn config(files: &RawServerTls) -> Result<ServerConfig, TlsError> {
    let versions: &[&rustls::SupportedProtocolVersion] = match files.min_version {
        TlsVersion::V1_2 => &[&rustls::version::TLS13, &rustls::version::TLS12],
        TlsVersion::V1_3 => &[&rustls::version::TLS13],
    };
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)
        .map_err(|error| TlsError::Settings(error.into()))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider()).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| TlsError::Settings(error.into()))?)
        }
    };
    let pair = |error: rustls::Error| TlsError::Pair {
        cert: files.cert.clone(),
        key: files.key.clone(),
        source: error.into(),
    };
    let mut config = builder.with_single_cert(certificates(&files.cert)?, private_key(&files.key)?).map_err(pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// The certificates of those listeners that use TLS.
#[derive(Clone)]
pub(crate) struct ListenerTls {
    pub(crate) data: Option<Arc<ServerTls>>,
    pub(crate) admin: Option<Arc<ServerTls>>,
}

impl ListenerTls {
    /// Reads all files. Blocking.
    pub(crate) fn load(config: &Config) -> Result<Self, StartError> {
        let load = |place: &str, files: &Option<RawServerTls>| {
            let loaded = files.as_ref().map(ServerTls::load).transpose();
            let fail = |source| StartError::Tls { place: place.to_owned(), source };
            loaded.map(|tls| tls.map(Arc::new)).map_err(fail)
        };
        Ok(Self {
            data: load("server.tls", &config.server.tls)?,
            admin: load("server.admin_tls", &config.server.admin_tls)?,
        })
    }

    /// Lists each listener's certificates, with their configuration key.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, &Arc<ServerTls>)> {
        let named = [("server.tls", &self.data), ("server.admin_tls", &self.admin)];
        named.into_iter().filter_map(|(place, tls)| Some((place, tls.as_ref()?)))
    }
}
