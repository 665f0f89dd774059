//! The input of the bounds: a units-by-columns matrix, and the sums over units that both bounds need.

use ndarray::Array2;

use crate::algebra::{dot, mirror, norm, slice, slice_mut, times};
use crate::input::Problem;

/// A units x columns matrix in CSR format, for one or more layers. The columns are `layers` blocks of `experts`.
#[derive(Clone, Debug)]
pub(super) struct Units {
    pub(super) experts: usize,
    /// n = layers * experts.
    pub(super) columns: usize,
    /// a: tokens of each unit, [U]. A unit without activations in these layers still counts towards its group.
    pub(super) mass: Vec<f64>,
    indptr: Vec<usize>,
    column: Vec<u32>,
    count: Vec<f64>,
}

/// A unit's column indices, in ascending order, and its counts.
#[derive(Clone, Copy)]
pub(super) struct Entries<'a> {
    pub(super) columns: &'a [u32],
    pub(super) counts: &'a [f64],
}

impl<'a> Entries<'a> {
    fn iter(self) -> impl Iterator<Item = (usize, f64)> + use<'a> {
        self.columns.iter().map(|&column| column as usize).zip(self.counts.iter().copied())
    }
}

/// The terms of `sum of alpha[t] v[t] v[t]^T` with `v[t] = w[t] - a[t] u`.
pub(super) struct Moments {
    /// `sum alpha w w^T`, [n, n].
    pub(super) square: Array2<f64>,
    /// `sum alpha a w`, [n].
    pub(super) cross: Vec<f64>,
    /// `sum alpha a^2`.
    pub(super) mass: f64,
}

impl Units {
    /// Extracts a range of the problem's layers, with all units.
    pub(super) fn of_layers(problem: &Problem, layers: std::ops::Range<usize>) -> Self {
        let columns = layers.start * problem.experts..layers.end * problem.experts;
        let mut units = Units::empty(problem.experts, columns.len());
        for unit in 0..problem.units() {
            let row = problem.row(unit).filter(|(column, _)| columns.contains(column));
            units.push(
                problem.mass[unit] as f64,
                row.map(|(column, count)| ((column - columns.start) as u32, f64::from(count))),
            );
        }
        units
    }

    pub(super) fn empty(experts: usize, columns: usize) -> Self {
        Units { experts, columns, mass: vec![], indptr: vec![0], column: vec![], count: vec![] }
    }

    /// Appends a unit. Its columns must be in ascending order.
    pub(super) fn push(&mut self, mass: f64, row: impl Iterator<Item = (u32, f64)>) {
        self.mass.push(mass);
        for (column, count) in row {
            self.column.push(column);
            self.count.push(count);
        }
        self.indptr.push(self.column.len());
    }

    pub(super) fn row(&self, unit: usize) -> Entries<'_> {
        let span = self.indptr[unit]..self.indptr[unit + 1];
        Entries { columns: &self.column[span.clone()], counts: &self.count[span] }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Entries<'_>> {
        (0..self.mass.len()).map(|unit| self.row(unit))
    }

    /// T
    pub(super) fn activations(&self) -> f64 {
        self.count.iter().sum()
    }

    /// `sum of w`, [n].
    pub(super) fn loads(&self) -> Vec<f64> {
        let mut loads = vec![0.0; self.columns];
        self.column.iter().zip(&self.count).for_each(|(&column, count)| loads[column as usize] += count);
        loads
    }

    pub(super) fn moments(&self, alpha: &[f64]) -> Moments {
        let n = self.columns;
        let mut moments = Moments { square: Array2::zeros((n, n)), cross: vec![0.0; n], mass: 0.0 };
        for ((entries, &mass), &alpha) in self.rows().zip(&self.mass).zip(alpha) {
            moments.mass += alpha * mass * mass;
            for (at, (column, count)) in entries.iter().enumerate() {
                let factor = alpha * count;
                moments.cross[column] += factor * mass;
                let row = slice_mut(moments.square.row_mut(column));
                entries.iter().take(at + 1).for_each(|(other, count)| row[other] += factor * count);
            }
        }
        mirror(&mut moments.square);
        moments
    }

    /// Returns `v^T X v` of every unit.
    pub(super) fn forms(&self, x: &Array2<f64>, centre: &[f64]) -> Vec<f64> {
        let image = times(x, centre);
        let constant = dot(&image, centre);
        let form = |(entries, &mass): (Entries<'_>, &f64)| {
            let mut sum = mass * mass * constant;
            for (at, (column, count)) in entries.iter().enumerate() {
                let row = slice(x.row(column));
                let before: f64 = entries.iter().take(at).map(|(other, count)| row[other] * count).sum();
                sum += count * (2.0 * (before - mass * image[column]) + count * row[column]);
            }
            sum.max(0.0)
        };
        self.rows().zip(&self.mass).map(form).collect()
    }
}

impl Moments {
    /// Returns the matrix about the centre `u`.
    pub(super) fn about(&self, centre: &[f64]) -> Array2<f64> {
        let mut out = self.square.clone();
        for (mut row, (&cross, &middle)) in out.rows_mut().into_iter().zip(self.cross.iter().zip(centre)) {
            let others = self.cross.iter().zip(centre);
            for (value, (&other_cross, &other)) in row.iter_mut().zip(others) {
                *value += self.mass * (middle * other) - (cross * other + middle * other_cross);
            }
        }
        mirror(&mut out);
        out
    }

    /// Returns the sum of the Frobenius norms of the terms in [`Self::about`], the scale of its rounding errors.
    pub(super) fn magnitude(&self, centre: &[f64]) -> f64 {
        let length = |x: &[f64]| dot(x, x).sqrt();
        let (centre, cross) = (length(centre), length(&self.cross));
        norm(&self.square) + 2.0 * cross * centre + self.mass * centre * centre
    }
}
