//! All checks that can fail before anything is bound or loaded: model, tokenizer, template and tables must be
//! consistent.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use semmoe_kernels::NodeGrid;
use semmoe_tables::{Attention, Domains, ExpertCopies, ModelInfo, Placement, RankId, Tables};
use semmoe_text::{ChatTemplate, TextError, Tokenizer};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::config::WorkerConfig;
use super::device::{self, DeviceChoice};
use super::error::WorkerError;
use super::targets::{check_attention_groups, check_targets, first_given, refused};

use crate::control::Identity;
use crate::engine::{EngineLimits, KvMemory, UnitLimits};
use crate::ep::{ExpertLayout, ExpertPlacement, StageLog};
use crate::memory::available_bytes;
use crate::model::{
    HeadSlice, ModelConfig, ModelError, check_expert_memory, expert_columns, read_small_file, token_ids,
};
use crate::serve::{Defaults, ServedModel};

/// Size limit of `generation_config.json`.
const MAX_GENERATION_BYTES: u64 = 1 << 20;

/// Reasons why a unit cannot use tables.
const TABLES_WITH_SLICES: &str = "would have no effect, because with experts tp every rank has a slice of every expert: \
     serve without them, or with experts ep";
const TABLES_WITH_NODES: &str = "send rows of attention tp to ranks, and with experts hybrid a row belongs to a node: \
     serve without them, with experts ep, or with attention dp";
const REPLICAS_WITH_TP: &str = "replicate experts, which attention tp does not support: the rank of a row, and so \
     the order in which its experts are summed, would depend on the batch; solve them without replicas, or for \
     attention dp";

/// A rank's validated model directory and tables.
pub(super) struct Prepared {
    pub(super) served: ServedModel,
    pub(super) placement: ExpertCopies,
    /// The tables that shuffle rows under attention tp.
    pub(super) shuffle: Option<Arc<Tables>>,
    /// The tables that place sequences when attention switches to dp.
    pub(super) affinity: Option<Arc<Tables>>,
    pub(super) identity: Identity,
    /// The ranks on this rank's node, if nodes are configured.
    pub(super) node: Option<Range<usize>>,
    pub(super) stages: Option<StageFile>,
    /// The folder that contains the tables for `/switch`.
    pub(super) tables_root: Option<PathBuf>,
    /// This rank's limits, before those of other ranks are applied.
    pub(super) limits: UnitLimits,
}

/// The stage log, and the file that it is written to on exit.
#[derive(Clone)]
pub(super) struct StageFile {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    pub(super) log: StageLog,
}

/// The keys of `generation_config.json` that this worker reads.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Generation {
    eos_token_id: Option<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<u32>,
}

impl Generation {
    /// Returns the sampling parameters of requests that do not set them.
    fn defaults(&self) -> Defaults {
        let neutral = Defaults::NEUTRAL;
        Defaults {
            temperature: self.temperature.unwrap_or(neutral.temperature),
            top_p: self.top_p.unwrap_or(neutral.top_p),
            top_k: self.top_k.unwrap_or(neutral.top_k),
        }
    }
}

