//! Streams experts that do not fit in memory: some experts of each layer are resident, and the others are read from the
//! checkpoint again in every step. This is HybridEP's streamed mode (section IV), with the checkpoint in the role of
//! the peer that holds the experts.
//!
//! | module | what |
//! |---|---|
//! | `budget` | the number of resident experts |
//! | `source` | reads an expert's tensors from the checkpoint files |
//! | `fetch` | the thread that reads ahead |
//!
//! Layers are read cyclically, in the order in which steps need them, into two buffers of one layer each. While one
//! layer's experts are in use, the next layer's are read and packed, regardless of what the rank does in the meantime
//! (experts, collectives, attention). In steady state a layer takes `max(PE, fetch)`, where PE is the layer's entire
//! computation (equation 10 with p = 0). Streamed weights are packed like resident ones, so results are bitwise equal.

mod budget;
mod fetch;
mod source;

use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use semmoe_tables::{ExpertId, LayerIdx, RankId};

use self::budget::Budget;
pub use self::fetch::ExpertFetches;
use self::fetch::{Fetched, Fetcher};
use self::source::ExpertSource;
use super::checkpoint::Checkpoint;
use super::compute::{Arena, Piece};
use super::expert::{Experts, LayerExperts, Packing, Place};
use super::load::Loader;
use super::weights::Panels;
use super::{ExpertMemory, HeadSlice, ModelConfig, ModelError};
use crate::ep::{ExpertPlacement, ExpertsLost, LocalExperts};

/// A rank's routed experts, resident or streamed.
pub(super) enum RankExperts {
    /// All experts are resident, and a switch can move them.
    Resident(Box<Experts>),
    /// Only some experts are resident.
    Streamed(StreamedExperts),
}

impl RankExperts {
    /// Runs `work` with a layer's experts.
    pub(super) fn with_layer<R>(&self, layer: LayerIdx, work: impl FnOnce(&dyn LocalExperts) -> R) -> R {
        match self {
            Self::Resident(experts) => work(&LayerExperts { experts, layer }),
            Self::Streamed(experts) => work(&StreamedLayer { experts, layer, fetched: OnceLock::new() }),
        }
    }

    /// Returns the experts if they can be moved.
    pub(super) fn resident(&self) -> Result<&Experts, ModelError> {
        match self {
            Self::Resident(experts) => Ok(experts),
            Self::Streamed(_) => Err(ModelError::StreamedExperts),
        }
    }

    #[cfg(test)]
    pub(super) fn resident_mut(&mut self) -> &mut Experts {
        match self {
            Self::Resident(experts) => experts,
            Self::Streamed(_) => panic!("experts are streamed"),
        }
    }
}

/// A rank's experts, of which only a bounded number is resident.
pub(super) struct StreamedExperts {
    packing: Packing,
    /// `[L]`
    layers: Vec<Layer>,
    /// The resident experts, layer by layer.
    resident: Piece<u32>,
    /// `None` if all are resident.
    fetcher: Option<Fetcher>,
    memory_bytes: u64,
}

/// One layer's experts on this rank, of which the first ones are resident.
struct Layer {
    experts: usize,
    resident: Range<usize>,
}

impl StreamedExperts {
    /// Reads the resident experts, and starts streaming the others with the first layers.
    ///
    /// # Errors
    /// [`ModelError::ExpertBudget`] if the limit is too low. Also fails if a file cannot be read.
    pub(super) fn new(
        loader: &Loader<'_>,
        at: Place,
        placement: &ExpertPlacement,
        limit: ExpertMemory,
    ) -> Result<Self, ModelError> {
        let (held, packing) = plan(loader, at, placement)?;
        let budget = Budget::of(loader, &held, &packing, limit)?;
        let mut source = ExpertSource::open(loader, packing)?;
        let words = source.expert_words();
        let most = budget.resident;
        let stay = || held.iter().map(move |experts| experts.len().min(most));
        let memory = |experts: usize| {
            let piece = Arena::new(experts * words * size_of::<u32>()).take::<u32>(experts * words);
            piece.ok_or_else(|| ModelError::ExpertMemory(format!("{experts} experts do not fit into memory").into()))
        };
        let mut resident = memory(stay().sum())?;
        let (mut layers, mut streamed, mut first) = (Vec::new(), Vec::new(), 0);
        for ((layer, experts), stay) in loader.moe_layers().zip(&held).zip(stay()) {
            layers.push(Layer { experts: experts.len(), resident: first..first + stay });
            for (slot, expert) in (first..).zip(&experts[..stay]) {
                let place = loader.expert_places(layer, *expert)?;
                source.read(&place, &mut resident[slot * words..][..words])?;
            }
            let places = experts[stay..].iter().map(|expert| loader.expert_places(layer, *expert));
            streamed.push(places.collect::<Result<Vec<_>, _>>()?);
            first += stay;
        }
        let fetcher = match budget.streamed {
            0 => None,
            most => Some(Fetcher::start(source, streamed, [memory(most)?, memory(most)?])?),
        };
        Ok(Self { packing, layers, resident, fetcher, memory_bytes: budget.bytes })
    }

