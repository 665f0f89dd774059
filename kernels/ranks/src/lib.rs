//! The collectives of `semmoe-kernels` between threads or processes on one machine: shared memory, signal words,
//! deadlines.
//!
//! Every rank has a *symmetric buffer*, which all ranks can access, and *signals*. A [`Communicator`] is one rank's
//! end. A collective starts once all ranks have arrived, works directly on the buffers of the others without
//! intermediate copies, and ends once all ranks have finished, after which each may overwrite its buffer. Each arrival
//! is an epoch, counted from 1 and never reset.
//!
//! | module | contents |
//! |---|---|
//! | `memory` | memory mapped by several processes: [`create_memory`], [`attach_memory`] |
//! | `bell` | a word on which threads of any process can sleep: [`Bell`] |
//! | `region` | memory for a group within one process: [`threads`] |
//! | `span` | a typed range in every rank's symmetric buffer |
//! | `signals` | the words by which ranks communicate |
//! | `barrier` | arrival, waiting with a deadline, detecting ranks that left |
//! | `call` | a rank's next call, compared with the other ranks' before any data changes |
//! | `communicator` | one rank's end: its buffer and its lifecycle |
//! | `reduce`, `exchange` | the collectives |
//! | `halves` | rows that peers read in place, for [`semmoe_kernels::collectives`]: [`SharedHalves`] |
//! | `experts` | expert buffers that peers read in place, for [`semmoe_kernels::reshard`]: [`SharedExperts`] |
//! | `huge` | mappings in huge pages |
//! | `local` | messages between threads: [`LocalTransport`] |
//!
//! If a rank does not arrive within the time limit, every waiting rank gets an error that states the rank and the
//! epoch. If ranks disagree on shapes, all get an error and can continue.

mod barrier;
mod bell;
mod call;
mod communicator;
mod error;
mod exchange;
mod experts;
mod halves;
mod huge;
mod local;
mod memory;
mod reduce;
mod region;
mod signals;
mod span;

pub use bell::Bell;
pub use communicator::{Communicator, RawGroup};
pub use error::RankError;
pub use exchange::{Dispatch, Received, Routes};
pub use experts::{BufferAddress, SharedExperts};
pub use halves::{SharedHalves, halves_bytes};
pub use local::LocalTransport;
pub use memory::{attach_memory, create_memory};
pub use region::threads;
pub use semmoe_kernels::collectives::Norm;
pub use signals::SIGNAL_BYTES;
pub use span::{ALIGNMENT, Span};

/// Maximum number of ranks in a group: a token's ranks are the bits of one word.
pub const MAX_WORLD: usize = 64;

/// Maximum row width of the fused norm.
pub const MAX_NORM_WIDTH: usize = 1 << 16;
