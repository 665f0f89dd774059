//! Exact transportation of divisible units to groups of limited capacity, in integers.
//!
//! ```text
//! maximise    sum over t, c of  x[t,c] * profit[t,c]
//! subject to  sum over c of x[t,c] = mass[t]      for every unit t
//!             sum over t of x[t,c] <= capacity[c] for every group c,  x >= 0
//! ```
//!
//! Its dual has just one price per group, because the inner maximum splits by unit:
//!
//! ```text
//! min over price >= 0 of  sum over t of mass[t] * max over c of (profit[t,c] - price[c])  +  capacity . price
//! ```
//!
//! Both steps of the co-clustering are instances of this problem (module `expert_step` has masses of one and capacities
//! N/G). It is solved by successive shortest paths over the *groups*: every unit starts at its best group under the
//! start prices, and the excess of a group moves along the cheapest chain of groups to one with room. The cost of an
//! edge a -> b is the minimum loss `profit[t,a] - profit[t,b]` of any unit at a, kept in a heap per pair. A path
//! therefore takes G^2 steps, and there are about as many paths as units that have to move; start prices from the last
//! solve keep that number small. Unused capacity is modelled as a unit with zero profit, which makes the problem
//! balanced and the prices complementary. All arithmetic is in integers, so the result is exact and identical on every
//! machine.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A transportation problem: `mass` [U], `profit` [U, G] per unit of mass, `capacity` [G].
///
/// The caller guarantees at least one group, capacities that add up to at least the masses and to less than 2^62,
/// nonzero masses, and profits within +-2^56.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transport<'a> {
    pub(crate) mass: &'a [u64],
    pub(crate) profit: &'a [i64],
    pub(crate) capacity: &'a [u64],
}

/// A unit split over several groups: `parts` are masses by group, ascending, none zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) unit: usize,
    pub(crate) parts: Vec<(u16, u64)>,
}

impl Split {
    /// Adds the parts to the loads of the groups.
    pub(crate) fn add_to(&self, loads: &mut [u64]) {
        self.parts.iter().for_each(|&(group, part)| loads[usize::from(group)] += part);
    }

    /// Distributes a fixed-point number over the groups in proportion to the unit's parts of `mass`.
    pub(crate) fn spread(&self, whole: i64, mass: u64, row: &mut [i64]) {
        for &(group, part) in &self.parts {
            let share = part as f64 / mass as f64;
            row[usize::from(group)] += (whole as f64 * share).round() as i64;
        }
    }
}

/// An optimal plan, and the prices that certify it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    /// The group of each unit; for a split unit the group with its largest part.
    pub(crate) label: Vec<u16>,
    /// Units in several groups, ascending by unit.
    pub(crate) splits: Vec<Split>,
    /// Optimal non-negative dual prices.
    pub(crate) price: Vec<i64>,
    /// Value of the plan.
    pub(crate) primal: i128,
    /// Dual value of the prices: no plan, split or not, is better. Equals `primal`.
    pub(crate) dual: i128,
}

/// Polled periodically in long loops, which end once it returns true.
pub(crate) type Stop<'a> = &'a dyn Fn() -> bool;

/// Number of group pairs that path searches examine between two polls of `stop`.
const PAIRS_BETWEEN_LOOKS: usize = 1 << 20;
/// Represents unused capacity among the units.
const SLACK: u32 = u32::MAX;
/// Label of a unit whose parts are in `Flow::parts`.
const IN_PARTS: u16 = u16::MAX;

type MoveHeap = BinaryHeap<Reverse<(i64, u32)>>;

struct Flow<'a> {
    problem: Transport<'a>,
    groups: usize,
    label: Vec<u16>,
    parts: BTreeMap<u32, Vec<u64>>,
    slack: Vec<i64>,
    /// Mass and slack in a group, minus its capacity.
    excess: Vec<i64>,
    price: Vec<i64>,
    /// [G, G] cheapest moves out of a group, including stale entries of units that have left.
    moves: Vec<MoveHeap>,
}

/// The cheapest path from any group with excess to a group with room.
struct Path {
    /// Groups in order.
    stops: Vec<usize>,
    /// The unit that moves from each stop to the next.
    units: Vec<u32>,
}

