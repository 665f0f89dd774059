//! Runs many starts on several threads and keeps the best: the result does not depend on the number of threads.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use semmoe_tables::mix64;

use crate::input::{Problem, SolveError, SolveOptions};
use crate::start::alternate::{Watch, bring_home, improve, not_reached, run_from_current, run_start};
use crate::start::replicate::{improve_replicas, kick_replicas, replicate};
use crate::start::sequences::balance_sequences;
use crate::start::spectral::has_spectral;
use crate::step::{Clustering, CurrentPlacement, FREE, Limits, Task, local_rate, mass_capacity};

/// Progress of a solve, passed to the caller's closure, which may stop the solve with `ControlFlow::Break`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SolveProgress {
    /// Number of finished starts, out of `starts` (over all layers with attention tp; including kicks with replicas).
    pub starts_done: usize,
    /// Total number of starts to run.
    pub starts: usize,
    /// Best local activation rate on the input so far (with nodes, the optimized value), over the layers that have a
    /// result; `None` before the first round.
    pub best_lar: Option<f64>,
}

/// Called with the progress so far; a break stops the search.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(SolveProgress) -> ControlFlow<()>;

/// The best clustering of each problem.
#[derive(Default)]
pub(crate) struct Best {
    pub(crate) clusterings: Vec<Clustering>,
    /// Number of unit steps over all starts.
    pub(crate) iterations: u64,
    /// Maximum starts of any problem.
    pub(crate) starts: u32,
    /// Maximum kicks of any problem.
    pub(crate) kicks: u32,
    /// Number of problems that no start had reached before the stop.
    pub(crate) not_reached: usize,
    /// Whether the caller stopped the solve early.
    pub(crate) stopped: bool,
}

/// A phase of the search. It begins after the previous phase has finished, so its starting point does not depend on
/// thread timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Starts,
    /// Kicks from the best result of the previous phase, with its experts perturbed.
    Kicks,
    /// Swap passes on the best result only.
    LastSwaps,
}

/// State shared by the threads. Jobs are ordered by start, then by problem, so that every problem has a result early.
struct Shared<'a> {
    problems: &'a [Problem],
    /// The problems with empty slots added, for starts without replicas if the groups do not divide the experts;
    /// otherwise empty.
    padded: Vec<Problem>,
    capacities: Vec<Vec<u64>>,
    limits: Limits,
    /// The current placement for each problem, in a warm-started solve.
    placements: Option<&'a [CurrentPlacement]>,
    seed: u64,
    phase: Phase,
    /// Number of jobs in all phases so far.
    jobs: usize,
    next_job: AtomicUsize,
    stop: AtomicBool,
    best: Mutex<Vec<Option<Kept>>>,
    /// The best results of the previous phases.
    base: Vec<Option<Kept>>,
    iterations: AtomicUsize,
}

/// The best clustering of a problem, and the start that found it.
#[derive(Clone)]
struct Kept {
    clustering: Clustering,
    start: usize,
}

enum Event {
    /// A start of this problem has reached this value (fixed-point local activations).
    Reached {
        problem: usize,
        value: i128,
    },
    /// A start is running; gives the caller a chance to stop it.
    Working,
    Done,
}

/// Limit on the work of all starts, about half a minute; each start reads every count about forty times.
const MAX_STARTED: u64 = 800_000_000;

/// Cost of a unit's profit, in counts. It exceeds one because the unit step keeps profits in heaps.
const COUNTS_PER_PROFIT: u64 = 8;

/// With replicas, one in this many starts is run; kicks, which are shorter, replace the others.
const STARTS_PER_START: u32 = 4;
/// Number of kicks that replace a start.
const KICKS_PER_START: u32 = 2;
/// Number of kicks from one clustering, of which the best is kept.
const KICKS_AT_ONCE: u32 = 4;

/// Once the number of counts times groups reaches this, swaps are searched only for the best start.
const LARGE: u64 = 1 << 27;

