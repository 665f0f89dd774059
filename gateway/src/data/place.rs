//! Decides where a request runs: on a rank that the policy chooses, or on a backend whose engine chooses the rank.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_engines::Route;
use semmoe_routing::{Needs, Policy, Prompt};

use super::{DataPlane, Job};
use crate::backends::{Health, Lease, Member, Model, RequestError, Run, Slot, Trial};

/// A place for a request, and the policy that chose it.
pub(crate) struct Placed {
    /// Set if the backend's breaker is half-open.
    pub(crate) trial: Option<Trial>,
    pub(crate) lease: Lease,
    /// The model's policy, or its substitute while pins are ignored.
    pub(crate) policy: &'static str,
    /// Time that the request spent in its model's queue.
    pub(crate) waited: Duration,
}

/// Places a request on a backend outside `except`.
pub(crate) fn place(plane: &Arc<DataPlane>, job: &Job, except: &[usize]) -> Result<Placed, RequestError> {
    let members = &job.model.members;
    if !members.iter().any(|member| member.backend.gate.needs_check()) {
        return place_among(plane, job, except);
    }
    let now = Instant::now();
    let is_spared = |at: &usize| members[*at].backend.gate.is_spared(now);
    let mut spared: Vec<usize> = except.iter().copied().chain((0..members.len()).filter(is_spared)).collect();
    // A paused or silent backend is better than none, and an extra trial is better than an error.
    let placed =
        place_with_care(plane, job, &mut spared).or_else(|_| place_with_care(plane, job, &mut except.to_vec()));
    placed.or_else(|error| {
        let as_usual = |at: usize, member: &Member| {
            !except.contains(&at) && !member.backend.gate.is_on_trial() && member.backend.takes_requests()
        };
        let busy = members.iter().enumerate().any(|(at, member)| as_usual(at, member));
        if busy { Err(error) } else { place_among(plane, job, except) }
    })
}

/// Places a request; a backend with a half-open breaker admits it only as a trial.
fn place_with_care(plane: &Arc<DataPlane>, job: &Job, except: &mut Vec<usize>) -> Result<Placed, RequestError> {
    let rules = &job.snapshot.config.breaker;
    for (at, member) in job.model.members.iter().enumerate() {
        let gate = &member.backend.gate;
        if gate.is_on_trial() && !gate.has_room(rules) {
            except.push(at);
        }
    }
    loop {
        let mut placed = place_among(plane, job, except)?;
        let at = placed.lease.backend;
        let backend = &job.model.members[at].backend;
        if !backend.gate.is_on_trial() {
            return Ok(placed);
        }
        placed.trial = Trial::begin(&plane.backends, backend, rules);
        if placed.trial.is_some() {
            return Ok(placed);
        }
        // Other requests took the last trial slot.
        except.push(at);
    }
}

fn place_among(plane: &DataPlane, job: &Job, except: &[usize]) -> Result<Placed, RequestError> {
    let model = &job.model;
    if let Some(pin) = job.client_pin.filter(|pin| !model.pool.slots().iter().any(|slot| slot.rank == *pin)) {
        return Err(RequestError::PinRange { pin: pin.get(), model: model.name.clone() });
    }
    let limit = job.snapshot.config.queue.max_in_flight.map(|limit| Limit::new(model, i64::from(limit), job.route));
    // The pool of an earlier snapshot is no longer updated when backends close.
    let is_stale = plane.backends.snapshot().generation != job.snapshot.generation;
    let admit = |slot: &Slot| {
        !except.contains(&slot.backend)
            && (!is_stale || model.members[slot.backend].backend.takes_requests())
            && job.client_pin.is_none_or(|pin| pin == slot.rank)
            && limit.as_ref().is_none_or(|limit| limit.lets_in(slot))
    };
    let narrowed = is_stale || !except.is_empty() || job.client_pin.is_some() || limit.is_some();
    let admit: Option<&dyn Fn(&Slot) -> bool> = if narrowed { Some(&admit) } else { None };
    let (policy, share) = believed(job);
    let prompt = Prompt {
        tokens: job.scored.tokens,
        share: share.as_deref(),
        blocks: &job.scored.blocks,
        key: job.key,
        // A stream's first chunk shows that the prompt was computed; a non-streamed response shows nothing.
        reports: job.streams,
        sequences: job.sequences,
        most_output: job.most_output.map(|tokens| tokens.saturating_mul(u64::from(job.sequences.max(1)))),
    };
    let run = |backend: usize| model.members[backend].run(job.route);
    let remember = |backend: usize| model.members[backend].backend.keeps_prefixes();
    let (lease, choice) = model
        .pool
        .choose(policy, &prompt, admit, run, remember)
        .ok_or_else(|| RequestError::NoBackend { model: model.name.clone(), causes: causes(&model.members) })?;
    count_misread(plane, job, &model.members[lease.backend]);
    if let Some(share) = choice.expected_share.filter(|_| lease.rank.is_some())
        && let Some(loaded) = &model.members[lease.backend].tables
    {
        let info = loaded.tables.model();
        let of_token = info.layers() as u64 * u64::from(info.top_k);
        plane.metrics.predicted_lar(policy.acting_name(), share, job.scored.tokens.saturating_mul(of_token));
    }
    // Report the fallback: this backend's ranks all had the same share, and the engine chooses the rank, so only load
    // decided.
    let by_load = lease.rank.is_none() && policy.needs() != Needs::default();
    let policy = if by_load { model.plan.fallback.acting_name() } else { policy.acting_name() };
    Ok(Placed { trial: None, lease, policy, waited: Duration::ZERO })
}

