//! `GET /ui`, and `/` for browsers: the admin plane as a page.
//!
//! The page is a single static file. It loads nothing from other hosts and uses only the admin plane's routes, where
//! the guard treats it like any other client; loading the page itself therefore requires no token.

use std::sync::LazyLock;

use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderValue, header};
use sha2::{Digest, Sha256};

use super::guard::text;

const PAGE: &str = include_str!("page.html");

/// Content security policy: only the page's own script and style may run, identified by digest, and only this listener
/// may be contacted.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let digest = |open: &str, close: &str| {
        let body = PAGE.split_once(open).and_then(|(_, rest)| rest.split_once(close)).map_or("", |(body, _)| body);
        STANDARD.encode(Sha256::digest(body.as_bytes()))
    };
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        digest("<script>", "</script>"),
        digest("<style>", "</style>"),
    );
    HeaderValue::try_from(policy).unwrap_or_else(|_| HeaderValue::from_static("default-src 'none'"))
});

/// Whether the client is a browser that requests a page.
pub(super) fn is_wanted(headers: &HeaderMap) -> bool {
    text(headers, &header::ACCEPT).split(',').any(|range| range.trim_start().starts_with("text/html"))
}

pub(super) async fn show() -> Response {
    let mut response = Html(PAGE).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY.clone());
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "Accept"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
