//! One start of the alternation: unit step, expert step, unit step, ... until neither gains, then swaps, and again.

use crate::expert_step::expert_step;
use crate::held::Held;
use crate::home::Home;
use crate::load_limit::group_loads;
use crate::problem::Problem;
use crate::replicate::replicas_not_reached;
use crate::seeds::seed_plan;
use crate::spectral::spectral_plan;
use crate::swaps::swap_pass;
use crate::topology::Topology;
use crate::transport::{Plan, Transport};
use crate::unit_step::{PROFIT_ONE, unit_step, weighed_profits};

/// Gets a start's progress, and may end it.
#[derive(Clone, Copy)]
pub(crate) struct Watch<'a> {
    /// Sees every improvement.
    pub(crate) reached: &'a dyn Fn(&Clustering),
    /// Asked about once a second at the latest, also inside long steps.
    pub(crate) stop: &'a dyn Fn() -> bool,
}

/// Steps that gain less than this fraction of all activations end the alternation.
const MIN_GAIN: f64 = 1e-7;

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
    /// Experts per group and layer with replicas; none without.
    pub(crate) slots: Option<usize>,
    /// How the groups lie to each other.
    pub(crate) topology: Topology,
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
    /// With replicas, all groups of each column; `group_of` is the first of them.
    pub(crate) replicas: Option<Held>,
    /// The cost of the experts that left their groups, in a solve that started from tables; in the unit of the plan's
    /// value.
    pub(crate) penalty: i128,
}

impl Clustering {
    /// Without replicas, and without a price on moves.
    pub(crate) fn whole(problem: &Problem, group_of: Vec<u16>, plan: Plan, limits: Limits, iterations: u32) -> Self {
        let load_excess = load_excess(problem, &group_of, limits);
        Clustering { group_of, plan, load_excess, iterations, replicas: None, penalty: 0 }
    }

    /// Local activations (with nodes their values) less what the moves cost.
    fn worth(&self) -> i128 {
        self.plan.primal - self.penalty
    }

    /// Whether this is the better result: less excess first, then more local activations.
    pub(crate) fn beats(&self, other: &Clustering) -> bool {
        (other.load_excess, self.worth()) > (self.load_excess, other.worth())
    }

    /// Whether the gain over `other` is too small to go on.
    pub(crate) fn hardly_beats(&self, other: &Clustering, problem: &Problem) -> bool {
        let gain = local_rate(self.worth() - other.worth(), problem);
        gain < MIN_GAIN && self.load_excess == other.load_excess
    }

    /// The same with group g called `label[g]`.
    pub(crate) fn renamed(self, label: &[u16]) -> Self {
        let rename = |group: &mut u16| *group = label[usize::from(*group)];
        let Clustering { mut group_of, mut plan, .. } = self;
        group_of.iter_mut().chain(&mut plan.label).for_each(rename);
        for split in &mut plan.splits {
            split.parts.iter_mut().for_each(|part| rename(&mut part.0));
            split.parts.sort_unstable();
        }
        let before = plan.price.clone();
        before.iter().zip(label).for_each(|(&price, &group)| plan.price[usize::from(group)] = price);
        Clustering { group_of, plan, ..self }
    }
}

/// A plan's value as a fraction of all activations: the local rate where only the own group has a value.
pub(crate) fn local_rate(value: i128, problem: &Problem) -> f64 {
    value as f64 / PROFIT_ONE / problem.total_activations() as f64
}

/// A problem to cluster.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) problem: &'a Problem,
    /// [G] tokens that each group may take.
    pub(crate) capacity: &'a [u64],
    pub(crate) limits: Limits,
    /// Where the experts are, if moves cost something.
    pub(crate) home: Option<&'a Home>,
}

/// A start under way.
struct Start<'a> {
    task: Task<'a>,
    watch: Watch<'a>,
    iterations: u32,
}

/// Runs one start to its end, whatever the home, or until the watch stops it: then the best so far is returned, `None`
/// before the first round of both steps is done.
pub(crate) fn run_start(task: Task<'_>, random: &mut fastrand::Rng, watch: Watch<'_>) -> Option<Clustering> {
    let seed = seed_plan(task.problem, task.capacity, random, watch.stop)?;
    run_seeded(task, &seed, watch)
}

/// The same from a spectral seed.
pub(crate) fn run_spectral_start(task: Task<'_>, random: &mut fastrand::Rng, watch: Watch<'_>) -> Option<Clustering> {
    let seed = spectral_plan(&task, random, watch.stop)?;
    run_seeded(task, &seed, watch)
}

fn run_seeded(task: Task<'_>, seed: &Plan, watch: Watch<'_>) -> Option<Clustering> {
    let mut start = Start { task: Task { home: None, ..task }, watch, iterations: 0 };
    let group_of = expert_step(task.problem, seed, &task.limits, None, None);
    let first = start.unit_step(group_of, None)?;
    Some(start.search(first))
}

/// Runs the start that begins where the experts are.
pub(crate) fn run_from_home(task: Task<'_>, watch: Watch<'_>) -> Option<Clustering> {
    let mut start = Start { task, watch, iterations: 0 };
    let first = start.unit_step(task.home?.group_of().to_vec(), None)?;
    Some(start.search(first))
}

