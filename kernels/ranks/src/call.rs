//! A rank's next call, encoded as words that the other ranks compare with their own.

use std::sync::atomic::Ordering::Relaxed;

use semmoe_kernels::Dtype;
use semmoe_tables::RankId;

use crate::error::RankError;
use crate::signals::Signals;

/// Number of words in a call.
pub(crate) const CALL_WORDS: usize = 9;

/// Names of the words, for errors.
const NAMES: [&str; CALL_WORDS] = [
    "operation",
    "element type",
    "tokens",
    "hidden",
    "first offset",
    "second offset",
    "limits (capacity and top-k)",
    "digest of the order or placement",
    "symmetric buffer size",
];

/// The operations of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum Operation {
    Barrier = 1,
    ReduceScatter,
    ReduceScatterNorm,
    Allgather,
    AllReduce,
    Dispatch,
    Combine,
}

/// Names of the operations, in the order of their numbers, which start at 1.
const OPERATIONS: [&str; 7] =
    ["barrier", "reduce-scatter", "reduce-scatter with norm", "allgather", "all-reduce", "dispatch", "combine"];

/// All values that must be equal on every rank; 0 if the operation does not use them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) operation: Operation,
    pub(crate) dtype: Dtype,
    pub(crate) tokens: u64,
    pub(crate) hidden: u64,
    pub(crate) offsets: [u64; 2],
    pub(crate) limits: u64,
    pub(crate) digest: u64,
}

impl Call {
    pub(crate) fn new(operation: Operation, dtype: Dtype) -> Self {
        Self { operation, dtype, tokens: 0, hidden: 0, offsets: [0; 2], limits: 0, digest: 0 }
    }

    fn words(&self, bytes: usize) -> [u64; CALL_WORDS] {
        let [first, second] = self.offsets;
        let dtype = self.dtype as u64;
        let size = bytes as u64;
        [self.operation as u64, dtype, self.tokens, self.hidden, first, second, self.limits, self.digest, size]
    }

    /// Publishes the call to the other ranks, which read it after the next barrier.
    pub(crate) fn publish(&self, own: &Signals, bytes: usize) {
        for (word, value) in own.call.iter().zip(self.words(bytes)) {
            word.store(value, Relaxed);
        }
    }

    /// Compares the call with those of all other ranks. Both sides detect a difference, so either all ranks fail or
    /// none.
    pub(crate) fn compare(&self, rank: usize, all: &[&Signals], bytes: usize) -> Result<(), RankError> {
        let ours = self.words(bytes);
        for (peer, signals) in all.iter().enumerate().filter(|(peer, _)| *peer != rank) {
            for (index, (word, &ours)) in signals.call.iter().zip(&ours).enumerate() {
                let theirs = word.load(Relaxed);
                if theirs != ours {
                    let (rank, what) = (RankId::new(peer as u16), NAMES[index]);
                    let [theirs, ours] = [theirs, ours].map(|value| show(index, value));
                    return Err(RankError::Disagree { rank, what, theirs, ours });
                }
            }
        }
        Ok(())
    }
}

fn show(index: usize, value: u64) -> String {
    let name = match NAMES[index] {
        "operation" => (1..).zip(OPERATIONS).find(|(number, _)| *number == value).map(|(_, name)| name),
        "element type" => u32::try_from(value).ok().and_then(Dtype::from_code).map(Dtype::name),
        _ => None,
    };
    name.map_or_else(|| value.to_string(), str::to_owned)
}
