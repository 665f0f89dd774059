//! The ranks of all backends of one model, what is known of them, and the leases that keep that true.
//!
//! One decision looks at every rank of every backend, so one router covers them all. Reading and counting take no lock:
//! a request may miss those that are being placed at the same moment, and no others, so a rank exceeds its cap by no
//! more than these. Only the blocks of prompts are noted under a lock, after the decision.

mod lease;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::gauge::Gauge;
use semmoe_routing::{
    Choice, Comparison, Decision, Policy, PrefixSettings, PrefixTable, Prompt, RankLoad, Report, Router, Scratch,
    Settings,
};
use semmoe_tables::RankId;

use crate::metrics::Metrics;
pub(crate) use lease::Lease;
use lease::{Charge, Counted};

thread_local! {
    /// Room for decisions of this thread.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One rank of one backend.
#[derive(Clone)]
pub(crate) struct Slot {
    /// Index of the backend in its model.
    pub(crate) backend: usize,
    pub(crate) rank: RankId,
    inflight: Gauge,
}

impl Slot {
    /// Requests in flight, over all pools that the rank was in.
    pub(crate) fn in_flight(&self) -> i64 {
        self.inflight.get()
    }
}

/// All slots of one model.
pub(crate) struct Pool {
    /// In the order of their backends; at most 65,535 ([`RawLimits::ranks`](crate::config::RawLimits::ranks)).
    slots: Vec<Slot>,
    router: Router,
    shadow: Option<Shadow>,
    /// Counts decisions; policies break ties with it.
    sequence: AtomicU64,
    /// The same for requests that only need a backend.
    unranked_sequence: AtomicU64,
}

/// The same ranks, as they would be if the watched policy placed the requests.
struct Shadow {
    router: Router,
    comparison: Comparison,
}

/// Which slots may be chosen; `None` is all that are available.
pub(crate) type Admit<'a> = Option<&'a dyn Fn(&Slot) -> bool>;

/// Name, ranks (0 while unknown) and table prices of a backend, to make a pool of.
pub(crate) struct PoolBackend<'a> {
    pub(crate) name: &'a str,
    pub(crate) ranks: u16,
    pub(crate) prices: &'a [f32],
    pub(crate) available: bool,
}

/// The parts of a pool.
pub(crate) struct PoolSettings<'a> {
    pub(crate) routing: &'a Settings,
    pub(crate) prefix: &'a PrefixSettings,
    /// Whether the model's policy watches another one.
    pub(crate) shadow: bool,
}

