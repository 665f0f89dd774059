//! One start of the alternation: unit step, expert step, unit step, ... until neither gains, then swaps, and again.

use crate::expert_step::expert_step;
use crate::load_limit::group_loads;
use crate::problem::Problem;
use crate::seeds::seed_plan;
use crate::swaps::swap_pass;
use crate::transport::Plan;
use crate::unit_step::{PROFIT_ONE, unit_step};

/// Steps that gain less than this fraction of all activations end the alternation.
const LEAST_GAIN: f64 = 1e-7;

/// Swap passes are left out where one would compare more than this many values (a few seconds).
const MOST_SWAP_WORK: u64 = 1 << 31;

/// Limits of a start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) groups: usize,
    /// Greatest activations of a group over the layer's mean.
    pub(crate) max_over_mean: f64,
    /// Most rounds of unit and expert step.
    pub(crate) iterations: u32,
    /// Most swap passes.
    pub(crate) swap_passes: u32,
}

/// A placement, the exact unit plan for it, and their value.
#[derive(Clone, Debug)]
pub(crate) struct Clustering {
    /// [L * N] group of each column.
    pub(crate) group_of: Vec<u16>,
    pub(crate) plan: Plan,
    /// Activations by which groups exceed their load cap, all layers; zero = limit met.
    pub(crate) load_excess: u64,
    /// Unit steps made on the way.
    pub(crate) iterations: u32,
}

impl Clustering {
    /// Whether this is the better result: less excess first, then more local activations.
    pub(crate) fn beats(&self, other: &Clustering) -> bool {
        (other.load_excess, self.plan.primal) > (self.load_excess, other.plan.primal)
    }
}

/// A plan's value as a fraction of all activations.
pub(crate) fn local_rate(value: i128, problem: &Problem) -> f64 {
    value as f64 / PROFIT_ONE / problem.total_activations() as f64
}

/// A start under way.
struct Start<'a> {
    problem: &'a Problem,
    capacity: &'a [u64],
    limits: Limits,
    observe: &'a dyn Fn(&Clustering) -> bool,
    iterations: u32,
}

/// Runs one start to its end. `observe` sees every improvement and answers whether to go on; a stopped start returns
/// the best so far, which is at least one round of both steps.
pub(crate) fn run_start(
    problem: &Problem,
    capacity: &[u64],
    limits: Limits,
    random: &mut fastrand::Rng,
    observe: &dyn Fn(&Clustering) -> bool,
) -> Clustering {
    let mut start = Start { problem, capacity, limits, observe, iterations: 0 };
    let seed = seed_plan(problem, capacity, random);
    let group_of = expert_step(problem, &seed, limits.groups, limits.max_over_mean, None);
    let first = start.unit_step(group_of, None);
    let mut best = start.alternate(first);
    let passes = if swap_work(problem, limits.groups) > MOST_SWAP_WORK { 0 } else { limits.swap_passes };
    for _ in 0..passes {
        if !observe(&best) {
            break;
        }
        let stop = || !observe(&best);
        let Some(group_of) = swap_pass(problem, &best.group_of, &best.plan.price, limits.max_over_mean, &stop) else {
            break;
        };
        let swapped = start.unit_step(group_of, Some(&best.plan.price));
        let swapped = start.alternate(swapped);
        if !swapped.beats(&best) {
            break;
        }
        best = swapped;
    }
    Clustering { iterations: start.iterations, ..best }
}

/// Values that a swap pass compares: every pair of experts of a layer reads the entries of both.
fn swap_work(problem: &Problem, groups: usize) -> u64 {
    (problem.entries() as u64).saturating_mul(problem.experts as u64).saturating_mul(groups as u64)
}

impl Start<'_> {
    fn unit_step(&mut self, group_of: Vec<u16>, price: Option<&[i64]>) -> Clustering {
        self.iterations += 1;
        let (plan, _) = unit_step(self.problem, &group_of, self.capacity, price);
        let load_excess = load_excess(self.problem, &group_of, self.limits);
        Clustering { group_of, plan, load_excess, iterations: self.iterations }
    }

    /// Both steps in turn until they gain no more.
    fn alternate(&mut self, mut best: Clustering) -> Clustering {
        for _ in 0..self.limits.iterations {
            if !(self.observe)(&best) {
                break;
            }
            let Limits { groups, max_over_mean, .. } = self.limits;
            let group_of = expert_step(self.problem, &best.plan, groups, max_over_mean, Some(&best.group_of));
            if group_of == best.group_of {
                break;
            }
            let next = self.unit_step(group_of, Some(&best.plan.price));
            if !next.beats(&best) {
                break;
            }
            let gain = local_rate(next.plan.primal - best.plan.primal, self.problem);
            let settled = gain < LEAST_GAIN && next.load_excess == best.load_excess;
            best = next;
            if settled {
                break;
            }
        }
        best
    }
}

/// Activations by which groups exceed their load cap, all layers.
pub(crate) fn load_excess(problem: &Problem, group_of: &[u16], limits: Limits) -> u64 {
    let layers = group_of.chunks_exact(problem.experts).zip(problem.column_load.chunks_exact(problem.experts));
    layers
        .map(|(group_of, load)| {
            let cap = crate::expert_step::load_cap(load.iter().sum(), limits.groups, limits.max_over_mean);
            let loads = group_loads(group_of, load, limits.groups);
            loads.iter().map(|load| load.saturating_sub(cap)).sum::<u64>()
        })
        .sum()
}
