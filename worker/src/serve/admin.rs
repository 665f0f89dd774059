//! Admin routes and their access control.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use semmoe_engines::http::names_loopback;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use crate::control::Secret;
use crate::control::message::ToRank;

/// Access control for admin routes: clients must send the token; without a configured token, the server must listen on
/// a loopback address.
#[derive(Debug)]
pub(crate) struct Gate {
    token: Option<Secret>,
    loopback: bool,
}

impl Gate {
    /// `address` is the HTTP server's.
    pub(crate) fn new(token: Option<Secret>, address: SocketAddr) -> Self {
        Self { token, loopback: address.ip().is_loopback() }
    }

    fn check(&self, headers: &HeaderMap, uri: &Uri) -> Result<(), ApiError> {
        let Some(token) = &self.token else {
            // A web page in a local browser must not act on its user's behalf, neither by DNS rebinding (Host) nor
            // cross-site (Origin).
            let here = is_for_loopback(headers, uri) && comes_from_loopback(headers);
            let refusal = "admin routes require a token here, but this worker was started without one";
            return match self.loopback && here {
                true => Ok(()),
                false => Err(ApiError::new(StatusCode::FORBIDDEN, refusal)),
            };
        };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let unauthorized = |message| ApiError::new(StatusCode::UNAUTHORIZED, message);
        match given {
            Some(given) if token.is(given) => Ok(()),
            Some(_) => Err(unauthorized("the admin token does not match")),
            None => Err(unauthorized("admin routes require the admin token: authorization: Bearer ...")),
        }
    }
}

/// Whether the request names at least one host, and only loopback hosts.
fn is_for_loopback(headers: &HeaderMap, uri: &Uri) -> bool {
    let hosts = headers.get_all(header::HOST).iter().map(|host| host.to_str().ok());
    let mut named = hosts.chain(uri.authority().map(|authority| Some(authority.as_str()))).peekable();
    named.peek().is_some() && named.all(|host| host.is_some_and(names_loopback))
}

/// Whether the request's origin, if any, is a loopback host.
fn comes_from_loopback(headers: &HeaderMap) -> bool {
    headers.get_all(header::ORIGIN).iter().all(|origin| {
        let host = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        host.is_some_and(|(_, host)| names_loopback(host))
    })
}

/// Lets authorized requests pass.
pub(super) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response, ApiError> {
    app.gate.check(request.headers(), request.uri())?;
    Ok(next.run(request).await)
}

/// `POST /drain`: stops accepting new sequences, which `/health` reports; running sequences finish.
pub(super) async fn drain(State(app): State<Arc<App>>) -> Json<Value> {
    app.unit.drain();
    Json(json!({"status": "draining", "in_flight": app.unit.in_flight().iter().sum::<usize>()}))
}

/// `POST /flush_cache`: evicts cached prefixes that no sequence uses, on every rank.
pub(super) async fn flush_cache(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.check_alive()?;
    app.unit.broadcast(&ToRank::Flush);
    // A rank processes messages in order, so by the time it reports its counts it has flushed.
    let left: u64 = app.unit.by_replica(app.unit.stats().await).map(|stats| stats.kv.cached).sum();
    Ok(Json(json!({"status": "ok", "cached_pages": left})))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(gate: &Gate, host: &str, authorization: Option<&str>) -> Result<(), ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(value) = authorization {
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
        }
        gate.check(&headers, &Uri::from_static("/drain"))
    }

    #[test]
    fn the_token_opens_and_without_one_only_loopback_does() {
        let token = || Some(Secret::new(b"an admin token of ours").unwrap());
        let (near, far) = ("127.0.0.1:30000".parse().unwrap(), "0.0.0.0:30000".parse().unwrap());
        for address in [near, far] {
            let gate = Gate::new(token(), address);
            assert!(allowed(&gate, "any", Some("Bearer an admin token of ours")).is_ok());
            for wrong in
                [None, Some("Bearer another token here"), Some("Basic an admin token of ours"), Some("Bearer ")]
            {
                assert!(allowed(&gate, "127.0.0.1", wrong).is_err(), "{wrong:?}");
            }
        }
        let (near, far) = (Gate::new(None, near), Gate::new(None, far));
        for host in ["127.0.0.1:30000", "localhost", "LOCALHOST:1", "[::1]:30000", "[::1]"] {
            assert!(allowed(&near, host, None).is_ok(), "{host}");
            assert!(allowed(&far, host, None).is_err(), "{host}");
        }
        for host in ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "10.0.0.1", ""] {
            assert!(allowed(&near, host, None).is_err(), "{host}");
        }
    }
}
