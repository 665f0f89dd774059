//! The groups that hold each expert of each layer, including replicas, and the load of each group.

use semmoe_tables::{FormatError, ModelInfo, Replicas};

/// Number of a layer's experts per exchange in a kick. Of 5, 10 and 20, 10 gained the most.
const EXPERTS_PER_EXCHANGE: usize = 10;

/// The groups that hold each column (layer, expert): ascending, distinct, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) groups: usize,
    /// N
    pub(crate) experts: usize,
    /// [L * N]
    pub(crate) holders: Vec<Vec<u16>>,
}

/// [`Held`] as two flat lists, for loops over all counts.
pub(crate) struct Flat {
    /// [L * N + 1] offsets into `group`.
    start: Vec<u32>,
    group: Vec<u16>,
}

impl Flat {
    pub(crate) fn of(&self, column: usize) -> &[u16] {
        &self.group[self.start[column] as usize..self.start[column + 1] as usize]
    }
}

impl Held {
    /// Returns the holders of each expert in a layer, [N].
    pub(crate) fn layer(&self, layer: usize) -> &[Vec<u16>] {
        &self.holders[layer * self.experts..(layer + 1) * self.experts]
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &[Vec<u16>]> {
        self.holders.chunks_exact(self.experts)
    }

    pub(crate) fn flat(&self) -> Flat {
        let mut start = vec![0];
        for (at, holders) in self.holders.iter().enumerate() {
            start.push(start[at] + holders.len() as u32);
        }
        Flat { start, group: self.holders.concat() }
    }

    /// Replaces the holders of the two experts of an exchange, in the layer that begins at column `first`.
    pub(crate) fn exchange(&mut self, first: usize, exchange: &Exchange) {
        let (of_a, of_b) = exchange.after(&self.holders[first..first + self.experts]);
        self.holders[first + exchange.a] = of_a;
        self.holders[first + exchange.b] = of_b;
    }

    /// Returns the holders after random exchanges in every layer, a kick for iterated local search. Groups keep their
    /// number of slots, and every expert keeps a holder.
    pub(crate) fn perturbed(&self, random: &mut fastrand::Rng) -> Self {
        let (mut perturbed, experts) = (self.clone(), self.experts);
        for layer in 0..self.layers().count() {
            for _ in 0..experts.div_ceil(EXPERTS_PER_EXCHANGE) {
                let (a, b) = (random.usize(..experts), random.usize(..experts));
                let possible = Exchange::of_pair(perturbed.layer(layer), a, b);
                if let Some(exchange) = random.choice(&possible) {
                    perturbed.exchange(layer * experts, exchange);
                }
            }
        }
        perturbed
    }

    /// Converts to slots, group by group, in ascending order.
    pub(crate) fn to_replicas(&self, model: &ModelInfo) -> Result<Replicas, FormatError> {
        let mut logical = Vec::new();
        for layer in self.layers() {
            for group in 0..self.groups as u16 {
                let held = (0i32..).zip(layer).filter(|(_, holders)| holders.contains(&group));
                logical.extend(held.map(|(expert, _)| expert));
            }
        }
        let slots = logical.len() / model.layers().max(1);
        Replicas::new(model, self.groups as u16, slots, logical)
    }
}

/// An exchange of two experts in a layer: `b` replaces `a` in group `from` and, if `to` is given, `a` replaces `b` in
/// that group. Groups keep their number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) a: usize,
    pub(crate) b: usize,
    pub(crate) from: u16,
    pub(crate) to: Option<u16>,
}

impl Exchange {
    /// Returns every exchange of two experts that leaves a holder for both and gives no group two copies of either.
    pub(crate) fn of_pair(holders: &[Vec<u16>], a: usize, b: usize) -> Vec<Exchange> {
        let only = |these: &[u16], those: &[u16]| -> Vec<u16> {
            these.iter().copied().filter(|group| !those.contains(group)).collect()
        };
        let (only_a, only_b) = (only(&holders[a], &holders[b]), only(&holders[b], &holders[a]));
        let mut found = Vec::with_capacity(only_a.len() * only_b.len());
        for &from in &only_a {
            found.extend(only_b.iter().map(|&to| Exchange { a, b, from, to: Some(to) }));
        }
        if holders[a].len() > 1 {
            found.extend(only_a.iter().map(|&from| Exchange { a, b, from, to: None }));
        }
        if holders[b].len() > 1 {
            found.extend(only_b.iter().map(|&from| Exchange { a: b, b: a, from, to: None }));
        }
        found
    }

    /// Returns the holders of `a` and of `b` after the exchange.
    pub(crate) fn after(&self, holders: &[Vec<u16>]) -> (Vec<u16>, Vec<u16>) {
        let change = |holders: &[u16], leave: Option<u16>, enter: Option<u16>| {
            let mut after: Vec<u16> = holders.iter().copied().filter(|group| Some(*group) != leave).collect();
            after.extend(enter);
            after.sort_unstable();
            after
        };
        (change(&holders[self.a], Some(self.from), self.to), change(&holders[self.b], self.to, Some(self.from)))
    }
}

