//! Bounds against brute force, planted clusters and each other.

use ndarray::{Array1, Array2};
use proptest::prelude::*;

use super::frame::Frame;
use super::units::Units;
use super::{LayerBounds, part_bounds, sdp};
use crate::algebra::eigen::Eigen;
use crate::algebra::matrix::{mirror, norm, times};
use crate::algebra::rows::{dot, slice};
use crate::step::transport::Transport;
use crate::step::unit_step::{mass_capacity, to_profit};

/// Rows of (mass, counts), in layers of `experts`.
#[derive(Clone, Debug)]
struct Instance {
    groups: usize,
    experts: usize,
    rows: Vec<(u64, Vec<u32>)>,
    margin: f64,
}

impl Instance {
    fn units(&self) -> Units {
        let mut units = Units::empty(self.experts, self.columns());
        for (mass, counts) in &self.rows {
            let entries = (0..).zip(counts).filter(|(_, count)| **count > 0);
            units.push(*mass as f64, entries.map(|(column, &count)| (column, f64::from(count))));
        }
        units
    }

    fn columns(&self) -> usize {
        self.rows[0].1.len()
    }

    fn mass(&self) -> Vec<u64> {
        self.rows.iter().map(|row| row.0).collect()
    }

    fn capacity(&self) -> Vec<u64> {
        mass_capacity(self.mass().iter().sum(), self.groups, self.margin)
    }

    fn bounds(&self, iterations: u32) -> LayerBounds {
        part_bounds(&self.units(), self.groups, self.capacity()[0] as f64, iterations)
    }

    /// The best rate over all balanced placements, with fractional units assigned optimally.
    fn optimum(&self) -> f64 {
        let layer = balanced(self.experts, self.groups);
        let layers = self.columns() / self.experts;
        let mut best: f64 = 0.0;
        // Groups are interchangeable, so the first layer's first expert can be fixed.
        let first: Vec<_> = layer.iter().filter(|labels| labels[0] == 0).collect();
        for at in 0..first.len() * layer.len().pow(layers as u32 - 1) {
            let mut group_of = first[at % first.len()].clone();
            let mut rest = at / first.len();
            for _ in 1..layers {
                group_of.extend(&layer[rest % layer.len()]);
                rest /= layer.len();
            }
            best = best.max(self.best_assignment(&group_of));
        }
        let total: u64 = self.rows.iter().flat_map(|row| &row.1).map(|&count| u64::from(count)).sum();
        best / total as f64
    }

    fn best_assignment(&self, group_of: &[u16]) -> f64 {
        let mut profit = Vec::new();
        for (mass, counts) in &self.rows {
            let mut local = vec![0.0; self.groups];
            group_of.iter().zip(counts).for_each(|(&group, &count)| local[usize::from(group)] += f64::from(count));
            profit.extend(local.iter().map(|local| to_profit(local / *mass as f64)));
        }
        let (mass, capacity) = (self.mass(), self.capacity());
        let plan = Transport { mass: &mass, profit: &profit, capacity: &capacity }.solve(None);
        // The plan's value, free of the rounding of profits; units split by share count by share.
        let value = |unit: usize, group: u16| to_local(&self.rows[unit].1, group_of, group);
        let mut splits = plan.splits.iter().peekable();
        let of_unit = |unit: usize| match splits.next_if(|split| split.unit == unit) {
            Some(split) => {
                split.parts.iter().map(|&(group, part)| value(unit, group) * part as f64 / mass[unit] as f64).sum()
            }
            None => value(unit, plan.label[unit]),
        };
        (0..mass.len()).map(of_unit).sum::<f64>()
    }
}

fn to_local(counts: &[u32], group_of: &[u16], group: u16) -> f64 {
    let own = counts.iter().zip(group_of).filter(|(_, other)| **other == group);
    own.map(|(&count, _)| f64::from(count)).sum()
}

