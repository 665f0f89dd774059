//! A Hugging Face MoE checkpoint on one rank: all of attention, this rank's experts.
//!
//! | module | what |
//! |---|---|
//! | `config` | `config.json`, checked |
//! | `checkpoint` | safetensors files by memory map |
//! | `weights` | tensors by name, checked against the configuration, packed |
//! | `step` | what goes into a step and what comes out |
//! | `forward` | a step through all layers |
//! | `attention`, `kv`, `rope` | causal grouped-query attention over one sequence's cache |
//! | `router`, `mlp` | the choice of experts, and an expert |
//! | `compute` | matrix products and element-wise functions |
//! | `probe` | a look inside, for tests |

mod attention;
mod checkpoint;
mod compute;
mod config;
mod error;
mod forward;
mod kv;
mod mlp;
mod probe;
mod rope;
mod router;
mod step;
mod weights;

use std::path::Path;

use semmoe_tables::{Placement, RankId};

pub use config::ModelConfig;
pub use error::{ModelError, StepError};
pub use kv::KvCache;
pub use probe::Probe;
pub use step::{StepItem, StepOutput};

use crate::ep::ExpertParallel;
use checkpoint::Checkpoint;
use forward::{Forward, Scratch};
use probe::NoProbe;
use rope::RotaryTable;
use step::OutputBuffers;
use weights::{Loader, Weights};

/// One rank's model: loaded once, stepped by one thread.
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    angles: RotaryTable,
    scratch: Scratch,
    out: OutputBuffers,
}

impl Model {
    /// Loads `config.json` and the safetensors files of a model directory, and keeps the experts that `placement` gives this
    /// rank (group g is rank g). Every tensor is checked, also those that other ranks keep.
    ///
    /// # Errors
    /// One sentence: a file that is missing, cut short or not valid; an architecture or a setting that is not supported; a
    /// tensor that is missing or has another shape or type; a placement for another model.
    pub fn load(model_dir: &Path, rank: RankId, placement: &Placement) -> Result<Self, ModelError> {
        let config = ModelConfig::load(model_dir)?;
        check_placement(&config, rank, placement)?;
        let checkpoint = Checkpoint::open(model_dir)?;
        let weights = Loader { checkpoint: &checkpoint, config: &config, placement, rank }.load()?;
        let angles = RotaryTable::new(config.head_dim, config.rope_theta);
        Ok(Self { config, weights, angles, scratch: Scratch::default(), out: OutputBuffers::default() })
    }

    /// The checkpoint's configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The cache of a sequence that has no tokens yet.
    #[must_use]
    pub fn new_sequence(&self) -> KvCache {
        KvCache::new(&self.config)
    }

    /// Takes some tokens of any number of sequences through all layers, in lockstep with the other ranks: two collectives
    /// per MoE layer, also for an empty step. A token's logits and routes do not depend on what else is in the step, nor on
    /// how its sequence was cut into steps (bitwise).
    ///
    /// # Errors
    /// [`StepError::Item`] before anything happened; [`StepError::Transport`] when a rank failed, after which the caches of
    /// these items are as they were.
    pub fn step(&mut self, items: &mut [StepItem<'_>], ep: &mut ExpertParallel) -> Result<StepOutput<'_>, StepError> {
        self.step_probed(items, ep, &mut NoProbe)
    }

    /// As [`Model::step`], with a look inside.
    ///
    /// # Errors
    /// As [`Model::step`].
    pub fn step_probed(
        &mut self,
        items: &mut [StepItem<'_>],
        ep: &mut ExpertParallel,
        probe: &mut dyn Probe,
    ) -> Result<StepOutput<'_>, StepError> {
        for (item, step) in items.iter().enumerate() {
            check_item(&self.config, step).map_err(|detail| StepError::Item { item, detail })?;
        }
        for item in &mut *items {
            self.angles.grow(item.kv.len() + item.tokens.len());
            item.kv.reserve(item.tokens.len());
        }
        let mut forward = Forward {
            config: &self.config,
            weights: &self.weights,
            angles: &self.angles,
            scratch: &mut self.scratch,
            out: &mut self.out,
            ep,
            probe,
        };
        forward.run(items)?;
        for item in items {
            item.kv.commit(item.tokens.len());
            ep.count_tokens(item.phase, item.tokens.len());
        }
        Ok(StepOutput { buffers: &self.out })
    }
}

fn check_item(config: &ModelConfig, item: &StepItem<'_>) -> Result<(), String> {
    if item.tokens.is_empty() {
        return Err("it has no tokens, expected at least one".to_owned());
    }
    if let Some(token) = item.tokens.iter().find(|&&token| token as usize >= config.vocab_size) {
        return Err(format!("token id {token}, expected below the vocabulary's {}", config.vocab_size));
    }
    let (tokens, room) = (item.tokens.len(), item.kv.remaining());
    if tokens > room {
        return Err(format!("{tokens} tokens, expected at most the {room} that its sequence can still take"));
    }
    Ok(())
}

fn check_placement(config: &ModelConfig, rank: RankId, placement: &Placement) -> Result<(), ModelError> {
    let check = |field, found: usize, of, expected: usize| match found == expected {
        true => Ok(()),
        false => Err(ModelError::Placement { field, found, of, expected }),
    };
    check("MoE layers", placement.layers(), "model", config.num_moe_layers())?;
    check("experts per layer", usize::from(placement.experts()), "model", config.num_experts)?;
    let groups = usize::from(placement.groups());
    if rank.index() < groups { Ok(()) } else { check("groups", groups, "unit", rank.index() + 1) }
}
