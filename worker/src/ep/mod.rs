//! Expert parallelism: tokens are sent to the ranks that host their experts, and the experts' sums return.
//!
//! | module | what |
//! |---|---|
//! | `exchange` | one MoE layer: dispatch, local experts, combine; attention tp's collectives; each counted and timed |
//! | `placement` | where the experts of a model are |
//! | `hosts` | the places of one layer's experts, as a rank looks them up |
//! | `inbox` | the rows that a rank received, expert by expert |
//! | `wire` | the element type of rows on the wire |
//! | `links` | one link to each other rank |
//! | `stream` | W ranks as processes: messages and failures over a byte stream between every two of them |
//! | `tcp` | those streams over TCP |
//! | `shm` | those streams over memory that the processes of one host share |
//! | `poll` | waiting for sockets |
//! | `forced` | overrides the router's choice, to measure the cost of sending |
//! | `counters` | exact counts of activations, bytes and tokens |
//! | `traffic` | the counts of one layer |
//! | `stages` | when the stages of each layer began and ended |
//! | `timings` | where the time of a step goes |
//!
//! The collectives themselves are in `semmoe_kernels::collectives`; this module has their carriers and their callers.

mod counters;
mod exchange;
mod forced;
mod hosts;
mod inbox;
mod layout;
mod links;
mod placement;
mod poll;
mod shm;
mod stages;
mod stream;
mod tcp;
mod timings;
mod traffic;
mod wire;

pub use counters::{ByPlace, Collective, Counters, LayerTraffic, LevelBytes, RowCounts, StepPhase, Traffic};
pub use exchange::{ExpertParallel, ExpertsLost, LocalExperts, RoutedBatch, WorldMismatch};
pub use forced::ForcedRate;
#[cfg(feature = "gpu")]
pub(crate) use hosts::{LayerHosts, NotHere};
pub use layout::{ExpertLayout, NodeLayout, RankGroups, SwitchableRows};
pub use placement::ExpertPlacement;
pub(crate) use poll::poll_until;
pub(crate) use semmoe_kernels::collectives::{AllRows, Norm, OwnRows};
pub use semmoe_kernels::collectives::{Lockstep, MAX_MESSAGE_BYTES, UnitError, Wake, Waker};
pub use semmoe_ranks::LocalTransport;
pub(crate) use shm::ShmError;
pub use shm::{MAX_SHARED_WORLD, ShmMemory, ShmTransport};
pub use stages::StageLog;
pub use tcp::TcpTransport;
pub use timings::{LayerTimings, StepBatch, StepCount, TimedCollective, Timings};
pub use wire::{UnknownName, WireRows, WireType};
