//! From a checked configuration to the first snapshot: reads tokenizers, templates and tables, and refuses what does
//! not belong together. Blocking: it reads files.

use std::path::Path;
use std::sync::Arc;

use semmoe_engines::{Dialect, unix_seconds};
use semmoe_tables::Tables;
use semmoe_text::{ChatTemplate, Encoder, PromptEncoder, TextError, Tokenizer};

use crate::backend::Backend;
use crate::compat::{self, Fit};
use crate::config::{BackendConfig, Config, ModelConfig};
use crate::error::StartError;
use crate::metrics::Metrics;
use crate::outgoing;
use crate::plan::Plan;
use crate::snapshot::{Member, Model, Snapshot, Text, TextSource, next_pool};
use crate::stamp::FileState;
use crate::tables::{self, LoadedTables, Origin, Spool};
use crate::vocabulary::Vocabulary;

pub(crate) fn snapshot(config: &Arc<Config>, metrics: &Metrics) -> Result<Snapshot, StartError> {
    check_dirs(config)?;
    let models = config.models.iter().map(|it| model(it, config, None, metrics)).collect::<Result<_, _>>()?;
    Ok(Snapshot::new(Arc::clone(config), models))
}

/// Folders that must be there.
pub(crate) fn check_dirs(config: &Config) -> Result<(), StartError> {
    match config.sampling.dirs().find(|(_, dir)| !dir.is_dir()) {
        Some((key, dir)) => Err(StartError::Dir { key, path: dir.to_owned() }),
        None => Ok(()),
    }
}

/// A model as it runs.
#[derive(Clone, Copy)]
pub(crate) struct Running<'a> {
    pub(crate) model: &'a Model,
    pub(crate) config: &'a Config,
    /// Whether files are looked at again.
    pub(crate) reread: bool,
}

/// A model with everything that it needs. With `old`, the model as it runs, what did not change is taken from there.
pub(crate) fn model(
    config: &ModelConfig,
    all: &Config,
    old: Option<Running<'_>>,
    metrics: &Metrics,
) -> Result<Model, StartError> {
    let was = old.and_then(|old| old.config.models.iter().find(|model| model.name == config.name));
    let old_plan = old.filter(|_| was.is_some_and(|was| was.policy == config.policy)).map(|old| &old.model.plan);
    let plan = match old_plan {
        Some(plan) => Arc::clone(plan),
        None => Arc::new(
            Plan::new(&config.name, &config.policy, metrics)
                .map_err(|source| StartError::Policy { model: config.name.clone(), source })?,
        ),
    };
    let text = match old {
        Some(Running { model, reread: false, .. }) => Ok(model.text.clone()),
        _ => text(config, all.routing.segment_cache_bytes, old.and_then(|old| old.model.text.as_ref())),
    };
    let text = text.map_err(|source| StartError::Text { model: config.name.clone(), source })?;
    let mut members: Vec<Member> = Vec::new();
    for backend in &config.backends {
        let same = |old: &&Member| old.backend.config.is_same_engine(backend);
        let known = old.and_then(|old| old.model.members.iter().find(same));
        members.push(match known {
            Some(known) if old.is_some_and(|old| !old.reread) => known.clone(),
            _ => load_member(backend, all, text.as_deref(), &members, known)?,
        });
    }
    for (at, member) in members.iter().enumerate() {
        let others = members[..at].iter().map(|other| usize::from(other.fit.ranks)).sum();
        compat::within_limit(member.fit.ranks, others, all.limits.ranks)
            .map_err(StartError::incompatible(&member.backend.name))?;
    }
    let (old_model, old_config) = (old.map(|old| old.model), old.map_or(all, |old| old.config));
    let pool = next_pool(old_model, old_config, &members, &plan, all, metrics);
    let budget = old.map_or_else(Arc::default, |old| Arc::clone(&old.model.budget));
    let queue = old.map_or_else(|| Arc::new(metrics.faults.queue(&config.name)), |old| Arc::clone(&old.model.queue));
    let (name, other_names) = (config.name.clone(), config.other_names.clone());
    Ok(Model { name, other_names, text, pool, plan, budget, queue, members })
}

fn text(
    config: &ModelConfig,
    segment_cache_bytes: usize,
    old: Option<&Arc<Text>>,
) -> Result<Option<Arc<Text>>, TextError> {
    let Some(path) = &config.tokenizer else { return Ok(None) };
    let files = [Some(path.clone()), config.chat_template.clone()];
    let beside = ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", "config.json"]
        .map(|name| Some(path.with_file_name(name)));
    let files = files.into_iter().chain(beside).flatten().map(|path| FileState::of(&path)).collect();
    let made_of = TextSource { files, segment_cache_bytes };
    match old {
        Some(old) if old.made_of == made_of => Ok(Some(Arc::clone(old))),
        old => load_text(config, path, made_of, old).map(|text| Some(Arc::new(text))),
    }
}

