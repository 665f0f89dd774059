//! Access control for the admin plane.
//!
//! On loopback every local user may use it, and so could every web page open in a local browser. The `Host` must
//! therefore be a loopback name (a page that rebinds its own name to 127.0.0.1 sends that name), and so must any
//! `Origin`, which pages cannot omit from a cross-site POST. Off loopback, or if a bearer token is configured, the
//! token is required.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, Uri, header};
use semmoe_engines::http::names_loopback;
use sha2::{Digest, Sha256};

use super::page;
use crate::backends::{Backends, RequestError};
use crate::config::SecretDigest;

/// The access rules of one admin listener.
pub(crate) struct Guard {
    loopback: bool,
    backends: Arc<Backends>,
}

impl Guard {
    pub(crate) fn new(bound: SocketAddr, backends: Arc<Backends>) -> Self {
        Self { loopback: bound.ip().is_loopback(), backends }
    }

    /// Returns the rules currently in effect.
    fn rules(&self) -> Rules {
        Rules { loopback: self.loopback, token_sha256: self.backends.config().server.admin_token_sha256 }
    }
}

/// The access rules for one request.
struct Rules {
    loopback: bool,
    token_sha256: Option<SecretDigest>,
}

impl Rules {
    fn judge(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), RequestError> {
        if self.loopback {
            // HTTP/2 carries the host in the URI. If it appears several times, every occurrence must pass.
            let hosts = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or(""));
            let mut named = hosts.chain(uri.authority().map(Authority::as_str)).peekable();
            let none = named.peek().is_none().then_some("");
            if let Some(found) = named.find(|host| !names_loopback(host)).or(none) {
                return Err(RequestError::ForeignHost { found: found.to_owned() });
            }
            let mut origins = headers.get_all(header::ORIGIN).iter().map(|origin| origin.to_str().unwrap_or(""));
            let is_foreign = |origin: &&str| !origin.split_once("://").is_some_and(|(_, host)| names_loopback(host));
            if let Some(origin) = origins.find(is_foreign) {
                return Err(RequestError::ForeignOrigin { origin: origin.to_owned() });
            }
        }
        // Probes by a load balancer or kubelet carry no token, and the first two paths reveal nothing. The page
        // contains no data; it prompts the user for the token that its requests need.
        let is_open = match uri.path() {
            "/healthz" | "/readyz" | "/ui" => true,
            "/" => page::is_wanted(headers),
            _ => false,
        };
        match &self.token_sha256 {
            Some(expected) if !is_open && !has_token(headers, expected) => Err(RequestError::Token),
            // If a reload removed the token, the listener denies access.
            None if !self.loopback && !is_open => Err(RequestError::Token),
            _ => Ok(()),
        }
    }
}

pub(super) async fn check(
    State(guard): State<Arc<Guard>>,
    request: Request,
    next: Next,
) -> Result<Response, RequestError> {
    guard.rules().judge(request.uri(), request.headers())?;
    Ok(next.run(request).await)
}

/// Returns a header as text; empty if absent.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
}

/// Compares digests, so that timing reveals nothing about the token.
fn has_token(headers: &HeaderMap, expected: &SecretDigest) -> bool {
    let token = text(headers, &header::AUTHORIZATION).strip_prefix("Bearer ");
    token.is_some_and(|token| Sha256::digest(token.trim().as_bytes()).as_slice() == expected.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn judge(rules: &Rules, headers: &[(&'static str, &'static str)]) -> bool {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        rules.judge(&Uri::from_static("/admin/tables"), &headers).is_ok()
    }

    #[test]
    fn hosts_and_origins_on_loopback() {
        let rules = Rules { loopback: true, token_sha256: None };
        for (host, origin, good) in [
            ("127.0.0.1:8081", None, true),
            ("localhost", None, true),
            ("LocalHost:1", None, true),
            ("[::1]:8081", None, true),
            ("127.9.9.9", Some("http://localhost:3000"), true),
            ("", None, false),
            ("evil.example:8081", None, false),
            ("127.0.0.1.evil.example", None, false),
            ("10.0.0.1:8081", None, false),
            ("[::1]evil.example", None, false),
            ("localhost:80.evil.example", None, false),
            ("127.0.0.1:8081", Some("http://[::1].evil.example"), false),
            ("127.0.0.1:8081", Some("https://evil.example"), false),
            ("127.0.0.1:8081", Some("null"), false),
            ("127.0.0.1:8081", Some("http://localhost.evil.example"), false),
        ] {
            let mut headers = vec![("host", host)];
            headers.extend(origin.map(|origin| ("origin", origin)));
            assert_eq!(judge(&rules, &headers), good, "{headers:?}");
        }
        let twice = |name, value| [("host", "localhost"), ("origin", "http://localhost"), (name, value)];
        assert!(judge(&rules, &twice("host", "127.0.0.1")));
        assert!(!judge(&rules, &twice("host", "evil.example")));
        assert!(!judge(&rules, &twice("origin", "http://evil.example")));
    }

    /// As HTTP/2 and proxies send it.
    #[test]
    fn hosts_in_the_uri() {
        let rules = Rules { loopback: true, token_sha256: None };
        for (uri, host, good) in [
            ("http://127.0.0.1:8081/admin/tables", None, true),
            ("http://evil.example/admin/tables", None, false),
            ("http://evil.example/admin/tables", Some("localhost"), false),
            ("http://localhost/admin/tables", Some("evil.example"), false),
        ] {
            let mut headers = HeaderMap::new();
            headers.extend(host.map(|host| (header::HOST, HeaderValue::from_static(host))));
            assert_eq!(rules.judge(&Uri::from_static(uri), &headers).is_ok(), good, "{uri} {host:?}");
        }
    }

    #[test]
    fn tokens() {
        let digest = SecretDigest(Sha256::digest(b"secret").into());
        let rules = Rules { loopback: false, token_sha256: Some(digest) };
        assert!(judge(&rules, &[("authorization", "Bearer secret")]));
        for wrong in ["Bearer wrong", "secret", "Basic secret", ""] {
            assert!(!judge(&rules, &[("authorization", wrong)]), "{wrong}");
        }
        for (path, accept, open) in [
            ("/readyz", "*/*", true),
            ("/ui", "*/*", true),
            ("/", "text/html,*/*;q=0.8", true),
            ("/", "*/*", false),
            ("/ui/", "text/html", false),
            ("/admin/overview", "text/html", false),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static(accept))]);
            assert_eq!(rules.judge(&Uri::from_static(path), &headers).is_ok(), open, "{path} {accept}");
        }
        assert!(rules.judge(&Uri::from_static("/metrics"), &HeaderMap::new()).is_err());
    }
}
