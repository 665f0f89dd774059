//! The multicast address of the symmetric buffers, and the calls that use it.

use semmoe_kernels_cuda::{Buffer, ELEMENT_ALIGNMENT};

use crate::abi::Multicast;

/// Use of the NVLink switch, initially disabled.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Switch {
    whole: Buffer,
    operations: u32,
}

impl Switch {
    /// Copies the fields from checked arguments.
    pub(super) fn of(args: &Multicast) -> Self {
        let whole = Buffer { address: args.address.addr() as u64, bytes: args.bytes };
        Self { whole, operations: args.operations }
    }

    /// Returns the multicast address for a call of this operation on rows of `row` bytes; `None` if the call uses the
    /// peers' addresses.
    pub(super) fn at(self, operation: u32, offset: u64, row: u64) -> Option<Buffer> {
        let goes = self.operations & operation != 0 && row.is_multiple_of(ELEMENT_ALIGNMENT);
        // An offset at the very end has no bytes and therefore no address.
        goes.then(|| self.whole.from_offset(offset)).filter(|buffer| buffer.bytes > 0)
    }
}
