//! A rank's registration, and the check that two ranks belong to the same unit.

use std::net::SocketAddr;

use semmoe_tables::{ModelInfo, RankId};
use serde::{Deserialize, Serialize};

use super::carrier::{Host, TransportChoice};
use crate::engine::{KvPages, UnitLimits};
use crate::ep::{ExpertLayout, NodeLayout, WireType};

/// The first field of every handshake, by which ranks recognize each other.
pub(super) const MAGIC: &str = "semmoe-rank";
/// Version of the handshake frames and of the control link.
pub(super) const PROTOCOL: u32 = 9;

/// Settings that all ranks of a unit must share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Version of this program.
    pub(crate) version: String,
    /// Ranks in the unit.
    pub(crate) world: u16,
    /// The model's name, shape and tokenizer.
    pub(crate) model: ModelInfo,
    /// SHA-256 over the configuration and samples of the weight files.
    pub(crate) checkpoint: String,
    /// Digest of the expert placement.
    pub(crate) placement: String,
    /// Layout of the experts.
    pub(crate) experts: ExpertLayout,
    /// The hybrid nodes that the unit can switch to.
    pub(crate) switch_hybrid: Option<NodeLayout>,
    /// Configured capacity of each rank in whole experts per layer.
    pub(crate) expert_slots: Option<u16>,
    /// The configured transport.
    pub(crate) transport: TransportChoice,
    /// The element type of rows on the wire.
    pub(crate) wire: WireType,
    /// `dp` or `tp`; if attention can switch, both of them, initial layout first.
    pub(crate) attention: String,
    /// The device and its element type.
    pub(crate) device: String,
    /// Whether all ranks must be on one host.
    pub(crate) one_host: bool,
    /// Digest of the tables that shuffle rows (attention tp); empty without tables.
    pub(crate) shuffle: String,
}

/// A rank's registration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: u16,
    /// The address for the rank's data links.
    pub(super) data: SocketAddr,
    /// The rank's capacity in KV cache pages.
    pub(super) kv_pages: KvPages,
    /// The host that the rank runs on.
    pub(super) host: Option<Host>,
    pub(super) identity: Identity,
}

/// Rank 0's reply: the registered unit, or the reason that it cannot form.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    #[serde(rename = "Ok")]
    Welcome(Welcome),
    #[serde(rename = "Err")]
    Refusal(String),
}

/// Parameters of a unit that has formed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    /// The session id, which every data link and the shared memory repeat.
    pub(super) session: u64,
    /// Data addresses by rank.
    pub(super) data: Vec<SocketAddr>,
    /// The limits of the unit.
    pub(super) limits: UnitLimits,
    /// For each rank, the lowest rank that it can share memory with.
    pub(super) leaders: Vec<u16>,
}

/// First frame of a data link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Link {
    pub(super) session: u64,
    pub(super) from: u16,
    pub(super) to: u16,
}

/// The words before a setting's value in a message, and the value.
type Setting = (&'static str, String);

impl Identity {
    /// Describes the first difference between rank 0 (self) and another rank; `None` if they match.
    pub(super) fn difference(&self, rank: RankId, other: &Self) -> Option<String> {
        let settings: Vec<_> = self.settings().into_iter().zip(other.settings()).collect();
        let differ = |settings: &[(Setting, Setting)]| {
            let ((what, ours), (_, theirs)) = settings.iter().find(|(ours, theirs)| ours != theirs)?;
            Some(format!("rank {rank} {what} {theirs}, rank 0 {ours}"))
        };
        // A different model implies a different checkpoint, so the model is compared first.
        let (before, after) = settings.split_at(2);
        let model = self.model.check_compatible(&other.model).err();
        let model = model.map(|error| format!("rank {rank} runs a different model than rank 0: {error}"));
        differ(before).or(model).or_else(|| differ(after))
    }

    /// Returns everything except the model, in the order of comparison.
    fn settings(&self) -> [Setting; 12] {
        let shuffle = match &self.shuffle[..] {
            "" => "nothing".to_owned(),
            digest => format!("tables {digest}"),
        };
        let slots = self.expert_slots.map_or_else(|| "those of its placement".to_owned(), |slots| slots.to_string());
        let hybrid = self.switch_hybrid.map_or_else(|| "none".to_owned(), |nodes| nodes.to_string());
        [
            ("runs version", self.version.clone()),
            ("was started for a world of", self.world.to_string()),
            ("has a checkpoint with digest", self.checkpoint.clone()),
            ("has a placement with digest", self.placement.clone()),
            ("was started with experts", self.experts.to_string()),
            ("was started with --switch-hybrid", hybrid),
            ("was started with expert slots", slots),
            ("was started with transport", self.transport.to_string()),
            ("sends rows as", self.wire.to_string()),
            ("computes on", self.device.clone()),
            ("was started with attention", self.attention.clone()),
            ("shuffles rows by", shuffle),
        ]
    }
}
