//! The self-check: reads the output back from disk and compares it byte by byte with the permuted original.

use super::plan::{Move, Plan};
use super::source::Source;
use super::target::PIECE_BYTES;
use super::{Meter, PermuteError};
use crate::container::Digester;

/// Compares every tensor. Returns the digest of the tensors as read through the permutation, which equals that of the
/// original.
pub(super) fn verify(
    plan: &Plan<'_>,
    source: &Source,
    written: &Source,
    meter: &mut Meter<'_>,
) -> Result<String, PermuteError> {
    let dir = &written.dir;
    // Every original tensor is matched below, so equal counts mean that there are no other tensors.
    if written.shard_of.len() != source.shard_of.len() {
        let (found, expected) = (written.shard_of.len(), source.shard_of.len());
        let expected = format!("{expected}, as in the original");
        return Err(PermuteError::field(dir, "the number of tensors", found, expected));
    }
    let mut digester = Digester::default();
    for (name, &shard) in &source.shard_of {
        let from = &source.shards[shard];
        let original = &from.file.tensors[name];
        let new_name = plan.new_name(name);
        let counterpart = written.shard_of.get(&new_name).map(|&shard| &written.shards[shard]);
        let Some(into) = counterpart.filter(|shard| shard.name == from.name) else {
            return Err(PermuteError::missing(&dir.join(&from.name), new_name));
        };
        let copy = &into.file.tensors[&new_name];
        let same_form = (&original.dtype, &original.shape) == (&copy.dtype, &copy.shape);
        let (old, new) = (from.file.bytes(original), into.file.bytes(copy));
        digester.begin(name, &original.dtype, &original.shape, old.len() as u64);
        if !same_form || !equal(old, new, &plan.movement(name), &mut digester, meter) {
            let original = format!("`{name}` of {}", source.dir.join(&from.name).display());
            return Err(PermuteError::Differs { path: dir.join(&into.name), tensor: new_name, original });
        }
    }
    Ok(digester.finish())
}

/// Compares the bytes of a tensor with those of its copy; digests the copy in the original's order.
fn equal(original: &[u8], copy: &[u8], movement: &Move<'_>, digester: &mut Digester, meter: &mut Meter<'_>) -> bool {
    let mut same = |original: &[u8], copy: &[u8]| {
        original.chunks(PIECE_BYTES).zip(copy.chunks(PIECE_BYTES)).all(|(original, copy)| {
            digester.bytes(copy);
            meter.advance(copy.len() as u64);
            original == copy
        })
    };
    original.len() == copy.len()
        && match movement {
            Move::Stay | Move::Rename(_) => same(original, copy),
            Move::Rows(permutation) => {
                let row = original.len() / permutation.slot.len();
                let mut rows = (0..).zip(&permutation.slot);
                // Row e of the original has moved to the slot of e.
                rows.all(|(e, &slot)| same(&original[e * row..][..row], &copy[usize::from(slot) * row..][..row]))
            }
        }
}
