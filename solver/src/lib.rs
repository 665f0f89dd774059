//! Profile and traces in, tables out; evaluation of tables. The README has the method and its equations.
//!
//! * [`solve`]: co-clusters tokens or requests with experts by alternating exact steps, and builds T, A and E.
//! * [`solve_paper`]: uses the paper's Algorithm 1 instead; [`TokenAssigner`]: assigns only tokens, for given experts.
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
//! | module | what |
//! |---|---|
//! | `problem` | units x (layer, expert) counts, sparse |
//! | `transport`, `whole` | the exact transportation solver behind both steps; from its plans to whole units |
//! | `unit_step`, `expert_step`, `load_limit` | the two halves of the alternation, and the limit on expert load |
//! | `seeds`, `alternate`, `swaps`, `starts` | how a start begins and runs, and many of them over threads |
//! | `padding` | groups that do not divide the experts: slots that stay empty |
//! | `topology`, `gating` | groups in nodes, and gating groups that stay whole |
//! | `home` | experts that are placed already, and the cost of moving them |
//! | `held`, `replica_step`, `replicate` | replicas: who holds what, their exact step, the alternation around them |
//! | `prior`, `evidence` | expectations for rare and unseen tokens, and the evidence of their own counts |
//! | `token_table`, `labels`, `transitions` | T and prices for attention dp, T and A for tp |
//! | `split`, `hold_out`, `prior_fit` | held-out requests: to choose the prior and A with, and to evaluate on |
//! | `assign` | the exact token step alone, for a given placement |
//! | `given` | given placements: the unit step alone, with tables and report |
//! | `paper` | the paper's Algorithm 1, as a baseline |
//! | `ranks` | the objective of remote ranks: its unit step and its local search |
//! | `division` | the best division of requests under limits on tokens and on sequences |
//! | `bounds` | upper bounds over all placements, which turn the gap of a solution into a figure |
//! | `rows` | sums over rows of ndarray matrices, bit-identical on every machine |
//! | `hosts`, `tally`, `eval_tokens`, `eval_requests`, `job`, `replay`, `calibration` | evaluation |

mod alternate;
mod assign;
mod balance;
mod bounds;
mod calibration;
mod clustering;
mod division;
mod error;
mod eval_requests;
mod eval_steps;
mod eval_tokens;
mod evaluate;
mod evidence;
mod expert_step;
mod features;
#[cfg(test)]
#[path = "../tests/common/traces.rs"]
mod fixtures;
mod gating;
mod given;
mod held;
mod hold_out;
mod home;
mod hosts;
mod job;
mod labels;
mod load_limit;
mod options;
mod padding;
mod paper;
mod printed;
mod prior;
mod prior_fit;
mod problem;
mod ranks;
mod replay;
mod replica_step;
mod replicate;
mod report;
mod rows;
mod seeds;
mod sequences;
mod solve;
mod spectral;
mod split;
mod starts;
mod swaps;
mod tally;
mod token_table;
mod topology;
mod transitions;
mod transport;
mod unit_step;
mod whole;

pub use assign::{TokenAssigner, TokenPlan};
pub use bounds::{BoundScope, Bounds, LayerBounds, bounds, top_eigenpairs};
pub use calibration::{Calibration, Reliability, ReliabilityBin};
pub use error::SolveError;
pub use eval_requests::{BURST, WINDOW};
pub use evaluate::{EvalInput, Evaluation, OfflineBound, RequestFigures, StepFigures, evaluate};
pub use hold_out::HeldOut;
pub use options::{
    BoundOptions, EvalOptions, GivenPlacement, Margins, Nodes, Objective, RidgeOptions, SolveOptions, Unit,
    UnseenTokens, WarmStart,
};
pub use paper::{PaperCap, PaperOptions, solve_paper};
pub use prior::strings::TokenStrings;
pub use prior_fit::PriorFit;
pub use replay::Evenness;
pub use report::{Evidence, Migration, NodeFigures, SolveReport};
pub use solve::{Solved, solve};
pub use split::ProfilePart;
pub use starts::SolveProgress;
pub use transitions::LayerTransitions;
