//! Routing settings measured on one trace alone: solves on its even requests, judges on its odd ones.
//! `tune PROFILE.trace.safetensors [GROUPS...]`. The defaults of `semmoe_routing::Settings` were chosen with it.

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use semmoe_routing::Settings;
use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, evaluate, solve};
use semmoe_tables::{Attention, Phase, ProfileBuilder, Provenance, Tables, Trace, TraceBuilder};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, groups @ ..] = &arguments[..] else {
        return Err("usage: tune PROFILE.trace [GROUPS...]".into());
    };
    let groups: Vec<u16> = groups.iter().map(|groups| groups.parse()).collect::<Result<_, _>>()?;
    let groups = if groups.is_empty() { vec![4, 8] } else { groups };
    let trace = Trace::open(Path::new(path))?;
    let even = TraceBuilder::select(&trace, |request, _| request % 2 == 0)?;
    let odd = TraceBuilder::select(&trace, |request, _| request % 2 == 1)?;
    let piece = |n: usize| TraceBuilder::select(&odd, |request, _| request / 250 == n);
    let pieces: Vec<Trace> = (0..odd.requests() / 250).map(piece).collect::<Result<_, _>>()?;
    let provenance = Provenance { source: "tune".into(), created: "2026-01-01T00:00:00Z".into() };
    let mut profile = ProfileBuilder::new(trace.model().clone(), provenance.clone(), Phase::All)?;
    profile.add_trace(&even)?;
    let profile = profile.finish()?;

    let mut out = std::io::stdout();
    for groups in groups {
        let options = SolveOptions { threads: 2, ..SolveOptions::new(groups, Attention::Dp, provenance.clone()) };
        let tables = solve(&profile, Some(&even), &options, &mut |_| ControlFlow::Continue(()))?.tables;
        writeln!(
            out,
            "ranks step backlog margin slack half_life | lar imbalance at 16, 64, 256 in flight, at 64 over pieces of 250 requests (mean, mean, worst)"
        )?;
        for settings in grid() {
            let Settings { backlog_weight, load_margin, load_slack, half_life_requests, price_step } = settings;
            write!(out, "{groups} {price_step} {backlog_weight} {load_margin} {load_slack} {half_life_requests} |")?;
            for concurrency in [16, 64, 256] {
                let (lar, imbalance) = judge(&tables, &odd, settings.clone(), concurrency)?;
                write!(out, " {lar:.4} {imbalance:.3}")?;
            }
            let (mut lar, mut imbalance, mut worst) = (0.0, 0.0, 0.0f64);
            for piece in &pieces {
                let figures = judge(&tables, piece, settings.clone(), 64)?;
                lar += figures.0 / pieces.len() as f64;
                imbalance += figures.1 / pieces.len() as f64;
                worst = worst.max(figures.1);
            }
            writeln!(out, " | {lar:.4} {imbalance:.3} {worst:.3}")?;
        }
    }
    Ok(())
}

/// One setting varied at a time, around the defaults.
fn grid() -> Vec<Settings> {
    let base = Settings::default;
    let mut grid = vec![base()];
    grid.extend([0.0003, 0.001, 0.002, 0.003, 0.005, 0.01].map(|price_step| Settings { price_step, ..base() }));
    grid.extend([0.0, 0.0005, 0.001, 0.002, 0.005, 0.01].map(|weight| Settings { backlog_weight: weight, ..base() }));
    grid.extend([0.02, 0.05, 0.10, 0.15].map(|load_margin| Settings { load_margin, ..base() }));
    grid.extend([0.0, 0.3, 0.6, 1.0, 1.5].map(|slack| Settings { load_slack: slack, ..base() }));
    grid.extend([16.0, 32.0, 64.0, 256.0].map(|half_life_requests| Settings { half_life_requests, ..base() }));
    grid
}

fn judge(tables: &Tables, trace: &Trace, routing: Settings, concurrency: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let policies = vec!["affinity".to_owned()];
    let options = EvalOptions { concurrency, policies, routing, ..EvalOptions::default() };
    let judged = evaluate(tables, EvalInput::Trace(trace), &options)?;
    Ok((judged.lar, judged.token_imbalance))
}
