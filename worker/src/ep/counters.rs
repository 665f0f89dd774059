//! What a rank counts for its own tokens: activations and bytes, by layer, phase and place.

use std::sync::atomic::{AtomicU64, Ordering};

use semmoe_tables::LayerIdx;
use serde::{Deserialize, Serialize};

/// Which kind of work a token was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StepPhase {
    /// A token of the prompt.
    Prefill,
    /// A token that was generated before.
    Decode,
}

impl StepPhase {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    fn index(self) -> usize {
        match self {
            Self::Prefill => 0,
            Self::Decode => 1,
        }
    }
}

/// A collective of attention tp.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Collective {
    /// Partial sums of the attention's output to the ranks that go on with them, shuffled (SRS) or not.
    ReduceScatter,
    /// Rows back to all ranks (SAG), with the experts that they went to.
    Allgather,
    /// Before each step: rank 0's orders, and the tokens that were chosen.
    Sync,
}

impl Collective {
    /// All three.
    pub const ALL: [Self; 3] = [Self::ReduceScatter, Self::Allgather, Self::Sync];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReduceScatter => "srs",
            Self::Allgather => "sag",
            Self::Sync => "sync",
        }
    }
}

/// Monotone counters of one rank, read at any time by other threads.
#[derive(Debug)]
pub struct Counters {
    /// `[L][phase]`
    layers: Vec<[TrafficCounter; 2]>,
    /// `[phase]`
    tokens: [AtomicU64; 2],
    /// `[collective]`: bytes.
    collectives: [AtomicU64; 3],
    /// In the order of [`RowCounts`].
    rows: [AtomicU64; 5],
    /// In the order of [`LevelBytes`].
    levels: [AtomicU64; 3],
}

#[derive(Debug, Default)]
struct TrafficCounter {
    activations: PlaceCounter,
    bytes: PlaceCounter,
}

#[derive(Debug, Default)]
struct PlaceCounter {
    local: AtomicU64,
    remote: AtomicU64,
}

/// What a split of an MoE layer's rows means to a rank (attention tp).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RowCounts {
    /// Its rows that are where the tables say.
    pub(crate) by_tables: u64,
    /// Those that came from a rank that was full.
    pub(crate) moved: u64,
    /// Those of which the tables say nothing, or all where there are no tables.
    pub(crate) evenly: u64,
    /// Rows of the fullest rank.
    pub(crate) fullest: u64,
    /// The same if no row had moved.
    pub(crate) fullest_wanted: u64,
}

/// Bytes of dispatch and combine, there and back, by how far they go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LevelBytes {
    /// What this rank's own slot would have had.
    pub rank: u64,
    /// Between ranks of a node. With hybrid experts the rows alone: headers of messages inside a node are not counted.
    pub node: u64,
    /// Between nodes.
    pub other: u64,
}

impl LevelBytes {
    /// Each with its name in metrics.
    #[must_use]
    pub fn named(self) -> [(&'static str, u64); 3] {
        [("rank", self.rank), ("node", self.node), ("other", self.other)]
    }
}

/// Something counted by place: on the token's own rank, or on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ByPlace {
    /// On this rank.
    pub local: u64,
    /// On another rank.
    pub remote: u64,
}

/// What tokens of one phase did in one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// (token, expert) pairs of this rank's tokens, by where the expert lies; they sum to tokens x top-k.
    pub activations: ByPlace,
    /// Payload of dispatch and combine for this rank's tokens, there and back: `remote` travelled between ranks,
    /// `local` is what this rank's own slot would have had. Summed over ranks and phases, `remote` is what the
    /// transport carried.
    pub bytes: ByPlace,
}

/// What tokens did in one layer, by phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LayerTraffic {
    phases: [Traffic; 2],
}

/// All counters at one moment (each is exact; between steps they are consistent with one another).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CountersSnapshot {
    /// `[L]`
    pub layers: Vec<LayerTraffic>,
    /// Prompt tokens that went through the model.
    pub prefill_tokens: u64,
    /// Generated tokens that went through the model.
    pub decode_tokens: u64,
    /// Bytes that this rank sent to others in collectives of attention tp, in the order of [`Collective::ALL`].
    pub collective_bytes: [u64; 3],
    /// Attention tp: rows (a token in an MoE layer) that this rank went on with as the tables said.
    pub rows_by_tables: u64,
    /// Those that came from a rank that was full.
    pub rows_moved: u64,
    /// Those where the tables said nothing, or there are none.
    pub rows_evenly: u64,
    /// Rows of the fullest rank, whichever it was, added up over steps and MoE layers; the same on all ranks.
    pub fullest_rows: u64,
    /// The same if no row had moved.
    pub fullest_rows_wanted: u64,
    /// Of all layers and both phases. Summed over ranks, `node` and `other` are what the ranks sent.
    pub levels: LevelBytes,
}

