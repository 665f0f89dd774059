//! The parts that both bounds share (each unit's inequality and the cost of a centre), and the bound B1 itself.

use ndarray::Array2;

use super::units::{Entries, Units};
use crate::algebra::{Eigen, UNIT_ROUNDOFF, centred, norm};

/// The units of a bound, the number of groups and the token cap.
pub(super) struct Frame<'a> {
    pub(super) units: &'a Units,
    /// E
    pub(super) groups: usize,
    /// Ratio of the maximum to the mean tokens per group, minus 1.
    excess: f64,
    /// S
    pub(super) mass: f64,
    /// T
    pub(super) activations: f64,
    /// Each unit's N/E largest counts per layer, summed over the layers, [U].
    top: Vec<f64>,
}

/// The starting point of both bounds.
pub(super) struct AboutMean {
    /// The load per token, [n].
    pub(super) centre: Vec<f64>,
    /// Slope of each unit.
    pub(super) alpha: Vec<f64>,
    pub(super) matrix: Array2<f64>,
    /// Upper bound on the norm of the error in the matrix.
    pub(super) doubt: f64,
    /// Largest eigenvalues of the matrix.
    pub(super) top: Vec<f64>,
}

impl<'a> Frame<'a> {
    /// `capacity`: maximum tokens per group.
    pub(super) fn new(units: &'a Units, groups: usize, capacity: f64) -> Self {
        let (mass, activations) = (units.mass.iter().sum::<f64>(), units.activations());
        let excess = (capacity * groups as f64 / mass - 1.0).max(0.0);
        let mut frame = Frame { units, groups, excess, mass, activations, top: Vec::new() };
        let mut scratch = Vec::new();
        frame.top = units.rows().map(|row| frame.top_counts(row, &mut scratch)).collect();
        frame
    }

    /// Returns an upper bound on the sum of a row's counts that can fall into a single group.
    fn top_counts(&self, Entries { columns, counts }: Entries<'_>, scratch: &mut Vec<f64>) -> f64 {
        let (share, experts) = (self.share(), self.units.experts);
        let mut sum = 0.0;
        let mut at = 0;
        while at < columns.len() {
            let layer = columns[at] as usize / experts;
            let end = at + columns[at..].partition_point(|&column| column as usize / experts == layer);
            scratch.clear();
            scratch.extend_from_slice(&counts[at..end]);
            sum += greatest(scratch, share);
            at = end;
        }
        sum
    }

    /// N/E, experts per group and layer.
    fn share(&self) -> usize {
        self.units.experts / self.groups
    }

    /// n/E, columns per group, which is also the largest eigenvalue of X.
    pub(super) fn columns_of_group(&self) -> f64 {
        (self.units.columns / self.groups) as f64
    }

    /// 1 - 1/E
    pub(super) fn rest(&self) -> f64 {
        1.0 - 1.0 / self.groups as f64
    }

    /// Returns the second-moment matrix about the mean load, with units weighted by their tokens.
    pub(super) fn about_mean(&self) -> AboutMean {
        // At this centre, the load per token, the deviations of all units cancel.
        let mut centre = self.units.loads();
        centre.iter_mut().for_each(|load| *load /= self.mass);
        let alpha: Vec<f64> = self.units.mass.iter().map(|mass| 1.0 / mass).collect();
        let moments = self.units.moments(&alpha);
        let matrix = moments.about(&centre);
        let doubt = self.rounding() * moments.magnitude(&centre);
        let top = self.top_eigenvalues(&matrix, doubt);
        AboutMean { centre, alpha, matrix, doubt, top }
    }

    /// Returns B1, the spectral bound: no placement keeps more activations local. The README in this directory derives
    /// it.
    pub(super) fn spectral(&self) -> f64 {
        let AboutMean { centre, top, .. } = self.about_mean();
        let columns = self.columns_of_group();
        // By the trace norm, |R| <= sqrt(capacity); by the Frobenius norm, |R (1 - J)|^2 <= (1 - 1/E) S.
        let capacity = (1.0 + self.excess) * self.mass / self.groups as f64;
        let trace = (capacity * columns).sqrt() * top.iter().map(|value| value.max(0.0).sqrt()).sum::<f64>();
        let sum: f64 = top.iter().map(|value| value.max(0.0)).sum();
        let frobenius = (self.rest() * self.mass * columns * sum).sqrt();
        let value = self.activations / self.groups as f64 + self.centre_cost(&centre) + trace.min(frobenius);
        value * (1.0 + self.rounding())
    }

