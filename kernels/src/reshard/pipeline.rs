//! Moves layers in order, as a pipeline: while bytes travel between ranks that cannot access each other's memory, those
//! received before are placed. A layer's first bytes travel while the previous layer is still being placed, and are
//! placed after all ranks have voted on the previous layer.
//!
//! ```text
//! exchange   l, 1 | l, 2 | l+1, 1 |          | l+1, 2 |
//! place           | l, 1 | l, 2   | vote (l) | l+1, 1 | ...
//! ```
//!
//! Reading ahead is safe: no layer's new slot overlaps the old slot of a layer still to be moved.

use super::checksum::Checksums;
use super::error::{Fault, Refusal, SwitchError};
use super::memory::ExpertMemory;
use super::plan::{Move, Switch};
use super::round::{Kind, Round};
use super::transfer::{Landed, LayerMoves, note};
use crate::collectives::{Lockstep, UnitError};

/// The progress of a switch, as reported before each layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Number of layers in the new layout on all ranks.
    pub done: usize,
    /// The layer that moves next.
    pub layer: usize,
}

/// A rank's message buffers, reused across switches: one message to each peer and two from it.
#[derive(Debug)]
pub(super) struct Buffers {
    chunk_bytes: usize,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
    /// The messages received in the previous exchange.
    landed: Vec<Vec<u8>>,
    moves: Vec<Move>,
    /// The layer whose bytes travel and the one whose bytes are being placed; they may be the same.
    layers: [LayerMoves; 2],
}

impl Buffers {
    /// Creates buffers for messages with at most `chunk_bytes` expert bytes.
    pub(super) fn new(world: usize, chunk_bytes: usize) -> Self {
        let (messages, layers) = (vec![Vec::new(); world], [LayerMoves::new(world), LayerMoves::new(world)]);
        let [outgoing, incoming, landed] = [messages.clone(), messages.clone(), messages];
        Self { chunk_bytes, outgoing, incoming, landed, moves: Vec::new(), layers }
    }

    /// Bytes allocated for messages.
    pub(super) fn bytes(&self) -> usize {
        let messages = self.outgoing.iter().chain(&self.incoming).chain(&self.landed);
        messages.map(Vec::capacity).sum()
    }
}

/// Whether the received messages are the first or the last of their layer.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    first: bool,
    last: bool,
}

/// A layer that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    /// Number of layers completed before this one.
    pub(super) done: usize,
    pub(super) refusal: Refusal,
}

/// One rank's end of a switch.
pub(super) struct Pipeline<'a, L, M> {
    pub(super) link: &'a mut L,
    pub(super) memory: &'a mut M,
    pub(super) buffers: &'a mut Buffers,
    pub(super) switch: &'a Switch<'a>,
    pub(super) digest: u64,
    pub(super) checksums: &'a Checksums,
    /// The first fault that this rank detected.
    pub(super) fault: &'a mut Option<Fault>,
}

