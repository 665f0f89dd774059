//! `/healthz`, `/readyz`, `/metrics`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};

use super::guard::text;
use crate::backends::Health;
use crate::backends::parity::known::Known;
use crate::observe::TextFormat;
use crate::shell::control::Control;
use crate::shell::summary::misfits;

pub(super) async fn alive() -> &'static str {
    "ok\n"
}

pub(super) async fn ready(State(control): State<Arc<Control>>) -> (StatusCode, String) {
    if control.data.is_draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n".to_owned());
    }
    let mut causes = String::new();
    let snapshot = control.backends.snapshot();
    for model in &snapshot.models {
        if model.members.iter().any(|member| member.backend.takes_requests()) {
            continue;
        }
        if model.members.is_empty() {
            causes.push_str(&format!("model '{}': no backend has been discovered yet\n", model.name));
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
    // Misfits do not justify diverting traffic, but are worth showing.
    for misfit in misfits(&snapshot) {
        said.push_str(&misfit);
        said.push('\n');
    }
    (status, said)
}

pub(super) async fn metrics(State(control): State<Arc<Control>>, headers: HeaderMap) -> Response {
    control.backends.sweep();
    control.backends.metrics.memory.bodies(control.data.body_memory.held_bytes());
    for model in &control.backends.snapshot().models {
        for member in &model.members {
            let flow = member.backend.flow.peek();
            let answers = &control.backends.metrics.requests.answers;
            answers.streams(&member.backend.name, flow.waiting_streams, flow.running_streams);
            let known = Known::of(member);
            control.backends.metrics.prompts.shapes(&member.backend.name, known.equal, known.differs);
        }
        if let Some(text) = &model.text {
            control.backends.metrics.text(&model.name, &text.tokenizer.segment_cache(), text.template_error.is_some());
        }
        let policy = &model.plan.policy;
        if let Some((report, watched)) = model.pool.report().zip(policy.watched()) {
            control.backends.metrics.shadow.set(&model.name, policy.acting_name(), watched.name(), &report);
        }
    }
    let format = TextFormat::accepted(text(&headers, &header::ACCEPT));
    let head = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")];
    (head, control.backends.metrics.encode(format)).into_response()
}
