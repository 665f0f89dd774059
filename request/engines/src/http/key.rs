//! Reads an engine's API key from a file, since other users can see command lines.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use http::HeaderValue;

/// Maximum size of a key file, which contains a single line.
const MAX_BYTES: u64 = 4096;

/// A key read from a file.
#[derive(Clone, Debug)]
pub struct EngineKey {
    /// The header value, i.e. `Bearer` and the key, for
    /// [`HttpClient::set_authorization`](super::HttpClient::set_authorization); hidden in debug output.
    pub authorization: HeaderValue,
    /// The file's mode, if it grants access to anyone other than its owner. This is not an error, since secrets mounted
    /// by a cluster often have such a mode inside the container.
    pub open_mode: Option<u32>,
}

/// An error while reading a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The key file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The key file is too long or not a regular file.
    #[error("expected a file of at most {MAX_BYTES} bytes")]
    Size,
    /// The key is not a single line that is valid in a header.
    #[error("expected one line of printable characters without spaces")]
    Text,
}

impl EngineKey {
    /// Reads a file with one line, ignoring surrounding whitespace. Blocking.
    ///
    /// # Errors
    /// [`KeyError`], which never contains any part of the key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            return Err(KeyError::Size);
        }
        let mode = metadata.permissions().mode() & 0o777;
        let text = std::fs::read_to_string(path)?;
        let key = text.trim();
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(KeyError::Text);
        }
        let mut authorization = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| KeyError::Text)?;
        authorization.set_sensitive(true);
        Ok(Self { authorization, open_mode: (mode & 0o077 != 0).then_some(mode) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<EngineKey, String> {
        let file = std::env::temp_dir().join(format!("semmoe-key-{}-{}", std::process::id(), bytes.len()));
        std::fs::write(&file, bytes).expect("a temporary file");
        let key = EngineKey::read(&file).map_err(|error| error.to_string());
        std::fs::remove_file(&file).expect("a temporary file");
        key
    }

    #[test]
    fn a_key_is_one_line_and_is_hidden() {
        let key = read(b" sk-one \r\n").expect("a key");
        assert_eq!(key.authorization.as_bytes(), b"Bearer sk-one");
        assert!(!format!("{key:?}").contains("sk-one"));
        for wrong in [&b""[..], b"\n", b"two words", b"two\nlines", &[0xc3, 0xa9], &[b'x', 0]] {
            assert_eq!(read(wrong).expect_err("no key"), KeyError::Text.to_string(), "{wrong:?}");
        }
        assert!(read(&[0xff, 0xfe, 0xfd, 0xfc]).is_err());
        assert_eq!(read(&[b'a'; 4097]).expect_err("too long"), KeyError::Size.to_string());
        assert!(matches!(EngineKey::read(Path::new("/")), Err(KeyError::Size)));
        assert!(matches!(EngineKey::read(Path::new("/nowhere/key")), Err(KeyError::Io(_))));
    }
}
