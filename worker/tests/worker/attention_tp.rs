//! Attention tp: heads split over ranks, with rows in order and shuffled by tables, for every family in the fixtures.

use crate::common;
use std::path::Path;
use std::sync::Arc;

use crate::common::{
    FIXTURE_TOKENS, FIXTURES, FixtureGolden, Rank, TOLERANCE, contiguous_of, fixture, fixture_golden, local_mesh,
    on_tp_ranks, relative_error, shuffled_of, tp_tables,
};
use semmoe_tables::{Attention, EvenGroups, LayerIdx, Placement, RankId, Tables, TokenId};
use semmoe_worker::ep::{Collective, Counters, ExpertLayout, StepPhase};
use semmoe_worker::model::{Model, ModelConfig, StepItem, Wants};

/// Every rank's greedy continuations of all prompts together, logits after each prompt, and counts.
fn run(dir: &Path, placement: &Placement, tables: Option<&Arc<Tables>>, golden: &[FixtureGolden]) -> Vec<RankRun> {
    on_tp_ranks(dir, local_mesh(placement.groups()), placement, tables, |mut rank| {
        let prompts: Vec<&[u32]> = golden.iter().map(|golden| &golden.ids[..]).collect();
        let texts = rank.greedy(&prompts, FIXTURE_TOKENS);
        let alone = prompts.iter().map(|prompt| rank.prefill(prompt)).map(|(logits, routes, _)| (logits, routes));
        let (logits, routes) = alone.unzip();
        RankRun { texts, logits, routes }
    })
}

