//! A checksum for each slice of each expert, equal in all layouts.

use std::fmt;

use super::error::ReshardError;
use super::layout::Pool;

/// A slice of an expert in a layer, which has a checksum of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PieceId {
    /// Layer.
    pub layer: usize,
    /// Logical expert id.
    pub expert: u16,
    /// Slice of its width.
    pub slice: u16,
}

impl fmt::Display for PieceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}, expert {}, slice {}", self.layer, self.expert, self.slice)
    }
}

/// Eight chains, as one would wait for each multiplication.
const LANES: usize = 8;

/// Bytes of one step of a [`PieceHash`].
pub(super) const HASH_BLOCK_BYTES: usize = LANES * 8;

/// A checksum against damage, not against malice: each step is a bijection of the state, so no single changed word goes
/// unnoticed.
#[derive(Clone, Copy, Debug)]
pub struct PieceHash {
    lanes: [u64; LANES],
    bytes: u64,
}

impl Default for PieceHash {
    fn default() -> Self {
        Self { lanes: std::array::from_fn(|lane| 0x517c_c1b7_2722_0a95 ^ lane as u64), bytes: 0 }
    }
}

impl PieceHash {
    /// Adds bytes: those of a row, row by row. A row may come in parts whose lengths are multiples of 64, the last one
    /// excepted.
    pub fn update(&mut self, bytes: &[u8]) {
        let (blocks, rest) = bytes.as_chunks::<HASH_BLOCK_BYTES>();
        for block in blocks {
            self.block(block);
        }
        if !rest.is_empty() {
            let mut last = [0; HASH_BLOCK_BYTES];
            last[..rest.len()].copy_from_slice(rest);
            self.block(&last);
        }
        self.bytes += bytes.len() as u64;
    }

    fn block(&mut self, block: &[u8; HASH_BLOCK_BYTES]) {
        let (words, _) = block.as_chunks::<8>();
        for (lane, word) in self.lanes.iter_mut().zip(words) {
            *lane = mix(*lane, u64::from_le_bytes(*word));
        }
    }

    /// The checksum, never 0.
    #[must_use]
    pub fn finish(&self) -> u64 {
        let hash = self.lanes.iter().fold(self.bytes, |hash, &lane| mix(hash, lane));
        (hash ^ (hash >> 32)).max(1)
    }
}

fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// The checksums of all pieces, made when the experts are loaded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checksums {
    experts: usize,
    slices: usize,
    /// `[K, N, W]`, 0 where unknown
    words: Vec<u64>,
}

impl Checksums {
    /// Of a pool's experts, all unknown: 8 K N W bytes.
    #[must_use]
    pub fn new(pool: &Pool) -> Self {
        let (experts, slices) = (pool.experts(), pool.cluster().slices());
        Self { experts, slices, words: vec![0; pool.layers() * experts * slices] }
    }

    /// `[K, N, W]`: to send to other ranks; 0 where unknown.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Adds what another rank knows, `[K, N, W]`.
    ///
    /// # Errors
    /// Another length, or a piece of which both ranks have a copy and the copies differ.
    pub fn merge(&mut self, words: &[u64]) -> Result<(), ReshardError> {
        let (found, expected) = (words.len(), self.words.len());
        if found != expected {
            return Err(ReshardError::Differs { what: "checksums", found, expected });
        }
        for (index, &word) in words.iter().enumerate().filter(|(_, word)| **word != 0) {
            self.set(index, word)?;
        }
        Ok(())
    }

    /// Adds one.
    ///
    /// # Errors
    /// Another checksum of the same piece.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn record(&mut self, piece: PieceId, hash: u64) -> Result<(), ReshardError> {
        self.set(self.index(piece), hash)
    }

    /// The checksum that a piece must have.
    ///
    /// # Errors
    /// One that is unknown.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn expected(&self, piece: PieceId) -> Result<u64, ReshardError> {
        match self.words[self.index(piece)] {
            0 => Err(ReshardError::Unknown(piece)),
            word => Ok(word),
        }
    }

    fn index(&self, piece: PieceId) -> usize {
        let (expert, slice) = (usize::from(piece.expert), usize::from(piece.slice));
        assert!(expert < self.experts && slice < self.slices, "no such piece: {piece}");
        (piece.layer * self.experts + expert) * self.slices + slice
    }

    fn set(&mut self, index: usize, found: u64) -> Result<(), ReshardError> {
        match self.words[index] {
            expected if expected != 0 && expected != found => {
                let (row, slice) = (index / self.slices, index % self.slices);
                let (layer, expert) = (row / self.experts, row % self.experts);
                let piece = PieceId { layer, expert: expert as u16, slice: slice as u16 };
                Err(ReshardError::Copies { piece, found, expected })
            }
            _ => {
                self.words[index] = found;
                Ok(())
            }
        }
    }
}
