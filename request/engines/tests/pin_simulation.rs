//! Verification of pins against simulated engines: it finds those that ignore pins, and accuses no honest one.
//!
//! Time is simulated. Clients send requests in a closed loop of streams; probes run between them. A rank counts a
//! request at the end of the step in which it finished, so each count is up to one step old. Rounds, schedule,
//! comparison of counts and verdict are the library's; [`Simulation::read`] replaces the engine.

#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

use semmoe_engines::verify::{
    Comparison, CounterCheck, Counters, Evidence, Observation, PinWatch, Pins, ProbePlan, Schedule,
};

/// Maximum time that requests wait for the first rounds of a new backend.
const FIRST_LOOK: f64 = 3.0;
/// Tokens in a client's answer.
const ANSWER_TOKENS: f64 = 16.0;

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
struct Setting {
    ranks: u16,
    /// Concurrent client streams.
    streams: f64,
    /// Length of a step, in seconds.
    step: f64,
    /// Fraction of pinned requests that run on a random rank.
    ignored: f64,
    /// One-token prompts sent by other clients, per second.
    others: f64,
    /// Answers name the rank, like SGLang's; otherwise counters have to.
    answers: bool,
}

/// One engine with its verification.
struct Simulation {
    setting: Setting,
    random: fastrand::Rng,
    now: f64,
    /// One-token requests included in all readings from now on, by rank.
    settled: Vec<u64>,
    /// When each further one appears in the counts of its rank.
    counted: Vec<(f64, usize)>,
    next_other: f64,
    watch: PinWatch,
    schedule: Schedule,
    other_clients_seen: u64,
}

impl Simulation {
    fn new(setting: Setting, seed: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        let (watch, schedule) = (PinWatch::default(), Schedule::default());
        let next_other = if setting.others > 0.0 { 0.0 } else { f64::INFINITY };
        let settled = vec![0; usize::from(setting.ranks)];
        let counted = Vec::new();
        Self { setting, random, now: 0.0, settled, counted, next_other, watch, schedule, other_clients_seen: 0 }
    }

    /// Number of client requests sent so far.
    fn requests(&self) -> f64 {
        let rate = self.setting.streams / (ANSWER_TOKENS * self.setting.step);
        (self.now - FIRST_LOOK).max(0.0) * rate
    }

    fn advance(&mut self, seconds: f64) {
        self.now += seconds;
        while self.next_other <= self.now {
            let rank = self.random.usize(..usize::from(self.setting.ranks));
            self.counted.push((self.next_other + self.random.f64() * self.setting.step, rank));
            self.next_other += -(1.0 - self.random.f64()).ln() / self.setting.others;
        }
    }

    /// Current counts by rank.
    fn read(&self) -> Vec<u64> {
        let mut counts = self.settled.clone();
        for (_, rank) in self.counted.iter().filter(|(at, _)| *at <= self.now) {
            counts[*rank] += 1;
        }
        counts
    }

    fn settle(&mut self) {
        self.settled = self.read();
        self.counted.retain(|(at, _)| *at > self.now);
    }

    /// Runs a probe on its rank or elsewhere; returns whether on its rank.
    fn probe(&mut self, pinned: usize) -> bool {
        let strays = self.random.f64() < self.setting.ignored;
        let rank = if strays { self.random.usize(..usize::from(self.setting.ranks)) } else { pinned };
        let runs = self.setting.step * (1.0 + self.random.f64());
        self.advance(runs);
        self.counted.push((self.now + self.random.f64() * self.setting.step, rank));
        rank == pinned
    }

    /// One round, as in `verify::probe`.
    fn round(&mut self) -> Option<Observation> {
        let plan = ProbePlan::round(self.schedule.rounds(), self.setting.ranks);
        let mut counters = Counters::new(self.read(), &plan.per_rank).unwrap();
        let hits = plan.ranks().filter(|rank| self.probe(usize::from(rank.get()))).count() as u64;
        if self.setting.answers {
            let contradicted = plan.probes() - hits;
            return Some(Observation { evidence: Evidence::Probe, agreed: hits, contradicted });
        }
        loop {
            match counters.check(&self.read()) {
                CounterCheck::Again(pause) => self.advance(pause.as_secs_f64()),
                CounterCheck::Done(Comparison::Exact { agreed, contradicted }) => {
                    return Some(Observation { evidence: Evidence::Counter, agreed, contradicted });
                }
                CounterCheck::Done(found) => {
                    self.other_clients_seen += u64::from(found == Comparison::OtherClients);
                    return None;
                }
            }
        }
    }

