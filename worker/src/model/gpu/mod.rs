//! A step on a GPU: weights, rows and pages lie there; the host knows tokens, routes, plans and page ids.
//!
//! | module | what |
//! |---|---|
//! | `memory` | memory of the GPU in pieces, and the numbers that go there and back |
//! | `buffers` | memory for the rows of a step |
//! | `matrix` | weight matrices as they stand in the checkpoint |
//! | `experts` | the routed experts of a rank, and the rows that they are sent |
//! | `rows` | the rows of a step: their positions, their pages |
//! | `attention` | a layer's attention |
//! | `exchange` | rows to other ranks and back, and the experts between |
//! | `changes` | experts and pages move to another layout |
//! | `backend` | all of it, behind the interface of backends; `load` is how it begins |
//!
//! T is the element type of weights, rows, keys and values; sums are in f32. In f32 a token's logits do not depend on
//! what else is in a step, as on the CPU: every sum has one order.

mod attention;
mod backend;
mod buffers;
mod changes;
mod exchange;
mod experts;
mod load;
mod matrix;
mod memory;
mod rows;

use std::sync::Arc;

use semmoe_kernels::Dtype;
use semmoe_kernels::collectives::{Lockstep, UnitLink};
use semmoe_kernels_cuda::Accelerator;
use semmoe_kernels_cuda::unit::Room;

pub(super) use backend::GpuBackend;
pub(super) use changes::DeviceBackend;
pub(super) use load::GpuLoad;

/// A rank's GPU: its memory, and work in the order of one stream.
pub(super) type SharedAccelerator = Arc<dyn Accelerator + Sync>;

/// How a rank is to use its GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuSettings {
    /// T: f32 or bf16.
    pub dtype: Dtype,
    /// The most rows of a step.
    pub step_tokens: usize,
    /// The most rows of a step whose logits are wanted.
    pub running: usize,
    /// Pages of keys and values.
    pub pages: usize,
    /// Pages with the other attention, where it may change.
    pub other_pages: usize,
}

impl GpuSettings {
    /// Room for the collectives of a unit of so many ranks.
    pub fn room(&self, ranks: usize, hidden: usize) -> Room {
        Room { ranks, rows: ranks * self.step_tokens, hidden, dtype: self.dtype }
    }
}

/// The link over which the ranks of a unit agree, shared by what the host counts and by the collectives of the GPU.
pub type GpuLink = UnitLink<Box<dyn Lockstep>>;