/// Limit on counts times groups times passes in the swap search for the best start.
const MAX_VALUES_SWAPPED: u64 = 1 << 31;

/// The numbers of requested starts and swap passes to run. The rule depends only on sizes, so the result is the same on
/// every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Schedule {
    starts: u32,
    /// Rounds of [`KICKS_AT_ONCE`] kicks after the starts.
    kick_rounds: u32,
    /// Swap passes of every start.
    passes: u32,
    /// Swap passes for the best start of each problem, after all starts.
    last_passes: u32,
}

impl Schedule {
    /// Returns the phases in order, with the number of jobs per problem.
    fn phases(self) -> Vec<(Phase, u32)> {
        let mut phases = vec![(Phase::Starts, self.starts)];
        phases.extend((0..self.kick_rounds).map(|_| (Phase::Kicks, KICKS_AT_ONCE)));
        phases.extend((self.last_passes > 0).then_some((Phase::LastSwaps, 1)));
        phases
    }

    /// Schedules `starts` starts of problems with this many counts and units in total.
    fn new(entries: u64, units: u64, starts: u32, limits: &Limits) -> Self {
        let (groups, passes, replicas) = (limits.groups, limits.swap_passes, limits.slots.is_some());
        let values = entries.max(1).saturating_mul(groups as u64);
        let work = entries.max(1) + units * groups as u64 * COUNTS_PER_PROFIT;
        let at_most =
            |asked: u32, budget: u64, each: u64| asked.min((budget / each).clamp(1, u64::from(u32::MAX)) as u32);
        let most = at_most(starts, MAX_STARTED, work);
        let starts = if replicas { most.div_ceil(STARTS_PER_START) } else { most };
        let kick_rounds = (most - starts) * KICKS_PER_START / KICKS_AT_ONCE;
        let (passes, last_passes) = match values > LARGE {
            true => (0, at_most(passes, MAX_VALUES_SWAPPED, values)),
            false => (passes, 0),
        };
        Schedule { starts, kick_rounds, passes, last_passes }
    }
}

/// Runs the starts of every problem, or as many as the size allows, and one from the current placement if given.
pub(crate) fn run_starts(
    problems: &[Problem],
    options: &SolveOptions,
    limits: Limits,
    placements: Option<&[CurrentPlacement]>,
    progress: Progress<'_>,
) -> Result<Best, SolveError> {
    let entries = problems.iter().map(|problem| problem.entries() as u64).sum();
    let units = problems.iter().map(|problem| problem.units() as u64).sum();
    let schedule = Schedule::new(entries, units, options.starts, &limits);
    let capacity = |problem: &Problem| mass_capacity(problem.total_mass(), limits.groups, options.token_margin);
    let mut shared = Shared {
        problems,
        padded: padded(problems, &limits)?,
        capacities: problems.iter().map(capacity).collect(),
        limits: Limits { swap_passes: schedule.passes, ..limits },
        placements,
        seed: options.seed,
        phase: Phase::Starts,
        jobs: 0,
        next_job: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        best: Mutex::new(vec![None; problems.len()]),
        base: vec![None; problems.len()],
        iterations: AtomicUsize::new(0),
    };
    let phases = schedule.phases();
    let jobs = problems.len() * phases.iter().map(|&(_, each)| each as usize).sum::<usize>();
    let mut progress_so_far = SolveProgress { starts_done: 0, starts: jobs, best_lar: None };
    let mut reached = vec![None; problems.len()];
    for (phase, each) in phases {
        shared.begin(phase, each as usize);
        if phase == Phase::LastSwaps {
            shared.limits.swap_passes = schedule.last_passes;
        }
        shared.run_jobs(options.threads, &mut reached, &mut progress_so_far, progress);
    }
    Ok(shared.into_best(schedule))
}

