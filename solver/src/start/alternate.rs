//! Runs one start: alternates the unit step and the expert step until neither gains, then makes swaps, then repeats.

use crate::start::replicate::replicas_not_reached;
use crate::start::seeds::seed_plan;
use crate::start::spectral::spectral_plan;
use crate::step::{Clustering, Plan, Stop, Task, Transport, expert_step, swap_pass, unit_step, weighed_profits};

/// Observes the progress of a start and may stop it.
#[derive(Clone, Copy)]
pub(crate) struct Watch<'a> {
    /// Called on every improvement.
    pub(crate) reached: &'a dyn Fn(&Clustering),
    /// Polled at least once a second, including inside long steps.
    pub(crate) stop: Stop<'a>,
}

/// A start in progress.
struct Start<'a> {
    task: Task<'a>,
    watch: Watch<'a>,
    iterations: u32,
}

/// Runs one start, ignoring the current placement, until it is complete or the watch stops it. Returns the best
/// clustering so far, or `None` if the first round of both steps has not finished. `spectral`: whether to begin with a
/// spectral seed.
pub(crate) fn run_start(
    task: Task<'_>,
    spectral: bool,
    random: &mut fastrand::Rng,
    watch: Watch<'_>,
) -> Option<Clustering> {
    let seed = match spectral {
        true => spectral_plan(&task, random, watch.stop)?,
        false => seed_plan(task.problem, task.capacity, random, watch.stop)?,
    };
    let mut start = Start { task: Task { placement: None, ..task }, watch, iterations: 0 };
    let group_of = expert_step(task.problem, &seed, &task.limits, None, None, watch.stop)?;
    let first = start.unit_step(group_of, None)?;
    Some(start.search(first))
}

/// Runs the start that begins at the current placement.
pub(crate) fn run_from_current(task: Task<'_>, watch: Watch<'_>) -> Option<Clustering> {
    let mut start = Start { task, watch, iterations: 0 };
    let first = start.unit_step(task.placement?.group_of.clone(), None)?;
    Some(start.search(first))
}

/// Continues from the result of a start that ignored the current placement, now including the cost of moves: relabels
/// its groups so that the fewest experts move, then runs both steps and the swaps. Without a current placement, returns
/// the result unchanged.
pub(crate) fn bring_home(task: Task<'_>, found: Clustering, watch: Watch<'_>) -> Clustering {
    let Some(placement) = task.placement else { return found };
    Start { task, watch, iterations: found.iterations }.search(placement.relabelled(found, &task.limits, watch.stop))
}

/// Runs both steps and the swaps from a clustering whose plan was made with the task's sequence prices.
pub(crate) fn search_on(task: Task<'_>, from: Clustering, watch: Watch<'_>) -> Clustering {
    Start { task, watch, iterations: from.iterations }.search(from)
}

/// Runs only the exact unit step on the current placement.
pub(crate) fn stay(task: Task<'_>) -> Clustering {
    task.as_it_is(|transport| transport.solve(None), 1)
}

/// Runs only swaps, from an existing clustering; the result is at least as good.
pub(crate) fn improve(task: Task<'_>, best: Clustering, watch: Watch<'_>) -> Clustering {
    let mut start = Start { task, watch, iterations: 0 };
    let best = start.swap(best);
    Clustering { iterations: start.iterations, ..best }
}

/// Fallback for a problem that no start reached before the solve was stopped: assigns units by descending mass to the
/// best group with room, with zero prices (which prove a bound, although a weak one).
pub(crate) fn not_reached(task: Task<'_>) -> Clustering {
    let found = task.as_it_is(|transport| transport.greedy(), 0);
    match task.limits.slots {
        Some(slots) => replicas_not_reached(task, slots, &found),
        None => found,
    }
}

impl Task<'_> {
    /// Assigns the units with `plan`, and the experts to their current placement or, without one, in contiguous blocks.
    fn as_it_is(&self, plan: impl Fn(Transport<'_>) -> Plan, iterations: u32) -> Clustering {
        let Task { problem, capacity, limits, placement, .. } = *self;
        let each = problem.experts.div_ceil(limits.groups);
        let contiguous = || (0..problem.column_load.len()).map(|at| (at % problem.experts / each) as u16).collect();
        let group_of: Vec<u16> = placement.map_or_else(contiguous, |placement| placement.group_of.clone());
        let profit = weighed_profits(problem, &group_of, limits.groups, limits.topology);
        let plan = plan(Transport { mass: &problem.mass, profit: &profit, capacity });
        Clustering::whole(problem, group_of, plan, limits, iterations)
    }
}

impl Start<'_> {
    /// Alternates both steps and swaps, starting from `first`.
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
        let Task { problem, limits, placement, .. } = self.task;
        let plan = unit_step(&self.task, &group_of, price, self.watch.stop)?;
        let penalty = placement.map_or(0, |placement| placement.penalty(&group_of));
        let sequences = self.task.sequences.clone();
        Some(Clustering { penalty, sequences, ..Clustering::whole(problem, group_of, plan, limits, self.iterations) })
    }

    /// Repeats swap passes, each followed by both steps, until a pass gains nothing.
    fn swap(&mut self, best: Clustering) -> Clustering {
        while_better(self.task.limits.swap_passes, best, |best| {
            let group_of = swap_pass(&self.task, &best.group_of, &best.plan.price, self.watch.stop)?;
            let swapped = self.unit_step(group_of, Some(&best.plan.price))?;
            Some(self.alternate(swapped))
        })
    }

    /// Alternates both steps until a round gains nothing.
    fn alternate(&mut self, best: Clustering) -> Clustering {
        let (Task { problem, limits, placement, .. }, watch) = (self.task, self.watch);
        alternate(self.task, watch, best, |best| {
            if (watch.stop)() {
                return None;
            }
            let group_of = expert_step(problem, &best.plan, &limits, placement, Some(&best.group_of), watch.stop)?;
            if group_of == best.group_of {
                return None;
            }
            self.unit_step(group_of, Some(&best.plan.price))
        })
    }
}

/// Repeats steps until one gains nothing, or too little to continue.
pub(crate) fn alternate(
    task: Task<'_>,
    watch: Watch<'_>,
    mut best: Clustering,
    mut step: impl FnMut(&Clustering) -> Option<Clustering>,
) -> Clustering {
    for _ in 0..task.limits.iterations {
        (watch.reached)(&best);
        let Some(next) = step(&best).filter(|next| next.beats(&best)) else { break };
        let settled = next.hardly_beats(&best, task.problem);
        best = next;
        if settled {
            break;
        }
    }
    (watch.reached)(&best);
    best
}

/// Repeats passes until one gains nothing.
pub(crate) fn while_better(
    passes: u32,
    mut best: Clustering,
    mut pass: impl FnMut(&Clustering) -> Option<Clustering>,
) -> Clustering {
    for _ in 0..passes {
        let Some(next) = pass(&best).filter(|next| next.beats(&best)) else { break };
        best = next;
    }
    best
}
