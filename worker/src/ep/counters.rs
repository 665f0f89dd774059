//! Per-rank counters for the rank's own tokens: activations and bytes by layer, phase and locality.

use semmoe_tables::LayerIdx;
use serde::{Deserialize, Serialize};

/// The phase in which a token was processed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepPhase {
    /// A prompt token.
    Prefill,
    /// A token generated earlier.
    Decode,
}

impl StepPhase {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A collective operation of attention tp.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Collective {
    /// Reduce-scatter of attention's partial sums to the ranks that process the rows next, shuffled (SRS) or not.
    ReduceScatter,
    /// Allgather of rows on all ranks (SAG), together with the experts that each row was routed to.
    Allgather,
    /// Exchange before each step: rank 0's commands and the sampled tokens.
    Sync,
}

impl Collective {
    /// All three.
    pub const ALL: [Self; 3] = [Self::ReduceScatter, Self::Allgather, Self::Sync];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReduceScatter => "srs",
            Self::Allgather => "sag",
            Self::Sync => "sync",
        }
    }
}

/// How rows (one per token and MoE layer) were split among ranks under attention tp, as counted by one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows that the tables assign to this rank.
    pub by_tables: u64,
    /// Rows moved to this rank from one that was full.
    pub moved: u64,
    /// Rows on this rank that the tables do not assign; without tables, all of its rows.
    pub evenly: u64,
    /// Rows on the fullest rank; the value is the same on every rank.
    pub fullest: u64,
    /// Rows that the fullest rank would have had without moves.
    pub fullest_wanted: u64,
}

/// Dispatch and combine bytes by distance.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LevelBytes {
    /// Bytes that never leave this rank: the size of its slot for its own experts.
    pub rank: u64,
    /// Bytes between ranks of a node. With hybrid experts, only rows are counted, not the message headers inside a
    /// node.
    pub node: u64,
    /// Between nodes.
    pub other: u64,
}

impl LevelBytes {
    /// Returns the bytes at each level with its name in metrics.
    pub fn named(self) -> [(&'static str, u64); 3] {
        [("rank", self.rank), ("node", self.node), ("other", self.other)]
    }
}

/// A count split into the token's own rank and all other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ByPlace {
    /// On this rank.
    pub local: u64,
    /// On another rank.
    pub remote: u64,
}

/// Activations and bytes of one phase in one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// (token, expert) pairs of this rank's tokens, by whether the expert is on this rank; the sum is tokens x top-k.
    pub activations: ByPlace,
    /// Dispatch and combine payload for this rank's tokens: `remote` was sent to other ranks, `local` is the size of
    /// this rank's own slot, which is not sent. Summed over ranks and phases, `remote` equals the bytes on the
    /// transport.
    pub bytes: ByPlace,
}

/// Activations and bytes in one layer, by phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LayerTraffic {
    phases: [Traffic; 2],
}

/// All counters of one rank. They are monotonic, and consistent with each other between steps.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Counters {
    /// `[L]`
    pub layers: Vec<LayerTraffic>,
    /// Prompt tokens processed by the model.
    pub prefill_tokens: u64,
    /// Generated tokens processed by the model.
    pub decode_tokens: u64,
    /// Bytes sent by this rank in attention tp collectives, in [`Collective::ALL`] order.
    pub collective_bytes: [u64; 3],
    /// The row split under attention tp, summed over steps and MoE layers.
    pub rows: RowCounts,
    /// Totals over all layers and both phases. Summed over ranks, `node` plus `other` equals the bytes sent.
    pub levels: LevelBytes,
}

impl Counters {
    /// Creates zeroed counters for a model with `layers` MoE layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: vec![LayerTraffic::default(); layers], ..Self::default() }
    }

    /// Adds one layer's counts for one step. An unknown layer adds only to the totals by distance.
    pub(crate) fn add(&mut self, layer: LayerIdx, traffic: &LayerTraffic, levels: LevelBytes) {
        self.levels.rank += levels.rank;
        self.levels.node += levels.node;
        self.levels.other += levels.other;
        if let Some(counted) = self.layers.get_mut(layer.index()) {
            counted.phases.iter_mut().zip(traffic.phases).for_each(|(sum, traffic)| sum.add(traffic));
        }
    }

    pub(super) fn add_collective(&mut self, collective: Collective, bytes: usize) {
        self.collective_bytes[collective as usize] += bytes as u64;
    }

    /// Adds the row split of one MoE layer.
    pub(crate) fn add_rows(&mut self, split: RowCounts) {
        self.rows.by_tables += split.by_tables;
        self.rows.moved += split.moved;
        self.rows.evenly += split.evenly;
        self.rows.fullest += split.fullest;
        self.rows.fullest_wanted += split.fullest_wanted;
    }

    /// Counts tokens that the model processed in a step.
    pub(crate) fn add_tokens(&mut self, phase: StepPhase, tokens: usize) {
        match phase {
            StepPhase::Prefill => self.prefill_tokens += tokens as u64,
            StepPhase::Decode => self.decode_tokens += tokens as u64,
        }
    }

    /// Returns the totals over all layers and both phases.
    pub fn total(&self) -> Traffic {
        let mut total = Traffic::default();
        self.layers.iter().for_each(|layer| total.add(layer.total()));
        total
    }
}

impl std::ops::AddAssign for ByPlace {
    fn add_assign(&mut self, other: Self) {
        self.local += other.local;
        self.remote += other.remote;
    }
}

impl Traffic {
    fn add(&mut self, other: Self) {
        self.activations += other.activations;
        self.bytes += other.bytes;
    }
}

impl ByPlace {
    /// Adds to the local or the remote count.
    pub(super) fn add(&mut self, is_local: bool, count: u64) {
        *(if is_local { &mut self.local } else { &mut self.remote }) += count;
    }
}

impl LayerTraffic {
    /// Traffic in one phase.
    pub fn of(&self, phase: StepPhase) -> &Traffic {
        &self.phases[phase as usize]
    }

    pub(super) fn of_mut(&mut self, phase: StepPhase) -> &mut Traffic {
        &mut self.phases[phase as usize]
    }

    /// Traffic in both phases.
    pub fn total(&self) -> Traffic {
        let mut total = self.phases[0];
        total.add(self.phases[1]);
        total
    }
}
