//! Turns a validated configuration into models: reads tokenizers, templates and tables. An unreadable file costs its
//! model or backend only its affinity. Blocking, because it reads files.

use std::path::Path;
use std::sync::Arc;

use semmoe_engines::unix_seconds;
use semmoe_text::{ChatTemplate, PromptEncoder, TextError, Tokenizer};

use crate::backends::{
    Backend, FileState, Fit, LoadedTables, Member, Model, Origin, Plan, Queue, Snapshot, StartError, Text, TextSource,
    UnreadText, Vocabulary, next_pool, outgoing, tables,
};
use crate::config::{BackendConfig, Config, ModelConfig};
use crate::observe::Metrics;

pub(crate) fn snapshot(config: &Arc<Config>, metrics: &Metrics) -> Result<Snapshot, StartError> {
    check_dirs(config)?;
    let models = config.models.iter().map(|it| model(it, config, None, metrics)).collect::<Result<_, _>>()?;
    Ok(Snapshot::new(Arc::clone(config), models))
}

/// Checks that folders exist.
pub(crate) fn check_dirs(config: &Config) -> Result<(), StartError> {
    match config.sampling.dirs().find(|(_, dir)| !dir.is_dir()) {
        Some((key, dir)) => Err(StartError::Dir { key, path: dir.to_owned() }),
        None => Ok(()),
    }
}

/// A running model, for reuse.
#[derive(Clone, Copy)]
pub(crate) struct Running<'a> {
    pub(crate) model: &'a Model,
    pub(crate) config: &'a Config,
    /// Whether to check the files for changes.
    pub(crate) reread: bool,
}

/// Loads a model with everything it needs. With `old`, the running model, unchanged parts are reused.
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
    let (text, unread) = match old {
        Some(Running { model, reread: false, .. }) => (model.text.clone(), model.unread.clone()),
        _ => text(config, all.routing.segment_cache_bytes, old.map(|old| old.model)),
    };
    let mut members: Vec<Member> = Vec::new();
    for backend in &config.backends {
        let same = |old: &&Member| old.backend.config.is_same_engine(backend);
        let known = old.and_then(|old| old.model.members.iter().find(same));
        members.push(match known {
            Some(known) if old.is_some_and(|old| !old.reread) => known.clone(),
            _ => load_member(backend, all, known, metrics)?,
        });
    }
    let (old_model, old_config) = (old.map(|old| old.model), old.map_or(all, |old| old.config));
    let budget = old.map_or_else(Arc::default, |old| Arc::clone(&old.model.budget));
    let new_queue = || {
        let (depth, waits) = metrics.faults.queue(&config.name);
        Arc::new(Queue::new(depth, waits))
    };
    let queue = old.map_or_else(new_queue, |old| Arc::clone(&old.model.queue));
    let (name, other_names) = (config.name.clone(), config.other_names.clone());
    let pool = next_pool(old_model, old_config, &members, &plan, all, metrics);
    let mut model = Model { name, other_names, text, unread, pool, plan, budget, queue, members };
    for at in 0..model.members.len() {
        model.judge_again(at, all.limits.ranks);
    }
    model.pool = next_pool(old_model, old_config, &model.members, &model.plan, all, metrics);
    Ok(model)
}

/// Loads a model's tokenizer and template, or returns why the tokenizer could not be read. If the files have become
/// unreadable, the running model's tokenizer and template stay in use.
fn text(
    config: &ModelConfig,
    segment_cache_bytes: usize,
    old: Option<&Model>,
) -> (Option<Arc<Text>>, Option<UnreadText>) {
    let Some(path) = &config.tokenizer else { return (None, None) };
    let files = [Some(path.clone()), config.chat_template.clone()];
    let names = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"];
    let beside = names.into_iter().chain(["config.json", "additional_chat_templates"]);
    let beside = beside.map(|name| Some(path.with_file_name(name)));
    let files = files.into_iter().chain(beside).flatten().map(|path| FileState::of(&path)).collect();
    let chat_options = config.chat_options.clone();
    let made_of = TextSource { files, chat_options, segment_cache_bytes, zone_seconds: config.zone_seconds };
    let running = old.and_then(|old| old.text.as_ref());
    if let Some(text) = running.filter(|text| text.made_of == made_of) {
        return (Some(Arc::clone(text)), None);
    }
    match load_text(config, path, made_of, running) {
        Ok(text) => (Some(Arc::new(text)), None),
        Err(error) => {
            let unread = UnreadText { error: error.into(), earlier_in_use: running.is_some() };
            tracing::error!(
                model = config.name,
                cause = %unread.error,
                earlier_in_use = unread.earlier_in_use,
                "cannot read the tokenizer"
            );
            (running.cloned(), Some(unread))
        }
    }
}

