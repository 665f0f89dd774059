//! Prepares the next models alongside the running ones.

use std::sync::Arc;

use futures_util::future::join_all;
use http::HeaderValue;
use semmoe_engines::probe::{Probe, Target, probe};

use crate::backends::health::{chats_of, fault_of};
use crate::backends::{Backend, FileState, Health, Member, Model, Snapshot, StartError, next_pool, outgoing, pins};
use crate::config::{BackendConfig, Config};
use crate::shell::control::Control;
use crate::shell::load;

use super::Manner;

/// A backend's report, or why it cannot serve.
type Probed = Result<Arc<Probe>, Health>;

/// The state prepared from a new configuration.
pub(super) struct Prepared {
    /// The state that the preparation was based on.
    pub(super) base: Arc<Snapshot>,
    pub(super) config: Arc<Config>,
    pub(super) models: Vec<Model>,
    /// API keys for the backends that carry over.
    pub(super) keys: Vec<(Arc<Backend>, Option<HeaderValue>)>,
    /// The new backends' reports, or why they do not serve.
    pub(super) probes: Vec<(Arc<Backend>, Probed)>,
    /// Discovered backends that were left out, with the reason.
    pub(super) left_out: Vec<(String, String)>,
}

/// Indices of a model and a member.
type At = (usize, usize);

impl Prepared {
    /// Loads new parts and checks that everything is consistent. Blocking.
    pub(super) fn new(
        control: &Control,
        base: Arc<Snapshot>,
        config: Arc<Config>,
        manner: Manner,
    ) -> Result<Self, StartError> {
        let mut models = Vec::new();
        for wanted in &config.models {
            let old = base.models.iter().find(|model| model.name == wanted.name);
            let running =
                old.map(|old| load::Running { model: old, config: &base.config, reread: manner == Manner::Reload });
            models.push(load::model(wanted, &config, running, &control.backends.metrics)?);
        }
        let mut keys = Vec::new();
        for member in models.iter().flat_map(|model| &model.members) {
            if base.position(&member.backend).is_some() {
                keys.push((Arc::clone(&member.backend), outgoing::key(&member.backend.config)?));
            }
        }
        Ok(Self { base, config, models, keys, probes: Vec::new(), left_out: Vec::new() })
    }

    /// Probes the new backends concurrently. A configured backend that does not answer, or cannot serve, is awaited
    /// later; a discovered one is left out.
    pub(super) async fn probe(mut self, control: &Control, manner: Manner) -> Self {
        let limits = control.backends.probe_limits();
        let fresh: Vec<At> = self.fresh().collect();
        let ask = |(model, member): At| {
            let model_of = &self.models[model];
            let backend = Arc::clone(&model_of.members[member].backend);
            let names = model_of.names_asked(&backend);
            async move {
                let mut found = probe(&backend.client, &Target { names: &names, ..backend.target() }, &limits).await;
                if let Ok(probe) = &mut found {
                    probe.rendering = chats_of(&control.backends, &backend, model_of).await;
                    pins::prove_at_start(&control.backends, &backend, probe).await;
                    backend.set_probe(probe.clone());
                }
                let found = found.map_err(|error| (error.to_string(), fault_of(&backend, &error)));
                ((model, member), backend, found)
            }
        };
        for ((model, member), backend, found) in join_all(fresh.into_iter().map(ask)).await {
            let model = &mut self.models[model];
            let verdict = found.and_then(|probe| {
                let fit = model.judge(member, Some(&probe), self.config.limits.ranks);
                fit.map(|fit| (fit, probe)).map_err(|closed| (closed.to_string(), closed.to_string()))
            });
            let verdict = match verdict {
                Ok((fit, probe)) => {
                    model.members[member].fit = fit;
                    Ok(Arc::new(probe))
                }
                Err((cause, _)) if manner == Manner::Discovery => {
                    self.left_out.push((backend.name.clone(), cause));
                    continue;
                }
                Err((_, cause)) => Err(Health::Unhealthy { cause }),
            };
            self.probes.push((backend, verdict));
        }
        self.leave_out();
        self
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

    /// Rebuilds the pools with the ranks that new backends reported. Blocking.
    pub(super) fn renew_pools(&mut self, control: &Control) {
        for model in &mut self.models {
            let old: Option<&Model> = self.base.models.iter().find(|old| old.name == model.name).map(AsRef::as_ref);
            let (was, members) = (&self.base.config, &model.members);
            model.pool = next_pool(old, was, members, &model.plan, &self.config, &control.backends.metrics);
        }
    }

    fn fresh(&self) -> impl Iterator<Item = At> {
        let members = self.models.iter().enumerate().flat_map(|(at, model)| {
            model.members.iter().enumerate().map(move |(member, it)| ((at, member), &it.backend))
        });
        members.filter(|(_, backend)| self.base.position(backend).is_none()).map(|(at, _)| at)
    }
}

/// Returns the backends that carry over but receive other tables. Blocking, because it checks the files.
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

/// Whether both are the same allocation, rather than merely equal.
pub(super) fn same<T>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}
