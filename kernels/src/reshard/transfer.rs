//! A rank's part of one layer's moves: copies from memory within reach, and byte streams to and from other ranks.

use super::checksum::{Checksums, PieceHash};
use super::error::{Fault, MemoryFault};
use super::layout::Place;
use super::memory::{ExpertMemory, each_part};
use super::plan::Move;
use super::round::HEADER_BYTES;

/// Roughly the bytes that a rank places in the time it takes to start a thread.
const SMALL_BYTES: usize = 64 << 10;

/// A rank's part of a layer's moves; reused for every layer.
#[derive(Debug)]
pub(super) struct LayerMoves {
    /// Bytes that this rank places.
    bytes: usize,
    /// Copies from memory within reach.
    pulls: Vec<Move>,
    /// Number of completed `pulls`.
    pulled: usize,
    /// `[P]`: the streams to and from each peer out of reach.
    sends: Vec<Stream>,
    receives: Vec<Stream>,
    /// `[P]`: bytes still to be received from each peer.
    due: Vec<usize>,
    /// The first source that could not be read.
    fault: Option<Fault>,
}

/// The moves between two ranks as one byte stream.
#[derive(Clone, Debug, Default)]
struct Stream {
    moves: Vec<Move>,
    /// Bytes of all moves still to be read or written.
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

    /// Returns the next bytes: at most `limit`, and within one row.
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

impl LayerMoves {
    pub(super) fn new(world: usize) -> Self {
        let (pulls, sends, receives) = (Vec::new(), vec![Stream::default(); world], vec![Stream::default(); world]);
        Self { bytes: 0, pulls, pulled: 0, sends, receives, due: vec![0; world], fault: None }
    }

    /// Selects this rank's part of a layer's moves between all ranks.
    pub(super) fn begin(&mut self, moves: &[Move], memory: &impl ExpertMemory) {
        let own = memory.rank();
        (self.pulled, self.fault) = (0, None);
        self.pulls.clear();
        self.sends.iter_mut().chain(&mut self.receives).for_each(Stream::clear);
        for moved in moves {
            if moved.to.rank == own && memory.reaches(moved.from.rank) {
                self.pulls.push(*moved);
            } else if moved.to.rank == own {
                self.receives[moved.from.rank].push(*moved);
            } else if moved.from.rank == own && !memory.reaches(moved.to.rank) {
                self.sends[moved.to.rank].push(*moved);
            }
        }
        self.due = self.receives.iter().map(|stream| stream.left).collect();
        let pulled: usize = self.pulls.iter().map(Move::total_bytes).sum();
        self.bytes = self.due.iter().sum::<usize>() + pulled;
    }

    /// Whether placing the layer is faster than starting a thread.
    pub(super) fn is_small(&self) -> bool {
        self.bytes < SMALL_BYTES
    }

    /// Writes the next bytes for each peer, at most `limit`, after the space for the header. Returns whether any bytes
    /// remain.
    pub(super) fn fill(&mut self, memory: &impl ExpertMemory, messages: &mut [Vec<u8>], limit: usize) -> bool {
        let Self { sends, fault, .. } = self;
        for (message, stream) in messages.iter_mut().zip(sends.iter_mut()) {
            message.clear();
            message.resize(HEADER_BYTES + stream.left.min(limit), 0);
            let mut rest = &mut message[HEADER_BYTES..];
            while let Some(segment) = stream.advance(rest.len()) {
                let (part, later) = rest.split_at_mut(segment.bytes);
                // An unreadable part is sent anyway; the vote then ends the switch.
                let read = memory.read(memory.rank(), segment.from, part);
                note(fault, read.map_err(Fault::from));
                rest = later;
            }
        }
        sends.iter().any(|stream| stream.left > 0)
    }

    /// Returns the number of bytes that each peer sends next, and counts them as received.
    pub(super) fn take_due(&mut self, limit: usize) -> Vec<usize> {
        let take = |due: &mut usize| {
            let next = limit.min(*due);
            *due -= next;
            next
        };
        self.due.iter_mut().map(take).collect()
    }

    /// Writes received bytes to their destination and makes a proportional part of the copies from memory within reach.
    /// With the layer's last messages, makes all remaining copies and verifies the received pieces.
    pub(super) fn place(&mut self, memory: &mut impl ExpertMemory, landed: &Landed<'_>) -> Result<(), Fault> {
        let mut fault = self.fault.take();
        note(&mut fault, self.pull(memory, landed));
        let own = memory.rank();
        for (peer, (message, stream)) in landed.messages.iter().zip(&mut self.receives).enumerate() {
            let mut rest = message.get(HEADER_BYTES..).filter(|_| peer != own).unwrap_or_default();
            while let Some(segment) = stream.advance(rest.len()) {
                let (part, later) = rest.split_at(segment.bytes);
                note(&mut fault, memory.write(segment.to, part).map_err(Fault::from));
                rest = later;
            }
        }
        if landed.last {
            note(&mut fault, self.verify(own, memory, landed.checksums));
        }
        fault.map_or(Ok(()), Err)
    }

    /// Copies from memory within reach, just enough to finish together with the messages.
    fn pull(&mut self, memory: &mut impl ExpertMemory, landed: &Landed<'_>) -> Result<(), Fault> {
        let left = self.pulls.len() - self.pulled;
        let messages = self.receives.iter().map(|stream| stream.left.div_ceil(landed.chunk_bytes)).max();
        let share = if landed.last { left } else { left.div_ceil(messages.unwrap_or(0).max(1)) };
        let end = self.pulled + share;
        let pieces = pieces(&self.pulls[self.pulled..]);
        let mut pulled = Ok(());
        for piece in pieces {
            if self.pulled >= end {
                break;
            }
            self.pulled += piece.len();
            pulled = pulled.and(pull(memory, piece, landed.checksums));
        }
        pulled
    }

    /// Verifies the pieces received in messages, at their destination.
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

/// Messages that were received but not yet placed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landed<'a> {
    pub(super) messages: &'a [Vec<u8>],
    /// Whether these are the layer's last messages.
    pub(super) last: bool,
    pub(super) chunk_bytes: usize,
    pub(super) checksums: &'a Checksums,
}

/// Records a fault unless there already is one.
pub(super) fn note(fault: &mut Option<Fault>, result: Result<(), Fault>) {
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