/// Traffic of one layer, from which each group's load follows under static nearest dispatch: a unit's activations of an
/// expert held by its own group stay there; all others are shared evenly by the expert's holders.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traffic<'a> {
    /// [N] activations.
    pub(crate) load: &'a [u64],
    /// [N, G] activations by the group of their unit, in fixed point; may be empty if no expert has replicas.
    pub(crate) own: &'a [i64],
    pub(crate) fraction_bits: u32,
    pub(crate) groups: usize,
}

impl Traffic<'_> {
    /// Returns the load of each holder of an expert, in the order of `holders`. The remainder of an even split goes to
    /// the first holders, so that no load is lost.
    pub(crate) fn shares<'h>(&'h self, expert: usize, holders: &'h [u16]) -> impl Iterator<Item = (usize, u64)> + 'h {
        let own = move |group: u16| match holders.len() {
            1 => 0,
            _ => (self.own[expert * self.groups + usize::from(group)] >> self.fraction_bits).max(0) as u64,
        };
        let local: u64 = holders.iter().map(|&group| own(group)).sum();
        let remote = self.load[expert].saturating_sub(local);
        let (each, more) = (remote / holders.len() as u64, remote % holders.len() as u64);
        (0u64..).zip(holders).map(move |(at, &group)| (group.into(), own(group) + each + u64::from(at < more)))
    }

    /// Returns the load of each group.
    pub(crate) fn loads(&self, holders: &[Vec<u16>]) -> Vec<u64> {
        let mut loads = vec![0; self.groups];
        for (expert, holders) in holders.iter().enumerate() {
            self.shares(expert, holders).for_each(|(group, share)| loads[group] += share);
        }
        loads
    }

    /// Returns the loads after an exchange.
    pub(crate) fn loads_after(&self, loads: &[u64], holders: &[Vec<u16>], exchange: &Exchange) -> Vec<u64> {
        let (of_a, of_b) = exchange.after(holders);
        let mut after = loads.to_vec();
        for (expert, now) in [(exchange.a, of_a), (exchange.b, of_b)] {
            self.shares(expert, &holders[expert]).for_each(|(group, share)| after[group] -= share);
            self.shares(expert, &now).for_each(|(group, share)| after[group] += share);
        }
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_local_traffic_stays() {
        let own = [4 << 2, 1 << 2, 2 << 2];
        let traffic = Traffic { load: &[10], own: &own, fraction_bits: 2, groups: 3 };
        assert_eq!(traffic.shares(0, &[0, 2]).collect::<Vec<_>>(), [(0, 4 + 2), (2, 2 + 2)]);
        assert_eq!(traffic.shares(0, &[1]).collect::<Vec<_>>(), [(1, 10)]);
        assert_eq!(traffic.shares(0, &[0, 1, 2]).collect::<Vec<_>>(), [(0, 5), (1, 2), (2, 3)]);
    }

    #[test]
    fn exchanges_keep_slots_and_experts() {
        let holders = [vec![0, 1], vec![1], vec![2]];
        let (all, mut slots) = (Exchange::of_pair(&holders, 0, 2), Vec::new());
        assert_eq!(all.len(), 4, "two swaps with group 2, two replicas of 0 given up for 2: {all:?}");
        for exchange in all {
            let (a, b) = exchange.after(&holders);
            assert!(!a.is_empty() && !b.is_empty());
            slots.push(a.len() + b.len());
        }
        assert_eq!(slots, [3; 4]);
        assert_eq!(Exchange::of_pair(&holders, 0, 1), [Exchange { a: 0, b: 1, from: 0, to: None }]);
    }

    #[test]
    fn kicks_keep_slots_and_experts() {
        let holders: Vec<Vec<u16>> = (0..16u16).map(|expert| vec![expert % 4]).collect();
        let held = Held { groups: 4, experts: 8, holders: [vec![vec![0, 1, 2]], holders[1..].to_vec()].concat() };
        let slots = |held: &Held| -> Vec<[usize; 4]> {
            let of = |layer: &[Vec<u16>], group| layer.iter().filter(|holders| holders.contains(&group)).count();
            held.layers().map(|layer| [0, 1, 2, 3].map(|group| of(layer, group))).collect()
        };
        let mut changed = 0;
        for seed in 0..20 {
            let after = held.perturbed(&mut fastrand::Rng::with_seed(seed));
            assert_eq!(slots(&after), slots(&held));
            for column in 0..16 {
                assert!(!after.holders[column].is_empty() && after.holders[column].is_sorted_by(|a, b| a < b));
            }
            changed += usize::from(after != held);
            assert_eq!(after, held.perturbed(&mut fastrand::Rng::with_seed(seed)), "the seed decides");
        }
        assert!(changed > 10, "{changed} of 20 changed anything");
    }
}
