//! Thousands of random schedules of requests, failures and operators: the real queue, gates, breakers, leases and
//! retries, with engines and clients whose every move a seed decides. Nothing is sent and no clock is waited for.
//!
//! A schedule is one order of events. After every event that leaves all requests waiting or running, no request may
//! wait for a rank that would take it. At the end every request has one outcome and nothing is counted as in flight.
//! Faults planted in the use of the parts prove that the checks detect them.
//!
//! Some requests are poison: every engine answers them with an error, which opens no breaker. Now and then one engine
//! answers everything with an error, and loses its share.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use http::{HeaderMap, HeaderValue};
use semmoe_engines::failures::Failure;
use semmoe_engines::probe::Probe;
use semmoe_engines::{Dialect, Engine, Route, pin};

use super::attempts::{Attempts, Next};
use super::{DataPlane, Job, Placed, Record, RetryReason, Ticket, read};
use crate::backends::breaker::State;
use crate::backends::{Aside, Backend, Health, Model, RequestError, RequestId};
use crate::config::Config;
use crate::data::trust::Caller;
use crate::observe::Metrics;

const LIMIT: u32 = 2;
const MAX_REQUESTS: usize = 12;
const STEPS: usize = 80;
/// Fewer than the times a request may be read again, so that each can follow all of them.
const MAX_SWITCHES: usize = 6;
/// Consecutive errors that open a breaker.
const ERRORS: u32 = 4;
const POISON: &str = r#"{"model":"m","prompt":"poison"}"#;
const BREAKER_TIME: Duration = Duration::from_secs(3600);

/// A fault in the use of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// A client that leaves without returning its lease.
    LeakedLease,
    /// A lease that is returned without freeing its room.
    NoRoom,
    /// A trial that never ends.
    ForgottenTrial,
    /// An end of a drain that the pool does not learn of.
    SilentUndrain,
    /// A failed probe that the pool does not learn of.
    SilentFailure,
    /// Requests that cannot be told apart.
    AllEqual,
    /// Requests that are never equal.
    NoneEqual,
    /// Successful answers that are not compared with others' errors.
    NotCompared,
}

/// An engine's decision on a request.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    Goes,
    /// It answers with an error.
    Errs,
    Fails(RetryReason),
}

#[derive(Default)]
enum Stage {
    #[default]
    Waiting,
    /// On an engine, with its decision once made.
    Running { member: usize, verdict: Option<Verdict> },
}

/// The state of one request, shared with its task.
#[derive(Default)]
struct Progress {
    stage: RefCell<Stage>,
    attempts: Cell<usize>,
}

impl Progress {
    async fn verdict(&self, member: usize) -> Verdict {
        *self.stage.borrow_mut() = Stage::Running { member, verdict: None };
        let verdict = std::future::poll_fn(|_| match &mut *self.stage.borrow_mut() {
            Stage::Running { verdict, .. } => verdict.take().map_or(Poll::Pending, Poll::Ready),
            Stage::Waiting => Poll::Pending,
        });
        let verdict = verdict.await;
        *self.stage.borrow_mut() = Stage::Waiting;
        verdict
    }
}

