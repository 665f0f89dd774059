//! A step on a GPU: it holds weights, rows and pages; the host has tokens, routes, plans and page ids.
//!
//! | module | what |
//! |---|---|
//! | `memory` | GPU memory in pieces, and transfers of numbers to and from it |
//! | `buffers` | memory for the rows of a step |
//! | `matrix` | weight matrices, row-major like the checkpoint's |
//! | `experts` | the routed experts of a rank, and the rows that they receive |
//! | `rows` | the rows of a step: their positions, their pages |
//! | `attention` | a layer's attention |
//! | `exchange` | rows to other ranks and back, and the experts between |
//! | `choose` | chooses tokens from logits |
//! | `switch` | experts and pages move to another layout |
//! | `backend` | all of it, behind the interface of backends; `load` creates it |
//!
//! T is the element type of weights, rows, keys and values; sums are in f32. In f32 a token's logits do not depend on
//! what else is in a step, as on the CPU: every sum has one order.

mod attention;
mod backend;
mod buffers;
mod choose;
mod exchange;
mod experts;
mod load;
mod matrix;
mod memory;
mod rows;
mod switch;

use std::sync::Arc;

use semmoe_kernels::Dtype;
use semmoe_kernels::collectives::{Lockstep, UnitLink};
use semmoe_kernels_cuda::Accelerator;
use semmoe_kernels_cuda::unit::Room;

pub(super) use backend::GpuBackend;
pub(super) use load::GpuLoad;
pub(super) use switch::DeviceBackend;

/// A rank's GPU: its memory, and work ordered by one stream.
pub(super) type SharedAccelerator = Arc<dyn Accelerator + Sync>;

/// A rank's settings for its GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuSettings {
    /// T: f32 or bf16.
    pub dtype: Dtype,
    /// Maximum rows of a step.
    pub step_tokens: usize,
    /// Maximum rows of a step whose logits are needed.
    pub running: usize,
    /// Pages of keys and values.
    pub pages: usize,
    /// Pages in the other attention layout, if attention may change.
    pub other_pages: usize,
}

impl GpuSettings {
    /// Room for the collectives of a unit with this many ranks.
    pub fn room(&self, ranks: usize, hidden: usize) -> Room {
        Room { ranks, rows: ranks * self.step_tokens, hidden, dtype: self.dtype }
    }
}

/// The link over which the ranks of a unit agree, shared by the host's counts and the GPU's collectives.
pub type GpuLink = UnitLink<Box<dyn Lockstep>>;
