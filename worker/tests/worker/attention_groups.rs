//! Attention tp in groups of ranks with separate sequences: MixServe's three cases of DP and EP. Tokens equal those of
//! a single rank, each row is sent to its experts by one rank of its group, and clients see one replica per group.

use std::sync::atomic::Ordering;

use crate::common::{self, FIXTURES, Rank, contiguous_of, fixture, fixture_prompts, metered_mesh, on_threads};
use crate::support::{self, LAYERS, TOP_K, Unit, golden, greedy};
use futures_util::future::join_all;
use semmoe_tables::{Attention, ExpertCopies};
use semmoe_worker::ep::{Counters, ExpertLayout, WireType};
use semmoe_worker::model::ModelConfig;
use semmoe_worker::{TransportChoice, WorkerConfig};
use serde_json::json;

const WORLD: u16 = 4;
const GROUPS: u16 = 2;
/// Fewer DP groups than EP groups, as many, and more.
const CASES: [&str; 4] = ["ep", "hybrid:2x2", "hybrid:2x2:2", "tp"];

fn layout(name: &str) -> ExpertLayout {
    name.parse().unwrap()
}

/// The counts of each rank, and all bytes sent, for a fixture's prompts dealt to the groups in turn.
fn run_prompts(name: &str, case: &str) -> (Vec<Counters>, u64) {
    let (dir, config) = (fixture(name), ModelConfig::load(&fixture(name)).unwrap());
    let hosts = if case.starts_with("hybrid") { GROUPS } else { WORLD };
    let copies = &ExpertCopies::from(&contiguous_of(&config, hosts));
    let prompts = fixture_prompts(&dir);
    let steps = steps(&prompts);
    let run = |transport| {
        let mut rank = Rank::grouped(&dir, transport, copies, layout(case), GROUPS.into(), WireType::F32);
        let mine = prompts.iter().skip(rank.rank / 2).step_by(GROUPS.into());
        let (ids, greedy): (Vec<&[u32]>, Vec<&[u32]>) = mine.map(|(ids, greedy)| (&ids[..], &greedy[..])).unzip();
        for (text, golden) in rank.greedy(&ids, steps).iter().zip(greedy) {
            assert_eq!(text[..], golden[..steps], "{name}, {case}");
        }
        // No rank may leave before all have finished.
        (rank.counted(), rank)
    };
    let (transports, meters) = metered_mesh(WORLD);
    let ended = on_threads(transports, run);
    let sent = meters.iter().map(|[sent, _]| sent.load(Ordering::Relaxed)).sum();
    (ended.into_iter().map(|(counted, _)| counted).collect(), sent)
}

fn steps(prompts: &[(Vec<u32>, Vec<u32>)]) -> usize {
    prompts.iter().map(|(_, greedy)| greedy.len()).min().unwrap()
}

#[test]
fn every_family_gives_the_same_tokens_in_every_case_and_each_row_is_sent_once() {
    for name in FIXTURES {
        let (prompts, config) = (fixture_prompts(&fixture(name)), ModelConfig::load(&fixture(name)).unwrap());
        let tokens: usize = prompts.iter().map(|(ids, _)| ids.len() + steps(&prompts) - 1).sum();
        for case in CASES {
            let (counted, sent) = run_prompts(name, case);
            let total = |of: fn(&Counters) -> u64| counted.iter().map(of).sum::<u64>();
            // Only one of the ranks that have a row sends it.
            let activations = total(|c| c.total().activations.local + c.total().activations.remote);
            assert_eq!(activations, (tokens * config.num_moe_layers() * config.top_k) as u64, "{name}, {case}");
            assert_eq!(total(|c| c.prefill_tokens + c.decode_tokens), tokens as u64, "{name}, {case}");
            if case == "ep" {
                let bytes = total(|c| c.total().bytes.remote + c.collective_bytes.iter().sum::<u64>());
                // Ranks agree on their groups with 8 bytes to each other one.
                assert_eq!(
                    sent,
                    bytes + u64::from(WORLD * (WORLD - 1)) * 8,
                    "{name}: what was sent is what was counted"
                );
            }
        }
    }
}

/// Rows as bf16: logits close to those of f32, with equal bits on every rank of a group.
#[test]
fn rounded_rows_compute_nearly_the_same() {
    let (dir, golden) = (common::model_dir(), common::golden());
    let copies = &ExpertCopies::from(&contiguous_of(&common::config(), WORLD));
    let [wide, rounded] = [WireType::F32, WireType::Bf16].map(|wire| {
        let run = |link| {
            let mut rank = Rank::grouped(&dir, link, copies, ExpertLayout::Ep, GROUPS.into(), wire);
            (rank.prefill(&golden[rank.rank / 2].ids).0, rank)
        };
        let ended = on_threads(common::local_mesh(WORLD), run);
        ended.into_iter().map(|(logits, _)| logits).collect::<Vec<_>>()
    });
    for (rank, (wide, rounded_here)) in wide.iter().zip(&rounded).enumerate() {
        let error = common::relative_error(rounded_here, wide);
        assert!(error > 0.0 && error < 0.05, "{error} on rank {rank}");
        assert_eq!(rounded_here, &rounded[rank / 2 * 2], "rank {rank}");
    }
}

