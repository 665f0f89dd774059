//! `affinity_paper`: the paper's Algorithm 2 (appendix B), with its mask corrected.
//!
//! A request goes to the rank with the highest score among those without a request in this round; once all have had
//! one, a new round begins. As printed, line 4 assigns minus infinity to the ranks whose mask is still set, i.e. to the
//! available ones; here the ranks already served are excluded, as the text describes.
//!
//! Kept as the baseline: it evens out the number of requests, whatever their length, and the last request of each round
//! has no choice left ([`affinity`](super::affinity) describes our alternative).

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
        // All ranks had equally many requests before this round.
        let round = available().map(|(_, load)| load.assigned_requests).min()?;
        let turn = turn(loads.len(), sequence);
        let better = |a: &usize, b: &usize| score(*a).total_cmp(&score(*b)).then(turn(*b).cmp(&turn(*a)));
        let best = available().map(|(index, _)| index).max_by(better)?;
        let unserved = available().filter(|(_, load)| load.assigned_requests == round).map(|(index, _)| index);
        let index = unserved.max_by(better)?;
        Choice::at(index, request, index != best)
    }
}
