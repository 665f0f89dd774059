//! Switches the layout on a GPU: the switch kernel moves experts, keys and values within GPU memory. Each layout uses
//! the same addresses every time it is in use.

use semmoe_kernels::reshard::kv::{KvMove, PageAt};
use semmoe_kernels::reshard::{Move, Switch};
use semmoe_kernels_cuda::{Buffer, DeviceMove, MOVE_BYTES, Reshard, Team};
use semmoe_tables::LayerIdx;

use super::attention::Cache;
use super::backend::GpuBackend;
use super::experts::DeviceExperts;
use super::memory::Stream;
use super::peers::share;
use crate::ep::{ExpertParallel, ExpertPlacement, UnitError};
use crate::model::backend::ComputeBackend;
use crate::model::kv::PageMoves;
use crate::model::switch::{Objection, Obstacle, Refusal, SwitchOutcome, allgather_messages, stays, unfit, vote};

/// Maximum number of moves per launch; memory for them is allocated at startup.
const MOVES: usize = 4096;
/// Size of a launch's move list in bytes.
pub(super) const LIST_BYTES: usize = MOVES * MOVE_BYTES as usize;

/// A GPU backend, independent of its element type.
pub(in crate::model) trait DeviceBackend: ComputeBackend {
    /// Returns the parts that a switch needs.
    fn parts_to_switch(&mut self) -> SwitchParts<'_>;

    /// Returns the backend's experts.
    fn experts(&self) -> &DeviceExperts;

    /// Returns the backend's KV cache pages.
    fn cache(&self) -> &Cache;

    /// Switches to the other attention layout, whose pages have already moved.
    fn exchange_attention(&mut self);
}

impl<T: semmoe_kernels::Element> DeviceBackend for GpuBackend<T> {
    fn parts_to_switch(&mut self) -> SwitchParts<'_> {
        let Self { stream, mover, experts, cache, .. } = self;
        SwitchParts { stream, mover, experts, cache }
    }

    fn experts(&self) -> &DeviceExperts {
        &self.experts
    }

    fn cache(&self) -> &Cache {
        &self.cache
    }

    fn exchange_attention(&mut self) {
        for (block, heads) in self.weights.blocks.iter_mut().zip(self.other_heads.iter_mut().flatten()) {
            std::mem::swap(&mut block.heads, heads);
        }
        self.cache.exchange();
    }
}

/// The parts of a backend that a switch needs.
pub(in crate::model) struct SwitchParts<'a> {
    stream: &'a mut Stream,
    mover: &'a mut Mover,
    experts: &'a mut DeviceExperts,
    cache: &'a mut Cache,
}

/// Launches the switch kernel.
pub(super) struct Mover {
    pub(super) team: Team,
    /// Memory for a launch's move list.
    pub(super) list: Buffer,
    /// The expert and page buffers of all ranks, once they have been exchanged.
    pub(super) memory: Option<[Vec<Buffer>; 2]>,
}

/// This rank's moves in one step of a switch.
struct MovesOf<'a> {
    own: &'a [DeviceMove],
    /// The largest number of moves on any rank.
    most: usize,
    digest: u64,
    step: usize,
}

impl Mover {
    /// Runs one step of a switch. Every rank makes the same number of launches.
    fn run(&self, stream: &mut Stream, memory: &[Buffer], moves: &MovesOf<'_>) -> Result<(), UnitError> {
        let own = &memory[stream.rank..=stream.rank];
        for round in 0..moves.most.div_ceil(MOVES) {
            let now = moves.own.chunks(MOVES).nth(round).unwrap_or_default();
            let list: Vec<u8> = now.iter().flat_map(|each| each.to_bytes()).collect();
            let list = [stream.write(&list, self.list)?];
            let (counts, step) = ([now.len() as u64], (moves.step + round) as u64);
            let reshard = Reshard { from: memory, to: own, moves: &list, counts: &counts, digest: moves.digest, step };
            stream.launch(reshard.launch(&self.team, stream.gpu.grid()))?;
        }
        stream.flush()
    }
}

