//! Collectives that move tokens to the ranks of their experts: their operands, and the inner loops on the CPU.
//!
//! `tests/reference` defines every collective over all ranks at once; all backends match it bit for bit.
//!
//! Functions take and return plain slices: no threads, no transport, and no allocation per call once the caller's
//! scratch has grown. P = ranks, n = tokens, m = rows of one rank, k = experts per token, N = experts, H = width of a
//! row, R = rows sent (a token is sent once to each rank that hosts at least one of its experts, so n <= R <= n x
//! min(k, P)).
//!
//! Example: four tokens on two ranks, each of which hosts two experts.
//!
//! ```
//! use semmoe_kernels::{DispatchPlan, RankOrder, argsort_by_rank};
//!
//! let experts = [0, 1, 2, 3, 0, 2, 1, 0]; // [n, k]
//! let weights = [0.5; 8];
//! let rank_of_expert = [0, 0, 1, 1];
//! let mut plan = DispatchPlan::default();
//! plan.build(&experts, &weights, 2, &rank_of_expert, 2)?;
//! // The third token goes to both ranks, the others to one each.
//! assert_eq!((plan.rank(0).tokens, plan.rank(1).tokens), (&[0, 2, 3][..], &[1, 2][..]));
//!
//! // Sorts rows by the rank that processes them next; the inverse restores their order.
//! let mut order = RankOrder::default();
//! argsort_by_rank(&[1u16, 0, 1, 0], 2, &mut order)?;
//! assert_eq!((order.permutation(), order.inverse()), (&[1, 3, 0, 2][..], &[2, 0, 3, 1][..]));
//! # Ok::<(), semmoe_kernels::KernelError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `element` | f32, f16, bf16: conversions that match a GPU bit for bit |
//! | [`collectives`] | the collectives as one rank calls them, over messages and shared memory |
//! | `argsort` | stable order of items by destination: permutation, inverse, offsets |
//! | `hash` | order-dependent hash of words, for digests that ranks compare |
//! | `nodes` | a unit's ranks on their nodes: inside a node, across nodes |
//! | `split` | which rows belong to which rank: contiguous or shuffled parts |
//! | `operands` | operands of all backends: routed tokens, a residual and its norm |
//! | `norm` | RMSNorm in a fixed order of additions |
//! | `dispatch` | which token is sent to which rank, with which experts and weights |
//! | `vector` | sums and norms of rows, vectorised for the CPU |
//! | `rows` | adds an expert's weighted output rows to the rows of their tokens |
//! | [`reshard`] | a unit's switch from one expert layout to another: its plan and execution |

mod argsort;
pub mod collectives;
mod dispatch;
mod element;
mod error;
mod hash;
mod nodes;
mod norm;
mod operands;
pub mod reshard;
mod rows;
mod split;
mod vector;

pub use argsort::{Destination, RankOrder, argsort_by_rank, argsort_into};
pub use dispatch::{DispatchPlan, RankRows};
pub use element::{Dtype, Element};
pub use error::{KernelError, check_below, check_len};
pub use hash::mix;
pub use nodes::NodeGrid;
pub use norm::{NORM_LANES, inverse_rms};
pub use operands::{NO_EXPERT, NO_ROW, ResidualNorm, RoutedTokens};
pub use rows::add_weighted_rows;
pub use split::{RowSplit, SeenTokens, even_offsets, even_part};
pub use vector::{NormRow, norm_row, prefetch, sum_rows, sum_rows_wide};