/// A backend whose answer is on its way.
struct Answering {
    backend: Arc<Backend>,
    member: usize,
    errs: bool,
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Task {
    work: Pin<Box<dyn Future<Output = Result<(), RequestError>>>>,
    woken: Arc<Woken>,
    progress: Rc<Progress>,
    pin: Option<u16>,
    is_poison: bool,
}

struct World {
    plane: Arc<DataPlane>,
    random: RefCell<Rng>,
    fault: Option<Fault>,
    /// Requests so far.
    arrived: Cell<u64>,
    /// Index of the backend that answers everything with an error.
    sick: Cell<Option<usize>>,
    /// Errors answered so far.
    errors: Cell<u32>,
    tasks: RefCell<Vec<Task>>,
}

fn config() -> Config {
    let backends = ["a", "b", "c"].map(|name| {
        format!("[[models.backends]]\nname = \"{name}\"\nengine = \"sglang\"\nurl = \"http://{name}\"\nranks = 2\n")
    });
    let text = format!(
        "[[models]]\nname = \"m\"\npolicy = \"least_load\"\n{}[queue]\nmax_in_flight = {LIMIT}\nmax_queued = 8\n\
         max_wait_seconds = 30.0\nwait_for_backend_seconds = 10.0\n[routing]\ntrust_client_pins = true\n\
         [breaker]\nfailures = 1\nerrors = {ERRORS}\nopen_seconds = 3600.0\nlongest_seconds = 3600.0\ntrials = 1\n\
         [retry]\nbudget_ratio = 1.0\n",
        backends.concat()
    );
    Config::from_toml(&text, std::path::Path::new("")).unwrap()
}

fn probe(ranks: u16) -> Probe {
    Probe {
        server: None,
        version: None,
        dp_size: Some(ranks),
        doubt: None,
        dialect: Dialect::of(Engine::Sglang, None),
        unknown_rank_base: false,
        placement: Err(semmoe_engines::sglang::Unseen::Unreported),
        max_model_len: None,
        other_model: None,
        rendering: None,
    }
}

impl World {
    fn new(seed: u64, fault: Option<Fault>) -> Rc<Self> {
        let metrics = Metrics::new();
        let snapshot = crate::shell::load::snapshot(&Arc::new(config()), &metrics).unwrap();
        let plane = crate::shell::control::Control::new(snapshot, metrics, None).data;
        let random = RefCell::new(Rng::with_seed(seed));
        let (arrived, sick, errors) = Default::default();
        Rc::new(Self { plane, random, fault, arrived, sick, errors, tasks: RefCell::default() })
    }