/// Reads the tokenizer and the template. If the template is unusable, its error is recorded, and the template of `old`
/// stays in use.
fn load_text(
    config: &ModelConfig,
    path: &Path,
    made_of: TextSource,
    old: Option<&Arc<Text>>,
) -> Result<Text, TextError> {
    let mut tokenizer = encoder(path)?;
    tokenizer.cache_segments(made_of.segment_cache_bytes);
    match tokenizer.is_fast() {
        Ok(()) => tracing::info!(model = config.name, "encoding prompts with the fast library"),
        Err(reason) => {
            tracing::warn!(model = config.name, reason = reason.to_string(), "encoding prompts with the slow library");
        }
    }
    let (template, template_error) = match template(config, path) {
        Ok(template) => (template.map(Arc::new), None),
        Err(error) => {
            let template = old.and_then(|old| old.template.clone());
            let earlier_in_use = template.is_some();
            tracing::error!(model = config.name, %error, earlier_in_use, "cannot use the chat template");
            (template, Some(error.into()))
        }
    };
    let vocabulary = Vocabulary::beside(path, tokenizer.vocab_size(), &config.name);
    let writes_date = template.as_ref().is_some_and(|template| template.writes_date());
    let tokenizer = Arc::new(tokenizer);
    Ok(Text { tokenizer, template, template_error, vocabulary, writes_date, made_of })
}

/// Reads the configured template, or the tokenizer's own. A model without a template serves chats without affinity.
fn template(config: &ModelConfig, tokenizer: &Path) -> Result<Option<ChatTemplate>, TextError> {
    let template = match &config.chat_template {
        Some(path) => ChatTemplate::from_file(path, tokenizer, unix_seconds),
        None => match ChatTemplate::beside(tokenizer, unix_seconds) {
            Err(TextError::NoTemplate) => return Ok(None),
            template => template,
        },
    };
    let options = config.chat_options.clone();
    template.map(|template| Some(template.in_zone(config.zone_seconds).with_options(options)))
}

/// Reads a tokenizer on its own thread: the fast library caches words per thread, so the 16 MB cache is freed with that
/// thread.
fn encoder(path: &Path) -> Result<PromptEncoder, TextError> {
    let read = || Tokenizer::from_file(path).map(Tokenizer::into_encoder);
    std::thread::scope(|scope| scope.spawn(read).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Loads a backend with its tables. `old` is the engine's running state: its tables, which may have been swapped since,
/// stay in use unless another file is configured, or the file has changed and is readable.
fn load_member(
    config: &BackendConfig,
    all: &Config,
    old: Option<&Member>,
    metrics: &Metrics,
) -> Result<Member, StartError> {
    let tables_file = config.tables.as_deref().map(FileState::of);
    if let Some(old) = old.filter(|old| old.tables_file == tables_file) {
        return Ok(Member { unread: None, ..old.clone() });
    }
    let mut member = match old {
        Some(old) => old.clone(),
        None => {
            let backend = Arc::new(Backend::new(config, outgoing::client(config, all.timeouts.connect)?));
            let fit = Fit::unprobed(config, 0);
            Member { backend, tables: None, earlier: Vec::new(), tables_file: None, unread: None, fit }
        }
    };
    let open = |path| Ok::<_, tables::TablesFileError>((path, tables::open(path, &tables::spool(all))?));
    let opened = config.tables.as_deref().map(open).transpose();
    match opened {
        Ok(opened) => {
            let in_use = member.tables.as_ref().map(|loaded| loaded.tables.digest().to_owned());
            (member.tables_file, member.unread) = (tables_file, None);
            match opened {
                None => member.tables = None,
                // The watcher has already loaded this version.
                Some((_, (tables, _))) if in_use.as_deref() == Some(tables.digest()) => {}
                Some((path, (tables, stamp))) => {
                    let origin = Origin { path: Some(path.to_owned()), stamp: Some(stamp) };
                    member.replace_tables(Arc::new(LoadedTables::new(Arc::new(tables), origin)), all.tables.history);
                }
            }
        }
        // Every reload retries the file.
        Err(error) => {
            let backend = config.name.as_str();
            tracing::error!(backend, %error, earlier_in_use = member.tables.is_some(), "cannot read the tables");
            metrics.tables.reload("invalid");
            member.unread = Some(tables::Trouble::now("configuration", error));
        }
    }
    Ok(member)
}
