//! The choice of replica: which copy of an expert the tokens of a rank use. The worker, which sends tokens there, and
//! the models that predict its traffic share this rule.

use serde::{Deserialize, Serialize};

use crate::{Domains, ExpertId, FormatError, GroupId, LayerIdx, Placement, Replicas, Tables};

/// For each expert, the groups that hold it and the group whose copy is used by the tokens at each place.
///
/// A place is a location of tokens: a group or, where an attention-DP rank has several groups, that rank. Tokens use
/// the copy at their own place if there is one, otherwise one on the same node (if nodes are known), otherwise any
/// copy. Places that choose among the same copies at equal distance rotate through them, so that the number of places
/// per copy differs by at most one. The choice depends only on place, layer and expert, never on the batch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Copies")]
pub struct ExpertCopies(Copies);

/// [`ExpertCopies`] before validation, because another process may have written it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Copies {
    groups: u16,
    experts: u16,
    layers: usize,
    /// [L * N + 1] offsets into `held_by`.
    start: Vec<usize>,
    /// The groups that hold each expert, ascending.
    held_by: Vec<u16>,
    /// S: slots per layer, including empty ones.
    slots: usize,
    /// [places, L, N]: the group whose copy is used.
    used: Vec<u16>,
}

impl TryFrom<Copies> for ExpertCopies {
    type Error = FormatError;

    fn try_from(copies: Copies) -> Result<Self, FormatError> {
        let Copies { groups, experts, layers, start, held_by, used, .. } = &copies;
        let columns = layers.saturating_mul(usize::from(*experts));
        let offsets = start.first() == Some(&0)
            && start.last() == Some(&held_by.len())
            && start.len() == columns.saturating_add(1)
            // Every expert is held by at least one group.
            && start.is_sorted_by(|before, after| before < after);
        let places = columns > 0 && used.len().is_multiple_of(columns);
        let group = |group: &u16| *group < *groups;
        if !offsets || !places || !held_by.iter().all(group) || !used.iter().all(group) {
            let found = format!("{} offsets, {} holders, {} choices", start.len(), held_by.len(), used.len());
            let expected = format!("holders of {experts} experts in {layers} layers among {groups} groups");
            return Err(FormatError::shape("expert copies", found, expected));
        }
        Ok(Self(copies))
    }
}

/// The location of each group.
struct Sites<'a> {
    /// \[G\]
    place_of: &'a [u16],
    places: usize,
    /// Groups per node; each node is a run of consecutive groups.
    per_node: Option<usize>,
}

impl ExpertCopies {
    /// Chooses copies for tokens located on the groups themselves, where each rank holds one group. Uses the nodes that
    /// the tables were solved for, if any.
    ///
    /// # Errors
    /// If the nodes do not divide the groups.
    pub fn between_groups(tables: &Tables) -> Result<Self, FormatError> {
        let places: Vec<u16> = (0..tables.groups()).collect();
        Self::between_places(tables, &places, places.len(), tables.solved_nodes())
    }

    /// Chooses copies for tokens at `places` places: group g is at `place_of[g]`, and the groups form `nodes` nodes of
    /// consecutive groups.
    ///
    /// # Errors
    /// If `place_of` has the wrong length, or the nodes do not divide the groups.
    pub fn between_places(
        tables: &Tables,
        place_of: &[u16],
        places: usize,
        nodes: Option<u16>,
    ) -> Result<Self, FormatError> {
        let groups = tables.groups();
        if place_of.len() != usize::from(groups) {
            let expected = format!("one for each of {groups} groups");
            return Err(FormatError::shape("places", format!("{} places", place_of.len()), expected));
        }
        if let Some(nodes) = nodes.filter(|&nodes| nodes == 0 || !groups.is_multiple_of(nodes)) {
            return Err(FormatError::field("nodes", nodes, format!("a number that divides the {groups} groups")));
        }
        let per_node = nodes.map(|nodes| usize::from(groups / nodes));
        let sites = Sites { place_of, places, per_node };
        let holders = tables.physical_to_logical().map_or_else(|| held_once(tables.placement()), held);
        Ok(Self::of_holders(&holders, &sites))
    }

