//! Expert parallelism: tokens are sent to the ranks that host their experts, and the experts' sums return.
//!
//! | module | what |
//! |---|---|
//! | `exchange` | one MoE layer: dispatch, local experts, combine; the attention tp collectives; each counted and timed
//! |
//! | `placement` | the layout and placement of a model's experts |
//! | `hosts` | lookup tables for one layer's expert locations |
//! | `inbox` | the rows that a rank received, processed expert by expert |
//! | `wire` | the element type of rows on the wire |
//! | `links` | validation of the links to the other ranks |
//! | `stream` | messages and failure reports over a byte stream between each pair of rank processes |
//! | `tcp` | streams over TCP |
//! | `shm` | streams over shared memory, for processes on one host |
//! | `poll` | polling sockets |
//! | `forced` | overrides the router's choice, to measure the cost of sending |
//! | `counters` | exact counts of activations, bytes and tokens |
//! | `traffic` | the counts of one layer |
//! | `stages` | start and end times of each layer's stages |
//! | `timings` | breakdown of step time |
//!
//! The collectives themselves are in `semmoe_kernels::collectives`; this module contains their transports and callers.

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
pub use layout::{ExpertLayout, NodeLayout, RankGroups, SwitchTargets, SwitchableRows};
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