impl<L: Lockstep, M: ExpertMemory> Pipeline<'_, L, M> {
    /// Makes sure that all ranks run the same switch. Returns whether any two ranks cannot access each other's memory.
    pub(super) fn agree(&mut self) -> Result<bool, SwitchError> {
        let round = self.round(self.switch.layer(0));
        let Self { link, buffers, .. } = self;
        let far = (0..link.world()).any(|rank| !self.memory.reaches(rank));
        let kind = if far { Kind::More } else { Kind::Last };
        buffers.outgoing.iter_mut().for_each(Vec::clear);
        round.head(&mut buffers.outgoing, kind, None);
        let exchanged = link.all_to_all(&buffers.outgoing, &mut buffers.incoming);
        let none = vec![0; link.world()];
        let others = exchanged.and_then(|()| round.more(link.rank(), &buffers.incoming, &none));
        others.map(|others| far | others).map_err(|cause| SwitchError::Lost { layer: round.layer, cause })
    }

    /// Moves the layers in this order. `far` says whether any bytes travel in messages. Returns the layer that was
    /// refused, if any.
    pub(super) fn run(
        &mut self,
        order: &[usize],
        far: bool,
        proceed: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Option<Refused>, SwitchError> {
        let (mut done, mut fetched) = (0, 0);
        let mut arrived: Option<Arrived> = None;
        let mut first = true;
        while let Some(&layer) = order.get(done) {
            if arrived.is_some_and(|arrived| arrived.first) && !proceed(Progress { done, layer }) {
                self.fault.get_or_insert(Fault::Stopped);
            }
            let next = order.get(fetched).copied();
            if let Some(next) = next.filter(|_| first) {
                self.begin(fetched, next);
            }
            let travels = next.filter(|_| far).map(|layer| Travel { at: fetched, round: self.round(layer) });
            let more = self.advance(travels, arrived.map(|Arrived { last, .. }| Placing { at: done, last }))?;
            if arrived.is_some_and(|arrived| arrived.last) {
                if let Some(refusal) = self.vote(layer)? {
                    return Ok(Some(Refused { done, refusal }));
                }
                done += 1;
            }
            arrived = next.map(|_| Arrived { first, last: !more });
            std::mem::swap(&mut self.buffers.incoming, &mut self.buffers.landed);
            (first, fetched) = (!more, fetched + usize::from(!more));
        }
        Ok(None)
    }

    /// Starts a layer, which is at index `at` of the order.
    fn begin(&mut self, at: usize, layer: usize) {
        let Buffers { moves, layers, .. } = &mut *self.buffers;
        self.switch.moves(layer, moves);
        layers[at % 2].begin(moves, self.memory);
    }

    /// Exchanges the next messages of one layer while those received before are placed. Returns whether any rank has
    /// more bytes to send for the layer being exchanged.
    fn advance(&mut self, travel: Option<Travel>, placing: Option<Placing>) -> Result<bool, SwitchError> {
        let Buffers { chunk_bytes, outgoing, layers, .. } = &mut *self.buffers;
        let mut sends_more = false;
        if let Some(Travel { at, round }) = travel {
            sends_more = layers[at % 2].fill(self.memory, outgoing, *chunk_bytes);
            round.head(outgoing, if sends_more { Kind::More } else { Kind::Last }, None);
        }
        let exchanged = self.overlap(travel.is_some(), placing);
        let Some(Travel { at, round }) = travel else { return Ok(false) };
        let Buffers { chunk_bytes, incoming, layers, .. } = &mut *self.buffers;
        let due = layers[at % 2].take_due(*chunk_bytes);
        let more = exchanged.and_then(|()| round.more(self.link.rank(), incoming, &due));
        more.map(|more| more | sends_more).map_err(|cause| SwitchError::Lost { layer: round.layer, cause })
    }

    /// Exchanges messages on this thread while another one places bytes.
    fn overlap(&mut self, exchanges: bool, placing: Option<Placing>) -> Result<(), UnitError> {
        let Buffers { chunk_bytes, outgoing, incoming, landed, layers, .. } = &mut *self.buffers;
        let (link, memory, checksums) = (&mut *self.link, &mut *self.memory, self.checksums);
        let Some(Placing { at, last }) = placing else {
            return if exchanges { link.all_to_all(outgoing, incoming) } else { Ok(()) };
        };
        let layer = &mut layers[at % 2];
        let landed = Landed { messages: landed, last, chunk_bytes: *chunk_bytes, checksums };
        if !exchanges || layer.is_small() {
            note(self.fault, layer.place(memory, &landed));
            return if exchanges { link.all_to_all(outgoing, incoming) } else { Ok(()) };
        }
        std::thread::scope(|scope| {
            let placed = scope.spawn(|| layer.place(memory, &landed));
            let exchanged = link.all_to_all(outgoing, incoming);
            note(self.fault, placed.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            exchanged
        })
    }

    /// Votes with all ranks on a layer that they have placed; the exchange is also the barrier before the next layer is
    /// placed.
    fn vote(&mut self, layer: usize) -> Result<Option<Refusal>, SwitchError> {
        let (round, own) = (self.round(layer), self.link.rank());
        // The messages in `incoming` are still to be placed, so the votes are received in `landed`.
        let Buffers { outgoing, landed: votes, .. } = &mut *self.buffers;
        outgoing.iter_mut().for_each(Vec::clear);
        round.head(outgoing, Kind::Vote, self.fault.as_ref().map(Fault::reason));
        let voted = self.link.all_to_all(outgoing, votes);
        voted
            .and_then(|()| round.refusal(own, votes, self.fault.as_ref()))
            .map_err(|cause| SwitchError::Lost { layer, cause })
    }

    fn round(&self, layer: usize) -> Round {
        Round { digest: self.digest, layer }
    }
}

/// A layer whose next messages are to be exchanged.
#[derive(Clone, Copy)]
struct Travel {
    /// Index of the layer in the order.
    at: usize,
    round: Round,
}

/// A layer whose received bytes are to be placed.
#[derive(Clone, Copy)]
struct Placing {
    /// Index of the layer in the order.
    at: usize,
    /// Whether the layer's last messages have arrived.
    last: bool,
}