    /// Chooses copies for expert domains (HybridEP): every group of a domain holds the experts of all groups in the
    /// domain. Tokens of other groups use the copy at their own position within the domain, so that a token is sent to
    /// each domain only once.
    ///
    /// # Errors
    /// If the domains do not divide the groups.
    pub fn in_domains(placement: &Placement, domains: Domains) -> Result<Self, FormatError> {
        let groups = placement.groups();
        let map = &domains.map(groups)?;
        let (layers, experts) = (placement.layers(), placement.experts());
        let owners: Vec<u16> = LayerIdx::all(layers).flat_map(|layer| placement.layer(layer)).copied().collect();
        let members: Vec<Vec<u16>> = (0..groups).map(|owner| map.members(owner)).collect();
        let size = members.first().map_or(0, Vec::len);
        Ok(Self(Copies {
            groups,
            experts,
            layers,
            start: (0..=owners.len()).map(|column| column * size).collect(),
            held_by: owners.iter().flat_map(|&owner| &members[usize::from(owner)]).copied().collect(),
            slots: usize::from(experts) * size,
            used: (0..groups).flat_map(|place| owners.iter().map(move |&owner| map.peer(place, owner))).collect(),
        }))
    }

    /// Chooses copies, given the groups that hold each expert of each layer.
    fn of_holders(holders: &Holders, sites: &Sites<'_>) -> Self {
        let Holders { groups, slots, of: ref holders } = *holders;
        let (layers, experts) = (holders.len(), holders.first().map_or(0, Vec::len));
        let (mut start, mut held_by) = (vec![0], Vec::new());
        let mut used = vec![0; sites.places * layers * experts];
        for (column, of) in holders.iter().flatten().enumerate() {
            held_by.extend_from_slice(of);
            start.push(held_by.len());
            let rotation = column / experts + column % experts;
            for (place, group) in sites.choices(of, rotation).into_iter().enumerate() {
                used[place * layers * experts + column] = group;
            }
        }
        Self(Copies { groups, experts: experts as u16, layers, start, held_by, slots, used })
    }

    /// Chooses copies for tokens on the groups, without nodes.
    fn on_groups(holders: &Holders) -> Self {
        let places: Vec<u16> = (0..holders.groups).collect();
        Self::of_holders(holders, &Sites { place_of: &places, places: places.len(), per_node: None })
    }

    /// Number of groups, G.
    pub fn groups(&self) -> u16 {
        self.0.groups
    }

    /// N: experts per layer.
    pub fn experts(&self) -> u16 {
        self.0.experts
    }

    /// Number of MoE layers, L.
    pub fn layers(&self) -> usize {
        self.0.layers
    }

    /// S: slots per layer over all groups; N without replicas and padding.
    pub fn slots(&self) -> usize {
        self.0.slots
    }

    /// Number of places at which tokens can be located.
    pub fn places(&self) -> usize {
        self.0.used.len() / (self.0.layers * usize::from(self.0.experts)).max(1)
    }

    /// Returns the groups that hold an expert, ascending.
    ///
    /// # Panics
    /// If the layer or the expert is out of range.
    pub fn held_by(&self, layer: LayerIdx, expert: ExpertId) -> &[u16] {
        let column = layer.index() * usize::from(self.0.experts) + expert.index();
        &self.0.held_by[self.0.start[column]..self.0.start[column + 1]]
    }

    /// Whether a group holds an expert.
    ///
    /// # Panics
    /// See [`ExpertCopies::held_by`].
    pub fn holds(&self, group: GroupId, layer: LayerIdx, expert: ExpertId) -> bool {
        self.held_by(layer, expert).contains(&group.get())
    }

    /// Returns, for each expert of a layer, the group whose copy is used by the tokens at a place, \[N\].
    ///
    /// # Panics
    /// If the place or the layer is out of range.
    pub fn used_at(&self, place: usize, layer: LayerIdx) -> &[u16] {
        let experts = usize::from(self.0.experts);
        &self.0.used[(place * self.0.layers + layer.index()) * experts..][..experts]
    }
}

/// Uses the only copy of each expert, for tokens on the groups.
impl From<&Placement> for ExpertCopies {
    fn from(placement: &Placement) -> Self {
        Self::on_groups(&held_once(placement))
    }
}

