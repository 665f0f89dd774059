//! Hybrid TP-EP: experts belong to nodes, and each rank of a node has a slice of them. The same tokens as on one rank, and exact counts.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;
mod support;

use std::collections::BTreeMap;

use common::{
    FIXTURES, Laid, Rank, config, contiguous, contiguous_of, fixture, fixture_prompts, golden, model_dir, on_layout,
    relative_error,
};
use semmoe_kernels::collectives::PrivateMemory;
use semmoe_tables::{Attention, LayerIdx, RankId};
use semmoe_worker::ep::{Counters, ExpertLayout, ExpertParallel, WireRows};
use semmoe_worker::model::{Model, ModelConfig, ModelError};
use semmoe_worker::{TransportChoice, run};
use support::Unit;

/// One level after the other, and both at once in pieces.
const CHUNKS: [Option<u16>; 2] = [None, Some(3)];

fn hybrid(nodes: u16, width: u16, chunks: Option<u16>) -> ExpertLayout {
    let chunks = chunks.map_or_else(String::new, |chunks| format!(":{chunks}"));
    format!("hybrid:{nodes}x{width}{chunks}").parse().unwrap()
}

#[test]
fn every_family_gives_the_same_tokens_on_nodes() {
    for name in FIXTURES {
        let (dir, config) = (fixture(name), ModelConfig::load(&fixture(name)).unwrap());
        let prompts = fixture_prompts(&dir);
        for (chunks, [nodes, width]) in CHUNKS.into_iter().flat_map(|chunks| [[2, 2], [2, 1]].map(|of| (chunks, of))) {
            let (world, placement) = (nodes * width, contiguous_of(&config, nodes));
            let experts = hybrid(nodes, width, chunks);
            // Each rank has its own prompts; some have none.
            let laid = Laid { world, attention: Attention::Dp, placement: &placement, experts };
            on_layout(&dir, laid, |rank| {
                let mine = prompts.iter().skip(rank.rank).step_by(world.into());
                let (ids, greedy): (Vec<&[u32]>, Vec<&[u32]>) =
                    mine.map(|(ids, greedy)| (&ids[..], &greedy[..])).unzip();
                let steps = prompts.iter().map(|(_, greedy)| greedy.len()).min().unwrap();
                for (text, golden) in rank.greedy(&ids, steps).iter().zip(greedy) {
                    assert_eq!(text[..], golden[..steps], "{name}, {experts}, {world} ranks");
                }
            });
        }
    }
}

#[test]
fn with_attention_tp_too_every_family_gives_the_same_tokens() {
    for name in FIXTURES {
        let (dir, config) = (fixture(name), ModelConfig::load(&fixture(name)).unwrap());
        let prompts = fixture_prompts(&dir);
        let (ids, greedy): (Vec<&[u32]>, Vec<&[u32]>) =
            prompts.iter().map(|(ids, greedy)| (&ids[..], &greedy[..])).unzip();
        let steps = greedy.iter().map(|greedy| greedy.len()).min().unwrap();
        for (nodes, chunks) in [(1, None), (2, Some(2))] {
            let (placement, experts) = (contiguous_of(&config, nodes), hybrid(nodes, 2 / nodes, chunks));
            let laid = Laid { world: 2, attention: Attention::Tp, placement: &placement, experts };
            for (text, _) in on_layout(&dir, laid, |rank| rank.greedy(&ids, steps)).0 {
                let same = text.iter().zip(&greedy).all(|(text, golden)| text[..] == golden[..steps]);
                assert!(same, "{name}, {experts}");
            }
        }
    }
}

#[test]
fn fused_is_unfused_bit_for_bit_and_near_one_rank() {
    let (golden, placement) = (golden(), contiguous(2));
    let logits = CHUNKS.map(|chunks| {
        let laid = Laid { world: 4, attention: Attention::Dp, placement: &placement, experts: hybrid(2, 2, chunks) };
        let (found, _) = on_layout(&model_dir(), laid, |rank| rank.prefill(&golden[rank.rank % golden.len()].ids).0);
        found.into_iter().map(|(logits, _)| logits).collect::<Vec<_>>()
    });
    let bits = |logits: &[f32]| logits.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for (rank, (unfused, fused)) in logits[0].iter().zip(&logits[1]).enumerate() {
        assert_eq!(bits(unfused), bits(fused), "rank {rank}");
        assert!(relative_error(unfused, &golden[rank % golden.len()].last_logits) < 1e-5, "rank {rank}");
    }
}