pub(super) fn prepare(config: &WorkerConfig) -> Result<Prepared, WorkerError> {
    let model_dir = fs::canonicalize(&config.model_dir).map_err(ModelError::io(&config.model_dir))?;
    let model = ModelConfig::load(&model_dir)?;
    device::check_model(config, &model)?;
    check_experts(config, &model)?;
    check_attention_groups(config)?;
    check_targets(config, &model)?;
    check_forced_rate(config, &model)?;
    let node = node(config)?;
    let tokenizer = tokenizer(&model_dir, &model)?;
    let template = template(&model_dir)?;
    let generation = generation(&model_dir)?;
    let eos = eos(&model_dir, &model, &generation, &tokenizer)?;

    let name = model_dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    let info = model.model_info(&name, Some(tokenizer.sha256().to_owned()));
    let slice = |attention| match attention {
        Attention::Dp => Ok((attention, HeadSlice::ALL)),
        Attention::Tp => {
            let ranks = config.world / config.attention_groups;
            HeadSlice::new(&model, (config.rank % ranks).into(), ranks.into()).map(|slice| (attention, slice))
        }
    };
    let slices = config.attentions().into_iter().map(slice).collect::<Result<Vec<_>, _>>()?;
    let tables = tables(config, &info)?;
    let (placement, placement_digest) = placement(config, tables.as_ref(), &info)?;
    check_expert_budget(config, &model_dir, &model, &placement)?;
    let stages = config.stages.as_deref().map(stage_file).transpose()?;
    let tables_root = tables_root(config)?;
    let tables = tables.map(Arc::new);
    let of = |attention| tables.clone().filter(|tables| tables.attention() == attention);
    let shuffle = of(Attention::Tp).filter(|_| config.shuffle);
    let affinity = of(Attention::Dp).filter(|_| config.both_attentions);
    let identity = Identity {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        world: config.world,
        model: info,
        checkpoint: checkpoint_digest(&model_dir)?,
        placement: placement_digest,
        experts: config.experts,
        switch_hybrid: config.switch_hybrid,
        expert_slots: config.expert_slots,
        transport: config.transport,
        wire: config.wire,
        attention: attention_name(config),
        device: config.device.to_string(),
        one_host: config.device != DeviceChoice::Cpu,
        shuffle: shuffle.as_ref().map_or_else(String::new, |tables| tables.digest().to_owned()),
    };
    let limits = limits_with_groups(config)
        .fitted(&model, &slices[..], config.world, kv_memory(config, &model_dir, &model)?)
        .map_err(WorkerError::arguments)?;
    let tokenizer = Arc::new(tokenizer);
    Ok(Prepared {
        served: ServedModel {
            name,
            dir: model_dir,
            config: model,
            tokenizer,
            template,
            eos,
            defaults: generation.defaults(),
        },
        placement,
        shuffle,
        affinity,
        identity,
        node,
        stages,
        tables_root,
        limits,
    })
}

/// Returns the limits with enough tokens per step for a switch to groups: a rank then runs the sequences of all of its
/// group's ranks.
fn limits_with_groups(config: &WorkerConfig) -> EngineLimits {
    let ranks = config.targets().groups.iter().map(|groups| groups.ranks).max().unwrap_or(1);
    let least = if ranks > 1 { config.limits.running.max(1).saturating_mul(2 * usize::from(ranks)) } else { 0 };
    EngineLimits { step_tokens: config.limits.step_tokens.max(least), ..config.limits }
}

/// Returns the memory for keys and values; on a GPU, the memory that the weights leave.
fn kv_memory(config: &WorkerConfig, model_dir: &Path, model: &ModelConfig) -> Result<KvMemory, WorkerError> {
    #[cfg(feature = "gpu")]
    if let Some(memory) = super::gpu::kv_memory(config, model_dir, model)? {
        return Ok(memory);
    }
    let (_, _, _) = (config, model_dir, model);
    Ok(KvMemory::host(available_bytes()))
}

/// Returns the folder of tables that the unit can switch to, with symbolic links resolved.
fn tables_root(config: &WorkerConfig) -> Result<Option<PathBuf>, WorkerError> {
    let of_tables = config.tables.as_deref().map(semmoe_tables::directory_of);
    let Some(root) = config.tables_root.as_deref().or(of_tables) else { return Ok(None) };
    match fs::canonicalize(root) {
        Ok(found) if found.is_dir() => Ok(Some(found)),
        Ok(_) => refused(format!("the tables folder {} is a file", root.display())),
        Err(error) => refused(format!("cannot read the tables folder {}: {error}", root.display())),
    }
}

/// Reads the tables, if any, and checks that they match this model and unit.
fn tables(config: &WorkerConfig, info: &ModelInfo) -> Result<Option<Tables>, WorkerError> {
    let Some(path) = &config.tables else { return Ok(None) };
    let tables = Tables::open(path).map_err(WorkerError::Tables)?;
    tables.model().check_compatible(info).map_err(|source| WorkerError::Tables(source.in_file(path)))?;
    let unfit = |reason: String| Err(WorkerError::TablesMismatch { path: path.clone(), reason });
    if !config.attentions().contains(&tables.attention()) {
        let (found, expected) = (tables.attention(), config.attention);
        return unfit(format!("are for attention {found}, but this unit runs attention {expected}"));
    }
    let (found, expected) = (tables.groups(), config.placement_groups());
    if found != expected {
        let hosts = if expected == config.world { "ranks" } else { "nodes" };
        return unfit(format!("are for {found} groups, but this unit has {expected} {hosts}"));
    }
    match config.attentions().contains(&Attention::Tp) && tables.physical_to_logical().is_some() {
        true => unfit(REPLICAS_WITH_TP.to_owned()),
        false => Ok(Some(tables)),
    }
}

