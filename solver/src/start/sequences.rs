//! Balances sequences as well as tokens: each request is one sequence, regardless of its number of tokens, and the
//! number of sequences on a rank determines its decode speed.
//!
//! The best division of the requests under both limits gives each group a price per sequence. With these prices
//! subtracted from the profits, the unit step remains a transportation problem of tokens, so a start first searches
//! without sequence prices and then continues with them. The value of the division is the plan's value plus the price
//! of each group's sequence capacity; starts are compared by it.

use crate::input::Margins;
use crate::start::alternate::{Watch, search_on};
use crate::step::{Clustering, PROFIT_ONE, Requests, SequencePrice, Stop, Task, to_profit, unit_step, weighed_profits};

/// Continues from `found` with sequence prices, and returns the best result, with the prices of its division.
pub(crate) fn balance_sequences(task: Task<'_>, margins: Margins, found: Clustering, watch: Watch<'_>) -> Clustering {
    let Some(first) = priced(task, margins, &found, watch.stop) else { return found };
    let next = search_on(Task { sequences: &first.sequences, ..task }, first.clone(), watch);
    priced(task, margins, &next, watch.stop).filter(|next| next.beats(&first)).unwrap_or(first)
}

/// Adds sequence prices to `found` if its limits require them.
pub(crate) fn with_prices(task: Task<'_>, found: Clustering, stop: Stop<'_>) -> Clustering {
    task.limits.sequences.and_then(|margins| priced(task, margins, &found, stop)).unwrap_or(found)
}

/// Keeps the placement; returns it with the sequence prices of its best division and the unit plan under these prices,
/// or `None` if stopped.
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
