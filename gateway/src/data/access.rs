//! The access log: one event when each request ends, at target `semmoe::access`.
//!
//! It records the request, the key's name (never the key), the model, the backend and the outcome, but no prompt,
//! header or query.

use std::sync::Arc;

use semmoe_engines::Route;

use crate::backends::{Model, RequestId};
use crate::config::Access;
use crate::data::trust::Caller;
use crate::observe::{Done, NONE, OutputTokens};

/// Paths of SGLang, vLLM and OpenAI that probes and engine tools request, and that the gateway does not forward.
const ENGINE_PATHS: &str = "/ /health /ping /version /metrics /load /v1/loads /get_load /health_generate \
    /server_info /get_server_info /model_info /get_model_info /v1/score /v1/rerank /rerank /classify /pooling \
    /encode /invocations /flush_cache /v1/audio/transcriptions /v1/images/generations /v1/batches";

/// Facts about a request that are not labels in its metrics.
pub(crate) struct Record {
    pub(crate) id: RequestId,
    pub(crate) caller: Caller,
    /// The route; `None` for paths that the gateway does not serve.
    pub(crate) route: Option<Route>,
    /// The path, if it is a known engine path that is not forwarded.
    refused_path: Option<&'static str>,
    model: Option<Arc<Model>>,
    pub(super) prompt_tokens: u64,
    streams: bool,
    bytes: u64,
}

impl Record {
    pub(crate) fn new(id: RequestId, route: Option<Route>) -> Self {
        Self {
            id,
            caller: Caller::default(),
            route,
            refused_path: None,
            model: None,
            prompt_tokens: 0,
            streams: false,
            bytes: 0,
        }
    }

    /// Creates the record of a request to a path that the gateway does not serve. Since any path may contain a secret,
    /// only known paths are logged.
    pub(super) fn refused(id: RequestId, path: &str) -> Self {
        let refused_path = ENGINE_PATHS.split(' ').find(|known| *known == path);
        Self { refused_path, ..Self::new(id, None) }
    }

    /// Records that the request was read. `tokens` is an estimate if the prompt was not tokenized; `streams`: its
    /// response is streamed.
    pub(super) fn read(&mut self, model: &Arc<Model>, prompt_tokens: u64, streams: bool) {
        self.model = Some(Arc::clone(model));
        self.prompt_tokens = prompt_tokens;
        self.streams = streams;
    }

    /// Returns the model, once the request has been read.
    pub(super) fn model(&self) -> Option<&Model> {
        self.model.as_deref()
    }

    /// Returns the model's name, or `none`.
    pub(super) fn model_name(&self) -> &str {
        self.model().map_or(NONE, |model| model.name.as_str())
    }

    /// Adds to the number of response body bytes.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    pub(super) fn log(&self, access: Access, done: &Done<'_>) {
        if !access.wants(done.code) {
            return;
        }
        let Done { backend, model, route, place, policy, code, took, generated, .. } = done;
        tracing::info!(
            target: "semmoe::access",
            id = self.id.as_str(),
            key = self.caller.name().unwrap_or(NONE),
            route = route.map(Route::name).or(self.refused_path).unwrap_or(NONE),
            model,
            backend,
            rank = place.label(),
            policy,
            status = code,
            stream = self.streams,
            prompt_tokens = self.prompt_tokens,
            output_tokens = generated.output_tokens.map(OutputTokens::count),
            first_token_ms = generated.first_token.map(|first| first.as_secs_f64() * 1e3),
            bytes = self.bytes,
            ms = took.as_secs_f64() * 1e3,
        );
    }
}
