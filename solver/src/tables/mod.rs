//! Builds T, A and prices from a clustering.

pub(crate) mod labels;
pub(crate) mod printed;
pub(crate) mod prior_fit;
pub(crate) mod token_table;
pub(crate) mod transitions;

pub(crate) use labels::{MainGroups, tp_parts};
pub(crate) use printed::{BY_PAPER, Half, PrintedRule, Sequences};
pub(crate) use prior_fit::{PriorFit, fit_prior};
pub(crate) use token_table::{Prices, activation_evidence, count_groups, dp_prices, replica_shares, shares_by};
pub(crate) use transitions::{LayerTransitions, keep_transitions};