impl Transport<'_> {
    /// Solves the problem exactly. `start`: initial prices; any are valid, and good ones make the solve fast.
    pub(crate) fn solve(self, start: Option<&[i64]>) -> Plan {
        let mut flow = Flow::new(self, start);
        while let Some(path) = flow.cheapest_path() {
            flow.push(&path);
        }
        flow.into_plan()
    }

    /// Solves the problem exactly; returns `None` if stopped.
    pub(crate) fn solve_until(self, start: Option<&[i64]>, stop: Stop<'_>) -> Option<Plan> {
        let mut flow = Flow::new(self, start);
        let mut pairs = 0;
        while let Some(path) = flow.cheapest_path() {
            flow.push(&path);
            pairs += flow.groups * flow.groups;
            if pairs >= PAIRS_BETWEEN_LOOKS {
                if stop() {
                    return None;
                }
                pairs = 0;
            }
        }
        Some(flow.into_plan())
    }

    /// Builds a plan without a search: assigns units by descending mass to the best group with room, and splits a unit
    /// that fits into none. All prices are zero.
    pub(crate) fn greedy(&self) -> Plan {
        let mut room = self.capacity.to_vec();
        let mut plan = Plan { label: vec![0; self.mass.len()], price: vec![0; self.groups()], ..Plan::default() };
        let mut order: Vec<usize> = (0..self.mass.len()).collect();
        order.sort_by_key(|&unit| (Reverse(self.mass[unit]), unit));
        for unit in order {
            let (mass, row) = (self.mass[unit], self.row(unit));
            let fits = (0..room.len()).filter(|&group| room[group] >= mass);
            if let Some(group) = fits.max_by_key(|&group| (row[group], Reverse(group))) {
                room[group] -= mass;
                plan.label[unit] = group as u16;
                continue;
            }
            let (mut left, mut parts) = (mass, Vec::new());
            for (group, room) in (0u16..).zip(&mut room) {
                let part = left.min(*room);
                (left, *room) = (left - part, *room - part);
                parts.extend((part > 0).then_some((group, part)));
            }
            plan.label[unit] = parts.iter().max_by_key(|part| (part.1, Reverse(part.0))).map_or(0, |part| part.0);
            plan.splits.push(Split { unit, parts });
        }
        plan.splits.sort_by_key(|split| split.unit);
        (plan.primal, plan.dual) = (plan.value(self), self.dual_value(&plan.price));
        plan
    }

    pub(crate) fn groups(&self) -> usize {
        self.capacity.len()
    }

    pub(crate) fn row(&self, unit: usize) -> &[i64] {
        let groups = self.groups();
        &self.profit[unit * groups..(unit + 1) * groups]
    }

    /// Returns the dual function at `price`: an upper bound on every plan, for non-negative prices.
    pub(crate) fn dual_value(&self, price: &[i64]) -> i128 {
        let units = self.mass.iter().enumerate().map(|(unit, &mass)| {
            let best = self.row(unit).iter().zip(price).map(|(profit, price)| profit - price).max();
            i128::from(mass) * i128::from(best.unwrap_or(0))
        });
        let capacity = self.capacity.iter().zip(price).map(|(&room, &price)| i128::from(room) * i128::from(price));
        units.sum::<i128>() + capacity.sum::<i128>()
    }
}

/// Returns the exact assignment of units with masses of one, `profit` [U, G], to groups of equal size, or `None` if
/// stopped. Any start prices are valid.
pub(crate) fn assign_evenly(profit: &[i64], groups: usize, start: Option<&[i64]>, stop: Stop<'_>) -> Option<Plan> {
    let units = profit.len() / groups;
    let (mass, capacity) = (vec![1; units], vec![units.div_ceil(groups) as u64; groups]);
    Transport { mass: &mass, profit, capacity: &capacity }.solve_until(start, stop)
}

/// Returns the group with the largest profit minus price, the lowest one on ties.
pub(crate) fn best_group(profit: &[i64], price: &[i64]) -> usize {
    let net = |group: usize| profit[group] - price[group];
    (1..profit.len()).fold(0, |best, group| if net(group) > net(best) { group } else { best })
}