fn grouped(config: &mut WorkerConfig, experts: &str) {
    (config.attention, config.attention_groups, config.experts) = (Attention::Tp, GROUPS, layout(experts));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_serves_on_each_group_and_together() {
    for (experts, transport) in [
        ("ep", TransportChoice::Shm),
        ("ep", TransportChoice::Tcp),
        ("tp", TransportChoice::Shm),
        ("hybrid:2x2", TransportChoice::Tcp),
    ] {
        let unit = Unit::start_with(WORLD, |config| {
            grouped(config, experts);
            config.transport = transport;
        });
        let info = unit.get("/server_info").await;
        assert_eq!(["dp_size", "tp_size"].map(|size| info[size].as_u64().unwrap()), [2, 2]);
        assert_eq!(info["layouts"].as_array().unwrap().len(), 1, "{info}");
        let prompts = golden();
        // One group works alone, then both do.
        let mut body = greedy(&prompts[0]["input_ids"], 16);
        body["routed_dp_rank"] = json!(1);
        let alone = unit.ok("/generate", &body).await;
        assert_eq!(
            (&alone["output_ids"], &alone["meta_info"]["dp_rank"]),
            (&prompts[0]["greedy_16"], &json!(1)),
            "{experts}"
        );
        let bodies: Vec<_> = prompts.iter().map(|prompt| greedy(&prompt["input_ids"], 16)).collect();
        let answers = join_all(bodies.iter().map(|body| unit.ok("/generate", body))).await;
        let mut ranks = std::collections::BTreeSet::new();
        for (prompt, answer) in prompts.iter().zip(&answers) {
            assert_eq!(answer["output_ids"], prompt["greedy_16"], "{experts}");
            ranks.insert(answer["meta_info"]["dp_rank"].as_u64().unwrap());
        }
        assert_eq!(ranks, [0, 1].into(), "requests go to the groups in turn");
        let loads = unit.get("/v1/loads").await;
        assert_eq!(loads["loads"].as_array().unwrap().len(), 2, "{loads}");
        let metrics = unit.metrics().await;
        let counted = |family: &str, labels: &[(&str, &str)]| metrics.sum(family, labels);
        assert!(counted("semmoe_tokens_total", &[("rank", "2")]) > 0);
        assert_eq!(
            counted("semmoe_tokens_total", &[("rank", "1")]) + counted("semmoe_tokens_total", &[("rank", "3")]),
            0
        );
        let tokens = counted("semmoe_tokens_total", &[]);
        assert_eq!(counted("semmoe_activations_total", &[]), tokens * (LAYERS * TOP_K) as u64);
        unit.stop(3).into_iter().for_each(|outcome| outcome.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_not_switched() {
    let unit = Unit::start_with(WORLD, |config| grouped(config, "ep"));
    let (status, _, answer) = unit.ask("/switch", &json!({"to": "tp"})).await;
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("only to one of tp-ep"), "{answer}");
    let folder = tempfile::tempdir().unwrap();
    let config = common::config();
    let path = folder.path().join("tables");
    common::tp_tables(&config, &common::shuffled_of(&config, WORLD, 3), 1).write(&path).unwrap();
    let (status, _, answer) = unit.ask("/switch", &json!({"to": {"tables": path}})).await;
    assert_eq!(status, 422, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("in groups of ranks"), "{answer}");
    unit.end();
}

#[test]
fn groups_that_cannot_be_are_refused_in_a_sentence() {
    let refused = |adjust: &dyn Fn(&mut WorkerConfig)| {
        support::refused(WORLD, |config| {
            grouped(config, "ep");
            adjust(config);
        })
    };
    for groups in [0, 3, 4, 8] {
        assert_eq!(
            refused(&|config| config.attention_groups = groups),
            format!("{groups} attention groups of at least two ranks each do not divide the world of 4")
        );
    }
    for adjust in [(|config: &mut WorkerConfig| config.attention = Attention::Dp) as fn(&mut WorkerConfig), |config| {
        config.both_attentions = true
    }] {
        assert_eq!(refused(&adjust), "2 attention groups are only for attention tp");
    }
    assert_eq!(
        refused(&|config| config.tables = Some("some.tables".into())),
        "2 attention groups do not support tables, but some.tables was given"
    );
}
