//! The base URL of an engine, validated once and then joined with paths.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use http::Uri;
use http::uri::{Authority, Parts, PathAndQuery, Scheme};

use crate::SharedError;

/// A URL of the form `http://host[:port][/prefix]` or the same with https, without a trailing slash, user, query or
/// fragment.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct BaseUrl {
    secure: bool,
    authority: Authority,
    prefix: String,
}

/// The reason for rejecting an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Not a URL.
    #[error("'{url}' is not a URL: {source}")]
    Syntax {
        /// As given.
        url: String,
        /// The parser's message.
        source: SharedError,
    },
    /// Neither http nor https.
    #[error("'{url}' must start with http:// or https:// (found scheme '{scheme}')")]
    Scheme {
        /// As given.
        url: String,
        /// The scheme found; empty if there is none.
        scheme: String,
    },
    /// An invalid port.
    #[error("'{url}' has port '{port}', expected 1 to 65535")]
    Port {
        /// As given.
        url: String,
        /// Port in decimal digits, without the colon.
        port: String,
    },
    /// User names and queries are not supported in an engine's address.
    #[error("'{url}' must be http://host:port with at most a path prefix (found {found})")]
    Extra {
        /// As given.
        url: String,
        /// The unsupported part.
        found: &'static str,
    },
}

impl BaseUrl {
    /// Returns the full URI of `path`, which must start with `/` and may include a query.
    ///
    /// # Errors
    /// `UrlError` if the path does not form a URL.
    pub fn join(&self, path: &str) -> Result<Uri, UrlError> {
        let syntax = |source| UrlError::Syntax { url: format!("{self}{path}"), source };
        if !path.starts_with('/') {
            return Err(syntax("the path must start with '/'".into()));
        }
        let path = if self.prefix.is_empty() {
            PathAndQuery::from_str(path)
        } else {
            PathAndQuery::from_maybe_shared(format!("{}{path}", self.prefix))
        };
        let mut parts = Parts::default();
        parts.scheme = Some(if self.secure { Scheme::HTTPS } else { Scheme::HTTP });
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path.map_err(|error| syntax(error.into()))?);
        Uri::from_parts(parts).map_err(|error| syntax(error.into()))
    }

    /// Removes a trailing `/v1`, as in the base URLs of OpenAI clients, since joined paths already begin with it.
    #[must_use]
    pub fn without_v1(mut self) -> Self {
        if let Some(shorter) = self.prefix.strip_suffix("/v1") {
            self.prefix.truncate(shorter.len());
        }
        self
    }

    /// Returns whether the scheme is https.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// Returns `host[:port]`, as in a `Host` header.
    pub fn authority(&self) -> &str {
        self.authority.as_str()
    }
}

impl FromStr for BaseUrl {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        let owned = || url.to_owned();
        let syntax = |source| UrlError::Syntax { url: owned(), source };
        let uri: Uri = url.parse().map_err(|error: http::uri::InvalidUri| syntax(error.into()))?;
        let secure = uri.scheme() == Some(&Scheme::HTTPS);
        if !secure && uri.scheme() != Some(&Scheme::HTTP) {
            return Err(UrlError::Scheme { url: owned(), scheme: uri.scheme_str().unwrap_or("").to_owned() });
        }
        let Some(authority) = uri.authority().filter(|authority| !authority.host().is_empty()) else {
            return Err(syntax("no host".into()));
        };
        if authority.as_str().contains('@') {
            return Err(UrlError::Extra { url: owned(), found: "a user name" });
        }
        // The parser ignores an invalid port, so requests would go to the scheme's default port.
        let behind = authority.as_str().strip_prefix(authority.host()).and_then(|rest| rest.strip_prefix(':'));
        let is_port = |port: &&str| {
            port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse().is_ok_and(|port: u16| port > 0)
        };
        if let Some(port) = behind.filter(|port| !is_port(port)) {
            return Err(UrlError::Port { url: owned(), port: port.to_owned() });
        }
        // The parser silently drops fragments.
        if uri.query().is_some() || url.contains('#') {
            return Err(UrlError::Extra { url: owned(), found: "a query or fragment" });
        }
        Ok(Self { secure, authority: authority.clone(), prefix: uri.path().trim_end_matches('/').to_owned() })
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.prefix)
    }
}