impl<'a> Flow<'a> {
    fn new(problem: Transport<'a>, start: Option<&[i64]>) -> Self {
        let groups = problem.groups();
        let mut price = start.map_or_else(|| vec![0; groups], <[i64]>::to_vec);
        let least = price.iter().copied().min().unwrap_or(0);
        price.iter_mut().for_each(|price| *price -= least);

        let mut flow = Flow {
            problem,
            groups,
            label: Vec::with_capacity(problem.mass.len()),
            parts: BTreeMap::new(),
            slack: vec![0; groups],
            excess: problem.capacity.iter().map(|&room| -(room as i64)).collect(),
            price,
            moves: Vec::new(),
        };
        let mut waiting: Vec<Vec<Reverse<(i64, u32)>>> = vec![Vec::new(); groups * groups];
        for (unit, &mass) in problem.mass.iter().enumerate() {
            let row = problem.row(unit);
            let from = best_group(row, &flow.price);
            flow.label.push(from as u16);
            flow.excess[from] += mass as i64;
            for to in (0..groups).filter(|&to| to != from) {
                waiting[from * groups + to].push(Reverse((row[from] - row[to], unit as u32)));
            }
        }
        flow.moves = waiting.into_iter().map(BinaryHeap::from).collect();
        flow.place_slack();
        flow
    }

    /// Places unused capacity, whose profit is zero everywhere, on groups with the lowest price (zero), first on those
    /// with room.
    fn place_slack(&mut self) {
        let mut left = -self.excess.iter().sum::<i64>();
        let mut cheapest = 0;
        for group in (0..self.groups).rev().filter(|&group| self.price[group] == 0) {
            let room = (-self.excess[group]).clamp(0, left);
            self.slack[group] += room;
            self.excess[group] += room;
            left -= room;
            cheapest = group;
        }
        self.slack[cheapest] += left;
        self.excess[cheapest] += left;
    }

    fn mass_at(&self, unit: u32, group: usize) -> i64 {
        if unit == SLACK {
            return self.slack[group];
        }
        match self.label[unit as usize] {
            IN_PARTS => self.parts[&unit][group] as i64,
            label if usize::from(label) == group => self.problem.mass[unit as usize] as i64,
            _ => 0,
        }
    }

    /// Returns the minimum loss of moving mass from one group to another, and the unit to move.
    fn cheapest_move(&mut self, from: usize, to: usize) -> Option<(i64, u32)> {
        let at = from * self.groups + to;
        while let Some(&Reverse((_, unit))) = self.moves[at].peek() {
            if self.mass_at(unit, from) > 0 {
                break;
            }
            self.moves[at].pop();
        }
        let unit = self.moves[at].peek().map(|&Reverse(entry)| entry);
        let slack = (self.slack[from] > 0).then_some((0, SLACK));
        // On ties, slack moves first, because that does not split a unit.
        match (unit, slack) {
            (Some(unit), Some(slack)) => Some(if unit.0 < slack.0 { unit } else { slack }),
            (unit, slack) => unit.or(slack),
        }
    }

    /// Runs Dijkstra's algorithm from all groups with excess, on losses reduced by prices, and updates the prices.
    fn cheapest_path(&mut self) -> Option<Path> {
        let groups = self.groups;
        let mut distance: Vec<Option<i64>> = (0..groups).map(|g| (self.excess[g] > 0).then_some(0)).collect();
        let mut done = vec![false; groups];
        let mut before: Vec<Option<(usize, u32)>> = vec![None; groups];
        let target = loop {
            let open = (0..groups).filter(|&g| !done[g]);
            let (length, at) = open.filter_map(|g| distance[g].map(|length| (length, g))).min()?;
            done[at] = true;
            if self.excess[at] < 0 {
                break at;
            }
            for to in (0..groups).filter(|&g| g != at) {
                if done[to] {
                    continue;
                }
                let Some((loss, unit)) = self.cheapest_move(at, to) else { continue };
                let reached = length + loss - self.price[at] + self.price[to];
                if distance[to].is_none_or(|known| reached < known) {
                    distance[to] = Some(reached);
                    before[to] = Some((at, unit));
                }
            }
        };
        let length = distance[target]?;
        for (price, reached) in self.price.iter_mut().zip(&distance) {
            *price -= reached.map_or(length, |reached| reached.min(length));
        }
        let mut path = Path { stops: vec![target], units: Vec::new() };
        let mut at = target;
        while let Some((from, unit)) = before[at] {
            path.stops.push(from);
            path.units.push(unit);
            at = from;
        }
        path.stops.reverse();
        path.units.reverse();
        Some(path)
    }

    fn push(&mut self, path: &Path) {
        let (first, last) = (path.stops[0], path.stops[path.stops.len() - 1]);
        let steps = || path.units.iter().zip(path.stops.windows(2));
        let along = steps().map(|(&unit, stops)| self.mass_at(unit, stops[0])).min().unwrap_or(0);
        let amount = along.min(self.excess[first]).min(-self.excess[last]);
        for (&unit, stops) in steps() {
            self.shift(unit, stops[0], stops[1], amount);
        }
        self.excess[first] -= amount;
        self.excess[last] += amount;
    }

