//! Expert parallelism: tokens go to the ranks that host their experts, and the experts' sums come back.
//!
//! | module | what |
//! |---|---|
//! | `transport` | the contract: one collective, waiting, waking, errors that name a rank |
//! | `local` | W ranks as threads of one process, for tests |
//! | `tcp` | W ranks as processes, over connected TCP streams |
//! | `exchange` | one MoE layer: dispatch, local experts, combine |
//! | `inbox` | the rows that a rank was sent, grouped by expert |
//! | `wire` | the bytes of a dispatch and of a combine message |
//! | `counters` | exact counts of activations, bytes and tokens |

mod counters;
mod exchange;
mod inbox;
mod local;
mod tcp;
mod transport;
mod wire;

pub use counters::{ByPlace, Counters, CountersSnapshot, StepPhase};
pub use exchange::{ExpertParallel, LocalExperts, RoutedBatch, WorldMismatch};
pub use local::LocalTransport;
pub use tcp::TcpTransport;
pub use transport::{MAX_MESSAGE_BYTES, Transport, TransportError, Wake, Waker};
