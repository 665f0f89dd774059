//! Holds out some of a trace's requests from a solve, and subtracts their counts from the profile.

use semmoe_tables::{FormatError, LayerIdx, Profile, ProfileBuilder, PromptSplit, Trace, TraceBuilder, TraceRequest};
use serde::Serialize;

/// Minimum requests per part.
const FEWEST: usize = 4;

/// Whether the held-out requests' counts had to be subtracted from the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProfilePart {
    /// The counts were subtracted.
    TakenOut,
    /// The profile does not contain the counts, so nothing was subtracted.
    NotPart,
}

/// A trace split into three parts by prompt: equal prompts are always in the same part.
#[derive(Debug)]
pub(crate) struct Split {
    /// The requests to solve on.
    pub(crate) solve: Trace,
    /// The requests used to choose the prior's strength and the layers of A.
    pub(crate) choose: Trace,
    /// The requests to evaluate the result on.
    pub(crate) judge: Trace,
    /// Counts of the `choose` and `judge` requests, in the profile's phase.
    pub(crate) choose_counts: Profile,
    pub(crate) judge_counts: Profile,
    /// The profile without the counts of `choose` and `judge`; `None` if it never contained them.
    pub(crate) profile: Option<Profile>,
}

/// Reasons for not holding out any requests.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoSplit {
    #[error("no requests were held out")]
    NotRequested,
    #[error("nothing was held out: a profile without a trace has no requests")]
    NoTrace,
    #[error(
        "nothing was held out: the {} requests with a known route would be split into {solved} to solve on, {chosen} to choose with \
         and {judged} to evaluate on, expected at least {FEWEST} each",
        solved + chosen + judged
    )]
    TooFew { solved: usize, chosen: usize, judged: usize },
    #[error("nothing was held out: a layer would have no counts left")]
    SilentLayer,
    /// The counts cannot be split.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl Split {
    /// Holds out about a fraction `share` of the requests.
    pub(crate) fn new(profile: &Profile, trace: Option<&Trace>, share: f64) -> Result<Self, NoSplit> {
        if share <= 0.0 {
            return Err(NoSplit::NotRequested);
        }
        let trace = trace.ok_or(NoSplit::NoTrace)?;
        let parts = parts(trace, share);
        // Requests without a known route carry no evidence.
        let routed: Vec<bool> = trace.iter().map(has_route).collect();
        let [solved, chosen, judged] = [Part::Solve, Part::Choose, Part::Judge]
            .map(|part| parts.iter().zip(&routed).filter(|(of, routed)| **of == part && **routed).count());
        if solved.min(chosen).min(judged) < FEWEST {
            return Err(NoSplit::TooFew { solved, chosen, judged });
        }
        let of = |part: Part| TraceBuilder::select(trace, |number, _| parts[number] == part);
        let (choose, judge) = (of(Part::Choose)?, of(Part::Judge)?);
        let (choose_counts, judge_counts) = (counts(profile, &choose)?, counts(profile, &judge)?);
        let mut both = ProfileBuilder::like(profile)?;
        both.add_profile(&choose_counts)?;
        both.add_profile(&judge_counts)?;
        let rest = profile.without(&both.finish()?)?;
        if rest.as_ref().is_some_and(|rest| silenced(profile, rest)) {
            return Err(NoSplit::SilentLayer);
        }
        Ok(Split { solve: of(Part::Solve)?, choose, judge, choose_counts, judge_counts, profile: rest })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Solve,
    Choose,
    Judge,
}

/// Assigns every request to a part.
fn parts(trace: &Trace, share: f64) -> Vec<Part> {
    let part = |request: TraceRequest<'_>| match PromptSplit::SOLVE.position(request) {
        position if position >= share => Part::Solve,
        position if position >= share / 2.0 => Part::Judge,
        _ => Part::Choose,
    };
    trace.iter().map(part).collect()
}

/// Whether a request has any known route.
pub(crate) fn has_route(request: TraceRequest<'_>) -> bool {
    (0..request.token_ids().len()).any(|position| request.is_routed(position))
}

fn counts(profile: &Profile, trace: &Trace) -> Result<Profile, FormatError> {
    let mut builder = ProfileBuilder::like(profile)?;
    builder.add_trace(trace)?;
    builder.finish()
}

/// Whether a layer lost all its counts.
fn silenced(before: &Profile, after: &Profile) -> bool {
    let mut layers = LayerIdx::all(before.model().layers());
    layers.any(|layer| before.entries(layer) > 0 && after.entries(layer) == 0)
}

#[cfg(test)]
mod tests;
