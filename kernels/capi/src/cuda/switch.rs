//! The multicast address of the symmetric buffers, and which calls go through it.

use semmoe_kernels_cuda::{Buffer, ELEMENT_ALIGNMENT};

use crate::abi::Multicast;

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

    /// Where a call of this operation on rows of `row` bytes reads or writes through the switch; `None`: it goes to the
    /// peers.
    pub(super) fn at(self, operation: u32, offset: u64, row: u64) -> Option<Buffer> {
        let goes = self.operations & operation != 0 && row.is_multiple_of(ELEMENT_ALIGNMENT);
        // An offset at the very end has no bytes, and no address.
        goes.then(|| self.whole.from_offset(offset)).filter(|buffer| buffer.bytes > 0)
    }
}
