//! Claims as rows: their figures and verdicts.

use std::fmt;

use clap::ValueEnum;
use semmoe_bench_papers::chart::{Axis, Panel, Series};

use crate::Outcome;

/// A paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Paper {
    SemMoe,
    Parasmoe,
    Moebius,
    Mixserve,
    Hybridep,
}

impl Paper {
    pub(super) const ALL: [Self; 5] = [Self::SemMoe, Self::Parasmoe, Self::Moebius, Self::Mixserve, Self::Hybridep];

    /// Name for headings.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::SemMoe => "Sem-MoE",
            Self::Parasmoe => "ParaSMoE",
            Self::Moebius => "Moebius",
            Self::Mixserve => "MixServe",
            Self::Hybridep => "HybridEP",
        }
    }

    /// On the command line.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::SemMoe => "sem-moe",
            Self::Parasmoe => "parasmoe",
            Self::Moebius => "moebius",
            Self::Mixserve => "mixserve",
            Self::Hybridep => "hybridep",
        }
    }
}

/// The verdict on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// Direction and size hold, within the tolerance that the row states.
    Reproduced,
    /// The printed figure does not follow; a similar one does.
    Corrected,
    /// The claim does not hold.
    Refuted,
    /// Only a GPU can show it; the model's figure is given beside the paper's.
    NeedsGpu,
}

impl Verdict {
    pub(super) const ALL: [Self; 4] = [Self::Reproduced, Self::Corrected, Self::Refuted, Self::NeedsGpu];

    /// Reproduced if `holds`, otherwise `otherwise`.
    pub(super) fn of(holds: bool, otherwise: Self) -> Self {
        if holds { Self::Reproduced } else { otherwise }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Reproduced => "reproduced",
            Self::Corrected => "corrected",
            Self::Refuted => "refuted",
            Self::NeedsGpu => "needs a GPU",
        })
    }
}

/// The figures computed for a row.
pub(super) struct Found {
    /// For the page: figures, in a few words.
    pub(super) ours: String,
    pub(super) verdict: Verdict,
    /// Printed if the row is run alone.
    pub(super) table: String,
    /// The name of a file in this crate's `figures/`, without extension, and its charts.
    pub(super) picture: Option<(&'static str, Vec<Panel>)>,
}

impl Found {
    pub(super) fn new(verdict: Verdict, ours: impl Into<String>) -> Self {
        Self { ours: ours.into(), verdict, table: String::new(), picture: None }
    }

    pub(super) fn with_table(self, table: String) -> Self {
        Self { table, ..self }
    }

    pub(super) fn with_picture(self, name: &'static str, panel: Panel) -> Self {
        Self { picture: Some((name, vec![panel])), ..self }
    }
}

/// How much of a slow row is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    /// In full, for the page.
    Full,
    /// Less data; the verdict must be the same.
    Small,
}

/// How a row gets its figures.
pub(super) enum By {
    /// Counts and models: identical on every machine, and take seconds. Tests run them.
    Model(fn() -> Outcome<Found>),
    /// Takes minutes, or uses the planner's step times, which change with its constants. `all` runs them and keeps
    /// their figures in `results.json`.
    Run(fn(Size) -> Outcome<Found>),
    /// Another benchmark measured it.
    Bench(Bench),
}

/// A figure that another benchmark publishes.
pub(super) struct Bench {
    /// The command that measures it.
    pub(super) command: &'static str,
    /// The document with the figures, from the root of the repository, and each figure as printed there.
    pub(super) document: &'static str,
    pub(super) figures: &'static [&'static str],
    /// For the page.
    pub(super) ours: &'static str,
}

/// A claim and its verdict.
pub(super) struct Row {
    /// For example `figure-4`; used on the command line.
    pub(super) id: &'static str,
    /// Its place in the paper.
    pub(super) at: &'static str,
    pub(super) claim: &'static str,
    pub(super) verdict: Verdict,
    /// The reason, unless it is simply reproduced; otherwise the tolerance.
    pub(super) why: &'static str,
    pub(super) by: By,
}

impl Row {
    pub(super) fn run(&self, size: Size) -> Outcome<Found> {
        match &self.by {
            By::Model(run) => run(),
            By::Run(run) => run(size),
            By::Bench(bench) => Ok(Found::new(self.verdict, bench.ours)),
        }
    }

    /// Runs the row; an error if the verdict has changed.
    pub(super) fn judged(&self, paper: Paper, size: Size) -> Outcome<Found> {
        let found = self.run(size).map_err(|error| format!("{} {}: {error}", paper.key(), self.id))?;
        if found.verdict != self.verdict {
            let (key, id, ours) = (paper.key(), self.id, &found.ours);
            return Err(
                format!("{key} {id}: the verdict was {}, now it is {} ({ours})", self.verdict, found.verdict).into()
            );
        }
        Ok(found)
    }
}

/// A line chart.
pub(super) fn lines(title: &str, axes: [Axis; 2], series: Vec<Series>) -> Panel {
    let [x, y] = axes;
    Panel { title: title.to_owned(), x, y, series }
}

/// A line through points.
pub(super) fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
    Series { name: name.into(), points, line: true, ..Series::default() }
}

pub(super) fn axis(label: &str, log: bool) -> Axis {
    Axis { label: label.to_owned(), log }
}

/// Whether `found` is within `share` of `expected`.
pub(super) fn near(found: f64, expected: f64, share: f64) -> bool {
    (found - expected).abs() <= share * expected.abs()
}
