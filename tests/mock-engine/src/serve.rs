//! An engine's router: which answer a request gets.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use http_body_util::BodyExt;

use crate::canned::{echo, in_place, refused, rendered};
use crate::engine::{Engine, Seen, Texts};
use crate::fault::Fault;
use crate::{about, answer};

pub fn router(engine: Arc<Engine>) -> Router {
    Router::new().fallback(serve).with_state(engine)
}

async fn serve(State(engine): State<Arc<Engine>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let key = head.headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    if engine.settings().authorization.as_ref().is_some_and(|wanted| key.as_ref() != Some(wanted)) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if let Some(report) = about::answer(&engine, &path, key.as_ref()).await {
        return report;
    }
    let Ok(body) = body.collect().await else { return StatusCode::BAD_REQUEST.into_response() };
    let body = body.to_bytes();
    if let Some(shown) = rendered(&engine, &path, &body).or_else(|| refused(&engine, &body)) {
        return shown;
    }
    let is_unread = matches!(engine.texts, Texts::Unread);
    if head.method == Method::GET && !is_unread {
        return about::not_found();
    }
    let behaviour = match head.headers.get("x-mock") {
        Some(value) => value.to_str().unwrap().to_owned(),
        None => engine.settings().behaviour.clone(),
    };
    let fault = (!behaviour.is_empty()).then(|| Fault::named(&behaviour));
    let seen = Seen { path: head.uri.to_string(), headers: head.headers.clone(), body: body.clone() };
    let _ = engine.seen.send(seen);
    if let Some(answer) = in_place(&engine, fault.as_ref(), &path).await {
        return answer;
    }
    if is_unread {
        return echo(&path, body.len());
    }
    {
        let mut settings = engine.settings();
        let Some(rest) = settings.lives_for.checked_sub(1) else {
            return (StatusCode::SERVICE_UNAVAILABLE, "no healthy worker").into_response();
        };
        settings.lives_for = rest;
    }
    answer::answer(&engine, &path, &head.headers, &body, fault).await.unwrap_or_else(|refusal| *refusal)
}
