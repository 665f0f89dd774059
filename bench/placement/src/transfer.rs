//! Transfer: solves on the requests of one kind and judges on those of another, as in the paper's Tables 3 and 4.

use std::path::{Path, PathBuf};

use semmoe_solver::{EvalInput, EvalOptions, PaperCap, Solved, evaluate, solve, solve_paper};
use semmoe_tables::{Attention, Trace, TraceBuilder};

use crate::error::BenchError;
use crate::markdown::{Table, rate};
use crate::methods::{Setting, paper_options, quiet, solve_options};
use crate::synthetic::profile;

/// Kinds of requests, by domain.
const KINDS: [(&str, &[&str]); 5] = [
    ("code", &["code", "tool_use", "function_calling"]),
    ("mathematics", &["math", "reasoning"]),
    ("knowledge", &["medicine", "law", "stem", "humanities", "social_science", "finance"]),
    ("multilingual", &["multilingual", "chinese_exam"]),
    (
        "chat",
        &["assistant", "banking_support", "service_chat", "order_chat", "rag_chat", "general", "writing", "meetings"],
    ),
];

/// A trace, and the file whose line r describes request r.
pub(crate) struct Described {
    pub(crate) trace: PathBuf,
    pub(crate) requests: PathBuf,
}

/// Prints one table for each algorithm and routing: rows are solved on, columns judged on.
pub(crate) fn run(
    solve_on: &Described,
    judge_on: &Described,
    groups: &[u16],
    setting: &Setting,
) -> Result<(), BenchError> {
    let kinds = Kinds { solving: by_kind(solve_on)?, judging: by_kind(judge_on)? };
    for &groups in groups {
        let setting = Setting { groups, ..setting.clone() };
        for attention in [Attention::Dp, Attention::Tp] {
            for paper in [false, true] {
                let name = if paper { "Algorithm 1, cap on tokens" } else { "semmoe" };
                let what = match attention {
                    Attention::Dp => "requests, all at once by T",
                    Attention::Tp => "tokens, layer by layer",
                };
                let title = format!(
                    "**Transfer, {name}, {groups} groups, {what}**: LAR, solved on the row, judged on the column"
                );
                table(&title, &kinds, attention, paper, &setting)?.print()?;
            }
        }
    }
    Ok(())
}

/// One trace for each of [`KINDS`], from both files.
struct Kinds {
    solving: Vec<Trace>,
    judging: Vec<Trace>,
}

fn table(
    title: &str,
    kinds: &Kinds,
    attention: Attention,
    paper: bool,
    setting: &Setting,
) -> Result<Table, BenchError> {
    let mut columns = vec!["solved on"];
    columns.extend(KINDS.map(|kind| kind.0));
    let mut table = Table::new(title, &columns);
    let mut random = vec!["random".to_owned()];
    for (trace, (name, _)) in kinds.solving.iter().zip(KINDS) {
        let solved = solved(trace, attention, paper, setting)?;
        let mut row = vec![name.to_owned()];
        for judged in &kinds.judging {
            let options = EvalOptions { policies: Vec::new(), ..EvalOptions::default() };
            let found = evaluate(&solved.tables, EvalInput::Trace(judged), &options)?;
            row.push(rate(found.batch_predicted.map_or(found.lar, |by_t| by_t.request_lar)));
            if random.len() < columns.len() {
                random.push(rate(found.lar_random));
            }
        }
        table.rows.push(row);
    }
    table.rows.push(random);
    Ok(table)
}

fn solved(trace: &Trace, attention: Attention, paper: bool, setting: &Setting) -> Result<Solved, BenchError> {
    let counts = profile(trace)?;
    let options = solve_options(setting, attention);
    let given = (attention == Attention::Dp).then_some(trace);
    Ok(match paper {
        true => solve_paper(&counts, given, &options, &paper_options(PaperCap::Tokens), &mut quiet)?,
        false => solve(&counts, given, &options, &mut quiet)?,
    })
}

/// The requests of each kind.
fn by_kind(described: &Described) -> Result<Vec<Trace>, BenchError> {
    let trace = Trace::open(&described.trace)?;
    let domains = domains(&described.requests)?;
    if domains.len() != trace.requests() {
        let found = format!("{} lines in {}", domains.len(), described.requests.display());
        return Err(BenchError::Input { found, expected: "expected one for each request of the trace" });
    }
    let of_kind = |kind: &(&str, &[&str])| {
        Ok(TraceBuilder::select(&trace, |number, _| kind.1.contains(&domains[number].as_str()))?)
    };
    KINDS.iter().map(of_kind).collect()
}

/// The field "domain" of every line.
fn domains(path: &Path) -> Result<Vec<String>, BenchError> {
    let cannot = |cause: String| BenchError::Read { path: path.display().to_string(), cause };
    let text = std::fs::read_to_string(path).map_err(|error| cannot(error.to_string()))?;
    let domain = |(number, line): (usize, &str)| {
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|error| cannot(format!("line {}: {error}", number + 1)))?;
        let domain = value.get("domain").and_then(serde_json::Value::as_str);
        domain.map(str::to_owned).ok_or_else(|| cannot(format!("line {} has no \"domain\"", number + 1)))
    };
    text.lines().enumerate().map(domain).collect()
}
