//! The report of a solve on held-out requests.

use semmoe_tables::{Profile, Tables, Trace};
use serde::Serialize;

use crate::input::{EvalOptions, NoSplit, ProfilePart, SolveError, SolveOptions, Split};
use crate::judge::{EvalInput, Evaluation, evaluate_solved};
use crate::solve::Solved;
use crate::tables::{LayerTransitions, PriorFit};

/// The requests held out, and how the tables perform on them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HeldOut {
    /// One sentence: the requests held out, or why there are none.
    pub note: String,
    /// The share of requests to hold out, as requested.
    pub share: f64,
    /// Requests solved on; this and the two counts below are zero if nothing was held out.
    pub requests_solved: u64,
    /// Requests used to choose the prior and A.
    pub requests_choosing: u64,
    /// Requests that the figures below were measured on.
    pub requests_judged: u64,
    /// Whether the profile still contains the counts of the last two.
    pub profile: Option<ProfilePart>,
    /// The final tables, evaluated on the held-out requests.
    pub figures: Option<Evaluation>,
    /// The strength of T's prior; `None` with replicas, where a token's shares do not add up to one.
    pub prior: Option<PriorFit>,
    /// Attention tp: what A adds in each layer.
    pub transitions: Vec<LayerTransitions>,
}

impl HeldOut {
    fn judge(&mut self, split: &Split, tables: &Tables, options: &SolveOptions) -> Result<(), SolveError> {
        let [solved, choosing, judged] = [&split.solve, &split.choose, &split.judge].map(|part| part.requests() as u64);
        (self.requests_solved, self.requests_choosing, self.requests_judged) = (solved, choosing, judged);
        let (profile, what) = match split.profile {
            Some(_) => (ProfilePart::TakenOut, "their counts were taken out of the profile"),
            None => (ProfilePart::NotPart, "the profile does not contain their counts, so nothing was taken out of it"),
        };
        self.profile = Some(profile);
        self.note = format!(
            "of {} requests {} were held out, {choosing} to choose with and {judged} to judge on; {what}",
            solved + choosing + judged,
            choosing + judged
        );
        let eval = EvalOptions { token_margin: options.token_margin, ..EvalOptions::default() };
        let judge = EvalInput::Trace(&split.judge);
        self.figures = Some(evaluate_solved(tables, judge, &eval, Some(&split.solve))?);
        Ok(())
    }
}

/// Runs `solve` on what is left after holding out the requests that the options demand, and evaluates its tables on
/// them. `solve` gets the split, if there is one, to choose with; its tables are the ones evaluated.
pub(crate) fn with_hold_out(
    profile: &Profile,
    trace: Option<&Trace>,
    options: &SolveOptions,
    solve: impl FnOnce(&Profile, Option<&Trace>, Option<&Split>) -> Result<Solved, SolveError>,
) -> Result<Solved, SolveError> {
    let mut solved = match Split::new(profile, trace, options.hold_out) {
        Ok(split) => {
            let mut solved = solve(split.profile.as_ref().unwrap_or(profile), Some(&split.solve), Some(&split))?;
            solved.report.held_out.judge(&split, &solved.tables, options)?;
            if let Some(judged) = &solved.report.held_out.figures {
                solved.tables = solved.tables.with_promised_lar(judged.lar)?;
            }
            solved
        }
        Err(NoSplit::Format(error)) => return Err(error.into()),
        Err(reason) => {
            let mut solved = solve(profile, trace, None)?;
            solved.report.held_out.note = reason.to_string();
            solved
        }
    };
    solved.report.held_out.share = options.hold_out;
    Ok(solved)
}
