//! Experts moved against local activations when traffic drifts: `drift OLD.profile NEW.profile [--mix] [GROUPS...]`.
//!
//! Solves on OLD (attention tp), then on NEW (with `--mix` on both together) from those tables at several costs of a
//! move. The figures of this crate's README come from it.

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use semmoe_solver::{SolveOptions, WarmStart, solve};
use semmoe_tables::{Attention, Profile, ProfileBuilder, Provenance};

const COSTS: [f64; 7] = [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 1e9];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut take = |name: &str| arguments.iter().position(|argument| argument == name).map(|at| arguments.remove(at));
    let mix = take("--mix").is_some();
    let [old, new, groups @ ..] = &arguments[..] else {
        return Err("usage: drift OLD.profile NEW.profile [--mix] [GROUPS...]".into());
    };
    let groups: Vec<u16> = groups.iter().map(|groups| groups.parse()).collect::<Result<_, _>>()?;
    let groups = if groups.is_empty() { vec![4, 8] } else { groups };
    let (old, mut new) = (Profile::open(Path::new(old))?, Profile::open(Path::new(new))?);
    let provenance = Provenance { source: "drift".into(), created: "2026-01-01T00:00:00Z".into() };
    if mix {
        let mut both = ProfileBuilder::new(old.model().clone(), provenance.clone(), old.phase())?;
        both.add_profile(&old)?;
        both.add_profile(&new)?;
        new = both.finish()?;
    }
    let mut quiet = |_| ControlFlow::Continue(());
    let mut out = std::io::stdout();
    for groups in groups {
        let base = SolveOptions {
            starts: 8,
            threads: 2,
            bounds: None,
            ..SolveOptions::new(groups, Attention::Tp, provenance.clone())
        };
        let deployed = Arc::new(solve(&old, None, &base, &mut quiet)?.tables);
        let cold = solve(&new, None, &base, &mut quiet)?.report;
        let experts = new.model().layers() * usize::from(new.model().num_experts);
        writeln!(out, "{groups} groups, {experts} experts: cold solve {:.4}", cold.lar)?;
        for migration_cost in COSTS {
            let warm_start = Some(WarmStart { tables: Arc::clone(&deployed), migration_cost });
            let report = solve(&new, None, &SolveOptions { warm_start, ..base.clone() }, &mut quiet)?.report;
            let migration = report.migration.as_ref().ok_or("a warm start without its report")?;
            writeln!(
                out,
                "  C {migration_cost}: {} experts moved {:?}, lar {:.4} before, {:.4} after, expert load {:.3}, limit met {}",
                migration.experts_moved,
                migration.experts_moved_per_layer,
                migration.lar_before,
                report.lar,
                report.expert_load_imbalance,
                report.expert_load_limit_met
            )?;
        }
    }
    Ok(())
}
