//! Lines 3 to 26 of Algorithm 1: assigns experts to groups, hottest first, then tries random swaps.
//!
//! The greedy pass and the swaps increase the same sum, measured in activations of a layer:
//!
//! ```text
//! alpha_e * sum of co[e, e'] over pairs in one group  +  beta_e * sum over e of activations by units of its group
//!   - gamma_e / (2 mean) * sum over groups of load^2
//! ```

use std::cmp::Reverse;

use super::PaperOptions;
use crate::input::Problem;

/// Returns the co-activations of experts e and e', [L, N, N]: `sum over units of w[e] w[e'] / (sum of w)`, the
/// activations of e times the confidence `C_p` that the same unit activates e'. Each row adds up to the expert's load.
pub(super) fn coactivations(problem: &Problem) -> Vec<f64> {
    let experts = problem.experts;
    let mut together = vec![0.0; problem.layers * experts * experts];
    let mut row = Vec::new();
    for unit in 0..problem.units() {
        row.clear();
        row.extend(problem.row(unit));
        for layer in row.chunk_by(|a, b| a.0 / experts == b.0 / experts) {
            let total: f64 = layer.iter().map(|entry| f64::from(entry.1)).sum();
            for &(a, count) in layer {
                let weight = f64::from(count) / total;
                for &(b, other) in layer {
                    together[a * experts + b % experts] += weight * f64::from(other);
                }
            }
        }
    }
    together
}

/// The paper's `expert_place`: returns the group of every column.
pub(super) fn expert_place(
    problem: &Problem,
    together: &[f64],
    label: &[u16],
    groups: usize,
    options: &PaperOptions,
    random: &mut fastrand::Rng,
) -> Vec<u16> {
    let experts = problem.experts;
    let from_units = activations_by_group(problem, label, groups);
    let mut group_of = Vec::with_capacity(problem.layers * experts);
    for layer in 0..problem.layers {
        let columns = problem.columns(layer);
        let load: Vec<f64> = problem.load(layer).iter().map(|&load| load as f64).collect();
        let mut placing = Placing {
            options,
            groups,
            mean: (load.iter().sum::<f64>() / groups as f64).max(1.0),
            load,
            together: &together[columns.start * experts..columns.end * experts],
            from_units: &from_units[columns.start * groups..columns.end * groups],
            members: vec![Vec::new(); groups],
            group_load: vec![0.0; groups],
            beside: vec![0.0; experts * groups],
        };
        placing.place_all();
        placing.fine_tune(random);
        group_of.extend(placing.group_of());
    }
    group_of
}

/// Returns the activations of each column by the group of their unit, [L * N, G].
fn activations_by_group(problem: &Problem, label: &[u16], groups: usize) -> Vec<f64> {
    let mut sums = vec![0.0; problem.column_load.len() * groups];
    for (unit, &group) in label.iter().enumerate() {
        for (column, count) in problem.row(unit) {
            sums[column * groups + usize::from(group)] += f64::from(count);
        }
    }
    sums
}

/// State of the placement of one layer.
struct Placing<'a> {
    options: &'a PaperOptions,
    groups: usize,
    /// [N] activations.
    load: Vec<f64>,
    /// Mean load of a group.
    mean: f64,
    /// [N, N]
    together: &'a [f64],
    /// [N, G]
    from_units: &'a [f64],
    /// Experts of each group.
    members: Vec<Vec<usize>>,
    group_load: Vec<f64>,
    /// [N, G] sum of `together` over an expert and the *other* experts of a group.
    beside: Vec<f64>,
}

impl Placing<'_> {
    /// Lines 4 to 19.
    fn place_all(&mut self) {
        let experts = self.load.len();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| self.load[b].total_cmp(&self.load[a]).then(a.cmp(&b)));
        for expert in order {
            let open = (0..self.groups).filter(|&group| self.members[group].len() < experts / self.groups);
            let best = open.max_by(|&a, &b| {
                self.score(expert, a).total_cmp(&self.score(expert, b)).then(Reverse(a).cmp(&Reverse(b)))
            });
            // The groups hold N experts in total, so one of them has room while experts are left.
            if let Some(group) = best {
                self.members[group].push(expert);
                self.group_load[group] += self.load[expert];
                self.shift(expert, group, 1.0);
            }
        }
    }

    /// Lines 11 to 13.
    fn score(&self, expert: usize, group: usize) -> f64 {
        let own = self.load[expert].max(1.0);
        let with_experts = self.beside[expert * self.groups + group] / own;
        let with_units = self.from_units[expert * self.groups + group] / own;
        let load = self.group_load[group] / self.mean;
        self.options.alpha_e * with_experts + self.options.beta_e * with_units - self.options.gamma_e * load
    }

    /// Lines 20 to 25.
    fn fine_tune(&mut self, random: &mut fastrand::Rng) {
        let each = self.load.len() / self.groups;
        for _ in 0..self.options.swap_steps {
            let (a, b) = (random.usize(0..self.groups), random.usize(0..self.groups));
            let (at_a, at_b) = (random.usize(0..each), random.usize(0..each));
            let (first, second) = (self.members[a][at_a], self.members[b][at_b]);
            if a != b && self.gain([first, second], [a, b]) > 0.0 {
                self.members[a][at_a] = second;
                self.members[b][at_b] = first;
                let moved = self.load[first] - self.load[second];
                self.group_load[a] -= moved;
                self.group_load[b] += moved;
                for (expert, group, sign) in [(first, a, -1.0), (first, b, 1.0), (second, b, -1.0), (second, a, 1.0)] {
                    self.shift(expert, group, sign);
                }
            }
        }
    }

    /// The paper's `aff_gain`: the gain in the sum if `first`, in group `a`, and `second`, in group `b`, exchange
    /// groups.
    fn gain(&self, [first, second]: [usize; 2], [a, b]: [usize; 2]) -> f64 {
        let at = |values: &[f64], expert: usize, group: usize| values[expert * self.groups + group];
        let change = |values: &[f64]| {
            at(values, first, b) - at(values, first, a) + at(values, second, a) - at(values, second, b)
        };
        let pair = self.together[first * self.load.len() + second];
        let (from, to) = (self.group_load[a], self.group_load[b]);
        let moved = self.load[first] - self.load[second];
        // ((from - moved)^2 + (to + moved)^2 - from^2 - to^2) / 2
        let squares = moved * (to - from + moved);
        self.options.alpha_e * (change(&self.beside) - 2.0 * pair) + self.options.beta_e * change(self.from_units)
            - self.options.gamma_e * squares / self.mean
    }

    /// Updates the sums after `expert` joins (sign 1) or leaves (-1) `group`.
    fn shift(&mut self, expert: usize, group: usize, sign: f64) {
        let experts = self.load.len();
        for other in (0..experts).filter(|&other| other != expert) {
            self.beside[other * self.groups + group] += sign * self.together[other * experts + expert];
        }
    }

    fn group_of(&self) -> Vec<u16> {
        let mut group_of = vec![0; self.load.len()];
        for (group, members) in (0u16..).zip(&self.members) {
            members.iter().for_each(|&expert| group_of[expert] = group);
        }
        group_of
    }
}