/// Bytes between nodes of one prompt on a rank, by the routing that Transformers recorded, and pairs that cross.
fn recorded(experts: &[Vec<Vec<u16>>], nodes: u16, node: u16, chunks: usize) -> (u64, u64) {
    let (hidden, placement) = (config().hidden, contiguous(nodes));
    let (mut bytes, mut pairs) = (0, 0);
    for (layer, tokens) in experts.iter().enumerate() {
        let groups = placement.layer(LayerIdx::new(layer as u16));
        let mut rows = BTreeMap::<u16, usize>::new();
        for experts in tokens {
            let mut of_nodes = BTreeMap::<u16, usize>::new();
            for expert in experts {
                *of_nodes.entry(groups[usize::from(*expert)]).or_default() += 1;
            }
            for (to, count) in of_nodes.into_iter().filter(|(to, _)| *to != node) {
                *rows.entry(to).or_default() += 1;
                pairs += count;
                // There: the row, how many pairs, the pairs; back: the row.
                bytes += 2 * 4 * hidden + 2 + 6 * count;
            }
        }
        bytes += rows.values().map(|&rows| 8 * rows.min(chunks)).sum::<usize>();
    }
    (bytes as u64, pairs as u64)
}

#[test]
fn what_crosses_nodes_is_what_the_recorded_routing_says() {
    let golden = golden();
    for (chunks, [nodes, width]) in
        CHUNKS.into_iter().flat_map(|chunks| [[2, 1], [4, 1], [2, 2]].map(|of| (chunks, of)))
    {
        let (world, placement) = (nodes * width, contiguous(nodes));
        let experts = hybrid(nodes, width, chunks);
        let laid = Laid { world, attention: Attention::Dp, placement: &placement, experts };
        let of_rank = |rank: usize| &golden[rank % golden.len()];
        let work = |rank: &mut Rank| drop(rank.prefill(&of_rank(rank.rank).ids));
        let (counted, sent) = on_layout(&model_dir(), laid, work);
        let mut remote = 0;
        for (rank, (_, counted)) in counted.iter().enumerate() {
            let node = rank as u16 / width;
            let (bytes, pairs) = recorded(&of_rank(rank).experts, nodes, node, chunks.unwrap_or(1).into());
            let total = counted.total();
            assert_eq!((total.bytes.remote, total.activations.remote), (bytes, pairs), "rank {rank}, {experts}");
            let all = of_rank(rank).ids.len() * 7 * 4;
            assert_eq!(total.activations.local + total.activations.remote, all as u64);
            remote += bytes;
        }
        // On nodes of one rank all that is sent crosses; 8 bytes to each peer join the unit.
        if width == 1 {
            let joined = u64::from(world) * u64::from(world - 1) * 8;
            assert_eq!(sent - joined, remote, "what the transport carried is what was counted, {experts}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_of_two_nodes_serves_over_both_carriers() {
    for (transport, chunks, name) in
        [(TransportChoice::Shm, Some(2), "hybrid:2x2:2"), (TransportChoice::Tcp, None, "hybrid:2x2")]
    {
        let layout = hybrid(2, 2, chunks);
        let unit = Unit::start_with(4, |config| (config.experts, config.transport) = (layout, transport));
        for golden in support::golden() {
            let answer = unit.ok("/generate", &support::greedy(&golden["input_ids"], 16)).await;
            assert_eq!(answer["output_ids"], golden["greedy_16"]);
        }
        let info = unit.get("/server_info").await;
        assert_eq!((&info["experts"], &info["ep_size"]), (&name.into(), &2.into()));
        for outcome in unit.stop(0) {
            outcome.unwrap();
        }
    }
}

#[test]
fn what_does_not_fit_the_nodes_is_refused_by_name() {
    let refused = |world: u16, layout: ExpertLayout, tables: Option<&str>| {
        let mut config = support::config(0, world, support::loopback());
        (config.experts, config.tables) = (layout, tables.map(Into::into));
        run(config).unwrap_err().to_string()
    };
    assert_eq!(
        refused(6, hybrid(2, 2, None), None),
        "experts hybrid:2x2 are laid out for another number of ranks than the world of 6"
    );
    assert_eq!(
        refused(4, hybrid(2, 2, None), Some("some.tables")),
        "the tables in some.tables place experts on ranks, and with experts hybrid they belong to nodes: serve without them, or \
         with experts ep"
    );
    let dir = fixture("qwen3-moe");
    let config = ModelConfig::load(&dir).unwrap();
    let width = u16::try_from(config.expert_width).unwrap() * 2;
    let placement = contiguous_of(&config, 2);
    let error = Model::load_experts(&dir, RankId::new(0), &placement, hybrid(2, width, None)).err().unwrap();
    assert!(matches!(error, ModelError::ExpertWidth { .. }), "{error}");
    // A placement of ranks in place of nodes.
    let join = |link| {
        let unit = WireRows::f32(ExpertLayout::Ep.join(link, PrivateMemory::new(0)).unwrap());
        ExpertParallel::over(unit, &contiguous(1), hybrid(2, 1, None), Counters::new(7).into())
    };
    let error = join(common::local_mesh(2).remove(0)).err().unwrap();
    assert_eq!(error.to_string(), "the placement has 1 groups, the unit has 2 ranks and experts hybrid:2x1");
}
