//! Whether tables fit the model they are for, and the backend that they will steer.
//!
//! One set of checks for three moments: before serving, when a backend (re)appears, and when tables are loaded.

use semmoe_engines::Dialect;
use semmoe_engines::probe::{Probe, RankDoubt};
use semmoe_engines::sglang::{PlacementDifference, ServerInfo};
use semmoe_tables::{Attention, ModelInfo, Tables};
use semmoe_text::PromptEncoder;

use crate::config::BackendConfig;

/// Why tables, model and backend do not belong together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Incompatible {
    /// Requests can be placed only by tables for data-parallel attention.
    #[error("the tables are for attention {found}, expected dp")]
    Attention {
        /// The tables'.
        found: String,
    },
    /// Another tokenizer.
    #[error("the {what} tokenizer has SHA-256 {found}, but the model's tokenizer has {expected}")]
    Tokenizer {
        /// Whose.
        what: &'static str,
        /// The tables' or the backend's.
        found: String,
        /// The configured tokenizer's.
        expected: String,
    },
    /// A vocabulary too small for the tokenizer.
    #[error("the tables cover {found} tokens, but the tokenizer has {expected}")]
    Vocabulary {
        /// The tables'.
        found: u32,
        /// The tokenizer's.
        expected: u32,
    },
    /// Another model than the other tables' or than the backend's.
    #[error("the tables do not fit {what}: {cause}")]
    Model {
        /// The value they were compared with.
        what: &'static str,
        /// The field that differs.
        cause: String,
    },
    /// Another number of ranks.
    #[error("{found_in} {found} attention-DP ranks, but {expected_in} {expected}")]
    Ranks {
        /// Who has `found`.
        found_in: &'static str,
        /// A number of ranks.
        found: u16,
        /// Who has `expected`.
        expected_in: &'static str,
        /// Another one.
        expected: u16,
    },
    /// Another placement of experts.
    #[error("the tables are for placement {found}, but the backend runs placement {expected}")]
    Placement {
        /// The tables'.
        found: String,
        /// The backend's.
        expected: String,
    },
    /// Another placement than the configuration says that the backend runs.
    #[error("the tables are for placement {found}, but `placement_digest` says that the backend runs {expected}")]
    Declared {
        /// The tables'.
        found: String,
        /// The configured one.
        expected: String,
    },
    /// Another placement than the backend's server information shows.
    #[error("the tables are for placement {found}, but the backend runs another (init_expert_location): {cause}")]
    Shown {
        /// The tables'.
        found: String,
        /// The first difference.
        cause: PlacementDifference,
    },
    /// Another number of expert groups.
    #[error("the tables have {found} expert groups, but the backend's ep_size is {expected}")]
    Groups {
        /// The tables'.
        found: u16,
        /// The backend's.
        expected: u16,
    },
    /// More ranks than the configuration allows.
    #[error("{ranks} attention-DP ranks, but {others} of other backends leave room for {room} (limits.ranks)")]
    TooManyRanks {
        /// The backend's.
        ranks: u16,
        /// Those of the model's other backends.
        others: usize,
        /// The remaining limit.
        room: usize,
    },
    /// The engine moves experts by itself.
    #[error("the backend has EPLB enabled (enable_eplb), which moves experts away from the tables' placement")]
    Moving,
    /// It is unknown how the engine counts its ranks.
    #[error(
        "the ranks behind the backend's URL do not start at 0, and it does not report how pins number them; set `rank_base`"
    )]
    UnknownRankBase,
}

/// Why requests to a backend cannot be pinned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unpinned {
    /// The engine reports no number of ranks.
    #[error("the backend does not report its number of attention-DP ranks; set `ranks` if it has several")]
    Unknown,
    /// Its report cannot be right.
    #[error("{0}")]
    Doubt(#[from] RankDoubt),
    /// It runs a layout that the tables are not for.
    #[error("the tables are not for layout '{layout}', which the backend runs until it is switched")]
    Layout {
        /// Its name.
        layout: String,
    },
    /// It served with another number of ranks before.
    #[error("{0}; load tables for as many ranks")]
    Changed(#[from] Box<Incompatible>),
}

impl From<Incompatible> for Unpinned {
    fn from(refusal: Incompatible) -> Self {
        Self::Changed(Box::new(refusal))
    }
}

/// A backend that fits: what requests are placed and pinned by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Ranks to choose between; where they are unknown, one for each URL.
    pub(crate) ranks: u16,
    /// How requests are pinned.
    pub(crate) dialect: Dialect,
    /// Why they are not, though there may be several ranks.
    pub(crate) unpinned: Option<Unpinned>,
}

impl Fit {
    /// A backend of whose ranks too little is known: its engine chooses.
    pub(crate) fn unpinned(probe: &Probe, urls: usize, why: Unpinned) -> Self {
        let engine = probe.dialect.engine();
        let dialect = if urls > 1 { Dialect::by_url(engine) } else { Dialect::unpinned(engine) };
        Self { ranks: u16::try_from(urls).unwrap_or(u16::MAX).max(1), dialect, unpinned: Some(why) }
    }
}

/// Tables against the model's tokenizer.
pub(crate) fn with_tokenizer(tables: &Tables, tokenizer: Option<&PromptEncoder>) -> Result<(), Incompatible> {
    if tables.attention() != Attention::Dp {
        return Err(Incompatible::Attention { found: tables.attention().to_string() });
    }
    let Some(tokenizer) = tokenizer else { return Ok(()) };
    if let Some(found) = &tables.model().tokenizer_sha256 {
        same_tokenizer("tables'", found, tokenizer.sha256())?;
    }
    let (found, expected) = (tables.model().vocab_size, tokenizer.vocab_size());
    if found < expected { Err(Incompatible::Vocabulary { found, expected }) } else { Ok(()) }
}

