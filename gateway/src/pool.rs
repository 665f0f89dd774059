//! The ranks of all backends of one model, their accounts, and the leases that keep the accounts true.
//!
//! One decision looks at every rank of every backend, so one set of accounts covers them all. The lock is held while a
//! policy chooses and the choice is written down, a few hundred nanoseconds: two requests never see the same load.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::metrics::gauge::Gauge;
use semmoe_routing::{Accounts, Choice, Policy, RankLoad, Request, Settings};
use semmoe_tables::RankId;

use crate::metrics::Metrics;

/// One rank of one backend.
#[derive(Clone)]
pub(crate) struct Slot {
    /// Index of the backend in its model.
    pub(crate) backend: usize,
    pub(crate) rank: RankId,
    inflight: Gauge,
}

/// All slots of one model.
pub(crate) struct Pool {
    slots: Vec<Slot>,
    state: Mutex<State>,
}

struct State {
    accounts: Accounts,
    /// Counts decisions; policies break ties with it.
    sequence: u64,
    /// The same for requests that only need a backend.
    unranked_sequence: u64,
    /// Requests counted out so far, per slot.
    finished: Vec<u64>,
}

/// Which slots may be chosen; `None` is all that are available.
pub(crate) type Admit<'a> = Option<&'a dyn Fn(&Slot) -> bool>;

/// Name, ranks (0 while unknown) and table prices of a backend, to make a pool of.
pub(crate) struct Member<'a> {
    pub(crate) name: &'a str,
    pub(crate) ranks: u16,
    pub(crate) prices: &'a [f32],
    pub(crate) available: bool,
}

