//! The gateway under attack: framing, floods, memory, descriptors, and engines whose framing lies.
//!
//! Process sizes are measured in a child process, so that other tests do not count.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

mod child;
mod engine;
mod files;
mod floods;
mod framing;
mod liars;
mod memory;
mod pins;
mod slow;
mod wire;

/// Longer than any test takes; a test that waits for it fails.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
