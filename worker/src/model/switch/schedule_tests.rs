//! Schedules of layouts: which ones follow each other, with how many steps in each.

use semmoe_tables::{GroupId, LayerIdx, Placement, Replicas};

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

/// The layouts of these names, two steps in each. `ep+` is ep with replicas.
pub(super) fn named(names: &[&str], world: usize) -> Vec<Part> {
    let part = |name: &&str| {
        let (attention, experts) = match *name {
            "ep" | "ep+" => (Attention::Dp, ExpertLayout::Ep),
            "dp-tp" => (Attention::Dp, ExpertLayout::Tp),
            "tp" => (Attention::Tp, ExpertLayout::Tp),
            "tp-ep" => (Attention::Tp, ExpertLayout::Ep),
            groups => {
                let groups = groups.strip_prefix("tp:").unwrap().parse().unwrap();
                (Attention::Tp, ExpertLayout::Groups(RankGroups::new(groups, world as u16).unwrap()))
            }
        };
        Part { attention, experts, replicas: *name == "ep+", steps: 2 }
    };
    names.iter().map(part).collect()
}

/// The groupings that parts need.
pub(super) fn groupings(parts: &[Part]) -> Vec<RankGroups> {
    let mut all: Vec<RankGroups> = parts.iter().filter_map(|part| part.experts.groups()).collect();
    all.sort();
    all.dedup();
    all
}
