//! Everything that can be reloaded, in one value that is swapped at once.
//!
//! A request takes the current snapshot when it arrives and keeps it to its end, so that it never sees half a reload.
//! A new snapshot is a cheap copy (everything large is shared) with one part replaced.

use std::collections::HashMap;
use std::sync::Arc;

use semmoe_engines::Dialect;
use semmoe_text::{ChatTemplate, Tokenizer};

use crate::backend::Backend;
use crate::budget::Budget;
use crate::config::Config;
use crate::error::RequestError;
use crate::metrics::Metrics;
use crate::plan::Plan;
use crate::pool::{Member as PoolMember, Pool, PoolSettings};
use crate::queue::Queue;
use crate::tables::{EarlierTables, FreshTables, LoadedTables};

/// All models, and which swap made this state.
#[derive(Clone)]
pub(crate) struct Snapshot {
    /// 1 at start, one more with every swap.
    pub(crate) generation: u64,
    /// The settings that these models were made with.
    pub(crate) config: Arc<Config>,
    pub(crate) models: Vec<Arc<Model>>,
    /// Names and aliases to indices.
    names: Arc<HashMap<String, usize>>,
}

/// One model.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) aliases: Vec<String>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) text: Option<Arc<Text>>,
    pub(crate) members: Vec<Member>,
    pub(crate) pool: Arc<Pool>,
}

/// What turns a model's prompts into ids.
pub(crate) struct Text {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
}

/// A backend of a model, with what is loaded for it.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) backend: Arc<Backend>,
    pub(crate) tables: Option<Arc<LoadedTables>>,
    /// Those that were in use before, latest first, at most as many as the configuration wants kept.
    pub(crate) earlier: Vec<EarlierTables>,
    /// Attention-DP ranks; 0 until a probe tells.
    pub(crate) ranks: u16,
    /// How it is pinned; the newest version's way until a probe tells.
    pub(crate) dialect: Dialect,
}

impl Snapshot {
    /// The first snapshot.
    pub(crate) fn new(config: Arc<Config>, models: Vec<Model>) -> Self {
        let models: Vec<Arc<Model>> = models.into_iter().map(Arc::new).collect();
        let mut names = HashMap::new();
        for (index, model) in models.iter().enumerate() {
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                names.insert(name.clone(), index);
            }
        }
        Self { generation: 1, config, models, names: Arc::new(names) }
    }

    /// The model of that name or alias; without a name, the only one.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<&Arc<Model>, RequestError> {
        let known = || self.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
        match (name, self.models.as_slice()) {
            (Some(name), _) => {
                let found = self.names.get(name).map(|index| &self.models[*index]);
                found.ok_or_else(|| RequestError::unknown_model(name, known()))
            }
            (None, [only]) => Ok(only),
            (None, _) => Err(RequestError::NoModel { known: known() }),
        }
    }

    /// Where a backend is: indices of its model and in that model.
    pub(crate) fn find(&self, backend: &str) -> Option<(usize, usize)> {
        self.models.iter().enumerate().find_map(|(at, model)| {
            model.members.iter().position(|member| member.backend.name == backend).map(|member| (at, member))
        })
    }

    /// All backends with their models.
    pub(crate) fn members(&self) -> impl Iterator<Item = (&Arc<Model>, &Member)> {
        self.models.iter().flat_map(|model| model.members.iter().map(move |member| (model, member)))
    }

    /// The next snapshot, with other tables for one backend, and those that it has now among its earlier ones. Online
    /// prices start again from all tables' prices.
    pub(crate) fn with_tables(&self, (model, member): (usize, usize), fresh: FreshTables) -> Self {
        let mut next = self.next();
        let FreshTables { tables, scorer, origin } = fresh;
        let model = Arc::make_mut(&mut next.models[model]);
        let member = &mut model.members[member];
        // Tables that are gone back to are earlier ones no more.
        member.earlier.retain(|earlier| !Arc::ptr_eq(&earlier.tables, &tables));
        if let Some(before) = &member.tables {
            let LoadedTables { tables, origin, generation, .. } = before.as_ref();
            let before = EarlierTables { tables: Arc::clone(tables), origin: origin.clone(), generation: *generation };
            member.earlier.insert(0, before);
        }
        member.earlier.truncate(self.config.tables.history);
        member.tables = Some(Arc::new(LoadedTables { tables, scorer, origin, generation: next.generation }));
        model.pool.reset_prices(&pool_members(&model.members));
        next
    }

    /// The next snapshot, with what a probe found of a backend. With another number of ranks the model's pool starts
    /// afresh; requests in flight keep the old one until they end.
    pub(crate) fn with_backend(
        &self,
        (model, member): (usize, usize),
        ranks: u16,
        dialect: Dialect,
        metrics: &Metrics,
    ) -> Self {
        let mut next = self.next();
        let model = Arc::make_mut(&mut next.models[model]);
        model.members[member].dialect = dialect;
        if model.members[member].ranks != ranks {
            model.members[member].ranks = ranks;
            model.pool = new_pool(&model.members, &model.plan, &self.config, metrics);
        }
        next
    }

    fn next(&self) -> Self {
        Self { generation: self.generation + 1, ..self.clone() }
    }
}

/// A pool of all ranks of these backends.
pub(crate) fn new_pool(members: &[Member], plan: &Plan, config: &Config, metrics: &Metrics) -> Arc<Pool> {
    let shadow = plan.policy().watched().is_some();
    let routing = &config.routing;
    let settings = PoolSettings { routing: &routing.settings, prefix: &routing.prefix, shadow };
    Arc::new(Pool::new(&pool_members(members), &settings, metrics))
}

fn pool_members(members: &[Member]) -> Vec<PoolMember<'_>> {
    members.iter().map(pool_member).collect()
}

fn pool_member(member: &Member) -> PoolMember<'_> {
    PoolMember {
        name: &member.backend.name,
        ranks: member.ranks,
        prices: member.tables.as_ref().map_or(&[], |loaded| loaded.tables.price()),
        available: member.backend.takes_requests(),
    }
}