    fn below(&self, most: usize) -> usize {
        self.random.borrow_mut().usize(..most)
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn model(&self) -> Arc<Model> {
        Arc::clone(&self.plane.backends.snapshot().models[0])
    }

    fn backend(&self) -> Arc<Backend> {
        Arc::clone(&self.model().members[self.below(3)].backend)
    }

    fn arrive(self: &Rc<Self>, is_poison: bool) {
        let pin = Some(self.below(8) as u16).filter(|pin| *pin < 2);
        let progress = Rc::<Progress>::default();
        let number = self.arrived.get();
        let text = if is_poison { POISON.to_owned() } else { format!(r#"{{"model":"m","prompt":"{number}"}}"#) };
        let work = Box::pin(Rc::clone(self).serve(pin, text.into(), Rc::clone(&progress)));
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.tasks.borrow_mut().push(Task { work, woken, progress, pin, is_poison });
    }

    /// A request from its arrival to its last byte.
    async fn serve(self: Rc<Self>, pin: Option<u16>, body: Bytes, progress: Rc<Progress>) -> Result<(), RequestError> {
        self.arrived.set(self.arrived.get() + 1);
        let (plane, route) = (&self.plane, Route::Completions);
        let mut headers = HeaderMap::new();
        let record = Record::new(RequestId::of(&mut headers), Some(route));
        headers.extend(pin.map(|pin| (pin::HEADER, HeaderValue::from(pin))));
        let (mut ticket, mut before) = (Ticket::new(Arc::clone(plane), record), None);
        let answering = loop {
            let job = read::read(plane, route, &headers, Caller::default(), body.clone(), before.as_ref()).await?;
            if before.is_none() {
                job.model.budget.request(Instant::now());
            }
            ticket.record.read(&job.model, 1, false);
            match self.answer(&job, &mut ticket, &progress).await? {
                Some(answering) => break answering,
                None => before = Some(job),
            }
        };
        if answering.errs {
            ticket.complete(&answering.backend, 500);
            return Ok(());
        }
        // The head is out; the answer may still break off.
        match progress.verdict(answering.member).await {
            Verdict::Goes if self.has(Fault::NotCompared) => ticket.finish(200),
            Verdict::Goes => ticket.complete(&answering.backend, 200),
            Verdict::Errs => {
                ticket.erred(&answering.backend);
                ticket.finish(502);
            }
            Verdict::Fails(_) => {
                ticket.failed(&answering.backend);
                ticket.finish(502);
            }
        }
        Ok(())
    }

    /// Attempts until one gets an answer; returns its backend. `None` if the model's backends have changed.
    async fn answer(
        &self,
        job: &Job,
        ticket: &mut Ticket,
        progress: &Progress,
    ) -> Result<Option<Answering>, RequestError> {
        let mut attempts = Attempts::new(&self.plane, job);
        loop {
            let placed = match attempts.next(ticket).await? {
                Next::Attempt(placed) => placed,
                Next::Moved => return Ok(None),
                Next::Answer(answering) => return Ok(Some(answering)),
            };
            let member = placed.lease.backend;
            let backend = &job.model.members[member].backend;
            self.place(backend, ticket, placed);
            progress.attempts.set(progress.attempts.get() + 1);
            match progress.verdict(member).await {
                verdict @ (Verdict::Goes | Verdict::Errs) => {
                    let errs = matches!(verdict, Verdict::Errs);
                    self.recognise(job, ticket, errs);
                    attempts.tries.answered();
                    ticket.answered();
                    ticket.piece();
                    if errs {
                        ticket.erred(backend);
                        self.errors.set(self.errors.get() + 1);
                    }
                    return Ok(Some(Answering { backend: Arc::clone(backend), member, errs }));
                }
                Verdict::Fails(cause) => {
                    ticket.failed(backend);
                    ticket.unplace();
                    let (backend, why) = (backend.name.clone(), "simulated".to_owned());
                    let last = Err(RequestError::Unhealthy { backend, cause: why });
                    if let Some(answering) = attempts.failed(ticket, member, cause, last).await? {
                        return Ok(Some(answering));
                    }
                }
            }
        }
    }

    /// Mirrors what the data plane does at a response head.
    fn recognise(&self, job: &Job, ticket: &mut Ticket, errs: bool) {
        if !errs && !job.model.has_errors() || self.has(Fault::AllEqual) {
            return;
        }
        match self.has(Fault::NoneEqual) {
            true => ticket.recognise(&self.random.borrow_mut().u64(..).to_ne_bytes()),
            false => ticket.recognise(job.body.bytes()),
        }
    }

    fn place(&self, backend: &Arc<Backend>, ticket: &mut Ticket, mut placed: Placed) {
        assert!(backend.takes_requests(), "a request was placed on a closed backend");
        let rank = placed.lease.rank.map(|rank| rank.get());
        let in_flight = self.plane.metrics.inflight(&backend.name, rank).get();
        assert!(in_flight <= i64::from(LIMIT), "rank {rank:?} of '{}' has more than its limit", backend.name);
        if self.has(Fault::NoRoom) {
            std::mem::forget(placed.lease.room.take());
        }
        if self.has(Fault::ForgottenTrial) {
            std::mem::forget(placed.trial.take());
        }
        ticket.place(backend, None, placed, None);
    }

    /// Polls one task, and removes it if it ended.
    fn poll(&self, at: usize) {
        let mut task = self.tasks.borrow_mut().swap_remove(at);
        task.woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(&task.woken));
        match task.work.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => self.tasks.borrow_mut().push(task),
            Poll::Ready(_) => {}
        }
    }

    fn find_woken(&self) -> Option<usize> {
        let tasks = self.tasks.borrow();
        let woken: Vec<usize> = (0..tasks.len()).filter(|at| tasks[*at].woken.0.load(Ordering::SeqCst)).collect();
        drop(tasks);
        (!woken.is_empty()).then(|| woken[self.below(woken.len())])
    }

    /// Polls until every task waits for an event.
    fn settle(&self) {
        while let Some(at) = self.find_woken() {
            self.poll(at);
        }
        self.check_waiting();
        self.check_trials();
        self.check_errors();
    }

    /// However often one request fails everywhere, no breaker opens.
    fn check_errors(&self) {
        if self.sick.get().is_none() {
            for member in &self.model().members {
                assert!(member.backend.gate.breaker().errors() <= 1, "one request counts as several");
            }
        }
    }

    /// No request waits for a rank that would take it.
    fn check_waiting(&self) {
        let model = self.model();
        let usual = |backend: &Backend| backend.gate.state() == State::Closed && !backend.gate.needs_check();
        for task in &*self.tasks.borrow() {
            let is_new = task.progress.attempts.get() == 0;
            if !matches!(*task.progress.stage.borrow(), Stage::Waiting) || !is_new {
                continue;
            }
            let free = model.pool.slots().iter().find(|slot| {
                let backend = &model.members[slot.backend].backend;
                backend.takes_requests()
                    && usual(backend)
                    && task.pin.is_none_or(|pin| pin == slot.rank.get())
                    && slot.in_flight() < i64::from(LIMIT)
            });
            if let Some(slot) = free {
                panic!("a request waits, but rank {} of backend {} is free", slot.rank, slot.backend);
            }
        }
    }

    /// A half-open breaker of a backend without requests admits a trial.
    fn check_trials(&self) {
        let (model, config) = (self.model(), self.plane.backends.config());
        for (at, member) in model.members.iter().enumerate() {
            let runs =
                |task: &Task| matches!(*task.progress.stage.borrow(), Stage::Running { member, .. } if member == at);
            let gate = &member.backend.gate;
            if gate.is_on_trial() && !self.tasks.borrow().iter().any(runs) {
                assert!(gate.has_room(&config.breaker), "a trial of '{}' never ended", member.backend.name);
            }
        }
    }

    /// An engine decides one of its requests.
    fn decide(&self, fails: bool) {
        let tasks = self.tasks.borrow();
        let runs = |at: &usize| matches!(*tasks[*at].progress.stage.borrow(), Stage::Running { verdict: None, .. });
        let running: Vec<usize> = (0..tasks.len()).filter(runs).collect();
        if running.is_empty() {
            return;
        }
        let task = &tasks[running[self.below(running.len())]];
        let is_sick = |member: usize| task.is_poison || self.sick.get() == Some(member);
        let causes = [
            RetryReason::Connect,
            RetryReason::Status(503),
            RetryReason::Engine(Failure::Dead),
            RetryReason::Slow,
            RetryReason::Unhealthy,
        ];
        if let Stage::Running { verdict, member } = &mut *task.progress.stage.borrow_mut() {
            *verdict = Some(match fails {
                _ if is_sick(*member) => Verdict::Errs,
                true => Verdict::Fails(causes[self.below(causes.len())]),
                false => Verdict::Goes,
            });
        }
        task.woken.0.store(true, Ordering::SeqCst);
    }

    /// A client disconnects.
    fn leave(&self) {
        let count = self.tasks.borrow().len();
        if count == 0 {
            return;
        }
        let task = self.tasks.borrow_mut().swap_remove(self.below(count));
        if self.has(Fault::LeakedLease) {
            std::mem::forget(task.work);
        }
    }

    fn undrain(&self, backend: &Backend) {
        if self.has(Fault::SilentUndrain) {
            backend.gate.set_draining(false);
        } else {
            self.plane.backends.set_draining(&backend.name, false);
        }
    }

    fn fail_probe(&self, backend: &Arc<Backend>) {
        if self.has(Fault::SilentFailure) {
            backend.set_health(Health::Unhealthy { cause: "simulated".to_owned() });
        } else {
            self.plane.backends.mark_unhealthy(backend, "simulated".to_owned());
        }
    }

    /// A backend's breaker is due to half open.
    fn half_open(&self, backend: &Arc<Backend>) {
        let _changing = self.plane.backends.changing();
        backend.gate.change(|breaker| breaker.half_open_if_due(Instant::now() + BREAKER_TIME));
        self.plane.backends.refresh(backend);
    }

    fn step(self: &Rc<Self>, switches: &mut usize) {
        match self.below(32) {
            0..6 => {
                if self.tasks.borrow().len() < MAX_REQUESTS {
                    self.arrive(self.below(6) == 0);
                }
            }
            6..14 => self.find_woken().into_iter().for_each(|at| self.poll(at)),
            14..18 => self.decide(false),
            18..21 => self.decide(true),
            21 => self.leave(),
            22 => _ = self.plane.backends.set_draining(&self.backend().name, true),
            23 => self.undrain(&self.backend()),
            24 => self.fail_probe(&self.backend()),
            25 => {
                let backend = self.backend();
                let ranks = if *switches < MAX_SWITCHES { 1 + self.below(3) as u16 } else { 2 };
                *switches += 1;
                self.plane.backends.admit(&backend, &probe(ranks)).unwrap();
            }
            26..28 => self.half_open(&self.backend()),
            28 => self.backend().gate.set_aside(Aside::Silent, self.below(2) == 0),
            29 => {
                let count = self.tasks.borrow().len();
                if count > 0 {
                    self.poll(self.below(count));
                }
            }
            _ => self.settle(),
        }
    }

    /// One engine answers everything with an error and soon receives no more requests.
    fn fall_sick(self: &Rc<Self>) {
        self.close_breakers();
        self.sick.set(Some(self.below(3)));
        self.errors.set(0);
        for _ in 0..20 * ERRORS {
            self.arrive(false);
            while !self.tasks.borrow().is_empty() {
                self.settle();
                self.decide(false);
            }
        }
        assert!(self.errors.get() <= 2 * ERRORS, "a backend that answers nothing well keeps its share");
        self.close_breakers();
        self.sick.set(None);
    }

    fn close_breakers(&self) {
        let _changing = self.plane.backends.changing();
        for member in &self.model().members {
            member.backend.gate.renew();
            self.plane.backends.refresh(&member.backend);
        }
    }

    /// Everything heals and every engine answers: all requests end, and nothing is left behind.
    fn end(&self) {
        for member in &self.model().members {
            self.undrain(&member.backend);
            member.backend.gate.set_aside(Aside::Silent, false);
            self.plane.backends.admit(&member.backend, &probe(2)).unwrap();
        }
        for _ in 0..10 * MAX_REQUESTS {
            self.settle();
            self.decide(false);
        }
        assert!(self.tasks.borrow().is_empty(), "a request never ended");
        let model = self.model();
        assert!(model.queue.is_at_rest(), "the queue holds something");
        assert_eq!(self.plane.body_memory.held_bytes(), 0, "bytes of bodies");
        for load in model.pool.counted() {
            let left = (load.in_flight_requests, load.in_flight_tokens, load.pending_tokens);
            assert_eq!(left, (0, 0, 0), "a rank's load");
        }
        for name in ["a", "b", "c"] {
            let gauges = [None, Some(0), Some(1), Some(2)].map(|rank| self.plane.metrics.inflight(name, rank).get());
            assert_eq!(gauges, [0; 4], "requests in flight on '{name}'");
        }
    }

    fn run(self: &Rc<Self>, schedules: u64) {
        for member in &self.model().members {
            self.plane.backends.admit(&member.backend, &probe(2)).unwrap();
        }
        for number in 0..schedules {
            let mut switches = 0;
            for _ in 0..STEPS {
                self.step(&mut switches);
            }
            self.end();
            if number % 16 == 0 {
                self.fall_sick();
                self.end();
            }
        }
        let text = self.plane.metrics.encode(crate::observe::metrics::TextFormat::OpenMetrics);
        let counts = text.lines().filter(|line| line.starts_with("semmoe_requests_total{"));
        let counted: u64 = counts.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
        assert_eq!(counted, self.arrived.get(), "outcomes of requests");
    }
}

/// Runs schedules in batches, each with a gateway of its own; a failure names the batch's seed.
fn run(batches: u64, schedules: u64, fault: Option<Fault>) {
    // For the timers of waiting requests, which never fire here.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _entered = runtime.enter();
    for seed in 0..batches {
        let batch = std::panic::AssertUnwindSafe(|| World::new(seed, fault).run(schedules));
        if let Err(panic) = std::panic::catch_unwind(batch) {
            eprintln!("batch {seed} of {schedules} schedules failed");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn no_request_is_lost_in_thousands_of_schedules() {
    run(8, 500, None);
}

/// `cargo test --release -p semmoe-gateway --lib -- --ignored millions_of_schedules`
#[test]
#[ignore = "takes minutes"]
fn no_request_is_lost_in_millions_of_schedules() {
    run(1000, 1000, None);
}

#[test]
fn planted_faults_are_found() {
    use Fault::{AllEqual, ForgottenTrial, LeakedLease, NoRoom, NoneEqual, NotCompared, SilentFailure, SilentUndrain};
    for (fault, symptoms) in [
        (LeakedLease, &["a rank's load"][..]),
        (NoRoom, &["is free", "never ended"]),
        (ForgottenTrial, &["a trial of"]),
        (SilentUndrain, &["is free", "never ended"]),
        (SilentFailure, &["closed backend"]),
        (AllEqual, &["keeps its share"]),
        (NoneEqual, &["counts as several"]),
        (NotCompared, &["keeps its share"]),
    ] {
        let panic = std::panic::catch_unwind(|| run(1, 1000, Some(fault))).unwrap_err();
        let literal = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = literal.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        assert!(symptoms.iter().any(|symptom| text.contains(symptom)), "{fault:?}: {text}");
    }
}
