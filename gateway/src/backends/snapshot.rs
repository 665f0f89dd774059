//! All reloadable state, in one value that is swapped atomically.
//!
//! A request takes the current snapshot when it arrives and holds it until it ends, so it never sees half a reload. A
//! new snapshot is a cheap copy (all large parts are shared) with one part replaced.

use std::sync::Arc;

use semmoe_engines::probe::Probe;
use semmoe_engines::{Carrier, Route, SharedError};
use semmoe_routing::{Needs, TablePrice};
use semmoe_tables::Tables;
use semmoe_text::{ChatOptions, ChatTemplate, Preparation, PromptEncoder, Shapes};

use crate::backends::backend::preparation_row;
use crate::backends::budget::Budget;
use crate::backends::compat::{self, Incompatible};
use crate::backends::names::Names;
use crate::backends::parity::Reader;
use crate::backends::pool::{Pool, PoolBackend, PoolSettings};
use crate::backends::tables::Trouble;
use crate::backends::verdict::{self, Closed, Subject, Unpinned};
use crate::backends::{
    Backend, Belief, EarlierTables, FileState, Fit, LoadedTables, Plan, Queue, RequestError, Run, Vocabulary,
};
use crate::config::{Config, OtherNames};
use crate::observe::Metrics;

/// All models, and the generation of the swap that created them.
#[derive(Clone)]
pub(crate) struct Snapshot {
    /// Generation number: 1 at start, incremented by each swap.
    pub(crate) generation: u64,
    /// The configuration that these models were built from.
    pub(crate) config: Arc<Config>,
    pub(crate) models: Vec<Arc<Model>>,
    names: Arc<Names>,
}

/// One model.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) other_names: OtherNames,
    pub(crate) plan: Arc<Plan>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) text: Option<Arc<Text>>,
    /// Why the last attempt to read the model's tokenizer failed.
    pub(crate) unread: Option<UnreadText>,
    pub(crate) members: Vec<Member>,
    pub(crate) pool: Arc<Pool>,
}

impl Model {
    /// Returns the encoder for the model's prompts, if it has one.
    pub(crate) fn encoder(&self) -> Option<&PromptEncoder> {
        self.text.as_deref().map(|text| text.tokenizer.as_ref())
    }

