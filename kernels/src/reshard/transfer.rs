//! One layer's moves: pulled from memory within reach, otherwise sent in messages; then the vote, which is the barrier.

use super::checksum::{Checksums, PieceHash};
use super::error::{Fault, MemoryFault, Reason, Refusal};
use super::layout::Place;
use super::memory::{ExpertMemory, each_part};
use super::plan::Move;
use crate::collectives::{Lockstep, UnitError};

/// Reason (0 = none), whether this rank sent any bytes of experts, layer, digest of the switch.
pub(super) const HEADER_BYTES: usize = 1 + 1 + 4 + 8;

/// The values that all ranks must agree on in each round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) digest: u64,
    pub(super) layer: usize,
}

/// A rank's buffers for the moves of a layer, reused from layer to layer.
#[derive(Debug)]
pub(super) struct Transfer {
    chunk_bytes: usize,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
    /// `[P]`: the data sent to and received from each peer out of reach.
    sends: Vec<Stream>,
    receives: Vec<Stream>,
}

/// Moves between two ranks as one stream of bytes.
#[derive(Clone, Debug, Default)]
struct Stream {
    moves: Vec<Move>,
    /// Bytes of all moves still to be transferred.
    left: usize,
    next: usize,
    row: usize,
    at: usize,
}

/// A contiguous piece of a row.
#[derive(Clone, Copy, Debug)]
struct Segment {
    from: usize,
    to: usize,
    bytes: usize,
}

impl Stream {
    fn clear(&mut self) {
        self.moves.clear();
        (self.left, self.next, self.row, self.at) = (0, 0, 0, 0);
    }

    fn push(&mut self, moved: Move) {
        self.left += moved.total_bytes();
        self.moves.push(moved);
    }

    /// The next bytes, at most `limit` and within one row.
    fn advance(&mut self, limit: usize) -> Option<Segment> {
        let moved = *self.moves.get(self.next).filter(|_| limit > 0)?;
        let bytes = limit.min(moved.bytes - self.at);
        let place = |place: Place| place.offset + self.row * place.stride + self.at;
        let segment = Segment { from: place(moved.from), to: place(moved.to), bytes };
        self.left -= bytes;
        self.at += bytes;
        if self.at == moved.bytes {
            (self.at, self.row) = (0, self.row + 1);
        }
        if self.row == moved.rows {
            (self.row, self.next) = (0, self.next + 1);
        }
        Some(segment)
    }
}

impl Transfer {
    /// Messages have at most `chunk_bytes` bytes of experts.
    pub(super) fn new(world: usize, chunk_bytes: usize) -> Self {
        let (buffers, streams) = (vec![Vec::new(); world], vec![Stream::default(); world]);
        Self { chunk_bytes, outgoing: buffers.clone(), incoming: buffers, sends: streams.clone(), receives: streams }
    }

    /// Carries out the moves that begin or end at this rank, verifies what arrived, and votes. `fault` is what this
    /// rank found wrong before and is updated with what it finds here. Returns the refusal, equal on all ranks.
    pub(super) fn layer(
        &mut self,
        link: &mut impl Lockstep,
        memory: &mut impl ExpertMemory,
        work: LayerWork<'_>,
        fault: &mut Option<Fault>,
    ) -> Result<Option<Refusal>, UnitError> {
        let own = link.rank();
        self.sends.iter_mut().chain(&mut self.receives).for_each(Stream::clear);
        let mut pulled = Vec::new();
        for moved in work.moves {
            if moved.to.rank == own && memory.reaches(moved.from.rank) {
                pulled.push(*moved);
            } else if moved.to.rank == own {
                self.receives[moved.from.rank].push(*moved);
            } else if moved.from.rank == own && !memory.reaches(moved.to.rank) {
                self.sends[moved.to.rank].push(*moved);
            }
        }
        let pulls = pieces(&pulled).try_for_each(|piece| pull(memory, piece, work.checksums));
        note(fault, pulls);
        let mut verified = false;
        loop {
            let sent = self.fill(memory, fault);
            if !verified && self.receives.iter().all(|stream| stream.left == 0) {
                verified = true;
                note(fault, self.verify(own, memory, work.checksums));
            }
            let reason = fault.as_ref().map(Fault::reason);
            self.head(work.round, reason, sent);
            link.all_to_all(&self.outgoing, &mut self.incoming)?;
            let refused = reason.map(|reason| Refusal { layer: work.round.layer, rank: own, reason });
            let votes = self.read_heads(own, work.round, Votes { refused, sent })?;
            self.drain(own, memory, fault);
            if !votes.sent {
                return Ok(votes.refused);
            }
        }
    }

    /// Writes the next bytes for each peer after the space for the header. Returns whether there were any.
    fn fill(&mut self, memory: &impl ExpertMemory, fault: &mut Option<Fault>) -> bool {
        let mut sent = false;
        for (message, stream) in self.outgoing.iter_mut().zip(&mut self.sends) {
            let bytes = stream.left.min(self.chunk_bytes);
            sent |= bytes > 0;
            message.clear();
            message.resize(HEADER_BYTES + bytes, 0);
            let mut rest = &mut message[HEADER_BYTES..];
            while let Some(segment) = stream.advance(rest.len()) {
                let (part, later) = rest.split_at_mut(segment.bytes);
                // A part that cannot be read is sent anyway; the vote ends the switch.
                let read = memory.read(memory.rank(), segment.from, part);
                note(fault, read.map_err(Fault::from));
                rest = later;
            }
        }
        sent
    }

