//! Web pages from other origins that may use the data plane (CORS, Fetch standard 3.2): `server.cors_origins`, none by
//! default.
//!
//! Keys travel in `Authorization`, never in cookies, so no answer allows credentials. CORS headers of engines are
//! removed from their answers: SGLang allows every origin by default.

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};

use super::DataPlane;
use crate::config::ANY_ORIGIN;

/// Headers that scripts may read besides the safelisted ones.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id,retry-after,x-semmoe-backend,x-semmoe-rank,x-semmoe-policy,x-semmoe-generation,x-semmoe-attempts",
);
const METHODS: HeaderValue = HeaderValue::from_static("GET,POST");
/// Seconds that browsers cache a preflight; none caches longer than two hours.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// Removes an engine's CORS headers.
pub(super) fn strip(headers: &mut HeaderMap) {
    for name in [header::ACCESS_CONTROL_ALLOW_ORIGIN, header::ACCESS_CONTROL_ALLOW_CREDENTIALS] {
        headers.remove(name);
    }
}

/// The decision for one request under the configured origins.
pub(super) struct Cors {
    /// Origin of the page, if it is allowed.
    origin: Option<HeaderValue>,
}

impl Cors {
    /// Decides by the origins of the current snapshot; `None` if none are configured.
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

    /// The answer to an `OPTIONS` with these headers; `None` if the page is not allowed or it is not a preflight.
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

    /// Adds the CORS headers to a stripped answer.
    pub(super) fn mark(self, headers: &mut HeaderMap) {
        // Shared caches must keep answers to different pages apart.
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        if let Some(origin) = self.origin {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}
