//! Experts moved against local activations when traffic drifts: updates old tables to new traffic at several costs of a
//! move.

use std::path::Path;
use std::sync::Arc;

use semmoe_solver::{SolveOptions, WarmStart, solve};
use semmoe_tables::{Attention, Profile};

use crate::domains::merged;
use crate::error::BenchError;
use crate::markdown::{Table, load, rate};
use crate::methods::{Setting, quiet, solve_options};

const COSTS: [f64; 7] = [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 1e9];

/// Solves on `old` (attention tp), then from those tables on `new`, or with `mix` on both together.
pub(crate) fn run(old: &Path, new: &Path, mix: bool, groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let (old, mut new) = (Profile::open(old)?, Profile::open(new)?);
    if mix {
        new = merged([&old, &new].into_iter())?;
    }
    for &groups in groups {
        let setting = Setting { groups, ..setting.clone() };
        let base = SolveOptions { bounds: None, ..solve_options(&setting, Attention::Tp) };
        let deployed = Arc::new(solve(&old, None, &base, &mut quiet)?.tables);
        let cold = solve(&new, None, &base, &mut quiet)?.report;
        let experts = new.model().layers() * usize::from(new.model().num_experts);
        let title = format!("**{groups} groups, {experts} experts**: LAR {:.4} without the old tables", cold.lar);
        let columns = ["C", "experts moved", "by layer", "LAR before", "LAR", "expert load", "limit met"];
        let mut table = Table::new(title, &columns);
        for migration_cost in COSTS {
            let warm_start = Some(WarmStart { tables: Arc::clone(&deployed), migration_cost });
            let report = solve(&new, None, &SolveOptions { warm_start, ..base.clone() }, &mut quiet)?.report;
            let migration = report.migration.as_ref();
            table.rows.push(vec![
                migration_cost.to_string(),
                migration.map_or_else(String::new, |moved| moved.experts_moved.to_string()),
                migration.map_or_else(String::new, |moved| format!("{:?}", moved.experts_moved_per_layer)),
                migration.map_or_else(String::new, |moved| rate(moved.lar_before)),
                rate(report.lar),
                load(report.expert_load_imbalance),
                report.expert_load_limit_met.to_string(),
            ]);
        }
        table.print()?;
    }
    Ok(())
}
