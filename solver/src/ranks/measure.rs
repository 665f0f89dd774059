//! Remote ranks per token of any clustering, counted occurrence by occurrence.

use semmoe_tables::Trace;

use super::routes::{UnitOf, distinct_groups, fill};
use crate::transport::Plan;

/// Ranks other than its unit's that a token is sent to, mean over the tokens and layers of a trace that units stand
/// for; a split unit counts by share. `None` if there are none. `layers` has the masses, the plan and the experts'
/// groups of each.
pub(crate) fn remote_ranks(trace: &Trace, unit_of: &UnitOf, layers: &[(&[u64], &Plan, &[u16])]) -> Option<f64> {
    let (mut remote, mut routes) = (0.0, 0u64);
    let mut seen = Vec::new();
    let mut set: Vec<u16> = Vec::new();
    for (request, position, unit) in unit_of.tokens(trace) {
        for (layer, route) in request.routes(position) {
            let (mass, plan, group_of) = layers[layer.index()];
            fill(&mut set, route);
            distinct_groups(&set, group_of, &mut seen);
            remote += seen.len() as f64 - own_share(plan, mass, unit, &seen);
            routes += 1;
        }
    }
    (routes > 0).then(|| remote / routes as f64)
}

/// The part of a unit that lies in these groups.
fn own_share(plan: &Plan, mass: &[u64], unit: usize, groups: &[u16]) -> f64 {
    let among = |group: u16| groups.binary_search(&group).is_ok();
    match plan.splits.binary_search_by_key(&unit, |split| split.unit) {
        Err(_) => f64::from(u8::from(among(plan.label[unit]))),
        Ok(split) => {
            let parts = plan.splits[split].parts.iter().filter(|part| among(part.0));
            parts.map(|part| part.1 as f64).sum::<f64>() / mass[unit] as f64
        }
    }
}
