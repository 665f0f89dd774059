//! The search: every strategy on every size of unit, its operating points, a ranked list and the Pareto front.
//!
//! | module | what |
//! |---|---|
//! | `operate` | rate, TTFT and ITL of one layout by its requests in flight |
//! | `front` | the Pareto front |
//!
//! A unit is a power of two of GPUs; as many units as fit share the requests evenly. Within a unit the strategies are
//! the grammar's ([`strategies`], TP inside). With latency limits the best plan serves the most requests within them;
//! without any it is the fastest at the workload's rate.

mod front;
mod operate;
#[cfg(test)]
mod tests;

pub use front::{FrontPoint, front};
pub use operate::{Operating, Served};
use serde::Serialize;

use crate::PlanError;
use crate::cluster::Cluster;
use crate::layout::{Infeasible, Layout};
use crate::memory::Memory;
use crate::mixserve::strategies;
use crate::shape::ModelShape;
use crate::step::{Constants, StepTerms, Target};
use crate::workload::Workload;

/// The subject of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// GPUs and links.
    pub cluster: &'a Cluster,
    /// Requests of all units together.
    pub workload: &'a Workload,
    /// The engine's constants.
    pub constants: &'a Constants,
}

impl<'a> Question<'a> {
    /// The model on the cluster in this layout.
    pub(crate) fn target(&self, layout: Layout) -> Target<'a> {
        Target { shape: self.shape, cluster: self.cluster, layout, constants: self.constants }
    }

    /// The memory of a GPU in this layout.
    pub(crate) fn memory(&self, layout: &Layout) -> Result<Memory, Infeasible> {
        let usable = self.cluster.gpu.memory * self.constants.memory_share;
        Memory::of(self.shape, layout, usable, self.constants.step_tokens)
    }
}

/// A layout that runs the model and serves the workload's rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The layout's degrees.
    pub layout: Layout,
    /// Units side by side.
    pub units: u64,
    /// Memory of the fullest GPU.
    pub memory: Memory,
    /// The operating point at the workload's rate.
    pub at_load: Operating,
    /// Whether that operating point meets all latency limits.
    pub within_limits: bool,
    /// The operating point at the highest rate within all limits; `None` if even a single request in flight exceeds
    /// them.
    pub best: Option<Operating>,
    /// The parts of a decoding step at the workload's rate.
    pub decode: StepTerms,
    /// The parts of the prefill of one prompt.
    pub prefill: StepTerms,
}

/// A layout that cannot be used, and the reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rejected {
    /// The layout's degrees.
    pub layout: Layout,
    /// Units side by side.
    pub units: u64,
    /// The reason.
    #[serde(flatten)]
    pub reason: Infeasible,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Best first.
    pub ranked: Vec<Candidate>,
    /// Layouts that cannot be used.
    pub rejected: Vec<Rejected>,
    /// Throughput against speed, over all candidates and all rates.
    pub front: Vec<FrontPoint>,
    /// Number of strategies considered, over all unit sizes.
    pub strategies: usize,
}

/// Considers every strategy.
///
/// # Errors
/// [`PlanError::Value`] for invalid constants. If nothing fits, that is not an error: everything is in `rejected`.
pub fn search(question: &Question<'_>) -> Result<Plan, PlanError> {
    question.constants.check()?;
    let gpus = question.cluster.gpus();
    let mut plan = Plan { ranked: Vec::new(), rejected: Vec::new(), front: Vec::new(), strategies: 0 };
    let mut points = Vec::new();
    for exponent in 0..=gpus.ilog2() {
        let unit = 1 << exponent;
        for layout in strategies(unit) {
            plan.strategies += 1;
            match candidate(question, layout, gpus / unit) {
                Ok((candidate, curve)) => {
                    points.extend(curve.iter().map(|at| FrontPoint::of(&candidate, at, gpus)));
                    plan.ranked.push(candidate);
                }
                Err(reason) => plan.rejected.push(Rejected { layout, units: gpus / unit, reason }),
            }
        }
    }
    let limited = limited(question.workload);
    plan.ranked.sort_by(|a, b| order(a, limited).total_cmp(&order(b, limited)).then(a.layout.cmp(&b.layout)));
    plan.front = front(points);
    Ok(plan)
}

/// Whether there are any latency limits.
pub(crate) fn limited(workload: &Workload) -> bool {
    let objectives = workload.classes.iter().map(|class| class.objective).chain([workload.objective]);
    objectives.into_iter().any(|objective| objective.ttft.is_some() || objective.itl.is_some())
}

/// Sort key; lower is better.
pub(crate) fn order(candidate: &Candidate, limited: bool) -> f64 {
    let rate = candidate.best.map_or(0.0, |best| best.requests_per_second);
    match (limited, candidate.within_limits) {
        (true, true) => -rate,
        // After all layouts within the limits, by how far they exceed them.
        (true, false) => 1.0 + candidate.at_load.request_seconds,
        (false, _) => candidate.at_load.request_seconds,
    }
}

/// A layout in `units` equal units, and its operating points.
pub(crate) fn candidate(
    question: &Question<'_>,
    layout: Layout,
    units: u64,
) -> Result<(Candidate, Vec<Operating>), Infeasible> {
    layout.check(question.shape)?;
    let memory = question.memory(&layout)?;
    let served = Served::new(question.target(layout), question.workload, units, &memory)?;
    let at_load = served.at_rate(question.workload.requests_per_second)?;
    let curve = served.curve();
    let within = |at: &&Operating| served.within_limits(at);
    let most = |a: &&Operating, b: &&Operating| a.requests_per_second.total_cmp(&b.requests_per_second);
    let best = curve.iter().filter(within).max_by(most).copied();
    let candidate = Candidate {
        layout,
        units,
        memory,
        at_load,
        within_limits: served.within_limits(&at_load),
        best,
        decode: served.decode(at_load.concurrency),
        prefill: served.prefill(),
    };
    Ok((candidate, curve))
}
