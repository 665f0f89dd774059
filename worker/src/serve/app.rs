//! What all routes share.

use std::path::PathBuf;

use semmoe_engines::sglang::ServerInfo;
use semmoe_text::{ChatTemplate, Tokenizer};
use std::sync::Arc;

use crate::model::ModelConfig;
use crate::unit::Unit;

/// Shared by all requests, never changed.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) unit: Unit,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Models without one take no chat requests.
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) model: ModelConfig,
    /// The name that clients use.
    pub(crate) name: String,
    pub(crate) model_dir: PathBuf,
    pub(crate) placement_digest: String,
    /// Tokens that end an answer.
    pub(crate) eos: Vec<u32>,
    pub(crate) defaults: Defaults,
}

/// Sampling where a request to the OpenAI routes says nothing: `generation_config.json`, as SGLang does it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Defaults {
    pub(crate) temperature: f64,
    pub(crate) top_p: f64,
    /// 0 is all.
    pub(crate) top_k: u32,
}

impl Defaults {
    /// Where nothing says anything, and on `/generate`.
    pub(crate) const NEUTRAL: Self = Self { temperature: 1.0, top_p: 1.0, top_k: 0 };
}

impl App {
    /// Longest sequence, prompt and answer, in tokens.
    pub(crate) fn context_tokens(&self) -> usize {
        self.model.max_positions
    }

    /// What `/server_info` says in SGLang's words and ours.
    pub(crate) fn server_info(&self) -> ServerInfo {
        let world = self.unit.world();
        let info = self.model.model_info(&self.name, Some(self.tokenizer.sha256().to_owned()));
        ServerInfo {
            model_path: Some(self.model_dir.display().to_string()),
            served_model_name: Some(info.model),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            dp_size: Some(world),
            tp_size: Some(1),
            ep_size: Some(world),
            enable_dp_attention: Some(true),
            enable_eplb: Some(false),
            enable_return_routed_experts: Some(true),
            placement_digest: Some(self.placement_digest.clone()),
            tokenizer_sha256: info.tokenizer_sha256,
            num_experts: Some(info.num_experts),
            top_k: Some(info.top_k),
            vocab_size: Some(info.vocab_size),
            num_hidden_layers: Some(info.num_hidden_layers),
            layer_ids: Some(info.layer_ids),
            ..ServerInfo::default()
        }
    }
}