    fn shift(&mut self, unit: u32, from: usize, to: usize, amount: i64) {
        if unit == SLACK {
            self.slack[from] -= amount;
            self.slack[to] += amount;
            return;
        }
        let mass = self.problem.mass[unit as usize];
        let label = &mut self.label[unit as usize];
        if *label != IN_PARTS && amount as u64 == mass {
            *label = to as u16;
        } else {
            let parts = self.parts.entry(unit).or_insert_with(|| vec![0; self.groups]);
            if *label != IN_PARTS {
                parts[usize::from(*label)] = mass;
            }
            parts[from] -= amount as u64;
            parts[to] += amount as u64;
            *label = IN_PARTS;
            if parts[to] == mass {
                *label = to as u16;
                self.parts.remove(&unit);
            }
        }
        let row = self.problem.row(unit as usize);
        for next in (0..self.groups).filter(|&next| next != to) {
            self.moves[to * self.groups + next].push(Reverse((row[to] - row[next], unit)));
        }
    }

    fn into_plan(mut self) -> Plan {
        let least = self.price.iter().copied().min().unwrap_or(0);
        self.price.iter_mut().for_each(|price| *price -= least);
        let mut splits = Vec::with_capacity(self.parts.len());
        for (&unit, masses) in &self.parts {
            let parts: Vec<(u16, u64)> = (0u16..).zip(masses.iter().copied()).filter(|part| part.1 > 0).collect();
            let largest = parts.iter().max_by_key(|(group, mass)| (*mass, Reverse(*group)));
            self.label[unit as usize] = largest.map_or(0, |part| part.0);
            splits.push(Split { unit: unit as usize, parts });
        }
        let mut plan = Plan { label: self.label, splits, price: self.price, primal: 0, dual: 0 };
        plan.primal = plan.value(&self.problem);
        plan.dual = self.problem.dual_value(&plan.price);
        plan
    }
}

impl Plan {
    /// Returns the value of the plan under a problem's profits.
    pub(crate) fn value(&self, problem: &Transport<'_>) -> i128 {
        let worth =
            |unit: usize, group: u16, mass: u64| i128::from(mass) * i128::from(problem.row(unit)[usize::from(group)]);
        let whole: i128 = (0..self.label.len()).map(|unit| worth(unit, self.label[unit], problem.mass[unit])).sum();
        let correction = self.splits.iter().map(|split| {
            let parts: i128 = split.parts.iter().map(|&(group, mass)| worth(split.unit, group, mass)).sum();
            parts - worth(split.unit, self.label[split.unit], problem.mass[split.unit])
        });
        whole + correction.sum::<i128>()
    }

    /// Returns the fraction of a unit's `mass` in `groups` (ascending).
    pub(crate) fn share_in(&self, unit: usize, mass: u64, groups: &[u16]) -> f64 {
        let among = |group: u16| groups.binary_search(&group).is_ok();
        match self.splits.binary_search_by_key(&unit, |split| split.unit) {
            Err(_) => f64::from(u8::from(among(self.label[unit]))),
            Ok(split) => {
                let parts = self.splits[split].parts.iter().filter(|part| among(part.0));
                parts.map(|part| part.1 as f64).sum::<f64>() / mass as f64
            }
        }
    }

    /// Returns the number of units in each group; split units count by share.
    pub(crate) fn units(&self, mass: &[u64], groups: usize) -> Vec<f64> {
        self.sums(mass, groups, |part, mass| part as f64 / mass as f64)
    }

    /// Returns the mass in each group.
    pub(crate) fn loads(&self, mass: &[u64], groups: usize) -> Vec<u64> {
        self.sums(mass, groups, |part, _| part as f64).into_iter().map(|load| load as u64).collect()
    }

    /// Sums `weight` of each part, given the unit's mass, by group. Exact for integers below 2^53.
    fn sums(&self, mass: &[u64], groups: usize, weight: impl Fn(u64, u64) -> f64) -> Vec<f64> {
        let mut sums = vec![0.0; groups];
        let mut splits = self.splits.iter().peekable();
        for (unit, &mass) in mass.iter().enumerate() {
            let whole = [(self.label[unit], mass)];
            let split = splits.next_if(|split| split.unit == unit);
            for &(group, part) in split.map_or(&whole[..], |split| &split.parts) {
                sums[usize::from(group)] += weight(part, mass);
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests;