/// A start's result, which knew nothing of where the experts are, once more with what their moves cost: its groups are
/// renamed so that the fewest move, then both steps and the swaps go on from there. Without a home it is the result.
pub(crate) fn bring_home(task: Task<'_>, found: Clustering, watch: Watch<'_>) -> Clustering {
    let Some(home) = task.home else { return found };
    Start { task, watch, iterations: found.iterations }.search(home.relabelled(found, &task.limits))
}

/// The exact unit step where the experts are, and nothing else.
pub(crate) fn stay(task: Task<'_>) -> Clustering {
    let plan = |transport: Transport<'_>| transport.solve(None);
    task.as_it_is(plan, 1)
}

/// Swaps alone, from a clustering that is already there: at least as good.
pub(crate) fn improve(task: Task<'_>, best: Clustering, watch: Watch<'_>) -> Clustering {
    let mut start = Start { task, watch, iterations: 0 };
    let best = start.swap(best);
    Clustering { iterations: start.iterations, ..best }
}

/// The fallback for a problem that no start has reached before the stop: units by descending mass on the best group
/// with room, prices of zero (which prove a bound, if a weak one).
pub(crate) fn not_reached(task: Task<'_>) -> Clustering {
    let found = task.as_it_is(|transport| transport.greedy(), 0);
    match task.limits.slots {
        Some(slots) => replicas_not_reached(task, slots, &found),
        None => found,
    }
}

impl Task<'_> {
    /// The units assigned by `plan`, with experts where they are, else contiguous.
    fn as_it_is(&self, plan: impl Fn(Transport<'_>) -> Plan, iterations: u32) -> Clustering {
        let Task { problem, capacity, limits, home } = *self;
        let each = problem.experts / limits.groups;
        let contiguous = || (0..problem.column_load.len()).map(|at| (at % problem.experts / each) as u16).collect();
        let group_of: Vec<u16> = home.map_or_else(contiguous, |home| home.group_of().to_vec());
        let profit = weighed_profits(problem, &group_of, limits.groups, limits.topology);
        let plan = plan(Transport { mass: &problem.mass, profit: &profit, capacity });
        Clustering::whole(problem, group_of, plan, limits, iterations)
    }
}

impl Start<'_> {
    /// Both steps in turn, then swaps, from `first` on.
    fn search(mut self, first: Clustering) -> Clustering {
        let best = self.alternate(first);
        let best = self.swap(best);
        Clustering { iterations: self.iterations, ..best }
    }

    fn unit_step(&mut self, group_of: Vec<u16>, price: Option<&[i64]>) -> Option<Clustering> {
        if (self.watch.stop)() {
            return None;
        }
        self.iterations += 1;
        let Task { problem, limits, home, .. } = self.task;
        let plan = unit_step(&self.task, &group_of, price, self.watch.stop)?;
        let penalty = home.map_or(0, |home| home.penalty(&group_of));
        Some(Clustering { penalty, ..Clustering::whole(problem, group_of, plan, limits, self.iterations) })
    }

    /// Swap passes, each followed by both steps, until they gain no more.
    fn swap(&mut self, mut best: Clustering) -> Clustering {
        for _ in 0..self.task.limits.swap_passes {
            let swapped = swap_pass(&self.task, &best.group_of, &best.plan.price, self.watch.stop);
            let Some(swapped) = swapped.and_then(|group_of| self.unit_step(group_of, Some(&best.plan.price))) else {
                break;
            };
            let swapped = self.alternate(swapped);
            if !swapped.beats(&best) {
                break;
            }
            best = swapped;
        }
        best
    }

    /// Both steps in turn until they gain no more.
    fn alternate(&mut self, best: Clustering) -> Clustering {
        let (Task { problem, limits, home, .. }, watch) = (self.task, self.watch);
        alternate(problem, limits, watch, best, |best| {
            if (watch.stop)() {
                return None;
            }
            let group_of = expert_step(problem, &best.plan, &limits, home, Some(&best.group_of));
            if group_of == best.group_of {
                return None;
            }
            self.unit_step(group_of, Some(&best.plan.price))
        })
    }
}

/// Takes steps until one gains nothing, or too little to go on.
pub(crate) fn alternate(
    problem: &Problem,
    limits: Limits,
    watch: Watch<'_>,
    mut best: Clustering,
    mut step: impl FnMut(&Clustering) -> Option<Clustering>,
) -> Clustering {
    for _ in 0..limits.iterations {
        (watch.reached)(&best);
        let Some(next) = step(&best).filter(|next| next.beats(&best)) else { break };
        let settled = next.hardly_beats(&best, problem);
        best = next;
        if settled {
            break;
        }
    }
    (watch.reached)(&best);
    best
}

/// Activations of a layer above the cap.
pub(crate) fn excess(loads: &[u64], cap: u64) -> u64 {
    loads.iter().map(|load| load.saturating_sub(cap)).sum()
}

/// Activations by which groups exceed their load cap, all layers.
fn load_excess(problem: &Problem, group_of: &[u16], limits: Limits) -> u64 {
    let layers = group_of.chunks_exact(problem.experts).zip(problem.column_load.chunks_exact(problem.experts));
    layers
        .map(|(group_of, load)| {
            let cap = crate::expert_step::layer_cap(load, limits.groups, limits.max_over_mean);
            excess(&group_loads(group_of, load, limits.groups), cap)
        })
        .sum()
}