/// Chooses copies for tokens on the groups, without nodes.
impl From<&Replicas> for ExpertCopies {
    fn from(replicas: &Replicas) -> Self {
        Self::on_groups(&held(replicas))
    }
}

impl From<&ExpertCopies> for ExpertCopies {
    fn from(copies: &ExpertCopies) -> Self {
        copies.clone()
    }
}

/// The groups that hold each expert of each layer.
struct Holders {
    groups: u16,
    /// Slots per layer, including empty ones.
    slots: usize,
    /// [L][N]: groups, ascending.
    of: Vec<Vec<Vec<u16>>>,
}

fn held(replicas: &Replicas) -> Holders {
    let of = LayerIdx::all(replicas.layers()).map(|layer| replicas.holders(layer)).collect();
    Holders { groups: replicas.groups(), slots: replicas.slots(), of }
}

fn held_once(placement: &Placement) -> Holders {
    let layer = |layer| placement.layer(layer).iter().map(|&group| vec![group]).collect();
    let of = LayerIdx::all(placement.layers()).map(layer).collect();
    Holders { groups: placement.groups(), slots: placement.experts().into(), of }
}

impl Sites<'_> {
    /// Returns the copy that each place uses of an expert held by these groups (ascending). `rotation` is the index of
    /// the copy for the first place that has a choice.
    fn choices(&self, holders: &[u16], rotation: usize) -> Vec<u16> {
        // Distinct sets of copies to choose among, each with the number of places that have chosen so far.
        let mut choosing: Vec<(Vec<u16>, usize)> = Vec::new();
        let choice = |place| {
            let here = |group: &&u16| usize::from(self.place_of[usize::from(**group)]) == place;
            if let Some(&own) = holders.iter().find(here) {
                return own;
            }
            let nearest = self.nearest(holders, place);
            let at = choosing.iter().position(|(among, _)| *among == nearest).unwrap_or_else(|| {
                choosing.push((nearest, 0));
                choosing.len() - 1
            });
            let (among, before) = &mut choosing[at];
            *before += 1;
            among[(rotation + *before - 1) % among.len()]
        };
        (0..self.places).map(choice).collect()
    }

    /// Returns the copies on the same node as a place, or all copies if there are none or nodes are unknown.
    fn nearest(&self, holders: &[u16], place: usize) -> Vec<u16> {
        let Some(per_node) = self.per_node else { return holders.to_vec() };
        let groups = self.place_of.iter().enumerate().filter(|(_, of)| usize::from(**of) == place);
        let nodes: Vec<usize> = groups.map(|(group, _)| group / per_node).collect();
        let near = holders.iter().copied().filter(|group| nodes.contains(&(usize::from(*group) / per_node)));
        let near: Vec<u16> = near.collect();
        if near.is_empty() { holders.to_vec() } else { near }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(holders: &[u16], places: usize, per_node: Option<usize>, rotation: usize) -> Vec<u16> {
        let place_of: Vec<u16> = (0..places as u16).collect();
        Sites { place_of: &place_of, places, per_node }.choices(holders, rotation)
    }

    #[test]
    fn the_own_copy_is_used_first_and_the_others_serve_equally_many_places() {
        for rotation in 0..4 {
            let used = choices(&[1, 4, 6], 8, None, rotation);
            assert_eq!([used[1], used[4], used[6]], [1, 4, 6]);
            let served = [1, 4, 6].map(|group| used.iter().filter(|&&of| of == group).count());
            assert_eq!(
                (served.iter().sum::<usize>(), served.iter().max(), served.iter().min()),
                (8, Some(&3), Some(&2))
            );
        }
        assert_ne!(choices(&[1, 4, 6], 8, None, 0), choices(&[1, 4, 6], 8, None, 1), "experts begin with other copies");
    }

    #[test]
    fn a_copy_on_the_own_node_is_nearer_than_others() {
        // Nodes of four groups: 0..4 and 4..8.
        let used = choices(&[1, 4, 6], 8, Some(4), 0);
        assert_eq!(used[..4], [1; 4]);
        assert_eq!((used[5] != used[7], used[5].min(used[7])), (true, 4));
        // The second node holds no copy: its places rotate through those of the first.
        assert_eq!(choices(&[0, 3], 8, Some(4), 0)[4..], [0, 3, 0, 3]);
        assert_eq!(choices(&[0, 3], 8, Some(4), 1)[4..], [3, 0, 3, 0]);
    }

    #[test]
    fn groups_of_one_place_are_equally_near() {
        let place_of = [0, 0, 1, 1];
        let sites = Sites { place_of: &place_of, places: 2, per_node: None };
        assert_eq!(sites.choices(&[1, 2, 3], 0), [1, 2]);
        assert_eq!(sites.choices(&[3], 5), [3, 3]);
    }

    #[test]
    fn copies_survive_json_and_what_lies_is_refused() {
        let placement = Placement::new(2, vec![vec![0, 1, 0, 1], vec![1, 1, 0, 0]]).unwrap();
        let copies = ExpertCopies::from(&placement);
        let json = serde_json::to_value(&copies).unwrap();
        assert_eq!(serde_json::from_value::<ExpertCopies>(json.clone()).unwrap(), copies);
        let lies = [
            ("groups", serde_json::json!(1)),
            ("experts", serde_json::json!(5)),
            ("layers", serde_json::json!(u64::MAX)),
            ("start", serde_json::json!([])),
            ("start", serde_json::json!([0, 1, 2, 3, 3, 5, 6, 7, 8])),
            ("held_by", serde_json::json!([0, 1, 0, 1, 1, 1, 0, 2])),
            ("used", serde_json::json!([0, 1, 0])),
        ];
        for (field, value) in lies {
            let mut lie = json.clone();
            lie[field] = value;
            assert!(serde_json::from_value::<ExpertCopies>(lie).is_err(), "{field}");
        }
    }

    #[test]
    fn a_domain_holds_the_experts_of_all_its_groups() {
        let placement = Placement::new(4, vec![vec![0, 1, 2, 3], vec![3, 2, 1, 0]]).unwrap();
        assert_eq!(ExpertCopies::in_domains(&placement, 1.into()).unwrap(), ExpertCopies::from(&placement));
        let pairs = ExpertCopies::in_domains(&placement, 2.into()).unwrap();
        let (layer, expert) = (LayerIdx::new(1), ExpertId::new(0));
        assert_eq!((pairs.slots(), pairs.held_by(layer, expert)), (8, &[2, 3][..]));
        // Places outside the domain use the group at their own position in it.
        assert_eq!([0, 1, 2, 3].map(|place| pairs.used_at(place, layer)[0]), [2, 3, 2, 3]);
        // One position on two nodes of two.
        let apart = ExpertCopies::in_domains(&placement, "2:1/2".parse().unwrap()).unwrap();
        assert_eq!(apart.held_by(layer, expert), [1, 3]);
        assert_eq!([0, 1, 2, 3].map(|place| apart.used_at(place, layer)[0]), [1, 1, 3, 3]);
        let all = ExpertCopies::in_domains(&placement, 4.into()).unwrap();
        assert!((0..4).all(|place| all.used_at(place.into(), layer) == [place; 4]));
        let json = serde_json::to_value(&pairs).unwrap();
        assert_eq!(serde_json::from_value::<ExpertCopies>(json).unwrap(), pairs);
        for size in [0, 3, 8] {
            let error = ExpertCopies::in_domains(&placement, size.into()).unwrap_err().to_string();
            assert!(error.contains("domains"), "{error}");
        }
    }

    #[test]
    fn a_placement_is_one_copy_of_each() {
        let placement = Placement::new(2, vec![vec![0, 1, 0, 1], vec![1, 1, 0, 0]]).unwrap();
        let copies = ExpertCopies::from(&placement);
        assert_eq!(
            (copies.groups(), copies.layers(), copies.experts(), copies.slots(), copies.places()),
            (2, 2, 4, 4, 2)
        );
        for place in 0..2 {
            assert_eq!(copies.used_at(place, LayerIdx::new(1)), placement.layer(LayerIdx::new(1)));
        }
        assert!(copies.holds(GroupId::new(1), LayerIdx::new(0), ExpertId::new(3)));
        assert!(!copies.holds(GroupId::new(0), LayerIdx::new(0), ExpertId::new(3)));
    }
}
