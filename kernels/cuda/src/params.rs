//! The kernels' parameters, byte for byte as the CUDA sources declare them.
//!
//! The size of [`LaunchParams::as_bytes`] is compared with the size that a compiled kernel expects: by the shim at each
//! launch, by the driver at each load.

/// Maximum number of ranks in a team (`MAX_RANKS`).
pub const MAX_RANKS: usize = 64;
/// Maximum number of ranks in one launch, which share a GPU (`MAX_LOCAL`).
pub const MAX_LOCAL: usize = 8;
/// Maximum number of blocks per rank (`MAX_BLOCKS`).
pub const MAX_BLOCKS: u32 = 256;
/// Threads of a warp.
pub(crate) const WARP: u32 = 32;
/// Maximum number of threads per block of a collective (`COLLECTIVE_THREADS`).
pub const COLLECTIVE_THREADS: u32 = 512;
/// Exact number of threads per block in the fused norm (`NORM_THREADS`).
pub const NORM_THREADS: u32 = 256;
/// Maximum number of threads of the block that sorts (`SORT_THREADS`).
pub const SORT_THREADS: u32 = 1024;
/// Maximum width of a row that the fused norm keeps in registers.
pub const MAX_NORM_HIDDEN: u32 = 8192;
/// Size of one rank's signals (`Signals`), for any number of ranks and tokens.
pub const SIGNAL_BYTES: u64 =
    (MAX_BLOCKS as u64) * 4 + 2 * (MAX_BLOCKS as u64) * (MAX_RANKS as u64) * 8 + (MAX_RANKS as u64) * 4;

/// An address in device memory; 0 is null.
pub(crate) type Raw = u64;
/// Indexed by `blockIdx.y`.
pub(crate) type Local = [Raw; MAX_LOCAL];
/// Indexed by rank.
pub(crate) type Peers = [Raw; MAX_RANKS];

/// Parameters whose bytes are all initialized.
///
/// # Safety
/// All fields must be integers or floats, and `padding` must fill every hole.
pub(crate) unsafe trait Params: Copy {}

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }
        // SAFETY: the size checks below rule out padding.
        unsafe impl Params for $name {}
    )* };
}
pub(crate) use params;

params! {
    /// `Team`
    TeamParams { ranks: u32, first_rank: u32, timeout_ns: u64, report: Local, signals: Peers }
    /// The common end of `ReduceParams` and `GatherParams`
    OrderParams {
        permutation: Local, offsets: Local, multicast: Raw, tokens: u32, hidden: u32, capacity: u32, padding: u32,
    }
    /// `ReduceParams`
    ReduceParams { team: TeamParams, parts: Peers, out: Local, order: OrderParams }
    /// `NormParams`
    NormParams {
        reduce: ReduceParams, residual: Local, weight: Local, residual_out: Local, epsilon: f32, padding: u32,
    }
    /// `GatherParams`
    GatherParams { team: TeamParams, rows: Local, out: Peers, order: OrderParams }
    /// `AllReduceParams`
    AllReduceParams { team: TeamParams, parts: Peers, out: Peers, elements: u64 }
    /// `ShuffleParams`
    ShuffleParams {
        from: Local, to: Local, permutation: Local, report: Local, rows: u32, hidden: u32, back: u32, padding: u32,
    }
    /// `ArgsortParams`
    ArgsortParams {
        destinations: Local, permutation: Local, inverse: Local, offsets: Local, report: Local, items: u32, ranks: u32,
    }
    /// `PlanParams`
    PlanParams {
        experts: Local, rank_of_expert: Local, places: Local, signals: Local, report: Local,
        tokens: [u32; MAX_LOCAL], top_k: u32, experts_in_all: u32, ranks: u32, padding: u32,
    }
    /// `DispatchParams`
    DispatchParams {
        team: TeamParams, x: Local, experts: Local, weights: Local, rank_of_expert: Local, sent_rows: Local,
        source_offsets: Local, rows: Peers, tokens: Peers, row_experts: Peers, row_weights: Peers,
        local_tokens: [u32; MAX_LOCAL], hidden: u32, top_k: u32, capacity: u32, padding: u32,
    }
    /// `CombineParams`
    CombineParams {
        team: TeamParams, sums: Peers, sent_rows: Local, out: Local, local_tokens: [u32; MAX_LOCAL],
        hidden: u32, capacity: u32,
    }
    /// `ReshardParams`
    ReshardParams {
        team: TeamParams, from: Peers, to: Local, moves: Local, counts: [u32; MAX_LOCAL],
        from_bytes: u64, to_bytes: u64, digest: u32, step: u32,
    }
    /// `PackParams`
    PackParams {
        team: TeamParams, x: Local, places: Local, rows: Peers, limits: [u32; MAX_RANKS],
        local_tokens: [u32; MAX_LOCAL], hidden: u32, padding: u32,
    }
    /// `UnpackParams`
    UnpackParams { combine: CombineParams, limits: [u32; MAX_RANKS] }
}

/// Maximum size of a kernel's parameters.
const MAX_PARAM_BYTES: usize = 4096;

/// The parameters of one launch, on the stack, so that a launch allocates nothing.
#[derive(Clone, Copy)]
pub(crate) struct LaunchParams {
    words: [u64; MAX_PARAM_BYTES / 8],
    bytes: usize,
}

impl LaunchParams {
    pub(crate) fn of<P: Params>(params: &P) -> Self {
        const { assert!(size_of::<P>() <= MAX_PARAM_BYTES) };
        let mut words = [0; MAX_PARAM_BYTES / 8];
        // SAFETY: `Params` guarantees that every byte is initialized.
        let bytes: &[u8] = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast(), size_of::<P>()) };
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self { words, bytes: bytes.len() }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }
}

/// The sums of the field sizes, which structs have if there is no hidden padding.
const LOCAL: usize = MAX_LOCAL * 8;
const PEERS: usize = MAX_RANKS * 8;
const TEAM: usize = 16 + LOCAL + PEERS;
const REDUCE: usize = TEAM + PEERS + 3 * LOCAL + 24;
const _: () = {
    assert!(size_of::<TeamParams>() == TEAM);
    assert!(size_of::<ReduceParams>() == REDUCE);
    assert!(size_of::<NormParams>() == REDUCE + 3 * LOCAL + 8);
    assert!(size_of::<GatherParams>() == REDUCE);
    assert!(size_of::<AllReduceParams>() == TEAM + 2 * PEERS + 8);
    assert!(size_of::<ShuffleParams>() == 4 * LOCAL + 16);
    assert!(size_of::<ArgsortParams>() == 5 * LOCAL + 8);
    assert!(size_of::<PlanParams>() == 5 * LOCAL + LOCAL / 2 + 16);
    assert!(size_of::<DispatchParams>() == TEAM + 6 * LOCAL + 4 * PEERS + LOCAL / 2 + 16);
    assert!(size_of::<CombineParams>() == TEAM + PEERS + 2 * LOCAL + LOCAL / 2 + 8);
    assert!(size_of::<ReshardParams>() == TEAM + PEERS + 2 * LOCAL + LOCAL / 2 + 24);
    assert!(size_of::<PackParams>() == TEAM + 2 * LOCAL + PEERS + 4 * MAX_RANKS + LOCAL / 2 + 8);
    assert!(size_of::<UnpackParams>() == size_of::<CombineParams>() + 4 * MAX_RANKS);
    assert!(size_of::<DispatchParams>() <= MAX_PARAM_BYTES);
};
