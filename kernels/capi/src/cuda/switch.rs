//! The multicast address of the symmetric buffers, and which calls go through it.

use semmoe_kernels_cuda::{Buffer, ELEMENT_ALIGNMENT};

use crate::abi::{MULTICAST_ALLGATHER, MULTICAST_REDUCE_SCATTER, Multicast};

/// Nothing, at first.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Switch {
    whole: Buffer,
    operations: u32,
}

impl Switch {
    /// Of arguments that have been checked.
    pub(super) fn of(args: &Multicast) -> Self {
        let whole = Buffer { address: args.address.addr() as u64, bytes: args.bytes };
        Self { whole, operations: args.operations }
    }

    /// Where a reduce-scatter of rows of `row` bytes reads; `None`: from the peers.
    pub(super) fn reduce_scatter(self, offset: u64, row: u64) -> Option<Buffer> {
        self.at(MULTICAST_REDUCE_SCATTER, offset, row)
    }

    /// Where an allgather of rows of `row` bytes writes; `None`: to the peers.
    pub(super) fn allgather(self, offset: u64, row: u64) -> Option<Buffer> {
        self.at(MULTICAST_ALLGATHER, offset, row)
    }

    fn at(self, operation: u32, offset: u64, row: u64) -> Option<Buffer> {
        let goes = self.operations & operation != 0 && row.is_multiple_of(ELEMENT_ALIGNMENT);
        // An offset at the very end has no bytes, and no address.
        goes.then(|| self.whole.from_offset(offset)).filter(|buffer| buffer.bytes > 0)
    }
}
