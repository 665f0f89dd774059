//! A shared secret, never displayed and compared in constant time.

use std::fmt;
use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// Minimum length, because shorter secrets can be guessed.
const MIN_BYTES: usize = 16;
/// Size limit of a secret's file.
const MAX_BYTES: u64 = 4096;
/// Bytes of a proof.
pub(super) const PROOF_BYTES: usize = 32;

/// A shared secret. Clones share it; it is neither printed nor logged.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8]>);

/// Reasons why a secret is unusable. The messages never contain the secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read.
    #[error("cannot read the secret in {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
    /// Too short or too long.
    #[error("a secret has {found} bytes, expected {MIN_BYTES} to {MAX_BYTES}")]
    Length {
        /// The secret's length without surrounding white space.
        found: usize,
    },
}

impl Secret {
    /// Creates a secret from `text`, ignoring surrounding white space.
    ///
    /// # Errors
    /// Fewer than 16 or more than 4096 bytes.
    pub fn new(text: &[u8]) -> Result<Self, SecretError> {
        let bytes = text.trim_ascii();
        if bytes.len() < MIN_BYTES || bytes.len() as u64 > MAX_BYTES {
            return Err(SecretError::Length { found: bytes.len() });
        }
        Ok(Self(bytes.into()))
    }

    /// Reads the secret from a file.
    ///
    /// # Errors
    /// The file cannot be read, or the secret has fewer than 16 or more than 4096 bytes.
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let mut bytes = Vec::new();
        fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|source| SecretError::Io { path: path.display().to_string(), source })?;
        Self::new(&bytes)
    }

    /// Proves knowledge of the secret: HMAC-SHA-256 over the parts, each preceded by its length.
    pub(super) fn proof(&self, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Checks a proof over the parts in constant time.
    pub(super) fn proves(&self, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(parts).verify_slice(proof).is_ok()
    }

    /// Checks `given` against the secret in constant time.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        let own = self.proof(&[&self.0]);
        self.proves(&[given], &own)
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC accepts keys of any length");
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_proves_itself_and_shows_nothing() {
        let secret = Secret::new(b"  0123456789abcdef\n").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        assert!(secret.is(b"0123456789abcdef") && !secret.is(b"0123456789abcdeg") && !secret.is(b""));
        let other = Secret::new(b"0123456789abcdeX").unwrap();
        let proof = secret.proof(&[b"ab", b"c"]);
        assert!(secret.proves(&[b"ab", b"c"], &proof));
        assert!(!secret.proves(&[b"a", b"bc"], &proof), "where a part ends counts");
        assert!(!other.proves(&[b"ab", b"c"], &proof) && !secret.proves(&[b"ab", b"c"], &proof[1..]));
    }

    #[test]
    fn secrets_that_can_be_guessed_are_refused() {
        for (text, found) in [("", 0), ("  short \n", 5), (&"x".repeat(5000), 5000)] {
            let error = Secret::new(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(&format!("has {found} bytes, expected 16 to 4096")), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        assert!(Secret::read(&path).unwrap_err().to_string().contains("cannot read"));
        fs::write(&path, "0123456789abcdef\n").unwrap();
        assert!(Secret::read(&path).unwrap().is(b"0123456789abcdef"));
    }
}
