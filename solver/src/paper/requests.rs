//! Lines 28 to 42 of Algorithm 1: assigns units to groups, longest first, each to the best group that is not full.

use std::cmp::Reverse;

use super::{PaperCap, PaperOptions};
use crate::input::Problem;

/// The paper's `request_schedule`: returns the group of every unit.
pub(super) fn request_schedule(problem: &Problem, group_of: &[u16], groups: usize, options: &PaperOptions) -> Vec<u16> {
    let local = problem.local_counts(group_of, groups);
    let mut order: Vec<usize> = (0..problem.units()).collect();
    order.sort_by_key(|&unit| (Reverse(problem.mass[unit]), unit));
    let size = |unit: usize| match options.cap {
        PaperCap::Units => 1,
        PaperCap::Tokens => problem.mass[unit],
    };
    let total: u64 = (0..problem.units()).map(size).sum();
    let mut taken = vec![0u64; groups];
    let mut sums = Sums::new(problem, groups);
    let mut label = vec![0; problem.units()];
    for unit in order {
        let row = &local[unit * groups..(unit + 1) * groups];
        let activations = row.iter().sum::<u64>().max(1) as f64;
        let beside = sums.products(problem, unit);
        let score = |group: usize| {
            options.alpha_r * sums.cosine(group, beside[group], activations_norm(problem, unit))
                + options.beta_r * row[group] as f64 / activations
        };
        // A group is full once it has its even share, so some group has room while units are left.
        let open = (0..groups).filter(|&group| u128::from(taken[group]) * (groups as u128) < u128::from(total));
        let best = open.max_by(|&a, &b| score(a).total_cmp(&score(b)).then(b.cmp(&a)));
        let group = best.unwrap_or(0);
        taken[group] += size(unit);
        label[unit] = group as u16;
        sums.add(problem, unit, group, beside[group]);
    }
    label
}

fn activations_norm(problem: &Problem, unit: usize) -> f64 {
    problem.row(unit).map(|(_, count)| f64::from(count) * f64::from(count)).sum::<f64>().sqrt()
}

/// Sums of the activations of the units assigned to each group so far.
struct Sums {
    groups: usize,
    /// [L * N, G]
    sum: Vec<f64>,
    /// [G] squared length of each group's sum.
    squared: Vec<f64>,
}

impl Sums {
    fn new(problem: &Problem, groups: usize) -> Self {
        Sums { groups, sum: vec![0.0; problem.column_load.len() * groups], squared: vec![0.0; groups] }
    }

    /// Returns the inner product of a unit with the sum of each group.
    fn products(&self, problem: &Problem, unit: usize) -> Vec<f64> {
        let mut products = vec![0.0; self.groups];
        for (column, count) in problem.row(unit) {
            let sums = &self.sum[column * self.groups..(column + 1) * self.groups];
            products.iter_mut().zip(sums).for_each(|(product, sum)| *product += f64::from(count) * sum);
        }
        products
    }

    fn cosine(&self, group: usize, product: f64, norm: f64) -> f64 {
        let lengths = self.squared[group].sqrt() * norm;
        if lengths > 0.0 { product / lengths } else { 0.0 }
    }

    fn add(&mut self, problem: &Problem, unit: usize, group: usize, product: f64) {
        let norm = activations_norm(problem, unit);
        self.squared[group] += 2.0 * product + norm * norm;
        for (column, count) in problem.row(unit) {
            self.sum[column * self.groups + group] += f64::from(count);
        }
    }
}
