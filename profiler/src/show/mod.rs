//! Analyses a model's routing in a trace or profile: the paper's Table 1 for every layer, loads, token coverage, and
//! relations between layers.
//!
//! | module | contents |
//! |---|---|
//! | `rows` | sparse token and expert counts; splits a profile in half |
//! | `table1` | how well a token's hottest experts predict its experts, their share, kurtosis |
//! | `next` | experts of one layer, given the experts of the previous layer |
//! | `judge` | interprets the figures and recommends a next step |
//! | `text` | the study as a table for terminals |
//! | `map` | two-dimensional map of requests by the experts that they activate |

mod judge;
pub(crate) mod map;
mod next;
pub(crate) mod rows;
pub(crate) mod table1;
mod text;

use std::path::Path;

use semmoe_tables::{FormatError, Profile, ProfileBuilder, Trace};
use serde::Serialize;

pub use map::RequestMap;
pub use next::NextLayer;
pub(crate) use rows::Rows;
pub use table1::{LayerTable, Quartiles};

use crate::{ProfilerError, Summary, split};

/// All results of a study.
#[derive(Debug, Serialize)]
pub struct Study {
    /// A summary of the file.
    pub summary: Summary,
    /// The source of held-out data.
    pub held_out: HeldOutKind,
    /// Fraction of held-out occurrences whose token was counted, 0..1.
    pub coverage_of_traffic: f64,
    /// One per MoE layer.
    pub layers: Vec<LayerTable>,
    /// One per pair of consecutive layers; empty if there are too many expert pairs.
    pub next: Vec<NextLayer>,
    /// All counts, used for drawing images.
    #[serde(skip)]
    pub(crate) rows: Rows,
    /// The counts of the file.
    #[serde(skip)]
    pub whole: Profile,
    /// The counted profile and the held-out profile, if separate.
    #[serde(skip)]
    pub parts: Option<(Profile, Profile)>,
}

/// The source of held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldOutKind {
    /// Half of a trace's requests, selected by their prompts.
    Requests,
    /// Another file.
    File,
    /// A random half of each count, as a profile has no requests, and a trace's requests may be too few or too similar
    /// to split.
    Counts,
}

impl HeldOutKind {
    /// Minimum occurrences of a token to be included in F1. With split counts, half of a single occurrence's
    /// activations says nothing about the other half.
    fn least_occurrences(self) -> u64 {
        match self {
            Self::Requests | Self::File => 1,
            Self::Counts => 8,
        }
    }

    /// Describes the evaluation in words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Requests => "predicted from half of the requests, evaluated on the other half",
            Self::File => "predicted from this file, evaluated on the held-out file",
            Self::Counts => {
                "predicted from a random half of every count, evaluated on the other half, for tokens with at least eight occurrences (no requests to hold out)"
            }
        }
    }
}

/// An opened trace or profile.
#[derive(Debug)]
pub enum Input {
    /// A trace, with its requests.
    Trace(Trace),
    /// A profile: counts only.
    Profile(Profile),
}

impl Input {
    /// Opens a file.
    ///
    /// # Errors
    /// If the file is neither a trace nor a profile, or is damaged.
    pub fn open(path: &Path) -> Result<Self, ProfilerError> {
        match Trace::open(path) {
            Ok(trace) => Ok(Self::Trace(trace)),
            Err(FormatError::File { source, .. }) if matches!(*source, FormatError::WrongFormat { .. }) => {
                Ok(Self::Profile(Profile::open(path)?))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The model.
    pub fn model(&self) -> &semmoe_tables::ModelInfo {
        match self {
            Self::Trace(trace) => trace.model(),
            Self::Profile(profile) => profile.model(),
        }
    }

    fn summary(&self) -> Result<Summary, ProfilerError> {
        match self {
            Self::Trace(trace) => Summary::of_trace(trace),
            Self::Profile(profile) => Ok(Summary::of_profile(profile)),
        }
    }

    fn profile(&self) -> Result<Profile, ProfilerError> {
        match self {
            Self::Trace(trace) => Ok(Profile::of_trace(trace)?),
            // Copies the profile. Mapping the file twice would suffice, but profiles are small compared with traces.
            Self::Profile(profile) => {
                let mut builder = ProfileBuilder::like(profile)?;
                builder.add_profile(profile)?;
                Ok(builder.finish()?)
            }
        }
    }
}

/// Counts two halves of the requests separately; `None` if a half has no known route.
fn halves(trace: &Trace) -> Result<Option<(Profile, Profile)>, ProfilerError> {
    let (counted, judged) = split(trace, 0.5)?;
    let (counted, judged) = (Profile::of_trace(&counted)?, Profile::of_trace(&judged)?);
    Ok((counted.total_tokens().min(judged.total_tokens()) > 0).then_some((counted, judged)))
}

/// Summarises a trace or a profile file.
///
/// # Errors
/// If the file is neither a trace nor a profile, or if it is damaged.
pub fn show(path: &Path) -> Result<Summary, ProfilerError> {
    Input::open(path)?.summary()
}

/// Studies a trace or profile; `held_out` is another file of the same model to evaluate on.
///
/// # Errors
/// If the two are of different models, or a count overflows.
pub fn study(input: &Input, held_out: Option<&Input>) -> Result<Study, ProfilerError> {
    let summary = input.summary()?;
    let whole = input.profile()?;
    let rows = Rows::of(&whole);
    let (kind, parts) = match (input, held_out) {
        (_, Some(other)) => {
            input.model().check_compatible(other.model())?;
            (HeldOutKind::File, Some((input.profile()?, other.profile()?)))
        }
        (Input::Trace(trace), None) => match halves(trace)? {
            Some(halves) => (HeldOutKind::Requests, Some(halves)),
            None => (HeldOutKind::Counts, None),
        },
        (Input::Profile(_), None) => (HeldOutKind::Counts, None),
    };
    let (counted, judged) = match &parts {
        Some((counted, judged)) => (Rows::of(counted), Rows::of(judged)),
        None => rows.halves(),
    };
    let layer = |layer| table1::layer(layer, &rows, &counted, &judged, kind.least_occurrences());
    let layers = (0..rows.layers()).map(layer).collect();
    let next = next::all(input, &rows);
    let coverage_of_traffic = match kind {
        // Good-Turing: the fraction of tokens that occur once estimates the fraction of unknown tokens in new traffic.
        HeldOutKind::Counts => rows.repeated_share(),
        _ => judged.known_share(&counted),
    };
    Ok(Study { summary, held_out: kind, coverage_of_traffic, layers, next, rows, whole, parts })
}
