//! Dense symmetric matrices, and the projection that takes layer means out.

/// [n, n], row by row, symmetric to the bit.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) n: usize,
    pub(super) data: Vec<f64>,
}

impl Matrix {
    pub(super) fn zeros(n: usize) -> Self {
        Matrix { n, data: vec![0.0; n * n] }
    }

    pub(super) fn identity(n: usize) -> Self {
        let mut matrix = Matrix::zeros(n);
        (0..n).for_each(|at| matrix.data[at * n + at] = 1.0);
        matrix
    }

    pub(super) fn row(&self, row: usize) -> &[f64] {
        &self.data[row * self.n..(row + 1) * self.n]
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.data[row * self.n..(row + 1) * self.n]
    }

    /// Frobenius norm.
    pub(super) fn norm(&self) -> f64 {
        dot(&self.data, &self.data).sqrt()
    }

    /// Copies what is below the diagonal above it.
    pub(super) fn mirror(&mut self) {
        for row in 0..self.n {
            for column in 0..row {
                self.data[column * self.n + row] = self.data[row * self.n + column];
            }
        }
    }

    /// `P self P - push * J`, where J projects on the vectors that are constant in each block of `block` columns and
    /// P = 1 - J. With `push` at least the norm of `self`, the lowest `n / block` eigenvalues are those of J, and all
    /// others are the eigenvalues on the complement.
    pub(super) fn centred(&self, block: usize, push: f64) -> Matrix {
        let (n, mut out) = (self.n, self.clone());
        for part in out.data.chunks_exact_mut(block) {
            let mean = part.iter().sum::<f64>() / block as f64;
            part.iter_mut().for_each(|value| *value -= mean);
        }
        for first in (0..n).step_by(block) {
            let rows = &mut out.data[first * n..(first + block) * n];
            let mut mean = vec![0.0; n];
            rows.chunks_exact(n).for_each(|row| add(&mut mean, 1.0 / block as f64, row));
            rows.chunks_exact_mut(n).for_each(|row| add(row, -1.0, &mean));
            let push = push / block as f64;
            rows.chunks_exact_mut(n).for_each(|row| row[first..first + block].iter_mut().for_each(|x| *x -= push));
        }
        out.mirror();
        out
    }

    /// `self * x`.
    pub(super) fn times(&self, x: &[f64]) -> Vec<f64> {
        self.data.chunks_exact(self.n).map(|row| dot(row, x)).collect()
    }
}

/// `to += factor * from`.
pub(super) fn add(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// Inner product; eight partial sums, always in the same order.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a8.zip(b8) {
        for at in 0..8 {
            sums[at] += a[at] * b[at];
        }
    }
    sums.iter().sum::<f64>() + rest
}
