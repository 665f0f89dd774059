//! `docs/papers.md`: one table per paper. Figures that take minutes are kept in `results.json`, pictures in `figures/`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use super::{By, Found, Paper, Row, Size, Verdict};
use crate::Outcome;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
const PAGE: &str = "docs/papers.md";
const RESULTS: &str = "bench/papers/results.json";

/// Figures of each row, for the page.
type Ours = BTreeMap<(Paper, &'static str), Shown>;

/// Figures of one row, for the page.
pub(super) struct Shown {
    ours: String,
    picture: Option<String>,
}

/// Figures of rows that take minutes, by paper and row, and their pictures.
pub(super) struct Kept(BTreeMap<String, (String, Option<String>)>);

impl Kept {
    pub(super) fn read() -> Outcome<Self> {
        Ok(Self(serde_json::from_str(&document(RESULTS)?)?))
    }

    /// Figures of a row for the page: stored ones if the row takes minutes and this was not a full run.
    pub(super) fn shown(&mut self, paper: Paper, row: &Row, found: Found, size: Size) -> Shown {
        let now = (found.ours, found.picture.map(|(name, _)| name.to_owned()));
        let (ours, picture) = match row.by {
            By::Run(_) => {
                let key = format!("{} {}", paper.key(), row.id);
                if size == Size::Full {
                    self.0.insert(key.clone(), now.clone());
                }
                self.0.get(&key).cloned().unwrap_or(now)
            }
            _ => now,
        };
        Shown { ours, picture }
    }

    pub(super) fn write(&self) -> Outcome<()> {
        Ok(std::fs::write(path(RESULTS), serde_json::to_string_pretty(&self.0)? + "\n")?)
    }
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(format!("{ROOT}{name}"))
}

/// A file of the repository.
pub(super) fn document(name: &str) -> Outcome<String> {
    std::fs::read_to_string(path(name)).map_err(|error| format!("{name}: {error}").into())
}

/// The current page.
#[cfg(test)]
pub(super) fn read() -> Outcome<String> {
    document(PAGE)
}

pub(super) fn write(ours: &Ours) -> Outcome<()> {
    Ok(std::fs::write(path(PAGE), text(ours))?)
}

/// Writes a picture; returns its file name.
pub(super) fn write_picture(name: &str, svg: &str) -> Outcome<String> {
    let name = format!("bench/papers/figures/{name}.svg");
    std::fs::write(path(&name), svg)?;
    Ok(name)
}

/// The whole page.
pub(super) fn text(ours: &Ours) -> String {
    let mut text = String::from(
        "# The papers, row by row\n\n\
         Mechanisms, figures and tables of the five papers behind semmoe, and verdicts. \
         `bench/papers/one PAPER ROW` runs a row\nand prints its table; rows that another \
         benchmark measured name its command. `bench/papers/all`\nruns all and writes this page; `--small` uses \
         less data. Tests fail if the verdict of a count or a model changes. Timed figures are\nfrom CPUs unless a GPU is named. \
         Moebius is quoted from a review, by its sections.\n\n",
    );
    text += &counts();
    for paper in Paper::ALL {
        let _ = write!(text, "\n## {}\n\n", paper.name());
        text += "| row | claim | ours | verdict |\n| --- | --- | --- | --- |\n";
        for row in paper.rows() {
            text += &line(row, ours.get(&(paper, row.id)));
        }
    }
    text
}

fn line(row: &Row, shown: Option<&Shown>) -> String {
    let ours = shown.map_or("-", |shown| &shown.ours);
    let picture = shown.and_then(|shown| shown.picture.as_ref());
    let id =
        picture.map_or_else(|| row.id.to_owned(), |name| format!("[{}](../bench/papers/figures/{name}.svg)", row.id));
    let measured = match &row.by {
        By::Bench(bench) => {
            let (folder, _) = bench.document.rsplit_once('/').unwrap_or((bench.document, ""));
            format!(" ([{folder}](../{}): `{}`)", bench.document, bench.command)
        }
        _ => String::new(),
    };
    format!("| {id} | {}{} | {ours}{measured} | {}: {} |\n", place(row), row.claim, row.verdict, row.why)
}

/// Where the paper has it, without the row's name: "Figure 4, 4.4" is "4.4" in the row figure-4.
fn place(row: &Row) -> String {
    let named = row.at.to_lowercase().replace(' ', "-").starts_with(row.id);
    let at = if named { row.at[row.id.len()..].trim_start_matches([',', ' ']) } else { row.at };
    if at.is_empty() { String::new() } else { format!("{at}: ") }
}

/// Rows by paper and verdict.
fn counts() -> String {
    let mut text = String::from("| |");
    Verdict::ALL.iter().for_each(|verdict| text += &format!(" {verdict} |"));
    text += " rows |\n|";
    text += &" --- |".repeat(Verdict::ALL.len() + 2);
    let all: Vec<&Row> = Paper::ALL.iter().flat_map(|paper| paper.rows()).collect();
    let papers = Paper::ALL.map(|paper| (paper.name(), paper.rows().iter().collect::<Vec<_>>()));
    for (name, rows) in papers.into_iter().chain([("all", all)]) {
        let _ = write!(text, "\n| {name} |");
        for verdict in Verdict::ALL {
            let _ = write!(text, " {} |", rows.iter().filter(|row| row.verdict == verdict).count());
        }
        let _ = write!(text, " {} |", rows.len());
    }
    text + "\n"
}
