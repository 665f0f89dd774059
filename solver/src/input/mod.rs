//! Solver input: the options, the activation counts of units and experts, the split of a trace, and the errors.

pub(crate) mod combinations;
pub(crate) mod error;
pub(crate) mod options;
pub(crate) mod padding;
pub(crate) mod problem;
pub(crate) mod split;
pub(crate) mod strings;

pub(crate) use combinations::check_together;
pub(crate) use error::{SolveError, check_input, check_size};
pub(crate) use options::{
    BoundOptions, EvalOptions, GivenPlacement, Margins, Nodes, Objective, RidgeOptions, SolveOptions, Unit,
    UnseenTokens, WarmStart, at_least_one, within,
};
pub(crate) use padding::{once_each, padded_replicas, uneven, with_empty_slots};
pub(crate) use problem::{Problem, problems};
pub(crate) use split::{NoSplit, ProfilePart, Split, has_route};
pub(crate) use strings::TokenStrings;
