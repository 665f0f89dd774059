//! Evaluation of tables on a trace or a profile.

pub(crate) mod balance;
pub(crate) mod calibration;
pub(crate) mod evaluate;
pub(crate) mod hosts;
pub(crate) mod job;
pub(crate) mod replay;
pub(crate) mod requests;
pub(crate) mod steps;
pub(crate) mod tally;
pub(crate) mod tokens;

pub(crate) use balance::{Spread, spread, spread_of};
pub(crate) use evaluate::{EvalInput, Evaluation, evaluate_solved};