/// All labellings of `experts` with equally many in each group.
fn balanced(experts: usize, groups: usize) -> Vec<Vec<u16>> {
    let mut all = vec![vec![]];
    for _ in 0..experts {
        let grow = |labels: &Vec<u16>| {
            let labels = labels.clone();
            (0..groups as u16).filter_map(move |group| {
                let full = labels.iter().filter(|&&label| label == group).count() == experts / groups;
                (!full).then(|| [&labels[..], &[group]].concat())
            })
        };
        all = all.iter().flat_map(grow).collect();
    }
    all
}

fn instances() -> impl Strategy<Value = Instance> {
    let shapes =
        prop::sample::select(vec![(2, 4, 1), (2, 6, 1), (3, 6, 1), (4, 4, 1), (2, 4, 2), (3, 3, 2), (2, 2, 3)]);
    let margin = prop::sample::select(vec![0.0, 0.02, 0.3, 5.0]);
    (shapes, margin, any::<u64>(), 1usize..14, prop::bool::ANY).prop_map(
        |((groups, experts, layers), margin, seed, units, structured)| {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut row = || {
                let kind = random.usize(0..groups);
                let mut count = |column: usize| match structured && column % groups != kind {
                    true => u32::from(random.u8(0..8) == 0),
                    false => random.u32(0..4) * random.u32(0..12),
                };
                let counts: Vec<u32> = (0..experts * layers).map(&mut count).collect();
                // Some units have no activations, some are heavy.
                (random.u64(1..6).pow(random.u32(1..4)), counts)
            };
            let mut rows: Vec<_> = (0..units).map(|_| row()).collect();
            rows[0].1[0] += 1;
            Instance { groups, experts, rows, margin }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_bound_is_below_the_optimum(instance in instances()) {
        let optimum = instance.optimum();
        let bounds = instance.bounds(20);
        prop_assert!(bounds.spectral >= optimum, "B1 {} < {optimum}", bounds.spectral);
        prop_assert!(bounds.sdp >= optimum, "B2 {} < {optimum}", bounds.sdp);
        let units = instance.units();
        let frame = Frame::new(&units, instance.groups, instance.capacity()[0] as f64);
        let mut all = Vec::new();
        let best = sdp::sdp(&frame, 20, &mut |value| all.push(value));
        for value in &all {
            prop_assert!(value / frame.activations >= optimum - 1e-9, "an iterate, {value} < {optimum}");
        }
        prop_assert_eq!(best, all.iter().copied().fold(f64::INFINITY, f64::min));
    }

    #[test]
    fn scaling_masses_or_counts_changes_nothing(instance in instances(), power in 1u32..4) {
        // Powers of four preserve every rounding, and with it every choice made.
        let times = 4u32.pow(power);
        // Capacities are whole tokens, which scale exactly only without a margin and for divisible masses.
        let mut instance = Instance { margin: 0.0, ..instance };
        instance.rows.iter_mut().for_each(|row| row.0 *= instance.groups as u64);
        let before = instance.bounds(5);
        let mut heavier = instance.clone();
        heavier.rows.iter_mut().for_each(|row| row.0 *= u64::from(times));
        let mut more = instance;
        more.rows.iter_mut().flat_map(|row| &mut row.1).for_each(|count| *count *= times);
        for after in [heavier.bounds(5), more.bounds(5)] {
            prop_assert!((after.spectral - before.spectral).abs() < 1e-9, "{before:?} {after:?}");
            prop_assert!((after.sdp - before.sdp).abs() < 1e-9, "{before:?} {after:?}");
        }
    }

    #[test]
    fn eigenvalues_are_within_their_error(n in 1usize..40, seed: u64, rank in 1usize..40, noise in 0.0..1.0) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut matrix = Array2::<f64>::zeros((n, n));
        for _ in 0..rank {
            let x: Array1<f64> = (0..n).map(|_| random.f64() - 0.5).collect();
            let sign = random.f64() - 0.3;
            matrix.indexed_iter_mut().for_each(|((i, j), value)| *value += sign * x[i] * x[j]);
        }
        matrix.diag_mut().iter_mut().for_each(|value| *value += noise * random.f64());
        mirror(&mut matrix);
        let eigen = Eigen::new(matrix.clone());
        let scale = norm(&matrix);
        prop_assert!(eigen.error(&matrix) <= 1e-10 * (scale + 1e-300), "{} of {scale}", eigen.error(&matrix));
        prop_assert!(eigen.values.windows(2).into_iter().all(|pair| pair[0] >= pair[1]));
        for (value, vector) in eigen.values.iter().zip(eigen.vectors.rows()) {
            let vector = slice(vector);
            let image = times(&matrix, vector);
            prop_assert!(image.iter().zip(vector).all(|(x, y)| (x - value * y).abs() <= 1e-10 * (scale + 1e-300)));
            prop_assert!((dot(vector, vector) - 1.0).abs() < 1e-10);
        }
        // The error bound must grow with the actual error.
        let mut wrong = matrix.clone();
        wrong[[0, 0]] += 0.5;
        prop_assert!(eigen.error(&wrong) >= 0.4);
    }
}

/// `groups` kinds of units, each with its own experts; `noise` counts elsewhere.
fn planted(groups: usize, experts: usize, layers: usize, noise: u32) -> Instance {
    let rows = (0..groups * 10).map(|unit| {
        let count = |column: usize| if column % groups == unit % groups { 20 } else { noise };
        (10, (0..experts * layers).map(count).collect())
    });
    Instance { groups, experts, rows: rows.collect(), margin: 0.0 }
}

#[test]
fn planted_clusters_are_bounded_tightly() {
    for (groups, experts, layers) in [(2, 8, 1), (4, 16, 1), (4, 8, 3), (8, 8, 2)] {
        for noise in [0, 1, 5] {
            let bounds = planted(groups, experts, layers, noise).bounds(60);
            let optimum = 20.0 / (20.0 + f64::from(noise) * (groups - 1) as f64);
            assert!(bounds.spectral >= optimum && bounds.sdp >= optimum, "{bounds:?} {optimum}");
            assert!(bounds.spectral < optimum + 1e-6 && bounds.sdp < optimum + 1e-3, "{bounds:?} {optimum}");
        }
    }
}

#[test]
fn uniform_counts_leave_nothing_to_gain() {
    let mut instance = planted(4, 16, 1, 20);
    let bounds = instance.bounds(20);
    assert!((0.25..0.2501).contains(&bounds.sdp) && (0.25..0.2501).contains(&bounds.spectral), "{bounds:?}");
    instance.margin = 0.5;
    // Equal loads gain nothing from uneven groups.
    assert!(instance.bounds(20).sdp < 0.2501);
}

#[test]
fn units_that_no_group_can_hold_are_capped() {
    // Each unit uses six experts at once and a group holds two, so a third is the maximum for any placement.
    let mut random = fastrand::Rng::with_seed(5);
    let mut row = || {
        let mut order: Vec<usize> = (0..12).collect();
        random.shuffle(&mut order);
        (1, (0..12).map(|expert| u32::from(order[expert] < 6)).collect())
    };
    let instance = Instance { groups: 6, experts: 12, rows: (0..200).map(|_| row()).collect(), margin: 0.02 };
    let bounds = instance.bounds(40);
    assert!(bounds.sdp <= 1.0 / 3.0 + 4e-3 && bounds.spectral > bounds.sdp, "{bounds:?}");
}

#[test]
fn degenerate_inputs_have_bounds() {
    let one =
        |groups, counts: Vec<u32>| Instance { groups, experts: counts.len(), rows: vec![(3, counts)], margin: 0.0 };
    assert_eq!(one(1, vec![1, 2]).bounds(5).sdp, 1.0);
    for counts in [vec![1, 0], vec![7, 7], vec![0, 0, 0, 1]] {
        let instance = one(2, counts);
        let (bounds, optimum) = (instance.bounds(5), instance.optimum());
        assert!(bounds.sdp >= optimum && bounds.spectral >= optimum, "{bounds:?} {optimum}");
    }
    let huge = Instance { groups: 2, experts: 4, rows: vec![(1 << 49, vec![u32::MAX; 4]); 3], margin: 0.02 };
    assert!((0.5..0.51).contains(&huge.bounds(5).sdp), "{:?}", huge.bounds(5));
}
