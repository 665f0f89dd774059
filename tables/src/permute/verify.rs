//! The self-check: what was written, read again from the disk, equals the original under the permutation, byte by byte.

use super::plan::{Move, Plan};
use super::source::{Shard, Source};
use super::target::PIECE_BYTES;
use super::{Meter, PermuteError};
use crate::container::{Digester, ForeignTensor};

/// Compares every tensor and gives the digest of the tensors as they are read through the permutation: that of the
/// original.
pub(super) fn verify(
    plan: &Plan<'_>,
    source: &Source,
    written: &Source,
    meter: &mut Meter<'_>,
) -> Result<String, PermuteError> {
    let dir = &written.dir;
    // Every original has a counterpart of its own below; equal numbers mean that there is nothing else.
    if written.shard_of.len() != source.shard_of.len() {
        let (found, expected) = (written.shard_of.len(), source.shard_of.len());
        let expected = format!("{expected}, as in the original");
        return Err(PermuteError::field(dir, "the number of tensors", found, expected));
    }
    let mut digester = Digester::default();
    for (name, &shard) in &source.shard_of {
        let from = &source.shards[shard];
        let original = &from.file.tensors()[name];
        let new_name = plan.new_name(name);
        let counterpart = written.shard_of.get(&new_name).map(|&shard| &written.shards[shard]);
        let Some(into) = counterpart.filter(|shard| shard.name == from.name) else {
            return Err(PermuteError::missing(&dir.join(&from.name), new_name));
        };
        let copy = &into.file.tensors()[&new_name];
        let pair = Pair { original, from, copy, into };
        digester.begin(name, &original.dtype, &original.shape, from.file.bytes(original).len() as u64);
        if !pair.equal(&plan.movement(name), &mut digester, meter) {
            let original = format!("`{name}` of {}", source.dir.join(&from.name).display());
            return Err(PermuteError::Differs { path: dir.join(&into.name), tensor: new_name, original });
        }
    }
    Ok(digester.finish())
}

/// A tensor and what became of it.
struct Pair<'a> {
    original: &'a ForeignTensor,
    from: &'a Shard,
    copy: &'a ForeignTensor,
    into: &'a Shard,
}

impl Pair<'_> {
    /// Compares type, shape and bytes; digests the copy in the original's order.
    fn equal(&self, movement: &Move<'_>, digester: &mut Digester, meter: &mut Meter<'_>) -> bool {
        let (original, copy) = (self.from.file.bytes(self.original), self.into.file.bytes(self.copy));
        if (&self.original.dtype, &self.original.shape) != (&self.copy.dtype, &self.copy.shape)
            || original.len() != copy.len()
        {
            return false;
        }
        let mut same = |original: &[u8], copy: &[u8]| {
            original.chunks(PIECE_BYTES).zip(copy.chunks(PIECE_BYTES)).all(|(original, copy)| {
                digester.bytes(copy);
                meter.advance(copy.len() as u64);
                original == copy
            })
        };
        match movement {
            Move::Stay | Move::Rename(_) => same(original, copy),
            Move::Rows(permutation) => {
                let row = original.len() / permutation.slots().len();
                let mut rows = (0..).zip(permutation.slots());
                // Row e of the original is now where the slot of e is.
                rows.all(|(e, &slot)| same(&original[e * row..][..row], &copy[usize::from(slot) * row..][..row]))
            }
        }
    }
}
