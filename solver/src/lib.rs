//! Solves for tables, given a profile and traces, and evaluates tables. The README describes the method and its
//! equations.
//!
//! * [`solve`]: co-clusters tokens or requests with experts by alternating exact steps, and builds T, A and E.
//! * [`solve_paper`]: uses the paper's Algorithm 1 instead; [`TokenAssigner`]: assigns only tokens, for given
//!   placements.
//! * [`evaluate`]: measures tables on a trace or a profile: local activation rate, balance, routing policies.
//!
//! ```
//! use std::ops::ControlFlow;
//! use std::path::Path;
//!
//! use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, evaluate, solve};
//! use semmoe_tables::{Attention, Phase, ProfileBuilder, Trace};
//!
//! let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/reference.trace.safetensors");
//! let trace = Trace::open(&recorded)?;
//! let mut counts = ProfileBuilder::new(trace.model().clone(), trace.provenance().clone(), Phase::All)?;
//! counts.add_trace(&trace)?;
//! let options = SolveOptions { starts: 1, ..SolveOptions::new(4, Attention::Dp, trace.provenance().clone()) };
//! let solved = solve(&counts.finish()?, Some(&trace), &options, &mut |_| ControlFlow::Continue(()))?;
//! let found = evaluate(&solved.tables, EvalInput::Trace(&trace), &EvalOptions::default())?;
//! assert!(found.lar > found.lar_random, "more activations are local than by chance");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Modules, lowest first; each imports only from the modules above it in this table:
//!
//! | module | contents |
//! |---|---|
//! | `input` | options, counts of units x (layer, expert), padding, the split into parts, rejected combinations, errors |
//! | `algebra` | rows, symmetric matrices and their eigenvalues, bit-identical on every machine |
//! | `prior` | expectations for rare and unseen tokens, and the evidence from tokens' own counts |
//! | `step` | the exact transportation solver, both halves of the alternation, swaps, replicas; limits on load, tokens and sequences; nodes, gating groups and the cost of moving experts |
//! | `bounds` | upper bounds over all placements, which quantify the gap of a solution |
//! | `start` | initial clusterings, single starts, and many starts run on threads |
//! | `tables` | T and prices for attention dp, T and A for tp; the paper's Algorithm 3 as printed |
//! | `ranks` | the remote-ranks objective: its unit step and its local search |
//! | `judge` | evaluation of requests, tokens and steps |
//! | `solve` | the complete solve, including solves for given placements or only for tokens; held-out requests; the report |
//! | `paper` | the paper's Algorithm 1, as a baseline |

mod algebra;
mod bounds;
#[cfg(test)]
#[path = "../tests/common/traces.rs"]
mod fixtures;
mod input;
mod judge;
mod paper;
mod prior;
mod ranks;
mod solve;
mod start;
mod step;
mod tables;

pub use algebra::eigen::top_eigenpairs;
pub use bounds::{BoundScope, Bounds, LayerBounds, bounds};
pub use input::options::{
    BoundOptions, EvalOptions, GivenPlacement, Margins, Nodes, Objective, RidgeOptions, SolveOptions, Unit,
    UnseenTokens, WarmStart,
};
pub use input::{error::SolveError, split::ProfilePart, strings::TokenStrings};
pub use judge::calibration::{Calibration, Reliability, ReliabilityBin};
pub use judge::evaluate::{EvalInput, Evaluation, OfflineBound, RequestFigures, StepFigures, evaluate};
pub use judge::{replay::Evenness, requests::BURST, requests::WINDOW};
pub use paper::{PaperCap, PaperOptions, solve_paper};
pub use solve::assign::{TokenAssigner, TokenPlan};
pub use solve::hold_out::HeldOut;
pub use solve::report::{Evidence, Migration, NodeFigures, SolveReport};
pub use solve::{Solved, solve};
pub use start::starts::SolveProgress;
pub use tables::{prior_fit::PriorFit, transitions::LayerTransitions};
