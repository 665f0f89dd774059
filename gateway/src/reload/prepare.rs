//! The next models, made beside the running ones.

use std::sync::Arc;

use futures_util::future::join_all;
use http::HeaderValue;
use semmoe_engines::http::HttpError;
use semmoe_engines::probe::{Probe, probe};

use crate::backend::Backend;
use crate::compat;
use crate::config::{BackendConfig, Config};
use crate::error::StartError;
use crate::load;
use crate::outgoing;
use crate::pins;
use crate::snapshot::{Member, Model, Snapshot, next_pool};
use crate::stamp::FileState;
use crate::state::Core;

use super::Manner;

/// The state that a new configuration leads to.
pub(super) struct Prepared {
    /// The state it was prepared against.
    pub(super) base: Arc<Snapshot>,
    pub(super) config: Arc<Config>,
    pub(super) models: Vec<Model>,
    /// The keys of the backends that stay.
    pub(super) keys: Vec<(Arc<Backend>, Option<HeaderValue>)>,
    /// The probes of the new backends.
    pub(super) probes: Vec<(Arc<Backend>, Result<Probe, HttpError>)>,
    /// Backends that were found and do not take part, with the reason.
    pub(super) left_out: Vec<(String, String)>,
}

/// A model and member by their places.
type At = (usize, usize);

impl Prepared {
    /// Loads what is new and checks that everything belongs together. Blocking.
    pub(super) fn new(
        core: &Core,
        base: Arc<Snapshot>,
        config: Arc<Config>,
        manner: Manner,
    ) -> Result<Self, StartError> {
        let mut models = Vec::new();
        for wanted in &config.models {
            let old = base.models.iter().find(|model| model.name == wanted.name);
            let running =
                old.map(|old| load::Running { model: old, config: &base.config, reread: manner == Manner::Reload });
            let next = load::model(wanted, &config, running, &core.metrics)?;
            check(&next, old.map(AsRef::as_ref))?;
            models.push(next);
        }
        let mut keys = Vec::new();
        for member in models.iter().flat_map(|model| &model.members) {
            if base.position(&member.backend).is_some() {
                keys.push((Arc::clone(&member.backend), outgoing::key(&member.backend.config)?));
            }
        }
        Ok(Self { base, config, models, keys, probes: Vec::new(), left_out: Vec::new() })
    }

    /// Asks the new backends, all at a time. One that does not answer is waited for later, and one whose answer does
    /// not fit refuses all; of those that were only found both are left out.
    pub(super) async fn probe(mut self, core: &Core, manner: Manner) -> Result<Self, StartError> {
        let limits = core.probe_limits();
        let fresh: Vec<At> = self.fresh().collect();
        let ask = |(model, member): At| {
            let backend = Arc::clone(&self.models[model].members[member].backend);
            async move {
                let found = probe(&backend.client, &backend.target(), &limits).await;
                if let Ok(probe) = &found {
                    pins::first_look(core, &backend, probe).await;
                }
                ((model, member), backend, found)
            }
        };
        for ((model, member), backend, found) in join_all(fresh.into_iter().map(ask)).await {
            let model = &mut self.models[model];
            if let Ok(probe) = &found {
                let tables = model.members[member].tables.as_ref().map(|loaded| loaded.tables.as_ref());
                let limit = self.config.limits.ranks;
                let fit = compat::with_backend(probe, tables, model.encoder(), &backend.config, None);
                let others = model.other_ranks(&backend);
                match fit.and_then(|fit| compat::within_limit(fit.ranks, others, limit).map(|()| fit)) {
                    Ok(fit) => model.members[member].fit = fit,
                    Err(cause) if manner == Manner::Discovery => {
                        self.left_out.push((backend.name.clone(), cause.to_string()));
                        continue;
                    }
                    Err(source) => return Err(StartError::incompatible(&backend.name)(source)),
                }
            } else if let (Err(cause), Manner::Discovery) = (&found, manner) {
                self.left_out.push((backend.name.clone(), cause.to_string()));
                continue;
            }
            self.probes.push((backend, found));
        }
        self.leave_out();
        Ok(self)
    }

    fn leave_out(&mut self) {
        if self.left_out.is_empty() {
            return;
        }
        let stays = |name: &str| self.left_out.iter().all(|(left_out, _)| left_out != name);
        for model in &mut Arc::make_mut(&mut self.config).models {
            model.backends.retain(|backend| stays(&backend.name));
        }
        for model in &mut self.models {
            model.members.retain(|member| stays(&member.backend.name));
        }
    }

    /// The pools once more, with the ranks that new backends reported. Blocking.
    pub(super) fn renew_pools(&mut self, core: &Core) {
        for model in &mut self.models {
            let old: Option<&Model> = self.base.models.iter().find(|old| old.name == model.name).map(AsRef::as_ref);
            let (was, members) = (&self.base.config, &model.members);
            model.pool = next_pool(old, was, members, &model.plan, &self.config, &core.metrics);
        }
    }

    fn fresh(&self) -> impl Iterator<Item = At> {
        let members = self.models.iter().enumerate().flat_map(|(at, model)| {
            model.members.iter().enumerate().map(move |(member, it)| ((at, member), &it.backend))
        });
        members.filter(|(_, backend)| self.base.position(backend).is_none()).map(|(at, _)| at)
    }
}

/// Backends that stay and get other tables. Blocking: it looks at the files.
pub(super) fn with_other_tables(base: &Snapshot, config: &Config) -> Vec<Arc<Backend>> {
    let wanted = |member: &Member| {
        let same = |wanted: &&BackendConfig| member.backend.config.is_same_engine(wanted);
        config.models.iter().flat_map(|model| &model.backends).find(same)
    };
    let changes = |member: &Member| {
        wanted(member).is_some_and(|wanted| wanted.tables.as_deref().map(FileState::of) != member.tables_file)
    };
    base.members().filter(|(_, member)| changes(member)).map(|(_, member)| Arc::clone(&member.backend)).collect()
}

/// The changes of a model that goes on.
fn check(next: &Model, old: Option<&Model>) -> Result<(), StartError> {
    let Some(old) = old else { return Ok(()) };
    let other_text = !same(next.text.as_ref(), old.text.as_ref());
    for member in &next.members {
        let before = old.members.iter().find(|old| Arc::ptr_eq(&old.backend, &member.backend));
        let other_tables = !before.is_some_and(|before| same(before.tables.as_ref(), member.tables.as_ref()));
        // An unchanged backend is not checked again: it may be waiting for other tables.
        if other_text || other_tables {
            check_member(next, member).map_err(StartError::incompatible(&member.backend.name))?;
        }
    }
    Ok(())
}

fn check_member(model: &Model, member: &Member) -> Result<(), compat::Incompatible> {
    let tables = member.tables.as_ref().map(|loaded| loaded.tables.as_ref());
    if let Some(tables) = tables {
        model.check_tables(tables, "another backend's tables")?;
    }
    let Some(probe) = member.backend.last_probe() else { return Ok(()) };
    let known = Some(member.fit.ranks).filter(|ranks| *ranks > 0 && probe.dp_size.is_none());
    compat::with_backend(&probe, tables, model.encoder(), &member.backend.config, known).map(|_| ())
}

/// The same thing, not an equal one.
pub(super) fn same<T>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}
