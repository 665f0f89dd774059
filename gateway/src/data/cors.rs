//! Access to the data plane from web pages of other origins (CORS, Fetch standard 3.2): `server.cors_origins`, none by
//! default.
//!
//! Keys are sent in `Authorization`, never in cookies, so no response allows credentials. Engines' CORS headers are
//! removed from their responses, because SGLang allows every origin by default.

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};

use super::DataPlane;
use crate::config::ANY_ORIGIN;

/// Response headers that scripts may read in addition to the safelisted ones.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id,retry-after,x-semmoe-backend,x-semmoe-rank,x-semmoe-policy,x-semmoe-generation,x-semmoe-attempts",
);
const METHODS: HeaderValue = HeaderValue::from_static("GET,POST");
/// How long browsers cache a preflight, in seconds; no browser caches it for longer than two hours.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// Removes an engine's CORS headers.
pub(super) fn strip(headers: &mut HeaderMap) {
    for name in [header::ACCESS_CONTROL_ALLOW_ORIGIN, header::ACCESS_CONTROL_ALLOW_CREDENTIALS] {
        headers.remove(name);
    }
}

/// The CORS decision for one request under the configured origins.
pub(super) struct Cors {
    /// The page's origin, if it is allowed.
    origin: Option<HeaderValue>,
}

impl Cors {
    /// Decides by the current snapshot's origins; `None` if none are configured.
    pub(super) fn of(plane: &DataPlane, headers: &HeaderMap) -> Option<Self> {
        Self::judge(&plane.backends.current.load().config.server.cors_origins, headers)
    }

    fn judge(origins: &[String], headers: &HeaderMap) -> Option<Self> {
        if origins.is_empty() {
            return None;
        }
        let asking = headers.get(header::ORIGIN);
        let is_allowed = |origin: &&HeaderValue| {
            origins.iter().any(|known| known == ANY_ORIGIN || known.as_bytes() == origin.as_bytes())
        };
        Some(Self { origin: asking.filter(is_allowed).cloned() })
    }

    /// Returns the response to an `OPTIONS` with these headers; `None` if the page is not allowed or the request is not
    /// a preflight.
    pub(super) fn preflight(&self, headers: &HeaderMap) -> Option<Response> {
        self.origin.as_ref()?;
        headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        let mut response = StatusCode::NO_CONTENT.into_response();
        let answered = response.headers_mut();
        answered.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        answered.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            answered.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        Some(response)
    }

    /// Adds the CORS headers to a stripped response.
    pub(super) fn mark(self, headers: &mut HeaderMap) {
        // Shared caches must store responses to different pages separately.
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        if let Some(origin) = self.origin {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}
