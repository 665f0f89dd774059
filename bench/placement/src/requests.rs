//! Whole requests, one rank for all layers: solved on one trace, judged on another.

use std::path::Path;

use half::f16;
use semmoe_solver::{
    EvalInput, EvalOptions, Evaluation, PaperCap, RequestFigures, Solved, evaluate, solve, solve_paper,
};
use semmoe_tables::{Attention, Placement, Profile, Tables, TablesBuilder, Trace};

use crate::error::BenchError;
use crate::markdown::{Table, load, rate};
use crate::methods::{Setting, baselines, paper_options, provenance, quiet, solve_options};
use crate::synthetic::profile;

/// Prints the benefit of every placement's batch optimum on the trace `judge`.
pub(crate) fn run(solve_on: &Path, judge_on: &Path, groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let (solving, judging) = (Trace::open(solve_on)?, Trace::open(judge_on)?);
    let counts = profile(&solving)?;
    for &groups in groups {
        let setting = Setting { groups, ..setting.clone() };
        let title = format!(
            "**{}, {groups} ranks, requests**: solved on {} requests, judged on {} others",
            counts.model().model,
            solving.requests(),
            judging.requests()
        );
        table(&title, &counts, &solving, &judging, &setting)?.print()?;
    }
    Ok(())
}

fn table(
    title: &str,
    counts: &Profile,
    solving: &Trace,
    judging: &Trace,
    setting: &Setting,
) -> Result<Table, BenchError> {
    let columns =
        ["method", "batch optimum", "token load", "by T", "token load", "expert load", "gain / Algorithm 1's"];
    let mut rows: Vec<(String, Evaluation, bool)> = Vec::new();
    for placed in baselines(counts, setting)? {
        let tables = neutral(counts, &placed.placement)?;
        rows.push((placed.name.clone(), judge(&tables, judging, setting)?, false));
    }
    let mut paper_gain = 0.0f64;
    for (name, solved, is_paper) in solved(counts, solving, setting)? {
        let found = judge(&solved.tables, judging, setting)?;
        if is_paper {
            paper_gain = paper_gain.max(optimum(&found).request_lar - found.lar_random);
        }
        rows.push((name, found, true));
    }
    let mut table = Table::new(title, &columns);
    let random = rows.first().map_or(0.0, |row| row.1.lar_random);
    table.rows.push(vec![
        "any, random ranks".into(),
        rate(random),
        "".into(),
        "".into(),
        "".into(),
        "".into(),
        "0.00".into(),
    ]);
    for (name, found, own) in &rows {
        let best = optimum(found);
        let by_t = found.batch_predicted.filter(|_| *own);
        table.rows.push(vec![
            name.clone(),
            rate(best.request_lar),
            load(best.request_imbalance),
            by_t.map_or_else(String::new, |by_t| rate(by_t.request_lar)),
            by_t.map_or_else(String::new, |by_t| load(by_t.request_imbalance)),
            load(found.expert_load_imbalance),
            format!("{:.2}", (best.request_lar - found.lar_random) / paper_gain),
        ]);
    }
    Ok(table)
}

/// The paper's algorithm and ours, on tokens and on requests.
fn solved(counts: &Profile, trace: &Trace, setting: &Setting) -> Result<Vec<(String, Solved, bool)>, BenchError> {
    let options = solve_options(setting, Attention::Dp);
    let mut all = Vec::new();
    for (unit, given) in [("tokens", None), ("requests", Some(trace))] {
        for (cap, limits) in [(PaperCap::Units, unit), (PaperCap::Tokens, "tokens")] {
            let found = solve_paper(counts, given, &options, &paper_options(cap), &mut quiet)?;
            let what = if cap == PaperCap::Units { "as printed".to_owned() } else { format!("cap on {limits}") };
            all.push((format!("Algorithm 1 on {unit}, {what}"), found, unit == "requests"));
        }
    }
    for (unit, given) in [("tokens", None), ("requests", Some(trace))] {
        all.push((format!("semmoe on {unit}"), solve(counts, given, &options, &mut quiet)?, false));
    }
    Ok(all)
}

fn optimum(found: &Evaluation) -> RequestFigures {
    // Every trace judged with attention dp has one.
    found.batch_optimum.unwrap_or(RequestFigures {
        request_lar: found.lar,
        remote_ranks_per_token: found.remote_ranks_per_token.unwrap_or(f64::NAN),
        request_imbalance: 1.0,
        burst_imbalance: 1.0,
        burst_imbalance_mean: 1.0,
        ..RequestFigures::default()
    })
}

fn judge(tables: &Tables, trace: &Trace, setting: &Setting) -> Result<Evaluation, BenchError> {
    let options = EvalOptions { policies: Vec::new(), token_margin: setting.token_margin, ..EvalOptions::default() };
    Ok(evaluate(tables, EvalInput::Trace(trace), &options)?)
}

/// Tables without token labels: only their placement is judged.
fn neutral(counts: &Profile, placement: &Placement) -> Result<Tables, BenchError> {
    let groups = usize::from(placement.groups());
    let shares = vec![f16::from_f64(1.0 / groups as f64); counts.model().vocab_size as usize * groups];
    let builder = TablesBuilder::dp(counts.model().clone(), provenance(), placement.clone(), shares, vec![0.0; groups]);
    Ok(builder.finish()?)
}
