//! One row for every mechanism, figure and table of the five papers: the paper's claim, the finding here, and a
//! verdict. `docs/papers.md` is generated from them.
//!
//! A row declares its verdict. Running it judges again, from computed figures and a stated tolerance, and a changed
//! verdict is an error.
//!
//! | module | what |
//! |---|---|
//! | `sem_moe`, `parasmoe`, `moebius`, `mixserve`, `hybridep` | the rows of a paper, and their computation |
//! | `row` | rows, findings, verdicts |
//! | `inputs` | models and clusters, from the figures that the papers print |
//! | `page` | `docs/papers.md`, and the results that take minutes |

mod hybridep;
mod inputs;
mod mixserve;
mod moebius;
mod page;
mod parasmoe;
mod row;
mod sem_moe;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use semmoe_bench_papers::chart::draw;

use crate::Outcome;
use page::Kept;
pub(crate) use row::Paper;
use row::{Bench, By, Found, Row, Size, Verdict, axis, line, lines, near};

impl Paper {
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
            assert!(!row.why.is_empty(), "{}", row.id);
        }
        assert!(each().filter(|(_, row)| row.verdict == Verdict::NeedsGpu).count() <= 10);
    }

    /// Verdicts from counts and models, and the page with their figures.
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
