//! Access to the data plane: `[auth]`, `server.cors_origins`.

use std::collections::HashSet;
use std::sync::Arc;

use serde::Deserialize;

use super::value::{digest, unique};
use super::{ConfigError, ModelConfig, SecretDigest};

/// Matches every origin.
pub(crate) const ANY_ORIGIN: &str = "*";

/// `[auth]`
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawAuth {
    /// API keys for clients. If empty, anyone who can reach the data plane may use it.
    pub keys: Vec<RawKey>,
    /// Whether clients' keys are forwarded to engines; absent: `strip` with keys, `pass` without.
    pub forward: Option<Forward>,
}

/// `[[auth.keys]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawKey {
    /// Unique name, logged in place of the key.
    pub name: String,
    /// SHA-256 of the key in hexadecimal, as printed by `semmoe keys hash`.
    pub sha256: String,
    /// Models (names or aliases) that the key may use; absent: all.
    pub models: Option<Vec<String>>,
}

/// How the clients' `authorization` and `x-api-key` headers are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Forward {
    /// The gateway removes the headers.
    Strip,
    /// The headers are forwarded to the engine, unless the backend has its own key.
    Pass,
}

/// The validated section: names and digests are unique, models exist and appear under their own names.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AuthConfig {
    pub(crate) keys: Vec<Arc<KeyConfig>>,
    pub(crate) forward: Forward,
}

/// A client's API key.
#[derive(Debug, PartialEq)]
pub(crate) struct KeyConfig {
    pub(crate) name: String,
    pub(crate) sha256: SecretDigest,
    pub(crate) models: Option<Vec<String>>,
}

pub(super) fn auth(
    raw: RawAuth,
    models: &[ModelConfig],
    sticky_header: &http::HeaderName,
) -> Result<AuthConfig, ConfigError> {
    let (mut names, mut digests) = (HashSet::new(), HashSet::new());
    let mut keys = Vec::new();
    for (at, key) in raw.keys.into_iter().enumerate() {
        let path = |field: &str| format!("auth.keys[{at}].{field}");
        unique(&path("name"), &key.name, &mut names)?;
        let sha256 = digest(&path("sha256"), &key.sha256)?;
        if !digests.insert(sha256) {
            return Err(ConfigError::value(path("sha256"), "the same digest as another key's"));
        }
        let models = key.models.map(|allowed| own_names(&path("models"), &allowed, models)).transpose()?;
        keys.push(Arc::new(KeyConfig { name: key.name, sha256, models }));
    }
    let forward = raw.forward.unwrap_or(if keys.is_empty() { Forward::Pass } else { Forward::Strip });
    if forward == Forward::Strip && ["authorization", "x-api-key"].contains(&sticky_header.as_str()) {
        let cause = format!(
            "'{sticky_header}' is removed from requests by auth.forward = \"strip\", so policy sticky cannot use it"
        );
        return Err(ConfigError::value("routing.sticky_header", cause));
    }
    Ok(AuthConfig { keys, forward })
}

fn own_names(key: &str, allowed: &[String], models: &[ModelConfig]) -> Result<Vec<String>, ConfigError> {
    let own = |name: &String| {
        let found = models.iter().find(|model| model.name == *name || model.other_names.aliases.contains(name));
        let found = found.ok_or_else(|| ConfigError::value(key, format!("there is no model '{name}'")))?;
        Ok(found.name.clone())
    };
    if allowed.is_empty() {
        return Err(ConfigError::value(key, "empty, expected at least one model; omit the key to allow all"));
    }
    allowed.iter().map(own).collect()
}

/// Validates web page origins, in the form that browsers send.
pub(super) fn cors_origins(origins: Vec<String>) -> Result<Vec<String>, ConfigError> {
    for (at, origin) in origins.iter().enumerate() {
        if let Some(fault) = origin_fault(origin) {
            return Err(ConfigError::value(format!("server.cors_origins[{at}]"), format!("'{origin}' {fault}")));
        }
    }
    Ok(origins)
}

/// Returns why `origin` is not in the form that browsers send (`*`, or scheme, host and optional port); `None` if it
/// is.
fn origin_fault(origin: &str) -> Option<&'static str> {
    if origin == ANY_ORIGIN {
        return None;
    }
    let Some((scheme, host)) = origin.split_once("://") else { return Some("has no scheme") };
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._:[]".contains(&byte);
    match (scheme, host) {
        ("http" | "https", "") => Some("has no host"),
        ("http" | "https", host) if host.bytes().all(plain) => None,
        ("http" | "https", _) => Some("is not scheme://host or scheme://host:port in lower case"),
        _ => Some("is neither http nor https"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins() {
        for good in ["*", "https://app.example", "http://localhost:3000", "http://[::1]:8080"] {
            assert_eq!(origin_fault(good), None, "{good}");
        }
        for bad in ["", "app.example", "https://", "https://App.example", "https://a/", "ftp://a", "null", "https://*"]
        {
            assert!(origin_fault(bad).is_some(), "{bad}");
        }
    }
}
