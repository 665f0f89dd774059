//! The verdict on a backend: at start, on a reload, after a probe, and when its tables change.
//!
//! A backend that can answer serves. If its ranks, placement, tokenizer or tables do not match, or one of its model's
//! files is unreadable, its requests are placed by load and not pinned, for a stated reason ([`Unpinned`]). A backend
//! is closed only if it cannot answer: it is unreachable, refuses the key, or serves another model ([`Closed`]).

use semmoe_engines::probe::{Probe, RankDoubt};
use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::{Dialect, SharedError};
use semmoe_tables::Tables;
use semmoe_text::PromptEncoder;

use crate::backends::compat::{self, Incompatible};
use crate::backends::parity::{self, Parity, Reader};
use crate::config::BackendConfig;

/// Why requests to a backend cannot be pinned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unpinned {
    /// The engine does not report its rank count.
    #[error("the backend does not report its number of attention-DP ranks; set `ranks` if it has several")]
    Unknown,
    /// The engine's report is implausible.
    #[error("{0}")]
    Doubt(#[from] RankDoubt),
    /// The backend runs a layout other than the one its tables are for.
    #[error("the tables are not for layout '{0}', which the backend runs until it is switched")]
    Layout(String),
    /// Neither the engine nor the configuration declares the placement.
    #[error("placement unproven: {0}; set `placement_digest` to the digest of the backend's placement")]
    Unproven(#[source] SharedError),
    /// The backend does not match its tables, its model's tokenizer or the configuration.
    #[error("{0}")]
    Misfit(Box<Incompatible>),
    /// One of the backend's or its model's files is unreadable.
    #[error("{0}")]
    File(#[source] SharedError),
}

impl Unpinned {
    /// A one- or two-word reason: one of the metric labels in `metrics/pins.rs`.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Unknown | Self::Doubt(_) => "ranks unknown",
            Self::Layout { .. } => "layout",
            Self::Unproven { .. } => "placement unproven",
            Self::Misfit(cause) => cause.reason(),
            Self::File { .. } => "file",
        }
    }
}

impl From<Incompatible> for Unpinned {
    fn from(cause: Incompatible) -> Self {
        Self::Misfit(Box::new(cause))
    }
}

/// Why a backend that answers probes receives no requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Closed {
    /// The backend does not recognize any of the names that requests use for the model.
    #[error("it serves a different model, '{0}', and none under the name used in requests; set `served_name`")]
    OtherModel(String),
    /// The backend was started for a measurement, and its output is wrong.
    #[error("it runs with --force-local-rate {0}, which measures communication cost: its output is wrong by design")]
    ForcedRate(String),
    /// Other backends exhaust `limits.ranks`.
    #[error("{0}")]
    NoRoom(Incompatible),
}

/// How requests are placed and pinned on a serving backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Number of ranks to choose from; if unknown, one per URL.
    pub(crate) ranks: u16,
    /// Number of adjacent ranks that share a group of the tables; more than one with hybrid experts.
    pub(crate) group_ranks: u16,
    /// How requests are pinned.
    pub(crate) dialect: Dialect,
    /// Why requests are not pinned, although there may be several ranks.
    pub(crate) unpinned: Option<Unpinned>,
    /// Which chats the engine tokenizes as the gateway does.
    pub(crate) parity: Parity,
}

impl Fit {
    /// Creates the fit of a backend whose engine chooses the ranks.
    pub(crate) fn unpinned(backend: &BackendConfig, why: Unpinned) -> Self {
        let (engine, urls) = (backend.engine, backend.urls.len());
        let dialect = if urls > 1 { Dialect::by_url(engine) } else { Dialect::unpinned(engine) };
        Self::of(u16::try_from(urls).unwrap_or(u16::MAX).max(1), dialect, Some(why))
    }

    /// Creates the fit of a backend that has not been probed yet: `ranks` from the configuration and tables, or 0.
    pub(crate) fn unprobed(backend: &BackendConfig, ranks: u16) -> Self {
        let engine = backend.engine;
        let dialect = if backend.urls.len() > 1 { Dialect::by_url(engine) } else { Dialect::of(engine, None) };
        Self::of(ranks, dialect, None)
    }

    /// Creates a fit whose chat tokenization is unknown.
    fn of(ranks: u16, dialect: Dialect, unpinned: Option<Unpinned>) -> Self {
        Self { ranks, group_ranks: 1, dialect, unpinned, parity: Parity::default() }
    }
}

/// A backend, and everything that its report is compared with.
pub(crate) struct Subject<'a> {
    pub(crate) config: &'a BackendConfig,
    pub(crate) tables: Option<&'a Tables>,
    /// The reader for the model's prompts.
    pub(crate) reader: Option<Reader<'a>>,
    /// Why the backend's or its model's files do not match, if already known.
    pub(crate) files: Option<&'a Unpinned>,
    /// Number of ranks that `limits.ranks` leaves for the backend.
    pub(crate) room: usize,
}

