//! What a rank says of itself, and whether two ranks belong into one unit.

use std::net::SocketAddr;

use semmoe_tables::{ModelInfo, RankId};
use serde::{Deserialize, Serialize};

use super::carrier::{Host, TransportChoice};
use crate::engine::{KvPages, UnitLimits};
use crate::ep::{ExpertLayout, WireType};

/// First field of every handshake; a stranger's bytes do not have it.
pub(super) const MAGIC: &str = "semmoe-rank";
/// Version of the frames below and of the control link.
pub(super) const PROTOCOL: u32 = 6;

/// What all ranks of a unit must have in common.
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
    /// How experts are divided among ranks.
    pub(crate) experts: ExpertLayout,
    /// Whole experts of a layer for which each rank has room by its configuration.
    pub(crate) expert_slots: Option<u16>,
    /// How it exchanges by its configuration.
    pub(crate) transport: TransportChoice,
    /// The element type of rows on the wire.
    pub(crate) wire: WireType,
    /// `dp` or `tp`; both where it may change, the one at the start first.
    pub(crate) attention: String,
    /// Digest of the tables by which rows are shuffled (attention tp), empty without.
    pub(crate) shuffle: String,
}

/// A rank registers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: u16,
    /// Where it takes data links.
    pub(super) data: SocketAddr,
    /// Pages of key-value cache that it has room for.
    pub(super) kv_pages: KvPages,
    /// Where it is.
    pub(super) host: Option<Host>,
    pub(super) identity: Identity,
}

/// Rank 0 answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// All ranks have come.
    Welcome {
        /// What a data link has to show, and shared memory.
        session: u64,
        /// Data addresses by rank.
        data: Vec<SocketAddr>,
        /// Those of the unit.
        limits: UnitLimits,
        /// By rank: with whom it may share memory, named by the lowest of them.
        leaders: Vec<u16>,
    },
    /// The unit will not come together.
    Refused { reason: String },
}

/// First frame of a data link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Link {
    pub(super) session: u64,
    pub(super) from: u16,
    pub(super) to: u16,
}

impl Identity {
    /// One sentence on the first difference between rank 0 (self) and another rank; none if they belong together.
    pub(super) fn difference(&self, rank: RankId, other: &Self) -> Option<String> {
        let differ = |what: &str, theirs: &str, ours: &str| Some(format!("rank {rank} {what} {theirs}, rank 0 {ours}"));
        if self.version != other.version {
            return differ("runs version", &other.version, &self.version);
        }
        if self.world != other.world {
            let (theirs, ours) = (other.world.to_string(), self.world.to_string());
            return differ("was started for a world of", &theirs, &ours);
        }
        if let Err(error) = self.model.check_compatible(&other.model) {
            return Some(format!("rank {rank} runs another model than rank 0: {error}"));
        }
        if self.checkpoint != other.checkpoint {
            return differ("has a checkpoint with digest", &other.checkpoint, &self.checkpoint);
        }
        if self.placement != other.placement {
            return differ("has a placement with digest", &other.placement, &self.placement);
        }
        if self.experts != other.experts {
            let (theirs, ours) = (other.experts.to_string(), self.experts.to_string());
            return differ("was started with experts", &theirs, &ours);
        }
        if self.expert_slots != other.expert_slots {
            let slots =
                |slots: Option<u16>| slots.map_or_else(|| "those of its placement".into(), |slots| slots.to_string());
            return differ("was started with expert slots", &slots(other.expert_slots), &slots(self.expert_slots));
        }
        if self.transport != other.transport {
            let (theirs, ours) = (other.transport.to_string(), self.transport.to_string());
            return differ("was started with transport", &theirs, &ours);
        }
        if self.wire != other.wire {
            return differ("sends rows as", &other.wire.to_string(), &self.wire.to_string());
        }
        if self.attention != other.attention {
            return differ("was started with attention", &other.attention, &self.attention);
        }
        if self.shuffle != other.shuffle {
            let by = |digest: &str| if digest.is_empty() { "nothing".to_owned() } else { format!("tables {digest}") };
            return differ("shuffles rows by", &by(&other.shuffle), &by(&self.shuffle));
        }
        None
    }
}
