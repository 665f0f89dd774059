//! One rank's side of a switch and its rollback.

use super::checksum::{Checksums, PieceHash, PieceId};
use super::error::{Fault, Refusal, ReshardError, SwitchError};
use super::layout::{Layout, Pool, Side};
use super::memory::ExpertMemory;
use super::pipeline::{Buffers, Pipeline, Progress, Refused};
use super::plan::Switch;
use super::round::HEADER_BYTES;
use super::shape::check_equal;
use super::transfer::hash_bytes;
use crate::collectives::{Lockstep, MAX_MESSAGE_BYTES, UnitError};

/// How a switch ended; equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All layers are in the new layout, on the other side.
    Switched,
    /// All layers are back in the old layout, on the old side, for the given reason.
    RolledBack(Refusal),
}

/// One rank's end of a switch: its messages and its memory. All ranks call the same methods in the same order.
///
/// A peer's bytes are read in place if its memory is within reach. Other bytes arrive in messages of at most
/// `chunk_bytes`, which are placed while the next messages are in flight, including those of the next layer. Each piece
/// is verified against its checksum once it is placed. After each layer all ranks vote, in an exchange that also acts
/// as the barrier: no rank places bytes of the next layer before all ranks have placed this one.
#[derive(Debug)]
pub struct Resharder<'m, L, M> {
    link: L,
    memory: &'m mut M,
    buffers: Buffers,
    fault: Option<Fault>,
}

impl<'m, L: Lockstep, M: ExpertMemory> Resharder<'m, L, M> {
    /// Creates one end of a switch, for the link's rank. `chunk_bytes` is the maximum number of expert bytes per
    /// message; it must be equal on all ranks and is clamped to between 1 and the link's limit. For each peer out of
    /// reach, memory holds two messages from the peer and one to it.
    pub fn new(link: L, memory: &'m mut M, chunk_bytes: usize) -> Self {
        let buffers = Buffers::new(link.world(), chunk_bytes.clamp(1, MAX_MESSAGE_BYTES - HEADER_BYTES));
        Self { link, memory, buffers, fault: None }
    }

    /// Bytes allocated for messages so far.
    pub fn buffer_bytes(&self) -> usize {
        self.buffers.bytes()
    }

    /// Performs the switch, or rolls it back: if on any rank a piece arrives with a wrong checksum, a memory access
    /// fails, or `proceed` returns false, all completed layers are moved back in reverse order. `proceed` is called
    /// before each layer of the switch, but not during the rollback.
    ///
    /// A piece that was corrupt before it was read is still corrupt after the rollback; [`Resharder::verify`] detects
    /// it.
    ///
    /// # Errors
    /// If the operands do not match this rank (nothing was changed here, but the unit is lost, because the peers are
    /// waiting), a rank was lost or runs a different switch, or the rollback failed.
    pub fn run(
        &mut self,
        switch: &Switch<'_>,
        checksums: &Checksums,
        proceed: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Outcome, SwitchError> {
        self.check(switch.pool())?;
        self.fault = None;
        let order: Vec<usize> = (0..switch.pool().layers()).map(|step| switch.layer(step)).collect();
        let mut pipeline = self.pipeline(switch, checksums);
        // All ranks agree before anything is written.
        let far = pipeline.agree()?;
        let Some(Refused { done, refusal }) = pipeline.run(&order, far, proceed)? else {
            return Ok(Outcome::Switched);
        };
        let fault = self.fault.take();
        let (back, inverse): (Vec<usize>, _) = (order[..done].iter().rev().copied().collect(), switch.inverse());
        let again = self.pipeline(&inverse, checksums).run(&back, far, &mut |_| true)?;
        if let Some(Refused { refusal: second, .. }) = again {
            return Err(SwitchError::Stuck { first: refusal, second });
        }
        self.fault = fault;
        Ok(Outcome::RolledBack(refusal))
    }

    fn pipeline<'a>(&'a mut self, switch: &'a Switch<'a>, checksums: &'a Checksums) -> Pipeline<'a, L, M> {
        let Self { link, memory, buffers, fault } = self;
        Pipeline { link, memory, buffers, switch, digest: switch.digest(), checksums, fault }
    }

    /// Returns the fault that this rank detected in the last switch, if any.
    pub fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    /// Computes the checksums of this rank's experts, once they are loaded.
    ///
    /// # Errors
    /// If memory cannot be read, the layout does not fit the pool, or replicas differ.
    pub fn record(&self, pool: &Pool, layout: &Layout, side: Side) -> Result<Checksums, Fault> {
        let mut checksums = Checksums::new(pool);
        self.each_piece(pool, layout, side, |piece, found| Ok(checksums.record(piece, found)?))?;
        Ok(checksums)
    }

    /// Verifies all experts on this rank against their checksums.
    ///
    /// # Errors
    /// The first piece whose checksum differs or is unknown; see also [`Resharder::record`].
    pub fn verify(&self, pool: &Pool, layout: &Layout, side: Side, checksums: &Checksums) -> Result<(), Fault> {
        let from = self.link.rank();
        self.each_piece(pool, layout, side, |piece, found| match checksums.expected(piece)? {
            expected if expected != found => Err(Fault::Checksum { piece, from, found, expected }),
            _ => Ok(()),
        })
    }

    /// Exchanges checksums with all ranks, so that every rank has those of all pieces.
    ///
    /// # Errors
    /// If a rank was lost, sent a different number of checksums, or has a differing copy.
    pub fn gather(&mut self, checksums: &mut Checksums) -> Result<(), UnitError> {
        let (own, world) = (self.link.rank(), self.link.world());
        let bytes: Vec<u8> = checksums.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut incoming = vec![Vec::new(); world];
        self.link.all_to_all(&vec![bytes; world], &mut incoming)?;
        for (peer, message) in incoming.iter().enumerate().filter(|(peer, _)| *peer != own) {
            let (words, rest) = message.as_chunks::<8>();
            if !rest.is_empty() {
                return Err(UnitError::protocol(peer, format!("{} bytes of checksums", message.len())));
            }
            let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            checksums.merge(&words).map_err(|cause| UnitError::protocol(peer, cause.to_string()))?;
        }
        Ok(())
    }

    /// Returns the link and the memory.
    #[must_use]
    pub fn into_parts(self) -> (L, &'m mut M) {
        (self.link, self.memory)
    }

    fn check(&self, pool: &Pool) -> Result<(), ReshardError> {
        check_equal("rank of the expert buffer", self.memory.rank(), self.link.rank())?;
        check_equal("ranks of the unit", self.link.world(), pool.grid().ranks())?;
        check_equal("bytes of the expert buffer", self.memory.bytes(), pool.bytes())
    }

    fn each_piece(
        &self,
        pool: &Pool,
        layout: &Layout,
        side: Side,
        mut visit: impl FnMut(PieceId, u64) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        pool.check(layout)?;
        self.check(pool)?;
        let rank = self.link.rank();
        let mut parts = Vec::new();
        for layer in 0..pool.layers() {
            pool.parts(layout, side, layer, rank, &mut parts);
            for piece in parts.chunk_by(|a, b| a.piece == b.piece) {
                let mut hash = PieceHash::default();
                for part in piece {
                    for row in 0..part.rows {
                        let offset = part.place.offset + row * part.place.stride;
                        hash_bytes(self.memory, rank, offset, part.bytes, &mut hash)?;
                    }
                }
                visit(piece[0].piece, hash.finish())?;
            }
        }
        Ok(())
    }
}
