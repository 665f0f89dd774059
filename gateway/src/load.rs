//! From a checked configuration to the first snapshot: reads tokenizers, templates and tables, and refuses what does
//! not belong together. Blocking: it reads files.

use std::path::Path;
use std::sync::Arc;

use semmoe_engines::Dialect;
use semmoe_tables::Tables;
use semmoe_text::{ChatTemplate, Encoder, Scorer, TextError, Tokenizer};

use crate::backend::Backend;
use crate::compat;
use crate::config::{BackendConfig, Config, ModelConfig};
use crate::error::StartError;
use crate::metrics::Metrics;
use crate::outgoing;
use crate::plan::Plan;
use crate::snapshot::{Member, Model, Snapshot, Text, new_pool};
use crate::tables::{self, LoadedTables, Origin, Spool};

pub(crate) fn snapshot(config: &Arc<Config>, metrics: &Metrics) -> Result<Snapshot, StartError> {
    if let Some((key, dir)) = config.sampling.dirs().find(|(_, dir)| !dir.is_dir()) {
        return Err(StartError::Dir { key, path: dir.to_owned() });
    }
    let models = config.models.iter().map(|model| load_model(model, config, metrics)).collect::<Result<_, _>>()?;
    Ok(Snapshot::new(Arc::clone(config), models))
}

fn load_model(config: &ModelConfig, all: &Config, metrics: &Metrics) -> Result<Model, StartError> {
    let plan = Plan::new(&config.name, &config.policy, metrics)
        .map_err(|source| StartError::Policy { model: config.name.clone(), source })?;
    let text = load_text(config, all.routing.segment_cache_bytes)
        .map_err(|source| StartError::Text { model: config.name.clone(), source })?;
    let mut members: Vec<Member> = Vec::new();
    for backend in &config.backends {
        let first = members.iter().find_map(|member| member.tables.as_ref());
        let first = first.map(|loaded| loaded.tables.as_ref());
        let member = load_member(backend, all, text.as_ref(), first)?;
        members.push(member);
    }
    Ok(Model {
        name: config.name.clone(),
        aliases: config.aliases.clone(),
        text: text.map(Arc::new),
        pool: new_pool(&members, &plan, all, metrics),
        plan: Arc::new(plan),
        budget: Arc::default(),
        queue: Arc::new(metrics.faults.queue(&config.name)),
        members,
    })
}

fn load_text(config: &ModelConfig, segment_cache_bytes: usize) -> Result<Option<Text>, TextError> {
    let Some(path) = &config.tokenizer else { return Ok(None) };
    let mut tokenizer = Tokenizer::from_file(path)?;
    tokenizer.cache_segments(segment_cache_bytes);
    match tokenizer.encoder() {
        Encoder::Fast => tracing::info!(model = config.name, "prompts are encoded by the fast library"),
        Encoder::Oracle { reason } => {
            tracing::warn!(model = config.name, reason, "prompts are encoded by the slow library");
        }
    }
    let template = match &config.chat_template {
        Some(path) => Some(load_template(path)?),
        None => template_beside(path)?,
    };
    Ok(Some(Text { tokenizer, template }))
}

/// A configured template must be usable.
fn load_template(path: &Path) -> Result<ChatTemplate, TextError> {
    if path.extension().is_some_and(|extension| extension == "json") {
        return ChatTemplate::from_config_file(path);
    }
    let source = std::fs::read_to_string(path).map_err(|source| TextError::Read { path: path.to_owned(), source })?;
    ChatTemplate::from_source(&source)
}

/// The template that comes with the tokenizer; a model may have none, and then serves no chat with affinity.
fn template_beside(tokenizer: &Path) -> Result<Option<ChatTemplate>, TextError> {
    let config = tokenizer.with_file_name("tokenizer_config.json");
    if config.exists() {
        return match ChatTemplate::from_config_file(&config) {
            Err(TextError::NoTemplate) => Ok(None),
            loaded => loaded.map(Some),
        };
    }
    let template = tokenizer.with_file_name("chat_template.jinja");
    if template.exists() { load_template(&template).map(Some) } else { Ok(None) }
}

fn load_member(
    config: &BackendConfig,
    all: &Config,
    text: Option<&Text>,
    other: Option<&Tables>,
) -> Result<Member, StartError> {
    let backend = Arc::new(Backend::new(config, outgoing::client(config, all.timeouts.connect)?));
    let refuse = |source| StartError::Incompatible { backend: config.name.clone(), source };
    let tables = match &config.tables {
        Some(path) => Some(open_tables(path, config, &tables::spool(all), text, other)?),
        None => None,
    };
    let ranks =
        compat::expected_ranks(tables.as_ref().map(|(tables, _)| tables), config.ranks).map_err(refuse)?.unwrap_or(0);
    let loaded = |(tables, origin)| {
        let scorer = Scorer::new(&tables);
        Arc::new(LoadedTables { tables: Arc::new(tables), scorer, origin, generation: 1 })
    };
    let tables = tables.map(loaded);
    let dialect = if config.urls.len() > 1 { Dialect::by_url(config.engine) } else { Dialect::of(config.engine, None) };
    Ok(Member { backend, tables, earlier: Vec::new(), ranks, dialect })
}

fn open_tables(
    path: &Path,
    config: &BackendConfig,
    spool: &Spool,
    text: Option<&Text>,
    other: Option<&Tables>,
) -> Result<(Tables, Origin), StartError> {
    let refuse = |source| StartError::Incompatible { backend: config.name.clone(), source };
    let opened = tables::open(path, spool);
    let (tables, stamp) = opened.map_err(|source| StartError::Tables { backend: config.name.clone(), source })?;
    compat::with_declared(&tables, config.placement_digest.as_deref()).map_err(refuse)?;
    compat::with_tokenizer(&tables, text.map(|text| &text.tokenizer)).map_err(refuse)?;
    if let Some(other) = other {
        compat::with_model(&tables, "another backend's tables", other.model()).map_err(refuse)?;
    }
    Ok((tables, Origin { path: Some(path.to_owned()), stamp: Some(stamp) }))
}