fn load_text(
    config: &ModelConfig,
    path: &Path,
    made_of: TextSource,
    old: Option<&Arc<Text>>,
) -> Result<Text, TextError> {
    let mut tokenizer = encoder(path)?;
    tokenizer.cache_segments(made_of.segment_cache_bytes);
    match tokenizer.encoder() {
        Encoder::Fast => tracing::info!(model = config.name, "prompts are encoded by the fast library"),
        Encoder::Oracle { reason } => {
            tracing::warn!(model = config.name, reason, "prompts are encoded by the slow library");
        }
    }
    let (template, template_error) = match template(config, path) {
        Ok(template) => (template.map(Arc::new), None),
        Err(error) => {
            let error = error.to_string();
            let template = old.and_then(|old| old.template.clone());
            let kept = template.is_some();
            tracing::error!(model = config.name, error, kept, "the chat template cannot be used");
            (template, Some(error))
        }
    };
    let vocabulary = Vocabulary::beside(path, tokenizer.vocab_size(), &config.name);
    Ok(Text { tokenizer, template, template_error, vocabulary, made_of })
}

/// The template that is configured or comes with the tokenizer; a model may have none, and then serves no chat with
/// affinity.
fn template(config: &ModelConfig, tokenizer: &Path) -> Result<Option<ChatTemplate>, TextError> {
    match &config.chat_template {
        Some(path) => ChatTemplate::from_file(path, tokenizer, unix_seconds).map(Some),
        None => match ChatTemplate::beside(tokenizer, unix_seconds) {
            Err(TextError::NoTemplate) => Ok(None),
            template => template.map(Some),
        },
    }
}

/// Read on a thread of its own: the fast library keeps words for each thread that it was tried on, and 16 MB of them go
/// with this one.
fn encoder(path: &Path) -> Result<PromptEncoder, TextError> {
    let read = || Tokenizer::from_file(path).map(Tokenizer::into_encoder);
    std::thread::scope(|scope| scope.spawn(read).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A backend with its tables. `old` is the same engine as it runs: its tables, which may have been changed since, stay
/// in use unless another file is configured for it, or the file is another one than was read.
fn load_member(
    config: &BackendConfig,
    all: &Config,
    text: Option<&Text>,
    others: &[Member],
    old: Option<&Member>,
) -> Result<Member, StartError> {
    let tables_file = config.tables.as_deref().map(FileState::of);
    if let Some(old) = old.filter(|old| old.tables_file == tables_file) {
        return Ok(old.clone());
    }
    let other = others.iter().find_map(|member| member.tables.as_ref()).map(|loaded| loaded.tables.as_ref());
    let backend = match old {
        Some(old) => Arc::clone(&old.backend),
        None => Arc::new(Backend::new(config, outgoing::client(config, all.timeouts.connect)?)),
    };
    let refuse = StartError::incompatible(&config.name);
    let tables = match &config.tables {
        Some(path) => Some(open_tables(path, config, &tables::spool(all), text, other)?),
        None => None,
    };
    let in_use = old.and_then(|old| old.tables.as_ref()).map(|loaded| loaded.tables.digest());
    if let (Some(old), Some((new, _))) = (old, &tables)
        && in_use == Some(new.digest())
    {
        // The watcher was faster.
        return Ok(Member { tables_file, ..old.clone() });
    }
    let ranks =
        compat::expected_ranks(tables.as_ref().map(|(tables, _)| tables), config.ranks).map_err(refuse)?.unwrap_or(0);
    let tables = tables.map(|(tables, origin)| Arc::new(LoadedTables::new(Arc::new(tables), origin)));
    let dialect = if config.urls.len() > 1 { Dialect::by_url(config.engine) } else { Dialect::of(config.engine, None) };
    let fit = Fit { ranks, dialect, unpinned: None };
    Ok(match old {
        Some(old) => {
            let mut member = Member { tables_file, ..old.clone() };
            match tables {
                Some(loaded) => member.replace_tables(loaded, all.tables.history),
                None => member.tables = None,
            }
            member
        }
        None => Member { backend, tables, earlier: Vec::new(), tables_file, fit },
    })
}

fn open_tables(
    path: &Path,
    config: &BackendConfig,
    spool: &Spool,
    text: Option<&Text>,
    other: Option<&Tables>,
) -> Result<(Tables, Origin), StartError> {
    let refuse = StartError::incompatible(&config.name);
    let opened = tables::open(path, spool);
    let (tables, stamp) = opened.map_err(|source| StartError::Tables { backend: config.name.clone(), source })?;
    compat::with_declared(&tables, config.placement_digest.as_deref()).map_err(&refuse)?;
    compat::with_tokenizer(&tables, text.map(|text| &text.tokenizer)).map_err(&refuse)?;
    if let Some(other) = other {
        compat::with_model(&tables, "another backend's tables", other.model()).map_err(refuse)?;
    }
    Ok((tables, Origin { path: Some(path.to_owned()), stamp: Some(stamp) }))
}
