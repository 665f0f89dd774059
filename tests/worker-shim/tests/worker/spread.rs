//! Where rows go: units whose experts have copies or are on few ranks, and rows that tables shuffle. Ranks on GPUs
//! compute and count what ranks on CPUs do.

use std::sync::Arc;

use half::f16;
use semmoe_kernels::Dtype;
use semmoe_tables::{
    Attention, ExpertCopies, ModelInfo, NO_GROUP, Provenance, Replicas, Tables, TablesBuilder, TpParts,
};
use semmoe_worker::ep::{Counters, ExpertLayout};
use semmoe_worker::model::ModelConfig;

use super::{CUT, Text, contiguous, continued, fixture, furthest, prompts};
use semmoe_worker_shim::{Layout, Rank, on_cpus, on_gpus};

fn info(config: &ModelConfig) -> ModelInfo {
    ModelInfo {
        model: "m".into(),
        tokenizer_sha256: None,
        num_experts: config.num_experts as u16,
        top_k: config.top_k as u16,
        vocab_size: config.vocab_size as u32,
        num_hidden_layers: config.num_layers as u16,
        layer_ids: (0..config.num_moe_layers() as u16).collect(),
    }
}

/// Two random labels for most tokens, and for most pairs of groups.
pub(super) fn tables(config: &ModelConfig, groups: u16) -> Tables {
    let mut random = fastrand::Rng::with_seed(38);
    let mut labels = |count: usize, unknown: usize| {
        let (mut of, mut probs) = (Vec::new(), Vec::new());
        for row in 0..count {
            let (first, share, known) = (random.u16(0..groups), 0.5 + 0.4 * random.f64(), row % unknown != 0);
            of.extend(if known { [first, (first + 1) % groups] } else { [NO_GROUP; 2] });
            probs.extend(if known { [share, 0.9 - share].map(f16::from_f64) } else { [f16::ZERO; 2] });
        }
        (of, probs)
    };
    let (layers, pairs) = (config.num_moe_layers(), usize::from(groups * groups));
    let (token_group, token_prob) = labels(layers * config.vocab_size, 5);
    let (mut transition_group, mut transition_prob) = labels(layers * pairs, 3);
    let first_two = 4 * pairs.min(transition_group.len() / 4);
    transition_group[..first_two].fill(NO_GROUP);
    transition_prob[..first_two].fill(f16::ZERO);
    let parts = TpParts { labels: 2, token_group, token_prob, transition_group, transition_prob };
    let provenance = Provenance { source: "test".into(), created: "2026-01-01T00:00:00Z".into() };
    let placement = contiguous(config, groups);
    TablesBuilder::tp(info(config), provenance, placement, parts, vec![0.0; groups.into()]).finish().unwrap()
}

/// A rank's answers to its own prompts, or with attention tp to all of them, and its counters.
fn answers(mut rank: Rank, attention: Attention) -> (Vec<Text>, Counters) {
    let prompts = prompts(rank.model.config().vocab_size);
    let (me, world) = (usize::from(rank.ep.rank().get()), rank.ep.world());
    let own = |at: &usize| attention == Attention::Tp || at % world == me;
    let own: Vec<Vec<u32>> = (0..prompts.len()).filter(own).map(|at| prompts[at].clone()).collect();
    let texts = continued(&mut rank, &own, CUT);
    (texts, rank.ep.counters().clone())
}

fn compared(family: &str, placement: &ExpertCopies, layout: &Layout) {
    let dir = fixture(family);
    let Some(found) = on_gpus(&dir, placement, layout, |rank| answers(rank, layout.attention)) else { return };
    let expected = on_cpus(&dir, placement, layout, |rank| answers(rank, layout.attention));
    for (rank, ((found, counted), (expected, counted_there))) in found.iter().zip(&expected).enumerate() {
        let furthest = furthest(found, expected);
        assert!(furthest < 1e-4, "{family}, rank {rank}: logits differ by {furthest}");
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.tokens, expected.tokens, "{family}, rank {rank}");
            assert!(found.routes == expected.routes, "{family}, rank {rank}: other experts were chosen");
        }
        assert_eq!((&counted.layers, counted.rows), (&counted_there.layers, counted_there.rows), "{family}, {rank}");
    }
    let sent: Vec<u64> = found.iter().map(|(_, counted)| counted.total().activations.remote).collect();
    assert!(sent.iter().all(|&pairs| pairs > 0), "{sent:?}");
}

#[test]
fn rows_that_tables_shuffle() {
    for (family, world) in [("qwen3-moe", 2), ("qwen3-moe", 4), ("mixtral", 2)] {
        let config = ModelConfig::load(&fixture(family)).unwrap();
        let tables = Some(Arc::new(tables(&config, world as u16)));
        let layout = Layout::new(world, Attention::Tp, ExpertLayout::Ep, Dtype::F32);
        compared(family, &(&contiguous(&config, world as u16)).into(), &Layout { tables, ..layout });
    }
}

#[test]
fn rows_in_even_parts() {
    let config = ModelConfig::load(&fixture("qwen3-moe")).unwrap();
    for world in [2, 4] {
        let layout = Layout::new(world, Attention::Tp, ExpertLayout::Ep, Dtype::F32);
        compared("qwen3-moe", &(&contiguous(&config, world as u16)).into(), &layout);
    }
}

/// The placement of these slots, `[ranks, slots]`, the same in each layer.
fn placed(config: &ModelConfig, ranks: &[Vec<i32>]) -> ExpertCopies {
    let layer = ranks.concat();
    let (slots, layers) = (layer.len(), config.num_moe_layers());
    (&Replicas::new(&info(config), ranks.len() as u16, slots, layer.repeat(layers)).unwrap()).into()
}

/// It sends all of its rows and receives none.
#[test]
fn a_rank_without_experts() {
    let config = ModelConfig::load(&fixture("qwen3-moe")).unwrap();
    let half = config.num_experts as i32 / 2;
    let mut ranks = vec![(0..half).collect(), (half..2 * half).collect()];
    ranks.resize(3, vec![-1; half as usize]);
    compared("qwen3-moe", &placed(&config, &ranks), &Layout::new(3, Attention::Dp, ExpertLayout::Ep, Dtype::F32));
    ranks.resize(4, vec![-1; half as usize]);
    compared("qwen3-moe", &placed(&config, &ranks), &Layout::new(4, Attention::Tp, ExpertLayout::Ep, Dtype::F32));
}

/// Every rank has a copy of its neighbour's first expert, so ranks send tokens for the same expert to different ranks.
#[test]
fn experts_with_copies() {
    let config = ModelConfig::load(&fixture("qwen3-moe")).unwrap();
    for (world, attention) in [(2, Attention::Dp), (4, Attention::Dp), (2, Attention::Tp)] {
        let per_rank = config.num_experts / world;
        let slots = |rank: usize| {
            let mut own: Vec<i32> = (rank * per_rank..(rank + 1) * per_rank).map(|expert| expert as i32).collect();
            own.push(((rank + 1) % world * per_rank) as i32);
            own.sort_unstable();
            own
        };
        let ranks: Vec<Vec<i32>> = (0..world).map(slots).collect();
        compared("qwen3-moe", &placed(&config, &ranks), &Layout::new(world, attention, ExpertLayout::Ep, Dtype::F32));
    }
}
