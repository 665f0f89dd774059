//! TLS with rustls and ring: reading certificates from PEM files, and the client side. The gateway's listeners use the
//! same PEM reader and cipher suites.

mod client;
mod pem;
mod trusted;

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;

use crate::SharedError;
pub use client::{ClientFiles, ClientTls};
pub use pem::{certificates, private_key, roots};
use trusted::{OwnCertificates, system_roots};

/// A problem with certificates, keys or names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A file does not have the expected contents.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem with the file.
        source: SharedError,
    },
    /// A certificate and a key do not match, or cannot be used.
    #[error("cannot use the certificate {} with the key {}: {source}", cert.display(), key.display())]
    Pair {
        /// The certificate file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The mismatch.
        source: SharedError,
    },
    /// The system has no trusted certificates.
    #[error("this system has no trusted certificates, so `ca` must be set ({0})")]
    System(#[source] SharedError),
    /// The name is not valid in a certificate.
    #[error("'{0}' is neither a DNS name nor an IP address")]
    Name(String),
    /// The settings contradict each other.
    #[error("{0}")]
    Settings(#[source] SharedError),
}

/// Returns ring's cipher suites and signature algorithms.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
