//! Selects the requests for which the engine must return routed experts.

use std::sync::Arc;

use semmoe_engines::{Route, routed};
use semmoe_tables::RankId;

use crate::backends::{Belief, Member, text_route};
use crate::observe::{Sample, Seen};

use super::{DataPlane, Job};

/// Samples this request if one is due, the backend supports it, and the request does not set the field itself.
pub(super) fn choose(plane: &DataPlane, job: &Job, member: &Member, rank: Option<RankId>) -> Option<Sample> {
    let config = &job.snapshot.config.sampling;
    if config.share <= 0.0 {
        return None;
    }
    // Samples from a backend that does not match its tables reveal nothing about them.
    let tables = member.tables.as_ref().filter(|_| member.fit.unpinned.is_none())?;
    let (backend, live, route) = (&member.backend, &member.backend.live, job.route);
    let layers_known = tables.tables.model().num_hidden_layers > 0 || live.hidden_layers() > 0;
    // Responses on the OpenAI routes do not name the rank.
    let rank_known = route == Route::Generate || member.fit.ranks <= 1 || rank.is_some();
    if !rank_known || !layers_known || !live.can_ask(route) || live.has_refused() || !live.take(config.share) {
        return None;
    }
    let Some(asking) = routed::ask(backend.engine, route, &job.body) else {
        plane.live.note_unfit(live);
        return None;
    };
    let (text, pins) = (job.model.text.as_deref(), Arc::clone(backend));
    let seen = Seen {
        backend: Arc::clone(live),
        model: job.model.name.clone(),
        preparation: job.model.preparation(),
        tokenizer: text.map(|text| Arc::clone(&text.tokenizer)),
        template: text.and_then(|text| text.template.clone()),
        tables: Arc::clone(&tables.tables),
        scorer: Arc::clone(&tables.scorer),
        generation: tables.generation,
        dialect: member.fit.dialect,
        route,
        text_route: text_route(route),
        group_ranks: member.fit.group_ranks,
        rank,
        is_pinned: Box::new(move || pins.pins.belief(route) != Belief::Ignored),
        body: job.body.bytes().clone(),
    };
    Some(Sample::new(&plane.live, seen, asking, config.max_answer_bytes))
}