impl SwitchParts<'_> {
    /// Maps the memory of all ranks. All have launched the kernels of earlier steps, so mapping cannot deadlock.
    fn exchange_memory(&mut self, ep: &mut ExpertParallel) -> Result<[Vec<Buffer>; 2], UnitError> {
        if let Some(known) = &self.mover.memory {
            return Ok(known.clone());
        }
        let own = [self.experts.memory(), self.cache.pool];
        let all = share(&self.stream.gpu, own, ep)?;
        Ok(self.mover.memory.insert(all).clone())
    }

    /// Moves the experts to another placement, layer by layer. All ranks vote before each layer.
    pub(in crate::model) fn move_experts(
        &mut self,
        ep: &mut ExpertParallel,
        to: &ExpertPlacement,
        objection: Objection<'_>,
    ) -> Result<SwitchOutcome, UnitError> {
        let (rank, unfit) = (self.stream.rank, unfit(self.stream.rank));
        let next = self.experts.arrange(to).map_err(unfit)?;
        if stays(&self.experts.layout, &next) {
            return Ok(SwitchOutcome::Committed);
        }
        let [memory, _] = self.exchange_memory(ep)?;
        let Self { stream, mover, experts, .. } = self;
        let switch = |pool| Switch::new(pool, &experts.layout, &next, experts.side).map_err(unfit);
        let [gate_up, down] = &experts.pools;
        let switches = [switch(gate_up)?, switch(down)?];
        let digest = switches[0].digest();
        let mut layer = |switches: &[Switch<'_>; 2], layer: usize, digest| {
            let mut found = LayerMoves::new(gate_up.grid().ranks(), rank);
            switches.iter().zip([0, experts.second()]).for_each(|(switch, first)| found.add(switch, layer, first));
            let (own, most) = (&found.own[..], found.most());
            mover.run(stream, &memory, &MovesOf { own, most, digest, step: layer })
        };
        for done in 0..gate_up.layers() {
            let at = switches[0].layer(done);
            let own = objection(LayerIdx::new(at as u16)).map(Obstacle::Own);
            let Some(refusal) = vote(ep, own.as_ref().map_or(Ok(digest), Err))? else {
                layer(&switches, at, digest)?;
                continue;
            };
            let back = switches.each_ref().map(Switch::inverse);
            (0..done).rev().try_for_each(|step| layer(&back, switches[0].layer(step), back[0].digest()))?;
            self.finish()?;
            return Ok(SwitchOutcome::RolledBack { cause: refusal.to_string() });
        }
        let side = experts.side.other();
        (self.experts.layout, self.experts.side) = (next, side);
        self.finish()?;
        Ok(SwitchOutcome::Committed)
    }

    /// Moves pages to their positions in the other layout, without overwriting pages in use. If a rank cannot do so,
    /// returns the reason, and nothing has changed.
    pub(in crate::model) fn move_pages(
        &mut self,
        moves: &PageMoves,
        ep: &mut ExpertParallel,
    ) -> Result<Option<Refusal>, UnitError> {
        let rank = ep.rank().index();
        let placed = self.cache.place(moves);
        let refusal = vote(ep, placed.as_ref().map(|_| moves.digest))?;
        let (None, Ok((old, new))) = (&refusal, placed) else { return Ok(refusal) };
        let [_, memory] = self.exchange_memory(ep)?;
        let message: Vec<u8> = old.iter().flat_map(|place| place.to_le_bytes()).collect();
        let messages = allgather_messages(ep, message)?;
        let place_of = |PageAt { rank, page }: PageAt| {
            let place = messages[rank].as_chunks().0.get(page as usize).map(|place| u32::from_le_bytes(*place));
            place.ok_or_else(|| UnitError::protocol(rank, format!("it did not report the position of its page {page}")))
        };
        let [from_bytes, to_bytes] = self.cache.page_bytes();
        let device = |piece: &KvMove| {
            let from = PageAt { page: place_of(piece.from)?, ..piece.from };
            let placed = KvMove { from, page: new[piece.page as usize], ..*piece };
            Ok(DeviceMove::of_page(&placed, from_bytes, to_bytes))
        };
        let own: Vec<DeviceMove> = moves.by_rank[rank].iter().map(device).collect::<Result<_, UnitError>>()?;
        let most = moves.by_rank.iter().map(Vec::len).max().unwrap_or(0);
        self.mover.run(self.stream, &memory, &MovesOf { own: &own, most, digest: moves.digest, step: 0 })?;
        self.cache.moved_to(new);
        self.finish()?;
        Ok(None)
    }

    /// Waits until all moves are complete or the GPU has failed.
    fn finish(&mut self) -> Result<(), UnitError> {
        self.stream.read(self.mover.list, &mut [0_u8; 4])
    }
}

/// One layer's moves.
struct LayerMoves {
    rank: usize,
    own: Vec<DeviceMove>,
    /// Number of moves per rank.
    counts: Vec<usize>,
    all: Vec<Move>,
}

impl LayerMoves {
    fn new(world: usize, rank: usize) -> Self {
        Self { rank, own: Vec::new(), counts: vec![0; world], all: Vec::new() }
    }

    /// Adds the moves within a pool that begins at offset `first`.
    fn add(&mut self, switch: &Switch<'_>, layer: usize, first: usize) {
        switch.moves(layer, &mut self.all);
        for piece in &mut self.all {
            self.counts[piece.to.rank] += 1;
            if piece.to.rank == self.rank {
                piece.from.offset += first;
                piece.to.offset += first;
                self.own.push(DeviceMove::from(&*piece));
            }
        }
    }

    fn most(&self) -> usize {
        self.counts.iter().copied().max().unwrap_or(0)
    }
}
