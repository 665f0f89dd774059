//! Turns an optimal plan into one with whole units, because a unit can be sent to only one place.
//!
//! An optimal plan splits about as many units as there are groups. They are settled one by one, heaviest first: a split
//! unit is fixed to the group of its largest part if the capacity allows, and the remaining problem is solved again, so
//! that the other units make room as cheaply as possible. A unit that fits into no group stays split by share.

use std::cmp::Reverse;

use crate::step::transport::{Plan, Split, Transport};

/// Maximum useful number of rounds.
pub(crate) const MAX_ROUNDS: usize = 64;

/// Returns a plan within the capacities whose units are whole wherever they fit. Its `dual` is that of `plan`, so no
/// plan is better than this one by more than `dual` minus `primal`. After `rounds` (at most [`MAX_ROUNDS`]), the
/// remaining split units are placed where there is room, without solving again.
pub(crate) fn whole(problem: &Transport<'_>, plan: &Plan, rounds: usize) -> Plan {
    let mut settling = Settling { problem, fixed: vec![false; problem.mass.len()], plan: plan.clone() };
    for _ in 0..rounds.min(MAX_ROUNDS) {
        let open = settling.plan.splits.iter().filter(|split| !settling.fixed[split.unit]);
        let heaviest = open.max_by_key(|split| (problem.mass[split.unit], Reverse(split.unit))).cloned();
        let Some(split) = heaviest else { break };
        settling.settle(&split);
    }
    settling.place_rest();
    let mut whole = settling.plan;
    whole.primal = whole.value(problem);
    (whole.price, whole.dual) = (plan.price.clone(), plan.dual);
    whole
}

struct Settling<'a> {
    problem: &'a Transport<'a>,
    fixed: Vec<bool>,
    plan: Plan,
}

impl Settling<'_> {
    /// Fixes a split unit, either whole in the group of its largest part or as it is, and solves for the units that are
    /// not fixed.
    fn settle(&mut self, split: &Split) {
        let (unit, mass) = (split.unit, self.problem.mass[split.unit]);
        let room = self.room_beside_fixed();
        let mut parts = split.parts.clone();
        parts.sort_by_key(|&(group, part)| (Reverse(part), group));
        let target = parts.iter().find(|&&(group, _)| room[usize::from(group)] >= mass);
        self.fixed[unit] = true;
        let Some(&(group, _)) = target else { return };
        self.plan.label[unit] = group;
        self.plan.splits.retain(|split| split.unit != unit);
        self.solve_open();
    }

    /// Returns the capacities minus the fixed units.
    fn room_beside_fixed(&self) -> Vec<u64> {
        let mut room = self.problem.capacity.to_vec();
        let mut splits = self.plan.splits.iter().peekable();
        for (unit, &mass) in self.problem.mass.iter().enumerate() {
            let split = splits.next_if(|split| split.unit == unit);
            if !self.fixed[unit] {
                continue;
            }
            match split {
                Some(split) => split.parts.iter().for_each(|&(group, part)| room[usize::from(group)] -= part),
                None => room[usize::from(self.plan.label[unit])] -= mass,
            }
        }
        room
    }

    /// Solves the problem of the units that are not fixed.
    fn solve_open(&mut self) {
        let capacity = self.room_beside_fixed();
        let open: Vec<usize> = (0..self.fixed.len()).filter(|&unit| !self.fixed[unit]).collect();
        let mass: Vec<u64> = open.iter().map(|&unit| self.problem.mass[unit]).collect();
        let profit: Vec<i64> = open.iter().flat_map(|&unit| self.problem.row(unit).iter().copied()).collect();
        let rest = Transport { mass: &mass, profit: &profit, capacity: &capacity }.solve(Some(&self.plan.price));
        for (&unit, &label) in open.iter().zip(&rest.label) {
            self.plan.label[unit] = label;
        }
        self.plan.splits.retain(|split| self.fixed[split.unit]);
        self.plan.splits.extend(rest.splits.into_iter().map(|split| Split { unit: open[split.unit], ..split }));
        self.plan.splits.sort_by_key(|split| split.unit);
        self.plan.price = rest.price;
    }

    /// Places split units for which some group has room, heaviest first, whole in the most profitable group.
    fn place_rest(&mut self) {
        let problem = self.problem;
        let mut loads = self.plan.loads(problem.mass, problem.groups());
        let mut order = std::mem::take(&mut self.plan.splits);
        order.sort_by_key(|split| (Reverse(problem.mass[split.unit]), split.unit));
        for split in order {
            let mass = problem.mass[split.unit];
            split.parts.iter().for_each(|&(group, part)| loads[usize::from(group)] -= part);
            let fits = |group: &usize| loads[*group].saturating_add(mass) <= problem.capacity[*group];
            let row = problem.row(split.unit);
            match (0..problem.groups()).filter(fits).max_by_key(|&group| (row[group], Reverse(group))) {
                Some(group) => {
                    loads[group] += mass;
                    self.plan.label[split.unit] = group as u16;
                }
                None => {
                    split.add_to(&mut loads);
                    self.plan.splits.push(split);
                }
            }
        }
        self.plan.splits.sort_by_key(|split| split.unit);
    }
}