struct RankRun {
    texts: Vec<Vec<u32>>,
    /// Each prompt alone.
    logits: Vec<Vec<f32>>,
    routes: Vec<Vec<u16>>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_family_gives_the_same_tokens_as_one_rank_and_the_same_bits_shuffled_and_plain() {
    for name in FIXTURES {
        let dir = fixture(name);
        let config = ModelConfig::load(&dir).unwrap();
        let golden = fixture_golden(&dir);
        for (ranks, placement) in
            [(1, contiguous_of(&config, 1)), (2, shuffled_of(&config, 2, 1)), (4, shuffled_of(&config, 4, 2))]
        {
            let plain = run(&dir, &placement, None, &golden);
            let tables = Arc::new(tp_tables(&config, &placement, u64::from(placement.groups())));
            let shuffled = run(&dir, &placement, Some(&tables), &golden);
            for (rank, (plain, mixed)) in plain.iter().zip(&shuffled).enumerate() {
                let at = format!("{name}, rank {rank} of {ranks}");
                for (prompt, golden) in golden.iter().enumerate() {
                    assert_eq!(plain.texts[prompt], golden.greedy, "{at}");
                    assert_eq!(mixed.texts[prompt], golden.greedy, "{at}");
                    let last = &golden.logits[golden.logits.len() - config.vocab_size..];
                    let error = relative_error(&plain.logits[prompt], last);
                    assert!(error < TOLERANCE, "{at}: the logits are off by {error}");
                    let expected = bits(&plain.logits[prompt]);
                    assert_eq!(bits(&mixed.logits[prompt]), expected, "{at}");
                    assert_eq!(bits(&shuffled[0].logits[prompt]), expected, "{at}: all ranks have the same");
                }
                assert_eq!(plain.routes, mixed.routes, "{at}");
            }
        }
    }
}

#[test]
fn activations_follow_the_tables_and_every_byte_is_counted() {
    let config = common::config();
    let (top_k, hidden, layers) = (config.top_k as u64, config.hidden as u64, config.num_layers as u64);
    let golden = common::golden();
    let prompts: Vec<&[u32]> = golden.iter().map(|g| &g.ids[..]).collect();
    let (placement, steps) = (shuffled_of(&config, 4, 5), 3u64);
    let tables = Arc::new(tp_tables(&config, &placement, 3));
    for shuffle in [None, Some(&tables)] {
        let (transports, meters) = common::metered_mesh(4);
        let runs = on_tp_ranks(&common::model_dir(), transports, &placement, shuffle, |mut rank| {
            let texts = rank.greedy(&prompts, steps as usize);
            (rank.counted(), texts)
        });
        let counted: Vec<&Counters> = runs.iter().map(|(counted, _)| counted).collect();
        let prompt_tokens: u64 = prompts.iter().map(|p| p.len() as u64).sum();
        let tokens = prompt_tokens + prompts.len() as u64 * (steps - 1);
        let total: Vec<_> = counted.iter().map(|c| c.total()).collect();
        let sum = |of: fn(&semmoe_worker::ep::Traffic) -> u64| total.iter().map(of).sum::<u64>();
        let (local, remote) = (sum(|t| t.activations.local), sum(|t| t.activations.remote));
        assert_eq!(local + remote, tokens * layers * top_k);
        assert_eq!(counted.iter().map(|c| c.prefill_tokens + c.decode_tokens).sum::<u64>(), tokens, "counted once");
        // The tokens of all but the last step with their routes, placed by the rule itself.
        if shuffle.is_some() {
            assert_eq!(local, expected_local(&tables, &prompts, &runs[0].1, &config, &placement));
            assert!(counted.iter().map(|c| c.rows.evenly).sum::<u64>() > 0, "some tokens are unknown");
            assert!(counted.iter().map(|c| c.rows.moved).sum::<u64>() > 0, "some ranks are too full");
            assert!(counted[0].rows.fullest_wanted > counted[0].rows.fullest);
        } else {
            assert_eq!(counted.iter().map(|c| c.rows.by_tables).sum::<u64>(), 0);
        }
        let rows = |c: &&Counters| c.rows.by_tables + c.rows.moved + c.rows.evenly;
        assert_eq!(counted.iter().map(rows).sum::<u64>(), tokens * layers);
        // Even parts in every layer of each step, however rows are split.
        let decoding = (steps - 1) * (prompts.len() as u64).div_ceil(4);
        assert!(counted.iter().all(|c| c.rows.fullest == layers * (prompt_tokens.div_ceil(4) + decoding)));
        let collective = |wanted: Collective| -> u64 {
            let at = Collective::ALL.iter().position(|collective| *collective == wanted).unwrap();
            counted.iter().map(|c| c.collective_bytes[at]).sum()
        };
        let headers = 8 * 4 * 3 * layers * steps;
        assert_eq!(collective(Collective::ReduceScatter), tokens * layers * 3 * 4 * hidden + headers);
        assert_eq!(collective(Collective::Allgather), tokens * layers * 3 * (4 * hidden + 2 * top_k) + headers);
        let sent: u64 = meters.iter().map(|[sent, _]| sent.load(std::sync::atomic::Ordering::Relaxed)).sum();
        let all: u64 = Collective::ALL.into_iter().map(collective).sum();
        assert_eq!(sum(|t| t.bytes.remote) + all, sent, "what the transport carried is what was counted");
    }
}

/// Local activations if every token goes where the tables place it, in even parts.
fn expected_local(
    tables: &Tables,
    prompts: &[&[u32]],
    texts: &[Vec<u32>],
    config: &ModelConfig,
    placement: &Placement,
) -> u64 {
    let mut single = Rank::alone();
    let (width, k) = (config.num_moe_layers() * config.top_k, config.top_k);
    // Steps: all prompts together, then one token of each.
    let sequences: Vec<(Vec<u32>, Vec<u16>)> = prompts
        .iter()
        .zip(texts)
        .map(|(prompt, text)| {
            let tokens: Vec<u32> = prompt.iter().chain(&text[..text.len() - 1]).copied().collect();
            let (_, routes, _) = single.prefill(&tokens);
            (tokens, routes)
        })
        .collect();
    let mut local = 0;
    for step in 0..texts[0].len() {
        for layer in 0..config.num_moe_layers() {
            let id = LayerIdx::new(layer as u16);
            let groups = placement.layer(id);
            let mut even = EvenGroups::new(placement.groups());
            let mut routed = Vec::new();
            for ((tokens, routes), prompt) in sequences.iter().zip(prompts) {
                let rows = match step {
                    0 => 0..prompt.len(),
                    step => prompt.len() + step - 1..prompt.len() + step,
                };
                for at in rows {
                    let row = &routes[at * width..][..width];
                    let before = (layer >= 2).then(|| {
                        let main = |layer: usize| common::main_group(placement, layer, &row[layer * k..][..k]);
                        (main(layer - 2), main(layer - 1))
                    });
                    even.push(|shares| tables.group_shares(id, TokenId::new(tokens[at]), before, shares));
                    routed.push(&row[layer * k..][..k]);
                }
            }
            even.settle();
            for (experts, group) in routed.iter().zip(even.groups()) {
                local += experts.iter().filter(|expert| groups[usize::from(**expert)] == *group).count() as u64;
            }
        }
    }
    local
}

#[test]
fn a_prompt_gives_the_same_bits_however_it_is_cut_and_in_any_company() {
    let config = common::config();
    let placement = shuffled_of(&config, 2, 9);
    let tables = Arc::new(tp_tables(&config, &placement, 7));
    let golden = common::golden();
    let prompt = &golden[2].ids;
    let run = |piece: usize, beside: usize| {
        on_tp_ranks(&common::model_dir(), local_mesh(2), &placement, Some(&tables), |mut rank| {
            let mut others: Vec<_> = (0..beside).map(|_| rank.model.new_sequence()).collect();
            let mut kv = rank.model.new_sequence();
            let mut logits = Vec::new();
            for tokens in prompt.chunks(piece) {
                let mut items = vec![StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill }];
                let beside = others.iter_mut().zip(&golden);
                items.extend(beside.map(|(kv, golden)| StepItem {
                    kv,
                    tokens: &golden.ids[..2],
                    wants: Wants::Nothing,
                    phase: StepPhase::Decode,
                }));
                logits = rank.model.step(&mut items, &mut rank.ep).unwrap().logits(0).unwrap().to_vec();
            }
            logits
        })
    };
    let whole = run(prompt.len(), 0);
    assert_eq!(bits(&whole[0]), bits(&whole[1]));
    for (piece, beside) in [(1, 0), (3, 2), (prompt.len(), 4)] {
        assert_eq!(bits(&run(piece, beside)[0]), bits(&whole[0]), "in pieces of {piece}, {beside} beside it");
    }
}

#[test]
fn ranks_that_do_not_divide_the_heads_are_refused_with_those_that_would() {
    let config = ModelConfig::load(&fixture("mixtral")).unwrap();
    let placement = contiguous_of(&config, 8);
    let (dir, rank) = (fixture("mixtral"), RankId::new(0));
    let model = Model::load_divided(&dir, rank, &placement, ExpertLayout::Ep, Attention::Tp);
    let error = model.err().unwrap().to_string();
    assert!(error.contains("over 8 ranks, expected one of 1, 2, 4"), "{error}");
}
