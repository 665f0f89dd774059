//! Experts with copies on several ranks: exact counts, and results that do not depend on the batch.

use crate::common;
use std::sync::atomic::Ordering;

use crate::common::{Rank, golden, local_mesh, metered_mesh, on_ranks, replicated_of};
use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx};
use semmoe_worker::ep::StepPhase;
use semmoe_worker::model::{KvCache, StepItem, Wants};

#[test]
fn a_local_copy_counts_as_local_and_every_byte_is_counted() {
    let (golden, config) = (golden(), common::config());
    let (layers, top_k, steps) = (config.num_moe_layers(), config.top_k, 4);
    let replicas = replicated_of(&config, 4, 2, 5);
    let copies = ExpertCopies::from(&replicas);
    let (transports, meters) = metered_mesh(4);
    let runs = on_ranks(transports, &copies, |mut rank| {
        let mine: Vec<&[u32]> = golden.iter().map(|g| &g.ids[..]).skip(rank.rank).step_by(4).collect();
        let mut kvs: Vec<KvCache> = mine.iter().map(|_| rank.model.new_sequence()).collect();
        let (mut local, mut pairs) = (0, 0);
        let mut last: Vec<Vec<u32>> = mine.iter().map(|prompt| prompt.to_vec()).collect();
        for step in 0..steps {
            let phase = if step == 0 { StepPhase::Prefill } else { StepPhase::Decode };
            let items = kvs.iter_mut().zip(&last);
            let mut items: Vec<StepItem<'_>> =
                items.map(|(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase }).collect();
            let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
            let next: Vec<u32> = (0..mine.len()).map(|item| common::argmax(out.logits(item).unwrap())).collect();
            for item in 0..mine.len() {
                for (at, &expert) in out.routes(item).iter().enumerate() {
                    let layer = LayerIdx::new((at / top_k % layers) as u16);
                    let here = GroupId::new(rank.rank as u16);
                    local += u64::from(copies.holds(here, layer, ExpertId::new(expert)));
                    pairs += 1;
                }
            }
            last = next.into_iter().map(|token| vec![token]).collect();
        }
        (rank.counted(), local, pairs)
    });
    let mut remote_bytes = 0;
    for (rank, (counted, local, pairs)) in runs.iter().enumerate() {
        let total = counted.total();
        let tokens = counted.prefill_tokens + counted.decode_tokens;
        assert_eq!(total.activations.local, *local, "rank {rank}");
        assert_eq!(total.activations.local + total.activations.remote, tokens * (layers * top_k) as u64);
        assert_eq!(tokens * (layers * top_k) as u64, *pairs);
        remote_bytes += total.bytes.remote;
    }
    let sent: u64 = meters.iter().map(|[sent_bytes, _]| sent_bytes.load(Ordering::Relaxed)).sum();
    assert_eq!(remote_bytes, sent, "what the transport carried is what was counted");
}

/// The logits after rank 0's prompt, in pieces of this size, with other sequences beside it and on other ranks.
fn on_rank_0(copies: &ExpertCopies, piece: usize, beside: usize, on_others: usize) -> Vec<f32> {
    let golden = golden();
    let prompt = &golden[3].ids;
    let run = |mut rank: Rank| {
        let others = if rank.rank == 0 { beside } else { on_others };
        let mut kv = rank.model.new_sequence();
        let mut kvs: Vec<KvCache> = (0..others).map(|_| rank.model.new_sequence()).collect();
        let mut logits = Vec::new();
        for tokens in prompt.chunks(piece) {
            let others = kvs.iter_mut().zip(&golden);
            let mut items: Vec<StepItem<'_>> = others
                .map(|(kv, golden)| StepItem {
                    kv,
                    tokens: &golden.ids[..3],
                    wants: Wants::Nothing,
                    phase: StepPhase::Decode,
                })
                .collect();
            if rank.rank == 0 {
                items.push(StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill });
            }
            let last = items.len().wrapping_sub(1);
            let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
            if rank.rank == 0 {
                logits = out.logits(last).unwrap().to_vec();
            }
        }
        logits
    };
    on_ranks(local_mesh(4), copies, run).swap_remove(0)
}

#[test]
fn results_do_not_depend_on_the_batch_with_replicas() {
    let copies = ExpertCopies::from(&replicated_of(&common::config(), 4, 3, 11));
    let length = golden()[3].ids.len();
    let alone = on_rank_0(&copies, length, 0, 0);
    assert!(!alone.is_empty());
    for (piece, beside, on_others) in [(length, 3, 0), (length, 0, 4), (1, 2, 3), (3, 4, 1)] {
        let found = on_rank_0(&copies, piece, beside, on_others);
        assert!(found == alone, "in pieces of {piece}, {beside} beside it, {on_others} on the other ranks");
    }
}
