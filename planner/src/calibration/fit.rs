//! Constants fitted to steps of one rank, so that those of layouts with several ranks are left to be predicted.

use super::Errors;
use crate::PlanError;
use crate::cluster::Cluster;
use crate::error::positive;
use crate::layout::Layout;
use crate::shape::ModelShape;
use crate::step::{Constants, Part, Target, Work, step};

/// A step as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPoint {
    /// In this layout.
    pub layout: Layout,
    /// Of this work.
    pub work: Work,
    /// All of it.
    pub seconds: f64,
    /// The part that computed routed experts, if it was measured.
    pub experts: Option<f64>,
}

/// A constant that the fit may move, and its range.
struct Fitted {
    of: fn(&mut Constants) -> &mut f64,
    low: f64,
    high: f64,
}

const fn fitted(of: fn(&mut Constants) -> &mut f64, low: f64, high: f64) -> Fitted {
    Fitted { of, low, high }
}

/// The constants that a step's computation determines.
const FITTED: [Fitted; 11] = [
    fitted(|c| &mut c.dense_flops_share, 1e-3, 1e3),
    fitted(|c| &mut c.expert_flops_share, 1e-3, 1e3),
    fitted(|c| &mut c.attention_flops_share, 1e-3, 1e3),
    fitted(|c| &mut c.weight_bandwidth_share, 1e-3, 1e3),
    fitted(|c| &mut c.expert_bandwidth_share, 1e-3, 1e3),
    fitted(|c| &mut c.cache_bandwidth_share, 1e-3, 1e3),
    fitted(|c| &mut c.roofline_sharpness, 1.0, 16.0),
    fitted(|c| &mut c.expert_spread, 0.05, 1.0),
    fitted(|c| &mut c.layer_seconds, 1e-9, 1e-1),
    fitted(|c| &mut c.sequence_seconds, 1e-9, 1e-2),
    fitted(|c| &mut c.step_seconds, 1e-9, 1e-1),
];
/// The first factor by which a constant is moved, and the one at which the search ends.
const FIRST_FACTOR: f64 = 2.0;
const LAST_FACTOR: f64 = 1.002;
/// Rounds over all constants; each round has two predictions of every point for each constant.
const MOST_ROUNDS: usize = 400;
/// More points than a calibration measures.
const MOST_POINTS: usize = 4096;

/// Moves the constants of computation, from `start`, to where the squares of ln(predicted / measured) are least: a
/// descent along one constant at a time, on a logarithmic scale.
///
/// # Errors
/// [`PlanError::Value`] without points, with too many, or about a time that is not above 0.
pub fn fit(
    shape: &ModelShape,
    cluster: &Cluster,
    start: &Constants,
    points: &[StepPoint],
) -> Result<Constants, PlanError> {
    start.check()?;
    if points.is_empty() || points.len() > MOST_POINTS {
        let expected = "1 to 4096";
        return Err(PlanError::Value { what: "the number of measured steps", found: points.len() as f64, expected });
    }
    for point in points {
        positive("the seconds of a measured step", point.seconds)?;
        point.experts.map(|seconds| positive("the seconds of measured experts", seconds)).transpose()?;
    }
    let loss =
        |constants: &Constants| -> f64 { points.iter().map(|point| miss(shape, cluster, constants, point)).sum() };
    let mut best = *start;
    // A constant at 0 would stay there.
    for Fitted { of: constant, low, high } in FITTED {
        let value = constant(&mut best);
        *value = value.clamp(low, high);
    }
    let mut least = loss(&best);
    let mut factor = FIRST_FACTOR;
    for _ in 0..MOST_ROUNDS {
        let before = least;
        for Fitted { of: constant, low, high } in FITTED {
            for by in [factor, 1.0 / factor] {
                let mut tried = best;
                let value = constant(&mut tried);
                *value = (*value * by).clamp(low, high);
                let found = loss(&tried);
                if found < least {
                    (best, least) = (tried, found);
                }
            }
        }
        if before - least <= 1e-6 * before {
            factor = factor.sqrt();
            if factor < LAST_FACTOR {
                break;
            }
        }
    }
    Ok(best)
}

fn miss(shape: &ModelShape, cluster: &Cluster, constants: &Constants, point: &StepPoint) -> f64 {
    let terms = step(&Target { shape, cluster, layout: point.layout, constants }, &point.work);
    let square = |predicted: f64, measured: f64| (predicted / measured).ln().powi(2);
    let experts = point.experts.map_or(0.0, |measured| square(terms[Part::Experts].max(1e-12), measured));
    square(terms.total(), point.seconds) + experts
}

/// How far predictions are off on these steps.
///
/// # Errors
/// As [`Errors::of`].
pub fn errors(
    shape: &ModelShape,
    cluster: impl Fn(&StepPoint) -> Cluster,
    constants: &Constants,
    points: &[StepPoint],
) -> Result<Errors, PlanError> {
    let pair = |point: &StepPoint| {
        let cluster = cluster(point);
        let target = Target { shape, cluster: &cluster, layout: point.layout, constants };
        [step(&target, &point.work).total(), point.seconds]
    };
    Errors::of(&points.iter().map(pair).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{h200, layout, qwen3_235b};

    /// Steps that follow the model with other constants are predicted again, also in a layout that was not measured.
    #[test]
    fn constants_are_found_again() {
        let (shape, cluster) = (qwen3_235b(), h200(1));
        let truth = Constants {
            dense_flops_share: 0.4,
            expert_bandwidth_share: 0.3,
            expert_flops_share: 0.2,
            layer_seconds: 8e-5,
            sequence_seconds: 1e-7,
            ..Constants::uncalibrated()
        };
        let point = |layout, sequences, tokens, cached| {
            let work = Work { sequences, tokens, cached };
            let terms = step(&Target { shape: &shape, cluster: &cluster, layout, constants: &truth }, &work);
            StepPoint { layout, work, seconds: terms.total(), experts: Some(terms[Part::Experts]) }
        };
        let one = layout(1, [1, 8], [1, 8]);
        let mut points = Vec::new();
        for sequences in [8.0, 64.0, 512.0, 2048.0] {
            points.extend([100.0, 4000.0].map(|cached| point(one, sequences, 1.0, cached)));
        }
        points.extend([128.0, 2048.0, 8192.0].map(|tokens| point(one, 8.0, tokens, 0.0)));
        let found = fit(&shape, &cluster, &Constants::uncalibrated(), &points).unwrap();
        let others: Vec<StepPoint> = [16.0, 200.0, 1000.0]
            .into_iter()
            .map(|sequences| point(layout(1, [8, 1], [1, 8]), sequences, 1.0, 1500.0))
            .collect();
        let errors = errors(&shape, |_| cluster.clone(), &found, &others).unwrap();
        assert!(errors.median < 0.03, "{errors:?} {found:?}");
    }

    #[test]
    fn what_cannot_be_fitted_is_refused() {
        let (shape, cluster, start) = (qwen3_235b(), h200(1), Constants::uncalibrated());
        let work = Work { sequences: 1.0, tokens: 1.0, cached: 1.0 };
        let good = StepPoint { layout: layout(1, [1, 1], [1, 1]), work, seconds: 1.0, experts: None };
        for points in [
            vec![],
            vec![StepPoint { seconds: f64::NAN, ..good }],
            vec![StepPoint { seconds: 0.0, ..good }],
            vec![StepPoint { experts: Some(-1.0), ..good }],
            vec![good; MOST_POINTS + 1],
        ] {
            assert!(fit(&shape, &cluster, &start, &points).is_err());
        }
    }
}