/// Returns the expert placement and its digest: from the tables, or contiguous without them.
fn placement(
    config: &WorkerConfig,
    tables: Option<&Tables>,
    info: &ModelInfo,
) -> Result<(ExpertCopies, String), WorkerError> {
    match tables {
        Some(tables) => {
            let replicas = ExpertCopies::between_groups(tables).map_err(WorkerError::Tables)?;
            Ok((replicas, tables.placement_digest().to_owned()))
        }
        None => {
            let placement = Placement::contiguous(info.layers(), info.num_experts, config.placement_groups())
                .map_err(WorkerError::Placement)?;
            let digest = placement.digest();
            let (replicas, domains) = (ExpertCopies::in_domains(&placement, config.domains), config.domains);
            let digest = if domains.size() == 1 { digest } else { format!("{digest}, domains of {domains}") };
            let digest = match config.force_local_rate {
                None => digest,
                Some(rate) => format!("{digest}, a forced local rate of {}", rate.get()),
            };
            Ok((replicas.map_err(WorkerError::Placement)?, digest))
        }
    }
}

/// Returns the attention layouts as text, so that ranks can compare them.
fn attention_name(config: &WorkerConfig) -> String {
    let list = |names: Vec<String>| names.join(",");
    let names = list(config.attentions().iter().map(ToString::to_string).collect());
    if !config.switch_groups.is_empty() {
        return format!("{names} or {} groups", list(config.switch_groups.iter().map(ToString::to_string).collect()));
    }
    match config.attention_groups {
        1 => names,
        groups => format!("{names} in {groups} groups"),
    }
}

/// Checks that a local rate can be forced: no other setting may determine the expert locations, and both this rank and
/// the other ranks must have enough experts for a token.
fn check_forced_rate(config: &WorkerConfig, model: &ModelConfig) -> Result<(), WorkerError> {
    let Some(rate) = config.force_local_rate else { return Ok(()) };
    let here = model.num_experts / usize::from(config.world);
    let others = [
        (config.device != DeviceChoice::Cpu, "a GPU"),
        (config.tables.is_some(), "tables"),
        (config.attention != Attention::Dp || config.both_attentions, "attention other than dp"),
        (config.experts != ExpertLayout::Ep, "experts other than ep"),
        (config.domains != Domains::NONE, "expert domains"),
        (config.expert_memory.is_some(), "streamed experts"),
        (config.world == 1, "a single rank"),
        (here < model.top_k, "fewer experts on a rank than top-k"),
    ];
    if let Some(other) = first_given(&others) {
        return refused(format!("--force-local-rate {} cannot be combined with {other}", rate.get()));
    }
    tracing::warn!(local_rate = rate.get(), "experts are drawn at random: all text generated by this unit is wrong");
    Ok(())
}

/// Checks that this rank has enough memory for the experts of its domain.
fn check_domain(config: &WorkerConfig, model: &ModelConfig, available: Option<u64>) -> Result<(), WorkerError> {
    let (domains, size) = (config.domains, config.domains.size());
    if domains == Domains::NONE {
        return Ok(());
    }
    if let Some(path) = &config.tables {
        let path = path.display();
        return refused(format!(
            "expert domains of {domains} ranks and the tables in {path} both define the placement: use only one of them"
        ));
    }
    if config.experts != ExpertLayout::Ep {
        return refused(format!("expert domains require experts ep, but this unit has experts {}", config.experts));
    }
    if !domains.divide(config.world) {
        return refused(format!("expert domains of {domains} ranks do not divide the world of {}", config.world));
    }
    // No checkpoint uses fewer than two bytes per weight.
    let expert_bytes = 2 * 3 * model.hidden as u64 * model.expert_width as u64;
    let experts = model.num_moe_layers() as u64 * model.num_experts as u64 * size / u64::from(config.world);
    let bytes = experts.saturating_mul(expert_bytes);
    match available {
        Some(available) if bytes > available => refused(format!(
            "the experts of a domain of {domains} ranks need at least {bytes} bytes on each rank, but only {available} are available"
        )),
        _ => Ok(()),
    }
}

