//! Experts tp: every rank has a slice of every expert. Exact counts.

use crate::common;
use std::path::Path;

use crate::common::{Laid, Rank, contiguous, contiguous_of, fixture, golden, on_layout, relative_error};
use crate::support::Unit;
use semmoe_tables::{Attention, Placement, RankId};
use semmoe_worker::ep::{Counters, ExpertLayout, StepPhase};
use semmoe_worker::model::{Model, ModelConfig, ModelError};

/// Runs every rank with its slices of all experts.
fn on_slices<T: Send>(
    model_dir: &Path,
    attention: Attention,
    placement: &Placement,
    work: impl Fn(&mut Rank) -> T + Sync,
) -> (Vec<(T, Counters)>, u64) {
    let world = placement.groups();
    on_layout(model_dir, Laid { world, attention, placement, experts: ExpertLayout::Tp }, work)
}

#[test]
fn slices_sum_up_to_what_one_rank_computes() {
    let golden = golden();
    for world in [2, 4] {
        let placement = contiguous(world);
        let (logits, _) =
            on_slices(&common::model_dir(), Attention::Dp, &placement, |rank| rank.prefill(&golden[0].ids).0);
        for (logits, _) in logits {
            assert!(relative_error(&logits, &golden[0].last_logits) < 1e-5);
        }
    }
}

#[test]
fn every_activation_is_local_and_every_byte_of_the_collectives_is_counted() {
    let golden = golden();
    let prompts: Vec<&[u32]> = golden.iter().map(|g| &g.ids[..]).collect();
    let steps = 3;
    for world in [1, 2, 4] {
        let (counted, sent) = on_slices(&common::model_dir(), Attention::Dp, &contiguous(world), |rank| {
            let mine: Vec<&[u32]> = prompts.iter().copied().skip(rank.rank).step_by(world.into()).collect();
            rank.greedy(&mine, steps);
        });
        let (layers, top_k, hidden, peers) = (7, 4, 256, u64::from(world) - 1);
        let mut remote = 0;
        for (rank, (_, counted)) in counted.iter().enumerate() {
            let total = counted.total();
            let tokens = counted.prefill_tokens + counted.decode_tokens;
            assert_eq!((total.activations.local, total.activations.remote), (tokens * layers * top_k, 0));
            assert_eq!(counted.layers[3].of(StepPhase::Decode).activations.local, counted.decode_tokens * top_k);
            // Dispatch: the row and its pairs; combine: its partial sum. One header if a rank has any rows.
            let has_rows = prompts.len() > rank;
            let headers = if has_rows { layers * steps as u64 * 8 } else { 0 };
            let to_one = tokens * layers * (2 + top_k * 6 + 8 * hidden) + headers;
            assert_eq!((total.bytes.local, total.bytes.remote), (to_one, to_one * peers), "rank {rank} of {world}");
            remote += total.bytes.remote;
        }
        assert_eq!(sent, remote, "what the transport carried is what was counted");
    }
}

#[test]
fn a_width_that_the_ranks_do_not_divide_is_refused_by_name() {
    let dir = fixture("qwen3-moe");
    let config = ModelConfig::load(&dir).unwrap();
    // Divides the experts, but not the columns of one.
    let ranks = 8;
    let placement = contiguous_of(&config, ranks);
    let (rank, slices) = (RankId::new(0), ExpertLayout::Tp);
    let error = Model::load_divided(&dir, rank, &placement, slices, Attention::Dp).err().unwrap();
    assert!(matches!(error, ModelError::ExpertWidth { .. }), "{error}");
    let width = config.expert_width;
    let expected =
        format!("the expert intermediate width {width} cannot be divided into {ranks} equal slices, one per rank");
    assert_eq!(error.to_string(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_serves_from_slices_and_says_so() {
    for attention in [Attention::Dp, Attention::Tp] {
        serves(attention).await;
    }
}

async fn serves(attention: Attention) {
    let unit = Unit::start_with(2, |config| (config.experts, config.attention) = (ExpertLayout::Tp, attention));
    unit.serves_golden().await;
    let info = unit.get("/server_info").await;
    assert_eq!((&info["experts"], &info["ep_size"], &info["transport"]), (&"tp".into(), &1.into(), &"shm".into()));
    let metrics = unit.metrics().await;
    assert_eq!(metrics.sum("semmoe_activations_total", &[("where", "remote")]), 0);
    assert!(metrics.sum("semmoe_activations_total", &[("where", "local")]) > 0);
    unit.end();
}