    /// How the model's engine prepares chats for the chat template. If its backends run several engines or versions,
    /// the first backend's preparation applies.
    pub(crate) fn preparation(&self) -> &'static Preparation {
        self.members.first().map_or(Preparation::OWN, |member| member.backend.preparation())
    }

    /// Returns the model's tokenizer and template, if a policy needs to read prompts.
    pub(crate) fn scoring_text(&self) -> Option<&Text> {
        let Needs { share, cached, .. } = self.plan.needs;
        self.text.as_deref().filter(|_| share || cached)
    }

    /// Returns the reader for the model's prompts, if it has one.
    pub(crate) fn reader(&self) -> Option<Reader<'_>> {
        self.text.as_deref().map(|text| text.reader(self.preparation()))
    }

    /// Checks tables against the model's tokenizer and the tables of all its backends. Errors refer to the checked
    /// tables as `what`.
    pub(crate) fn check_tables(&self, tables: &Tables, what: &'static str) -> Result<(), Incompatible> {
        compat::with_tokenizer(tables, self.encoder())?;
        let others = self.members.iter().filter_map(|member| member.tables.as_ref());
        others.map(|other| other.tables.model()).try_for_each(|other| compat::with_model(tables, what, other))
    }

    /// Returns the verdict on the backend at an index; without a probe, it is based on files and configuration alone.
    pub(crate) fn judge(&self, at: usize, probe: Option<&Probe>, max_ranks: u16) -> Result<Fit, Closed> {
        let (member, files) = (&self.members[at], self.check_files(at).err());
        let (config, room) = (&member.backend.config, self.room(at, max_ranks));
        let tables = member.tables.as_ref().map(|loaded| loaded.tables.as_ref());
        // This probe may be the only source of the first backend's version.
        let found = probe.filter(|_| at == 0).map(|probe| Preparation::row(preparation_row(config.engine, probe)));
        let reader = self.text.as_deref().map(|text| text.reader(found.unwrap_or(self.preparation())));
        let subject = Subject { config, tables, reader, files: files.as_ref(), room };
        verdict::judge(probe, &subject)
    }

    /// Re-evaluates a backend by its last report, because its tables or tokenizer may have changed. A backend that
    /// exceeds the rank limit receives no requests until a probe finds room.
    pub(crate) fn judge_again(&mut self, at: usize, max_ranks: u16) {
        let backend = Arc::clone(&self.members[at].backend);
        let fit = self.judge(at, backend.last_probe().as_deref(), max_ranks);
        self.members[at].fit = fit.unwrap_or_else(|_| Fit::unprobed(&backend.config, 0));
    }

    /// Resets online prices to the tables' prices.
    pub(crate) fn reset_prices(&self) {
        self.pool.reset_prices(&pool_members(&self.members));
    }

    /// Checks whether a backend's files match, regardless of its engine's report.
    fn check_files(&self, at: usize) -> Result<(), Unpinned> {
        if let Some(unread) = self.unread.as_ref().filter(|unread| !unread.earlier_in_use) {
            return Err(Unpinned::File(unread.error.clone()));
        }
        let member = &self.members[at];
        let Some(loaded) = &member.tables else {
            let unread = member.unread.as_ref().map(|unread| format!("tables: {}", unread.error));
            return unread.map_or(Ok(()), |unread| Err(Unpinned::File(unread.into())));
        };
        let tables = loaded.tables.as_ref();
        compat::with_declared(tables, member.backend.config.placement_digest.as_deref())?;
        compat::with_tokenizer(tables, self.encoder())?;
        // Backends that precede this one in the configuration take precedence.
        let mut others = self.members[..at].iter().filter(|other| other.fit.unpinned.is_none());
        let others = others.find_map(|other| other.tables.as_ref());
        others.map_or(Ok(()), |other| Ok(compat::with_model(tables, "another backend's tables", other.tables.model())?))
    }

    /// Number of ranks left for a backend, after those that all other backends have or may still report.
    fn room(&self, at: usize, max_ranks: u16) -> usize {
        let others = self.members.iter().enumerate().filter(|(other, _)| *other != at);
        let taken = others.map(|(_, other)| usize::from(other.fit.ranks).max(other.backend.config.urls.len()));
        usize::from(max_ranks).saturating_sub(taken.sum())
    }

    /// Returns the model's names as used in requests to a backend.
    pub(crate) fn names_asked(&self, backend: &Backend) -> Vec<String> {
        backend.config.served_name.as_ref().map_or_else(|| self.names().cloned().collect(), |name| vec![name.clone()])
    }

    /// Whether the most recent requests to any of the model's backends ended in errors.
    pub(crate) fn has_errors(&self) -> bool {
        self.members.iter().any(|member| member.backend.gate.has_errors())
    }

    /// Records that `backend` successfully answered a request with the digest `request`, for comparison with other
    /// backends' errors.
    pub(crate) fn answered_well(&self, backend: &Arc<Backend>, request: Option<u64>) {
        let others = self.members.iter().map(|member| &member.backend);
        for other in others.filter(|other| other.gate.has_errors() && !Arc::ptr_eq(other, backend)) {
            other.gate.change(|breaker| breaker.answered_elsewhere(request));
        }
    }

    /// The model's own name, then its aliases.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(&self.other_names.aliases)
    }

    /// Whether this is the model's name or alias, rather than an adapter's name.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.names().any(|own| own == name)
    }
}

/// Returns the text route if prompts on this route can be read.
pub(crate) fn text_route(route: Route) -> Option<semmoe_text::Route> {
    match route {
        Route::Chat => Some(semmoe_text::Route::Chat),
        Route::Completions => Some(semmoe_text::Route::Completions),
        Route::Generate => Some(semmoe_text::Route::Generate),
        Route::Responses | Route::Embeddings | Route::Tokenize | Route::Messages => None,
        Route::Detokenize | Route::CountTokens | Route::Extra => None,
    }
}

