//! Fits constants to single-rank steps, and contention between ranks to steps of a few layouts. All other layouts are
//! predicted.

use super::Errors;
use crate::PlanError;
use crate::cluster::{Cluster, Contention};
use crate::error::positive;
use crate::layout::Layout;
use crate::shape::ModelShape;
use crate::step::{Constants, Part, Target, Work, step};

/// A measured step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPoint {
    /// Layout of the unit.
    pub layout: Layout,
    /// Work in the step.
    pub work: Work,
    /// Duration of the step.
    pub seconds: f64,
    /// The time spent on routed experts, if measured.
    pub experts: Option<f64>,
}

/// A parameter to fit, and its range.
struct Fitted<T> {
    of: fn(&mut T) -> &mut f64,
    low: f64,
    high: f64,
}

const fn fitted<T>(of: fn(&mut T) -> &mut f64, low: f64, high: f64) -> Fitted<T> {
    Fitted { of, low, high }
}

/// The constants that describe a step's computation.
const FITTED: [Fitted<Constants>; 11] = [
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
/// Factor by which the search initially changes a constant; `LAST_FACTOR` is the factor at which it ends.
const FIRST_FACTOR: f64 = 2.0;
const LAST_FACTOR: f64 = 1.002;
/// Maximum number of rounds over all constants. A round predicts every point twice per constant.
const MAX_ROUNDS: usize = 400;
/// Limit on points, far above the number that a calibration measures.
const MAX_POINTS: usize = 4096;

/// Fits the computation constants, starting from `start`, to minimise the sum of squares of ln(predicted / measured).
///
/// # Errors
/// [`PlanError::Value`] if there are no points or too many, or a time is not positive.
pub fn fit(
    shape: &ModelShape,
    cluster: &Cluster,
    start: &Constants,
    points: &[StepPoint],
) -> Result<Constants, PlanError> {
    start.check()?;
    check(points)?;
    let loss =
        |constants: &Constants| -> f64 { points.iter().map(|point| miss(shape, cluster, constants, point)).sum() };
    Ok(descend(*start, &FITTED, loss))
}

/// Fits the contention between `ranks` ranks of `cluster` to minimise the sum of squares of ln(predicted / measured).
///
/// # Errors
/// [`PlanError::Value`] if there are no points or too many, or a time is not positive.
pub fn fit_contention(
    shape: &ModelShape,
    cluster: &Cluster,
    constants: &Constants,
    points: &[StepPoint],
    ranks: u64,
) -> Result<Contention, PlanError> {
    check(points)?;
    let loss = |contention: &Contention| -> f64 {
        let cluster = cluster.contended(ranks, *contention);
        points.iter().map(|point| miss(shape, &cluster, constants, point)).sum()
    };
    let range = [
        fitted(|c: &mut Contention| &mut c.slowdown, 1.0, 10.0 * ranks as f64),
        fitted(|c: &mut Contention| &mut c.wait, 1e-9, 1e-1),
    ];
    Ok(descend(Contention { slowdown: ranks as f64, wait: 1e-6 }, &range, loss))
}

/// Minimises the loss by coordinate descent on a logarithmic scale, starting from `best`.
fn descend<T: Copy>(mut best: T, range: &[Fitted<T>], loss: impl Fn(&T) -> f64) -> T {
    // Clamped, because a factor could never change a value of 0.
    for Fitted { of: value, low, high } in range {
        let value = value(&mut best);
        *value = value.clamp(*low, *high);
    }
    let mut least = loss(&best);
    let mut factor = FIRST_FACTOR;
    for _ in 0..MAX_ROUNDS {
        let before = least;
        for Fitted { of: value, low, high } in range {
            for by in [factor, 1.0 / factor] {
                let mut tried = best;
                let value = value(&mut tried);
                *value = (*value * by).clamp(*low, *high);
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
    best
}

fn check(points: &[StepPoint]) -> Result<(), PlanError> {
    if points.is_empty() || points.len() > MAX_POINTS {
        let expected = "1 to 4096";
        return Err(PlanError::Value { what: "the number of measured steps", found: points.len() as f64, expected });
    }
    for point in points {
        positive("the seconds of a measured step", point.seconds)?;
        point.experts.map(|seconds| positive("the measured seconds of the experts", seconds)).transpose()?;
    }
    Ok(())
}

fn miss(shape: &ModelShape, cluster: &Cluster, constants: &Constants, point: &StepPoint) -> f64 {
    let terms = step(&Target { shape, cluster, layout: point.layout, constants }, &point.work);
    let square = |predicted: f64, measured: f64| (predicted / measured).ln().powi(2);
    let experts = point.experts.map_or(0.0, |measured| square(terms[Part::Experts].max(1e-12), measured));
    square(terms.total(), point.seconds) + experts
}

/// Computes the prediction errors on these steps.
///
/// # Errors
/// [`PlanError::Value`] if there are no steps, or a time is not positive.
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
    use crate::tests::fixtures::{h200, layout, qwen3_235b};

    /// Steps generated by the model with other constants are predicted again, also in a layout that was not measured.
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

    /// Contention measured in one layout predicts steps of another.
    #[test]
    fn contention_is_found_again() {
        let text =
            "gpu = \"H200\"\n[[levels]]\nname = \"shm\"\ncount = 4\nbandwidth_gb_per_second = 5\nlatency_us = 3\n";
        let table = |operator: &str| {
            format!(
                "[[measured]]\nlevel = \"shm\"\noperator = \"{operator}\"\nranks = 4\n\
                 points = [{{ bytes = 1000, us = 10 }}, {{ bytes = 1e9, us = 4e5 }}]\n"
            )
        };
        let text =
            ["scatter", "all_reduce", "all_to_all"].iter().fold(text.to_owned(), |text, name| text + &table(name));
        let (shape, cluster) = (qwen3_235b(), Cluster::from_toml("c", &text).unwrap());
        let (truth, constants) = (Contention { slowdown: 2.5, wait: 3e-4 }, Constants::uncalibrated());
        let contended = cluster.contended(4, truth);
        let point = |layout, sequences, tokens| {
            let work = Work { sequences, tokens, cached: 500.0 };
            let seconds =
                step(&Target { shape: &shape, cluster: &contended, layout, constants: &constants }, &work).total();
            StepPoint { layout, work, seconds, experts: None }
        };
        let seen = [(4.0, 1.0), (400.0, 1.0), (4.0, 2000.0)]
            .map(|(sequences, tokens)| point(layout(1, [1, 4], [1, 4]), sequences, tokens));
        let found = fit_contention(&shape, &cluster, &constants, &seen, 4).unwrap();
        let others =
            [(32.0, 1.0), (1.0, 700.0)].map(|(sequences, tokens)| point(layout(1, [4, 1], [4, 1]), sequences, tokens));
        let errors = errors(&shape, |_| cluster.contended(4, found), &constants, &others).unwrap();
        assert!(errors.mean < 0.02, "{errors:?} {found:?}");
        // Without it predictions are far off, and other numbers of ranks are unaffected.
        assert!(super::errors(&shape, |_| cluster.clone(), &constants, &others).unwrap().mean > 0.3);
        assert!((contended.measured.collectives[0].seconds(1000.0) - (10e-6 + 3e-4)).abs() < 1e-12);
        assert_eq!(cluster.contended(2, truth).measured, cluster.measured);
        assert!(fit_contention(&shape, &cluster, &constants, &[], 4).is_err());
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
            vec![good; MAX_POINTS + 1],
        ] {
            assert!(fit(&shape, &cluster, &start, &points).is_err());
        }
    }
}
