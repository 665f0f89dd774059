//! Priors of T for rare and unseen tokens: on another domain, and after few requests.

use std::path::Path;
use std::sync::Arc;

use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, UnseenTokens, evaluate, solve};
use semmoe_tables::{Attention, Embeddings, Profile, Trace, TraceBuilder};

use crate::domains::merged;
use crate::error::BenchError;
use crate::markdown::{Table, load, rate};
use crate::methods::{Setting, quiet, solve_options};
use crate::synthetic::profile;

/// Solves on all profiles but one and judges on that one, with each prior of the strings: means; attention tp.
pub(crate) fn domains(paths: &[impl AsRef<Path>], groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let profiles = paths.iter().map(|path| Profile::open(path.as_ref())).collect::<Result<Vec<_>, _>>()?;
    let title = "**Rare and unseen tokens**: solved on the other profiles, mean of all judged";
    let mut table = Table::new(title, &["groups", "unseen tokens", "LAR", "token load", "expert load"]);
    for &groups in groups {
        let strings =
            SolveOptions { bounds: None, ..solve_options(&Setting { groups, ..setting.clone() }, Attention::Tp) };
        let neutral = SolveOptions { token_strings: None, ..strings.clone() };
        let layer = SolveOptions { unseen: UnseenTokens::LayerShare, ..neutral.clone() };
        for (name, options) in [("neutral", neutral), ("the layer's shares", layer), ("by strings", strings)] {
            let mut means = [0.0; 3];
            for (held, judged) in profiles.iter().enumerate() {
                let others = profiles.iter().enumerate().filter(|(other, _)| *other != held);
                let solved = solve(&merged(others.map(|(_, profile)| profile))?, None, &options, &mut quiet)?;
                let found = evaluate(&solved.tables, EvalInput::Profile(judged), &EvalOptions::default())?;
                let figures = [found.lar, found.token_imbalance, found.expert_load_imbalance];
                means.iter_mut().zip(figures).for_each(|(mean, figure)| *mean += figure / profiles.len() as f64);
            }
            let [lar, tokens, experts] = means;
            table.rows.push(vec![groups.to_string(), name.into(), rate(lar), load(tokens), load(experts)]);
        }
    }
    Ok(table.print()?)
}

/// Traces and embeddings of one model.
pub(crate) struct Few<'a> {
    pub(crate) solve: &'a Path,
    pub(crate) judge: &'a Path,
    pub(crate) embeddings: &'a Path,
    /// Numbers of requests to solve on, one after the other.
    pub(crate) requests: &'a [usize],
}

/// Solves on the first requests of one trace and judges on another, most of whose tokens are then rare or unseen.
pub(crate) fn few(few: &Few<'_>, groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let (all, other) = (Trace::open(few.solve)?, Trace::open(few.judge)?);
    let embeddings = Embeddings::open(few.embeddings, None)
        .map_err(|error| BenchError::Read { path: few.embeddings.display().to_string(), cause: error.to_string() })?;
    let embeddings = Some(Arc::new(embeddings));
    for &requests in few.requests {
        let trace = TraceBuilder::select(&all, |at, _| at < requests)?;
        let counts = profile(&trace)?;
        let title =
            format!("**{requests} requests**, {:.3} of the other trace's tokens unseen", unseen(&counts, &other));
        let columns = ["attention", "groups", "T knows", "LAR", "all at once by T", "token load"];
        let mut table = Table::new(title, &columns);
        for &groups in groups {
            for attention in [Attention::Tp, Attention::Dp] {
                let both = SolveOptions {
                    bounds: None,
                    embeddings: embeddings.clone(),
                    ..solve_options(&Setting { groups, ..setting.clone() }, attention)
                };
                let strings = SolveOptions { embeddings: None, ..both.clone() };
                let none = SolveOptions { token_strings: None, ..strings.clone() };
                let vectors = SolveOptions { token_strings: None, ..both.clone() };
                let variants =
                    [("counts", none), ("and strings", strings), ("and embeddings", vectors), ("and both", both)];
                for (name, options) in variants {
                    let solved = solve(&counts, Some(&trace), &options, &mut quiet)?;
                    let found = evaluate(&solved.tables, EvalInput::Trace(&other), &EvalOptions::default())?;
                    table.rows.push(vec![
                        attention.to_string(),
                        groups.to_string(),
                        name.into(),
                        rate(found.lar),
                        found.batch_predicted.map_or_else(String::new, |by_t| rate(by_t.request_lar)),
                        load(found.token_imbalance),
                    ]);
                }
            }
        }
        table.print()?;
    }
    Ok(())
}

/// Share of a trace's tokens that a profile has not counted.
fn unseen(counts: &Profile, trace: &Trace) -> f64 {
    let tokens = || trace.iter().flat_map(|request| request.token_ids().iter());
    let unseen = tokens().filter(|token| counts.token_counts()[**token as usize] == 0).count();
    unseen as f64 / tokens().count().max(1) as f64
}
