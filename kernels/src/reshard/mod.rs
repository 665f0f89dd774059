//! Changes a unit's expert layout in place: the moves of a switch as data, and their execution.
//!
//! Each rank keeps the experts of all K layers in one buffer whose address never changes. Expert parallelism (EP) gives
//! a rank complete experts, tensor parallelism (TP) a *slice* of every expert: part of its intermediate width. A switch
//! goes from one layout to another, including EP(E) -> EP(E'), layer by layer, with one spare slot and no staging area
//! (ParaSMoE section 3.2 and Moebius section 3 have two extra slots and one; both fix E to contiguous experts).
//!
//! | module | what |
//! |---|---|
//! | `shape` | the bytes of an expert and where they may be split; nodes and ranks |
//! | `layout` | which experts a rank hosts; where a layer's slot begins in the buffer |
//! | `plan` | [`Switch`]: the moves of each layer, the order of layers, the inverse |
//! | `checksum` | a checksum for each (layer, expert, slice), equal in all layouts |
//! | `execute` | [`Resharder`]: one rank's part of a switch, rollback |
//! | `pipeline` | layers in order, votes, journal: bytes travel while those before are placed |
//! | `transfer` | a layer's moves, over memory within reach and messages otherwise |
//! | `round` | messages, their heads and votes |
//! | `memory` | [`ExpertMemory`]: an executor's access to a rank's memory |
//! | [`kv`] | the moves of keys and values |
//!
//! # Why it is safe
//! A layout is at one [`Side`] of the buffer: its slots fill the low end, or the high end. A switch always goes to the
//! other side, high to low in ascending order of layers, low to high in descending order. With S bytes per slot before
//! and S' after, the buffer has at least `max(S + K S', K S + S')` bytes, so on every rank the new slot of layer i
//! overlaps no old slot of a layer that is still to move, **nor layer i's own**. A rank writes only its own memory. So
//! within a layer ranks need no order among themselves, and one barrier after each layer suffices: it ensures that
//! every reader of that layer has finished. Bytes of later layers may be read at any time.
//!
//! The side is part of the state, as the parity of all switches so far: EP -> TP -> EP returns to the same addresses,
//! but EP(E) -> EP(E') ends at the other side, one slot away. Callers that need fixed addresses for each layout (CUDA
//! graphs) follow it with a switch E' -> E', which copies within each rank and moves nothing between ranks.
//!
//! # Example
//! Four experts on two ranks go from EP to TP.
//! ```
//! use semmoe_kernels::NodeGrid;
//! use semmoe_kernels::reshard::{ExpertShape, Hosts, Layout, Move, Pool, Side, Switch};
//!
//! let grid = NodeGrid::of_nodes(1, 2)?;
//! // Experts of 2 slices of 64 bytes, each slice packed by itself.
//! let pool = Pool::new(ExpertShape::slice_major(2, 64)?, grid, 4, 3, 2)?;
//! // In each of 3 layers rank 0 hosts experts 0 and 3, rank 1 hosts 1 and 2.
//! let ep = Layout::Ep(Hosts::new(4, 2, vec![vec![0, 3, 1, 2]; 3])?);
//! let switch = Switch::new(&pool, &ep, &Layout::Tp, Side::High)?;
//!
//! let mut moves = Vec::new();
//! switch.moves(0, &mut moves);
//! // Rank 1 needs slice 1 of all four experts; of expert 3 it is at rank 0, in slot 1 of layer 0.
//! let expert_3: Vec<&Move> = moves.iter().filter(|m| m.to.rank == 1 && m.expert == 3).collect();
//! assert_eq!((expert_3[0].from.rank, expert_3[0].bytes), (0, 64));
//! assert_eq!(expert_3[0].from.offset, pool.slot(&ep, Side::High, 0).start + 128 + 64);
//! // 3 layers of 4 x 64 bytes, and one spare slot.
//! assert_eq!(pool.bytes(), 4 * 256);
//! # Ok::<(), semmoe_kernels::reshard::ReshardError>(())
//! ```

mod checksum;
mod error;
mod execute;
pub mod kv;
mod layout;
mod memory;
mod pipeline;
mod plan;
mod round;
mod shape;
mod transfer;

pub use checksum::{Checksums, PieceHash, PieceId};
pub use error::{Fault, MemoryCause, MemoryFault, Reason, Refusal, ReshardError, SwitchError};
pub use execute::{Outcome, Resharder};
pub use layout::{Hosts, Layout, NO_HOST, Part, Place, Pool, Side, Slot};
pub use memory::ExpertMemory;
pub use pipeline::Progress;
pub use plan::{Move, Switch};
pub use shape::{ExpertArray, ExpertShape};
