//! One row for every mechanism, figure and table of the five papers: what the paper claims, what is found here, and a
//! verdict. `docs/papers.md` is made of them.
//!
//! A row says beforehand which verdict it has. What computes it judges again, from its own figures and a stated
//! tolerance, and a verdict that changes is an error.
//!
//! | module | what |
//! |---|---|
//! | `sem_moe`, `parasmoe`, `moebius`, `mixserve`, `hybridep` | the rows of a paper, and what computes them |
//! | `inputs` | models and clusters, from the figures that the papers print |
//! | `page` | `docs/papers.md`, and the results that take minutes |

mod hybridep;
mod inputs;
mod mixserve;
mod moebius;
mod page;
mod parasmoe;
mod sem_moe;

use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use std::time::Instant;

use clap::ValueEnum;
use semmoe_bench_papers::chart::{Axis, Panel, Series, draw};

use crate::Outcome;
use page::Kept;

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
    const ALL: [Self; 5] = [Self::SemMoe, Self::Parasmoe, Self::Moebius, Self::Mixserve, Self::Hybridep];

    /// For headings.
    fn name(self) -> &'static str {
        match self {
            Self::SemMoe => "Sem-MoE",
            Self::Parasmoe => "ParaSMoE",
            Self::Moebius => "Moebius",
            Self::Mixserve => "MixServe",
            Self::Hybridep => "HybridEP",
        }
    }

    /// On the command line.
    fn key(self) -> &'static str {
        match self {
            Self::SemMoe => "sem-moe",
            Self::Parasmoe => "parasmoe",
            Self::Moebius => "moebius",
            Self::Mixserve => "mixserve",
            Self::Hybridep => "hybridep",
        }
    }

    fn rows(self) -> &'static [Row] {
        match self {
            Self::SemMoe => sem_moe::ROWS,
            Self::Parasmoe => parasmoe::ROWS,
            Self::Moebius => moebius::ROWS,
            Self::Mixserve => mixserve::ROWS,
            Self::Hybridep => hybridep::ROWS,
        }
    }
}

/// The judgement on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// Direction and size hold, within the tolerance that the row states.
    Reproduced,
    /// The printed figure does not follow; one near it does.
    Corrected,
    /// It does not hold.
    Refuted,
    /// Only a GPU can show it; the model's figure stands beside the paper's.
    NeedsGpu,
    /// Nothing here computes or measures it.
    NotYet,
}

impl Verdict {
    const ALL: [Self; 5] = [Self::Reproduced, Self::Corrected, Self::Refuted, Self::NeedsGpu, Self::NotYet];

    /// Reproduced if `holds`, else `otherwise`.
    fn of(holds: bool, otherwise: Self) -> Self {
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
            Self::NotYet => "not yet",
        })
    }
}

/// A row's own figures.
struct Found {
    /// For the page: figures, in a few words.
    ours: String,
    verdict: Verdict,
    /// Printed where the row is run by itself.
    table: String,
    /// A file of `figures/` beside this crate, without its ending, and its charts.
    picture: Option<(&'static str, Vec<Panel>)>,
}

impl Found {
    fn new(verdict: Verdict, ours: impl Into<String>) -> Self {
        Self { ours: ours.into(), verdict, table: String::new(), picture: None }
    }

    fn with_table(self, table: String) -> Self {
        Self { table, ..self }
    }

    fn with_picture(self, name: &'static str, panel: Panel) -> Self {
        Self { picture: Some((name, vec![panel])), ..self }
    }
}

/// How much of a row that takes minutes is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// As on the page.
    Full,
    /// Less data; the verdict must be the same.
    Small,
}

/// How a row comes to its figures.
enum By {
    /// Counts and models: equal on every machine, in seconds. Tests run them.
    Model(fn() -> Outcome<Found>),
    /// Takes minutes, or the planner's step times, which change with its constants. `all` runs them and keeps their
    /// figures in `results.json`.
    Run(fn(Size) -> Outcome<Found>),
    /// Another benchmark measured it.
    Bench(Bench),
    /// It does not.
    Nothing,
}

/// A figure that another benchmark publishes.
struct Bench {
    /// The command that measures it.
    command: &'static str,
    /// The document that has the figures, from the root of the repository, and each of them as it stands there.
    document: &'static str,
    figures: &'static [&'static str],
    /// For the page.
    ours: &'static str,
}

/// A claim and its verdict.
struct Row {
    /// On the command line: `figure-4`.
    id: &'static str,
    /// Where the paper has it.
    at: &'static str,
    claim: &'static str,
    verdict: Verdict,
    /// Why, where it is not simply reproduced; the tolerance, where it is.
    why: &'static str,
    by: By,
}

impl Row {
    fn run(&self, size: Size) -> Outcome<Found> {
        match &self.by {
            By::Model(run) => run(),
            By::Run(run) => run(size),
            By::Bench(bench) => Ok(Found::new(self.verdict, bench.ours)),
            By::Nothing => Ok(Found::new(Verdict::NotYet, "-")),
        }
    }

