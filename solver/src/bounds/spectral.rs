//! B1, the spectral bound.

use super::frame::{AboutMean, Frame};

/// No placement keeps more activations local than this; its derivation is in the README beside this file.
pub(super) fn spectral(frame: &Frame<'_>) -> f64 {
    let AboutMean { centre, top, .. } = frame.about_mean();
    let columns = frame.columns_of_group();
    // By the trace norm, |R| <= sqrt(capacity); by the Frobenius norm, |R (1 - J)|^2 <= (1 - 1/E) S.
    let capacity = frame.capacity();
    let trace = (capacity * columns).sqrt() * top.iter().map(|value| value.max(0.0).sqrt()).sum::<f64>();
    let sum: f64 = top.iter().map(|value| value.max(0.0)).sum();
    let frobenius = (frame.rest() * frame.mass * columns * sum).sqrt();
    let value = frame.activations / frame.groups as f64 + frame.centre_cost(&centre) + trace.min(frobenius);
    value * (1.0 + frame.rounding())
}
