//! The structures and constants of `kernels/include/semmoe_kernels.h`, field by field. `tests/header.rs` has a C
//! compiler check that sizes and offsets match.

use std::ffi::c_void;

pub(crate) const ABI_VERSION: u32 = 1;
/// `SEMMOE_OK`
pub const OK: i32 = 0;
/// `SEMMOE_DEVICE_CPU`
pub const DEVICE_CPU: u32 = 0;
/// `SEMMOE_DEVICE_CUDA`
pub const DEVICE_CUDA: u32 = 1;
/// `SEMMOE_ALIGNMENT`
pub(crate) const ALIGNMENT: u64 = 16;
/// `SEMMOE_MAX_WORLD`
pub(crate) const MAX_WORLD: u32 = 64;
/// `SEMMOE_MULTICAST_REDUCE_SCATTER`
pub const MULTICAST_REDUCE_SCATTER: u32 = 1;
/// `SEMMOE_MULTICAST_ALLGATHER`
pub const MULTICAST_ALLGATHER: u32 = 2;
/// Maximum of `semmoe_dispatch_args.top_k`.
pub(crate) const MAX_TOP_K: u32 = 64;

/// # Safety
/// The structure must be `repr(C)` and begin with its size as a `u64`.
pub(crate) unsafe trait Sized64 {}

/// Defines structures as in the header, with field names and offsets for the test.
macro_rules! structures {
    ($($(#[$doc:meta])* $c_name:literal $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        #[allow(missing_docs, reason = "the header documents each field")]
        pub struct $name {
            $(pub $field: $type,)*
        }

        #[cfg(test)]
        impl $name {
            /// Returns the C name, the size, and each field's name and offset.
            pub(crate) fn layout() -> (&'static str, usize, Vec<(&'static str, usize)>) {
                ($c_name, size_of::<Self>(), vec![$((stringify!($field), std::mem::offset_of!(Self, $field)),)*])
            }
        }

        // SAFETY: this is a repr(C) structure whose first field is its size in bytes.
        unsafe impl Sized64 for $name {}
    )*};
}

structures! {
    /// See the header.
    "semmoe_init_args" InitArgs {
        struct_bytes: u64,
        device: u32,
        ordinal: i32,
        rank: u32,
        world: u32,
        buffer_bytes: u64,
        signal_bytes: u64,
        buffers: *const *mut c_void,
        signals: *const *mut c_void,
        max_tokens: u64,
        timeout_ms: u64,
    }

    /// See the header.
    "semmoe_argsort_args" Argsort {
        struct_bytes: u64,
        n: u64,
        destinations: *const i32,
        permutation: *mut i32,
        inverse: *mut i32,
        offsets: *mut i32,
    }

    /// See the header.
    "semmoe_reduce_scatter_args" ReduceScatter {
        struct_bytes: u64,
        tokens: u64,
        hidden: u64,
        dtype: u32,
        epsilon: f32,
        part_offset: u64,
        permutation: *const i32,
        offsets: *const i32,
        capacity: u64,
        out: *mut c_void,
        residual: *const c_void,
        norm_weight: *const c_void,
        residual_out: *mut c_void,
    }

    /// See the header.
    "semmoe_allgather_args" Allgather {
        struct_bytes: u64,
        tokens: u64,
        hidden: u64,
        dtype: u32,
        reserved: u32,
        out_offset: u64,
        permutation: *const i32,
        offsets: *const i32,
        capacity: u64,
        rows: *const c_void,
    }

    /// See the header.
    "semmoe_all_reduce_args" AllReduce {
        struct_bytes: u64,
        tokens: u64,
        hidden: u64,
        dtype: u32,
        reserved: u32,
        part_offset: u64,
        out_offset: u64,
    }

    /// See the header.
    "semmoe_dispatch_args" DispatchArgs {
        struct_bytes: u64,
        tokens: u64,
        hidden: u64,
        dtype: u32,
        top_k: u32,
        experts_total: u64,
        capacity: u64,
        rank_of_expert: *const i32,
        x: *const c_void,
        experts: *const i32,
        weights: *const f32,
        rows_offset: u64,
        tokens_offset: u64,
        experts_offset: u64,
        weights_offset: u64,
        source_offsets: *mut i32,
        sent_rows: *mut i32,
    }

    /// See the header.
    "semmoe_combine_args" Combine {
        struct_bytes: u64,
        tokens: u64,
        hidden: u64,
        dtype: u32,
        reserved: u32,
        capacity: u64,
        sums_offset: u64,
        sent_rows: *const i32,
        out: *mut c_void,
    }

    /// See the header.
    "semmoe_multicast_args" Multicast {
        struct_bytes: u64,
        address: *mut c_void,
        bytes: u64,
        operations: u32,
        reserved: u32,
    }
}

/// The row-related fields of a call, which have the same names in all structures; 0 or null if a structure lacks them.
#[derive(Clone, Copy, Default)]
pub(crate) struct RowFields {
    pub(crate) tokens: u64,
    pub(crate) hidden: u64,
    pub(crate) dtype: u32,
    pub(crate) reserved: u32,
    pub(crate) capacity: u64,
    pub(crate) permutation: *const i32,
    pub(crate) offsets: *const i32,
}

pub(crate) trait HasRows {
    fn rows(&self) -> RowFields;
}

macro_rules! rows {
    ($($name:ident { $($field:ident),* })*) => {$(
        #[allow(clippy::needless_update, reason = "some structures have every field")]
        impl HasRows for $name {
            fn rows(&self) -> RowFields {
                let Self { tokens, hidden, dtype, $($field,)* .. } = *self;
                RowFields { tokens, hidden, dtype, $($field,)* ..RowFields::default() }
            }
        }
    )*};
}

rows! {
    ReduceScatter { capacity, permutation, offsets }
    Allgather { reserved, capacity, permutation, offsets }
    AllReduce { reserved }
    DispatchArgs { capacity }
    Combine { reserved, capacity }
}
