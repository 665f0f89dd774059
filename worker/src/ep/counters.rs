//! What a rank counts: its tokens' activations, by layer and place, and the bytes it sends.

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

/// Monotone counters of one rank, read at any time by other threads.
#[derive(Debug)]
pub struct Counters {
    layers: Vec<PlaceCounter>,
    bytes: PlaceCounter,
    prefill_tokens: AtomicU64,
    decode_tokens: AtomicU64,
}

#[derive(Debug, Default)]
struct PlaceCounter {
    local: AtomicU64,
    remote: AtomicU64,
}

/// Something counted by place: on the token's own rank, or on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ByPlace {
    /// On this rank.
    pub local: u64,
    /// On another rank.
    pub remote: u64,
}

/// All counters at one moment (each is exact; between steps they are consistent with one another).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CountersSnapshot {
    /// `[L]`: (token, expert) pairs of this rank's tokens, by where the expert lies; they sum to tokens x top-k.
    pub activations: Vec<ByPlace>,
    /// Payload bytes of dispatch and combine: `remote` were sent to peers, `local` stayed in this rank's own slot.
    pub bytes: ByPlace,
    /// Prompt tokens that went through the model.
    pub prefill_tokens: u64,
    /// Generated tokens that went through the model.
    pub decode_tokens: u64,
}

impl Counters {
    /// Zeros, for a model of `layers` MoE layers.
    #[must_use]
    pub fn new(layers: usize) -> Self {
        Self {
            layers: (0..layers).map(|_| PlaceCounter::default()).collect(),
            bytes: PlaceCounter::default(),
            prefill_tokens: AtomicU64::new(0),
            decode_tokens: AtomicU64::new(0),
        }
    }

    /// All counters as they are now.
    #[must_use]
    pub fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            activations: self.layers.iter().map(PlaceCounter::load).collect(),
            bytes: self.bytes.load(),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            decode_tokens: self.decode_tokens.load(Ordering::Relaxed),
        }
    }

    /// Counts activations of one layer; a layer that the counters do not have is not counted.
    pub(crate) fn add_activations(&self, layer: LayerIdx, count: ByPlace) {
        if let Some(counter) = self.layers.get(layer.index()) {
            counter.add(count);
        }
    }

    pub(crate) fn add_bytes(&self, count: ByPlace) {
        self.bytes.add(count);
    }

    pub(crate) fn add_tokens(&self, phase: StepPhase, tokens: u64) {
        let counter = match phase {
            StepPhase::Prefill => &self.prefill_tokens,
            StepPhase::Decode => &self.decode_tokens,
        };
        counter.fetch_add(tokens, Ordering::Relaxed);
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

impl CountersSnapshot {
    /// Activations summed over the layers.
    #[must_use]
    pub fn total_activations(&self) -> ByPlace {
        let mut total = ByPlace::default();
        for &layer in &self.activations {
            total += layer;
        }
        total
    }
}
