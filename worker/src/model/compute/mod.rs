//! Numerics: matrix products with packed weights, and a transformer's element-wise functions.
//!
//! **Batch invariance.** Every sum has a fixed order that depends only on absolute positions, never on how many rows
//! are computed together. A token's result is therefore bitwise equal whether it is computed alone or in a batch, and
//! however its prompt is chunked.
//!
//! | module | what |
//! |---|---|
//! | `arena` | large allocations backed by huge pages and divided into pieces |
//! | `isa` | instruction sets and their selection at run time |
//! | `gemm`, `tile` | `A x B` over panels of 32 columns, and its loops |
//! | `avx512`, `avx2`, `portable` | the innermost operations by instruction set; `pairs` implements the first two |
//! | `linear` | a weight matrix packed into panels |
//! | `ops` | norms, rotary embedding, softmax, SiLU, argmax |

mod arena;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod gemm;
mod isa;
mod linear;
mod ops;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod portable;
mod tile;

pub(super) use arena::{Arena, Piece};
pub(super) use gemm::{Begin, Columns, Matrix, NR, Sizes, group_of, multiply, multiply_from};
pub(super) use linear::{Linear, PanelType};
pub(super) use ops::{
    add, add_scaled, clamp, first_largest, rms_norm, rotate, rotate_pairs, scale_to, silu_product, softmax,
};

/// Returns the instruction set that matrix products use on this machine: `avx512`, `avx2` or `portable`.
pub(crate) fn instructions() -> &'static str {
    isa::Isa::best().name()
}
