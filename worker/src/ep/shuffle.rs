//! Attention tp between ranks: partial sums to the ranks that go on with them, and rows back to all ranks.
//!
//! What they mean, bit for bit, is `semmoe_kernels::reference`: [`reduce_scatter`](semmoe_kernels::reference::reduce_scatter) and
//! [`allgather`](semmoe_kernels::reference::allgather), shuffled if the split is. Here a split's digest goes with each message, so
//! that ranks find out if they ever disagree on it.

use semmoe_kernels::RowSplit;
use semmoe_tables::{LayerIdx, RankId};

use super::counters::Collective;
use super::exchange::ExpertParallel;
use super::timings::TimedCollective;
use super::transport::TransportError;
use super::wire;

/// Bytes of a message before its rows.
const DIGEST_BYTES: usize = 8;

/// Rows, and labels that go with them: those of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnRows<'a> {
    /// `[m, H]`
    pub(crate) rows: &'a [f32],
    pub(crate) hidden: usize,
    /// `[m, w]`
    pub(crate) labels: &'a [u16],
    /// w
    pub(crate) width: usize,
    /// What every label is below.
    pub(crate) bound: usize,
}

/// Those of all ranks together, in the order of the tokens.
#[derive(Debug)]
pub(crate) struct AllRows<'a> {
    /// `[n, H]`
    pub(crate) rows: &'a mut [f32],
    /// `[n, w]`
    pub(crate) labels: &'a mut [u16],
}

impl ExpertParallel {
    /// `out[i] = sum over ranks q, in rank order, of part_q[token(i)]` for the positions i of this rank. `part` `[n, H]`; `out`
    /// `[m, H]`, overwritten. Every rank calls this with the same split. Its time counts for `layer`, unless that has no experts.
    ///
    /// # Errors
    /// A rank failed, or has another split.
    pub(crate) fn reduce_scatter(
        &mut self,
        layer: Option<LayerIdx>,
        part: &[f32],
        hidden: usize,
        split: RowSplit<'_>,
        out: &mut Vec<f32>,
    ) -> Result<(), TransportError> {
        let (me, digest) = (self.rank().index(), split.digest());
        let row = |position| &part[split.token(position) * hidden..][..hidden];
        self.count_collective(Collective::ReduceScatter, |peer| {
            DIGEST_BYTES + size_of::<f32>() * hidden * split.positions(peer).len()
        });
        let timed = layer.map(|layer| (layer, TimedCollective::Scatter));
        let incoming = self.all_to_all(timed, |peer, message| {
            message.extend_from_slice(&digest.to_le_bytes());
            for position in split.positions(peer) {
                message.extend_from_slice(bytemuck::cast_slice(row(position)));
            }
        })?;
        let bytes = size_of::<f32>() * split.positions(me).len() * hidden;
        out.clear();
        for (rank, message) in incoming.iter().enumerate() {
            // The first rank's values are not added to zero: that would take the sign of a negative zero.
            match (rank == me, rank) {
                (true, 0) => split.positions(me).for_each(|position| out.extend_from_slice(row(position))),
                (true, _) => {
                    let sums = out.chunks_exact_mut(hidden).zip(split.positions(me));
                    sums.for_each(|(sum, position)| add(sum, row(position).iter().copied()));
                }
                (false, 0) => wire::append_f32s(checked(rank, message, digest, bytes)?, out),
                (false, _) => add(out, wire::f32s(checked(rank, message, digest, bytes)?)),
            }
        }
        Ok(())
    }

    /// Rows of all ranks to all ranks, each where its token is: the inverse of [`ExpertParallel::reduce_scatter`]. `out` is
    /// overwritten. Its time counts as there.
    ///
    /// # Errors
    /// A rank failed, or has another split, or labels that are none.
    pub(crate) fn allgather(
        &mut self,
        layer: Option<LayerIdx>,
        own: OwnRows<'_>,
        split: RowSplit<'_>,
        out: AllRows<'_>,
    ) -> Result<(), TransportError> {
        let (me, digest) = (self.rank().index(), split.digest());
        let bytes = DIGEST_BYTES + size_of_val(own.rows) + size_of_val(own.labels);
        self.count_collective(Collective::Allgather, |_| bytes);
        let timed = layer.map(|layer| (layer, TimedCollective::Gather));
        let incoming = self.all_to_all(timed, |_, message| {
            message.reserve(bytes);
            message.extend_from_slice(&digest.to_le_bytes());
            message.extend_from_slice(bytemuck::cast_slice(own.rows));
            message.extend_from_slice(bytemuck::cast_slice(own.labels));
        })?;
        let (row_bytes, label_bytes) = (size_of::<f32>() * own.hidden, size_of::<u16>() * own.width);
        for (rank, message) in incoming.iter().enumerate() {
            let positions = split.positions(rank);
            let (rows, labels): (&[u8], &[u8]) = match rank == me {
                true => (bytemuck::cast_slice(own.rows), bytemuck::cast_slice(own.labels)),
                false => {
                    let body = checked(rank, message, digest, positions.len() * (row_bytes + label_bytes))?;
                    body.split_at(positions.len() * row_bytes)
                }
            };
            if let Some(label) = wire::u16s(labels).find(|label| usize::from(*label) >= own.bound) {
                return Err(protocol(rank, format!("label {label} of a row, expected below {}", own.bound)));
            }
            for (i, position) in positions.enumerate() {
                let token = split.token(position);
                let to: &mut [u8] = bytemuck::cast_slice_mut(&mut out.rows[token * own.hidden..][..own.hidden]);
                to.copy_from_slice(&rows[i * row_bytes..][..row_bytes]);
                let to: &mut [u8] = bytemuck::cast_slice_mut(&mut out.labels[token * own.width..][..own.width]);
                to.copy_from_slice(&labels[i * label_bytes..][..label_bytes]);
            }
        }
        Ok(())
    }

    /// Tells every other rank the same, and gives what each of them tells, by rank; the own slot is of no meaning.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn tell_all(&mut self, told: &[u8]) -> Result<&[Vec<u8>], TransportError> {
        self.count_collective(Collective::Sync, |_| told.len());
        self.all_to_all(None, |_, message| message.extend_from_slice(told))
    }

    /// Counts what this rank is about to send in one collective.
    fn count_collective(&self, collective: Collective, bytes_to: impl Fn(usize) -> usize) {
        let me = self.rank().index();
        let bytes: usize = (0..self.world()).filter(|&peer| peer != me).map(bytes_to).sum();
        self.counters().add_collective(collective, bytes as u64);
    }
}

fn add(sums: &mut [f32], values: impl Iterator<Item = f32>) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

/// What follows the digest.
fn checked(rank: usize, message: &[u8], digest: u64, expected: usize) -> Result<&[u8], TransportError> {
    let Some((found, body)) = message.split_first_chunk::<DIGEST_BYTES>() else {
        let (found, expected) = (message.len(), DIGEST_BYTES + expected);
        return Err(protocol(rank, format!("a message of {found} bytes, expected {expected}")));
    };
    if u64::from_le_bytes(*found) != digest {
        return Err(protocol(rank, "it split the rows of a step in another way".to_owned()));
    }
    match body.len() == expected {
        true => Ok(body),
        false => Err(protocol(rank, format!("rows of {} bytes, expected {expected}", body.len()))),
    }
}

fn protocol(rank: usize, detail: String) -> TransportError {
    TransportError::protocol(RankId::new(rank as u16), detail)
}

#[cfg(test)]
#[path = "shuffle_tests.rs"]
mod tests;
