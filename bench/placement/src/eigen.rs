//! Eigenvalues and eigenvectors of a small symmetric matrix (cyclic Jacobi rotations).

const MAX_SWEEPS: usize = 60;

/// Of `matrix` [n, n]: the eigenvalues, unordered, and the eigenvectors as columns of [n, n].
pub(crate) fn symmetric(matrix: &[f64], n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut a = matrix.to_vec();
    let mut vectors = vec![0.0; n * n];
    (0..n).for_each(|i| vectors[i * n + i] = 1.0);
    let size: f64 = a.iter().map(|x| x * x).sum::<f64>().max(f64::MIN_POSITIVE);
    for _ in 0..MAX_SWEEPS {
        let off: f64 = (0..n * n).filter(|i| i / n != i % n).map(|i| a[i] * a[i]).sum();
        if off < 1e-22 * size {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                rotate(&mut a, &mut vectors, n, [p, q]);
            }
        }
    }
    ((0..n).map(|i| a[i * n + i]).collect(), vectors)
}

/// The rotation that makes a[p, q] zero.
fn rotate(a: &mut [f64], vectors: &mut [f64], n: usize, [p, q]: [usize; 2]) {
    let apq = a[p * n + q];
    if apq == 0.0 {
        return;
    }
    let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * apq);
    let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
    let cos = 1.0 / (tangent * tangent + 1.0).sqrt();
    let sin = tangent * cos;
    let turn = |values: &mut [f64], x: usize, y: usize| {
        let (u, v) = (values[x], values[y]);
        values[x] = cos * u - sin * v;
        values[y] = sin * u + cos * v;
    };
    (0..n).for_each(|k| turn(a, k * n + p, k * n + q));
    (0..n).for_each(|k| turn(a, p * n + k, q * n + k));
    (0..n).for_each(|k| turn(vectors, k * n + p, k * n + q));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_and_values_give_the_matrix_back() {
        let n = 7;
        let mut random = fastrand::Rng::with_seed(1);
        let half: Vec<f64> = (0..n * n).map(|_| random.f64() - 0.5).collect();
        let matrix: Vec<f64> = (0..n * n).map(|i| half[i] + half[(i % n) * n + i / n]).collect();
        let (values, vectors) = symmetric(&matrix, n);
        for i in 0..n * n {
            let back: f64 = (0..n).map(|k| vectors[(i / n) * n + k] * values[k] * vectors[(i % n) * n + k]).sum();
            assert!((back - matrix[i]).abs() < 1e-10, "{back} {}", matrix[i]);
        }
    }
}
