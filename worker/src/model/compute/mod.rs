//! Numerics: matrix products with packed weights, and the element-wise functions of a transformer.
//!
//! **Batch invariance.** Every sum has one fixed order that depends only on absolute positions, never on how many rows
//! are computed together: a token's result is bitwise equal alone, in a batch, and for any chunking of its prompt.
//!
//! | module | what |
//! |---|---|
//! | `arena` | large memory in huge pages, handed out in pieces |
//! | `isa` | the instruction sets and their selection at run time |
//! | `gemm`, `tile` | `A x B` over panels of 32 columns, and its loops; `avx512`, `avx2` (by `pairs`), `portable` are
//! the innermost |
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

/// The instruction set that products use on this machine: `avx512`, `avx2` or `portable`.
pub(crate) fn instructions() -> &'static str {
    isa::Isa::best().name()
}
