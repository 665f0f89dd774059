//! Mutually exclusive features of the solver, in a single table that the README repeats.

use semmoe_tables::Attention;

use crate::input::error::SolveError;
use crate::input::options::{Objective, SolveOptions};

/// A feature that the options can enable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Feature {
    GivenPlacement,
    WarmStart,
    Nodes,
    GatingGroups,
    Padding,
    RedundantSlots,
    AttentionTp,
    ObjectiveRanks,
    PaperAlgorithm,
}

use Feature::{
    AttentionTp, GatingGroups, GivenPlacement, Nodes, ObjectiveRanks, Padding, PaperAlgorithm, RedundantSlots,
    WarmStart,
};

/// All pairs of features that exclude each other, with the reason. The first pair that applies is reported.
const EXCLUSIONS: &[(Feature, Feature, &str)] = &[
    (RedundantSlots, AttentionTp, "it labels each token with one group, but a replicated expert has several"),
    (RedundantSlots, ObjectiveRanks, "its search assumes a single group per expert"),
    (GivenPlacement, RedundantSlots, "its replicas are fixed"),
    (GivenPlacement, ObjectiveRanks, "its search moves experts"),
    (GivenPlacement, WarmStart, "its experts never move"),
    (GivenPlacement, GatingGroups, "its experts never move"),
    (Padding, RedundantSlots, "spare slots can be left empty or filled with replicas, but not both"),
    (Padding, ObjectiveRanks, "its search cannot handle empty slots"),
    (Padding, GatingGroups, "they stay whole only if all groups have the same number of experts"),
    (Nodes, RedundantSlots, "replica placement treats all groups alike"),
    (Nodes, ObjectiveRanks, "its search treats all groups alike"),
    (GatingGroups, RedundantSlots, "a replica would split its gating group"),
    (GatingGroups, ObjectiveRanks, "its search treats all groups alike"),
    (WarmStart, RedundantSlots, "the cost of a move is defined only for experts without replicas"),
    (WarmStart, ObjectiveRanks, "its search ignores the cost of moves"),
    (GivenPlacement, PaperAlgorithm, "it computes its own expert placement"),
    (WarmStart, PaperAlgorithm, "it computes its own expert placement"),
    (Nodes, PaperAlgorithm, "it computes its own expert placement"),
    (GatingGroups, PaperAlgorithm, "it computes its own expert placement"),
    (Padding, PaperAlgorithm, "it computes its own expert placement"),
    (RedundantSlots, PaperAlgorithm, "it does not replicate experts"),
];

impl Feature {
    /// Returns the feature's name and whether it is enabled. `by_paper`: whether the paper's algorithm is used.
    fn named(self, options: &SolveOptions, by_paper: bool) -> (&'static str, bool) {
        match self {
            GivenPlacement => ("a given placement", options.placement.is_some()),
            WarmStart => ("a warm start", options.warm_start.is_some()),
            Nodes => ("a number of nodes", options.nodes.is_some()),
            GatingGroups => ("gating groups", options.gating_groups > 1),
            Padding => ("padding", options.pad),
            RedundantSlots => ("redundant slots", options.redundant > 0),
            AttentionTp => ("attention tp", options.attention == Attention::Tp),
            ObjectiveRanks => ("the objective ranks", options.objective == Objective::Ranks),
            PaperAlgorithm => ("the paper's algorithm", by_paper),
        }
    }
}

/// Rejects options that exclude each other. `by_paper`: whether the paper's algorithm is used.
pub(crate) fn check_together(options: &SolveOptions, by_paper: bool) -> Result<(), SolveError> {
    for &(one, other, why) in EXCLUSIONS {
        if let ((one, true), (other, true)) = (one.named(options, by_paper), other.named(options, by_paper)) {
            return Err(SolveError::Together { one, other, why });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_this_table() {
        let readme = include_str!("../../README.md");
        let options = crate::prior::test_options();
        for (one, other, why) in EXCLUSIONS {
            let [one, other] = [one, other].map(|feature| feature.named(&options, false).0);
            let row = format!("| {one} | {other} | {why} |");
            assert!(readme.lines().any(|line| line == row), "the README lacks: {row}");
        }
        let start = readme.split_once("| feature | cannot be combined with | because |").expect("the table's head").1;
        let rows = start.lines().skip(2).take_while(|line| line.starts_with('|')).count();
        assert_eq!(rows, EXCLUSIONS.len(), "a row without an exclusion");
    }

    #[test]
    fn no_pair_stands_twice() {
        for (at, a) in EXCLUSIONS.iter().enumerate() {
            let same = |b: &&(Feature, Feature, &str)| (a.0, a.1) == (b.0, b.1) || (a.0, a.1) == (b.1, b.0);
            assert_eq!(EXCLUSIONS[at + 1..].iter().find(same).map(|b| b.2), None, "{:?} {:?}", a.0, a.1);
        }
    }
}
