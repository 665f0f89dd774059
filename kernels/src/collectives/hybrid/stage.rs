//! The stages of a hybrid exchange, reported so that a caller can time them.

/// One stage of a pipeline, for one piece of the rows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Stage {
    /// The stage's name.
    pub name: StageName,
    /// The piece, counted from 0; unfused pipelines have only one.
    pub piece: usize,
}

/// The stages of both pipelines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum StageName {
    /// AG-Dispatch: rows cross to other nodes.
    Dispatch,
    /// AG-Dispatch: rows are gathered by all ranks of a node.
    Gather,
    /// RS-Combine: partial sums are added within a node.
    Reduce,
    /// RS-Combine: sums cross back.
    Combine,
}

impl StageName {
    /// Name in charts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Combine => "combine",
        }
    }
}

/// Observes the stages of one rank. A stage begins when the rank offers its messages, and ends when the last one that
/// it waits for has arrived. Every stage that began ends, unless the unit fails.
pub trait StageObserver {
    /// A stage begins.
    fn began(&mut self, stage: Stage);

    /// A stage has ended.
    fn ended(&mut self, stage: Stage);
}

/// Observes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl StageObserver for Unobserved {
    fn began(&mut self, _stage: Stage) {}

    fn ended(&mut self, _stage: Stage) {}
}
