//! Switches of expert layouts: against the reference in Python, over any shapes, and what is refused.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod errors;
mod golden;
mod kv;
mod shapes;
mod sim;
