//! Many starts over several threads, the best kept: the result does not depend on the number of threads.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use crate::alternate::{Clustering, Limits, run_start};
use crate::problem::Problem;
use crate::unit_step::mass_capacity;

/// How far a solve has come; given to the caller's closure, which may end the solve with `ControlFlow::Break`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SolveProgress {
    /// Starts ended, of `starts` (with attention tp those of all layers together).
    pub starts_done: usize,
    /// Starts to be made.
    pub starts: usize,
    /// Best local activation rate on the input so far, of the layers that have one; none before the first round.
    pub best_lar: Option<f64>,
}

/// The best clustering of each problem.
pub(crate) struct Best {
    pub(crate) clusterings: Vec<Clustering>,
    /// Unit steps made in all starts.
    pub(crate) iterations: u64,
    /// Whether the caller ended it early.
    pub(crate) stopped: bool,
}

/// Shared by the threads. Jobs are ordered by start, then problem, so that every problem has a result early.
struct Shared<'a> {
    problems: &'a [Problem],
    capacities: Vec<Vec<u64>>,
    limits: Limits,
    seed: u64,
    jobs: usize,
    next_job: AtomicUsize,
    stop: AtomicBool,
    best: Mutex<Vec<Option<(Clustering, usize)>>>,
    iterations: AtomicUsize,
}

enum Event {
    /// A start of this problem has reached this value (fixed-point local activations).
    Reached(usize, i128),
    Done,
}

/// Runs `starts` starts of every problem.
pub(crate) fn run_starts(
    problems: &[Problem],
    limits: Limits,
    (token_margin, seed): (f64, u64),
    (starts, threads): (u32, usize),
    progress: &mut dyn FnMut(SolveProgress) -> ControlFlow<()>,
) -> Best {
    let jobs = problems.len() * starts as usize;
    let capacity = |problem: &Problem| mass_capacity(problem.total_mass(), limits.groups, token_margin);
    let shared = Shared {
        problems,
        capacities: problems.iter().map(capacity).collect(),
        limits,
        seed,
        jobs,
        next_job: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        best: Mutex::new(vec![None; problems.len()]),
        iterations: AtomicUsize::new(0),
    };
    let (sender, events) = channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs) {
            let (shared, sender) = (&shared, sender.clone());
            scope.spawn(move || shared.work(&sender));
        }
        drop(sender);
        let mut reached: Vec<Option<i128>> = vec![None; problems.len()];
        let mut starts_done = 0;
        for event in events {
            match event {
                Event::Reached(problem, value) => reached[problem] = reached[problem].max(Some(value)),
                Event::Done => starts_done += 1,
            }
            let best_lar = mean_rate(problems, &reached);
            if progress(SolveProgress { starts_done, starts: jobs, best_lar }).is_break() {
                shared.stop.store(true, Ordering::Relaxed);
            }
        }
    });
    let best = shared.best.into_inner().unwrap_or_else(PoisonError::into_inner);
    Best {
        clusterings: best.into_iter().flatten().map(|(clustering, _)| clustering).collect(),
        iterations: shared.iterations.into_inner() as u64,
        stopped: shared.stop.into_inner(),
    }
}

fn mean_rate(problems: &[Problem], reached: &[Option<i128>]) -> Option<f64> {
    let rates = problems.iter().zip(reached).filter_map(|(problem, value)| {
        let value = (*value)?;
        Some(crate::alternate::local_rate(value, problem))
    });
    let rates: Vec<f64> = rates.collect();
    (!rates.is_empty()).then(|| rates.iter().sum::<f64>() / rates.len() as f64)
}

impl Shared<'_> {
    fn work(&self, events: &Sender<Event>) {
        loop {
            let job = self.next_job.fetch_add(1, Ordering::Relaxed);
            let (start, problem) = (job / self.problems.len(), job % self.problems.len());
            // The first start of each problem gives it a result, however early the stop.
            if job >= self.jobs || (start > 0 && self.stop.load(Ordering::Relaxed)) {
                return;
            }
            self.run(problem, start, events);
        }
    }

    fn run(&self, problem: usize, start: usize, events: &Sender<Event>) {
        let observe = |clustering: &Clustering| {
            // The receiver outlives the threads; were it gone, there would be nobody to tell.
            let _ = events.send(Event::Reached(problem, clustering.plan.primal));
            !self.stop.load(Ordering::Relaxed)
        };
        let mut random = fastrand::Rng::with_seed(mix(self.seed, problem as u64, start as u64));
        let capacity = &self.capacities[problem];
        let found = run_start(&self.problems[problem], capacity, self.limits, &mut random, &observe);
        self.iterations.fetch_add(found.iterations as usize, Ordering::Relaxed);
        self.keep(problem, start, found);
        let _ = events.send(Event::Done);
    }

    /// Keeps the better result, of equals the one of the earlier start, in whatever order they arrive.
    fn keep(&self, problem: usize, start: usize, found: Clustering) {
        let mut best = self.best.lock().unwrap_or_else(PoisonError::into_inner);
        let better = best[problem]
            .as_ref()
            .is_none_or(|(known, known_start)| found.beats(known) || (!known.beats(&found) && start < *known_start));
        if better {
            best[problem] = Some((found, start));
        }
    }
}

/// A seed for each start of each problem (the finaliser of SplitMix64).
pub(crate) fn mix(seed: u64, problem: u64, start: u64) -> u64 {
    let mut x = seed ^ problem.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ start.wrapping_mul(0xd1b5_4a32_d192_ed03);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
