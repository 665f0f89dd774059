//! The ranks of all backends of one model, their accounts, and the leases that keep the accounts correct.
//!
//! A decision considers every rank of every backend, so one router covers them all. Reading and updating the counts
//! takes no lock. A request may miss only requests being placed at the same moment, so a rank exceeds its cap by at
//! most that many. Only prompt blocks are recorded under a lock, after the decision.

mod lease;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use prometheus_client::metrics::gauge::Gauge;
use semmoe_routing::{
    Choice, Comparison, Decision, Policy, PrefixSettings, PrefixTable, Prompt, RankLoad, Report, Router, Scratch,
    Settings, TablePrice, Work,
};
use semmoe_tables::RankId;

use crate::observe::Metrics;
pub(crate) use lease::Lease;
use lease::{Charge, Counted};

thread_local! {
    /// Scratch memory reused by this thread's decisions.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One rank of one backend.
#[derive(Clone)]
pub(crate) struct Slot {
    /// Index of the backend in its model.
    pub(crate) backend: usize,
    pub(crate) rank: RankId,
    inflight: Gauge,
    /// Number of consecutive requests that the rank refused.
    refusals: Arc<AtomicU32>,
}

/// Where a backend runs requests of one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// On the chosen rank.
    Chosen,
    /// On the chosen slot, which represents several ranks; the engine chooses among them.
    Behind,
    /// On any of the backend's ranks: the engine chooses.
    Anywhere,
    /// On no rank: the request does not run the model.
    Nowhere,
}

impl Slot {
    /// Requests in flight, across all pools that have contained the rank.
    pub(crate) fn in_flight(&self) -> i64 {
        self.inflight.get()
    }
}

/// All slots of one model.
pub(crate) struct Pool {
    /// Ordered by backend; at most 65,535 ([`RawLimits::ranks`](crate::config::RawLimits::ranks)).
    slots: Vec<Slot>,
    /// Requests in flight per backend whose rank the engine chose.
    unranked: Vec<Gauge>,
    router: Router,
    shadow: Option<Shadow>,
    /// Decision counter; policies use it to break ties.
    sequence: AtomicU64,
    /// Counts decisions that only need a backend.
    unranked_sequence: AtomicU64,
}

/// The ranks' accounts as they would be if the shadow policy placed the requests.
struct Shadow {
    router: Router,
    comparison: Comparison,
}

/// Decides which slots may be chosen; `None` admits all available ones.
pub(crate) type Admit<'a> = Option<&'a dyn Fn(&Slot) -> bool>;

/// A backend's name, rank count (0 while unknown) and table prices, for building a pool.
pub(crate) struct PoolBackend<'a> {
    pub(crate) name: &'a str,
    pub(crate) ranks: u16,
    pub(crate) prices: Vec<TablePrice>,
    pub(crate) available: bool,
}

/// The settings for building a pool.
pub(crate) struct PoolSettings<'a> {
    pub(crate) routing: &'a Settings,
    pub(crate) prefix: &'a PrefixSettings,
    /// Whether the model's policy shadows another policy.
    pub(crate) shadow: bool,
}