impl Pool {
    pub(crate) fn new(members: &[PoolBackend<'_>], settings: &PoolSettings<'_>, metrics: &Metrics) -> Self {
        let slots = slots(members, metrics);
        let count = slots.len() as u16;
        let prices = prices(members);
        let router = || Router::new(count, &prices, settings.routing, settings.prefix);
        let pool = Self {
            router: router(),
            shadow: settings.shadow.then(|| Shadow { router: router(), comparison: Comparison::new(count) }),
            sequence: AtomicU64::new(0),
            unranked_sequence: AtomicU64::new(0),
            slots,
        };
        for (backend, member) in members.iter().enumerate() {
            pool.set_available(backend, member.available);
        }
        pool
    }

    /// A pool of other slots that goes on from this one, in which slot `s` was `from[s]`; one with `None` is new. What
    /// is in flight on ranks that stay is counted in both pools, whichever a request was placed in. New slots get no
    /// requests until [`set_available`](Self::set_available) opens them.
    pub(crate) fn succeed(
        &self,
        from: &[Option<u16>],
        members: &[PoolBackend<'_>],
        settings: &PoolSettings<'_>,
        metrics: &Metrics,
    ) -> Self {
        let slots = slots(members, metrics);
        let from = &from[..slots.len().min(from.len())];
        let prices = prices(members);
        let router = |old: &Router| old.succeed(from, &prices, settings.routing, settings.prefix);
        let shadow = settings.shadow.then(|| Shadow {
            router: match &self.shadow {
                Some(shadow) => router(&shadow.router),
                // Requests in flight have no ghost that would ever be counted out of a new shadow.
                None => self.router.fork(from, &prices, settings.routing, settings.prefix),
            },
            comparison: Comparison::new(slots.len() as u16),
        });
        Self {
            router: router(&self.router),
            shadow,
            sequence: AtomicU64::new(self.sequence.load(Ordering::Relaxed)),
            unranked_sequence: AtomicU64::new(self.unranked_sequence.load(Ordering::Relaxed)),
            slots,
        }
    }

    /// Whether a watched policy is followed.
    pub(crate) fn has_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Lets a policy choose a rank, and counts the request in on it. `remember` says of a backend whether its ranks
    /// will hold the prompt.
    pub(crate) fn choose(
        self: &Arc<Self>,
        policy: &dyn Policy,
        prompt: &Prompt<'_>,
        admit: Admit<'_>,
        remember: impl Fn(usize) -> bool,
    ) -> Option<(Lease, Choice)> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let (decision, slot) = self.decide(&self.router, policy, prompt, admit, sequence)?;
        let watched = policy.watched().zip(self.shadow.as_ref()).and_then(|(watched, shadow)| {
            let (decision, slot) = self.decide(&shadow.router, watched, prompt, admit, sequence)?;
            Some((shadow, decision, slot))
        });
        let new_blocks = self.router.assign(&decision, prompt.blocks, remember(slot.backend));
        let ghost = watched.map(|(shadow, watched, slot)| {
            let new_blocks = shadow.router.assign(&watched, prompt.blocks, remember(slot.backend));
            shadow.comparison.add(&decision, &watched);
            Charge { slot: watched.choice.rank, work: watched.work, new_blocks }
        });
        let real = Charge { slot: decision.choice.rank, work: decision.work, new_blocks };
        let counted = Counted { pool: Arc::clone(self), real, ghost };
        let lease = Lease::new(slot.backend, Some(slot.rank), slot.inflight.clone(), Some(counted));
        Some((lease, decision.choice))
    }

    /// Lets a policy choose a backend for a request whose rank the engine will choose; `inflight` gives the gauge of
    /// a backend's such requests. No rank is charged for it.
    pub(crate) fn choose_backend(
        &self,
        policy: &dyn Policy,
        prompt: &Prompt<'_>,
        admit: Admit<'_>,
        inflight: impl FnOnce(usize) -> Gauge,
    ) -> Option<Lease> {
        let sequence = self.unranked_sequence.fetch_add(1, Ordering::Relaxed);
        let (_, &Slot { backend, .. }) = self.decide(&self.router, policy, prompt, admit, sequence)?;
        Some(Lease::new(backend, None, inflight(backend), None))
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

    /// The real router, and that of the shadow.
    fn routers(&self) -> impl Iterator<Item = &Router> {
        std::iter::once(&self.router).chain(self.shadow.as_ref().map(|shadow| &shadow.router))
    }

    /// Opens or closes all ranks of a backend. A closed one may be another process when it returns: its caches are
    /// forgotten.
    pub(crate) fn set_available(&self, backend: usize, available: bool) {
        let first = self.slots.partition_point(|slot| slot.backend < backend);
        let end = self.slots.partition_point(|slot| slot.backend <= backend);
        for router in self.routers() {
            router.accounts().set_all_available(first..end, available);
            if let Some(prefixes) = router.prefixes().filter(|_| !available) {
                (first as u16..end as u16).for_each(|slot| {
                    prefixes.forget(slot);
                });
            }
        }
    }

    /// Starts again from the prices of newly loaded tables; loads stay.
    pub(crate) fn reset_prices(&self, members: &[PoolBackend<'_>]) {
        let prices = prices(members);
        self.routers().for_each(|router| router.accounts().reset_prices(&prices));
    }

    /// Whether a backend other than `except` has a rank that takes requests.
    pub(crate) fn has_other(&self, except: &[usize]) -> bool {
        let loads = self.router.accounts().loads();
        self.slots.iter().zip(loads).any(|(slot, load)| load.available && !except.contains(&slot.backend))
    }

    /// The counts and the price of each slot.
    pub(crate) fn look(&self) -> Vec<RankLoad> {
        self.router.accounts().counted()
    }

    /// The gain of the watched policy, where there is one.
    pub(crate) fn report(&self) -> Option<Report> {
        self.shadow.as_ref().map(|shadow| shadow.comparison.report())
    }

    /// Estimated content of the ranks' caches, where that is kept.
    pub(crate) fn prefixes(&self) -> Option<&PrefixTable> {
        self.router.prefixes()
    }
}

/// All ranks of these members.
fn slots(members: &[PoolBackend<'_>], metrics: &Metrics) -> Vec<Slot> {
    let of = |(backend, member): (usize, &PoolBackend<'_>)| {
        let slot =
            |rank| Slot { backend, rank: RankId::new(rank), inflight: metrics.inflight(member.name, Some(rank)) };
        (0..member.ranks).map(slot).collect::<Vec<_>>()
    };
    members.iter().enumerate().flat_map(of).collect()
}

fn prices(members: &[PoolBackend<'_>]) -> Vec<f32> {
    let of = |member: &PoolBackend<'_>| {
        (0..usize::from(member.ranks)).map(|rank| member.prices.get(rank).copied().unwrap_or(0.0)).collect::<Vec<_>>()
    };
    members.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pool(available: bool) -> Arc<Pool> {
        let members = [
            PoolBackend { name: "a", ranks: 2, prices: &[], available: true },
            PoolBackend { name: "b", ranks: 1, prices: &[], available },
        ];
        let (routing, prefix) = (Settings::default(), PrefixSettings::default());
        let settings = PoolSettings { routing: &routing, prefix: &prefix, shadow: false };
        Arc::new(Pool::new(&members, &settings, &Metrics::new()))
    }

    fn in_flight(pool: &Pool) -> Vec<u32> {
        pool.look().iter().map(|load| load.in_flight_requests).collect()
    }

    #[test]
    fn leases_count_in_and_out() {
        let pool = pool(true);
        let policy = semmoe_routing::policy("round_robin").unwrap();
        let prompt = Prompt { tokens: 5, reports: true, ..Prompt::default() };
        let choose = || pool.choose(policy.as_ref(), &prompt, None, |_| true).unwrap().0;
        let mut leases: Vec<Lease> = (0..6).map(|_| choose()).collect();
        assert_eq!(in_flight(&pool), [2, 2, 2]);
        let pending = |pool: &Pool| pool.look().iter().map(|load| load.pending_tokens).sum::<u64>();
        assert_eq!(pending(&pool), 30);
        leases[0].computed();
        leases[0].computed();
        assert_eq!(pending(&pool), 25);
        drop(leases);
        assert_eq!(in_flight(&pool), [0, 0, 0]);
        assert!(pool.look().iter().all(|load| load.in_flight_tokens == 0 && load.pending_tokens == 0));
    }

    proptest! {
        /// Policies with and without a shadow follow each other, requests begin and end meanwhile: in the end nothing
        /// is counted as in flight, on the ranks or on the shadow's.
        #[test]
        fn reloads_leave_no_request_behind(
            begins_shadowed in any::<bool>(), steps in proptest::collection::vec((0u8..4, 0usize..64, any::<bool>()), 0..60),
        ) {
            let members = [PoolBackend { name: "a", ranks: 3, prices: &[], available: true }];
            let from: Vec<Option<u16>> = (0..3).map(Some).collect();
            let (routing, prefix, metrics) = (Settings::default(), PrefixSettings::default(), Metrics::new());
            let settings = |shadow| PoolSettings { routing: &routing, prefix: &prefix, shadow };
            let policy = |shadow: bool| semmoe_routing::policy(if shadow { "shadow" } else { "least_load" }).unwrap();
            let (mut shadowed, mut leases) = (begins_shadowed, Vec::new());
            let mut pool = Arc::new(Pool::new(&members, &settings(shadowed), &metrics));
            for (step, pick, flag) in steps {
                match step {
                    0 | 1 => {
                        let prompt = Prompt { tokens: 7, reports: flag, share: Some(&[0.1, 0.2, 0.7]), ..Prompt::default() };
                        leases.push(pool.choose(policy(shadowed).as_ref(), &prompt, None, |_| true).unwrap().0);
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
                prop_assert_eq!(in_flight(&pool).iter().sum::<u32>() as usize, leases.len());
            }
            leases.clear();
            for load in pool.routers().flat_map(|router| router.accounts().counted()) {
                prop_assert_eq!((load.in_flight_requests, load.in_flight_tokens, load.pending_tokens), (0, 0, 0));
            }
            prop_assert!(pool.slots().iter().all(|slot| slot.in_flight() == 0));
        }
    }

    #[test]
    fn only_admitted_and_available_slots_are_chosen() {
        let pool = pool(false);
        let policy = semmoe_routing::policy("round_robin").unwrap();
        let prompt = Prompt { tokens: 1, ..Prompt::default() };
        let choose = |admit: Admit<'_>| pool.choose(policy.as_ref(), &prompt, admit, |_| true);
        for _ in 0..4 {
            let (lease, _) = choose(Some(&|slot| slot.rank.get() == 0)).unwrap();
            assert_eq!((lease.backend, lease.rank), (0, Some(RankId::new(0))));
        }
        assert!(choose(Some(&|slot| slot.backend == 1)).is_none());
        pool.set_available(1, true);
        assert!(choose(Some(&|slot| slot.backend == 1)).is_some());
    }
}
