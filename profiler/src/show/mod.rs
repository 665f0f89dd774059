//! A model's routing, from a trace or profile: the paper's Table 1 for every layer, loads, evidence, and how layers
//! hang together.
//!
//! | module | what |
//! |---|---|
//! | `rows` | counts of tokens and experts, sparse; halves of a profile |
//! | `table1` | how well a token's hottest experts predict, how hot they are, kurtosis |
//! | `next` | experts of one layer given those of the layer before |
//! | `judge` | what the figures mean, and what to do next |
//! | `text` | the study as a table for terminals |
//! | `map` | requests in two dimensions, by the experts they activate |

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

/// Everything that is shown.
#[derive(Debug, Serialize)]
pub struct Study {
    /// The content of the file.
    pub summary: Summary,
    /// Where the figures on data not counted come from.
    pub held_out: HeldOutKind,
    /// Share of the occurrences not counted whose token was counted, 0..1.
    pub coverage_of_traffic: f64,
    /// One per MoE layer.
    pub layers: Vec<LayerTable>,
    /// From each layer to the next, one less than there are layers; none where the pairs of experts are too many.
    pub next: Vec<NextLayer>,
    /// All counts, for pictures.
    #[serde(skip)]
    pub(crate) rows: Rows,
    /// The counts of the file.
    #[serde(skip)]
    pub whole: Profile,
    /// The profile that was counted and the one judged on, where there are two.
    #[serde(skip)]
    pub parts: Option<(Profile, Profile)>,
}

/// Where the figures on data not counted come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldOutKind {
    /// Half of a trace's requests, by their prompts.
    Requests,
    /// Another file.
    File,
    /// Half of each count, at random: a profile has no requests, and those of a trace may be too few or too alike for
    /// two halves.
    Counts,
}

impl HeldOutKind {
    /// Tokens with fewer occurrences do not count for F1: half of the activations of one occurrence say nothing of the
    /// other half.
    fn least_occurrences(self) -> u64 {
        match self {
            Self::Requests | Self::File => 1,
            Self::Counts => 8,
        }
    }

    /// In words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Requests => "judged on half of the requests, predicted from the other half",
            Self::File => "predicted from this file, judged on the held-out file",
            Self::Counts => {
                "judged on half of every count drawn at random, predicted from the other half, tokens of eight occurrences and more (there are no requests to hold out)"
            }
        }
    }
}

/// A trace or a profile, opened.
#[derive(Debug)]
pub enum Input {
    /// Requests.
    Trace(Trace),
    /// Counts.
    Profile(Profile),
}

impl Input {
    /// Opens a file.
    ///
    /// # Errors
    /// When it is neither or is damaged.
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
            // The bytes are the same, so a second map of them would do; profiles are small beside traces.
            Self::Profile(profile) => {
                let mut builder = ProfileBuilder::like(profile)?;
                builder.add_profile(profile)?;
                Ok(builder.finish()?)
            }
        }
    }
}

/// The counts of half of the requests and those of the others; none where a half has no known route.
fn halves(trace: &Trace) -> Result<Option<(Profile, Profile)>, ProfilerError> {
    let (counted, judged) = split(trace, 0.5)?;
    let (counted, judged) = (Profile::of_trace(&counted)?, Profile::of_trace(&judged)?);
    Ok((counted.total_tokens().min(judged.total_tokens()) > 0).then_some((counted, judged)))
}

/// Summarises a trace or a profile file.
///
/// # Errors
/// When the file is neither or is damaged.
pub fn show(path: &Path) -> Result<Summary, ProfilerError> {
    Input::open(path)?.summary()
}

/// Studies a trace or profile; `held_out` is another one of the same model to judge on.
///
/// # Errors
/// When the two are of different models, or a count overflows.
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
        // A token that occurs once would not have been known: the share of such occurrences is what a new one meets
        // (Good and Turing).
        HeldOutKind::Counts => rows.repeated_share(),
        _ => judged.known_share(&counted),
    };
    Ok(Study { summary, held_out: kind, coverage_of_traffic, layers, next, rows, whole, parts })
}