/// Tables against others of the same model: loaded before, or another backend's.
pub(crate) fn with_model(tables: &Tables, what: &'static str, other: &ModelInfo) -> Result<(), Incompatible> {
    tables.model().check_compatible(other).map_err(|error| Incompatible::Model { what, cause: error.to_string() })
}

/// Who knows which placement a backend runs.
pub(crate) fn placement_source(probe: &Probe, declared: Option<&str>, tables: Option<&Tables>) -> &'static str {
    let server = probe.server.as_ref();
    if server.is_some_and(|server| server.placement_digest.is_some() || server.shown_placement().is_some()) {
        "engine"
    } else if declared.is_some() {
        "configuration"
    } else if tables.is_some() {
        "tables"
    } else {
        "unknown"
    }
}

/// Tables against the placement that the configuration declares.
pub(crate) fn with_declared(tables: &Tables, declared: Option<&str>) -> Result<(), Incompatible> {
    let found = tables.placement_digest();
    match declared {
        Some(expected) if expected != found => {
            Err(Incompatible::Declared { found: found.to_owned(), expected: expected.to_owned() })
        }
        _ => Ok(()),
    }
}

/// A backend's report about itself, checked against tables, tokenizer and configuration.
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
    // One that can be switched has as many ranks as it reports.
    let switches = server.is_some_and(ServerInfo::switches) && probe.dp_size.is_some();
    let configured = backend.ranks.filter(|_| !switches).or(known);
    if let (Some(server), Some(tables)) = (server, tables)
        && let Some(layout) = server.layout_without_tables()
    {
        if let Some(model) = server.model_info() {
            with_model(tables, "the backend", &model)?;
        }
        let layout = layout.to_owned();
        return Ok(Fit::unpinned(probe, backend.urls.len(), Unpinned::Layout { layout }));
    }
    let expected = expected_ranks(tables, configured)?;
    if let (Some(found), Some(expected)) = (probe.dp_size, expected)
        && let Err(misfit) = same_ranks("the backend has", found, expected_name(configured), expected)
    {
        // Nothing is pinned beyond what the engine reports, whatever the configuration says.
        let by_configuration = configured.is_some() && backend.urls.len() == 1;
        let fit = || Fit::unpinned(probe, backend.urls.len(), misfit.clone().into());
        return if by_configuration { Ok(fit()) } else { Err(misfit) };
    }
    if let Some(server) = &probe.server {
        if let (Some(found), Some(tokenizer)) = (&server.tokenizer_sha256, tokenizer) {
            same_tokenizer("backend's", found, tokenizer.sha256())?;
        }
        if let Some(tables) = tables {
            with_server(tables, server)?;
        }
    }
    let (dialect, urls) = (probe.dialect, backend.urls.len());
    Ok(match (configured.or(probe.dp_size).or(expected), &probe.doubt) {
        (_, Some(doubt)) if configured.is_none() || urls > 1 => Fit::unpinned(probe, urls, doubt.clone().into()),
        // The engine itself reports none: its pins have to be proved first.
        (Some(ranks), _) if probe.dp_size.is_none() => Fit { ranks, dialect: dialect.unproven(), unpinned: None },
        (Some(ranks), _) => Fit { ranks, dialect, unpinned: None },
        (None, _) => Fit::unpinned(probe, urls, Unpinned::Unknown),
    })
}

/// A backend's ranks beside those of the other backends of its model, against `limits.ranks`.
pub(crate) fn within_limit(ranks: u16, others: usize, limit: u16) -> Result<(), Incompatible> {
    let room = usize::from(limit).saturating_sub(others);
    if usize::from(ranks) > room { Err(Incompatible::TooManyRanks { ranks, others, room }) } else { Ok(()) }
}

/// Ranks as far as configuration and tables say.
pub(crate) fn expected_ranks(tables: Option<&Tables>, configured: Option<u16>) -> Result<Option<u16>, Incompatible> {
    if let (Some(tables), Some(expected)) = (tables, configured) {
        same_ranks("the tables have", tables.dp_ranks(), expected_name(configured), expected)?;
    }
    Ok(configured.or(tables.map(Tables::dp_ranks)))
}

fn expected_name(configured: Option<u16>) -> &'static str {
    if configured.is_some() { "`ranks` is" } else { "the tables have" }
}

fn with_server(tables: &Tables, server: &ServerInfo) -> Result<(), Incompatible> {
    if server.enable_eplb == Some(true) {
        return Err(Incompatible::Moving);
    }
    if let Some(model) = server.model_info() {
        with_model(tables, "the backend", &model)?;
    }
    if let Some(expected) = server.ep_size.filter(|ep_size| *ep_size != tables.groups()) {
        return Err(Incompatible::Groups { found: tables.groups(), expected });
    }
    if let Some(Err(cause)) = server.shown_placement().map(|shown| shown.check(tables)) {
        return Err(Incompatible::Shown { found: tables.placement_digest().to_owned(), cause });
    }
    match &server.placement_digest {
        Some(expected) if expected != tables.placement_digest() => {
            Err(Incompatible::Placement { found: tables.placement_digest().to_owned(), expected: expected.clone() })
        }
        _ => Ok(()),
    }
}

fn same_tokenizer(what: &'static str, found: &str, expected: &str) -> Result<(), Incompatible> {
    if found == expected {
        return Ok(());
    }
    Err(Incompatible::Tokenizer { what, found: found.to_owned(), expected: expected.to_owned() })
}

fn same_ranks(
    found_in: &'static str,
    found: u16,
    expected_in: &'static str,
    expected: u16,
) -> Result<(), Incompatible> {
    if found == expected { Ok(()) } else { Err(Incompatible::Ranks { found_in, found, expected_in, expected }) }
}