/// Counts a chat sent to an engine that tokenizes it differently.
fn count_misread(plane: &DataPlane, job: &Job, member: &Member) {
    if let Some(shape) = member.misread(job.scored.shapes).names().next() {
        plane.metrics.prompts.misread(&member.backend.name, shape);
    }
}

/// The limit on requests in flight per rank, for finding ranks with room.
struct Limit {
    of_rank: i64,
    backends: Vec<InFlight>,
}

/// Requests in flight on one backend.
enum InFlight {
    /// Total for a backend whose engine will choose this request's rank too, and its number of ranks.
    Anywhere { all: i64, ranks: i64 },
    /// Per rank: requests whose rank the engine chose, assumed to be spread evenly.
    OnEach(i64),
}

impl Limit {
    fn new(model: &Model, of_rank: i64, route: Route) -> Self {
        let of = |(backend, member): (usize, &Member)| {
            let ranks = i64::from(member.fit.ranks.max(1));
            match member.run(route) {
                Run::Chosen | Run::Behind => InFlight::OnEach(model.pool.unranked_of(backend) / ranks),
                Run::Anywhere | Run::Nowhere => InFlight::Anywhere { all: model.pool.in_flight_of(backend), ranks },
            }
        };
        Self { of_rank, backends: model.members.iter().enumerate().map(of).collect() }
    }

    fn lets_in(&self, slot: &Slot) -> bool {
        self.backends.get(slot.backend).is_some_and(|in_flight| match in_flight {
            InFlight::Anywhere { all, ranks } => *all < self.of_rank.saturating_mul(*ranks),
            InFlight::OnEach(unranked) => slot.in_flight() + unranked < self.of_rank,
        })
    }
}

/// Whether a policy can use nothing but loads if a prompt was not read.
fn goes_by_prompt(policy: &dyn Policy) -> bool {
    let Needs { share, cached, key } = policy.needs();
    (share || cached) && !key && policy.watched().is_none()
}

/// Returns the policy to use, and the shares that it may trust. If a backend's engine chooses the rank, or tokenizes
/// the prompt differently, each of its ranks gets the mean of their shares. If that applies to all backends, or the
/// prompt was not read, a policy that scores prompts has no basis and its fallback is used instead: the one for
/// sessions if the request names one.
fn believed(job: &Job) -> (&dyn Policy, Option<Cow<'_, [f64]>>) {
    let (model, policy, share) = (&job.model, job.policy.as_ref(), job.scored.share.as_deref());
    if !job.scored.read && goes_by_prompt(policy) {
        let plan = &model.plan;
        return (if job.key.is_some() { plan.session.as_ref() } else { plan.fallback.as_ref() }, None);
    }
    let is_misread = |member: &Member| !member.misread(job.scored.shapes).is_empty();
    let runs_anywhere = |member: &Member| member.run(job.route) != Run::Chosen || is_misread(member);
    if !model.members.iter().any(runs_anywhere) {
        return (policy, share.map(Cow::Borrowed));
    }
    let mut serving = model.members.iter().filter(|member| member.backend.health().is_healthy());
    if policy.needs() != Needs::default() && serving.all(runs_anywhere) {
        return (model.plan.fallback.as_ref(), None);
    }
    let mut share = share.map(<[f64]>::to_vec);
    let mut rest = share.as_deref_mut().unwrap_or_default();
    for member in &model.members {
        let (ranks, others) = rest.split_at_mut(usize::from(member.fit.ranks).min(rest.len()));
        if runs_anywhere(member) && !ranks.is_empty() {
            let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
            ranks.fill(mean);
        }
        rest = others;
    }
    (policy, share.map(Cow::Owned))
}

/// Lists all of the model's backends with their problems.
fn causes(members: &[Member]) -> String {
    let cause = |member: &Member| {
        let name = &member.backend.name;
        match member.backend.health() {
            Health::Healthy if member.backend.gate.is_draining() => format!("backend '{name}' is drained"),
            Health::Healthy => format!("backend '{name}' was tried"),
            Health::Unknown => format!("backend '{name}' has not been probed yet"),
            Health::Unhealthy { cause } => format!("backend '{name}': {cause}"),
        }
    };
    if members.is_empty() {
        return "none has been discovered yet".to_owned();
    }
    members.iter().map(cause).collect::<Vec<_>>().join("; ")
}