    /// Upper bound on `sum over c of m[c] u . C~[c]`: only groups with more tokens than the mean can gain from u.
    pub(super) fn centre_cost(&self, centre: &[f64]) -> f64 {
        let lowest = -self.highest_group(centre.iter().map(|value| -value).collect());
        self.excess * self.mass * (centre.iter().sum::<f64>() / self.groups as f64 - lowest)
    }

    /// Returns an upper bound on the sum of a centre's entries that can fall into a single group.
    fn highest_group(&self, mut centre: Vec<f64>) -> f64 {
        centre.chunks_exact_mut(self.units.experts).map(|layer| greatest(layer, self.share())).sum()
    }

    /// Sum over units of the smallest `beta` with `max over c of v . C~[c] <= alpha v^T X v + beta`, given that the
    /// left side is at most `sqrt((1 - 1/E) v^T X v)` and at most the unit's cap.
    pub(super) fn intercepts(&self, centre: &[f64], alpha: &[f64]) -> f64 {
        let mut caps = Caps::new(self, centre);
        let intercept = |(unit, &alpha): (usize, &f64)| match caps.below(unit, self.rest() / (2.0 * alpha)) {
            Some(cap) => cap - alpha * cap * cap / self.rest(),
            None => self.rest() / (4.0 * alpha),
        };
        alpha.iter().enumerate().map(intercept).sum()
    }

    /// Sets the slopes of units that reach their cap to zero.
    pub(super) fn flatten(&self, centre: &[f64], alpha: &mut [f64]) {
        let mut caps = Caps::new(self, centre);
        for (unit, alpha) in alpha.iter_mut().enumerate() {
            if caps.below(unit, self.rest() / (2.0 * *alpha)).is_some() {
                *alpha = 0.0;
            }
        }
    }

    /// Returns the `groups - 1` largest eigenvalues of `P matrix P` on the complement of the layer means. Each is
    /// increased by the maximum numerical error and by `doubt`, the norm of the error in the matrix.
    pub(super) fn top_eigenvalues(&self, matrix: &Array2<f64>, doubt: f64) -> Vec<f64> {
        let push = norm(matrix);
        let layers = (self.units.columns / self.units.experts) as f64;
        let centred = centred(matrix, self.units.experts, push);
        let eigen = Eigen::new(centred.clone());
        let rounding = 64.0 * (self.units.columns as f64 + 8.0) * UNIT_ROUNDOFF * push * (1.0 + layers);
        let margin = eigen.error(&centred) + rounding + doubt;
        eigen.values.iter().take(self.groups - 1).map(|value| value + margin).collect()
    }

    /// Bound on the relative rounding error of sums over units and columns.
    pub(super) fn rounding(&self) -> f64 {
        4.0 * (self.units.mass.len() + self.units.columns * self.units.columns + 64) as f64 * UNIT_ROUNDOFF
    }
}

/// Computes a unit's cap, which `v . C~[c]` never exceeds: the largest sum of its `v` in a single group minus the mean
/// over groups.
struct Caps<'a> {
    frame: &'a Frame<'a>,
    centre: &'a [f64],
    sum: f64,
    highest: f64,
    scratch: Vec<f64>,
}

impl<'a> Caps<'a> {
    fn new(frame: &'a Frame<'a>, centre: &'a [f64]) -> Self {
        let (sum, highest) = (centre.iter().sum(), frame.highest_group(centre.to_vec()));
        Caps { frame, centre, sum, highest, scratch: Vec::new() }
    }

    /// The unit's cap, if it is below `limit`.
    fn below(&mut self, unit: usize, limit: f64) -> Option<f64> {
        let (frame, mass) = (self.frame, self.frame.units.mass[unit]);
        let Entries { columns, counts } = frame.units.row(unit);
        let mean = (counts.iter().sum::<f64>() - mass * self.sum) / frame.groups as f64;
        // For most units, a lower bound on the cap already exceeds the limit.
        if frame.top[unit] - mass * self.highest - mean >= limit {
            return None;
        }
        self.scratch.clear();
        self.scratch.extend(self.centre.iter().map(|value| -mass * value));
        columns.iter().zip(counts).for_each(|(&column, count)| self.scratch[column as usize] += count);
        let layers = self.scratch.chunks_exact_mut(frame.units.experts);
        let cap = layers.map(|layer| greatest(layer, frame.share())).sum::<f64>() - mean;
        (cap < limit).then_some(cap.max(0.0))
    }
}

/// Returns the sum of the `count` largest values, or of all if there are fewer. Reorders `values`.
fn greatest(values: &mut [f64], count: usize) -> f64 {
    if count < values.len() {
        values.select_nth_unstable_by(count, |a, b| b.total_cmp(a));
    }
    values.iter().take(count).sum()
}
