//! Dispatch and combine for expert parallelism: the CPU reference.
//!
//! Plain slices in, plain slices out: no threads, no transport, no allocation per call once the caller's scratch has grown.
//! P = ranks, n = tokens of this rank, k = experts per token, N = experts, H = width of a row, R = rows that are sent
//! (a token goes once to each rank that hosts at least one of its experts, so n <= R <= n x min(k, P)).
//!
//! | module | what |
//! |---|---|
//! | `argsort` | stable order of items by destination: permutation, inverse, offsets |
//! | `dispatch` | which token goes to which rank, with which experts and weights |
//! | `combine` | the ranks' partial sums back into the tokens' order, in rank order |
//! | `rows` | gather rows, and add weighted rows where they came from |

mod argsort;
mod combine;
mod dispatch;
mod error;
mod rows;

pub use argsort::{RankOrder, argsort_by_rank};
pub use combine::combine;
pub use dispatch::{DispatchPlan, RankRows};
pub use error::KernelError;
pub use rows::{add_weighted_rows, gather_rows};
