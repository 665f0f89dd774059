//! Features of the solver that exclude each other, in one table that the README repeats.

use semmoe_tables::Attention;

use crate::input::error::SolveError;
use crate::input::options::{Objective, SolveOptions};

/// A feature that options can enable.
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

/// Every excluded pair, and why. The first one that applies is reported.
const EXCLUSIONS: &[(Feature, Feature, &str)] = &[
    (RedundantSlots, AttentionTp, "its tokens are labelled with one group, and an expert with replicas has several"),
    (RedundantSlots, ObjectiveRanks, "its search knows one group of each expert"),
    (GivenPlacement, RedundantSlots, "its replicas are fixed"),
    (GivenPlacement, ObjectiveRanks, "its search moves experts"),
    (GivenPlacement, WarmStart, "its experts never move"),
    (GivenPlacement, GatingGroups, "its experts never move"),
    (Padding, RedundantSlots, "slots either stay empty or hold replicas"),
    (Padding, ObjectiveRanks, "its search deals out experts alone"),
    (Padding, GatingGroups, "those stay whole only in groups of equally many experts"),
    (Nodes, RedundantSlots, "replicas are placed for groups that are all alike"),
    (Nodes, ObjectiveRanks, "its search knows groups that are all alike"),
    (GatingGroups, RedundantSlots, "a replica would tear its gating group apart"),
    (GatingGroups, ObjectiveRanks, "its search knows groups that are all alike"),
    (WarmStart, RedundantSlots, "moves are counted for experts in one group"),
    (WarmStart, ObjectiveRanks, "its search does not count moves"),
    (GivenPlacement, PaperAlgorithm, "it places experts in its own way"),
    (WarmStart, PaperAlgorithm, "it places experts in its own way"),
    (Nodes, PaperAlgorithm, "it places experts in its own way"),
    (GatingGroups, PaperAlgorithm, "it places experts in its own way"),
    (Padding, PaperAlgorithm, "it places experts in its own way"),
    (RedundantSlots, PaperAlgorithm, "it places each expert once"),
];

impl Feature {
    /// The feature's name, and whether it is enabled. `by_paper`: the paper's algorithm is used.
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

/// Rejects options that exclude each other. `by_paper`: the paper's algorithm is used.
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
