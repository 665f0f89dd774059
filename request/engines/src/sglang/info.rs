//! `/v1/loads` and `/server_info`.

use semmoe_tables::ModelInfo;
use serde::{Deserialize, Serialize};

/// Response of `GET /v1/loads`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Loads {
    /// Time of the measurement, in the engine's own format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<serde_json::Value>,
    /// The engine's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// One entry per attention-DP rank, in any order.
    pub loads: Vec<RankLoads>,
}

/// Load of one rank. A missing number means that the load is unknown, not that the rank is idle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankLoads {
    /// The rank.
    pub dp_rank: u32,
    /// Requests in the running batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_running_reqs: Option<u64>,
    /// Waiting requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_waiting_reqs: Option<u64>,
    /// Waiting prompt tokens that are not in a prefix cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_waiting_uncached_tokens: Option<u64>,
    /// KV slots in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_used_tokens: Option<u64>,
    /// Running and waiting tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_total_tokens: Option<u64>,
    /// Number of KV slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_num_tokens: Option<u64>,
    /// Maximum running batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_running_requests: Option<u64>,
    /// Fraction of KV slots in use, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_usage: Option<f64>,
    /// Tokens generated per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gen_throughput: Option<f64>,
    /// Fraction of prompt tokens found in the prefix cache, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_hit_rate: Option<f64>,
    /// The engine's own measure of the rank's utilization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
}

/// The loads do not list every rank exactly once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the loads list ranks {found:?}, expected each of 0..{ranks} once")]
pub struct LoadCoverageError {
    /// Ranks listed (the first 64).
    pub found: Vec<u32>,
    /// Number of ranks.
    pub ranks: u16,
}

impl Loads {
    /// Returns the entries in rank order, if they list each of `ranks` ranks exactly once.
    ///
    /// # Errors
    /// `LoadCoverageError` if a rank is missing, unknown or duplicated.
    pub fn by_rank(&self, ranks: u16) -> Result<Vec<&RankLoads>, LoadCoverageError> {
        let mut sorted: Vec<&RankLoads> = self.loads.iter().collect();
        sorted.sort_by_key(|load| load.dp_rank);
        let complete =
            sorted.len() == usize::from(ranks) && sorted.iter().zip(0u32..).all(|(load, rank)| load.dp_rank == rank);
        if complete {
            Ok(sorted)
        } else {
            Err(LoadCoverageError { found: self.loads.iter().take(64).map(|load| load.dp_rank).collect(), ranks })
        }
    }
}

/// The layout with attention DP and whole experts, distributed over ranks by a placement.
const WHOLE: &str = "ep";

/// The contents of `/server_info`. SGLang returns its server arguments and more; the second group of fields is specific
/// to semmoe's worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerInfo {
    /// Directory or hub name of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_path: Option<String>,
    /// Model name that clients use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_model_name: Option<String>,
    /// Engine version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Data-parallel ranks. In SGLang up to 0.5.21 these are attention-DP ranks; see [`ServerInfo::ranks`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_size: Option<u16>,
    /// Attention-DP ranks within each data-parallel rank, from SGLang 0.5.22.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attn_dp_size: Option<u16>,
    /// Tensor-parallel ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp_size: Option<u16>,
    /// Expert-parallel ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ep_size: Option<u16>,
    /// Whether data parallelism applies only to attention, inside one engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_dp_attention: Option<bool>,
    /// All-to-all backend that sends tokens to experts on other ranks; with `none`, every rank computes all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe_a2a_backend: Option<String>,
    /// Whether the engine rebalances experts by itself, so that no placement stays valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_eplb: Option<bool>,
    /// Whether prefix caching is disabled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_radix_cache: Option<bool>,
    /// `--init-expert-location` as given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_expert_location: Option<String>,
    /// Random seed, which differs on each start unless it was set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub random_seed: Option<i64>,
    /// Whether routed experts can be requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_return_routed_experts: Option<bool>,

    /// Digest of the current placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement_digest: Option<String>,
    /// How experts are divided over ranks: `ep` (whole experts, by a placement), `tp` (a slice of every expert on every
    /// rank) or `hybrid:NxP` (each expert on one of N nodes, sliced over its P ranks).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<String>,
    /// The current layout: `ep`, `tp`, `dp-tp`, `tp-ep`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// Layouts that the worker can switch to, including the current one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layouts: Option<Vec<String>>,
    /// Transport between ranks: `shm` (memory of one host), `tcp`, or `local` for a single rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// Measurement mode: experts are drawn at random so that this fraction of activations is local, and outputs are
    /// meaningless.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub force_local_rate: Option<f64>,
    /// Digest of the tokenizer (canonical vocabulary, merges, added tokens).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer_sha256: Option<String>,
    /// Routed experts per layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_experts: Option<u16>,
    /// Experts per token and layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u16>,
    /// Size of the vocabulary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<u32>,
    /// Number of layers, including dense ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_hidden_layers: Option<u16>,
    /// Indices of the MoE layers among all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_ids: Option<Vec<u16>>,
}

