//! Routing settings measured on one trace alone: solves on its even requests, judges on its odd ones.
//! `tune PROFILE.trace.safetensors [GROUPS...]`. The defaults of `semmoe_routing::Settings` were chosen with it.

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use semmoe_routing::Settings;
use semmoe_solver::{EvalInput, EvalOptions, RequestFigures, SolveOptions, evaluate, solve};
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
            "ranks gamma in_flight margin slack burst memory step pull | lar imbalance, worst and mean of 64 requests; at 16, 64, 256 in flight"
        )?;
        for settings in grid() {
            let Settings { communication, in_flight_weight, load_margin, load_slack, burst_slack, .. } = settings;
            let Settings { memory, price_step, price_pull, .. } = settings;
            write!(out, "{groups} {communication} {in_flight_weight} {load_margin} {load_slack} {burst_slack} ")?;
            write!(out, "{memory} {price_step} {price_pull} |")?;
            for concurrency in [16, 64, 256] {
                let figures = judge(&tables, &odd, settings.clone(), concurrency)?;
                let RequestFigures { request_lar, request_imbalance, burst_imbalance, burst_imbalance_mean, .. } =
                    figures;
                write!(
                    out,
                    " | {request_lar:.4} {request_imbalance:.3} {burst_imbalance:.3} {burst_imbalance_mean:.3}"
                )?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

/// One setting varied at a time, around the defaults.
fn grid() -> Vec<Settings> {
    let base = Settings::default;
    let mut grid = vec![base()];
    grid.extend([0.1, 0.3, 1.0, 3.0].map(|communication| Settings { communication, ..base() }));
    grid.extend([0.0, 0.0005, 0.001, 0.004].map(|weight| Settings { in_flight_weight: weight, ..base() }));
    grid.extend([0.02, 0.10, 0.20].map(|load_margin| Settings { load_margin, ..base() }));
    grid.extend([0.0, 0.3, 0.6, 1.5].map(|slack| Settings { load_slack: slack, ..base() }));
    grid.extend([0.0, 0.5, 1.0, 1.5, 3.0, 1000.0].map(|slack| Settings { burst_slack: slack, ..base() }));
    grid.extend([32, 64, 256].map(|memory| Settings { memory, ..base() }));
    grid.extend([0.0005, 0.001, 0.003, 0.005].map(|price_step| Settings { price_step, ..base() }));
    grid.extend([0.0, 0.02, 0.05, 0.1, 0.2].map(|pull| Settings { price_pull: pull, ..base() }));
    grid
}

fn judge(
    tables: &Tables,
    trace: &Trace,
    routing: Settings,
    concurrency: usize,
) -> Result<RequestFigures, Box<dyn Error>> {
    let policies = vec!["affinity".to_owned()];
    let options = EvalOptions { concurrency, policies, routing, ..EvalOptions::default() };
    let judged = evaluate(tables, EvalInput::Trace(trace), &options)?;
    let figures = judged.policies.and_then(|policies| policies.get("affinity").copied());
    figures.ok_or_else(|| "no figures of affinity".into())
}
