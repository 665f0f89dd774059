//! Per-route evidence about one backend's pins, for requests and for the tasks that verify pins.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use semmoe_engines::Route;
use semmoe_engines::verify::{Evidence, Observation, PROBED, PinWatch, Pins, Schedule};
use tokio::sync::Notify;

const ROUTES: usize = Route::ALL.len();

/// The evidence about one backend's pins.
#[derive(Debug, Default)]
pub(crate) struct PinRecord {
    state: Mutex<PinState>,
    /// The state of each route, in the order of [`Route::ALL`]; atomics, because every request reads them.
    routes: [OnRoute; ROUTES],
    /// Whether the engine refused a pin because it has no such rank. If so, no pins are sent until it has been queried
    /// again.
    refused: AtomicBool,
    /// Held during a round of probes, because the counts of two concurrent rounds would be indistinguishable.
    pub(super) round: tokio::sync::Mutex<()>,
    /// Wakes the watcher when a contradiction is suspended.
    pub(super) suspended: Notify,
    /// Wakes the watcher when a pin is refused.
    pub(super) refusal: Notify,
}

/// Whether requests on a route run on the rank they are pinned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Belief {
    /// Too little evidence.
    Unproven,
    /// Requests run on the rank they are pinned to, for every rank.
    Proven,
    /// Requests run elsewhere.
    Ignored,
}

#[derive(Debug, Default)]
struct OnRoute {
    /// A [`Belief`].
    belief: AtomicU8,
    /// Index of the route whose evidence applies to this one. It differs from this route if the engine does not show
    /// where this route's requests run.
    witness: AtomicU8,
    /// Number of requests whose responses do not name their rank.
    requests: AtomicU64,
    /// Value of `requests` at which the next round is due.
    due_at: AtomicU64,
    due: Notify,
}

/// Evidence, verdicts and schedules of one backend.
#[derive(Clone, Debug, Default)]
pub(crate) struct PinState {
    /// The state of each route, in the order of [`Route::ALL`].
    routes: [RouteState; ROUTES],
    /// The route with the latest evidence.
    last: Option<Route>,
    /// How the engine refused a pin, if it did.
    pub(crate) refusal: Option<String>,
    /// Counts as evidence once the engine has been queried for its ranks again.
    pub(super) suspended: Option<Suspended>,
}

/// Evidence, verdict and schedule of one route.
#[derive(Clone, Debug, Default)]
pub(crate) struct RouteState {
    pub(crate) watch: PinWatch,
    pub(super) schedule: Schedule,
    /// The last contradiction, or else the last round's outcome or why that round was inconclusive.
    pub(crate) detail: Option<String>,
    /// Whether requests were observed to run where they were pinned, on every rank.
    proven: bool,
}

/// Responses that named a rank other than the pinned one.
#[derive(Clone, Debug)]
pub(super) struct Suspended {
    pub(super) route: Route,
    pub(super) contradicted: u64,
    /// Describes the last of these responses.
    pub(super) detail: String,
}

impl OnRoute {
    fn count(&self) {
        if self.requests.fetch_add(1, Ordering::Relaxed) + 1 >= self.due_at.load(Ordering::Relaxed) {
            self.due.notify_one();
        }
    }
}

impl PinState {
    /// Returns a route's state; extra routes are never pinned and have no evidence.
    pub(crate) fn route(&self, route: Route) -> RouteState {
        self.routes.get(route as usize).cloned().unwrap_or_default()
    }

    pub(super) fn route_mut(&mut self, route: Route) -> Option<&mut RouteState> {
        self.routes.get_mut(route as usize)
    }

    /// Iterates over the routes with evidence.
    pub(crate) fn seen(&self) -> impl Iterator<Item = (Route, &RouteState)> {
        let has_evidence = |(_, state): &(Route, &RouteState)| state.watch.total() > 0 || state.detail.is_some();
        Route::ALL.into_iter().zip(&self.routes).filter(has_evidence)
    }

