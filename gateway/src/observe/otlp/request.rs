//! The spans of one request: the request itself, and its consecutive stages.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use http::HeaderMap;

use super::context::Context;
use super::document::{Kind, Span, Value};
use super::export::Tracer;

/// A stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The prompt is tokenized and scored.
    Score,
    /// A rank is chosen.
    Route,
    /// The engine processes the request, up to the last byte of its response; one stage per attempt.
    Upstream,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Score => "score",
            Self::Route => "route",
            Self::Upstream => "upstream",
        }
    }

    fn kind(self) -> Kind {
        if self == Self::Upstream { Kind::Client } else { Kind::Internal }
    }
}

/// A traced request.
pub(crate) struct RequestTrace {
    tracer: Arc<Tracer>,
    /// Unix time in nanoseconds at `began`.
    epoch_nanos: u64,
    began: Instant,
    context: Context,
    request: Span,
    stage: Option<Span>,
    done: Vec<Span>,
}

impl RequestTrace {
    /// Begins a trace if the client requests one, or else for the configured fraction of the requests.
    pub(crate) fn begin(tracer: &Arc<Tracer>, headers: &HeaderMap, path: &'static str) -> Option<Box<Self>> {
        let parent = Context::of(headers);
        let trace = parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace);
        if !parent.map_or_else(|| tracer.takes(trace), |parent| parent.sampled) {
            return None;
        }
        let context = Context { trace, span: fastrand::u64(1..), sampled: true };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let epoch_nanos = since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
        let parent = parent.map(|parent| parent.span);
        let mut request = Span::new("request", Kind::Server, context, parent, epoch_nanos);
        request.set("http.request.method", Value::Text("POST".into()));
        request.set("http.route", Value::Text(path.into()));
        let (tracer, began) = (Arc::clone(tracer), Instant::now());
        Some(Box::new(Self { tracer, epoch_nanos, began, context, request, stage: None, done: Vec::new() }))
    }

    fn now(&self) -> u64 {
        let since = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.epoch_nanos.saturating_add(since)
    }

    /// Ends the previous stage and begins this one.
    pub(crate) fn enter(&mut self, stage: Stage) {
        self.leave();
        let context = Context { span: fastrand::u64(1..), ..self.context };
        self.stage = Some(Span::new(stage.name(), stage.kind(), context, Some(self.context.span), self.now()));
    }

    fn leave(&mut self) {
        if let Some(mut stage) = self.stage.take() {
            stage.ended_nanos = self.now();
            self.done.push(stage);
        }
    }

    /// Adds an attribute to the current stage.
    pub(crate) fn note(&mut self, key: &'static str, value: Value) {
        if let Some(stage) = &mut self.stage {
            stage.set(key, value);
        }
    }

    /// Adds an attribute to the request.
    pub(crate) fn note_request(&mut self, key: &'static str, value: Value) {
        self.request.set(key, value);
    }

    /// Marks the current stage as failed.
    pub(crate) fn fail(&mut self, cause: &'static str) {
        if let Some(stage) = &mut self.stage {
            stage.failed = Some(cause);
        }
    }

    /// Records how long the current stage has run, in seconds.
    pub(crate) fn note_elapsed(&mut self, key: &'static str) {
        let now = self.now();
        if let Some(stage) = &mut self.stage {
            let seconds = now.saturating_sub(stage.began_nanos) as f64 * 1e-9;
            stage.set(key, Value::Real(seconds));
        }
    }

    /// Returns the trace id shared by all of the request's spans.
    pub(crate) fn id(&self) -> u128 {
        self.context.trace
    }

    /// Returns the context of the current stage.
    pub(crate) fn here(&self) -> Context {
        self.stage.as_ref().map_or(self.context, |stage| stage.context)
    }

    /// Ends the request with this status.
    pub(crate) fn finish(mut self: Box<Self>, code: u16) {
        let failed = match code {
            499 => Some("the client disconnected"),
            500.. => Some("server error"),
            _ => None,
        };
        if let Some(cause) = failed {
            // A response that broke off had a successful head.
            self.fail(cause);
            self.request.failed = Some(cause);
        }
        self.leave();
        let now = self.now();
        self.request.set("http.response.status_code", Value::Number(code.into()));
        self.request.ended_nanos = now;
        let mut spans = self.done;
        spans.push(self.request);
        self.tracer.submit(spans);
    }
}
