//! B2, the bound from the dual of the semidefinite relaxation.
//!
//! ADMM solves the relaxation `max of sum over t of f[t](v[t]^T X v[t])`, alternating between the spectral constraints
//! on X (one eigendecomposition per step) and the entrywise ones, with the concave f linearised. The ADMM multipliers
//! are the dual variables. The dual value is a valid bound for any multipliers, so correctness does not rely on
//! convergence.

use ndarray::{Array2, s};

use super::frame::{AboutMean, Frame};
use crate::algebra::{Eigen, UNIT_ROUNDOFF, add, centred, dot, mirror, norm, rows, rows_mut, times};

/// ADMM steps between two evaluations of the bound.
const STEPS: u32 = 20;
/// Weight of the new slopes in each update.
const DAMPING: f64 = 0.5;
/// Stops after this many rounds without a relative gain of `MIN_GAIN`.
const PATIENCE: u32 = 8;
const MIN_GAIN: f64 = 2e-5;
/// Slopes are capped as if every unit's `v^T X v` were at least the square of this fraction of its mean activations.
const FLOOR: f64 = 1e-4;
/// The penalty is doubled or halved when one residual exceeds the other by this factor.
const UNBALANCED: f64 = 5.0;

/// Returns the smallest bound found in up to `rounds` rounds; calls `seen` with the bound of each round.
pub(super) fn sdp(frame: &Frame<'_>, rounds: u32, seen: &mut dyn FnMut(f64)) -> f64 {
    let mut state = State::new(frame);
    let mut best = state.value();
    seen(best);
    let (mut reference, mut since) = (best, 0);
    for round in 0..rounds {
        if round > 0 {
            state.slopes();
        }
        state.centre();
        (0..STEPS).for_each(|_| state.step());
        let value = state.value();
        seen(value);
        // Unlike `f64::min`, keeps an initial NaN, so that the caller discards the bound.
        best = if value < best { value } else { best };
        if best < reference * (1.0 - MIN_GAIN) {
            (reference, since) = (best, 0);
        } else {
            since += 1;
        }
        if since >= PATIENCE {
            break;
        }
    }
    best
}

struct State<'a> {
    frame: &'a Frame<'a>,
    /// Slopes of the units' inequalities, [U].
    alpha: Vec<f64>,
    /// u, [n]
    centre: Vec<f64>,
    /// `sum of alpha v v^T`.
    matrix: Array2<f64>,
    /// Upper bound on the norm of the error in `matrix`.
    doubt: f64,
    /// X projected onto the spectral constraints, and X projected onto the entrywise ones.
    spectral: Array2<f64>,
    entries: Array2<f64>,
    /// Scaled multiplier: `penalty * scaled` has y on its diagonal and -Lambda off it.
    scaled: Array2<f64>,
    penalty: f64,
}

impl<'a> State<'a> {
    /// Starts with slopes that give the spectral bound (Frobenius form) and no multipliers.
    fn new(frame: &'a Frame<'a>) -> Self {
        let n = frame.units.columns;
        let AboutMean { centre, alpha, matrix, doubt, top } = frame.about_mean();
        let sum: f64 = top.iter().sum();
        // The c that minimizes `rest mass / (4 c) + c columns sum`.
        let scale = (frame.rest() * frame.mass / (4.0 * frame.columns_of_group() * sum.max(f64::MIN_POSITIVE))).sqrt();
        let scale = if scale.is_finite() && scale > 0.0 { scale } else { 1.0 };
        let mut start = centred(&Array2::eye(n), frame.units.experts, 0.0);
        let experts = frame.units.experts as f64;
        start *= frame.rest() * experts / (experts - 1.0);
        let mut state = State {
            frame,
            alpha: alpha.iter().map(|alpha| alpha * scale).collect(),
            centre,
            matrix,
            doubt: doubt * scale,
            spectral: start.clone(),
            entries: start,
            scaled: Array2::zeros((n, n)),
            penalty: 1.0,
        };
        state.matrix *= scale;
        let reach = frame.columns_of_group() * ((frame.groups - 1) as f64).sqrt();
        state.penalty = (norm(&centred(&state.matrix, frame.units.experts, 0.0)) / reach).max(f64::MIN_POSITIVE);
        state
    }

    /// Moves the slopes towards those of the tangents at the current X.
    fn slopes(&mut self) {
        let frame = self.frame;
        let forms = frame.units.forms(&self.spectral, &self.centre);
        let floor = FLOOR * frame.activations / frame.mass;
        let mut target: Vec<f64> = forms
            .iter()
            .zip(&frame.units.mass)
            .map(|(&form, &mass)| 0.5 * (frame.rest() / form.max((floor * mass).powi(2))).sqrt())
            .collect();
        frame.flatten(&self.centre, &mut target);
        for (alpha, target) in self.alpha.iter_mut().zip(target) {
            *alpha += DAMPING * (target - *alpha);
        }
    }

