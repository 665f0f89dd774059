//! TLS by rustls with ring: certificates from PEM files, and the client's side of it. The gateway's listeners use the
//! same files and the same cipher suites.

mod client;
mod pem;
mod trusted;

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;

pub use client::{ClientFiles, ClientTls};
pub use pem::{certificates, private_key, roots};
use trusted::{OwnCertificates, system_roots};

/// The problem with certificates, keys or names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read as what it should be.
    #[error("cannot use {}: {cause}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The value found.
        cause: String,
    },
    /// A certificate and a key that do not go together, or that cannot be served.
    #[error("cannot use the certificate {} with the key {}: {cause}", cert.display(), key.display())]
    Pair {
        /// The certificates' file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The mismatch.
        cause: String,
    },
    /// The system has no trusted certificates.
    #[error("this system has no trusted certificates, so `ca` must be set ({cause})")]
    System {
        /// Why.
        cause: String,
    },
    /// A name that certificates cannot have.
    #[error("'{name}' is neither a DNS name nor an IP address")]
    Name {
        /// As given.
        name: String,
    },
    /// Settings that do not go together.
    #[error("{cause}")]
    Settings {
        /// The mismatch.
        cause: String,
    },
}

/// Cipher suites and signatures: ring's.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