    /// Returns the route that represents the backend: one on which pins are ignored although, according to `reads`, the
    /// engine reads them there, or else the route with the latest evidence.
    pub(crate) fn summary(&self, reads: impl Fn(Route) -> bool) -> RouteState {
        let ignored = self.seen().find(|(route, state)| reads(*route) && state.watch.pins == Pins::Ignored);
        let honoured = || self.seen().find(|(_, state)| state.watch.pins == Pins::Honoured);
        let last = self.last.map(|route| self.route(route)).filter(|last| last.watch.pins == Pins::Honoured);
        match (ignored, last) {
            (Some((_, ignored)), _) => ignored.clone(),
            (None, Some(last)) => last,
            (None, None) => honoured().or_else(|| self.seen().next()).map(|(_, it)| it.clone()).unwrap_or_default(),
        }
    }
}

impl RouteState {
    fn belief(&self) -> Belief {
        match self.watch.pins {
            Pins::Ignored => Belief::Ignored,
            Pins::Honoured if self.proven => Belief::Proven,
            Pins::Honoured | Pins::Unverified => Belief::Unproven,
        }
    }
}

impl PinRecord {
    pub(crate) fn state(&self) -> PinState {
        self.locked(|state| state.clone())
    }

    /// Whether requests on a route run where they are pinned.
    pub(crate) fn belief(&self, route: Route) -> Belief {
        match self.routes.get(route as usize).map_or(0, |on| on.belief.load(Ordering::Relaxed)) {
            belief if belief == Belief::Proven as u8 => Belief::Proven,
            belief if belief == Belief::Ignored as u8 => Belief::Ignored,
            _ => Belief::Unproven,
        }
    }