/// A tokenizer that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnreadText {
    /// The error, which names the file.
    pub(crate) error: SharedError,
    /// Whether the previously read files are still in use.
    pub(crate) earlier_in_use: bool,
}

/// Tokenizer, template and vocabulary for reading a model's prompts.
pub(crate) struct Text {
    pub(crate) tokenizer: Arc<PromptEncoder>,
    pub(crate) template: Option<Arc<ChatTemplate>>,
    /// Why the configured template is not in use; an earlier one, or none, is used instead.
    pub(crate) template_error: Option<SharedError>,
    pub(crate) vocabulary: Vocabulary,
    /// Whether the template writes the date, so that a chat renders differently on another day.
    pub(crate) writes_date: bool,
    /// The files and settings from which this text was built.
    pub(crate) made_of: TextSource,
}

impl Text {
    fn reader(&self, preparation: &'static Preparation) -> Reader<'_> {
        let (template, zone_seconds) = (self.template.as_deref(), self.made_of.zone_seconds);
        Reader { tokenizer: &self.tokenizer, template, preparation, writes_date: self.writes_date, zone_seconds }
    }
}

/// The sources of a [`Text`]; if they are unchanged, it need not be rebuilt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TextSource {
    pub(crate) files: Vec<FileState>,
    pub(crate) chat_options: ChatOptions,
    pub(crate) segment_cache_bytes: usize,
    /// UTC offset of the engines' clocks.
    pub(crate) zone_seconds: i32,
}

/// The position of a backend in a snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    /// Index of its model.
    pub(crate) model: usize,
    /// Index among the model's members.
    pub(crate) member: usize,
}

/// A model's backend, with its loaded files and its verdict.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) backend: Arc<Backend>,
    pub(crate) tables: Option<Arc<LoadedTables>>,
    /// Previously used tables, newest first, up to the configured history length.
    pub(crate) earlier: Vec<EarlierTables>,
    /// The configured tables file when last read; the tables in use may be newer and from another source.
    pub(crate) tables_file: Option<FileState>,
    /// Why the configured tables could not be read; the tables in use, if any, are earlier ones.
    pub(crate) unread: Option<Trouble>,
    /// The backend's ranks, and how they are pinned. Until a probe reports the ranks, their number is 0 and pins follow
    /// the newest engine version.
    pub(crate) fit: Fit,
}

impl Member {
    /// Where the backend runs a request on `route`.
    pub(crate) fn run(&self, route: Route) -> Run {
        let (fit, pins) = (&self.fit, &self.backend.pins);
        let where_chosen = |chosen: bool| if chosen { Run::Chosen } else { Run::Anywhere };
        match fit.dialect.carrier(route) {
            _ if !route.runs_model() => Run::Nowhere,
            _ if fit.unpinned.is_some() => Run::Behind,
            _ if fit.ranks <= 1 => Run::Chosen,
            Some(Carrier::Url) => Run::Chosen,
            Some(_) if pins.are_refused() => Run::Anywhere,
            Some(_) => where_chosen(match pins.belief(route) {
                Belief::Proven => true,
                Belief::Unproven => fit.dialect.reads(route).is_some(),
                Belief::Ignored => false,
            }),
            None => Run::Anywhere,
        }
    }

    /// Whether requests on `route` are sent with a pin. Ignored pins are sent too if the engine should read them,
    /// because responses can then show that they are honoured again.
    pub(crate) fn sends_pin(&self, route: Route) -> bool {
        let (dialect, pins) = (&self.fit.dialect, &self.backend.pins);
        let is_tried = || {
            let may_recover = dialect.reads(route).is_some() && dialect.names_rank(route);
            self.fit.unpinned.is_none() && !pins.are_refused() && pins.belief(route) == Belief::Ignored && may_recover
        };
        self.fit.ranks > 1
            && match dialect.carrier(route) {
                Some(Carrier::Url) => true,
                Some(_) => self.run(route) == Run::Chosen || is_tried(),
                None => false,
            }
    }