impl Counters {
    /// Zeros, for a model of `layers` MoE layers.
    #[must_use]
    pub fn new(layers: usize) -> Self {
        let layers = (0..layers).map(|_| Default::default()).collect();
        Self {
            layers,
            tokens: Default::default(),
            collectives: Default::default(),
            rows: Default::default(),
            levels: Default::default(),
        }
    }

    /// All counters as they are now.
    #[must_use]
    pub fn snapshot(&self) -> CountersSnapshot {
        let layer = |phases: &[TrafficCounter; 2]| LayerTraffic { phases: phases.each_ref().map(TrafficCounter::load) };
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let [prefill_tokens, decode_tokens] = self.tokens.each_ref().map(load);
        let [rows_by_tables, rows_moved, rows_evenly, fullest_rows, fullest_rows_wanted] =
            self.rows.each_ref().map(load);
        let [rank, node, other] = self.levels.each_ref().map(load);
        CountersSnapshot {
            layers: self.layers.iter().map(layer).collect(),
            prefill_tokens,
            decode_tokens,
            collective_bytes: self.collectives.each_ref().map(load),
            rows_by_tables,
            rows_moved,
            rows_evenly,
            fullest_rows,
            fullest_rows_wanted,
            levels: LevelBytes { rank, node, other },
        }
    }

    /// Counts one layer of one step; a layer that the counters do not have is not counted.
    pub(crate) fn add(&self, layer: LayerIdx, traffic: &LayerTraffic, levels: LevelBytes) {
        for (counter, (_, bytes)) in self.levels.iter().zip(levels.named()) {
            counter.fetch_add(bytes, Ordering::Relaxed);
        }
        if let Some(counters) = self.layers.get(layer.index()) {
            for (counter, traffic) in counters.iter().zip(&traffic.phases) {
                counter.activations.add(traffic.activations);
                counter.bytes.add(traffic.bytes);
            }
        }
    }

    pub(super) fn add_collective(&self, collective: Collective, bytes: u64) {
        let index = match collective {
            Collective::ReduceScatter => 0,
            Collective::Allgather => 1,
            Collective::Sync => 2,
        };
        self.collectives[index].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts the split of an MoE layer.
    pub(crate) fn add_rows(&self, counts: RowCounts) {
        let RowCounts { by_tables, moved, evenly, fullest, fullest_wanted } = counts;
        for (counter, rows) in self.rows.iter().zip([by_tables, moved, evenly, fullest, fullest_wanted]) {
            counter.fetch_add(rows, Ordering::Relaxed);
        }
    }

    pub(crate) fn add_tokens(&self, phase: StepPhase, tokens: u64) {
        self.tokens[phase.index()].fetch_add(tokens, Ordering::Relaxed);
    }
}

impl TrafficCounter {
    fn load(&self) -> Traffic {
        Traffic { activations: self.activations.load(), bytes: self.bytes.load() }
    }
}

impl PlaceCounter {
    fn add(&self, count: ByPlace) {
        self.local.fetch_add(count.local, Ordering::Relaxed);
        self.remote.fetch_add(count.remote, Ordering::Relaxed);
    }

    fn load(&self) -> ByPlace {
        ByPlace { local: self.local.load(Ordering::Relaxed), remote: self.remote.load(Ordering::Relaxed) }
    }
}

impl std::ops::AddAssign for ByPlace {
    fn add_assign(&mut self, other: Self) {
        self.local += other.local;
        self.remote += other.remote;
    }
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
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
    /// Of one phase.
    #[must_use]
    pub fn of(&self, phase: StepPhase) -> &Traffic {
        &self.phases[phase.index()]
    }

    pub(super) fn of_mut(&mut self, phase: StepPhase) -> &mut Traffic {
        &mut self.phases[phase.index()]
    }

    /// Of both phases.
    #[must_use]
    pub fn total(&self) -> Traffic {
        let mut total = self.phases[0];
        total += self.phases[1];
        total
    }
}

impl CountersSnapshot {
    /// Of all layers and both phases.
    #[must_use]
    pub fn total(&self) -> Traffic {
        let mut total = Traffic::default();
        self.layers.iter().for_each(|layer| total += layer.total());
        total
    }
}
