//! Admits a probed backend and reports the outcome in the log and the metrics.

use std::sync::Arc;

use semmoe_engines::probe::Probe;
use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::{Dialect, Route};
use semmoe_text::Shapes;

use crate::backends::parity::counts::Change;
use crate::backends::verdict::Closed;
use crate::backends::{Backend, Backends, Fit, Health, Member, Model, compat};

impl Backends {
    /// Evaluates a backend by its probe report and its loaded files, adopts the rank count that it reports, and opens
    /// it.
    pub(crate) fn admit(&self, backend: &Arc<Backend>, probe: &Probe) -> Result<(), Closed> {
        self.judge_by(backend, probe, true)
    }

    /// Re-evaluates a serving backend after a new probe report. The backend serves throughout.
    pub(crate) fn judge_again(&self, backend: &Arc<Backend>, probe: &Probe) -> Result<(), Closed> {
        self.judge_by(backend, probe, false)
    }

    fn judge_by(&self, backend: &Arc<Backend>, probe: &Probe, admits: bool) -> Result<(), Closed> {
        let changing = self.changing();
        let snapshot = self.snapshot();
        let Some(at) = snapshot.position(backend) else { return Ok(()) };
        // Stored even if the verdict is negative: matching tables may be loaded next.
        backend.set_probe(probe.clone());
        let (model, member) = snapshot.at(at);
        let fit = model.judge(at.member, Some(probe), snapshot.config.limits.ranks)?;
        if admits {
            self.note_admission(model, member, probe, &fit);
        } else {
            self.note_fit(backend, &fit);
        }
        if member.fit != fit {
            if fit.ranks < member.fit.ranks {
                self.retire_ranks([(backend.name.clone(), member.fit.ranks)]);
            }
            self.swap(&changing, Arc::new(snapshot.with_backend(at, fit, &self.metrics)));
        }
        self.refresh(backend);
        drop(changing);
        self.sweep();
        Ok(())
    }

    /// Marks a backend healthy and closes its circuit breaker: it can serve.
    pub(crate) fn note_admission(&self, model: &Model, member: &Member, probe: &Probe, fit: &Fit) {
        let (backend, tables) = (&member.backend, member.tables.as_ref().map(|loaded| loaded.tables.as_ref()));
        let ranks = fit.ranks;
        backend.live.probed(backend.engine, probe);
        self.metrics.live.refused(&backend.name, false);
        tracing::info!(
            model = model.name,
            backend = backend.name,
            version = probe.version.as_deref().unwrap_or("unknown"),
            ranks,
            placement_by = compat::placement_source(probe, &backend.config, tables),
            "backend probed"
        );
        self.note_fit(backend, fit);
        warn_of_launch(&backend.name, probe, tables.is_some());
        warn_of_routes_without_pins(backend, &fit.dialect, ranks);
        self.note_health(backend, Health::Healthy);
        // Earlier failures may belong to a previous process.
        backend.gate.renew();
    }

    /// If a backend's requests are not pinned, logs why.
    pub(crate) fn note_fit(&self, backend: &Backend, fit: &Fit) {
        self.show_pins(backend, fit);
        if !fit.parity.differs.is_empty() {
            let (backend, shapes) = (backend.name.as_str(), fit.parity.differs);
            let how = fit.parity.detail.as_deref().unwrap_or_default();
            tracing::warn!(backend, %shapes, how, "the engine tokenizes these chat shapes differently: routing them by load");
        }
        if let Some(why) = &fit.unpinned {
            let (backend, reason) = (backend.name.as_str(), why.reason());
            tracing::warn!(backend, reason, %why, "requests are not pinned: routing them by load");
        }
    }

    /// Compares the gateway's token count of a prompt with the engine's. If they differ, the engine uses a different
    /// tokenizer or chat template, and the scores describe a prompt other than the one it runs.
    pub(crate) fn note_count(&self, backend: &Backend, shapes: Shapes, counted: u64, reported: u64) {
        let differ = self.metrics.prompts.counted(&backend.name, counted == reported);
        if !shapes.is_empty() {
            note_shapes(backend, shapes, counted == reported);
        }
        // Log the first mismatch, then exponentially fewer.
        if differ.is_power_of_two() && counted != reported {
            tracing::warn!(
                backend = backend.name,
                counted,
                reported,
                differ,
                "prompt token counts differ from the engine's: check its tokenizer and chat template"
            );
        }
    }
}

/// Updates the trust in these chat shapes: several consecutive mismatches on the same shapes are no coincidence.
fn note_shapes(backend: &Backend, shapes: Shapes, agree: bool) {
    let name = backend.name.as_str();
    match backend.counts.note(shapes, agree) {
        None => {}
        Some(Change::Distrusted(shapes)) => tracing::warn!(
            backend = name,
            %shapes,
            "token counts differ from the engine's for these chat shapes: routing them by load until they agree"
        ),
        Some(Change::Trusted(shapes)) => {
            tracing::info!(backend = name, %shapes, "token counts for these chat shapes agree again")
        }
    }
}

/// Warns if the engine's launch options defeat affinity: locality saves bytes only if tokens are sent to the experts
/// they need.
fn warn_of_launch(backend: &str, probe: &Probe, has_tables: bool) {
    if has_tables && probe.server.as_ref().is_some_and(ServerInfo::exchanges_nothing) {
        tracing::warn!(
            backend,
            moe_a2a_backend = "none",
            "every EP rank of this engine processes the same gathered tokens, so affinity saves no bytes; start it with \
             --moe-a2a-backend deepep or another all-to-all backend"
        );
    }
}

/// Warns the operator about routes on which this engine version ignores pins and chooses the rank itself.
fn warn_of_routes_without_pins(backend: &Backend, dialect: &Dialect, ranks: u16) {
    let chosen = [Route::Chat, Route::Completions, Route::Responses, Route::Generate];
    let has = |route: &Route| *route != Route::Generate || backend.engine.speaks_sglang();
    let unpinned = chosen.into_iter().filter(|route| has(route) && dialect.reads(*route).is_none());
    let unpinned: Vec<String> = unpinned.map(|route| route.to_string()).collect();
    if ranks > 1 && !unpinned.is_empty() {
        let (backend, routes) = (backend.name.as_str(), unpinned.join(" "));
        tracing::warn!(backend, routes, "the engine reads no pins on these routes and chooses the rank itself");
    }
}
