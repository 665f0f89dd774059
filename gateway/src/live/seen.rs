//! A sampled request until its answer is looked at.

use std::sync::Arc;

use bytes::Bytes;
use semmoe_engines::{Dialect, Route};
use semmoe_tables::RankId;

use crate::backend::Backend;
use crate::snapshot::Model;
use crate::tables::LoadedTables;

/// The outcome of an answer without routed experts.
pub(super) const MISSING: &str = "missing";

/// A sampled request, as it was placed.
pub(super) struct Seen {
    pub(super) backend: Arc<Backend>,
    pub(super) model: Arc<Model>,
    /// Those that it was placed by.
    pub(super) tables: Arc<LoadedTables>,
    pub(super) dialect: Dialect,
    pub(super) route: Route,
    /// The rank it was pinned to.
    pub(super) rank: Option<RankId>,
    /// The client's.
    pub(super) body: Bytes,
}

/// A sampled request and its answer.
pub(super) struct Observation {
    pub(super) seen: Seen,
    pub(super) answer: Bytes,
}
