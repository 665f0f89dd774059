//! Individual checks of whether tables match the model and their backend. [`verdict`](crate::backends::verdict)
//! combines them into a verdict on the backend.

use semmoe_engines::SharedError;
use semmoe_engines::probe::Probe;
use semmoe_engines::sglang::{PlacementDifference, ServerInfo};
use semmoe_tables::{Attention, ModelInfo, Tables};
use semmoe_text::PromptEncoder;

use crate::config::BackendConfig;

/// Why tables, model and backend do not match.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Incompatible {
    /// Request placement requires tables for data-parallel attention.
    #[error("the tables are for attention {0}, expected dp")]
    Attention(String),
    /// The tokenizers differ.
    #[error("the {what} tokenizer has SHA-256 {found}, but the model's tokenizer has {expected}")]
    Tokenizer {
        /// Where the other tokenizer comes from.
        what: &'static str,
        /// SHA-256 in the tables or reported by the backend.
        found: String,
        /// SHA-256 of the configured tokenizer.
        expected: String,
    },
    /// The vocabulary is smaller than the tokenizer's.
    #[error("the tables cover {found} tokens, but the tokenizer has {expected}")]
    Vocabulary {
        /// Vocabulary size of the tables.
        found: u32,
        /// Vocabulary size of the tokenizer.
        expected: u32,
    },
    /// The tables are for a different model than the other tables or the backend.
    #[error("the tables do not match {what}: {source}")]
    Model {
        /// The counterpart of the comparison.
        what: &'static str,
        /// The field that differs.
        source: SharedError,
    },
    /// The rank counts differ.
    #[error("{found_in} {found} attention-DP ranks, but {expected_in} {expected}")]
    Ranks {
        /// Where `found` comes from.
        found_in: &'static str,
        /// One of the rank counts.
        found: u16,
        /// Where `expected` comes from.
        expected_in: &'static str,
        /// The other rank count.
        expected: u16,
    },
    /// The expert placements differ.
    #[error("the tables are for placement {found}, but the backend runs placement {expected}")]
    Placement {
        /// Placement digest of the tables.
        found: String,
        /// Placement digest of the backend.
        expected: String,
    },
    /// The tables' placement differs from the one that the configuration declares for the backend.
    #[error("the tables are for placement {found}, but `placement_digest` says that the backend runs {expected}")]
    Declared {
        /// Placement digest of the tables.
        found: String,
        /// Placement digest of the configuration.
        expected: String,
    },
    /// The tables' placement differs from the one in the backend's server information.
    #[error("the tables are for placement {found}, but the backend runs another (init_expert_location): {source}")]
    Shown {
        /// Placement digest of the tables.
        found: String,
        /// The first difference.
        source: PlacementDifference,
    },
    /// The numbers of expert groups differ.
    #[error("the tables have {found} expert groups, but the backend's ep_size is {expected}")]
    Groups {
        /// Expert groups of the tables.
        found: u16,
        /// Expert groups of the backend.
        expected: u16,
    },
    /// The backend has more ranks than the configuration allows.
    #[error("{ranks} attention-DP ranks, but limits.ranks leaves room for only {room}")]
    TooManyRanks {
        /// Ranks of the backend.
        ranks: u16,
        /// The remaining limit.
        room: usize,
    },
    /// The engine rebalances experts on its own.
    #[error("the backend has EPLB enabled (enable_eplb), which moves experts away from the tables' placement")]
    Moving,
    /// It is unknown how the engine numbers its ranks.
    #[error(
        "the ranks behind the backend's URL do not start at 0, and it does not report how pins number them; set `rank_base`"
    )]
    UnknownRankBase,
}

impl Incompatible {
    /// A one- or two-word reason for the mismatch, used as a metric label.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Attention { .. } | Self::Model { .. } => "tables",
            Self::Tokenizer { .. } | Self::Vocabulary { .. } => "tokenizer",
            Self::Ranks { .. } | Self::TooManyRanks { .. } | Self::UnknownRankBase => "ranks",
            Self::Placement { .. }
            | Self::Declared { .. }
            | Self::Shown { .. }
            | Self::Groups { .. }
            | Self::Moving => "placement",
        }
    }
}

/// Checks tables against the model's tokenizer.
pub(crate) fn with_tokenizer(tables: &Tables, tokenizer: Option<&PromptEncoder>) -> Result<(), Incompatible> {
    if tables.attention() != Attention::Dp {
        return Err(Incompatible::Attention(tables.attention().to_string()));
    }
    let Some(tokenizer) = tokenizer else { return Ok(()) };
    if let Some(found) = &tables.model().tokenizer_sha256 {
        same_tokenizer("tables'", found, tokenizer.sha256())?;
    }
    let (found, expected) = (tables.model().vocab_size, tokenizer.vocab_size());
    if found < expected { Err(Incompatible::Vocabulary { found, expected }) } else { Ok(()) }
}

