//! SRDecode: a message checked once, then added to the shared expert as that is copied.

use std::ops::Range;

use half::f16;
use semmoe_kernels::sum_rows;

use super::{BLOCK, MAGIC, SharedExpert, SrError, SrIndex, VERSION, check_len};

/// Values that are added at once: they stay in the first cache.
const BATCH: usize = 1024;

/// An expert's residual as it lies in a message. A value is valid: its indices ascend and are below n, its values are
/// finite.
#[derive(Clone, Copy, Debug)]
pub struct SrResidual<'a> {
    epoch: u64,
    /// n
    weights: usize,
    index: SrIndex,
    /// u32 `[blocks]`, with [`SrIndex::InBlock`].
    counts: &'a [u8],
    /// u16 or u32 `[k]`
    indices: &'a [u8],
    /// f16 `[k]`
    values: &'a [u8],
}

const HEADER_BYTES: usize = 32;

fn u32s(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(size_of::<u32>()).map(bytemuck::pod_read_unaligned)
}

impl<'a> SrResidual<'a> {
    /// Checks a message; allocates nothing.
    ///
    /// # Errors
    /// The first defect found in the message.
    pub fn parse(message: &'a [u8]) -> Result<Self, SrError> {
        let (header, body) = message.split_first_chunk::<HEADER_BYTES>().ok_or(SrError::Format)?;
        let field = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("within the header"));
        let version_and_index = field(8);
        let index = match (version_and_index as u16, (version_and_index >> 16) as u16) {
            (VERSION, 2) => SrIndex::InBlock,
            (VERSION, 4) => SrIndex::InExpert,
            _ => return Err(SrError::Format),
        };
        if header[..8] != MAGIC {
            return Err(SrError::Format);
        }
        let (kept, weights, epoch) = (version_and_index >> 32, field(16), field(24));
        // A u32 times a few bytes fits u64, whatever the header says.
        let Some(weights) = u32::try_from(weights).ok().map(|weights| weights as usize) else {
            return Err(SrError::TooLong { found: usize::try_from(weights).unwrap_or(usize::MAX) });
        };
        let blocks = if index == SrIndex::InBlock { weights.div_ceil(BLOCK) } else { 0 };
        let expected = (blocks * size_of::<u32>()) as u64 + kept * (index.bytes() + size_of::<f16>()) as u64;
        if body.len() as u64 != expected {
            return Err(SrError::Size { found: message.len(), expected: expected + HEADER_BYTES as u64 });
        }
        let (counts, body) = body.split_at(blocks * size_of::<u32>());
        let (indices, values) = body.split_at(kept as usize * index.bytes());
        let residual = Self { epoch, weights, index, counts, indices, values };
        residual.check_indices()?;
        match residual.values().position(|value| !value.is_finite()) {
            None => Ok(residual),
            Some(index) => Err(SrError::NotFinite { what: "value", index }),
        }
    }

    fn check_indices(&self) -> Result<(), SrError> {
        let check = |index: usize, found: u64, low: u64, high: u64| match (low..high).contains(&found) {
            true => Ok(()),
            false => Err(SrError::Index { index, found, low, high }),
        };
        let weights = self.weights as u64;
        if self.index == SrIndex::InExpert {
            let mut low = 0;
            return u32s(self.indices).map(u64::from).enumerate().try_for_each(|(index, found)| {
                check(index, found, low, weights)?;
                low = found + 1;
                Ok(())
            });
        }
        let (found, expected) = (u32s(self.counts).map(u64::from).sum(), self.kept() as u64);
        if found != expected {
            return Err(SrError::Counts { found, expected });
        }
        let mut index = 0;
        for (block, count) in u32s(self.counts).enumerate() {
            let first = (block * BLOCK) as u64;
            let (mut low, high) = (first, weights.min(first + BLOCK as u64));
            for _ in 0..count {
                let found = first + u64::from(self.in_block(index));
                check(index, found, low, high)?;
                (low, index) = (found + 1, index + 1);
            }
        }
        Ok(())
    }

    fn in_block(&self, index: usize) -> u16 {
        bytemuck::pod_read_unaligned(&self.indices[index * size_of::<u16>()..][..size_of::<u16>()])
    }

    fn values(&self) -> impl Iterator<Item = f16> {
        self.values.chunks_exact(size_of::<f16>()).map(bytemuck::pod_read_unaligned)
    }

    /// n
    pub fn weights(&self) -> usize {
        self.weights
    }

    /// k
    pub fn kept(&self) -> usize {
        self.values.len() / size_of::<f16>()
    }

    /// Which shared expert it is to be added to.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The weights that differ from the shared expert's, ascending, and by how much.
    pub fn iter(&self) -> impl Iterator<Item = (usize, f16)> {
        let ends = u32s(self.counts).scan(0, |end, count| {
            *end += count as usize;
            Some(*end)
        });
        let mut blocks = ends.enumerate().peekable();
        let place = move |index: usize| match self.index {
            SrIndex::InExpert => u32s(&self.indices[index * size_of::<u32>()..]).next().unwrap_or_default() as usize,
            SrIndex::InBlock => {
                while blocks.next_if(|(_, end)| *end <= index).is_some() {}
                let block = blocks.peek().map_or(0, |(block, _)| *block);
                block * BLOCK + usize::from(self.in_block(index))
            }
        };
        (0..self.kept()).map(place).zip(self.values())
    }

    /// Restores the expert, `out` `[n]`: the residual is added as the shared expert is copied, a block at a time.
    ///
    /// # Errors
    /// Another shared expert than the one it was made for, another length.
    pub fn decode(&self, shared: &SharedExpert, out: &mut [f16]) -> Result<(), SrError> {
        if shared.epoch != self.epoch {
            return Err(SrError::Epoch { found: self.epoch, expected: shared.epoch });
        }
        check_len("the residual", self.weights, shared.weights.len())?;
        check_len("out", out.len(), shared.weights.len())?;
        let (mut counts, mut first) = (u32s(self.counts), 0);
        for (block, (out, shared)) in out.chunks_mut(BLOCK).zip(shared.weights.chunks(BLOCK)).enumerate() {
            out.copy_from_slice(shared);
            let count = match self.index {
                SrIndex::InBlock => counts.next().unwrap_or_default() as usize,
                SrIndex::InExpert => {
                    let (indices, end) = (&self.indices.as_chunks::<4>().0[first..], block * BLOCK + out.len());
                    indices.partition_point(|index| (u32::from_le_bytes(*index) as usize) < end)
                }
            };
            self.add(first..first + count, out);
            first += count;
        }
        Ok(())
    }

    /// Adds some values to the weights of their block: fetched from their places and added as the rows of a
    /// reduce-scatter are, many at once.
    fn add(&self, values: Range<usize>, block: &mut [f16]) {
        let (mut places, mut sums) = ([0u16; BATCH], [f16::ZERO; BATCH]);
        let (mut weights, mut added) = (sums, sums);
        for start in values.clone().step_by(BATCH) {
            let count = BATCH.min(values.end - start);
            let indices = self.indices[start * self.index.bytes()..].chunks_exact(self.index.bytes());
            // A block has as many weights as 16 bits count: an index in the expert ends with the one in its block.
            for ((place, weight), index) in places.iter_mut().zip(&mut weights).zip(indices).take(count) {
                *place = u16::from_le_bytes([index[0], index[1]]);
                *weight = block[usize::from(*place)];
            }
            let bytes = &self.values[start * size_of::<f16>()..][..count * size_of::<f16>()];
            bytemuck::cast_slice_mut(&mut added[..count]).copy_from_slice(bytes);
            sum_rows(&[&weights[..count], &added[..count]], &mut sums[..count]);
            for (place, sum) in places.iter().zip(&sums).take(count) {
                block[usize::from(*place)] = *sum;
            }
        }
    }
}