/// Returns the verdict on a backend from its report or, without one, from files and configuration.
pub(crate) fn judge(probe: Option<&Probe>, subject: &Subject<'_>) -> Result<Fit, Closed> {
    let Subject { config, tables, reader, files, room } = *subject;
    let encoder = reader.map(|reader| reader.tokenizer);
    if let Some(found) = probe.and_then(|probe| probe.other_model.clone()) {
        return Err(Closed::OtherModel(found));
    }
    if let Some(rate) = probe.and_then(|probe| probe.server.as_ref()?.force_local_rate) {
        return Err(Closed::ForcedRate(rate.to_string()));
    }
    let fit = match (files, probe) {
        (Some(why), _) => Ok(Fit::unpinned(config, why.clone())),
        (None, Some(probe)) => with_backend(probe, tables, encoder, config, None),
        (None, None) => {
            compat::expected_ranks(tables, config.ranks, 1).map(|ranks| Fit::unprobed(config, ranks.unwrap_or(0)))
        }
    };
    let fit = within(fit.unwrap_or_else(|misfit| Fit::unpinned(config, misfit.into())), config, room)?;
    let rendering = probe.and_then(|probe| probe.rendering.as_deref());
    Ok(Fit { parity: parity::compare(rendering, reader.as_ref()), ..fit })
}

/// Returns `fit`, or an unpinned fit if `limits.ranks` leaves no room for all of its ranks.
fn within(fit: Fit, config: &BackendConfig, room: usize) -> Result<Fit, Closed> {
    let too_many = Incompatible::TooManyRanks { ranks: fit.ranks, room };
    let fits = |fit: &Fit| usize::from(fit.ranks) <= room;
    if fits(&fit) {
        return Ok(fit);
    }
    Some(Fit::unpinned(config, too_many.clone().into())).filter(fits).ok_or(Closed::NoRoom(too_many))
}

/// Checks a backend's own report against tables, tokenizer and configuration.
///
/// # Errors
/// The first mismatch; tables about to be loaded are rejected because of it.
pub(crate) fn with_backend(
    probe: &Probe,
    tables: Option<&Tables>,
    tokenizer: Option<&PromptEncoder>,
    backend: &BackendConfig,
    known: Option<u16>,
) -> Result<Fit, Incompatible> {
    if probe.unknown_rank_base {
        return Err(Incompatible::UnknownRankBase);
    }
    let server = probe.server.as_ref();
    // A switchable backend may have as many ranks as it reports.
    let switches = server.is_some_and(ServerInfo::switches) && probe.dp_size.is_some();
    let configured = backend.ranks.filter(|_| !switches).or(known);
    if let (Some(server), Some(tables)) = (server, tables)
        && let Some(layout) = server.layout_without_tables()
    {
        if let Some(model) = server.model_info() {
            compat::with_model(tables, "the backend", &model)?;
        }
        let layout = layout.to_owned();
        return Ok(Fit::unpinned(backend, Unpinned::Layout(layout)));
    }
    let group_ranks = server.map_or(1, ServerInfo::group_ranks);
    let expected = compat::expected_ranks(tables, configured, group_ranks)?;
    if let (Some(found), Some(expected)) = (probe.dp_size, expected)
        && let Err(misfit) = compat::same_ranks("the backend has", found, compat::expected_name(configured), expected)
    {
        // Never pin beyond the reported ranks, whatever the configuration says.
        let by_configuration = configured.is_some() && backend.urls.len() == 1;
        return if by_configuration { Ok(Fit::unpinned(backend, misfit.into())) } else { Err(misfit) };
    }
    if let Some(server) = server {
        if let (Some(found), Some(tokenizer)) = (&server.tokenizer_sha256, tokenizer) {
            compat::same_tokenizer("backend's", found, tokenizer.sha256())?;
        }
        if let Some(tables) = tables {
            compat::with_server(tables, server)?;
        }
    }
    let unproven = tables.map(|tables| compat::unproven(tables, probe, backend)).transpose()?.flatten();
    let unpinned = |why| Fit::unpinned(backend, why);
    let pinned = |ranks, dialect| Fit { group_ranks, ..Fit::of(ranks, dialect, None) };
    Ok(match (configured.or(probe.dp_size).or(expected), &probe.doubt, unproven) {
        (_, Some(doubt), _) if configured.is_none() || backend.urls.len() > 1 => unpinned(doubt.clone().into()),
        (Some(_), _, Some(source)) => unpinned(Unpinned::Unproven(source)),
        // The engine itself does not report its rank count: pins must be verified first.
        (Some(ranks), _, None) if probe.dp_size.is_none() => pinned(ranks, probe.dialect.unproven()),
        (Some(ranks), _, None) => pinned(ranks, probe.dialect),
        (None, ..) => unpinned(Unpinned::Unknown),
    })
}
