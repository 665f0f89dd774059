//! Features of the solver that exclude each other: one table, of which the README has a copy.

use semmoe_tables::Attention;

use crate::error::SolveError;
use crate::options::{Objective, SolveOptions};

/// Something that options may ask for.
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

/// Two that are refused together.
struct Exclusion {
    one: Feature,
    other: Feature,
    why: &'static str,
}

const fn not(one: Feature, other: Feature, why: &'static str) -> Exclusion {
    Exclusion { one, other, why }
}

use Feature::{
    AttentionTp, GatingGroups, GivenPlacement, Nodes, ObjectiveRanks, Padding, PaperAlgorithm, RedundantSlots,
    WarmStart,
};

/// Every pair that is refused. The first one that applies is reported.
const EXCLUSIONS: &[Exclusion] = &[
    not(RedundantSlots, AttentionTp, "its tokens are labelled with one group, and an expert with replicas has several"),
    not(RedundantSlots, ObjectiveRanks, "its search knows one group of each expert"),
    not(GivenPlacement, RedundantSlots, "its replicas are those that it has"),
    not(GivenPlacement, ObjectiveRanks, "its search moves experts"),
    not(GivenPlacement, WarmStart, "its experts never move"),
    not(GivenPlacement, GatingGroups, "its experts never move"),
    not(Padding, RedundantSlots, "slots either stay empty or hold replicas"),
    not(Padding, ObjectiveRanks, "its search deals out experts alone"),
    not(Padding, GatingGroups, "those stay whole only in groups of equally many experts"),
    not(Nodes, RedundantSlots, "replicas are placed for groups that are all alike"),
    not(Nodes, ObjectiveRanks, "its search knows groups that are all alike"),
    not(GatingGroups, RedundantSlots, "a replica would tear its gating group apart"),
    not(GatingGroups, ObjectiveRanks, "its search knows groups that are all alike"),
    not(WarmStart, RedundantSlots, "moves are counted for experts in one group"),
    not(WarmStart, ObjectiveRanks, "its search does not count moves"),
    not(GivenPlacement, PaperAlgorithm, "it places experts in its own way"),
    not(WarmStart, PaperAlgorithm, "it places experts in its own way"),
    not(Nodes, PaperAlgorithm, "it places experts in its own way"),
    not(GatingGroups, PaperAlgorithm, "it places experts in its own way"),
    not(Padding, PaperAlgorithm, "it places experts in its own way"),
    not(RedundantSlots, PaperAlgorithm, "it places each expert once"),
];

impl Feature {
    const fn name(self) -> &'static str {
        match self {
            GivenPlacement => "a given placement",
            WarmStart => "a warm start",
            Nodes => "a number of nodes",
            GatingGroups => "gating groups",
            Padding => "padding",
            RedundantSlots => "redundant slots",
            AttentionTp => "attention tp",
            ObjectiveRanks => "the objective ranks",
            PaperAlgorithm => "the paper's algorithm",
        }
    }

    fn is_asked_for(self, options: &SolveOptions) -> bool {
        match self {
            GivenPlacement => options.placement.is_some(),
            WarmStart => options.warm_start.is_some(),
            Nodes => options.nodes.is_some(),
            GatingGroups => options.gating_groups > 1,
            Padding => options.pad,
            RedundantSlots => options.redundant > 0,
            AttentionTp => options.attention == Attention::Tp,
            ObjectiveRanks => options.objective == Objective::Ranks,
            PaperAlgorithm => false,
        }
    }
}

/// Refuses what excludes each other. `by_paper`: the paper's algorithm is to solve.
pub(crate) fn check_together(options: &SolveOptions, by_paper: bool) -> Result<(), SolveError> {
    let asked = |feature: Feature| feature.is_asked_for(options) || (by_paper && feature == PaperAlgorithm);
    match EXCLUSIONS.iter().find(|exclusion| asked(exclusion.one) && asked(exclusion.other)) {
        Some(&Exclusion { one, other, why }) => Err(SolveError::Together { one: one.name(), other: other.name(), why }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_this_table() {
        let readme = include_str!("../README.md");
        for Exclusion { one, other, why } in EXCLUSIONS {
            let row = format!("| {} | {} | {why} |", one.name(), other.name());
            assert!(readme.lines().any(|line| line == row), "the README lacks: {row}");
        }
        let start = readme.split_once("| does not go | with | because |").expect("the table's head").1;
        let rows = start.lines().skip(2).take_while(|line| line.starts_with('|')).count();
        assert_eq!(rows, EXCLUSIONS.len(), "a row without an exclusion");
    }

    #[test]
    fn no_pair_stands_twice() {
        for (at, a) in EXCLUSIONS.iter().enumerate() {
            let same = |b: &&Exclusion| (a.one, a.other) == (b.one, b.other) || (a.one, a.other) == (b.other, b.one);
            assert_eq!(EXCLUSIONS[at + 1..].iter().find(same).map(|b| b.why), None, "{:?} {:?}", a.one, a.other);
        }
    }
}
