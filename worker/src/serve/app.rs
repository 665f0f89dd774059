//! State shared by all routes.

use std::path::PathBuf;

use semmoe_engines::sglang::ServerInfo;
use semmoe_tables::Attention;
use semmoe_text::{ChatTemplate, Tokenizer};
use serde::Serialize;
use std::sync::Arc;

use super::admin::Gate;
use super::error::ApiError;
use crate::ep::{ExpertLayout, SwitchTargets};
use crate::model::{ModelConfig, instructions};
use crate::unit::{LayoutName, Unit};

/// Immutable state shared by all requests.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) unit: Unit,
    pub(crate) served: ServedModel,
    /// The transport between the ranks: `shm`, `tcp`, `mixed`, or `local` if there is only one rank.
    pub(crate) transport: &'static str,
    /// Whether the tables shuffle rows under attention tp.
    pub(crate) shuffles: bool,
    /// The folder that contains the tables files for `/switch`.
    pub(crate) tables_root: Option<PathBuf>,
    /// Whether rank 0 has all of its experts in memory, so that a switch can move them.
    pub(crate) moves_experts: bool,
    /// The forced fraction of local activations.
    pub(crate) force_local_rate: Option<f64>,
    /// Access to admin routes.
    pub(crate) gate: Gate,
}

/// A model and the files loaded from its directory.
#[derive(Debug)]
pub(crate) struct ServedModel {
    /// The name that clients use.
    pub(crate) name: String,
    /// An absolute path.
    pub(crate) dir: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Without a template, the model accepts no chat requests.
    pub(crate) template: Option<ChatTemplate>,
    /// Tokens that end generation.
    pub(crate) eos: Vec<u32>,
    pub(crate) defaults: Defaults,
}

/// Default sampling parameters on the OpenAI routes, from `generation_config.json`, as in SGLang.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Defaults {
    pub(crate) temperature: f64,
    pub(crate) top_p: f64,
    /// 0 is all.
    pub(crate) top_k: u32,
}

/// The `/server_info` response: SGLang's fields plus this worker's own.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WorkerInfo {
    #[serde(flatten)]
    engine: ServerInfo,
    /// Number of layout switches since startup.
    epoch: u64,
    /// `dp` or `tp`.
    attention: String,
    /// Under attention tp: `tables` or `off`.
    #[serde(skip_serializing_if = "Option::is_none")]
    shuffle: Option<&'static str>,
    /// Expert slots per layer beyond one per expert, over all ranks. The name is SGLang's.
    ep_num_redundant_experts: usize,
    /// Seconds of waiting time that one level of priority is worth.
    priority_seconds: f64,
    /// The instruction set used by matrix products.
    compute_instructions: &'static str,
}

impl Defaults {
    /// The defaults on `/generate`, and those used without a configuration file.
    pub(crate) const NEUTRAL: Self = Self { temperature: 1.0, top_p: 1.0, top_k: 0 };
}

impl App {
    /// Returns an error with the cause once a rank is lost.
    pub(super) fn check_alive(&self) -> Result<(), ApiError> {
        self.unit.lost().map_or(Ok(()), |lost| Err(ApiError::unavailable(lost.cause)))
    }

    /// The maximum sequence length in tokens, prompt plus output, that both the model and a rank's cache support.
    pub(crate) fn context_tokens(&self) -> usize {
        self.served.config.max_positions.min(self.unit.limits.kv_tokens())
    }

    /// Builds the `/server_info` response.
    pub(crate) fn server_info(&self) -> WorkerInfo {
        let layout = self.unit.layout();
        let (attention, held) = (layout.attention, &layout.placement.replicas);
        let shuffle = (attention == Attention::Tp).then_some(if self.shuffles { "tables" } else { "off" });
        let world = self.unit.world;
        let replicas = self.unit.replicas();
        let info = self.served.config.model_info(&self.served.name, Some(self.served.tokenizer.sha256().to_owned()));
        let engine = ServerInfo {
            model_path: Some(self.served.dir.display().to_string()),
            served_model_name: Some(info.model),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            dp_size: Some(replicas),
            tp_size: Some(world / replicas),
            ep_size: Some(match layout.placement.layout {
                ExpertLayout::Ep => world,
                ExpertLayout::Tp | ExpertLayout::Groups(_) => 1,
                ExpertLayout::Hybrid(layout) => layout.nodes,
            }),
            enable_dp_attention: Some(layout.attention == Attention::Dp || replicas > 1),
            enable_eplb: Some(false),
            disable_radix_cache: Some(!self.unit.limits.prefix_reuse),
            enable_return_routed_experts: Some(true),
            placement_digest: Some(layout.placement_digest.clone()),
            experts: Some(layout.placement.layout.to_string()),
            layout: Some(layout.name().to_string()),
            layouts: Some(self.layouts().iter().map(ToString::to_string).collect()),
            transport: Some(self.transport.to_owned()),
            force_local_rate: self.force_local_rate,
            tokenizer_sha256: info.tokenizer_sha256,
            num_experts: Some(info.num_experts),
            top_k: Some(info.top_k),
            vocab_size: Some(info.vocab_size),
            num_hidden_layers: Some(info.num_hidden_layers),
            layer_ids: Some(info.layer_ids),
            ..ServerInfo::default()
        };
        WorkerInfo {
            engine,
            epoch: layout.epoch,
            attention: attention.to_string(),
            shuffle,
            ep_num_redundant_experts: held.slots().saturating_sub(held.experts().into()),
            priority_seconds: self.unit.limits.priority_seconds,
            compute_instructions: instructions(),
        }
    }

    /// The layouts that the unit can switch to, including the current one. Attention can switch only if the ranks have
    /// the weights for both layouts, and slicing requires an expert width divisible by the number of ranks. Streamed
    /// experts cannot move.
    pub(crate) fn layouts(&self) -> Vec<LayoutName> {
        let (current, both) = (self.unit.layout().name(), self.unit.both_attentions);
        let SwitchTargets { groups, hybrid } = &self.unit.targets;
        let in_groups = !groups.is_empty();
        let even = self.served.config.expert_width.is_multiple_of(self.unit.world.into());
        let has = |layout: &LayoutName| {
            let attention = match layout {
                LayoutName::Groups(_) => true,
                // A unit that can run in groups has the attention dp weights.
                _ if layout.attention() == Attention::Dp => both || in_groups || current.attention() == Attention::Dp,
                _ => both || current.attention() == Attention::Tp && !in_groups,
            };
            attention
                && (self.moves_experts || *layout == current)
                && match (current.experts(*hybrid), layout.experts(*hybrid)) {
                    (Some(_), Some(experts)) => even || experts == ExpertLayout::Ep,
                    (None, None) => true,
                    _ => false,
                }
        };
        let groups = groups.iter().copied().map(LayoutName::Groups);
        LayoutName::ALL.into_iter().chain(groups).filter(has).collect()
    }
}
