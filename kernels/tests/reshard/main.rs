//! Switches of expert layouts: against the Python reference, over any shapes, and rejections.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod errors;
mod golden;
mod kv;
mod shapes;
mod sim;
