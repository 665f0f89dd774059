//! The stages of a hybrid exchange, reported so that callers can time them.

/// One stage of a pipeline, for one piece of the rows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Stage {
    /// The stage's name.
    pub name: StageName,
    /// The piece, numbered from 0; unfused pipelines have only one.
    pub piece: usize,
}

/// The stages of both pipelines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum StageName {
    /// AG-Dispatch: rows cross to other nodes.
    Dispatch,
    /// AG-Dispatch: all ranks of a node gather the rows.
    Gather,
    /// RS-Combine: partial sums are added within a node.
    Reduce,
    /// RS-Combine: sums cross back to the source nodes.
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

/// Observes one rank's stages. A stage begins when the rank posts its messages and ends when the last message that it
/// waits for has arrived. Every stage that began ends, unless the unit fails.
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
