//! Everything that can be refused before anything is bound or loaded: model, tokenizer, template and tables fit together.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use semmoe_tables::{Attention, ExpertCopies, ModelInfo, Placement, RankId, Tables};
use semmoe_text::{ChatTemplate, TextError, Tokenizer};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::config::WorkerConfig;
use super::error::WorkerError;

use crate::control::Identity;
use crate::engine::UnitLimits;
use crate::ep::ExpertLayout;
use crate::memory::available_bytes;
use crate::model::{ExpertSlice, HeadShare, ModelConfig, ModelError};
use crate::serve::Defaults;

/// `generation_config.json` is small; what is larger is not one.
const MAX_GENERATION_BYTES: u64 = 1 << 20;

/// A rank's model directory and tables, checked.
pub(super) struct Prepared {
    /// Absolute.
    pub(super) model_dir: PathBuf,
    pub(super) model: ModelConfig,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) template: Option<ChatTemplate>,
    pub(super) placement: ExpertCopies,
    pub(super) attention: Attention,
    /// By what rows are shuffled, with attention tp.
    pub(super) shuffle: Option<Arc<Tables>>,
    pub(super) identity: Identity,
    pub(super) eos: Vec<u32>,
    pub(super) defaults: Defaults,
    /// As this rank alone would have them.
    pub(super) limits: UnitLimits,
}

/// What this worker reads of `generation_config.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Generation {
    eos_token_id: Option<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<u32>,
}

pub(super) fn prepare(config: &WorkerConfig) -> Result<Prepared, WorkerError> {
    let model_dir = fs::canonicalize(&config.model_dir)
        .map_err(|source| ModelError::Io { path: config.model_dir.clone(), source })?;
    let model = ModelConfig::load(&model_dir)?;
    check_experts(config, &model)?;
    let tokenizer = tokenizer(&model_dir, &model)?;
    let template = template(&model_dir)?;
    let generation = generation(&model_dir)?;
    let eos = eos(&model_dir, &model, &generation, &tokenizer)?;

    let name = model_dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    let info = model.model_info(&name, Some(tokenizer.sha256().to_owned()));
    let share = match config.attention {
        Attention::Dp => HeadShare::ALL,
        Attention::Tp => HeadShare::new(&model, RankId::new(config.rank).index(), usize::from(config.world))?,
    };
    let tables = tables(config, &info)?;
    let (placement, placement_digest) = placement(config, tables.as_ref(), &info)?;
    let shuffle = tables.filter(|_| config.attention == Attention::Tp && config.shuffle).map(Arc::new);
    let identity = Identity {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        world: config.world,
        model: info,
        checkpoint: checkpoint_digest(&model_dir)?,
        placement: placement_digest,
        experts: config.experts,
        transport: config.transport,
        wire: config.wire,
        attention: config.attention.to_string(),
        shuffle: shuffle.as_ref().map_or_else(String::new, |tables| tables.digest().to_owned()),
    };
    let neutral = Defaults::NEUTRAL;
    let defaults = Defaults {
        temperature: generation.temperature.unwrap_or(neutral.temperature),
        top_p: generation.top_p.unwrap_or(neutral.top_p),
        top_k: generation.top_k.unwrap_or(neutral.top_k),
    };
    let limits = config
        .limits
        .fitted((&model, share), config.world, available_bytes())
        .map_err(|error| WorkerError::Arguments { detail: error.to_string() })?;
    let tokenizer = Arc::new(tokenizer);
    let attention = config.attention;
    Ok(Prepared {
        model_dir,
        model,
        tokenizer,
        template,
        placement,
        attention,
        shuffle,
        identity,
        eos,
        defaults,
        limits,
    })
}

/// The tables, if there are any, of this model and for this unit.
fn tables(config: &WorkerConfig, info: &ModelInfo) -> Result<Option<Tables>, WorkerError> {
    let Some(path) = &config.tables else { return Ok(None) };
    let tables = Tables::open(path).map_err(|source| WorkerError::Tables { source })?;
    tables.model().check_compatible(info).map_err(|source| WorkerError::Tables { source: source.in_file(path) })?;
    if tables.attention() != config.attention {
        let (found, expected) = (tables.attention(), config.attention);
        return Err(WorkerError::TablesAttention { path: path.clone(), found, expected });
    }
    if tables.groups() != config.world {
        let (found, expected) = (tables.groups(), config.world);
        return Err(WorkerError::TablesWorld { path: path.clone(), found, expected });
    }
    if config.attention == Attention::Tp && tables.physical_to_logical().is_some() {
        return Err(WorkerError::TablesReplicas { path: path.clone() });
    }
    Ok(Some(tables))
}

/// Where the experts are, and the digest of that: as the tables say, or in order.
fn placement(
    config: &WorkerConfig,
    tables: Option<&Tables>,
    info: &ModelInfo,
) -> Result<(ExpertCopies, String), WorkerError> {
    match tables {
        Some(tables) => {
            let copies = ExpertCopies::between_groups(tables).map_err(|source| WorkerError::Tables { source })?;
            Ok((copies, tables.placement_digest().to_owned()))
        }
        None => {
            let placement = Placement::contiguous(
                info.layers(),
                info.num_experts,
                config.experts.hosts(config.world.into()) as u16,
            )
            .map_err(|source| WorkerError::Placement { source })?;
            Ok((ExpertCopies::from(&placement), placement.digest()))
        }
    }
}