    /// Returns those of `shapes` that the engine tokenizes differently from the gateway.
    pub(crate) fn misread(&self, shapes: Shapes) -> Shapes {
        (self.fit.parity.differs | self.backend.counts.differs()).both(shapes)
    }

    /// The number of ranks that pins use, if known.
    pub(crate) fn known_ranks(&self) -> Option<u16> {
        Some(self.fit.ranks).filter(|ranks| *ranks > 0 && self.fit.unpinned.is_none())
    }

    /// The generation of the tables in use; 0 without tables.
    pub(crate) fn tables_generation(&self) -> u64 {
        self.tables.as_ref().map_or(0, |tables| tables.generation)
    }

    /// Replaces the tables in use and moves the old ones to the history, which retains at most `history` entries.
    pub(crate) fn replace_tables(&mut self, loaded: Arc<LoadedTables>, history: usize) {
        self.unread = None;
        // After a rollback the restored tables leave the history.
        self.earlier.retain(|earlier| !Arc::ptr_eq(&earlier.tables, &loaded.tables));
        if let Some(before) = self.tables.replace(loaded) {
            let LoadedTables { tables, origin, generation, .. } = before.as_ref();
            let before = EarlierTables { tables: Arc::clone(tables), origin: origin.clone(), generation: *generation };
            self.earlier.insert(0, before);
        }
        self.earlier.truncate(history);
    }
}

impl Snapshot {
    /// The first snapshot.
    pub(crate) fn new(config: Arc<Config>, models: Vec<Model>) -> Self {
        Self::of(1, config, models.into_iter().map(Arc::new).collect())
    }

    /// Creates the next snapshot, with other settings and models.
    pub(crate) fn with_models(&self, config: Arc<Config>, models: Vec<Arc<Model>>) -> Self {
        Self::of(self.generation + 1, config, models)
    }

    fn of(generation: u64, config: Arc<Config>, models: Vec<Arc<Model>>) -> Self {
        let names = Arc::new(Names::new(models.iter().map(|model| (&model.name, &model.other_names))));
        Self { generation, config, models, names }
    }

    /// Returns the model with this name, alias or adapter; without a name, the only model.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<&Arc<Model>, RequestError> {
        let known = || self.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
        match (name, self.models.as_slice()) {
            (Some(name), _) => {
                let found = self.names.find(name).map(|index| &self.models[index]);
                found.ok_or_else(|| RequestError::unknown_model(name, known()))
            }
            (None, [only]) => Ok(only),
            (None, _) => Err(RequestError::NoModel { known: known() }),
        }
    }

    /// Returns the position of the backend with this name.
    pub(crate) fn find(&self, backend: &str) -> Option<Position> {
        self.models.iter().enumerate().find_map(|(model, it)| {
            let member = it.members.iter().position(|member| member.backend.name == backend)?;
            Some(Position { model, member })
        })
    }

    /// Returns this backend's own position. Another backend may have taken over its name.
    pub(crate) fn position(&self, backend: &Arc<Backend>) -> Option<Position> {
        self.find(&backend.name).filter(|at| Arc::ptr_eq(&self.at(*at).1.backend, backend))
    }

    /// Returns the backend with this name.
    pub(crate) fn backend(&self, name: &str) -> Option<&Arc<Backend>> {
        self.members().map(|(_, member)| &member.backend).find(|backend| backend.name == name)
    }

    /// Returns the model and backend at a position from [`Snapshot::find`] or [`Snapshot::position`].
    pub(crate) fn at(&self, Position { model, member }: Position) -> (&Model, &Member) {
        let model: &Model = &self.models[model];
        (model, &model.members[member])
    }

    /// All backends with their models.
    pub(crate) fn members(&self) -> impl Iterator<Item = (&Arc<Model>, &Member)> {
        self.models.iter().flat_map(|model| model.members.iter().map(move |member| (model, member)))
    }

    /// Creates the next snapshot, with new tables for one backend; its previous tables join the history. Once the
    /// snapshot is current, call [`Model::reset_prices`].
    pub(crate) fn with_tables(&self, at: Position, fresh: LoadedTables, metrics: &Metrics) -> Self {
        let loaded = Arc::new(LoadedTables { generation: self.generation + 1, ..fresh });
        self.with_model(at, metrics, |model| {
            model.members[at.member].replace_tables(loaded, self.config.tables.history);
            model.judge_again(at.member, self.config.limits.ranks);
        })
    }

    /// Creates the next snapshot, with a new probe result for one backend.
    pub(crate) fn with_backend(&self, at: Position, fit: Fit, metrics: &Metrics) -> Self {
        self.with_model(at, metrics, |model| model.members[at.member].fit = fit)
    }

    /// Creates the next snapshot, with one backend changed. A different rank count indicates a different engine, so its
    /// ranks' accounts start afresh.
    fn with_model(&self, at: Position, metrics: &Metrics, change: impl FnOnce(&mut Model)) -> Self {
        let mut next = Self { generation: self.generation + 1, ..self.clone() };
        let (old, was) = self.at(at);
        let model = Arc::make_mut(&mut next.models[at.model]);
        change(model);
        if model.members[at.member].fit.ranks != was.fit.ranks {
            model.pool = next_pool(Some(old), &self.config, &model.members, &model.plan, &self.config, metrics);
        }
        next
    }
}

