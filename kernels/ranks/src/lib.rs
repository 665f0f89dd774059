//! The collectives of `semmoe-kernels` between threads or processes of one machine: shared memory, signal words,
//! deadlines.
//!
//! Every rank has a *symmetric buffer*, which all ranks can access, and *signals*. A [`Communicator`] is one rank's
//! end. A collective is entered when all ranks have arrived, works directly on the buffers of the others (without a
//! copy in between), and is left when all have finished, so each may then overwrite its buffer. Each arrival is an
//! epoch, counted from 1 and never reset.
//!
//! | module | what |
//! |---|---|
//! | `memory` | memory mapped by several processes: [`create_memory`], [`attach_memory`] |
//! | `bell` | a word on which threads of any process can sleep: [`Bell`] |
//! | `region` | memory of a group of one process: [`threads`] |
//! | `span` | a typed range in every rank's symmetric buffer |
//! | `signals` | the words by which ranks communicate |
//! | `barrier` | arriving, waiting with a deadline, noticing who left |
//! | `call` | a rank's next call, compared with the others before any data changes |
//! | `communicator` | one rank's end: its buffer and its lifecycle |
//! | `reduce`, `exchange` | the collectives |
//! | `halves` | rows that peers read in place, for [`semmoe_kernels::collectives`]: [`SharedHalves`] |
//! | `experts` | expert buffers that peers read in place, for [`semmoe_kernels::reshard`]: [`SharedExperts`] |
//! | `huge` | mappings in huge pages |
//! | `local` | messages between threads: [`LocalTransport`] |
//!
//! A rank that does not arrive within the time limit causes an error that names it and the epoch, on every waiting
//! rank. If ranks disagree on shapes, all get an error and can continue.

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

/// Maximum ranks of a group: a token's ranks are the bits of one word.
pub const MAX_WORLD: usize = 64;

/// Maximum row width of the fused norm.
pub const MAX_NORM_WIDTH: usize = 1 << 16;