impl Pool {
    pub(crate) fn new(members: &[Member<'_>], settings: &Settings, metrics: &Metrics) -> Self {
        let mut slots = Vec::new();
        let mut available = Vec::new();
        for (backend, member) in members.iter().enumerate() {
            for rank in 0..member.ranks {
                let inflight = metrics.inflight(member.name, Some(rank));
                slots.push(Slot { backend, rank: RankId::new(rank), inflight });
                available.push(member.available);
            }
        }
        // The configuration bounds ranks per backend; more than 65535 in one model are cut off here.
        let count = u16::try_from(slots.len()).unwrap_or(u16::MAX);
        slots.truncate(usize::from(count));
        let mut accounts = Accounts::new(count, &prices(members), settings);
        for (slot, available) in (0..count).zip(available) {
            accounts.set_available(slot, available);
        }
        let finished = vec![0; slots.len()];
        Self { slots, state: Mutex::new(State { accounts, sequence: 0, unranked_sequence: 0, finished }) }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Lets a policy choose a rank, and counts the request in on it.
    pub(crate) fn choose(
        self: &Arc<Self>,
        policy: &dyn Policy,
        request: &Request<'_>,
        admit: Admit<'_>,
    ) -> Option<(Lease, Choice)> {
        let mut state = self.lock();
        let choice = self.pick(&state, policy, request, admit, state.sequence)?;
        let slot = self.slots.get(usize::from(choice.rank))?;
        state.sequence = state.sequence.wrapping_add(1);
        state.accounts.assign(choice.rank, request.tokens);
        drop(state);
        slot.inflight.inc();
        let counted = Counted { pool: Arc::clone(self), slot: choice.rank, tokens: request.tokens };
        let lease = Lease {
            backend: slot.backend,
            rank: Some(slot.rank),
            inflight: slot.inflight.clone(),
            counted: Some(counted),
        };
        Some((lease, choice))
    }

    /// Lets a policy choose a backend for a request whose rank the engine will choose; `inflight` gives the gauge of
    /// a backend's such requests. No rank is charged for it.
    pub(crate) fn choose_backend(
        &self,
        policy: &dyn Policy,
        request: &Request<'_>,
        admit: Admit<'_>,
        inflight: impl FnOnce(usize) -> Gauge,
    ) -> Option<Lease> {
        let mut state = self.lock();
        let choice = self.pick(&state, policy, request, admit, state.unranked_sequence)?;
        state.unranked_sequence = state.unranked_sequence.wrapping_add(1);
        drop(state);
        let backend = self.slots.get(usize::from(choice.rank))?.backend;
        let inflight = inflight(backend);
        inflight.inc();
        Some(Lease { backend, rank: None, inflight, counted: None })
    }

    fn pick(
        &self,
        state: &State,
        policy: &dyn Policy,
        request: &Request<'_>,
        admit: Admit<'_>,
        sequence: u64,
    ) -> Option<Choice> {
        let (loads, prices) = (state.accounts.loads(), state.accounts.prices());
        let Some(admit) = admit else { return policy.choose(request, loads, prices, sequence) };
        let mask = |(load, slot): (&RankLoad, &Slot)| RankLoad { available: load.available && admit(slot), ..*load };
        let masked: Vec<RankLoad> = loads.iter().zip(&self.slots).map(mask).collect();
        policy.choose(request, &masked, prices, sequence)
    }

    /// Opens or closes all ranks of a backend.
    pub(crate) fn set_available(&self, backend: usize, available: bool) {
        let mut state = self.lock();
        for (slot, index) in self.slots.iter().zip(0..) {
            if slot.backend == backend {
                state.accounts.set_available(index, available);
            }
        }
    }

    /// Starts again from the prices of newly loaded tables; loads stay.
    pub(crate) fn reset_prices(&self, members: &[Member<'_>]) {
        self.lock().accounts.reset_prices(&prices(members));
    }

    /// Loads and prices, one per slot.
    pub(crate) fn look(&self) -> (Vec<RankLoad>, Vec<f64>) {
        let state = self.lock();
        (state.accounts.loads().to_vec(), state.accounts.prices().to_vec())
    }

    /// Requests in flight on each rank of a backend, and how many were counted out there so far.
    pub(crate) fn turnover(&self, backend: usize) -> Vec<(u64, u64)> {
        let state = self.lock();
        let slots = self.slots.iter().zip(state.accounts.loads()).zip(&state.finished);
        slots
            .filter(|((slot, _), _)| slot.backend == backend)
            .map(|((_, load), finished)| (u64::from(load.in_flight_requests), *finished))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A policy that panicked has changed nothing yet.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn prices(members: &[Member<'_>]) -> Vec<f32> {
    let of = |member: &Member<'_>| {
        (0..usize::from(member.ranks)).map(|rank| member.prices.get(rank).copied().unwrap_or(0.0)).collect::<Vec<_>>()
    };
    members.iter().flat_map(of).collect()
}

/// A request that is counted in; dropping it counts it out, exactly once, however the request ends.
pub(crate) struct Lease {
    /// Index of the backend in its model.
    pub(crate) backend: usize,
    /// The rank it was placed on; `None` where the engine chooses.
    pub(crate) rank: Option<RankId>,
    inflight: Gauge,
    counted: Option<Counted>,
}

struct Counted {
    pool: Arc<Pool>,
    slot: u16,
    tokens: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(counted) = &self.counted {
            let mut state = counted.pool.lock();
            state.accounts.release(counted.slot, counted.tokens);
            if let Some(finished) = state.finished.get_mut(usize::from(counted.slot)) {
                *finished += 1;
            }
        }
        self.inflight.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(available: bool) -> Arc<Pool> {
        let members = [
            Member { name: "a", ranks: 2, prices: &[], available: true },
            Member { name: "b", ranks: 1, prices: &[], available },
        ];
        Arc::new(Pool::new(&members, &Settings::default(), &Metrics::new()))
    }

    fn in_flight(pool: &Pool) -> Vec<u32> {
        pool.look().0.iter().map(|load| load.in_flight_requests).collect()
    }

    #[test]
    fn leases_count_in_and_out() {
        let pool = pool(true);
        let policy = semmoe_routing::policy("round_robin").unwrap();
        let request = Request { tokens: 5, share: None };
        let leases: Vec<Lease> = (0..6).map(|_| pool.choose(policy.as_ref(), &request, None).unwrap().0).collect();
        assert_eq!(in_flight(&pool), [2, 2, 2]);
        drop(leases);
        assert_eq!(in_flight(&pool), [0, 0, 0]);
        assert!(pool.look().0.iter().all(|load| load.in_flight_tokens == 0));
    }

    #[test]
    fn only_admitted_and_available_slots_are_chosen() {
        let pool = pool(false);
        let policy = semmoe_routing::policy("round_robin").unwrap();
        let request = Request { tokens: 1, share: None };
        for _ in 0..4 {
            let (lease, _) = pool.choose(policy.as_ref(), &request, Some(&|slot| slot.rank.get() == 0)).unwrap();
            assert_eq!((lease.backend, lease.rank), (0, Some(RankId::new(0))));
        }
        assert!(pool.choose(policy.as_ref(), &request, Some(&|slot| slot.backend == 1)).is_none());
        pool.set_available(1, true);
        assert!(pool.choose(policy.as_ref(), &request, Some(&|slot| slot.backend == 1)).is_some());
    }
}
