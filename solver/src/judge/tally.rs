//! Sums over the tokens and layers of an evaluation.

use semmoe_tables::Route;

use crate::judge::balance::spread_of;
use crate::judge::hosts::{Hosts, indices};

/// Counts accumulated during an evaluation.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// [L] local activations; fractional, because a token without a label counts with its expected value on a random
    /// place.
    pub(crate) local: Vec<f64>,
    /// Activations that stay on their node, over all layers; `None` if nodes are unknown.
    node_local: Option<f64>,
    /// [L]
    pub(crate) activations: Vec<u64>,
    /// [L * N]
    pub(crate) column_load: Vec<u64>,
    /// [L * G] load of each group.
    pub(crate) group_load: Vec<f64>,
    /// [L][places] tokens, if tokens are the units; a token without a place is divided evenly among all places.
    tokens: Vec<Vec<f64>>,
    /// Number of other places to which tokens had to be sent, summed over all layers.
    pub(crate) remote_ranks: f64,
    /// Expected `remote_ranks` with every token on a random place.
    pub(crate) remote_ranks_random: f64,
    /// Expected `remote_ranks` on random places, with experts in contiguous blocks.
    pub(crate) remote_ranks_blocks: f64,
    /// Number of known routes, over all layers.
    routes: u64,
    /// Scratch: the places of a route.
    seen: Vec<bool>,
}

impl Tally {
    pub(crate) fn new(hosts: &Hosts) -> Self {
        Tally {
            local: vec![0.0; hosts.layers],
            node_local: hosts.nodes.is_some().then_some(0.0),
            activations: vec![0; hosts.layers],
            column_load: vec![0; hosts.layers * hosts.experts],
            group_load: vec![0.0; hosts.layers * hosts.groups],
            tokens: vec![vec![0.0; hosts.places]; hosts.layers],
            ..Tally::default()
        }
    }

    /// Adds `count` activations of one expert by tokens at `place`; `None` = spread evenly over all places.
    pub(crate) fn add(&mut self, hosts: &Hosts, layer: usize, expert: usize, count: u64, place: Option<usize>) {
        let column = hosts.column(layer, expert);
        self.column_load[column] += count;
        let places = place.map_or(0..hosts.places, |place| place..place + 1);
        let each = count as f64 / places.len() as f64;
        for place in places {
            self.group_load[layer * hosts.groups + hosts.computed_on(column, place)] += each;
        }
        self.activations[layer] += count;
        if let (Some(sum), Some(share)) = (&mut self.node_local, hosts.node_share(column, place)) {
            *sum += share * count as f64;
        }
        self.local[layer] += count as f64 * hosts.local_share(column, place);
    }

    /// Adds the route of one token at `place`: its activations, and the places to which it must be sent.
    pub(crate) fn add_route(&mut self, hosts: &Hosts, layer: usize, route: Route<'_>, place: Option<usize>) {
        let mut sent_from = |place| hosts.sent_to(layer, indices(route), place, &mut self.seen) as f64;
        let random = (0..hosts.places).map(&mut sent_from).sum::<f64>() / hosts.places as f64;
        self.remote_ranks += place.map_or(random, sent_from);
        self.remote_ranks_random += random;
        self.remote_ranks_blocks += hosts.sent_to_in_blocks(indices(route), &mut self.seen);
        for expert in indices(route) {
            self.add(hosts, layer, expert, 1, place);
        }
        self.routes += 1;
    }

    /// Adds `tokens` at `place` in a layer.
    pub(crate) fn add_tokens(&mut self, layer: usize, place: Option<usize>, tokens: u64) {
        let loads = &mut self.tokens[layer];
        match place {
            Some(place) => loads[place] += tokens as f64,
            None => {
                let each = tokens as f64 / loads.len() as f64;
                loads.iter_mut().for_each(|load| *load += each);
            }
        }
    }

    /// Returns the ratio of maximum to mean tokens per place, averaged over layers.
    pub(crate) fn token_imbalance(&self) -> f64 {
        let layers: Vec<f64> = self.tokens.iter().filter_map(|loads| Some(spread_of(loads)?.max_over_mean)).collect();
        layers.iter().sum::<f64>() / layers.len().max(1) as f64
    }

    /// Total activations.
    fn all(&self) -> f64 {
        self.activations.iter().sum::<u64>() as f64
    }

    /// Returns the local activation rate over all layers.
    pub(crate) fn lar(&self) -> f64 {
        self.local.iter().sum::<f64>() / self.all()
    }

    /// Returns the fraction of activations that stay on their node.
    pub(crate) fn node_local_rate(&self) -> Option<f64> {
        self.node_local.map(|local| local / self.all())
    }

    /// Returns the local activation rate of each layer, with `None` for a layer without activations.
    pub(crate) fn lar_per_layer(&self) -> Vec<Option<f64>> {
        let rate = |(local, activations): (&f64, &u64)| (*activations > 0).then(|| local / *activations as f64);
        self.local.iter().zip(&self.activations).map(rate).collect()
    }

    /// Returns the exact expected local rate with every token on a random place.
    pub(crate) fn lar_random(&self, hosts: &Hosts) -> f64 {
        let share = |column| hosts.local_share(column, None);
        let local = self.column_load.iter().enumerate().map(|(column, &load)| load as f64 * share(column));
        local.sum::<f64>() / self.all()
    }

    /// Returns the mean of a sum over routes, i.e. over tokens and layers; `None` if only counts were added.
    pub(crate) fn per_route(&self, sum: f64) -> Option<f64> {
        (self.routes > 0).then(|| sum / self.routes as f64)
    }
}
