//! The routing policy's settings, one varied at a time around the defaults: solved on a trace's even requests, judged
//! on its odd ones. The defaults of `semmoe_routing::Settings` were chosen with it.

use std::path::Path;

use semmoe_routing::Settings;
use semmoe_solver::{EvalInput, EvalOptions, evaluate, solve};
use semmoe_tables::{Attention, Trace, TraceBuilder};

use crate::error::BenchError;
use crate::markdown::{Table, load, rate};
use crate::methods::{Setting, quiet, solve_options};
use crate::synthetic::profile;

/// Requests in flight.
const IN_FLIGHT: [usize; 3] = [16, 64, 256];

/// One row for each setting: LAR, and token load in the worst 64 consecutive requests, by requests in flight.
pub(crate) fn run(path: &Path, groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let trace = Trace::open(path)?;
    let half = |odd: usize| TraceBuilder::select(&trace, |request, _| request % 2 == odd);
    let (even, odd) = (half(0)?, half(1)?);
    let counts = profile(&even)?;
    for &groups in groups {
        let options = solve_options(&Setting { groups, ..setting.clone() }, Attention::Dp);
        let tables = solve(&counts, Some(&even), &options, &mut quiet)?.tables;
        let title = format!("**Settings of `affinity`, {groups} ranks**: at 16, 64 and 256 requests in flight");
        let mut table = Table::new(title, &["setting", "LAR", "load", "LAR", "load", "LAR", "load"]);
        for (name, routing) in grid() {
            let mut row = vec![name];
            for concurrency in IN_FLIGHT {
                let (policies, routing) = (vec!["affinity".to_owned()], routing.clone());
                let options = EvalOptions { concurrency, policies, routing, ..EvalOptions::default() };
                let judged = evaluate(&tables, EvalInput::Trace(&odd), &options)?;
                let figures = judged.policies.and_then(|policies| policies.get("affinity").copied());
                row.extend(figures.map_or_else(
                    || [String::new(), String::new()],
                    |found| [rate(found.request_lar), load(found.burst_imbalance)],
                ));
            }
            table.rows.push(row);
        }
        table.print()?;
    }
    Ok(())
}

fn grid() -> Vec<(String, Settings)> {
    let mut grid = vec![("defaults".to_owned(), Settings::default())];
    let mut vary = |name: &str, values: &[f64], set: fn(&mut Settings, f64)| {
        for &value in values {
            let mut settings = Settings::default();
            set(&mut settings, value);
            grid.push((format!("{name} {value}"), settings));
        }
    };
    vary("communication", &[0.1, 0.3, 1.0, 3.0], |of, value| of.communication = value);
    vary("in_flight_weight", &[0.0, 0.0005, 0.001, 0.004], |of, value| of.in_flight_weight = value);
    vary("load_margin", &[0.02, 0.10, 0.20], |of, value| of.load_margin = value);
    vary("load_slack", &[0.0, 0.3, 0.6, 1.5], |of, value| of.load_slack = value);
    vary("memory", &[32.0, 64.0, 256.0], |of, value| of.memory = value as _);
    vary("price_step", &[0.0005, 0.001, 0.003, 0.005], |of, value| of.price_step = value);
    vary("sequence_price_step", &[0.0, 0.001, 0.002, 0.004, 0.008], |of, value| of.sequence_price_step = value);
    grid
}
