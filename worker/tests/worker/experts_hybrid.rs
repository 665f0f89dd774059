//! Hybrid TP-EP: experts belong to nodes, and each rank of a node has a slice of them. Exact counts.

use crate::common;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{
    Laid, Rank, config, contiguous, contiguous_of, dp_tables, fixture, golden, model_dir, model_info, on_layout,
    relative_error, shuffled,
};
use crate::support::{LAYERS, TOP_K, Unit, greedy, refused};
use semmoe_kernels::collectives::{PrivateMemory, Unobserved};
use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, evaluate, solve};
use semmoe_tables::{Attention, LayerIdx, Profile, RankId, Score, TokenId, Trace};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, LevelBytes, WireRows};
use semmoe_worker::model::{Model, ModelConfig, ModelError};
use semmoe_worker::{TransportChoice, WorkerConfig};

/// One level after the other, and both overlapped in chunks.
const CHUNKS: [Option<u16>; 2] = [None, Some(3)];

fn hybrid(nodes: u16, width: u16, chunks: Option<u16>) -> ExpertLayout {
    let chunks = chunks.map_or_else(String::new, |chunks| format!(":{chunks}"));
    format!("hybrid:{nodes}x{width}{chunks}").parse().unwrap()
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

/// The traffic of one prompt on a rank, by Transformers' recorded routing.
#[derive(Default)]
struct Recorded {
    /// Pairs that cross nodes.
    pairs: u64,
    /// Bytes by level.
    levels: LevelBytes,
}

/// On nodes of `width` ranks whose messages between nodes are cut into `chunks`.
fn recorded(experts: &[Vec<Vec<u16>>], [nodes, width]: [u16; 2], node: u16, chunks: usize) -> Recorded {
    let (hidden, placement) = (config().hidden, contiguous(nodes));
    let (mut levels, mut pairs) = (LevelBytes::default(), 0);
    for (layer, tokens) in experts.iter().enumerate() {
        let groups = placement.layer(LayerIdx::new(layer as u16));
        let mut rows = BTreeMap::<u16, usize>::new();
        for experts in tokens {
            let mut of_nodes = BTreeMap::<u16, usize>::new();
            for expert in experts {
                *of_nodes.entry(groups[usize::from(*expert)]).or_default() += 1;
            }
            for (to, count) in of_nodes {
                *rows.entry(to).or_default() += 1;
                // Dispatch: the row, the number of pairs, the pairs; combine: the row.
                let bytes = (2 * 4 * hidden + 2 + 6 * count) as u64;
                levels.node += bytes * u64::from(width - 1);
                if to == node {
                    levels.rank += bytes;
                } else {
                    pairs += count as u64;
                    levels.other += bytes;
                }
            }
        }
        for (to, rows) in rows {
            let headers = 8 * rows.min(chunks) as u64;
            *(if to == node { &mut levels.rank } else { &mut levels.other }) += headers;
        }
    }
    Recorded { pairs, levels }
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
        let mut travelled = 0;
        for (rank, (_, counted)) in counted.iter().enumerate() {
            let node = rank as u16 / width;
            let recorded = recorded(&of_rank(rank).experts, [nodes, width], node, chunks.unwrap_or(1).into());
            let (total, levels) = (counted.total(), recorded.levels);
            assert_eq!(
                (total.bytes.remote, total.activations.remote),
                (levels.other, recorded.pairs),
                "rank {rank}, {experts}"
            );
            assert_eq!(counted.levels, levels, "rank {rank}, {experts}");
            let all = of_rank(rank).ids.len() * 7 * 4;
            assert_eq!(total.activations.local + total.activations.remote, all as u64);
            travelled += levels.node + levels.other;
        }
        // Joining the unit takes 8 bytes to each peer; unfused, 8 bytes begin each message inside a node, none of which
        // is empty here.
        let joined = u64::from(world) * u64::from(world - 1) * 8;
        let headers = u64::from(world) * u64::from(width - 1) * 7 * 8;
        if width == 1 || chunks.is_none() {
            let expected = travelled + joined + headers;
            assert_eq!(sent, expected, "what the transport carried is what was counted, {experts}");
        }
    }
}