    /// Runs it, and compares the verdict.
    fn judged(&self, paper: Paper, size: Size) -> Outcome<Found> {
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

/// A chart of lines.
fn lines(title: &str, axes: [Axis; 2], series: Vec<Series>) -> Panel {
    let [x, y] = axes;
    Panel { title: title.to_owned(), x, y, series }
}

/// A line through points.
fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
    Series { name: name.into(), points, line: true, ..Series::default() }
}

fn axis(label: &str, log: bool) -> Axis {
    Axis { label: label.to_owned(), log }
}

/// Whether `found` is within `share` of `expected`.
fn near(found: f64, expected: f64, share: f64) -> bool {
    (found - expected).abs() <= share * expected.abs()
}

/// Runs one row of a paper, or lists them.
pub(crate) fn one(paper: Paper, id: Option<&str>) -> Outcome<ExitCode> {
    let Some(id) = id else {
        paper.rows().iter().for_each(|row| println!("{:<18} {:<12} {}", row.id, row.verdict.to_string(), row.claim));
        return Ok(ExitCode::SUCCESS);
    };
    let found = paper.rows().iter().find(|row| row.id == id);
    let row = found.ok_or_else(|| format!("{} has no row {id}; without one all are listed", paper.name()))?;
    let found = row.judged(paper, Size::Full)?;
    println!("{}, {}\nclaim:   {}\nours:    {}", paper.name(), row.at, row.claim, found.ours);
    println!("verdict: {}. {}", row.verdict, row.why);
    if let By::Bench(bench) = &row.by {
        println!("measured by `{}`: {}", bench.command, bench.document);
        bench.figures.iter().for_each(|figure| println!("  {figure}"));
    }
    print!("{}", found.table);
    if let Some((name, panels)) = found.picture {
        println!("picture: {}", page::write_picture(name, &draw(&panels))?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs every row, compares the verdicts, and writes the page and its pictures.
pub(crate) fn all(small: bool) -> Outcome<ExitCode> {
    let size = if small { Size::Small } else { Size::Full };
    let mut kept = Kept::read()?;
    let mut ours = BTreeMap::new();
    let mut changed = Vec::new();
    for paper in Paper::ALL {
        for row in paper.rows() {
            let began = Instant::now();
            match row.judged(paper, size) {
                Err(error) => changed.push(error),
                Ok(found) => {
                    let seconds = began.elapsed().as_secs_f64();
                    println!(
                        "{:<9} {:<18} {:<12} {seconds:6.1} s  {}",
                        paper.key(),
                        row.id,
                        row.verdict.to_string(),
                        found.ours
                    );
                    if let Some((name, panels)) = &found.picture {
                        page::write_picture(name, &draw(panels))?;
                    }
                    ours.insert((paper, row.id), kept.shown(paper, row, found, size));
                }
            }
        }
    }
    kept.write()?;
    if let Some((first, others)) = changed.split_first() {
        others.iter().for_each(|error| println!("{error}"));
        return Err(first.to_string().into());
    }
    page::write(&ours)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn each() -> impl Iterator<Item = (Paper, &'static Row)> {
        Paper::ALL.into_iter().flat_map(|paper| paper.rows().iter().map(move |row| (paper, row)))
    }

    #[test]
    fn every_row_is_there_once_and_says_why() {
        let ids: BTreeSet<(Paper, &str)> = each().map(|(paper, row)| (paper, row.id)).collect();
        assert_eq!((ids.len(), each().count()), (69, 69));
        for (_, row) in each() {
            let (open, nothing) = (row.verdict == Verdict::NotYet, matches!(row.by, By::Nothing));
            assert_eq!((open, row.why.is_empty()), (nothing, nothing), "{}", row.id);
        }
        assert!(each().filter(|(_, row)| row.verdict == Verdict::NeedsGpu).count() <= 10);
    }

    /// The verdicts of counts and models, and the page with their figures.
    #[test]
    fn verdicts_and_the_page_are_what_the_rows_compute() {
        let mut kept = Kept::read().unwrap();
        let mut ours = BTreeMap::new();
        for (paper, row) in each() {
            let found = match row.by {
                By::Run(_) => Found::new(row.verdict, "?"),
                _ => row.judged(paper, Size::Small).unwrap(),
            };
            ours.insert((paper, row.id), kept.shown(paper, row, found, Size::Small));
        }
        let message = "docs/papers.md is not what the rows give: run `bench/papers/all --small`";
        assert!(page::text(&ours) == page::read().unwrap(), "{message}");
    }

    #[test]
    fn figures_of_other_benchmarks_stand_where_they_are_published() {
        for (_, row) in each() {
            let By::Bench(bench) = &row.by else { continue };
            let text = page::document(bench.document).unwrap();
            assert!(!bench.figures.is_empty());
            for figure in bench.figures {
                assert!(text.contains(figure), "{}: {} has no {figure}", row.id, bench.document);
            }
        }
    }
}