/// Checks tables against the same model's other tables: its earlier ones, or another backend's.
pub(crate) fn with_model(tables: &Tables, what: &'static str, other: &ModelInfo) -> Result<(), Incompatible> {
    tables.model().check_compatible(other).map_err(|error| Incompatible::Model { what, source: error.into() })
}

/// Returns the source of a backend's placement digest.
pub(crate) fn placement_source(probe: &Probe, backend: &BackendConfig, tables: Option<&Tables>) -> &'static str {
    let reports = probe.server.as_ref().is_some_and(|server| server.placement_digest.is_some());
    if reports || probe.placement.is_ok() {
        "engine"
    } else if backend.placement_digest.is_some() {
        "configuration"
    } else if tables.is_some() && !backend.engine.speaks_sglang() {
        "tables"
    } else {
        "unknown"
    }
}

/// Checks tables against the placement that an engine reports. If nothing proves that they match, returns why. Only
/// engines with SGLang's dialect accept a placement; other engines use the checkpoint's.
pub(crate) fn unproven(
    tables: &Tables,
    probe: &Probe,
    backend: &BackendConfig,
) -> Result<Option<SharedError>, Incompatible> {
    let reports = probe.server.as_ref().is_some_and(|server| server.placement_digest.is_some());
    let cause = match probe.placement.as_ref().map(|shown| shown.check(tables)) {
        Ok(Ok(())) => return Ok(None),
        Ok(Err(cause @ PlacementDifference::Incomparable { .. })) => cause.into(),
        Ok(Err(source)) => return Err(Incompatible::Shown { found: tables.placement_digest().to_owned(), source }),
        Err(unseen) => unseen.clone().into(),
    };
    let proven = reports || backend.placement_digest.is_some() || !backend.engine.speaks_sglang();
    Ok((!proven).then_some(cause))
}

/// Checks tables against the placement declared in the configuration.
pub(crate) fn with_declared(tables: &Tables, declared: Option<&str>) -> Result<(), Incompatible> {
    let found = tables.placement_digest();
    match declared {
        Some(expected) if expected != found => {
            Err(Incompatible::Declared { found: found.to_owned(), expected: expected.to_owned() })
        }
        _ => Ok(()),
    }
}

/// Returns the rank count according to configuration and tables. Each group of the tables is shared by `group_ranks`
/// ranks.
pub(crate) fn expected_ranks(
    tables: Option<&Tables>,
    configured: Option<u16>,
    group_ranks: u16,
) -> Result<Option<u16>, Incompatible> {
    let of_tables = tables.map(|tables| tables.dp_ranks().saturating_mul(group_ranks));
    if let (Some(found), Some(expected)) = (of_tables, configured) {
        same_ranks("the tables have", found, expected_name(configured), expected)?;
    }
    Ok(configured.or(of_tables))
}

pub(crate) fn expected_name(configured: Option<u16>) -> &'static str {
    if configured.is_some() { "`ranks` is" } else { "the tables have" }
}

pub(crate) fn with_server(tables: &Tables, server: &ServerInfo) -> Result<(), Incompatible> {
    if server.enable_eplb == Some(true) {
        return Err(Incompatible::Moving);
    }
    if let Some(model) = server.model_info() {
        with_model(tables, "the backend", &model)?;
    }
    if let Some(expected) = server.ep_size.filter(|ep_size| *ep_size != tables.groups()) {
        return Err(Incompatible::Groups { found: tables.groups(), expected });
    }
    match &server.placement_digest {
        Some(expected) if expected != tables.placement_digest() => {
            Err(Incompatible::Placement { found: tables.placement_digest().to_owned(), expected: expected.clone() })
        }
        _ => Ok(()),
    }
}

pub(crate) fn same_tokenizer(what: &'static str, found: &str, expected: &str) -> Result<(), Incompatible> {
    if found == expected {
        return Ok(());
    }
    Err(Incompatible::Tokenizer { what, found: found.to_owned(), expected: expected.to_owned() })
}

pub(crate) fn same_ranks(
    found_in: &'static str,
    found: u16,
    expected_in: &'static str,
    expected: u16,
) -> Result<(), Incompatible> {
    if found == expected { Ok(()) } else { Err(Incompatible::Ranks { found_in, found, expected_in, expected }) }
}
