//! Measures collectives between ranks by size, and the interpolation error at sizes between the tables' entries.

use std::time::Duration;

use semmoe_kernels::collectives::{AllRows, OwnRows};
use semmoe_kernels::{DispatchPlan, RowSplit, even_offsets};
use semmoe_planner::cluster::{Curve, Measured, Operator};

use super::team::{Meeting, Team, Unit, on_ranks, seconds};
use crate::error::CliError;

/// Elements per row.
const HIDDEN: usize = 256;
/// Total rows over all ranks: the tables' sizes, and sizes between them.
const ROWS: [usize; 6] = [4, 16, 64, 256, 1024, 4096];
const ROWS_BETWEEN: [usize; 3] = [32, 128, 2048];

/// A pair of collectives as used in a layer: one before the experts, one after.
#[derive(Clone, Copy, Debug)]
enum Pair {
    /// Reduce-scatter and allgather.
    Scatter,
    /// Dispatch and combine, with rows distributed over the ranks in rotation.
    AllToAll,
    /// Dispatch and combine, with all rows sent to the next rank.
    PointToPoint,
}

const PAIRS: [Pair; 3] = [Pair::Scatter, Pair::AllToAll, Pair::PointToPoint];

/// Measured tables for one number of ranks.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) tables: Vec<Measured>,
    /// Predicted and measured seconds at sizes between the tables' entries.
    pub(super) between: Vec<[f64; 2]>,
}

/// Number of measurements per number of ranks, used to divide the time.
pub(super) const MEASUREMENTS: usize = PAIRS.len() * (ROWS.len() + ROWS_BETWEEN.len());
/// Number of elements in the largest collective.
pub(super) const ELEMENTS: usize = ROWS[ROWS.len() - 1] * HIDDEN;

/// Measures a team's collectives, each size for about `each`.
pub(super) fn measure(team: Team, level: &str, each: Duration) -> Result<Links, CliError> {
    let times = on_ranks(team.units()?, |rank, mut unit, meeting| {
        let sizes = || ROWS.into_iter().chain(ROWS_BETWEEN);
        let all = PAIRS.into_iter().flat_map(|pair| sizes().map(move |rows| (pair, rows)));
        all.map(|(pair, rows)| one(rank, meeting, &mut unit, pair, rows, each)).collect::<Result<Vec<f64>, _>>()
    })?;
    let mut links = Links { tables: Vec::new(), between: Vec::new() };
    let mut add = |operator, rows_of: &dyn Fn(usize) -> usize, times: &[f64], share: f64| -> Result<(), CliError> {
        let point =
            |(rows, seconds): (usize, &f64)| [(rows_of(rows) * HIDDEN * size_of::<f32>()) as f64, seconds * share];
        let (at, between) = times.split_at(ROWS.len());
        let points = Curve::new(ROWS.into_iter().zip(at).map(point).collect());
        let points = points.ok_or_else(|| CliError::failed("a collective took no measurable time"))?;
        let table = Measured { level: level.to_owned(), operator, ranks: team.ranks as u64, points };
        let held_out = ROWS_BETWEEN.into_iter().zip(between).map(point);
        links.between.extend(held_out.map(|[bytes, seconds]| [table.seconds(bytes), seconds]));
        links.tables.push(table);
        Ok(())
    };
    for (pair, times) in PAIRS.into_iter().zip(times.chunks(ROWS.len() + ROWS_BETWEEN.len())) {
        // Reduction tables count the entire tensor, other tables one rank's part.
        match pair {
            Pair::Scatter => {
                add(Operator::Scatter, &|rows| rows, times, 0.5)?;
                add(Operator::AllReduce, &|rows| rows, times, 1.0)?;
            }
            Pair::AllToAll => add(Operator::AllToAll, &|rows| rows / team.ranks, times, 0.5)?,
            Pair::PointToPoint => add(Operator::PointToPoint, &|rows| rows / team.ranks, times, 0.5)?,
        }
    }
    Ok(links)
}

/// Measures the seconds that one pair takes for `rows` rows over all ranks.
fn one(
    rank: usize,
    meeting: &Meeting,
    unit: &mut Unit,
    pair: Pair,
    rows: usize,
    time: Duration,
) -> Result<f64, CliError> {
    let ranks = unit.world();
    let offsets = even_offsets(rows, ranks).map_err(CliError::failed)?;
    let split = RowSplit::contiguous(&offsets).map_err(CliError::failed)?;
    let own_rows = split.positions(rank).len();
    let mut own = vec![1.0; own_rows * HIDDEN];
    let to: fn(usize, usize, usize) -> usize = match pair {
        Pair::Scatter => {
            let mut all = vec![0.0; rows * HIDDEN];
            return seconds(rank, meeting, time, || {
                unit.part(rows * HIDDEN).map_err(CliError::failed)?.fill(1.0);
                unit.reduce_scatter(HIDDEN, split, None, &mut own).map_err(CliError::failed)?;
                let rows = OwnRows { rows: &own, hidden: HIDDEN, labels: &[], width: 0, bound: 1 };
                unit.allgather(rows, split, AllRows { rows: &mut all, labels: &mut [] }).map_err(CliError::failed)
            });
        }
        Pair::AllToAll => |row, _, ranks| row % ranks,
        Pair::PointToPoint => |_, rank, ranks| (rank + 1) % ranks,
    };
    // One expert per rank, one activation per row.
    let experts: Vec<u16> = (0..own_rows).map(|row| to(row, rank, ranks) as u16).collect();
    let hosts: Vec<u16> = (0..ranks as u16).collect();
    let mut plan = DispatchPlan::default();
    plan.build(&experts, &vec![1.0; own_rows], 1, &hosts, ranks).map_err(CliError::failed)?;
    let mut out = vec![0.0; own_rows * HIDDEN];
    seconds(rank, meeting, time, || {
        unit.dispatch(&own, HIDDEN, &plan).map_err(CliError::failed)?;
        unit.received().sums.fill(1.0);
        unit.combine(&plan, &mut out).map_err(CliError::failed)
    })
}