/// The solver's tables for two nodes, on a trace that Transformers recorded: the unit sends what `evaluate` predicts
/// if each prompt runs on the node with its largest share in T.
#[tokio::test(flavor = "multi_thread")]
async fn what_crosses_nodes_is_what_evaluate_predicts() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/reference.trace.safetensors");
    let trace = Trace::open(&trace).unwrap();
    let options = SolveOptions { starts: 1, ..SolveOptions::new(2, Attention::Dp, trace.provenance().clone()) };
    let profile = Profile::of_trace(&trace).unwrap();
    let tables = solve(&profile, Some(&trace), &options, &mut |_| ControlFlow::Continue(())).unwrap().tables;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("two.tables");
    tables.write(&path).unwrap();
    let evaluated = evaluate(&tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    let (predicted, routes) = (evaluated.argmax.unwrap(), (trace.tokens() * LAYERS) as f64);
    let count = |value: f64| {
        assert!((value - value.round()).abs() < 1e-6 * routes, "{value} is a count");
        value.round() as u64
    };
    let (rows, activations) = (count(predicted.remote_ranks_per_token * routes), routes as u64 * TOP_K as u64);
    let local = count(predicted.request_lar * activations as f64);

    let unit = Unit::start_with(4, |config| {
        (config.experts, config.tables, config.limits.prefix_reuse) = (hybrid(2, 2, None), Some(path.clone()), false);
    });
    for (at, request) in trace.iter().enumerate() {
        let rows = request.token_ids().iter().filter_map(|&id| tables.token_row(TokenId::new(id)));
        let share = Score::of_rows(2, rows).share().unwrap();
        let rank = 2 * u16::from(share[1] > share[0]) + at as u16 % 2;
        let mut body = greedy(&request.token_ids().into(), 1);
        body["routed_dp_rank"] = rank.into();
        let (status, served_by, answer) = unit.ask("/generate", &body).await;
        assert_eq!((status, served_by), (200, Some(rank)), "{answer}");
    }
    let metrics = unit.metrics().await;
    let counted = |place| metrics.sum("semmoe_activations_total", &[("where", place)]);
    assert_eq!((counted("local"), counted("remote")), (local, activations - local));
    // Dispatch: the row, the number of its pairs, the pairs; combine: the row. One header for each layer of a prompt.
    let row = 2 * 4 * config().hidden as u64 + 2;
    let headers = (8 * trace.requests() * LAYERS) as u64;
    let bytes = rows * row + 6 * (activations - local) + headers;
    assert_eq!(metrics.sum("semmoe_level_bytes_total", &[("level", "other")]), bytes);
    assert!(predicted.remote_ranks_per_token < 0.95 * evaluated.remote_ranks_random.unwrap(), "{predicted:?}");
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_of_two_nodes_serves_over_both_carriers() {
    for (transport, chunks, name) in
        [(TransportChoice::Shm, Some(2), "hybrid:2x2:2"), (TransportChoice::Tcp, None, "hybrid:2x2")]
    {
        let layout = hybrid(2, 2, chunks);
        let unit = Unit::start_with(4, |config| (config.experts, config.transport) = (layout, transport));
        unit.serves_golden().await;
        let info = unit.get("/server_info").await;
        assert_eq!((&info["experts"], &info["ep_size"]), (&name.into(), &2.into()));
        unit.end();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_for_as_many_groups_as_nodes_place_experts_on_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("two.tables");
    let placement = shuffled(2, 1);
    dp_tables(model_info(), placement.clone()).write(&path).unwrap();
    let unit = Unit::start_with(4, |config| {
        (config.experts, config.tables) = (hybrid(2, 2, Some(2)), Some(path.clone()));
    });
    unit.serves_golden().await;
    assert_eq!(unit.get("/server_info").await["placement_digest"], placement.digest());
    let metrics = unit.metrics().await;
    let level = |level: &str| metrics.sum("semmoe_level_bytes_total", &[("level", level)]);
    assert_eq!(level("other"), metrics.sum("semmoe_dispatch_bytes_total", &[("where", "remote")]));
    assert!(level("node") > 0 && level("rank") > 0);
    unit.end();
}

#[test]
fn what_does_not_fit_the_nodes_is_refused_by_name() {
    let layout = hybrid(2, 2, None);
    assert_eq!(
        refused(6, |config| config.experts = layout),
        "experts hybrid:2x2 require a different number of ranks than the world of 6"
    );
    let with_tp = |config: &mut WorkerConfig| {
        (config.attention, config.experts) = (Attention::Tp, hybrid(2, 1, None));
        config.tables = Some("some.tables".into());
    };
    assert_eq!(
        refused(2, with_tp),
        "the tables in some.tables send rows of attention tp to ranks, and with experts hybrid a row belongs to a node: serve \
         without them, with experts ep, or with attention dp"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("four.tables");
    dp_tables(model_info(), shuffled(4, 1)).write(&path).unwrap();
    assert_eq!(
        refused(4, |config| (config.experts, config.tables) = (layout, Some(path.clone()))),
        format!("the tables in {} are for 4 groups, but this unit has 2 nodes", path.display())
    );
    assert_eq!(
        refused(4, |config| (config.experts, config.nodes) = (layout, Some(4))),
        "4 nodes and experts hybrid:2x2 contradict each other"
    );
    assert_eq!(refused(4, |config| config.nodes = Some(3)), "--nodes: 4 ranks cannot be split evenly over 3 nodes");
    let dir = fixture("qwen3-moe");
    let config = ModelConfig::load(&dir).unwrap();
    let width = u16::try_from(config.expert_width).unwrap() * 2;
    let placement = contiguous_of(&config, 2);
    let (rank, nodes) = (RankId::new(0), hybrid(2, width, None));
    let error = Model::load_divided(&dir, rank, &placement, nodes, Attention::Dp).err().unwrap();
    assert!(matches!(error, ModelError::ExpertWidth { .. }), "{error}");
    // A placement by ranks instead of nodes.
    let join = |link| {
        let (memory, observer) = (PrivateMemory::new(0), Box::new(Unobserved));
        let unit = WireRows::f32(ExpertLayout::Ep.join(link, memory, observer).unwrap());
        ExpertParallel::over(unit, &contiguous(1), hybrid(2, 1, None))
    };
    let error = join(common::local_mesh(2).remove(0)).err().unwrap();
    assert_eq!(error.to_string(), "the placement has 1 groups, but the unit has 2 ranks and expert layout hybrid:2x1");
}