impl Pool {
    pub(crate) fn new(members: &[PoolBackend<'_>], settings: &PoolSettings<'_>, metrics: &Metrics) -> Self {
        let (slots, unranked) = (slots(members, metrics), unranked(members, metrics));
        let count = slots.len() as u16;
        let prices = prices(members);
        let units = unit_sizes(members);
        let router = || Router::new(count, &prices, settings.routing, settings.prefix).in_units(&units);
        let pool = Self {
            router: router(),
            shadow: settings.shadow.then(|| Shadow { router: router(), comparison: Comparison::new(count) }),
            sequence: AtomicU64::new(0),
            unranked_sequence: AtomicU64::new(0),
            slots,
            unranked,
        };
        for (backend, member) in members.iter().enumerate() {
            pool.set_available(backend, member.available);
        }
        pool
    }

    /// Creates a pool that continues this one with different slots: slot `s` was `from[s]` here, or is new if that is
    /// `None`. Requests in flight on surviving ranks count in both pools, whichever placed them. New slots receive no
    /// requests until [`set_available`](Self::set_available) opens them.
    pub(crate) fn succeed(
        &self,
        from: &[Option<u16>],
        members: &[PoolBackend<'_>],
        settings: &PoolSettings<'_>,
        metrics: &Metrics,
    ) -> Self {
        let (slots, unranked) = (slots(members, metrics), unranked(members, metrics));
        let from = &from[..slots.len().min(from.len())];
        let prices = prices(members);
        let units = unit_sizes(members);
        let router = |old: &Router| old.succeed(from, &prices, settings.routing, settings.prefix).in_units(&units);
        let shadow = settings.shadow.then(|| Shadow {
            router: match &self.shadow {
                Some(shadow) => router(&shadow.router),
                // Fork the real accounts: no ghost will ever remove the requests already in flight from a new shadow's
                // counts.
                None => self.router.fork(from, &prices, settings.routing, settings.prefix).in_units(&units),
            },
            comparison: Comparison::new(slots.len() as u16),
        });
        Self {
            router: router(&self.router),
            shadow,
            sequence: AtomicU64::new(self.sequence.load(Ordering::Relaxed)),
            unranked_sequence: AtomicU64::new(self.unranked_sequence.load(Ordering::Relaxed)),
            slots,
            unranked,
        }
    }

    /// Whether a shadow policy is tracked.
    pub(crate) fn has_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Has a policy choose a rank, and charges the request either to that rank or to the ranks among which its engine
    /// will choose. `run`: where a backend runs such requests. `remember`: whether its ranks will cache the prompt.
    pub(crate) fn choose(
        self: &Arc<Self>,
        policy: &dyn Policy,
        prompt: &Prompt<'_>,
        admit: Admit<'_>,
        run: impl Fn(usize) -> Run,
        remember: impl Fn(usize) -> bool,
    ) -> Option<(Lease, Choice)> {
        let ranked = (0..self.unranked.len()).any(|backend| run(backend) == Run::Chosen);
        let sequence = if ranked { &self.sequence } else { &self.unranked_sequence };
        let sequence = sequence.fetch_add(1, Ordering::Relaxed);
        let (decision, slot) = self.decide(&self.router, policy, prompt, admit, sequence)?;
        let (real, ghost) = match run(slot.backend) {
            Run::Nowhere => return Some((self.lease(slot, None, None), decision.choice)),
            Run::Anywhere => self.charge_among(slot.backend, decision.work),
            run @ (Run::Chosen | Run::Behind) => {
                let watched = policy.watched().zip(self.shadow.as_ref()).and_then(|(watched, shadow)| {
                    let (decision, slot) = self.decide(&shadow.router, watched, prompt, admit, sequence)?;
                    Some((shadow, decision, slot))
                });
                let holds = |slot: &Slot| run == Run::Chosen && remember(slot.backend);
                let new_blocks = self.router.assign(&decision, prompt.blocks, holds(slot));
                let ghost = watched.map(|(shadow, watched, slot)| {
                    let new_blocks = shadow.router.assign(&watched, prompt.blocks, holds(slot));
                    shadow.comparison.add(&decision, &watched);
                    Charge::Rank { slot: watched.choice.rank, work: watched.work, new_blocks }
                });
                (Charge::Rank { slot: decision.choice.rank, work: decision.work, new_blocks }, ghost)
            }
        };
        let counted = Counted { pool: Arc::clone(self), real, ghost };
        let rank = Some(slot.rank).filter(|_| run(slot.backend) == Run::Chosen);
        Some((self.lease(slot, rank, Some(counted)), decision.choice))
    }

    fn lease(&self, slot: &Slot, rank: Option<RankId>, counted: Option<Counted>) -> Lease {
        let on_slot = counted.as_ref().is_some_and(|counted| matches!(counted.real, Charge::Rank { .. }));
        let inflight = self.unranked.get(slot.backend).filter(|_| !on_slot).unwrap_or(&slot.inflight);
        Lease::new(slot, rank, inflight.clone(), counted)
    }

    /// Charges a request to all ranks of a backend, in equal parts.
    fn charge_among(&self, backend: usize, work: Work) -> (Charge, Option<Charge>) {
        let slots = self.slots_of(backend);
        let on = |router: &Router| {
            let part = router.accounts().assign_among(slots.clone(), work);
            Charge::Among { slots: slots.clone(), part }
        };
        (on(&self.router), self.shadow.as_ref().map(|shadow| on(&shadow.router)))
    }

    /// Returns one backend's slots.
    fn slots_of(&self, backend: usize) -> Range<u16> {
        let first = self.slots.partition_point(|slot| slot.backend < backend);
        let end = self.slots.partition_point(|slot| slot.backend <= backend);
        first as u16..end as u16
    }

    /// Requests in flight on a backend for which the engine chose the rank.
    pub(crate) fn unranked_of(&self, backend: usize) -> i64 {
        self.unranked.get(backend).map_or(0, Gauge::get)
    }

    /// All requests in flight on a backend.
    pub(crate) fn in_flight_of(&self, backend: usize) -> i64 {
        let slots = self.slots_of(backend);
        let ranked = self.slots[usize::from(slots.start)..usize::from(slots.end)].iter().map(Slot::in_flight);
        self.unranked_of(backend) + ranked.sum::<i64>()
    }

    fn decide(
        &self,
        router: &Router,
        policy: &dyn Policy,
        prompt: &Prompt<'_>,
        admit: Admit<'_>,
        sequence: u64,
    ) -> Option<(Decision, &Slot)> {
        let admits = |rank: u16| admit.is_none_or(|admit| self.slots.get(usize::from(rank)).is_some_and(admit));
        let admits: Option<&dyn Fn(u16) -> bool> = if admit.is_some() { Some(&admits) } else { None };
        let decision = SCRATCH.with_borrow_mut(|scratch| router.decide(policy, prompt, sequence, admits, scratch))?;
        Some((decision, self.slots.get(usize::from(decision.choice.rank))?))
    }

    /// Iterates over the real router and, if any, the shadow's.
    fn routers(&self) -> impl Iterator<Item = &Router> {
        std::iter::once(&self.router).chain(self.shadow.as_ref().map(|shadow| &shadow.router))
    }

    /// Opens or closes all ranks of a backend. Closing forgets its caches, as the backend may return as another
    /// process.
    pub(crate) fn set_available(&self, backend: usize, available: bool) {
        let slots = self.slots_of(backend);
        for router in self.routers() {
            router.accounts().set_all_available(usize::from(slots.start)..usize::from(slots.end), available);
            if let Some(prefixes) = router.prefixes().filter(|_| !available) {
                slots.clone().for_each(|slot| {
                    prefixes.forget(slot);
                });
            }
        }
    }

    /// Resets prices to those of newly loaded tables; loads are unchanged.
    pub(crate) fn reset_prices(&self, members: &[PoolBackend<'_>]) {
        let prices = prices(members);
        self.routers().for_each(|router| router.accounts().reset_prices(&prices));
    }

    /// Whether any backend accepted by `admit` has an available rank.
    pub(crate) fn has_one(&self, admit: impl Fn(usize) -> bool) -> bool {
        let loads = self.router.accounts().loads();
        self.slots.iter().zip(loads).any(|(slot, load)| load.available && admit(slot.backend))
    }

    /// Returns each slot's counts and price.
    pub(crate) fn counted(&self) -> Vec<RankLoad> {
        self.router.accounts().counted()
    }

    /// Reports the shadow policy's gain, if there is a shadow.
    pub(crate) fn report(&self) -> Option<Report> {
        self.shadow.as_ref().map(|shadow| shadow.comparison.report())
    }

    /// The estimated contents of the ranks' caches, if tracked.
    pub(crate) fn prefixes(&self) -> Option<&PrefixTable> {
        self.router.prefixes()
    }
}

/// Creates the slots for all ranks of these members.
fn slots(members: &[PoolBackend<'_>], metrics: &Metrics) -> Vec<Slot> {
    let of = |(backend, member): (usize, &PoolBackend<'_>)| {
        let slot = |rank| {
            let inflight = metrics.inflight(member.name, Some(rank));
            Slot { backend, rank: RankId::new(rank), inflight, refusals: Arc::default() }
        };
        (0..member.ranks).map(slot).collect::<Vec<_>>()
    };
    members.iter().enumerate().flat_map(of).collect()
}

/// Returns the in-flight gauges for requests whose rank the engine chooses.
fn unranked(members: &[PoolBackend<'_>], metrics: &Metrics) -> Vec<Gauge> {
    members.iter().map(|member| metrics.inflight(member.name, None)).collect()
}

fn unit_sizes(members: &[PoolBackend<'_>]) -> Vec<u16> {
    members.iter().map(|member| member.ranks).collect()
}

fn prices(members: &[PoolBackend<'_>]) -> Vec<TablePrice> {
    let of = |member: &PoolBackend<'_>| {
        (0..usize::from(member.ranks))
            .map(|rank| member.prices.get(rank).copied().unwrap_or_default())
            .collect::<Vec<_>>()
    };
    members.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pool(available: bool) -> Arc<Pool> {
        let members = [
            PoolBackend { name: "a", ranks: 2, prices: Vec::new(), available: true },
            PoolBackend { name: "b", ranks: 1, prices: Vec::new(), available },
        ];
        let (routing, prefix) = (Settings::default(), PrefixSettings::default());
        let settings = PoolSettings { routing: &routing, prefix: &prefix, shadow: false };
        Arc::new(Pool::new(&members, &settings, &Metrics::new()))
    }

    fn in_flight(pool: &Pool) -> Vec<u32> {
        pool.counted().iter().map(|load| load.in_flight_requests).collect()
    }

    #[test]
    fn leases_count_in_and_out() {
        let pool = pool(true);
        let policy = semmoe_routing::policy("round_robin").unwrap();
        let prompt = Prompt { tokens: 5, reports: true, ..Prompt::default() };
        let choose = || pool.choose(policy.as_ref(), &prompt, None, |_| Run::Chosen, |_| true).unwrap().0;
        let mut leases: Vec<Lease> = (0..6).map(|_| choose()).collect();
        assert_eq!(in_flight(&pool), [2, 2, 2]);
        let pending = |pool: &Pool| pool.counted().iter().map(|load| load.pending_tokens).sum::<u64>();
        assert_eq!(pending(&pool), 30);
        leases[0].computed();
        leases[0].computed();
        assert_eq!(pending(&pool), 25);
        drop(leases);
        assert_eq!(in_flight(&pool), [0, 0, 0]);
        assert!(pool.counted().iter().all(|load| load.in_flight_tokens == 0 && load.pending_tokens == 0));
    }

    proptest! {
        /// Policies with and without a shadow alternate while requests begin and end: finally nothing counts as in
        /// flight, on the ranks or on the shadow's.
        #[test]
        fn reloads_leave_no_request_behind(
            begins_shadowed in any::<bool>(), steps in proptest::collection::vec((0u8..4, 0usize..64, any::<bool>()), 0..60),
        ) {
            let members = [PoolBackend { name: "a", ranks: 3, prices: Vec::new(), available: true }];
            let from: Vec<Option<u16>> = (0..3).map(Some).collect();
            let (routing, prefix, metrics) = (Settings::default(), PrefixSettings::default(), Metrics::new());
            let settings = |shadow| PoolSettings { routing: &routing, prefix: &prefix, shadow };
            let policy = |shadow: bool| semmoe_routing::policy(if shadow { "shadow" } else { "least_load" }).unwrap();
            let (mut shadowed, mut leases) = (begins_shadowed, Vec::<Lease>::new());
            let mut pool = Arc::new(Pool::new(&members, &settings(shadowed), &metrics));
            for (step, pick, flag) in steps {
                match step {
                    0 | 1 => {
                        let run = if pick % 4 == 0 { Run::Anywhere } else { Run::Chosen };
                        let prompt = Prompt { tokens: 7, reports: flag, share: Some(&[0.1, 0.2, 0.7]), ..Prompt::default() };
                        leases.push(pool.choose(policy(shadowed).as_ref(), &prompt, None, |_| run, |_| true).unwrap().0);
                    }
                    2 if !leases.is_empty() => {
                        let at = pick % leases.len();
                        if flag { leases[at].computed() } else { drop(leases.swap_remove(at)) }
                    }
                    _ => {
                        shadowed = flag;
                        pool = Arc::new(pool.succeed(&from, &members, &settings(shadowed), &metrics));
                    }
                }
                let ranked = leases.iter().filter(|lease| lease.rank.is_some()).count();
                prop_assert_eq!(in_flight(&pool).iter().sum::<u32>() as usize, ranked);
                prop_assert_eq!(pool.in_flight_of(0), leases.len() as i64);
            }
            leases.clear();
            for load in pool.routers().flat_map(|router| router.accounts().loads()) {
                prop_assert_eq!((load.in_flight_requests, load.in_flight_tokens, load.pending_tokens), (0, 0, 0));
            }
            prop_assert!(pool.slots().iter().all(|slot| slot.in_flight() == 0));
        }
    }

    /// Requests that an engine places itself belong to no rank, yet their backend does not look idle.
    #[test]
    fn requests_that_run_anywhere_are_shared_by_all_ranks_of_their_backend() {
        let pool = pool(true);
        let policy = semmoe_routing::policy("least_load").unwrap();
        let prompt = Prompt { tokens: 10, blocks: &[1, 2], ..Prompt::default() };
        let on_first = |slot: &Slot| slot.backend == 0;
        let (lease, _) = pool.choose(policy.as_ref(), &prompt, Some(&on_first), |_| Run::Anywhere, |_| true).unwrap();
        assert_eq!((lease.rank, in_flight(&pool)), (None, vec![0; 3]));
        assert_eq!((pool.unranked_of(0), pool.in_flight_of(0)), (1, 1));
        assert!(pool.counted().iter().all(|load| load.in_flight_tokens == 0));
        let seen = pool.router.accounts().loads();
        assert_eq!(seen.iter().map(|load| load.in_flight_tokens).collect::<Vec<_>>(), [5, 5, 0]);
        let mut cached = [0; 3];
        pool.prefixes().unwrap().cached(prompt.blocks, &mut cached);
        assert_eq!(cached, [0; 3]);
        let next = pool.choose(policy.as_ref(), &prompt, None, |_| Run::Chosen, |_| true).unwrap();
        assert_eq!(next.0.backend, 1);
        drop(lease);
        assert_eq!(pool.router.accounts().loads()[0].in_flight_tokens, 0);
        // A request that runs no model counts nowhere.
        let (lease, _) = pool.choose(policy.as_ref(), &prompt, Some(&on_first), |_| Run::Nowhere, |_| true).unwrap();
        assert_eq!((lease.rank, pool.unranked_of(0)), (None, 1));
        assert_eq!(pool.router.accounts().loads()[0].in_flight_tokens, 0);
    }

    /// A rank that refuses everything must not look idle.
    #[test]
    fn a_rank_that_refuses_all_attracts_no_more_than_others() {
        let pool = pool(true);
        let policy = semmoe_routing::policy("affinity").unwrap();
        let prompt = Prompt { tokens: 100, ..Prompt::default() };
        let mut placed = [0; 3];
        for _ in 0..300 {
            let lease = pool.choose(policy.as_ref(), &prompt, None, |_| Run::Chosen, |_| true).unwrap().0;
            let slot = lease.backend * 2 + usize::from(lease.chosen.get());
            placed[slot] += 1;
            if slot == 1 { lease.refused(&[]) } else { lease.answered() }
        }
        assert!(placed[1] <= 120, "{placed:?}");
    }

    #[test]
    fn only_admitted_and_available_slots_are_chosen() {
        let pool = pool(false);
        let policy = semmoe_routing::policy("round_robin").unwrap();
        let prompt = Prompt { tokens: 1, ..Prompt::default() };
        let choose = |admit: Admit<'_>| pool.choose(policy.as_ref(), &prompt, admit, |_| Run::Chosen, |_| true);
        for _ in 0..4 {
            let (lease, _) = choose(Some(&|slot| slot.rank.get() == 0)).unwrap();
            assert_eq!((lease.backend, lease.rank), (0, Some(RankId::new(0))));
        }
        assert!(choose(Some(&|slot| slot.backend == 1)).is_none());
        pool.set_available(1, true);
        assert!(choose(Some(&|slot| slot.backend == 1)).is_some());
    }
}
