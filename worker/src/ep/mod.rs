//! Expert parallelism: tokens go to the ranks that host their experts, and the experts' sums come back.
//!
//! | module | what |
//! |---|---|
//! | `transport` | the contract: one collective, waiting, waking, errors that name a rank |
//! | `local` | W ranks as threads of one process, for tests |
//! | `stream` | W ranks as processes: messages and failures over a byte stream between every two of them |
//! | `tcp` | those streams over TCP |
//! | `shm` | those streams over memory that the processes of one host share |
//! | `poll` | waiting for sockets |
//! | `exchange` | one MoE layer: dispatch, local experts, combine |
//! | `sends` | which rows go to which rank: by expert, or everywhere |
//! | `shuffle` | attention tp: reduce-scatter, allgather, and word to all ranks |
//! | `inbox` | the rows that a rank was sent, grouped by expert |
//! | `wire` | the bytes of a dispatch and of a combine message |
//! | `counters` | exact counts of activations, bytes and tokens |
//! | `timings` | where the time of a step goes |

mod counters;
mod exchange;
mod inbox;
mod local;
mod poll;
mod sends;
mod shm;
mod shuffle;
mod stream;
mod tcp;
mod timings;
mod transport;
mod wire;

pub(crate) use counters::RowCounts;
pub use counters::{ByPlace, Collective, Counters, CountersSnapshot, LayerTraffic, StepPhase, Traffic};
pub use exchange::{ExpertParallel, LocalExperts, RoutedBatch, WorldMismatch};
pub use local::LocalTransport;
pub use sends::ExpertLayout;
pub(crate) use shm::ShmError;
pub use shm::{MAX_SHARED_WORLD, ShmMemory, ShmTransport};
pub(crate) use shuffle::{AllRows, OwnRows};
pub use tcp::TcpTransport;
pub use timings::{LayerTimings, TimedCollective, Timings};
pub use transport::{MAX_MESSAGE_BYTES, Transport, TransportError, Wake, Waker};
