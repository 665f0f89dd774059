//! What a backend is spoken to with: a client of its own, which carries the engine's key. Blocking: it reads files.

use std::path::Path;
use std::time::Duration;

use http::HeaderValue;
use semmoe_engines::http::{ClientSettings, HttpClient};

use crate::config::BackendConfig;
use crate::error::StartError;

/// Longest key file; a key is a line.
const LONGEST_KEY_FILE_BYTES: u64 = 4096;

/// The client that a backend keeps, through every reload.
pub(crate) fn client(config: &BackendConfig, connect_timeout: Duration) -> Result<HttpClient, StartError> {
    let client = HttpClient::new(&ClientSettings { connect_timeout, ..ClientSettings::default() });
    client.set_authorization(key(config)?);
    Ok(client)
}

/// The engine's key as its file has it now.
pub(crate) fn key(config: &BackendConfig) -> Result<Option<HeaderValue>, StartError> {
    config.api_key_file.as_deref().map(|path| bearer(&config.name, path)).transpose()
}

/// `Bearer` and the key in a file: one line, of which blanks around it are no part.
fn bearer(backend: &str, path: &Path) -> Result<HeaderValue, StartError> {
    let fail = |cause: String| StartError::KeyFile { backend: backend.to_owned(), path: path.to_owned(), cause };
    let metadata = std::fs::metadata(path).map_err(|error| fail(error.to_string()))?;
    if !metadata.is_file() || metadata.len() > LONGEST_KEY_FILE_BYTES {
        return Err(fail(format!("expected a file of at most {LONGEST_KEY_FILE_BYTES} bytes")));
    }
    warn_of_mode(backend, path, &metadata);
    let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
    let key = text.trim();
    if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(fail("expected one line of printable characters without blanks".to_owned()));
    }
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|error| fail(error.to_string()))?;
    // Debug output of headers hides it.
    value.set_sensitive(true);
    Ok(value)
}

/// Secrets that a cluster mounts are often readable by all inside the container, so this is no error.
fn warn_of_mode(backend: &str, path: &Path, metadata: &std::fs::Metadata) {
    use std::os::unix::fs::PermissionsExt;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let (path, mode) = (path.display(), format!("{mode:03o}"));
        tracing::warn!(backend, %path, mode, "others than its owner can read the engine's key: chmod 600");
    }
}
