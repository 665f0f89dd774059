//! The data plane: one way for every route.
//!
//! body ([`body`]) -> model, evidence, pins stripped ([`read`], [`score`]) -> backend and rank ([`find`], [`place`]) -> engine and back
//! ([`relay`], [`stream`]), or to another backend ([`retry`]), where its pieces are looked at ([`watch`]). A [`ticket::Ticket`] goes with the request from its first byte to its last and
//! counts it, however it ends.

mod body;
mod find;
mod models;
mod place;
mod read;
mod relay;
mod retry;
mod score;
mod stream;
mod ticket;
mod trace;
mod watch;

use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use semmoe_engines::Route;

use crate::error::RequestError;
use crate::otlp::Stage;
use crate::state::Core;
use crate::trust::RequestId;
use ticket::Ticket;

pub(crate) use retry::{SendError, Wait};
pub(crate) use score::text_route;

/// All routes of the data plane; every other one is 404, as engines have routes that replace weights.
pub(crate) fn router(core: Arc<Core>) -> Router {
    let mut router = Router::new();
    for route in Route::ALL {
        let core = Arc::clone(&core);
        router = router.route(route.path(), post(move |request| serve(core, route, request)));
    }
    router
        .route("/v1/models", get(move |request| async move { list_models(&core, request) }))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
}

async fn serve(core: Arc<Core>, route: Route, mut request: Request) -> Response {
    let id = RequestId::of(request.headers_mut());
    let mut ticket = Ticket::new(Arc::clone(&core), id.clone());
    if let Some(tracer) = &core.tracer {
        ticket.traced(trace::begin(tracer, request.headers(), route, &id));
    }
    match unless_closing(&core, exchange(&core, route, request, &mut ticket)).await {
        Ok(answer) => relay::respond(answer, ticket).map(Body::new),
        Err(error) => {
            ticket.finish(error.status().as_u16());
            error.respond(&id)
        }
    }
}

/// Work that ends with an error where it still waits when the gateway closes. Every connection is polled once more then, so
/// that no request has to be registered for it.
async fn unless_closing<T>(
    core: &Core,
    work: impl Future<Output = Result<T, RequestError>>,
) -> Result<T, RequestError> {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Pending if core.is_closing() => Poll::Ready(Err(RequestError::Closing)),
        polled => polled,
    })
    .await
}

async fn exchange(
    core: &Arc<Core>,
    route: Route,
    request: Request,
    ticket: &mut Ticket,
) -> Result<relay::Answer, RequestError> {
    let (mut head, body) = request.into_parts();
    let caller = core.let_in(&mut head.headers)?;
    ticket.caller(caller.clone());
    let body = body::read(core, &head.headers, body).await?;
    let arrived = Instant::now();
    ticket.enter(Stage::Score);
    let job = read::read(core, route, &head.headers, caller, body).await?;
    trace::scored(ticket, &job);
    ticket.policy(job.policy.acting_name());
    relay::relay(core, route, &head, &job, ticket, arrived).await
}

fn list_models(core: &Core, mut request: Request) -> Response {
    let id = RequestId::of(request.headers_mut());
    match core.let_in(request.headers_mut()) {
        Ok(caller) => models::list(core, &caller).into_response(),
        Err(error) => error.respond(&id),
    }
}

async fn no_route(mut request: Request) -> Response {
    let id = RequestId::of(request.headers_mut());
    RequestError::NoRoute { method: request.method().to_string(), path: request.uri().path().to_owned() }.respond(&id)
}

async fn wrong_method(mut request: Request) -> Response {
    let id = RequestId::of(request.headers_mut());
    RequestError::Method { method: request.method().to_string(), path: request.uri().path().to_owned() }.respond(&id)
}