impl ServerInfo {
    /// Returns whether the engine can change its layout, and with it the number of ranks, while it serves.
    pub fn switches(&self) -> bool {
        self.layouts.as_ref().is_some_and(|layouts| layouts.len() > 1)
    }

    /// Returns the current layout if it is not `ep` but the engine can switch to `ep`: until then, its tables do not
    /// apply.
    pub fn layout_without_tables(&self) -> Option<&str> {
        let layout = self.layout.as_deref().filter(|layout| *layout != WHOLE)?;
        self.layouts.as_ref()?.iter().any(|layout| layout == WHOLE).then_some(layout)
    }

    /// Returns the number of ranks that a request can be pinned to. From SGLang 0.5.22 on, both spellings of its flags
    /// report `dp_size: 1` and the ranks as `attn_dp_size`, and pins range over `dp_size * attn_dp_size` ranks. `None`
    /// if the engine reports neither.
    pub fn ranks(&self) -> Option<u16> {
        match (self.attn_dp_size, self.dp_size) {
            (Some(attention), Some(engines)) => Some(attention.saturating_mul(engines)),
            (attention, engines) => attention.or(engines),
        }
    }

    /// Returns P with hybrid experts (`hybrid:NxP`), where a group of the placement is a node of P ranks; otherwise 1.
    pub fn group_ranks(&self) -> u16 {
        let hybrid = self.experts.as_deref().and_then(|experts| experts.strip_prefix("hybrid:"));
        let ranks = hybrid.and_then(|degrees| degrees.split(['x', ':']).nth(1)?.parse().ok());
        ranks.filter(|ranks| *ranks > 0).unwrap_or(1)
    }

    /// Returns whether tokens are never sent to experts on other ranks, so that grouping experts saves no traffic.
    pub fn exchanges_nothing(&self) -> bool {
        self.moe_a2a_backend.as_deref() == Some("none") && self.ep_size.is_some_and(|ranks| ranks > 1)
    }

    /// Returns the name that clients use: the served name, or else the last component of the path.
    pub fn model_name(&self) -> Option<&str> {
        let path = || self.model_path.as_deref().map(|path| path.trim_end_matches('/'));
        self.served_model_name.as_deref().or_else(|| path().map(|path| path.rsplit('/').next().unwrap_or(path)))
    }

