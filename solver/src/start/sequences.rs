//! The second weight of requests: each is one sequence, whatever its number of tokens, and a rank's sequences set the
//! pace of decode.
//!
//! The best division of the requests under both limits gives each group a price per sequence. With these prices
//! subtracted from the profits, the unit step remains a transportation problem of tokens, so a start first searches
//! without them and then continues with them. The plan's value plus the value of each group's room for sequences is the
//! division's; starts are compared by it.

use crate::input::Margins;
use crate::start::alternate::{Watch, search_on};
use crate::step::{Clustering, PROFIT_ONE, Requests, SequencePrice, Stop, Task, to_profit, unit_step, weighed_profits};

/// Continues from `found` with prices of sequences, and returns the best result with its own prices.
pub(crate) fn balance_sequences(task: Task<'_>, margins: Margins, found: Clustering, watch: Watch<'_>) -> Clustering {
    let Some(first) = priced(task, margins, &found, watch.stop) else { return found };
    let next = search_on(Task { sequences: &first.sequences, ..task }, first.clone(), watch);
    priced(task, margins, &next, watch.stop).filter(|next| next.beats(&first)).unwrap_or(first)
}

/// Adds prices of sequences to `found`, if its limits require them.
pub(crate) fn with_prices(task: Task<'_>, found: Clustering, stop: Stop<'_>) -> Clustering {
    task.limits.sequences.and_then(|margins| priced(task, margins, &found, stop)).unwrap_or(found)
}

/// Keeps the placement, with the prices of its best division and the unit plan under them. `None` if stopped.
fn priced(task: Task<'_>, margins: Margins, found: &Clustering, stop: Stop<'_>) -> Option<Clustering> {
    let Task { problem, limits, .. } = task;
    let tokens: Vec<f64> = problem.mass.iter().map(|&mass| mass as f64).collect();
    let profit = weighed_profits(problem, &found.group_of, limits.groups, limits.topology);
    let rows = profit.chunks_exact(limits.groups).zip(&tokens);
    let value: Vec<f64> =
        rows.flat_map(|(row, tokens)| row.iter().map(move |&profit| profit as f64 / PROFIT_ONE * tokens)).collect();
    let division = Requests { tokens: &tokens, value: &value, ranks: limits.groups }.divide(margins);
    let price: Vec<i64> = division.sequence_price.iter().map(|&price| to_profit(price)).collect();
    let room = (1.0 + margins.sequences) * problem.units() as f64 / limits.groups as f64;
    let of_room = price.iter().map(|&price| (price as f64 * room).ceil() as i128).sum();
    let sequences = SequencePrice { price, of_room };
    let plan = unit_step(&Task { sequences: &sequences, ..task }, &found.group_of, Some(&found.plan.price), stop)?;
    Some(Clustering { plan, sequences, ..found.clone() })
}
