//! The model's name as an engine knows it, where that is not the name that clients use (`served_name` of a backend).

use std::borrow::Cow;

use semmoe_engines::pin::Stripped;
use semmoe_engines::{Engine, Route, json};

use crate::backends::{Backend, Model};

/// The adapter that a request names, without its model's name.
pub(super) fn adapter(model: &Model, name: &str) -> Option<String> {
    let behind = model.names().filter_map(|own| name.strip_prefix(own.as_str())?.strip_prefix(':'));
    // As names are found: the longest one of the model.
    behind.min_by_key(|adapter| adapter.len()).map(str::to_owned)
}

/// The body as this backend wants it: as it is, or with another name of the model, all other bytes staying.
pub(super) fn body<'a>(
    backend: &Backend,
    route: Route,
    adapter: Option<&str>,
    body: &'a Stripped,
) -> Cow<'a, Stripped> {
    let Some(served) = backend.config.served_name.as_deref() else { return Cow::Borrowed(body) };
    let names = match route {
        // It may be no JSON at all.
        Route::Extra => matches!(json::top_level(body.bytes(), "model"), Ok(Some(_))),
        route => route.names_model(),
    };
    if !names {
        return Cow::Borrowed(body);
    }
    let name = match adapter {
        None => Cow::Borrowed(served),
        // It knows adapters as models of their own.
        Some(adapter) if backend.engine == Engine::Vllm => Cow::Borrowed(adapter),
        Some(adapter) => Cow::Owned(format!("{served}:{adapter}")),
    };
    // The body was scanned before, so that it can be cut.
    body.with_model(&name).map_or(Cow::Borrowed(body), Cow::Owned)
}
