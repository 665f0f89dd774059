//! `affinity_paper`: the paper's Algorithm 2 (appendix B), with its mask corrected.
//!
//! A request goes to the rank with the highest score among those without a request in this round; once every rank has
//! received one, a new round begins. As printed, line 4 of the algorithm assigns minus infinity to the ranks whose mask
//! is still set, i.e. to the available ones; here the ranks that already received a request are excluded, as the
//! paper's text describes.
//!
//! Kept as a baseline: it balances request counts regardless of length, and leaves no choice for the last request of
//! each round ([`affinity`](super::affinity) is our alternative).

use crate::policy::{Choice, Needs, Policy, RankLoad, Request, available, turn};

/// The policy; see the module documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AffinityPaper;

impl Policy for AffinityPaper {
    fn name(&self) -> &'static str {
        "affinity_paper"
    }

    fn needs(&self) -> Needs {
        Needs { share: true, ..Needs::default() }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let share = request.share.filter(|share| share.len() == loads.len());
        let score = |index: usize| share.map_or(0.0, |share| if share[index].is_finite() { share[index] } else { 0.0 });
        let available = || available(loads);
        // Before this round, all ranks had the same number of requests.
        let round = available().map(|(_, load)| load.assigned_requests).min()?;
        let turn = turn(loads.len(), sequence);
        let better = |a: &usize, b: &usize| score(*a).total_cmp(&score(*b)).then(turn(*b).cmp(&turn(*a)));
        let best = available().map(|(index, _)| index).max_by(better)?;
        let unserved = available().filter(|(_, load)| load.assigned_requests == round).map(|(index, _)| index);
        let index = unserved.max_by(better)?;
        Choice::at(index, request, index != best)
    }
}
