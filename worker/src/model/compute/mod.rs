//! The numbers: matrix products with packed weights, and the element-wise functions of a transformer.
//!
//! **Batch invariance.** Every sum has one fixed order that depends on absolute positions only, never on how many rows are
//! computed together: a token's result is bitwise the same alone, in a batch, and whichever way its prompt was cut.
//!
//! | module | what |
//! |---|---|
//! | `isa` | the instruction sets and the choice at run time |
//! | `gemm` | `A x B` over panels of 32 columns; `avx512`, `avx2`, `portable` are its inner loops |
//! | `linear` | a weight matrix packed into panels |
//! | `ops` | norms, rotary embedding, softmax, SiLU |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod gemm;
mod isa;
mod linear;
mod ops;
mod portable;

pub(super) use gemm::{Columns, Matrix, NR, multiply};
pub(super) use linear::Linear;
pub(super) use ops::{add, rms_norm, rotate, scale_to, silu_product, softmax};
