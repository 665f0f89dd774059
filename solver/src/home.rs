//! Where experts are already: what it costs to move them, and which labels of groups move the fewest.

use std::sync::Arc;

use semmoe_tables::{LayerIdx, Profile, Tables};

use crate::alternate::Clustering;
use crate::error::SolveError;
use crate::options::{SolveOptions, within};
use crate::problem::Problem;
use crate::transport::Transport;
use crate::unit_step::PROFIT_ONE;

/// Tables that a solve starts from, because experts that stay need not be moved.
#[derive(Clone, Debug)]
pub struct WarmStart {
    /// Tables of the same model and number of groups, each expert in one group; of their contents only E is used.
    pub tables: Arc<Tables>,
    /// C: what must be gained for an expert that leaves its group, in local activations over those of its layer's average
    /// expert. With C = 0.05 an expert moves if five of a hundred activations of an average expert become local by it.
    pub migration_cost: f64,
}

impl WarmStart {
    /// Small gains, and the differences between one local optimum and another, move nothing.
    pub const DEFAULT_COST: f64 = 0.05;

    /// Checks that the tables are about the profile's model and the same groups.
    pub(crate) fn check(&self, profile: &Profile, options: &SolveOptions) -> Result<(), SolveError> {
        within("migration_cost", self.migration_cost, 0.0, 1e9, "a number from 0 to 1e9")?;
        self.tables.model().check_compatible(profile.model())?;
        if self.tables.groups() != options.groups {
            let (found, expected) = (format!("{} groups", self.tables.groups()), options.groups.to_string());
            return Err(SolveError::OtherShape { what: "the warm start", found, expected });
        }
        if self.tables.physical_to_logical().is_some() {
            let why = "an expert's move is one from one group to another";
            return Err(SolveError::Together { one: "a warm start", other: "tables with replicas", why });
        }
        Ok(())
    }

    /// The homes of each problem's experts.
    pub(crate) fn homes(&self, problems: &[Problem]) -> Vec<Home> {
        let mut layers = (0..self.tables.model().layers()).map(|layer| LayerIdx::new(layer as u16));
        let home = |problem: &Problem| {
            let layers = layers.by_ref().take(problem.layers);
            let group_of = layers.flat_map(|layer| self.tables.placement().layer(layer).iter().copied()).collect();
            Home::new(problem, group_of, self.migration_cost)
        };
        problems.iter().map(home).collect()
    }
}

/// The group that each column of a problem is in, and what leaving it costs.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    experts: usize,
    /// [L * N]
    group_of: Vec<u16>,
    /// [L] activations that a moved expert must gain: C times the layer's activations over N.
    cost: Vec<f64>,
    /// Activations of all layers: what no move can gain more than.
    most: f64,
}

impl Home {
    pub(crate) fn new(problem: &Problem, group_of: Vec<u16>, migration_cost: f64) -> Self {
        let layers = problem.column_load.chunks_exact(problem.experts);
        let cost = layers.map(|load| migration_cost * load.iter().sum::<u64>() as f64 / problem.experts as f64);
        let most = problem.total_activations() as f64;
        Home { experts: problem.experts, group_of, cost: cost.map(|cost| cost.min(most)).collect(), most }
    }

    /// The group of each column.
    pub(crate) fn group_of(&self) -> &[u16] {
        &self.group_of
    }

    /// Experts of each layer that are elsewhere: [L].
    pub(crate) fn moved(&self, group_of: &[u16]) -> Vec<u64> {
        let layers = self.group_of.chunks_exact(self.experts).zip(group_of.chunks_exact(self.experts));
        layers.map(|(home, now)| home.iter().zip(now).filter(|(home, now)| home != now).count() as u64).collect()
    }

    /// What a placement costs, as a value of plans: fixed-point activations.
    pub(crate) fn penalty(&self, group_of: &[u16]) -> i128 {
        let each = |(moved, cost): (u64, &f64)| i128::from(moved) * (cost * PROFIT_ONE).round() as i128;
        self.moved(group_of).into_iter().zip(&self.cost).map(each).sum()
    }

    /// What it costs, in activations, that a column goes from one group to another; negative on its way home.
    pub(crate) fn change(&self, column: usize, from: usize, to: usize) -> f64 {
        let home = usize::from(self.group_of[column]);
        self.cost[column / self.experts] * f64::from(i8::from(to != home) - i8::from(from != home))
    }

    /// Takes the cost of leaving home off the gains [N, G] of a layer. It is never nothing, so that of two equal groups the
    /// old one is kept.
    pub(crate) fn charge(&self, layer: usize, gain: &mut [i64], (groups, fraction_bits): (usize, u32)) {
        let one = (1u64 << fraction_bits) as f64;
        let cost = (self.cost[layer].min(self.most) * one).round().max(1.0) as i64;
        let homes = &self.group_of[layer * self.experts..(layer + 1) * self.experts];
        for (row, &home) in gain.chunks_exact_mut(groups).zip(homes) {
            let others = row.iter_mut().enumerate().filter(|(group, _)| *group != usize::from(home));
            others.for_each(|(_, gain)| *gain -= cost);
        }
    }

    /// The same clustering under those labels of its groups that leave most experts at home: an exact assignment.
    pub(crate) fn relabelled(&self, found: Clustering, groups: usize) -> Clustering {
        let mut stays = vec![0i64; groups * groups];
        for (&now, &home) in found.group_of.iter().zip(&self.group_of) {
            stays[usize::from(now) * groups + usize::from(home)] += 1;
        }
        let ones = vec![1; groups];
        let label = Transport { mass: &ones, profit: &stays, capacity: &ones }.solve(None).label;
        self.priced(found.renamed(&label))
    }

    /// With the penalty that belongs to it.
    pub(crate) fn priced(&self, found: Clustering) -> Clustering {
        Clustering { penalty: self.penalty(&found.group_of), ..found }
    }
}

#[cfg(test)]
#[path = "home_tests.rs"]
mod tests;