    /// Runs until `limit` client requests were sent, or pins count as ignored; returns how many were sent by then.
    fn run(&mut self, limit: f64) -> Option<f64> {
        while self.requests() < limit {
            self.step();
            if self.watch.pins == Pins::Ignored {
                return Some(self.requests());
            }
        }
        None
    }

    /// Waits for a round, and runs it.
    fn step(&mut self) {
        let due = self.requests() + self.schedule.requests(&self.watch, self.setting.ranks) as f64;
        self.advance(self.schedule.pause(&self.watch).as_secs_f64());
        while self.requests() < due {
            self.advance(self.setting.step);
        }
        self.settle();
        let seen = self.round();
        self.schedule.ended(seen.is_some());
        if let Some(seen) = seen {
            self.watch.observe(seen);
        }
    }
}

fn settings(random: &mut fastrand::Rng) -> Setting {
    let ranks = [2, 2, 4, 8, 16][random.usize(..5)];
    let step = 0.005 * 100_f64.powf(random.f64());
    Setting { ranks, streams: 8.0, step, ignored: 0.0, others: 0.0, answers: random.bool() }
}

/// A million requests over engines with steps of 5 to 500 ms, with and without other clients.
#[test]
fn honest_engines_are_never_accused() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut requests = 0.0;
    let mut rounds = 0;
    for seed in 0..200 {
        let others = [0.0, 0.0, 0.1, 1.0, 10.0][random.usize(..5)];
        let mut engine = Simulation::new(Setting { others, ..settings(&mut random) }, seed);
        assert_eq!(engine.run(5_000.0), None, "{:?}", engine.setting);
        assert_eq!(engine.watch.contradicted, 0, "{:?}", engine.setting);
        if others == 0.0 || engine.setting.answers {
            assert_eq!(engine.watch.pins, Pins::Honoured, "{:?}", engine.setting);
        }
        requests += engine.requests();
        rounds += engine.schedule.rounds();
    }
    assert!(requests >= 1e6 && rounds > 2_000, "{requests} requests, {rounds} rounds");
}

/// Engines that ignore all, half or a tenth of the pins, with semmoe as their only client.
#[test]
fn engines_that_ignore_pins_are_found() {
    for (ignored, within) in [(1.0, 200.0), (0.5, 400.0), (0.1, 2_000.0)] {
        let mut random = fastrand::Rng::with_seed(2);
        for seed in 0..1_000 {
            let mut engine = Simulation::new(Setting { ignored, ..settings(&mut random) }, seed);
            let found = engine.run(within);
            assert!(found.is_some(), "{ignored} ignored, seed {seed}, {:?}: {:?}", engine.setting, engine.watch);
        }
    }
}

/// An engine that reads pins again, e.g. after a proxy was fixed, is trusted again after some requests.
#[test]
fn there_is_a_way_back() {
    for seed in 0..50 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut engine = Simulation::new(Setting { ignored: 1.0, ..settings(&mut random) }, seed);
        assert!(engine.run(200.0).is_some());
        engine.setting.ignored = 0.0;
        let from = engine.requests();
        while engine.watch.pins == Pins::Ignored {
            engine.step();
            assert!(engine.requests() - from < 5_000.0, "{:?}", engine.watch);
        }
        assert_eq!(engine.watch.pins, Pins::Honoured);
    }
}

/// Totals that include other clients' requests give no verdict, and the reason is reported.
#[test]
fn other_clients_make_totals_inconclusive() {
    for ignored in [0.0, 1.0] {
        for seed in 0..20 {
            let setting = Setting { ranks: 2, streams: 8.0, step: 0.02, ignored, others: 20.0, answers: false };
            let mut engine = Simulation::new(setting, seed);
            assert_eq!(engine.run(2_000.0), None, "seed {seed}: {:?}", engine.watch);
            assert!(engine.other_clients_seen > 0);
            assert_ne!(engine.watch.pins, Pins::Ignored);
        }
    }
}
