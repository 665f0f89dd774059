//! Applies new evidence to the backend's record, the metrics and the log.

use semmoe_engines::refusal::RankRefusal;
use semmoe_engines::verify::{Evidence, Observation, Pins};
use semmoe_engines::{Dialect, Route};

use super::record::RouteState;
use crate::backends::verdict::Unpinned;
use crate::backends::{Backend, Backends, Fit};

/// The metric label for a backend that refused a pin and is routed by load.
const REFUSED: &str = "ranks";

impl Backends {
    /// Adds a response's evidence about a backend's pins on a route.
    pub(crate) fn note_pin(&self, backend: &Backend, route: Route, pinned: u32, ran_on: u32) {
        let detail = || format!("a response to a request pinned to rank {pinned} named rank {ran_on}");
        if pinned != ran_on && backend.can_switch() {
            backend.pins.suspend(route, detail());
        } else {
            self.note_pins(backend, route, Observation::answer(pinned == ran_on), detail);
        }
    }

    /// Adds an observation of a backend's pins on a route; `detail` describes it.
    pub(crate) fn note_pins(
        &self,
        backend: &Backend,
        route: Route,
        seen: Observation,
        detail: impl FnOnce() -> String,
    ) {
        let changed = backend.pins.observe(route, seen, detail);
        if seen.contradicted == 0 && changed.is_none() {
            return;
        }
        let newest = || Dialect::of(backend.engine, None);
        let reads = backend.last_probe().map_or_else(newest, |probe| probe.dialect).reads(route).is_some();
        if reads {
            self.metrics.pins.contradicted(&backend.name, seen.contradicted);
        }
        let Some(pins) = changed else { return };
        let snapshot = self.snapshot();
        if let Some(at) = snapshot.find(&backend.name) {
            self.show_pins(backend, &snapshot.at(at).1.fit);
        }
        let (name, state) = (backend.name.as_str(), backend.pins.state().route(route));
        let (agreed, contradicted) = (state.watch.agreed, state.watch.contradicted);
        let evidence = state.watch.evidence.map_or("none", Evidence::name);
        let detail = state.detail.unwrap_or_default();
        match pins {
            Pins::Ignored if reads => tracing::warn!(
                backend = name,
                %route,
                evidence,
                agreed,
                contradicted,
                detail,
                "pin ignored: requests run on ranks other than the pinned ones, so they are routed by load"
            ),
            Pins::Ignored => {
                tracing::info!(backend = name, %route, evidence, detail, "the engine does not read pins on this route")
            }
            _ => tracing::info!(backend = name, %route, evidence, agreed, "pins are honoured"),
        }
    }

    /// Records that an engine refused a pin because it has no such rank. The engine receives no pins until it has been
    /// queried again.
    pub(crate) fn note_refusal(&self, backend: &Backend, RankRefusal { rank, ranks }: &RankRefusal) {
        self.metrics.pins.refused(&backend.name);
        let has = ranks.map_or_else(String::new, |ranks| format!(" and reports {ranks}"));
        let detail = format!("the engine refused a request pinned to rank {rank}{has}");
        if backend.pins.refuse(detail.clone()) {
            self.metrics.pins.unpinned(&backend.name, Some(REFUSED));
            tracing::warn!(backend = backend.name, detail, "requests are not pinned: routing them by load");
        }
    }

    /// Updates the gauges for a backend's pins.
    pub(crate) fn show_pins(&self, backend: &Backend, fit: &Fit) {
        let state = backend.pins.state();
        let ignored =
            |(route, it): (Route, &RouteState)| it.watch.pins == Pins::Ignored && fit.dialect.reads(route).is_some();
        self.metrics.pins.ignored(&backend.name, state.seen().any(ignored));
        let reason = fit.unpinned.as_ref().map(Unpinned::reason);
        self.metrics.pins.unpinned(&backend.name, reason.or(state.refusal.as_ref().map(|_| REFUSED)));
    }
}