    /// Sets the best centre for the slopes and the current X, and the matrix about that centre.
    fn centre(&mut self) {
        let frame = self.frame;
        let moments = frame.units.moments(&self.alpha);
        let mut centre = moments.cross.clone();
        centre.iter_mut().for_each(|value| *value /= moments.mass.max(f64::MIN_POSITIVE));
        let gain = dot(&times(&self.spectral, &moments.cross), &centre);
        let part = 1.0 - frame.centre_cost(&centre) / (2.0 * gain).max(f64::MIN_POSITIVE);
        let part = part.clamp(0.0, 1.0);
        centre.iter_mut().for_each(|value| *value *= part);
        self.matrix = moments.about(&centre);
        self.doubt = frame.rounding() * moments.magnitude(&centre);
        self.centre = centre;
    }

    /// Runs one ADMM step.
    fn step(&mut self) {
        let frame = self.frame;
        let mut wanted = &self.entries - &self.scaled;
        wanted.scaled_add(1.0 / self.penalty, &self.matrix);
        self.spectral = project(frame, &wanted);
        let (low, own) = (-1.0 / frame.groups as f64, frame.rest());
        let (mut residual, mut moved) = (0.0, 0.0);
        let entries = self.entries.indexed_iter_mut().zip(&mut self.scaled);
        for ((((row, column), entry), scaled), spectral) in entries.zip(&self.spectral) {
            let sum = spectral + *scaled;
            let next = if row == column { own } else { sum.max(low) };
            *scaled = sum - next;
            residual += (spectral - next).powi(2);
            moved += (next - *entry).powi(2);
            *entry = next;
        }
        let factor = match (residual, moved) {
            (residual, moved) if residual > UNBALANCED * UNBALANCED * moved => 2.0,
            (residual, moved) if moved > UNBALANCED * UNBALANCED * residual => 0.5,
            _ => return,
        };
        self.penalty *= factor;
        self.scaled /= factor;
    }

    /// Returns the dual value, a valid bound for any slopes, centre and multipliers.
    fn value(&mut self) -> f64 {
        let frame = self.frame;
        let groups = frame.groups as f64;
        let mut shifted = self.matrix.clone();
        let (mut diagonal, mut beside, mut size) = (0.0, 0.0, 0.0);
        for (((row, column), shifted), scaled) in shifted.indexed_iter_mut().zip(&self.scaled) {
            let mut multiplier = self.penalty * scaled;
            if row == column {
                diagonal += multiplier;
            } else {
                multiplier = multiplier.min(0.0);
                beside -= multiplier;
            }
            size += multiplier.abs();
            *shifted -= multiplier;
        }
        let doubt = self.doubt + 4.0 * UNIT_ROUNDOFF * (norm(&shifted) + size);
        let sum: f64 = frame.top_eigenvalues(&shifted, doubt).iter().sum();
        let intercepts = frame.intercepts(&self.centre, &self.alpha);
        let cost = frame.centre_cost(&self.centre);
        let base = frame.activations / groups;
        let value =
            base + cost + intercepts + frame.rest() * diagonal + beside / groups + frame.columns_of_group() * sum;
        // The caps subtract the centre's activations from the counts; this is their total magnitude over all units.
        let subtracted = frame.mass * self.centre.iter().map(|value| value.abs()).sum::<f64>();
        let sizes = base + subtracted + cost.abs() + intercepts.abs() + size + (frame.columns_of_group() * sum).abs();
        value + frame.rounding() * sizes
    }
}

/// Returns the nearest matrix with eigenvalues from 0 to n/E, trace n (1 - 1/E) and rows that sum to zero in each
/// layer.
fn project(frame: &Frame<'_>, matrix: &Array2<f64>) -> Array2<f64> {
    let n = matrix.nrows();
    let eigen = Eigen::new(centred(matrix, frame.units.experts, norm(matrix)));
    let kept = n - n / frame.units.experts;
    let values = eigen.values.slice(s![..kept]);
    let most = frame.columns_of_group();
    let clipped = |shift: f64| values.iter().map(move |value| (value - shift).clamp(0.0, most));
    let trace = most * (frame.groups - 1) as f64;
    let (mut low, mut high) = (values[kept - 1] - most, values[0]);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if clipped(middle).sum::<f64>() > trace { low = middle } else { high = middle }
    }
    let mut out = Array2::zeros((n, n));
    for (value, vector) in clipped(high).zip(rows(&eigen.vectors)).filter(|(value, _)| *value > 0.0) {
        for (at, row) in rows_mut(&mut out).enumerate() {
            add(&mut row[..=at], value * vector[at], &vector[..=at]);
        }
    }
    mirror(&mut out);
    out
}
