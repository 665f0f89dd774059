//! A sampled request, stored until its response is evaluated.

use std::sync::Arc;

use bytes::Bytes;
use semmoe_engines::{Dialect, Route};
use semmoe_tables::{RankId, Tables};
use semmoe_text::{ChatTemplate, Preparation, PromptEncoder, Scorer};

use super::backend::BackendLive;

/// Outcome label for a response without routed experts.
pub(super) const MISSING: &str = "missing";

/// A sampled request, as it was placed.
pub(crate) struct Seen {
    pub(crate) backend: Arc<BackendLive>,
    pub(crate) model: String,
    pub(crate) preparation: &'static Preparation,
    /// The model's tokenizer, if it has one.
    pub(crate) tokenizer: Option<Arc<PromptEncoder>>,
    pub(crate) template: Option<Arc<ChatTemplate>>,
    /// The tables in use when the request was placed.
    pub(crate) tables: Arc<Tables>,
    pub(crate) scorer: Arc<Scorer>,
    /// Generation of the tables.
    pub(crate) generation: u64,
    pub(crate) dialect: Dialect,
    pub(crate) route: Route,
    pub(crate) text_route: Option<semmoe_text::Route>,
    /// Number of ranks that share a group of the tables.
    pub(crate) group_ranks: u16,
    /// The rank that the request was pinned to.
    pub(crate) rank: Option<RankId>,
    /// Whether pins take effect, as known when the response is evaluated.
    pub(crate) is_pinned: Box<dyn Fn() -> bool + Send + Sync>,
    /// The client's body.
    pub(crate) body: Bytes,
}

/// A sampled request and its response.
pub(super) struct Observation {
    pub(super) seen: Seen,
    pub(super) answer: Bytes,
}