/// Checks that experts fit their memory limit, if any, and that no setting requires moving them.
fn check_expert_budget(
    config: &WorkerConfig,
    model_dir: &Path,
    model: &ModelConfig,
    placement: &ExpertCopies,
) -> Result<(), WorkerError> {
    let Some(limit) = config.expert_memory else { return Ok(()) };
    if config.both_attentions || config.expert_slots.is_some() {
        let other = if config.both_attentions { "two attentions" } else { "--expert-slots" };
        let streamed = ModelError::StreamedExperts;
        return refused(format!("{other} are only useful for switches, but {streamed}"));
    }
    let placement = ExpertPlacement { layout: config.experts, replicas: placement.clone() };
    Ok(check_expert_memory(model_dir, model, RankId::new(config.rank), &placement, limit)?)
}

/// Returns the ranks on this rank's node, if nodes are configured.
fn node(config: &WorkerConfig) -> Result<Option<Range<usize>>, WorkerError> {
    let Some(nodes) = config.nodes else { return Ok(None) };
    let (rank, world) = (usize::from(config.rank), usize::from(config.world));
    let grid = NodeGrid::new(world, nodes.into());
    let grid = grid.map_err(|error| WorkerError::arguments(format!("--nodes: {error}")))?;
    let hybrid = config.experts.nodes().or(config.switch_hybrid).filter(|layout| layout.nodes != nodes);
    if let Some(hybrid) = hybrid.map(ExpertLayout::Hybrid) {
        return refused(format!("{nodes} nodes and experts {hybrid} contradict each other"));
    }
    let first = grid.rank(grid.node(rank), 0);
    Ok(Some(first..first + grid.width()))
}

fn stage_file(path: &Path) -> Result<StageFile, WorkerError> {
    let file = File::create(path).map_err(ModelError::io(path))?;
    Ok(StageFile { path: path.to_owned(), file: Arc::new(file), log: StageLog::default() })
}

/// Checks that the layout can divide the experts, and that it can use the tables, if any.
fn check_experts(config: &WorkerConfig, model: &ModelConfig) -> Result<(), WorkerError> {
    let (layout, world) = (config.experts, usize::from(config.world));
    let unfit = match layout {
        ExpertLayout::Tp => Some(TABLES_WITH_SLICES),
        ExpertLayout::Hybrid(_) if config.attention == Attention::Tp => Some(TABLES_WITH_NODES),
        _ => None,
    };
    if let (Some(path), Some(reason)) = (&config.tables, unfit) {
        return Err(WorkerError::TablesMismatch { path: path.clone(), reason: reason.to_owned() });
    }
    if layout.world(layout.hosts(world)) != world {
        return refused(format!("experts {layout} require a different number of ranks than the world of {world}"));
    }
    expert_columns(model, layout, config.rank.into(), world)?;
    if let Some(slots) = config.expert_slots.filter(|slots| usize::from(*slots) > model.num_experts) {
        let experts = model.num_experts;
        return refused(format!("{slots} expert slots on each rank, but the model has only {experts} experts"));
    }
    // Streamed experts have their own limit.
    check_domain(config, model, available_bytes().filter(|_| config.expert_memory.is_none()))
}

fn tokenizer(model_dir: &Path, model: &ModelConfig) -> Result<Tokenizer, WorkerError> {
    let path = model_dir.join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path).map_err(|source| text_error(&path, source))?;
    if tokenizer.vocab_size() as usize > model.vocab_size {
        let (found, expected) = (tokenizer.vocab_size(), model.vocab_size);
        let detail = format!("its {found} token ids exceed the model's {expected}: it is not this model's tokenizer");
        return Err(WorkerError::Inconsistent { path, detail });
    }
    Ok(tokenizer)
}

