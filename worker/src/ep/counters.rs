//! A rank's counts for its own tokens: activations and bytes, by layer, phase and place.

use semmoe_tables::LayerIdx;
use serde::{Deserialize, Serialize};

/// The kind of work that a token was.
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

/// A collective of attention tp.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Collective {
    /// Reduces the attention's partial sums to the ranks that continue with the rows, shuffled (SRS) or not.
    ReduceScatter,
    /// Gathers rows on all ranks (SAG), with the experts that they went to.
    Allgather,
    /// Before each step: rank 0's orders and the chosen tokens.
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

/// How rows (a token in an MoE layer) were split with attention tp, from one rank's view.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows that the tables assign to this rank.
    pub by_tables: u64,
    /// Rows moved to this rank from a full one.
    pub moved: u64,
    /// Rows of this rank that the tables do not assign; all of its rows if there are no tables.
    pub evenly: u64,
    /// Rows of the fullest rank; equal on all ranks.
    pub fullest: u64,
    /// Rows that the fullest rank would have had without moves.
    pub fullest_wanted: u64,
}

/// Bytes of dispatch and combine by distance.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LevelBytes {
    /// Bytes that stay on this rank: the size of its own slot.
    pub rank: u64,
    /// Between ranks of a node. With hybrid experts only rows: headers of messages inside a node are not counted.
    pub node: u64,
    /// Between nodes.
    pub other: u64,
}

impl LevelBytes {
    /// Each with its name in metrics.
    pub fn named(self) -> [(&'static str, u64); 3] {
        [("rank", self.rank), ("node", self.node), ("other", self.other)]
    }
}

/// A count by place: on the token's own rank, or on another.
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
    /// (token, expert) pairs of this rank's tokens, by the expert's rank; they sum to tokens x top-k.
    pub activations: ByPlace,
    /// Payload of dispatch and combine for this rank's tokens: `remote` was sent between ranks, `local` is what this
    /// rank's own slot would have held. Summed over ranks and phases, `remote` is what the transport carried.
    pub bytes: ByPlace,
}

/// Activations and bytes in one layer, by phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LayerTraffic {
    phases: [Traffic; 2],
}

/// All counters of one rank, which are monotonic; between steps they are mutually consistent.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Counters {
    /// `[L]`
    pub layers: Vec<LayerTraffic>,
    /// Prompt tokens that went through the model.
    pub prefill_tokens: u64,
    /// Generated tokens that went through the model.
    pub decode_tokens: u64,
    /// Bytes that this rank sent to others in collectives of attention tp, in the order of [`Collective::ALL`].
    pub collective_bytes: [u64; 3],
    /// Attention tp: summed over steps and MoE layers.
    pub rows: RowCounts,
    /// Over all layers and both phases. Summed over ranks, `node` and `other` are the bytes sent.
    pub levels: LevelBytes,
}

impl Counters {
    /// Zeroed counters for a model of `layers` MoE layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: vec![LayerTraffic::default(); layers], ..Self::default() }
    }

    /// Counts one layer of one step; ignores unknown layers.
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

    /// Counts the split of an MoE layer.
    pub(crate) fn add_rows(&mut self, split: RowCounts) {
        self.rows.by_tables += split.by_tables;
        self.rows.moved += split.moved;
        self.rows.evenly += split.evenly;
        self.rows.fullest += split.fullest;
        self.rows.fullest_wanted += split.fullest_wanted;
    }

    /// Counts tokens that a step has taken through the model.
    pub(crate) fn add_tokens(&mut self, phase: StepPhase, tokens: usize) {
        match phase {
            StepPhase::Prefill => self.prefill_tokens += tokens as u64,
            StepPhase::Decode => self.decode_tokens += tokens as u64,
        }
    }

    /// Over all layers and both phases.
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
    /// Counts on this rank or on another.
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
