//! The Pareto front of speed per user against throughput per GPU.

use serde::Serialize;

use super::{Candidate, Operating};
use crate::layout::Layout;

/// A point that no other point dominates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FrontPoint {
    /// The layout's degrees.
    pub layout: Layout,
    /// Number of units.
    pub units: u64,
    /// Number of GPUs in the cluster.
    pub gpus: u64,
    /// Requests in flight per unit.
    pub concurrency: f64,
    /// Tokens per second that one user receives.
    pub user_tokens_per_second: f64,
    /// Tokens per second that one GPU generates.
    pub gpu_tokens_per_second: f64,
    /// Seconds to the first token.
    pub ttft: f64,
}

impl FrontPoint {
    pub(super) fn of(candidate: &Candidate, at: &Operating, gpus: u64) -> Self {
        Self {
            layout: candidate.layout,
            units: candidate.units,
            gpus,
            concurrency: at.concurrency,
            user_tokens_per_second: 1.0 / at.itl,
            gpu_tokens_per_second: at.tokens_per_second_per_gpu,
            ttft: at.ttft,
        }
    }
}

/// Returns the Pareto-optimal points, fastest per user first.
pub fn front(mut points: Vec<FrontPoint>) -> Vec<FrontPoint> {
    points.retain(|point| point.user_tokens_per_second.is_finite() && point.gpu_tokens_per_second.is_finite());
    points.sort_by(|a, b| {
        let faster = b.user_tokens_per_second.total_cmp(&a.user_tokens_per_second);
        faster.then(b.gpu_tokens_per_second.total_cmp(&a.gpu_tokens_per_second))
    });
    let mut most = 0.0;
    points.retain(|point| {
        let beats = point.gpu_tokens_per_second > most;
        most = point.gpu_tokens_per_second.max(most);
        beats
    });
    points
}