/// Loads the chat template; `None` if the model has none, so that it accepts no chat requests. A template that does not
/// parse is an error.
fn template(model_dir: &Path) -> Result<Option<ChatTemplate>, WorkerError> {
    let path = model_dir.join("tokenizer_config.json");
    match ChatTemplate::beside(&path, semmoe_engines::unix_seconds) {
        Ok(template) => Ok(Some(template)),
        Err(TextError::NoTemplate) => Ok(None),
        Err(source) => Err(text_error(&path, source)),
    }
}

/// Adds the file's path to an error; I/O errors already contain it.
fn text_error(path: &Path, source: TextError) -> WorkerError {
    match source {
        TextError::Read { path, source } => ModelError::Io { path, source }.into(),
        source => WorkerError::Inconsistent { path: path.to_owned(), detail: source.to_string() },
    }
}

fn generation(model_dir: &Path) -> Result<Generation, WorkerError> {
    let path = model_dir.join("generation_config.json");
    let bytes = match read_small_file(&path, MAX_GENERATION_BYTES, "the settings of generation") {
        Err(ModelError::Missing { .. }) => return Ok(Generation::default()),
        bytes => bytes?,
    };
    serde_json::from_slice(&bytes).map_err(|error| ModelError::Json { path, detail: error.to_string() }.into())
}

/// Returns the end-of-text tokens from `generation_config.json` and `config.json`. The tokenizer must know each of
/// them.
fn eos(
    model_dir: &Path,
    model: &ModelConfig,
    generation: &Generation,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, WorkerError> {
    let listed = token_ids(generation.eos_token_id.as_ref()).ok_or_else(|| WorkerError::Inconsistent {
        path: model_dir.join("generation_config.json"),
        detail: "eos_token_id must be a token id or a list of token ids".to_owned(),
    })?;
    let mut eos = [&model.eos_token_ids[..], &listed].concat();
    eos.sort_unstable();
    eos.dedup();
    match eos.iter().find(|id| tokenizer.id_to_token(**id).is_none()) {
        None => Ok(eos),
        Some(id) => {
            let detail = format!("it has no token {id}, the model's end token: it is not this model's tokenizer");
            Err(WorkerError::Inconsistent { path: model_dir.join("tokenizer.json"), detail })
        }
    }
}

/// Returns a SHA-256 over the configuration and the name, size, header and content samples of every weight file. The
/// digest is cheap, but differs between checkpoints that are easily confused, such as a model before and after further
/// training.
fn checkpoint_digest(model_dir: &Path) -> Result<String, WorkerError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(model_dir).map_err(ModelError::io(model_dir))? {
        let entry = entry.map_err(ModelError::io(model_dir))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            let size = fs::metadata(entry.path()).map_err(ModelError::io(&entry.path()))?.len();
            files.push((name, size));
        }
    }
    files.sort();
    let path = model_dir.join("config.json");
    let config = fs::read(&path).map_err(ModelError::io(&path))?;
    let mut hash = Sha256::new();
    hash.update((config.len() as u64).to_le_bytes());
    hash.update(&config);
    for (name, size) in files {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(&name);
        hash.update(size.to_le_bytes());
        let path = model_dir.join(name);
        sample(&path, size, &mut hash).map_err(ModelError::io(&path))?;
    }
    Ok(format!("{:x}", hash.finalize()))
}

/// Hashes evenly spaced pieces of a file, including its beginning and end; a small file is hashed in full.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_that_memory_does_not_hold_is_refused() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
        let model = ModelConfig::load(dir).unwrap();
        let mut config = WorkerConfig::new(dir.to_owned(), 0, 4, ([127, 0, 0, 1], 0).into());
        config.domains = 2.into();
        // 7 layers of 16 experts, 3 matrices of 256 x 64 in bf16.
        let bytes = 7 * 16 * 3 * 256 * 64 * 2;
        for available in [None, Some(bytes)] {
            check_domain(&config, &model, available).unwrap();
        }
        let error = check_domain(&config, &model, Some(bytes - 1)).unwrap_err().to_string();
        assert_eq!(
            error,
            "the experts of a domain of 2 ranks need at least 11010048 bytes on each rank, but only 11010047 are available"
        );
    }
}