    /// Returns the model's shape if the engine reports all of it, as semmoe's worker does. The values are not
    /// validated.
    pub fn model_info(&self) -> Option<ModelInfo> {
        Some(ModelInfo {
            model: self.model_name()?.to_owned(),
            tokenizer_sha256: self.tokenizer_sha256.clone(),
            num_experts: self.num_experts?,
            top_k: self.top_k?,
            vocab_size: self.vocab_size?,
            num_hidden_layers: self.num_hidden_layers?,
            layer_ids: self.layer_ids.clone()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn loads_must_cover_the_ranks() {
        let loads: Loads = serde_json::from_value(json!({
            "timestamp": "2026-01-01T00:00:00", "version": "0.5.23", "dp_rank_count": 2,
            "loads": [{"dp_rank": 1, "num_running_reqs": 3, "new_field": 1}, {"dp_rank": 0, "token_usage": 0.5}]
        }))
        .unwrap();
        let sorted = loads.by_rank(2).unwrap();
        assert_eq!((sorted[0].num_running_reqs, sorted[1].num_running_reqs), (None, Some(3)));
        assert!(loads.by_rank(3).is_err());
        assert_eq!(loads.by_rank(1).unwrap_err().found, [1, 0]);
    }

    #[test]
    fn hybrid_experts_have_groups_of_several_ranks() {
        let ranks =
            |experts: &str| ServerInfo { experts: Some(experts.to_owned()), ..ServerInfo::default() }.group_ranks();
        assert_eq!((ServerInfo::default().group_ranks(), ranks("ep"), ranks("tp:2x4")), (1, 1, 1));
        assert_eq!((ranks("hybrid:2x4"), ranks("hybrid:4x2:8")), (4, 2));
        for malformed in ["hybrid:", "hybrid:2", "hybrid:2x", "hybrid:2x0", "hybrid:2x-1", "hybrid:2x65536"] {
            assert_eq!(ranks(malformed), 1, "{malformed}");
        }
    }

    #[test]
    fn ranks_by_version() {
        for (info, ranks) in [
            (json!({ "version": "0.5.16", "dp_size": 8, "enable_dp_attention": true }), Some(8)),
            (json!({ "version": "0.5.23", "dp_size": 1, "attn_dp_size": 8 }), Some(8)),
            (json!({ "version": "0.5.23", "dp_size": 2, "attn_dp_size": 4 }), Some(8)),
            (json!({ "version": "0.5.23", "dp_size": 4, "attn_dp_size": 1 }), Some(4)),
            (json!({ "attn_dp_size": 2 }), Some(2)),
            (json!({ "dp_size": 65535, "attn_dp_size": 65535 }), Some(u16::MAX)),
            (json!({ "version": "0.5.23" }), None),
        ] {
            assert_eq!(serde_json::from_value::<ServerInfo>(info.clone()).unwrap().ranks(), ranks, "{info}");
        }
    }

    #[test]
    fn some_launch_commands_exchange_nothing() {
        for (info, nothing) in [
            (json!({ "moe_a2a_backend": "none", "ep_size": 8 }), true),
            (json!({ "moe_a2a_backend": "deepep", "ep_size": 8 }), false),
            (json!({ "moe_a2a_backend": "none", "ep_size": 1 }), false),
            (json!({ "ep_size": 8 }), false),
        ] {
            assert_eq!(
                serde_json::from_value::<ServerInfo>(info.clone()).unwrap().exchanges_nothing(),
                nothing,
                "{info}"
            );
        }
    }

    #[test]
    fn server_info_of_sglang_and_of_semmoe() {
        let info: ServerInfo = serde_json::from_value(json!({
            "model_path": "/models/qwen3-30b/", "served_model_name": null, "dp_size": 8, "ep_size": 8,
            "internal_states": [{}], "init_expert_location": "trivial"
        }))
        .unwrap();
        assert_eq!((info.model_name(), info.dp_size, info.model_info()), (Some("qwen3-30b"), Some(8), None));
        let info: ServerInfo = serde_json::from_value(json!({
            "served_model_name": "tiny", "dp_size": 2, "num_experts": 32, "top_k": 4, "vocab_size": 10240,
            "num_hidden_layers": 7, "layer_ids": [0, 1, 2, 3, 4, 5, 6], "tokenizer_sha256": "ab"
        }))
        .unwrap();
        assert_eq!(info.model_info().unwrap().layer_ids.len(), 7);
    }
}
