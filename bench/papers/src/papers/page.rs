//! `docs/papers.md`: one table a paper. Figures that take minutes are kept in `results.json`, pictures in `figures/`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use super::{By, Found, Paper, Row, Size, Verdict};
use crate::Outcome;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
const PAGE: &str = "docs/papers.md";
const RESULTS: &str = "bench/papers/results.json";

/// What each row found, for the page.
type Ours = BTreeMap<(Paper, &'static str), Shown>;

/// What a row found, as the page has it.
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

    /// What the page has for a row: kept figures where the row takes minutes and was not run in full now.
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

/// The page as it is.
#[cfg(test)]
pub(super) fn read() -> Outcome<String> {
    document(PAGE)
}

pub(super) fn write(ours: &Ours) -> Outcome<()> {
    Ok(std::fs::write(path(PAGE), text(ours))?)
}

/// Writes a picture; its name for messages.
pub(super) fn write_picture(name: &str, svg: &str) -> Outcome<String> {
    let name = format!("bench/papers/figures/{name}.svg");
    std::fs::write(path(&name), svg)?;
    Ok(name)
}

/// The whole page.
pub(super) fn text(ours: &Ours) -> String {
    let mut text = String::from(
        "# The papers, row by row\n\n\
         Mechanisms, figures and tables of the five papers that semmoe builds on, and what becomes of each claim here. \
         `bench/papers/one PAPER ROW`\nruns a row and prints its table; where another benchmark measured it, the last \
         column has its command. `bench/papers/all` runs all\nand writes this page; `--small` takes minutes. Counts and \
         models are tested: a verdict that changes fails. Timed figures are from CPUs.\n\n",
    );
    text += &counts();
    for paper in Paper::ALL {
        let _ = write!(text, "\n## {}\n\n`bench/papers/one {} ROW`\n\n", paper.name(), paper.key());
        text += "| row | claim | ours | verdict | |\n| --- | --- | --- | --- | --- |\n";
        for row in paper.rows() {
            text += &line(row, ours.get(&(paper, row.id)));
        }
    }
    text
}

fn line(row: &Row, shown: Option<&Shown>) -> String {
    let ours = shown.map_or("-", |shown| &shown.ours);
    let picture = shown.and_then(|shown| shown.picture.as_ref());
    let picture = picture.map_or_else(String::new, |name| format!(" [picture](../bench/papers/figures/{name}.svg)"));
    let command = match &row.by {
        By::Bench(bench) => format!("`{}`: [figures](../{})", bench.command, bench.document),
        _ => String::new(),
    };
    let at = row.at;
    format!("| {} | {at}: {} | {ours}{picture} | **{}** {} | {command} |\n", row.id, row.claim, row.verdict, row.why)
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
