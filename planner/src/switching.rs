//! Switching a running unit between TP and EP layouts: how long it takes, what it needs, when it pays (Moebius,
//! ParaSMoE).

use serde::Serialize;

use crate::PlanError;
use crate::error::positive;

/// Seconds in which `ranks` of one node switch layouts: `(P - 1) / P W / B + max KV ingress / B + sync`. `weights` are
/// the bytes of experts of one rank, `cache` the bytes received by the rank that receives most of the cache.
///
/// Also applies to N nodes of P GPUs that switch from one EP unit to one TP unit each: `M beta (N - 1) / (N P B)`
/// (ParaSMoE, equation 6), where N is the ranks, `M beta / P` the weights and B the rate of one GPU between nodes.
/// Switching back moves nothing between nodes: every node has everything.
pub fn switch_seconds(ranks: u64, weights: f64, cache: f64, bytes_per_second: f64, sync: f64) -> f64 {
    let moved = (ranks.max(1) - 1) as f64 / ranks.max(1) as f64 * weights;
    (moved + cache) / bytes_per_second + sync
}

/// Spare memory of a switch relative to the memory of the experts: `slots` spare slots of one layer each, over `layers`
/// (Moebius 1 / K with one, ParaSMoE 2 / K with two).
pub fn memory_overhead(slots: u64, layers: u64) -> f64 {
    slots as f64 / layers.max(1) as f64
}

/// Seconds of a decoding step by number of sequences, in both layouts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepPair {
    /// Sequences of the unit.
    pub sequences: f64,
    /// Seconds with slices of experts.
    pub tp: f64,
    /// Seconds with whole experts.
    pub ep: f64,
}

/// The number of sequences at which the layouts cost the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Crossing {
    /// TP is faster below, EP above this many sequences (B*).
    At(f64),
    /// TP is faster at all points.
    AboveAll,
    /// EP is faster at all points.
    BelowAll,
}

/// B*, interpolated linearly between measured points in ascending order; the last crossing counts.
///
/// # Errors
/// [`PlanError::Value`] without points, for an invalid time, or if they do not ascend.
pub fn crossing(points: &[StepPair]) -> Result<Crossing, PlanError> {
    let wrong =
        |found| PlanError::Value { what: "a measured step", found, expected: "times above 0, sequences rising" };
    let Some(last) = points.last() else { return Err(wrong(0.0)) };
    for point in points {
        positive("the sequences of a step", point.sequences)?;
        positive("the seconds of a step", point.tp.min(point.ep))?;
    }
    if let Some(pair) = points.windows(2).find(|pair| pair[0].sequences >= pair[1].sequences) {
        return Err(wrong(pair[1].sequences));
    }
    let gap = |point: &StepPair| point.ep - point.tp;
    let falls = points.windows(2).rev().find(|pair| gap(&pair[0]) > 0.0 && gap(&pair[1]) <= 0.0);
    if gap(last) > 0.0 {
        return Ok(Crossing::AboveAll);
    }
    let Some(pair) = falls else { return Ok(Crossing::BelowAll) };
    let share = gap(&pair[0]) / (gap(&pair[0]) - gap(&pair[1]));
    Ok(Crossing::At(pair[0].sequences + share * (pair[1].sequences - pair[0].sequences)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::ModelShape;
    use crate::tests::fixtures::qwen3_235b;

    fn near(found: f64, expected: f64, error: f64) {
        assert!((found - expected).abs() <= error, "{found}, expected {expected}");
    }

    /// One layer's experts on one of 8 ranks.
    fn slot_bytes(shape: &ModelShape) -> f64 {
        (shape.experts * shape.expert_parameters()) as f64 * shape.precision.experts.bytes() / 8.0
    }

    #[test]
    fn golden_switches() {
        let shape = qwen3_235b();
        let weights = shape.routed_parameters() as f64 * 2.0 / 8.0;
        assert_eq!(slot_bytes(&shape), 603_979_776.0);
        for (bandwidth, milliseconds) in [(280e9, 177.4), (315e9, 157.7), (450e9, 110.4)] {
            near(switch_seconds(8, weights, 0.0, bandwidth, 0.0) * 1e3, milliseconds, 0.05);
        }
        near(switch_seconds(8, weights, 28e9, 280e9, 0.01) * 1e3, 177.4 + 100.0 + 10.0, 0.05);
        for (nodes, seconds) in [(2, 0.5875), (u64::MAX, 1.175)] {
            near(switch_seconds(nodes, 235e9 * 2.0 / 8.0, 0.0, 50e9, 0.0), seconds, 1e-9);
        }
        near(0.5875 / 0.7, 0.84, 0.001);
        for (slots, layers, percent) in [(1, 94, 1.064), (2, 94, 2.13), (2, 60, 3.33)] {
            near(memory_overhead(slots, layers) * 100.0, percent, 0.005);
        }
        // Graham's bound for longest-first assignment to 8 ranks, which Moebius states for bin packing.
        near(4.0 / 3.0 - 1.0 / (3.0 * 8.0), 1.2917, 1e-4);
    }

    /// The review's own figures: equation 10 with the other model's H and I, its slot without the down projection, its
    /// bandwidth.
    #[test]
    fn golden_errors_of_the_review() {
        near(128.0 * 3.0 * 2048.0 * 7168.0 * 94.0 / 8.0 * 2.0 / 1e9, 132.5, 0.05);
        let slot = slot_bytes(&qwen3_235b());
        near(slot * 2.0 / 3.0 / 1e6, 402.7, 0.05);
        near(slot / 1e6, 604.0, 0.05);
        near(switch_seconds(8, 60e9, 0.0, 280e9, 0.0) * 1e3, 187.5, 1e-9);
        near(slot * 94.0 * 7.0 / 8.0 / 0.152 / 1e9, 327.0, 0.3);
        near(2.8e9 / (0.85 * 141e9) * 100.0, 2.34, 0.005);
    }

    /// Decode steps of Qwen3-235B on 8 H200 at context 1024, ms, from the measured tables of NVIDIA's aiconfigurator
    /// (Apache-2.0), rounded to 0.1 ms and thinned, so B* is off by up to 5%.
    #[test]
    fn golden_crossings() {
        let sequences = [8.0, 64.0, 256.0, 512.0, 2048.0];
        let engines = [
            ([11.7, 25.7, 36.0, 47.0, 105.9], [19.5, 25.1, 33.2, 39.4, 73.1], Some(58.0)),
            ([12.2, 21.4, 32.6, 41.6, 96.2], [19.9, 27.4, 34.9, 41.5, 90.6], Some(496.0)),
            ([11.5, 21.8, 31.1, 39.8, 97.2], [18.3, 29.6, 39.6, 49.9, 106.0], None),
        ];
        for (tp, ep, expected) in engines {
            let points: Vec<StepPair> =
                (0..5).map(|at| StepPair { sequences: sequences[at], tp: tp[at], ep: ep[at] }).collect();
            match (crossing(&points).unwrap(), expected) {
                (Crossing::At(found), Some(expected)) => near(found / expected, 1.0, 0.05),
                (found, None) => assert_eq!(found, Crossing::AboveAll),
                (found, expected) => panic!("{found:?}, expected {expected:?}"),
            }
        }
        assert!(crossing(&[]).is_err());
    }
}