    pub(super) fn fetches(&self) -> ExpertFetches {
        let totals = self.fetcher.as_ref().map(Fetcher::totals).unwrap_or_default();
        ExpertFetches { memory_bytes: self.memory_bytes, ..totals }
    }
}

/// Returns this rank's experts in each of the L layers, by ascending id, and how they are packed.
fn plan(
    loader: &Loader<'_>,
    at: Place,
    placement: &ExpertPlacement,
) -> Result<(Vec<Vec<ExpertId>>, Packing), ModelError> {
    let packing = Packing::in_place(loader.config, placement.layout, at, loader.expert_types()?)?;
    let rank = RankId::new(at.rank as u16);
    Ok((loader.moe_layers().map(|layer| placement.experts_of(rank, layer).collect()).collect(), packing))
}

/// Checks whether a rank can stream the experts of a placement within `limit` bytes, before anything is loaded.
///
/// # Errors
/// [`ModelError::ExpertBudget`] if the limit is too low. Also fails if the checkpoint is invalid.
pub(crate) fn check_expert_memory(
    model_dir: &Path,
    config: &ModelConfig,
    rank: RankId,
    placement: &ExpertPlacement,
    limit: u64,
) -> Result<(), ModelError> {
    let checkpoint = &Checkpoint::open(model_dir)?;
    let loader = Loader { checkpoint, config, heads: HeadSlice::ALL, packer: &Panels };
    let at = Place { rank: rank.index(), world: placement.layout.world(placement.replicas.groups().into()) };
    let (held, packing) = plan(&loader, at, placement)?;
    Budget::of(&loader, &held, &packing, ExpertMemory::Bytes(limit)).map(drop)
}

/// One layer's experts on this rank. When this is dropped, the layer after next is read into its buffer. Layers are
/// expected in cyclic order; skipping one only costs time.
struct StreamedLayer<'a> {
    experts: &'a StreamedExperts,
    layer: LayerIdx,
    fetched: OnceLock<Fetched>,
}

impl LocalExperts for StreamedLayer<'_> {
    fn threads(&self, pairs: usize) -> usize {
        self.experts.packing.threads(pairs, self.experts.layers[self.layer.index()].experts, 1)
    }

    fn ready(&self) -> Result<(), ExpertsLost> {
        let Some(fetcher) = &self.experts.fetcher else { return Ok(()) };
        let fetched = fetcher.wait(self.layer.index())?;
        if let Err(second) = self.fetched.set(fetched) {
            fetcher.give_back(second);
        }
        Ok(())
    }

    fn apply(&self, slot: usize, x: &[f32], out: &mut [f32], work: &mut Vec<f32>) {
        let resident = &self.experts.layers[self.layer.index()].resident;
        let (words, slot) = match slot.checked_sub(resident.len()) {
            None => (&self.experts.resident[..], resident.start + slot),
            Some(slot) => (&self.fetched.get().expect("a layer must be ready before it is applied").words[..], slot),
        };
        let [gate_up, down] = self.experts.packing.array_bytes().map(|bytes| bytes / size_of::<u32>());
        let expert = &words[slot * (gate_up + down)..][..gate_up + down];
        self.experts.packing.apply(1, expert.split_at(gate_up).into(), x, out, work);
    }
}

impl Drop for StreamedLayer<'_> {
    fn drop(&mut self) {
        if let (Some(fetcher), Some(fetched)) = (&self.experts.fetcher, self.fetched.take()) {
            fetcher.give_back(fetched);
        }
    }
}
