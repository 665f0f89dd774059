//! Schedules of layouts: which ones follow each other, with how many steps in each.

use semmoe_tables::{ExpertId, GroupId, LayerIdx, Placement, Replicas};

use super::*;
use crate::ep::ExpertPlacement;

/// Some steps in one layout.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) attention: Attention,
    pub(super) experts: ExpertLayout,
    /// Whether each rank has one expert of another rank as well.
    pub(super) replicas: bool,
    pub(super) steps: usize,
}

impl Part {
    pub(super) fn shape(self, world: usize) -> AttentionShape {
        let ranks = match (self.attention, self.experts.groups()) {
            (Attention::Dp, _) => 1,
            (Attention::Tp, Some(groups)) => groups.ranks.into(),
            (Attention::Tp, None) => world,
        };
        AttentionShape { attention: self.attention, ranks }
    }

    /// Experts of a layer on a rank.
    pub(super) fn slots(self, config: &ModelConfig, world: usize) -> u16 {
        (config.num_experts.div_ceil(world) + usize::from(self.replicas)) as u16
    }

    /// The ranks of each expert: neighbours, and with replicas another copy of one of the next rank's.
    pub(super) fn copies(self, config: &ModelConfig, world: usize) -> ExpertCopies {
        let (layers, experts) = (config.num_moe_layers(), config.num_experts);
        let placement = Placement::contiguous(layers, experts as u16, world as u16).unwrap();
        if !self.replicas {
            return ExpertCopies::from(&placement);
        }
        let mut slots = Vec::new();
        for layer in (0..layers).map(|layer| LayerIdx::new(layer as u16)) {
            let of =
                |rank: usize| placement.experts_of(layer, GroupId::new(rank as u16)).map(|expert| expert.get().into());
            for rank in 0..world {
                let next: Vec<i32> = of((rank + 1) % world).collect();
                let mut held: Vec<i32> = of(rank).chain([next[layer.index() % next.len()]]).collect();
                held.sort_unstable();
                slots.extend(held);
            }
        }
        let (info, each) = (config.model_info("fixture", None), slots.len() / layers);
        ExpertCopies::from(&Replicas::new(&info, world as u16, each, slots).unwrap())
    }

    /// The placement of a unit that cannot switch. That of hybrid experts is over nodes, each with the experts of its
    /// ranks.
    pub(super) fn fixed_copies(self, config: &ModelConfig, world: usize) -> ExpertCopies {
        let (copies, layers, experts) =
            (self.copies(config, world), config.num_moe_layers(), config.num_experts as u16);
        let ExpertLayout::Hybrid(nodes) = self.experts else { return copies };
        let mut slots = Vec::new();
        for layer in (0..layers).map(|layer| LayerIdx::new(layer as u16)) {
            for node in 0..nodes.nodes {
                let on_node = |rank: &u16| rank / nodes.width == node;
                let has = |expert: &u16| copies.held_by(layer, ExpertId::new(*expert)).iter().any(on_node);
                let held = (0..experts).filter(has).map(i32::from);
                slots.extend(held.chain(std::iter::repeat(-1)).take(experts.into()));
            }
        }
        let info = config.model_info("fixture", None);
        ExpertCopies::from(&Replicas::new(&info, nodes.nodes, slots.len() / layers, slots).unwrap())
    }

    pub(super) fn placement(self, config: &ModelConfig, world: usize) -> ExpertPlacement {
        ExpertPlacement { layout: self.experts, replicas: self.copies(config, world) }
    }
}

/// From dp to tp and back, twice; experts stay.
pub(super) fn dp_and_tp() -> Vec<Part> {
    let attention = [Attention::Dp, Attention::Tp].into_iter().cycle();
    attention
        .zip([3, 3, 2, 3, 3])
        .map(|(attention, steps)| Part { attention, experts: ExpertLayout::Ep, replicas: false, steps })
        .collect()
}

/// The layouts of these names, two steps in each; with a plus, experts have replicas.
pub(super) fn named(names: &[&str], world: usize) -> Vec<Part> {
    let part = |name: &&str| {
        let plain = name.trim_end_matches('+');
        let (attention, experts) = match plain {
            "ep" => (Attention::Dp, ExpertLayout::Ep),
            _ if plain.starts_with("hybrid") => (Attention::Dp, plain.parse().unwrap()),
            "dp-tp" => (Attention::Dp, ExpertLayout::Tp),
            "tp" => (Attention::Tp, ExpertLayout::Tp),
            "tp-ep" => (Attention::Tp, ExpertLayout::Ep),
            groups => {
                let groups = groups.strip_prefix("tp:").unwrap().parse().unwrap();
                (Attention::Tp, ExpertLayout::Groups(RankGroups::new(groups, world as u16).unwrap()))
            }
        };
        Part { attention, experts, replicas: *name != plain, steps: 2 }
    };
    names.iter().map(part).collect()
}

/// The layouts that a unit switches to in these parts.
pub(super) fn targets(parts: &[Part]) -> SwitchTargets {
    let mut groups: Vec<RankGroups> = parts.iter().filter_map(|part| part.experts.groups()).collect();
    groups.sort();
    groups.dedup();
    SwitchTargets { groups, hybrid: parts.iter().find_map(|part| part.experts.nodes()) }
}
