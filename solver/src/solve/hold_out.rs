//! A solve's report on held-out requests.

use semmoe_tables::{Profile, Tables, Trace};
use serde::Serialize;

use crate::input::{EvalOptions, NoSplit, ProfilePart, SolveError, SolveOptions, Split};
use crate::judge::{EvalInput, Evaluation, evaluate_solved};
use crate::solve::Solved;
use crate::tables::{LayerTransitions, PriorFit};

/// The held-out requests, and the tables' results on them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HeldOut {
    /// One sentence with the numbers of requests held out, or the reason why there are none.
    pub note: String,
    /// The requested fraction of requests to hold out.
    pub share: f64,
    /// Number of requests solved on; this and the two counts below are zero if nothing was held out.
    pub requests_solved: u64,
    /// Number of requests used to choose the prior and A.
    pub requests_choosing: u64,
    /// Number of requests that the figures below were measured on.
    pub requests_judged: u64,
    /// Whether the held-out requests' counts were subtracted from the profile; `None` if nothing was held out.
    pub profile: Option<ProfilePart>,
    /// The final tables, evaluated on the held-out requests.
    pub figures: Option<Evaluation>,
    /// The strength of T's prior; `None` with replicas, because a token's shares then do not add up to one.
    pub prior: Option<PriorFit>,
    /// Attention tp: the effect of A in each layer.
    pub transitions: Vec<LayerTransitions>,
}

impl HeldOut {
    fn judge(&mut self, split: &Split, tables: &Tables, options: &SolveOptions) -> Result<(), SolveError> {
        let [solved, choosing, judged] = [&split.solve, &split.choose, &split.judge].map(|part| part.requests() as u64);
        (self.requests_solved, self.requests_choosing, self.requests_judged) = (solved, choosing, judged);
        let (profile, what) = match split.profile {
            Some(_) => (ProfilePart::TakenOut, "their counts were subtracted from the profile"),
            None => (ProfilePart::NotPart, "the profile does not contain their counts, so nothing was subtracted"),
        };
        self.profile = Some(profile);
        self.note = format!(
            "{1} of {0} requests were held out, {choosing} to choose with and {judged} to evaluate on; {what}",
            solved + choosing + judged,
            choosing + judged
        );
        let eval = EvalOptions { token_margin: options.token_margin, ..EvalOptions::default() };
        let judge = EvalInput::Trace(&split.judge);
        self.figures = Some(evaluate_solved(tables, judge, &eval, Some(&split.solve))?);
        Ok(())
    }
}

/// Holds out the requests that the options specify, runs `solve` on the rest, and evaluates the resulting tables on the
/// held-out requests. `solve` also receives the split, if there is one, in order to make its choices.
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