    fn head(&mut self, round: Round, reason: Option<Reason>, sent: bool) {
        for message in &mut self.outgoing {
            message[0] = reason.map_or(0, |reason| reason as u8);
            message[1] = sent.into();
            message[2..6].copy_from_slice(&(round.layer as u32).to_le_bytes());
            message[6..HEADER_BYTES].copy_from_slice(&round.digest.to_le_bytes());
        }
    }

    fn read_heads(&self, own: usize, round: Round, mut votes: Votes) -> Result<Votes, UnitError> {
        for (peer, message) in self.incoming.iter().enumerate().filter(|(peer, _)| *peer != own) {
            let Some((head, bytes)) = message.split_first_chunk::<HEADER_BYTES>() else {
                let detail = format!("{} bytes in a switch, expected at least {HEADER_BYTES}", message.len());
                return Err(UnitError::protocol(peer, detail));
            };
            let [reason, sent, l0, l1, l2, l3, digest @ ..] = *head;
            let (layer, digest) = (u32::from_le_bytes([l0, l1, l2, l3]), u64::from_le_bytes(digest));
            if digest != round.digest || layer as usize != round.layer {
                let detail =
                    format!("it moves layer {layer} of a switch, expected layer {} of the same switch", round.layer);
                return Err(UnitError::protocol(peer, detail));
            }
            let expected = self.receives[peer].left.min(self.chunk_bytes);
            if bytes.len() != expected || sent > 1 {
                let detail = format!("{} bytes of experts, expected {expected}", bytes.len());
                return Err(UnitError::protocol(peer, detail));
            }
            votes.sent |= sent == 1;
            let reason = match reason {
                0 => continue,
                1 => Reason::Checksum,
                2 => Reason::Memory,
                3 => Reason::Stopped,
                _ => return Err(UnitError::protocol(peer, format!("vote {reason}, expected 0 to 3"))),
            };
            if votes.refused.is_none_or(|refused| peer < refused.rank) {
                votes.refused = Some(Refusal { layer: round.layer, rank: peer, reason });
            }
        }
        Ok(votes)
    }

    /// Writes received bytes to their destination.
    fn drain(&mut self, own: usize, memory: &mut impl ExpertMemory, fault: &mut Option<Fault>) {
        for (peer, (message, stream)) in self.incoming.iter().zip(&mut self.receives).enumerate() {
            let mut rest = message.get(HEADER_BYTES..).filter(|_| peer != own).unwrap_or_default();
            while let Some(segment) = stream.advance(rest.len()) {
                let (part, later) = rest.split_at(segment.bytes);
                note(fault, memory.write(segment.to, part).map_err(Fault::from));
                rest = later;
            }
        }
    }

    /// Verifies what arrived in messages, at its destination.
    fn verify(&self, own: usize, memory: &impl ExpertMemory, checksums: &Checksums) -> Result<(), Fault> {
        for stream in &self.receives {
            for piece in pieces(&stream.moves) {
                let mut hash = PieceHash::default();
                for moved in piece {
                    let mut rows = (0..moved.rows).map(|row| moved.to.offset + row * moved.to.stride);
                    rows.try_for_each(|row| hash_bytes(memory, own, row, moved.bytes, &mut hash))?;
                }
                check(piece, hash.finish(), checksums)?;
            }
        }
        Ok(())
    }
}

/// The moves of a layer and their expected checksums.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerWork<'a> {
    pub(super) round: Round,
    /// Between all ranks; empty if ranks only vote.
    pub(super) moves: &'a [Move],
    pub(super) checksums: &'a Checksums,
}

#[derive(Clone, Copy, Debug)]
struct Votes {
    /// Refusal of the lowest rank that refuses.
    refused: Option<Refusal>,
    /// Whether any rank sent bytes, which requires another round.
    sent: bool,
}

/// Keeps the first fault.
fn note(fault: &mut Option<Fault>, result: Result<(), Fault>) {
    if let Err(found) = result {
        fault.get_or_insert(found);
    }
}

/// The moves of each piece.
fn pieces(moves: &[Move]) -> impl Iterator<Item = &[Move]> {
    moves.chunk_by(|a, b| a.piece() == b.piece() && a.to.rank == b.to.rank)
}

fn pull(memory: &mut impl ExpertMemory, piece: &[Move], checksums: &Checksums) -> Result<(), Fault> {
    let mut hash = PieceHash::default();
    for moved in piece {
        for row in 0..moved.rows {
            let (from, to) = (moved.from.offset + row * moved.from.stride, moved.to.offset + row * moved.to.stride);
            memory.copy(moved.from.rank, from, to, moved.bytes, &mut hash)?;
        }
    }
    check(piece, hash.finish(), checksums)
}

fn check(piece: &[Move], found: u64, checksums: &Checksums) -> Result<(), Fault> {
    let (id, from) = (piece[0].piece(), piece[0].from.rank);
    let expected = checksums.expected(id)?;
    if found == expected { Ok(()) } else { Err(Fault::Checksum { piece: id, from, found, expected }) }
}

/// Adds a row of a buffer within reach to a hash.
pub(super) fn hash_bytes(
    memory: &impl ExpertMemory,
    rank: usize,
    offset: usize,
    bytes: usize,
    hash: &mut PieceHash,
) -> Result<(), MemoryFault> {
    each_part(bytes, |at, part| {
        memory.read(rank, offset + at, part)?;
        hash.update(part);
        Ok(())
    })
}
