//! Every family in every layout of attention and experts gives Transformers' tokens.

use std::sync::Arc;

use crate::common::{
    FIXTURES, Rank, contiguous_of, fixture, fixture_prompts, local_mesh, on_threads, replicated_of,
    replicated_tp_tables, shuffled_of,
};
use semmoe_tables::{Attention, ExpertCopies, LayerIdx, RankId, Tables};
use semmoe_worker::ep::{ExpertLayout, ExpertPlacement};
use semmoe_worker::model::ModelConfig;

/// The layout of a unit.
struct Layout {
    name: String,
    world: u16,
    attention: Attention,
    experts: ExpertLayout,
    copies: ExpertCopies,
    /// Tables that shuffle rows.
    tables: Option<Arc<Tables>>,
}

fn layouts(config: &ModelConfig) -> Vec<Layout> {
    let mut layouts = Vec::new();
    let row = |name: &str, world, attention, experts: &str, copies| {
        let name = format!("{name}, attention {attention}, experts {experts}, {world} ranks");
        Layout { name, world, attention, experts: experts.parse().unwrap(), copies, tables: None }
    };
    let contiguous = |hosts| ExpertCopies::from(&contiguous_of(config, hosts));
    for world in [1, 2, 4] {
        layouts.push(row("in order", world, Attention::Dp, "ep", contiguous(world)));
        layouts.push(row("in order", world, Attention::Dp, "tp", contiguous(world)));
    }
    for world in [1, 2] {
        layouts.push(row("in order", world, Attention::Tp, "tp", contiguous(world)));
    }
    for (world, seed) in [(2, 1), (4, 2)] {
        layouts.push(row("shuffled", world, Attention::Dp, "ep", (&shuffled_of(config, world, seed)).into()));
    }
    for domains in ["2", "2:1/2", "4"] {
        let copies = ExpertCopies::in_domains(&contiguous_of(config, 4), domains.parse().unwrap()).unwrap();
        layouts.push(row(&format!("domains of {domains}"), 4, Attention::Dp, "ep", copies));
    }
    for experts in ["hybrid:2x2", "hybrid:2x2:3"] {
        layouts.push(row("on nodes", 4, Attention::Dp, experts, contiguous(2)));
    }
    for experts in ["hybrid:2x1", "hybrid:2x1:3"] {
        layouts.push(row("on nodes", 2, Attention::Dp, experts, contiguous(2)));
    }
    layouts.push(row("on nodes", 2, Attention::Tp, "hybrid:1x2", contiguous(1)));
    layouts.push(row("on nodes", 2, Attention::Tp, "hybrid:2x1:2", contiguous(2)));
    // Additional experts on each rank: few, many, all.
    let experts = config.num_experts;
    for (world, extra) in [(2, 1), (4, 1), (4, experts / 2), (4, experts - experts / 4)] {
        let replicas = replicated_of(config, world, extra, 7);
        let name = format!("{extra} replicas");
        layouts.push(row(&name, world, Attention::Dp, "ep", (&replicas).into()));
        layouts.push(row(&name, world, Attention::Tp, "ep", (&replicas).into()));
        let tables = Arc::new(replicated_tp_tables(config, &replicas, 3));
        assert_eq!(ExpertCopies::between_groups(&tables).unwrap(), ExpertCopies::from(&replicas));
        let shuffled = row(&format!("{name}, shuffled rows"), world, Attention::Tp, "ep", (&replicas).into());
        layouts.push(Layout { tables: Some(tables), ..shuffled });
    }
    layouts
}

fn check(name: &str, config: &ModelConfig, layout: &Layout) {
    let Layout { world, attention, experts, copies, tables, .. } = layout;
    let (dir, prompts) = (fixture(name), fixture_prompts(&fixture(name)));
    let steps = prompts.iter().map(|(_, greedy)| greedy.len()).min().unwrap();
    let remote = on_threads(local_mesh(*world), |link| {
        // With attention dp each rank has its own prompts, some have none; with tp all ranks run all of them.
        let (rank, mut mine) = (link.rank(), Vec::new());
        let (mut rank, own) = match attention {
            Attention::Dp => (Rank::with_experts(&dir, link, copies, *experts), (rank, usize::from(*world))),
            Attention::Tp => (Rank::tp(&dir, link, copies, *experts, tables.clone()), (0, 1)),
        };
        mine.extend(prompts.iter().skip(own.0).step_by(own.1));
        let ids: Vec<&[u32]> = mine.iter().map(|(ids, _)| &ids[..]).collect();
        for (text, (_, golden)) in rank.greedy(&ids, steps).iter().zip(mine) {
            assert_eq!(text[..], golden[..steps], "{name}: {}", layout.name);
        }
        // No rank may leave before all have finished.
        (rank.counted().total().activations.remote, rank)
    });
    let placement = ExpertPlacement { layout: *experts, replicas: copies.clone() };
    let layers = (0..config.num_moe_layers()).map(|layer| LayerIdx::new(layer as u16));
    let mut held = layers.flat_map(|layer| (0..*world).map(move |rank| (RankId::new(rank), layer)));
    let all_have_all = held.all(|(rank, layer)| placement.experts_of(rank, layer).count() == config.num_experts);
    let remote: u64 = remote.iter().map(|(remote, _)| remote).sum();
    assert_eq!(remote == 0, all_have_all, "{name}: {}, {remote} activations on other ranks", layout.name);
}

#[test]
fn every_family_gives_the_same_tokens_in_every_layout() {
    for name in FIXTURES {
        let config = ModelConfig::load(&fixture(name)).unwrap();
        layouts(&config).iter().for_each(|layout| check(name, &config, layout));
    }
}
