//! `/healthz`, `/readyz`, `/metrics`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};

use super::guard::text;
use crate::backend::Health;
use crate::metrics::TextFormat;
use crate::parity::known::Known;
use crate::state::Core;
use crate::summary::misfits;

pub(super) async fn alive() -> &'static str {
    "ok\n"
}

pub(super) async fn ready(State(core): State<Arc<Core>>) -> (StatusCode, String) {
    if core.is_draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n".to_owned());
    }
    let mut causes = String::new();
    let snapshot = core.snapshot();
    for model in &snapshot.models {
        if model.members.iter().any(|member| member.backend.takes_requests()) {
            continue;
        }
        if model.members.is_empty() {
            causes.push_str(&format!("model '{}': no backend was discovered yet\n", model.name));
        }
        for member in &model.members {
            let cause = match member.backend.health() {
                Health::Unhealthy { cause } => cause,
                Health::Healthy => "is drained".to_owned(),
                Health::Unknown => "not probed yet".to_owned(),
            };
            causes.push_str(&format!("model '{}', backend '{}': {cause}\n", model.name, member.backend.name));
        }
    }
    let (status, mut said) = if causes.is_empty() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, causes)
    };
    // No cause to send traffic elsewhere, but to be seen.
    for misfit in misfits(&snapshot) {
        said.push_str(&misfit);
        said.push('\n');
    }
    (status, said)
}

pub(super) async fn metrics(State(core): State<Arc<Core>>, headers: HeaderMap) -> Response {
    core.sweep();
    core.metrics.memory.bodies(core.body_memory.held_bytes());
    for model in &core.snapshot().models {
        for member in &model.members {
            let flow = member.backend.flow.peek();
            let answers = &core.metrics.requests.answers;
            answers.streams(&member.backend.name, flow.waiting_streams, flow.running_streams);
            let known = Known::of(member);
            core.metrics.prompts.shapes(&member.backend.name, known.equal, known.differs);
        }
        if let Some(text) = &model.text {
            core.metrics.text(&model.name, &text.tokenizer.segment_cache(), text.template_error.is_some());
        }
        let policy = &model.plan.policy;
        if let Some((report, watched)) = model.pool.report().zip(policy.watched()) {
            core.metrics.shadow.set(&model.name, policy.acting_name(), watched.name(), &report);
        }
    }
    let format = TextFormat::accepted(text(&headers, &header::ACCEPT));
    let head = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")];
    (head, core.metrics.encode(format)).into_response()
}
