//! One attempt: sends a request to the backend where it was placed, and waits for the response head.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, HeaderName, Request, Response, header};
use http_body_util::Full;
use semmoe_engines::Route;
use semmoe_engines::http::{AnswerBody, HttpError, RequestBody};
use semmoe_engines::pin::{self, Stripped};
use semmoe_tables::RankId;

use super::retry::Tries;
use super::watch::Expected;
use super::{DataPlane, Job, Placed, served};
use crate::backends::{Backend, Member, RequestError};

/// How often the backend's health is checked while waiting for a response head.
pub(super) const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

/// Headers that concern a single connection (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Client headers that are not forwarded: the surrounding site's cookies are not meant for the engine.
const CLIENTS_OWN: [HeaderName; 2] = [header::COOKIE, HeaderName::from_static("cookie2")];

/// A request and the backend where it was placed.
pub(crate) struct Attempt<'a> {
    pub(super) plane: &'a DataPlane,
    pub(super) job: &'a Job,
    pub(super) tries: &'a Tries<'a>,
    /// Index of the backend in its model.
    at: usize,
    pub(super) member: &'a Member,
    pub(super) backend: &'a Arc<Backend>,
    pinned: Option<RankId>,
    /// The rank named in the response to the client.
    pub(super) shown: Option<RankId>,
    pub(super) policy: &'static str,
    pub(super) expected: Option<Expected>,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(tries: &'a Tries<'a>, placed: &Placed) -> Self {
        let (plane, job, lease) = (tries.plane, tries.job, &placed.lease);
        let member = &job.model.members[lease.backend];
        let pinned = Some(lease.chosen).filter(|_| member.sends_pin(job.route));
        // The engine may have refused a pin since the request was placed.
        let shown = lease.rank.filter(|_| pinned.is_some() || member.fit.ranks <= 1);
        let expected = pinned.and_then(|rank| Expected::new(&member.fit.dialect, job.route, rank));
        let (at, backend, policy) = (lease.backend, &member.backend, placed.policy);
        Self { plane, job, tries, at, member, backend, pinned, shown, policy, expected }
    }

    /// Builds the forwarded request: the client's, without connection headers, and with the pin.
    pub(super) fn request(&self, head: &Parts, body: &Stripped) -> Result<Request<RequestBody>, RequestError> {
        let (route, dialect) = (self.job.route, &self.member.fit.dialect);
        let body = served::body(self.backend, route, self.job.adapter.as_deref(), body);
        let mut headers = head.headers.clone();
        strip_hop_by_hop(&mut headers);
        // The HTTP client writes its own `Host` and length. The body is complete here, so `Expect` is obsolete.
        for name in CLIENTS_OWN.iter().chain(&[header::HOST, header::CONTENT_LENGTH, header::EXPECT]) {
            headers.remove(name);
        }
        pin::strip_headers(&mut headers);
        let body = match self.pinned {
            None => body.bytes().clone(),
            Some(rank) => pin::apply(dialect, route, rank, &mut headers, &body)?,
        };
        let uri = self.backend.url(dialect, self.pinned).join(&path(route, head));
        let uri = uri.map_err(|source| RequestError::Query { source })?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Sends a request and waits for the response head, until the time limit expires or the backend turns unhealthy
    /// while another one can take the request.
    pub(super) async fn send(&self, request: Request<RequestBody>) -> Result<Response<AnswerBody>, RequestError> {
        let uri = request.uri().clone();
        let mut sent = std::pin::pin!(self.backend.client.send(request));
        let limit = self.job.snapshot.config.timeouts.first_byte;
        let mut left = limit;
        loop {
            let wait = HEALTH_INTERVAL.min(left);
            if let Ok(answer) = tokio::time::timeout(wait, &mut sent).await {
                return answer.map_err(|error| self.no_answer(error));
            }
            left = left.saturating_sub(wait);
            if left.is_zero() {
                return Err(self.no_answer(HttpError::timeout(&uri, "the response head", limit)));
            }
            self.check_health()?;
        }
    }

    /// Returns the error for a missing response, and wakes the prober.
    pub(super) fn no_answer(&self, source: HttpError) -> RequestError {
        if let HttpError::Exhausted(source) = source {
            return RequestError::Exhausted { source };
        }
        let backend = self.suspect();
        tracing::warn!(backend, cause = %source, "no answer");
        match &source {
            HttpError::Timeout { .. } => RequestError::Slow { backend, source },
            HttpError::NotTaken { .. } => RequestError::Unreachable { backend, source },
            sent if sent.may_have_been_sent() => RequestError::Broken { backend, source },
            _ => RequestError::Unreachable { backend, source },
        }
    }

    /// Wakes the backend's prober; returns the backend's name.
    fn suspect(&self) -> String {
        self.backend.suspect();
        self.backend.name.clone()
    }

    /// Fails if the backend has become unhealthy and another one can take the request.
    pub(super) fn check_health(&self) -> Result<(), RequestError> {
        let cause = self.backend.cause_of_unhealthy().filter(|_| self.tries.may_move_from(self.at));
        let Some(cause) = cause else { return Ok(()) };
        let backend = self.suspect();
        tracing::warn!(backend, cause, "gave up waiting for a response");
        Err(RequestError::Unhealthy { backend, cause })
    }
}

fn path(route: Route, head: &Parts) -> String {
    let path = if route == Route::Extra { head.uri.path() } else { route.path() };
    match head.uri.query() {
        None => path.to_owned(),
        Some(query) => format!("{path}?{query}"),
    }
}

/// Removes the connection headers, including those named in `Connection`.
pub(super) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn connection_headers_stay_behind() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-private"),
            ("connection", "Keep-Alive"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("authorization", "Bearer x"),
            ("accept", "text/event-stream"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "authorization"]);
    }
}
