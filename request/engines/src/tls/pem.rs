//! Reads certificates and keys from PEM files of bounded size.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::TlsError;
use crate::SharedError;

/// Maximum size of a PEM file. For scale, a bundle of all public authorities takes 200 to 300 kB.
const MAX_FILE_BYTES: u64 = 4 << 20;

fn fail(path: &Path, source: impl Into<SharedError>) -> TlsError {
    TlsError::File { path: path.to_owned(), source: source.into() }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| fail(path, error))?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| fail(path, error))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(fail(path, format!("longer than {MAX_FILE_BYTES} bytes")));
    }
    Ok(bytes)
}

/// Reads all certificates in a file, in order; there must be at least one.
///
/// # Errors
/// If the file cannot be read, is not PEM or contains no certificate.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|error| fail(path, error))?;
    if found.is_empty() {
        return Err(fail(path, "it contains no certificate, expected PEM"));
    }
    Ok(found)
}

/// Reads the first private key in a file (PKCS#8, PKCS#1 or SEC1).
///
/// # Errors
/// If the file cannot be read or contains no private key. The error never includes the file's contents.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read(path)?)
        .map_err(|_| fail(path, "it contains no private key, expected PEM without a password"))
}

/// Reads the authorities in a file.
///
/// # Errors
/// If the file cannot be read, or contains no certificate or one that cannot be an authority.
pub fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path)? {
        store.add(certificate).map_err(|error| fail(path, error))?;
    }
    Ok(store)
}