fn padded(problems: &[Problem], limits: &Limits) -> Result<Vec<Problem>, SolveError> {
    let slots = |problem: &Problem| problem.experts.next_multiple_of(limits.groups);
    let uneven = problems.iter().filter(|problem| limits.slots.is_some() && slots(problem) > problem.experts);
    uneven.map(|problem| problem.clone().padded(slots(problem))).collect()
}

fn mean_rate(problems: &[Problem], reached: &[Option<i128>]) -> Option<f64> {
    let pairs = problems.iter().zip(reached);
    let rates: Vec<f64> = pairs.filter_map(|(problem, value)| Some(local_rate((*value)?, problem))).collect();
    (!rates.is_empty()).then(|| rates.iter().sum::<f64>() / rates.len() as f64)
}

impl Shared<'_> {
    /// Begins a phase with this many jobs for each problem.
    fn begin(&mut self, phase: Phase, each: usize) {
        self.base.clone_from(self.best.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.phase = phase;
        self.next_job = AtomicUsize::new(self.jobs);
        self.jobs += each * self.problems.len();
    }

    /// Runs the remaining jobs on threads, and reports their messages to the caller.
    fn run_jobs(
        &self,
        threads: usize,
        reached: &mut [Option<i128>],
        progress_so_far: &mut SolveProgress,
        progress: Progress<'_>,
    ) {
        let (sender, events) = channel();
        std::thread::scope(|scope| {
            for _ in 0..threads.min(self.jobs) {
                let sender = sender.clone();
                scope.spawn(move || self.work(&sender));
            }
            drop(sender);
            for event in events {
                match event {
                    Event::Reached { problem, value } => reached[problem] = reached[problem].max(Some(value)),
                    Event::Working => {}
                    Event::Done => progress_so_far.starts_done += 1,
                }
                progress_so_far.best_lar = mean_rate(self.problems, reached);
                if progress(*progress_so_far).is_break() {
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
        });
    }

    fn into_best(mut self, schedule: Schedule) -> Best {
        let best = std::mem::take(self.best.get_mut().unwrap_or_else(PoisonError::into_inner));
        let without = best.iter().filter(|best| best.is_none()).count();
        let of_problem =
            |(at, best): (usize, Option<Kept>)| best.map_or_else(|| not_reached(self.task(at)), |best| best.clustering);
        let clusterings = best.into_iter().enumerate().map(of_problem).collect();
        Best {
            clusterings,
            iterations: self.iterations.into_inner() as u64,
            starts: schedule.starts,
            kicks: schedule.kick_rounds * KICKS_AT_ONCE,
            not_reached: without,
            stopped: self.stop.into_inner(),
        }
    }

    fn work(&self, events: &Sender<Event>) {
        loop {
            let job = self.next_job.fetch_add(1, Ordering::Relaxed);
            let (start, problem) = (job / self.problems.len(), job % self.problems.len());
            if job >= self.jobs || self.stop.load(Ordering::Relaxed) {
                return;
            }
            self.run(problem, start, events);
        }
    }

    fn run(&self, problem: usize, start: usize, events: &Sender<Event>) {
        // The receiver outlives the threads, so a send error can be ignored.
        let reached = |clustering: &Clustering| {
            let _ = events.send(Event::Reached { problem, value: clustering.local() });
        };
        let stop = || {
            let _ = events.send(Event::Working);
            self.stop.load(Ordering::Relaxed)
        };
        let watch = Watch { reached: &reached, stop: &stop };
        let task = self.task(problem);
        let balanced = |found: Clustering| match self.limits.sequences {
            Some(margins) => balance_sequences(task, margins, found, watch),
            None => found,
        };
        // The start from the current placement runs first, so that a solve that is stopped early moves few experts.
        if start == 0
            && let Some(found) = run_from_current(task, watch)
        {
            self.keep(problem, start, balanced(found));
        }
        let mut random = fastrand::Rng::with_seed(mix(self.seed, problem as u64, start as u64));
        let base = self.base[problem].as_ref().map(|kept| &kept.clustering);
        let placed = self.padded.get(problem).map_or(task, |problem| Task { problem, ..task });
        let mut run_start = || run_start(placed, start == 0 && has_spectral(placed.problem), &mut random, watch);
        let found = match (self.phase, self.limits.slots) {
            (Phase::Starts, None) => run_start().map(|found| balanced(bring_home(task, found, watch))),
            (Phase::Starts, Some(slots)) => run_start()
                .and_then(|found| replicate(task, slots, &found, watch))
                .map(|found| improve_replicas(task, slots, found, watch)),
            (Phase::Kicks, None) => None,
            (Phase::Kicks, Some(slots)) => base.and_then(|base| kick_replicas(task, slots, base, &mut random, watch)),
            (Phase::LastSwaps, None) => {
                base.map(|base| improve(Task { sequences: &base.sequences, ..task }, base.clone(), watch))
            }
            (Phase::LastSwaps, Some(slots)) => base.map(|base| improve_replicas(task, slots, base.clone(), watch)),
        };
        if let Some(found) = found {
            self.keep(problem, start, found);
        }
        let _ = events.send(Event::Done);
    }

    fn task(&self, problem: usize) -> Task<'_> {
        let (capacity, placement) = (&self.capacities[problem], self.placements.map(|placements| &placements[problem]));
        Task { problem: &self.problems[problem], capacity, limits: self.limits, placement, sequences: &FREE }
    }

    /// Keeps the better result, or that of the earlier start on ties, regardless of the order of arrival.
    fn keep(&self, problem: usize, start: usize, found: Clustering) {
        self.iterations.fetch_add(found.iterations as usize, Ordering::Relaxed);
        let mut best = self.best.lock().unwrap_or_else(PoisonError::into_inner);
        let better = best[problem].as_ref().is_none_or(|known| {
            found.beats(&known.clustering) || (!known.clustering.beats(&found) && start < known.start)
        });
        if better {
            best[problem] = Some(Kept { clustering: found, start });
        }
    }
}

/// Derives a seed for each start of each problem.
pub(crate) fn mix(seed: u64, problem: u64, start: u64) -> u64 {
    mix64(seed ^ problem.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ start.wrapping_mul(0xd1b5_4a32_d192_ed03))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(groups: usize, slots: Option<usize>) -> Limits {
        let topology = crate::step::topology::Topology::flat(groups);
        Limits { groups, max_over_mean: 1.1, iterations: 60, swap_passes: 12, slots, topology, sequences: None }
    }

    #[test]
    fn large_problems_get_fewer_starts_and_late_swaps() {
        let schedule = |entries, units, groups| Schedule::new(entries, units, 32, &limits(groups, None));
        let small = schedule(600_000, 3000, 8);
        assert_eq!(small, Schedule { starts: 32, kick_rounds: 0, passes: 12, last_passes: 0 });
        let large = schedule(50_000_000, 100_000, 8);
        assert!(
            (2..32).contains(&large.starts) && large.passes == 0 && (1..12).contains(&large.last_passes),
            "{large:?}"
        );
        let huge = schedule(u64::MAX / 4096, 1 << 24, 64);
        assert_eq!(huge, Schedule { starts: 1, kick_rounds: 0, passes: 0, last_passes: 1 });
    }

    #[test]
    fn with_replicas_most_starts_become_kicks() {
        let phases = |entries, units, starts| Schedule::new(entries, units, starts, &limits(8, Some(4))).phases();
        let usual = phases(600_000, 3000, 32);
        assert_eq!(usual[..2], [(Phase::Starts, 8), (Phase::Kicks, 4)]);
        assert_eq!(usual.len(), 13);
        assert_eq!(phases(600_000, 3000, 1), [(Phase::Starts, 1)]);
        assert_eq!(phases(u64::MAX / 4096, 1 << 24, 32), [(Phase::Starts, 1), (Phase::LastSwaps, 1)]);
    }
}
