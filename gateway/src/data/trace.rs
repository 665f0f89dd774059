//! A traced request's attributes: numbers and configured names, nothing that the client wrote.

use std::borrow::Cow;
use std::sync::Arc;

use http::{HeaderMap, StatusCode};
use semmoe_engines::Route;
use semmoe_tables::RankId;

use crate::backends::RequestId;
use crate::observe::otlp::Value;
use crate::observe::{Generated, OutputTokens, RequestTrace, Stage, Tracer};

use super::{Job, Ticket};

/// Starts a trace of this request if it is selected for tracing.
pub(super) fn begin(
    tracer: &Arc<Tracer>,
    headers: &HeaderMap,
    route: Route,
    id: &RequestId,
) -> Option<Box<RequestTrace>> {
    let mut trace = RequestTrace::begin(tracer, headers, route.name())?;
    trace.note_request("semmoe.request_id", text(id.as_str()));
    Some(trace)
}

/// Records that the prompt was read.
pub(super) fn scored(ticket: &mut Ticket, job: &Job) {
    let Some(trace) = &mut ticket.trace else { return };
    trace.note_request("semmoe.model", text(&job.model.name));
    if let Some(operation) = operation(job.route) {
        trace.note_request("gen_ai.operation.name", Value::Text(operation.into()));
        trace.note_request("gen_ai.request.model", text(&job.model.name));
    }
    trace.note_request("semmoe.generation", Value::Number(job.snapshot.generation));
    trace.note("semmoe.prompt_tokens", Value::Number(job.scored.tokens));
    trace.note("semmoe.scored", Value::Truth(job.scored.share.is_some()));
}

/// Records that a rank was chosen; the request is sent to the engine next.
pub(super) fn placed(ticket: &mut Ticket, backend: &str, rank: Option<RankId>, policy: &'static str) {
    let Some(trace) = &mut ticket.trace else { return };
    trace.note("semmoe.policy", Value::Text(policy.into()));
    trace.enter(Stage::Upstream);
    trace.note("semmoe.backend", text(backend));
    if let Some(rank) = rank {
        trace.note("semmoe.rank", Value::Number(rank.get().into()));
    }
}

/// Records that the response head arrived.
pub(super) fn answered(ticket: &mut Ticket, status: StatusCode) {
    let Some(trace) = &mut ticket.trace else { return };
    trace.note("http.response.status_code", Value::Number(status.as_u16().into()));
    trace.note_elapsed("semmoe.head_seconds");
    if status.is_server_error() {
        trace.fail("server error");
    }
}

/// Records that no response arrived.
pub(super) fn failed(ticket: &mut Ticket, cause: &'static str) {
    if let Some(trace) = &mut ticket.trace {
        trace.fail(cause);
    }
}

/// Records, at the end of the request, the tokens that the model read and generated.
pub(super) fn generated(trace: &mut RequestTrace, generated: &Generated) {
    let output = generated.output_tokens.map(OutputTokens::count);
    let tokens = [("gen_ai.usage.input_tokens", generated.prompt_tokens), ("gen_ai.usage.output_tokens", output)];
    for (key, tokens) in tokens {
        if let Some(tokens) = tokens {
            trace.note_request(key, Value::Number(tokens));
        }
    }
}

/// Returns OpenTelemetry's operation name for a route (semantic conventions for generative AI), if it has one.
fn operation(route: Route) -> Option<&'static str> {
    match route {
        Route::Chat | Route::Responses | Route::Messages => Some("chat"),
        Route::Completions | Route::Generate => Some("text_completion"),
        Route::Embeddings => Some("embeddings"),
        _ => None,
    }
}

fn text(text: &str) -> Value {
    Value::Text(Cow::Owned(text.to_owned()))
}
