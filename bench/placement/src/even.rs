//! Time that a rank takes to split the rows of a layer evenly (attention tp).

use std::path::Path;
use std::time::{Duration, Instant};

use semmoe_tables::{EvenGroups, GroupId, LayerIdx, Placement, Tables, TokenId, Trace, TraceRequest};

use crate::error::BenchError;
use crate::markdown::Table;

/// A token and its groups in the previous two layers.
type Row = (TokenId, Option<(GroupId, GroupId)>);

/// Every layer of every whole step of `step_tokens` tokens.
pub(crate) fn run(tables: &Path, trace: &Path, step_tokens: usize) -> Result<(), BenchError> {
    let (tables, trace) = (Tables::open(tables)?, Trace::open(trace)?);
    let mut even = EvenGroups::new(tables.groups());
    let mut times = Vec::new();
    for layer in (0..tables.placement().layers()).map(|layer| LayerIdx::new(layer as u16)) {
        let rows = rows(&tables, &trace, layer);
        times.extend(rows.chunks_exact(step_tokens).map(|step| split(&tables, layer, step, &mut even)));
    }
    times.sort_unstable();
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).map_or(0.0, |time| 1e6 * time.as_secs_f64());
    let mut table =
        Table::new(format!("Rows of a layer split, steps of {step_tokens} tokens"), &["layers", "median us", "p99 us"]);
    table.rows.push(vec![times.len().to_string(), format!("{:.1}", at(0.5)), format!("{:.1}", at(0.99))]);
    Ok(table.print()?)
}

fn split(tables: &Tables, layer: LayerIdx, step: &[Row], even: &mut EvenGroups) -> Duration {
    let began = Instant::now();
    even.clear();
    for &(token, before) in step {
        even.push(|shares| tables.group_shares(layer, token, before, shares));
    }
    even.settle();
    began.elapsed()
}

fn rows(tables: &Tables, trace: &Trace, layer: LayerIdx) -> Vec<Row> {
    let row = |request: TraceRequest<'_>, at: usize| -> Row {
        let main = |layer: usize| main_group(tables.placement(), LayerIdx::new(layer as u16), request, at);
        let before = layer.index().checked_sub(2).and_then(|older| Some((main(older)?, main(older + 1)?)));
        (TokenId::new(request.token_ids()[at]), before)
    };
    trace.iter().flat_map(|request| (0..request.token_ids().len()).map(move |at| row(request, at))).collect()
}

fn main_group(placement: &Placement, layer: LayerIdx, request: TraceRequest<'_>, at: usize) -> Option<GroupId> {
    request.route(at, layer).map(|route| placement.main_group(layer, route.experts(), &mut Vec::new()))
}
