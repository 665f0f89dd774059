//! Runs steps on a GPU, which stores weights, activations and KV cache pages; tokens, routes, plans and page ids stay
//! on the host.
//!
//! | module | what |
//! |---|---|
//! | `memory` | GPU allocations divided into pieces, and transfers between host and GPU |
//! | `buffers` | memory for a step's rows |
//! | `matrix` | weight matrices, row-major as in the checkpoint |
//! | `experts` | a rank's routed experts, and lists of the rows sent to them |
//! | `rows` | the positions and pages of a step's rows |
//! | `attention` | one layer's attention |
//! | `exchange` | sends rows to other ranks and back, and applies the experts in between |
//! | `choose` | selects tokens from logits |
//! | `peers` | maps other ranks' memory |
//! | `switch` | moves experts and pages to another layout |
//! | `backend`, `load` | combine all of this behind the compute backend interface |
//!
//! T is the element type of weights, activations, keys and values; sums are accumulated in f32. In f32, a token's
//! logits do not depend on the rest of its step, as on the CPU, because every sum has a fixed order.

mod attention;
mod backend;
mod buffers;
mod choose;
mod exchange;
mod experts;
mod load;
mod matrix;
mod memory;
mod peers;
mod rows;
mod switch;

use std::sync::Arc;

use semmoe_kernels::Dtype;
use semmoe_kernels::collectives::{Lockstep, UnitLink};
use semmoe_kernels_cuda::Accelerator;
use semmoe_kernels_cuda::unit::Room;

use super::ModelConfig;

pub(super) use backend::GpuBackend;
pub(super) use load::GpuLoad;
pub(crate) use peers::meet;
pub(super) use switch::DeviceBackend;

/// A rank's GPU: its memory and a stream that orders its work.
pub(super) type SharedAccelerator = Arc<dyn Accelerator + Sync>;

/// GPU settings of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuSettings {
    /// T: f32 or bf16.
    pub dtype: Dtype,
    /// Maximum number of rows per step.
    pub step_tokens: usize,
    /// Maximum number of rows per step whose logits are needed.
    pub running: usize,
    /// Number of KV cache pages.
    pub pages: usize,
    /// Number of KV cache pages in the other attention layout, if attention can switch.
    pub other_pages: usize,
}

impl GpuSettings {
    /// Returns the buffer sizes for the collectives of a unit with this many ranks.
    pub fn room(&self, ranks: usize, model: &ModelConfig) -> Room {
        let (hidden, top_k) = (model.hidden, model.top_k);
        Room { ranks, rows: ranks * self.step_tokens, hidden, top_k, dtype: self.dtype }
    }
}

/// The link over which a unit's ranks synchronise, shared by the host's counts and the GPU's collectives.
pub type GpuLink = UnitLink<Box<dyn Lockstep>>;
