//! Which requests ask for routed experts, and how they are sent.

use std::sync::Arc;

use semmoe_engines::Route;
use semmoe_engines::pin::Stripped;
use semmoe_engines::routed::{self, Asking, Place};
use semmoe_tables::RankId;

use super::seen::{MISSING, Observation, Seen};
use crate::backend::Backend;
use crate::config::SamplingConfig;
use crate::snapshot::Model;
use crate::state::Core;

/// A request whose engine is asked for routed experts. It is counted exactly once: by its outcome, or as
/// `unfinished` when it is dropped before.
pub(crate) struct Sample {
    core: Arc<Core>,
    seen: Option<Seen>,
    pub(crate) asking: Asking,
    /// The longest answer that is held back.
    pub(super) limit_bytes: usize,
}

impl Sample {
    /// The next request to a backend that can be asked, if it is its turn and says nothing about routed experts itself.
    pub(crate) fn choose(
        core: &Arc<Core>,
        config: &SamplingConfig,
        model: &Arc<Model>,
        body: &Stripped,
        route: Route,
        member: usize,
        rank: Option<RankId>,
    ) -> Option<Self> {
        let share = config.share;
        if share <= 0.0 {
            return None;
        }
        let at = model.members.get(member)?;
        // A backend that its tables do not fit says nothing about them.
        let tables = at.tables.as_ref().filter(|_| at.fit.unpinned.is_none())?;
        let live = &at.backend.live;
        let layers_known = tables.tables.model().num_hidden_layers > 0 || live.hidden_layers() > 0;
        // The answers of the OpenAI routes do not name the rank.
        let rank_known = route == Route::Generate || at.fit.ranks <= 1 || rank.is_some();
        if !rank_known || !layers_known || !live.can_ask(route) || live.has_refused() || !live.take(share) {
            return None;
        }
        let Some(asking) = routed::ask(at.backend.engine, route, body) else {
            live.note_unfit();
            core.metrics.live.sampled(&at.backend.name, "unfit");
            return None;
        };
        let seen = Seen {
            backend: Arc::clone(&at.backend),
            model: Arc::clone(model),
            tables: Arc::clone(tables),
            dialect: at.fit.dialect,
            route,
            rank,
            body: body.bytes().clone(),
        };
        Some(Self { core: Arc::clone(core), seen: Some(seen), asking, limit_bytes: config.max_answer_bytes })
    }

    /// The answer is not looked at, and this is why.
    pub(crate) fn give_up(mut self, outcome: &'static str) {
        // vLLM does not refuse the question when it is started without its flag: its answers just lack what was asked
        // for.
        if outcome == MISSING
            && matches!(self.asking.place, Place::Choices { .. })
            && let Some(seen) = self.seen.as_ref().filter(|seen| !seen.backend.live.tells_unasked())
        {
            note_refusal(&self.core, &seen.backend, "answers without the routed experts that a request asks for");
        }
        self.count(outcome);
    }

    /// The engine takes the request only without the question, and is not asked any more until it is probed again.
    pub(crate) fn refuse(self) {
        if let Some(seen) = &self.seen {
            note_refusal(&self.core, &seen.backend, "refuses requests that ask for routed experts");
        }
        self.give_up("refused");
    }

    /// The answer, or the event of it, that holds the routed experts.
    pub(super) fn submit(mut self, answer: bytes::Bytes) {
        let Some(seen) = self.seen.take() else { return };
        let backend = Arc::clone(&seen.backend);
        if matches!(self.asking.place, Place::Choices { .. }) {
            note_unasked(&self.core, &backend);
        }
        if self.core.live.queue.try_send(Observation { seen, answer }).is_err() {
            self.core.metrics.live.sampled(&backend.name, "queue_full");
        }
    }

    fn count(&mut self, outcome: &'static str) {
        if let Some(seen) = self.seen.take() {
            self.core.metrics.live.sampled(&seen.backend.name, outcome);
        }
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        self.count("unfinished");
    }
}

/// An engine does not send routed experts: it is not asked any more until it is probed again.
fn note_refusal(core: &Core, backend: &Backend, what: &'static str) {
    if backend.live.refuse() {
        core.metrics.live.refused(&backend.name, true);
        tracing::warn!(
            backend = backend.name,
            "the engine {what}, so it is no longer asked: was it started with --enable-return-routed-experts?"
        );
    }
}

/// An answer of vLLM has routed experts, so it is started with its flag, even if an earlier answer lacked them.
pub(crate) fn note_unasked(core: &Core, backend: &Backend) {
    if backend.live.note_unasked() {
        core.metrics.live.refused(&backend.name, false);
    }
}
