//! The engine's name for a model, if it differs from the clients' (a backend's `served_name`).

use std::borrow::Cow;

use semmoe_engines::pin::Stripped;
use semmoe_engines::{Engine, Route, json};

use crate::backends::{Backend, Model};

/// Returns the adapter that a request names, without its model's name.
pub(super) fn adapter(model: &Model, name: &str) -> Option<String> {
    let behind = model.names().filter_map(|own| name.strip_prefix(own.as_str())?.strip_prefix(':'));
    // Match the model's longest name, as the lookup does.
    behind.min_by_key(|adapter| adapter.len()).map(str::to_owned)
}

/// Returns the body for this backend: unchanged, or with another model name and all other bytes unchanged.
pub(super) fn body<'a>(
    backend: &Backend,
    route: Route,
    adapter: Option<&str>,
    body: &'a Stripped,
) -> Cow<'a, Stripped> {
    let Some(served) = backend.config.served_name.as_deref() else { return Cow::Borrowed(body) };
    let names = match route {
        // The body might not be JSON at all.
        Route::Extra => matches!(json::top_level(body.bytes(), "model"), Ok(Some(_))),
        route => route.names_model(),
    };
    if !names {
        return Cow::Borrowed(body);
    }
    let name = match adapter {
        None => Cow::Borrowed(served),
        // vLLM lists adapters as models in their own right.
        Some(adapter) if backend.engine == Engine::Vllm => Cow::Borrowed(adapter),
        Some(adapter) => Cow::Owned(format!("{served}:{adapter}")),
    };
    // The body has already been scanned, so it can be edited.
    body.with_model(&name).map_or(Cow::Borrowed(body), Cow::Owned)
}
