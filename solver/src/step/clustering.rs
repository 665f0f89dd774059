//! A start's task, its limits, and its result.

use crate::input::{Margins, Problem, SolveOptions};
use crate::step::expert_step::layer_cap;
use crate::step::held::Held;
use crate::step::load_limit::{excess, group_loads};
use crate::step::placement::CurrentPlacement;
use crate::step::topology::Topology;
use crate::step::transport::Plan;
use crate::step::unit_step::PROFIT_ONE;

/// The alternation ends when a step gains less than this fraction of all activations.
const MIN_GAIN: f64 = 1e-7;

/// Limits of a start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) groups: usize,
    /// Maximum ratio of a group's activations to the layer's mean.
    pub(crate) max_over_mean: f64,
    /// Maximum rounds of the unit step and the expert step.
    pub(crate) iterations: u32,
    /// Maximum swap passes.
    pub(crate) swap_passes: u32,
    /// Experts per group and layer with replicas; `None` without replicas.
    pub(crate) slots: Option<usize>,
    /// The division of the groups into nodes.
    pub(crate) topology: Topology,
    /// Margins for tokens and sequences, if the units are requests and there are no replicas.
    pub(crate) sequences: Option<Margins>,
}

impl Limits {
    /// Reads the limits from the options.
    pub(crate) fn new(options: &SolveOptions, topology: Topology, slots: Option<usize>) -> Self {
        let SolveOptions { iterations, swap_passes, .. } = *options;
        let (groups, max_over_mean) = (usize::from(options.groups), options.expert_load_limit);
        Limits { groups, max_over_mean, iterations, swap_passes, slots, topology, sequences: None }
    }
}

/// Sequence prices, in the unit of a plan's value.
#[derive(Clone, Debug)]
pub(crate) struct SequencePrice {
    /// [G]; empty = none.
    pub(crate) price: Vec<i64>,
    /// Total price of the groups' sequence capacity.
    pub(crate) of_room: i128,
}

pub(crate) static FREE: SequencePrice = SequencePrice { price: Vec::new(), of_room: 0 };

/// A placement, the exact unit plan for it, and their value.
#[derive(Clone, Debug)]
pub(crate) struct Clustering {
    /// [L * N] group of each column.
    pub(crate) group_of: Vec<u16>,
    pub(crate) plan: Plan,
    /// Activations by which groups exceed their load cap, over all layers; zero = limit met.
    pub(crate) load_excess: u64,
    /// Number of unit steps run.
    pub(crate) iterations: u32,
    /// With replicas, all groups of each column; `group_of` is the first of them.
    pub(crate) replicas: Option<Held>,
    /// Cost of the experts that left their current groups in a warm-started solve, in the unit of the plan's value.
    pub(crate) penalty: i128,
    /// The sequence prices that the plan was made with.
    pub(crate) sequences: SequencePrice,
}

impl Clustering {
    /// Creates a clustering without replicas and without a cost of moves.
    pub(crate) fn whole(problem: &Problem, group_of: Vec<u16>, plan: Plan, limits: Limits, iterations: u32) -> Self {
        let excess = (0..problem.layers).map(|layer| {
            let load = problem.load(layer);
            let cap = layer_cap(load, limits.groups, limits.max_over_mean);
            excess(&group_loads(&group_of[problem.columns(layer)], load, limits.groups), cap)
        });
        let load_excess = excess.sum();
        Clustering { group_of, plan, load_excess, iterations, replicas: None, penalty: 0, sequences: FREE.clone() }
    }

    /// Returns the local activations (with nodes, their value); with sequence prices, those of the best division.
    pub(crate) fn local(&self) -> i128 {
        self.plan.primal + self.sequences.of_room
    }

    /// Returns the local activations minus the cost of moves.
    fn worth(&self) -> i128 {
        self.local() - self.penalty
    }

    /// Whether this result is better than `other`: less excess first, then more local activations.
    pub(crate) fn beats(&self, other: &Clustering) -> bool {
        (other.load_excess, self.worth()) > (self.load_excess, other.worth())
    }

    /// Whether the gain over `other` is too small to continue.
    pub(crate) fn hardly_beats(&self, other: &Clustering, problem: &Problem) -> bool {
        let gain = local_rate(self.worth() - other.worth(), problem);
        gain < MIN_GAIN && self.load_excess == other.load_excess
    }

    /// Returns this clustering with group g relabelled as `label[g]`.
    pub(crate) fn renamed(self, label: &[u16]) -> Self {
        let rename = |group: &mut u16| *group = label[usize::from(*group)];
        let Clustering { mut group_of, mut plan, mut sequences, .. } = self;
        group_of.iter_mut().chain(&mut plan.label).for_each(rename);
        for split in &mut plan.splits {
            split.parts.iter_mut().for_each(|part| rename(&mut part.0));
            split.parts.sort_unstable();
        }
        let renamed = |prices: &mut Vec<i64>| {
            let before = prices.clone();
            before.iter().zip(label).for_each(|(&price, &group)| prices[usize::from(group)] = price);
        };
        renamed(&mut plan.price);
        renamed(&mut sequences.price);
        Clustering { group_of, plan, sequences, ..self }
    }
}

/// Returns a plan's value as a fraction of all activations: the local rate if only activations on a unit's own group
/// have a value.
pub(crate) fn local_rate(value: i128, problem: &Problem) -> f64 {
    value as f64 / PROFIT_ONE / problem.total_activations() as f64
}

/// A problem to cluster.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) problem: &'a Problem,
    /// [G] maximum tokens per group.
    pub(crate) capacity: &'a [u64],
    pub(crate) limits: Limits,
    /// The current placement, if moves have a cost.
    pub(crate) placement: Option<&'a CurrentPlacement>,
    pub(crate) sequences: &'a SequencePrice,
}
