//! A sampled request until its answer is evaluated.

use std::sync::Arc;

use bytes::Bytes;
use semmoe_engines::{Dialect, Route};
use semmoe_tables::{RankId, Tables};
use semmoe_text::{ChatTemplate, Preparation, PromptEncoder, Scorer};

use super::backend::BackendLive;

/// The outcome of an answer without routed experts.
pub(super) const MISSING: &str = "missing";

/// A sampled request, as placed.
pub(crate) struct Seen {
    pub(crate) backend: Arc<BackendLive>,
    pub(crate) model: String,
    pub(crate) preparation: &'static Preparation,
    /// The model's tokenizer, if it has one.
    pub(crate) tokenizer: Option<Arc<PromptEncoder>>,
    pub(crate) template: Option<Arc<ChatTemplate>>,
    /// The tables that placed it.
    pub(crate) tables: Arc<Tables>,
    pub(crate) scorer: Arc<Scorer>,
    /// Generation of the tables.
    pub(crate) generation: u64,
    pub(crate) dialect: Dialect,
    pub(crate) route: Route,
    pub(crate) text_route: Option<semmoe_text::Route>,
    /// The rank it was pinned to.
    pub(crate) rank: Option<RankId>,
    /// Whether pins take effect, as known when the answer is evaluated.
    pub(crate) is_pinned: Box<dyn Fn() -> bool + Send + Sync>,
    /// The client's body.
    pub(crate) body: Bytes,
}

/// A sampled request and its answer.
pub(super) struct Observation {
    pub(super) seen: Seen,
    pub(super) answer: Bytes,
}