    /// Whether the engine has refused a pin and has not been queried since.
    pub(crate) fn are_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Records that the engine has no such rank; returns true the first time.
    pub(super) fn refuse(&self, detail: String) -> bool {
        self.locked(|state| state.refusal = Some(detail));
        self.refusal.notify_one();
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// Resumes sending pins.
    pub(super) fn end_refusal(&self) {
        self.locked(|state| state.refusal = None);
        self.refused.store(false, Ordering::Relaxed);
    }

    /// Counts a request whose response will not name its rank.
    pub(crate) fn count_request(&self, route: Route) {
        let Some(on) = self.routes.get(route as usize) else { return };
        on.count();
        let witness = usize::from(on.witness.load(Ordering::Relaxed));
        if let Some(witness) = self.routes.get(witness).filter(|_| witness != route as usize) {
            witness.count();
        }
    }

    /// Adds an observation; returns the verdict if it changed. `detail` describes the observation.
    pub(crate) fn observe(&self, route: Route, seen: Observation, detail: impl FnOnce() -> String) -> Option<Pins> {
        let changed = self.locked(|state| {
            state.last = Some(route);
            let on = state.route_mut(route)?;
            let settled = on.watch.pins != Pins::Ignored && !on.watch.is_in_doubt();
            // Every client response passes through here, so build the text only for one that disagrees.
            let tells_more = seen.evidence != Evidence::Answer || on.detail.is_none();
            if seen.contradicted > 0 || settled && tells_more {
                on.detail = Some(detail());
            }
            let (before, is_first) = (on.watch.pins, on.watch.total() == 0);
            on.proven &= seen.contradicted == 0;
            let now = on.watch.observe(seen);
            if now.is_some() || is_first || seen.contradicted > 0 {
                self.publish(state);
            }
            Some((before, now?))
        });
        let (before, now) = changed?;
        if [before, now].contains(&Pins::Ignored) {
            // A change seen on this route, for example in a proxy, may affect every route.
            self.want_rounds(route);
        }
        Some(now)
    }

    /// Publishes the state to requests.
    fn publish(&self, state: &PinState) {
        let has_evidence = |route: &Route| state.routes[*route as usize].watch.total() > 0;
        let witness = PROBED.into_iter().find(has_evidence);
        for (route, on) in Route::ALL.into_iter().zip(&self.routes) {
            let of = if has_evidence(&route) { route } else { witness.unwrap_or(route) };
            let belief = match state.routes[of as usize].belief() {
                Belief::Proven if of != route => Belief::Unproven,
                belief => belief,
            };
            on.belief.store(belief as u8, Ordering::Relaxed);
            on.witness.store(of as u8, Ordering::Relaxed);
        }
    }

    fn want_rounds(&self, except: Route) {
        for (at, on) in self.routes.iter().enumerate().filter(|(at, _)| *at != except as usize) {
            self.locked(|state| state.routes[at].schedule.want_round());
            on.due.notify_one();
        }
    }

    /// Records the end of a probe round over `ranks`; `conclusive` if it proved something.
    pub(super) fn round_ended(&self, route: Route, conclusive: bool, ranks: u16) {
        self.locked(|state| {
            if let Some(on) = state.route_mut(route) {
                on.schedule.ended(conclusive);
                on.proven = on.schedule.has_seen_all(ranks) && !on.watch.is_in_doubt();
                self.publish(state);
            }
        });
    }

    /// Suspends a contradiction until the engine has been queried for its ranks again.
    pub(crate) fn suspend(&self, route: Route, detail: String) {
        self.locked(|state| {
            let contradicted = state.suspended.as_ref().map_or(0, |it| it.contradicted) + 1;
            state.suspended = Some(Suspended { route, contradicted, detail });
        });
        self.suspended.notify_one();
    }

    /// Discards all evidence, because the engine may have been replaced.
    pub(super) fn reset(&self) {
        self.locked(|state| *state = PinState::default());
        self.refused.store(false, Ordering::Relaxed);
        for (at, on) in self.routes.iter().enumerate() {
            on.belief.store(Belief::Unproven as u8, Ordering::Relaxed);
            on.witness.store(at as u8, Ordering::Relaxed);
            on.due.notify_one();
        }
    }

    /// Waits for this many more requests on a route, or for another reason to verify its pins.
    pub(super) async fn after_requests(&self, route: Route, requests: u64) {
        let Some(on) = self.routes.get(route as usize) else { return std::future::pending().await };
        let due_at = on.requests.load(Ordering::Relaxed) + requests;
        if requests > 0 {
            on.due_at.store(due_at, Ordering::Relaxed);
            on.due.notified().await;
        }
        on.due_at.store(u64::MAX, Ordering::Relaxed);
    }

    pub(super) fn locked<T>(&self, work: impl FnOnce(&mut PinState) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probes(agreed: u64, contradicted: u64) -> Observation {
        Observation { evidence: Evidence::Counter, agreed, contradicted }
    }

    #[test]
    fn routes_are_judged_one_by_one() {
        let record = PinRecord::default();
        assert!(Route::ALL.iter().enumerate().all(|(at, route)| at == *route as usize));
        for _ in 0..2 {
            record.observe(Route::Chat, probes(4, 0), String::new);
            record.round_ended(Route::Chat, true, 2);
            record.observe(Route::Responses, probes(2, 2), || "two ran elsewhere".to_owned());
            record.round_ended(Route::Responses, true, 2);
        }
        let beliefs = [Route::Chat, Route::Responses, Route::Completions, Route::Extra].map(|it| record.belief(it));
        assert_eq!(beliefs, [Belief::Proven, Belief::Ignored, Belief::Unproven, Belief::Unproven]);
        // Evidence about chats applies to routes without any.
        record.observe(Route::Chat, probes(0, 4), String::new);
        record.observe(Route::Chat, probes(0, 4), String::new);
        let beliefs = [Route::Chat, Route::Completions, Route::Responses].map(|it| record.belief(it));
        assert_eq!(beliefs, [Belief::Ignored; 3]);
        record.observe(Route::Chat, probes(32, 0), String::new);
        assert_eq!(record.belief(Route::Completions), Belief::Unproven);
        let state = record.state();
        assert_eq!(state.summary(|route| route == Route::Chat).watch.pins, Pins::Honoured);
        assert_eq!(state.summary(|_| true).detail.as_deref(), Some("two ran elsewhere"));
        assert_eq!(record.state().route(Route::Completions).schedule.requests(&PinWatch::default(), 2), 0);
        record.reset();
        assert_eq!(record.belief(Route::Chat), Belief::Unproven);
    }

    /// A rank that no probe reached proves nothing, nor does a recently contradicted route.
    #[test]
    fn proof_takes_every_rank() {
        let record = PinRecord::default();
        let round = |conclusive, seen| {
            if let Some(seen) = seen {
                record.observe(Route::Chat, seen, String::new);
            }
            record.round_ended(Route::Chat, conclusive, 2);
            record.belief(Route::Chat)
        };
        assert_eq!(round(true, Some(probes(4, 0))), Belief::Unproven);
        assert_eq!(round(false, None), Belief::Unproven);
        assert_eq!(round(true, Some(probes(4, 0))), Belief::Proven);
        assert_eq!(round(true, Some(probes(3, 1))), Belief::Unproven);
    }
}
