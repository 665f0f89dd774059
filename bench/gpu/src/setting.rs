//! One setting of a check, and its outcome.

use semmoe_kernels_cuda::{Buffer, Grid, Launch, LaunchError};

use crate::machine::{Machine, Memory, text};
use crate::world::World;

/// One setting of a check.
#[derive(Clone, Copy)]
pub(crate) struct Setting<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) small: bool,
    pub(crate) ranks: usize,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
}

impl Setting<'_> {
    pub(crate) fn grid(&self) -> Grid {
        self.machine.grid(self.ranks, self.small)
    }
}

/// The outcome of a check.
pub(crate) enum Outcome {
    Equal,
    Differs(String),
    /// The device lacks a feature.
    NotRun(String),
}

impl From<Result<(), String>> for Outcome {
    fn from(result: Result<(), String>) -> Self {
        result.map_or_else(Self::Differs, |()| Self::Equal)
    }
}

/// Gives every rank of the launch this memory.
pub(crate) fn shared(memory: &Memory, ranks: usize) -> Vec<Buffer> {
    vec![memory.buffer(); ranks]
}

pub(crate) fn run(setting: Setting<'_>, world: &World, launch: Result<Launch, LaunchError>) -> Result<(), String> {
    let launch = launch.map_err(text)?;
    setting.machine.run(&[launch]).map_err(|error| world.explain(error))
}