/// Returns the pool of all ranks of these backends. With `old`, the running model under `old_config`, it continues that
/// model's pool, and is the same pool if nothing changes. Ranks stay with their engine, identified by name, connection
/// and rank count.
pub(crate) fn next_pool(
    old: Option<&Model>,
    old_config: &Config,
    members: &[Member],
    plan: &Plan,
    config: &Config,
    metrics: &Metrics,
) -> Arc<Pool> {
    let (routing, shadow) = (&config.routing, plan.policy.watched().is_some());
    let settings = PoolSettings { routing: &routing.settings, prefix: &routing.prefix, shadow };
    let Some(old) = old else { return Arc::new(Pool::new(&pool_members(members), &settings, metrics)) };
    let before = |member: &Member| {
        let same = |old: &Member| {
            old.fit.ranks == member.fit.ranks && old.backend.config.is_same_ranks(&member.backend.config)
        };
        old.members.iter().position(same)
    };
    let mut from = Vec::new();
    for member in members {
        let at = before(member);
        let first = old.pool.slots().iter().position(|slot| Some(slot.backend) == at);
        from.extend((0..usize::from(member.fit.ranks)).map(|rank| u16::try_from(first? + rank).ok()));
    }
    let (was, same_slots) =
        (&old_config.routing, from.iter().copied().eq((0..old.pool.slots().len() as u16).map(Some)));
    if same_slots && routing.settings == was.settings && routing.prefix == was.prefix && shadow == old.pool.has_shadow()
    {
        return Arc::clone(&old.pool);
    }
    Arc::new(old.pool.succeed(&from, &pool_members(members), &settings, metrics))
}

fn pool_members(members: &[Member]) -> Vec<PoolBackend<'_>> {
    members.iter().map(pool_member).collect()
}

fn pool_member(member: &Member) -> PoolBackend<'_> {
    PoolBackend {
        name: &member.backend.name,
        ranks: member.fit.ranks,
        prices: match &member.tables {
            Some(loaded) if member.fit.unpinned.is_none() => {
                let (tables, group_ranks) = (&loaded.tables, usize::from(member.fit.group_ranks));
                let groups = TablePrice::of_ranks(tables.dp_ranks(), tables.price(), tables.sequence_price());
                groups.iter().flat_map(|price| std::iter::repeat_n(*price, group_ranks)).collect()
            }
            _ => Vec::new(),
        },
        available: member.backend.takes_requests(),
    }
}