impl fmt::Debug for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BaseUrl({self})")
    }
}

impl From<std::net::SocketAddr> for BaseUrl {
    fn from(address: std::net::SocketAddr) -> Self {
        // A scope id (`%3`) cannot be part of a URL.
        let plain = std::net::SocketAddr::new(address.ip(), address.port());
        let authority = Authority::from_maybe_shared(plain.to_string())
            .expect("a socket address without scope is always a valid authority");
        Self { secure: false, authority, prefix: String::new() }
    }
}

/// Returns whether `authority` is exactly `host` or `host:port`, where the host is a loopback address or `localhost`.
pub fn names_loopback(authority: &str) -> bool {
    let (is_loopback, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, port)) => (name.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_loopback()), port),
        None => {
            let (name, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
            let is_address = name.parse::<Ipv4Addr>().is_ok_and(|ip| ip.is_loopback());
            (is_address || name.eq_ignore_ascii_case("localhost"), port)
        }
    };
    let is_port = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
    is_loopback && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_nothing_more() {
        for good in ["localhost", "LocalHost:8081", "127.0.0.1", "127.9.9.9:1", "[::1]", "[::1]:8081", "localhost:"] {
            assert!(names_loopback(good), "{good}");
        }
        for bad in [
            "",
            ":80",
            "[::1]evil.example",
            "[::1].evil.example",
            "[::1]:80.evil.example",
            "[::1",
            "[[::1]]",
            "[127.0.0.1]",
            "[localhost]",
            "::1",
            "localhost.evil.example",
            "localhost:80.evil.example",
            "localhost:80@evil.example",
            "user@localhost",
            "127.0.0.1.evil.example",
            "127.0.0.1:80/evil",
            "127.1",
            "10.0.0.1:8081",
            "evil.example",
        ] {
            assert!(!names_loopback(bad), "{bad}");
        }
    }

    #[test]
    fn accepts_and_joins() {
        for (url, path, joined) in [
            ("http://127.0.0.1:30000", "/health", "http://127.0.0.1:30000/health"),
            ("http://127.0.0.1:30000/", "/v1/loads?include=core", "http://127.0.0.1:30000/v1/loads?include=core"),
            ("http://[::1]:80/pod-a/", "/generate", "http://[::1]:80/pod-a/generate"),
            ("http://engine", "/", "http://engine/"),
            ("https://engine:8443/x", "/health", "https://engine:8443/x/health"),
        ] {
            let base: BaseUrl = url.parse().unwrap();
            assert_eq!(base.join(path).unwrap().to_string(), joined);
        }
        for (url, shorter) in [
            ("http://a:1/v1", "http://a:1"),
            ("https://a/openai/v1/", "https://a/openai"),
            ("http://a/v1/v1", "http://a/v1"),
            ("http://a/xv1", "http://a/xv1"),
            ("http://v1", "http://v1"),
        ] {
            assert_eq!(BaseUrl::from_str(url).unwrap().without_v1().to_string(), shorter);
        }
        assert!(BaseUrl::from_str("http://a").unwrap().join("health").is_err());
        assert!(BaseUrl::from_str("http://a").unwrap().join("/a b").is_err());
    }

    #[test]
    fn refuses() {
        for url in ["", "127.0.0.1:80", "ws://a", "ftp://a", "http://", "http://u:p@a/", "http://a/?q=1", "http://a/#f"]
        {
            assert!(BaseUrl::from_str(url).is_err(), "{url}");
        }
        for url in
            ["http://a:99999", "http://a:65536/x", "http://a:0", "http://a:", "https://[::1]:99999", "http://a:+80"]
        {
            let error = BaseUrl::from_str(url).unwrap_err().to_string();
            assert!(error.contains("expected 1 to 65535") || error.contains("not a URL"), "{url}: {error}");
        }
    }
}
