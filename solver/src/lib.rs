//! Profile and traces in, tables out; evaluation of tables. The README has the method and its equations.
//!
//! * [`solve`]: co-clusters tokens or requests with experts by alternating exact steps, and builds T, A and E.
//! * [`evaluate`]: what tables are worth on a trace or a profile: local activation rate, balance, routing policies.
//!
//! | module | what |
//! |---|---|
//! | `problem` | units x (layer, expert) counts, sparse |
//! | `transport`, `whole` | the exact transportation solver behind both steps; from its plans to whole units |
//! | `unit_step`, `expert_step`, `load_limit` | the two halves of the alternation, and the limit on expert load |
//! | `seeds`, `alternate`, `swaps`, `starts` | where a start begins, how it runs, and many of them over threads |
//! | `token_table`, `labels`, `score` | T and prices for attention dp, T and A for tp, the score of a prompt |
//! | `hosts`, `tally`, `eval_tokens`, `eval_requests` | evaluation |

mod alternate;
mod balance;
mod error;
mod eval_requests;
mod eval_tokens;
mod evaluate;
mod expert_step;
mod hosts;
mod labels;
mod load_limit;
mod options;
mod problem;
mod report;
mod score;
mod seeds;
mod solve;
mod starts;
mod swaps;
mod tally;
mod token_table;
mod transport;
mod unit_step;
mod whole;

pub use error::SolveError;
pub use evaluate::{EvalInput, Evaluation, RequestFigures, evaluate};
pub use options::{EvalOptions, SolveOptions};
pub use report::{SolveReport, Unit};
pub use solve::{Solved, solve};
pub use starts::SolveProgress;
