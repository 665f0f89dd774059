//! The ranks (or groups) that host each column's expert, including replicas.

use semmoe_tables::{Attention, ExpertCopies, ExpertId, LayerIdx, Route, Tables};

use crate::input::SolveError;

/// Expert indices of a route.
pub(crate) fn indices(route: Route<'_>) -> impl Iterator<Item = usize> {
    route.experts().map(|expert| expert.index())
}

/// The places that hold each (layer, expert). A place is an attention-DP rank (attention dp) or a group (tp).
#[derive(Debug)]
pub(crate) struct Hosts {
    pub(crate) places: usize,
    pub(crate) groups: usize,
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    /// The copy of each expert that a place's tokens use.
    copies: ExpertCopies,
    /// [L * N + 1] offsets into `place`.
    start: Vec<usize>,
    /// The places of each column, ascending and distinct.
    place: Vec<u16>,
    /// [G] the place of each group.
    place_of: Vec<u16>,
    /// The node of each group, if known.
    pub(crate) nodes: Option<HostNodes>,
}

/// M nodes of consecutive groups each.
#[derive(Debug)]
pub(crate) struct HostNodes {
    per_node: usize,
    /// [places][M] whether the place has groups on the node.
    of_place: Vec<Vec<bool>>,
}

impl Hosts {
    /// `nodes` must divide the number of groups.
    pub(crate) fn new(tables: &Tables, nodes: Option<u16>) -> Result<Self, SolveError> {
        let (layers, experts) = (tables.model().layers(), tables.model().num_experts);
        let (places, place_of): (u16, Vec<u16>) = match tables.attention() {
            Attention::Dp => (tables.dp_ranks(), tables.group_to_dp().iter().map(|rank| rank.get()).collect()),
            Attention::Tp => (tables.groups(), (0..tables.groups()).collect()),
        };
        let places = usize::from(places);
        let mut hosts = Hosts {
            places,
            groups: usize::from(tables.groups()),
            layers,
            experts: usize::from(experts),
            copies: ExpertCopies::between_places(tables, &place_of, places, nodes)?,
            start: vec![0],
            place: Vec::new(),
            place_of,
            nodes: None,
        };
        hosts.nodes = nodes.map(|nodes| {
            let (nodes, mut of_place) = (usize::from(nodes), vec![vec![false; usize::from(nodes)]; hosts.places]);
            let per_node = hosts.groups / nodes;
            let groups = hosts.place_of.iter().enumerate();
            groups.for_each(|(group, &place)| of_place[usize::from(place)][group / per_node] = true);
            HostNodes { per_node, of_place }
        });
        for column in 0..layers * usize::from(experts) {
            let mut places: Vec<u16> =
                hosts.groups_of(column).iter().map(|&group| hosts.place_of[usize::from(group)]).collect();
            places.sort_unstable();
            places.dedup();
            hosts.place.extend(places);
            hosts.start.push(hosts.place.len());
        }
        Ok(hosts)
    }

    /// Returns the groups that hold a column's expert, ascending.
    fn groups_of(&self, column: usize) -> &[u16] {
        let (layer, expert) = (column / self.experts, column % self.experts);
        self.copies.held_by(LayerIdx::new(layer as u16), ExpertId::new(expert as u16))
    }

    /// Returns the group with the copy of the column's expert that tokens at `place` use.
    pub(crate) fn computed_on(&self, column: usize, place: usize) -> usize {
        let (layer, expert) = (column / self.experts, column % self.experts);
        usize::from(self.copies.used_at(place, LayerIdx::new(layer as u16))[expert])
    }

    /// Returns the places that host a column's expert, ascending.
    pub(crate) fn of(&self, column: usize) -> &[u16] {
        &self.place[self.start[column]..self.start[column + 1]]
    }

    pub(crate) fn is_local(&self, column: usize, place: usize) -> bool {
        self.of(column).iter().any(|&host| usize::from(host) == place)
    }

    /// Returns the number of other places to which a token at `place` with these experts is sent: the places of the
    /// copies that it uses. `seen` is scratch.
    pub(crate) fn sent_to(
        &self,
        layer: usize,
        experts: impl Iterator<Item = usize>,
        place: usize,
        seen: &mut Vec<bool>,
    ) -> usize {
        self.mark(experts.map(|expert| self.computed_on(self.column(layer, expert), place)), seen);
        seen[place] = false;
        seen.iter().filter(|&&seen| seen).count()
    }

    /// Marks the places of these groups in `seen` and clears all others.
    fn mark(&self, groups: impl Iterator<Item = usize>, seen: &mut Vec<bool>) {
        seen.clear();
        seen.resize(self.places, false);
        groups.for_each(|group| seen[usize::from(self.place_of[group])] = true);
    }

    /// Returns the average of [`Self::sent_to`] over all places if every group held one block of consecutive experts,
    /// the default placement of engines.
    pub(crate) fn sent_to_in_blocks(&self, experts: impl Iterator<Item = usize>, seen: &mut Vec<bool>) -> f64 {
        self.mark(experts.map(|expert| expert * self.groups / self.experts), seen);
        let reached = seen.iter().filter(|&&seen| seen).count() as f64;
        // With probability reached / places, a random place is itself among those reached and is not counted.
        reached * (1.0 - 1.0 / self.places as f64)
    }

    pub(crate) fn column(&self, layer: usize, expert: usize) -> usize {
        layer * self.experts + expert
    }

    /// Returns the fraction of an activation of this column that stays on the node of its token's place, averaged over
    /// all places if `place` is `None`. Returns `None` if nodes are unknown.
    pub(crate) fn node_share(&self, column: usize, place: Option<usize>) -> Option<f64> {
        let HostNodes { per_node, of_place } = self.nodes.as_ref()?;
        let groups = self.groups_of(column);
        let stays = |place: usize| groups.iter().any(|&group| of_place[place][usize::from(group) / per_node]);
        Some(match place {
            Some(place) => f64::from(u8::from(stays(place))),
            None => (0..self.places).filter(|&place| stays(place)).count() as f64 / self.places as f64,
        })
    }

    /// Returns the fraction of an activation of this column that is local for a token at `place`, or averaged over all
    /// places for `None`.
    pub(crate) fn local_share(&self, column: usize, place: Option<usize>) -> f64 {
        match place {
            Some(place) if self.is_local(column, place) => 1.0,
            Some(_) => 0.0,
            None => self.of(column).len() as f64 / self.places as f64,
        }
    }

    /// Returns the local activations of a route in a layer for a token at `place`, or averaged over all places for
    /// `None`.
    pub(crate) fn local_of(&self, layer: LayerIdx, route: Route<'_>, place: Option<usize>) -> f64 {
        indices(route).map(|expert| self.local_share(self.column(layer.index(), expert), place)).sum()
    }
}