/// Whether experts can be cut as the layout has it, and that no tables are given that it cannot use.
fn check_experts(config: &WorkerConfig, model: &ModelConfig) -> Result<(), WorkerError> {
    let (layout, world) = (config.experts, usize::from(config.world));
    match (layout, &config.tables) {
        (ExpertLayout::Tp, Some(path)) => return Err(WorkerError::TablesExperts { path: path.clone() }),
        (ExpertLayout::Hybrid(_), Some(path)) => return Err(WorkerError::TablesNodes { path: path.clone() }),
        _ => {}
    }
    if layout.world(layout.hosts(world)) != world {
        let detail = format!("experts {layout} are laid out for another number of ranks than the world of {world}");
        return Err(WorkerError::Arguments { detail });
    }
    ExpertSlice::new(model, layout, config.rank.into(), world)?;
    Ok(())
}

fn tokenizer(model_dir: &Path, model: &ModelConfig) -> Result<Tokenizer, WorkerError> {
    let path = model_dir.join("tokenizer.json");
    let tokenizer = match Tokenizer::from_file(&path) {
        Ok(tokenizer) => tokenizer,
        Err(source) => return Err(text_error(path, source)),
    };
    if tokenizer.vocab_size() as usize > model.vocab_size {
        let (found, expected) = (tokenizer.vocab_size(), model.vocab_size);
        let detail = format!("it has {found} token ids, the model only {expected}: it is not this model's tokenizer");
        return Err(WorkerError::Inconsistent { path, detail });
    }
    Ok(tokenizer)
}

/// A model without a chat template takes no chat requests; a template that does not parse is an error.
fn template(model_dir: &Path) -> Result<Option<ChatTemplate>, WorkerError> {
    let path = model_dir.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(None);
    }
    match ChatTemplate::from_config_file(&path) {
        Ok(template) => Ok(Some(template)),
        Err(TextError::NoTemplate) => Ok(None),
        Err(source) => Err(text_error(path, source)),
    }
}

/// Errors of reading name the file themselves.
fn text_error(path: PathBuf, source: TextError) -> WorkerError {
    match source {
        TextError::Read { path, source } => ModelError::Io { path, source }.into(),
        source => WorkerError::Text { path, source },
    }
}

fn generation(model_dir: &Path) -> Result<Generation, WorkerError> {
    let path = model_dir.join("generation_config.json");
    let size = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Generation::default()),
        Err(source) => return Err(ModelError::Io { path, source }.into()),
    };
    if size > MAX_GENERATION_BYTES {
        let detail = format!("it has {size} bytes, more than the {MAX_GENERATION_BYTES} allowed");
        return Err(WorkerError::Inconsistent { path, detail });
    }
    let bytes = fs::read(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
    serde_json::from_slice(&bytes).map_err(|error| ModelError::Json { path, detail: error.to_string() }.into())
}

/// The tokens that end a text: those of `generation_config.json` and of `config.json`. Each must be the tokenizer's too.
fn eos(
    model_dir: &Path,
    model: &ModelConfig,
    generation: &Generation,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, WorkerError> {
    let path = || model_dir.join("generation_config.json");
    let listed = match &generation.eos_token_id {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(ids)) => ids.clone(),
        Some(single) => vec![single.clone()],
    };
    let mut eos = model.eos_token_ids.clone();
    for id in listed {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            let detail = "eos_token_id must be a token id or a list of token ids".to_owned();
            WorkerError::Inconsistent { path: path(), detail }
        })?;
        eos.push(id);
    }
    eos.sort_unstable();
    eos.dedup();
    match eos.iter().find(|id| tokenizer.id_to_token(**id).is_none()) {
        None => Ok(eos),
        Some(id) => {
            let detail =
                format!("it has no token {id}, with which the model ends a text: it is not this model's tokenizer");
            Err(WorkerError::Inconsistent { path: model_dir.join("tokenizer.json"), detail })
        }
    }
}

/// SHA-256 over the configuration and, of every weight file, its name, its size, its header and samples of its content:
/// cheap, and different for what is likely to be mixed up, such as the same model after more training.
fn checkpoint_digest(model_dir: &Path) -> Result<String, WorkerError> {
    let io = |path: &Path, source| ModelError::Io { path: path.to_owned(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(model_dir).map_err(|source| io(model_dir, source))? {
        let entry = entry.map_err(|source| io(model_dir, source))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            let size = fs::metadata(entry.path()).map_err(|source| io(&entry.path(), source))?.len();
            files.push((name, size));
        }
    }
    files.sort();
    let path = model_dir.join("config.json");
    let config = fs::read(&path).map_err(|source| io(&path, source))?;
    let mut hash = Sha256::new();
    hash.update((config.len() as u64).to_le_bytes());
    hash.update(&config);
    for (name, size) in files {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(&name);
        hash.update(size.to_le_bytes());
        let path = model_dir.join(name);
        sample(&path, size, &mut hash).map_err(|source| io(&path, source))?;
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Pieces of a file that lie evenly in it, its beginning and its end among them; the whole of a small one.
fn sample(path: &Path, size: u64, hash: &mut Sha256) -> std::io::Result<()> {
    const PIECES: u64 = 64;
    const PIECE_BYTES: u64 = 4096;
    let mut file = fs::File::open(path)?;
    let mut piece = Vec::new();
    for index in 0..PIECES {
        let at = size.saturating_sub(PIECE_BYTES) * index / (PIECES - 1);
        file.seek(SeekFrom::Start(at))?;
        piece.clear();
        file.by_ref().take(PIECE_BYTES).read_to_end(&mut piece)?;
        hash.update(&piece);
    }
    Ok(())
}
