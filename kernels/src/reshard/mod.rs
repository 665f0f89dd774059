//! Changes a unit's expert layout in place: plans a switch as a list of moves and executes them.
//!
//! Each rank stores the experts of all K layers in one buffer whose address never changes. Under expert parallelism
//! (EP) a rank has complete experts; under tensor parallelism (TP) it has a *slice* of every expert, which is part of
//! the intermediate width; in a hybrid layout it has a slice of each of its node's experts. A switch converts one
//! layout into another, including EP(E) -> EP(E'), layer by layer, with one spare slot and no staging area (ParaSMoE,
//! section 3.2, needs two spare slots and Moebius, section 3, needs one; both require contiguous experts under EP).
//!
//! | module | contents |
//! |---|---|
//! | `shape` | an expert's arrays and where they may be split; nodes and ranks |
//! | `layout` | which experts each rank hosts; where each layer's slot starts in the buffer |
//! | `plan` | [`Switch`]: each layer's moves, the layer order, the reverse switch |
//! | `checksum` | one checksum per (layer, expert, slice), independent of the layout |
//! | `execute` | [`Resharder`]: one rank's side of a switch and its rollback |
//! | `pipeline` | overlaps exchanging bytes with placing earlier ones; votes; progress |
//! | `transfer` | a layer's moves: direct copies from memory within reach, messages otherwise |
//! | `round` | message headers and votes |
//! | `memory` | [`ExpertMemory`]: an executor's access to a rank's memory |
//! | [`kv`] | plans the moves of the KV cache |
//!
//! # Why in-place moves are safe
//! A layout occupies one [`Side`] of the buffer: its slots fill either the low end or the high end. A switch always
//! moves to the other side: high to low in ascending layer order, low to high in descending order. With S bytes per
//! slot before the switch and S' after it, the buffer has at least `max(S + K S', K S + S')` bytes, so on every rank
//! the new slot of layer i overlaps neither the old slot of a layer still to be moved **nor layer i's own old slot**. A
//! rank writes only to its own memory. Ranks therefore need no ordering within a layer, and one barrier after each
//! layer suffices: it ensures that every reader of that layer has finished. Bytes of later layers may be read at any
//! time.
//!
//! The side is part of the state: it flips with every switch. EP -> TP -> EP returns to the same addresses, but EP(E)
//! -> EP(E') ends on the other side, one slot away. Callers that need fixed addresses for each layout, as CUDA graphs
//! do, follow it with a switch E' -> E', which copies within each rank and moves nothing between ranks.
//!
//! # Example
//! Switches four experts on two ranks from EP to TP:
//! ```
//! use semmoe_kernels::NodeGrid;
//! use semmoe_kernels::reshard::{ExpertShape, Hosts, Layout, Move, Pool, Side, Switch};
//!
//! let grid = NodeGrid::of_nodes(1, 2)?;
//! // Each expert has 2 slices of 64 bytes, packed separately.
//! let pool = Pool::new(ExpertShape::slice_major(2, 64)?, grid, 4, 3, 2)?;
//! // In each of the 3 layers, rank 0 hosts experts 0 and 3, rank 1 hosts 1 and 2.
//! let ep = Layout::Ep(Hosts::new(4, 2, vec![vec![0, 3, 1, 2]; 3])?);
//! let switch = Switch::new(&pool, &ep, &Layout::Tp, Side::High)?;
//!
//! let mut moves = Vec::new();
//! switch.moves(0, &mut moves);
//! // Rank 1 needs slice 1 of all four experts; that of expert 3 is on rank 0, in slot 1 of layer 0.
//! let expert_3: Vec<&Move> = moves.iter().filter(|m| m.to.rank == 1 && m.expert == 3).collect();
//! assert_eq!((expert_3[0].from.rank, expert_3[0].bytes), (0, 64));
//! assert_eq!(expert_3[0].from.offset, pool.slot(&ep, Side::High, 0).start + 128 + 64);
//! // 3 layers of 4 x 64 bytes, plus one spare slot.
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
