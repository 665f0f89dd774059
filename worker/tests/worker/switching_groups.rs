//! A unit that becomes groups of ranks with requests of their own, and one unit again, while it serves: no request is
//! lost or changed, groups go on by themselves, and what cannot switch says so.

use crate::support::{self, Unit, golden, greedy};
use crate::switching_attention::switches_under_load;
use semmoe_tables::Attention;
use semmoe_worker::ep::ExpertLayout;
use semmoe_worker::{TransportChoice, WorkerConfig};
use serde_json::{Value, json};

const WORLD: u16 = 4;
const GROUPS: &str = "tp:2x2";

fn able(config: &mut WorkerConfig) {
    (config.both_attentions, config.switch_groups) = (true, vec![2]);
}

fn start(transport: TransportChoice, both: bool) -> Unit {
    Unit::start_with(WORLD, |config| {
        able(config);
        (config.transport, config.both_attentions) = (transport, both);
        config.limits.running = 64;
    })
}

async fn switch(unit: &Unit, to: &str) -> Value {
    let status = unit.ok("/switch", &json!({"to": to})).await;
    assert_eq!((&status["state"], &status["layout"]), (&json!("stable"), &json!(to)), "{status}");
    status
}

/// Between any two of ep, tp and groups, and the mixed layouts.
async fn are_golden(unit: Unit, targets: &[&str]) {
    switches_under_load(&unit, targets, 24, None).await;
    assert!(unit.metrics().await.sum("semmoe_layout_steps_total", &[("layout", GROUPS)]) > 0);
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_golden_between_any_two_layouts() {
    let targets = ["tp", GROUPS, "ep", GROUPS, "tp", "ep", GROUPS, "dp-tp", GROUPS, "tp-ep", GROUPS];
    are_golden(start(TransportChoice::Auto, true), &targets).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_golden_over_tcp_without_attention_tp_over_all_ranks() {
    are_golden(start(TransportChoice::Tcp, false), &[GROUPS, "ep", GROUPS, "dp-tp"]).await;
}

/// Each group has its own prefixes, pins go to it, and it steps without the other.
#[tokio::test(flavor = "multi_thread")]
async fn groups_go_on_by_themselves() {
    let unit = start(TransportChoice::Auto, true);
    switch(&unit, GROUPS).await;
    let steps = async |rank: &str| unit.metrics().await.sum("semmoe_steps_total", &[("rank", rank)]);
    let before = [steps("0").await, steps("2").await];
    let prompt: Vec<u32> = (0..200).collect();
    let mut cached = Vec::new();
    let mut answers = Vec::new();
    for group in [1, 1, 0, 3] {
        let mut body = greedy(&json!(prompt), 8);
        body["routed_dp_rank"] = json!(group);
        let answer = unit.ok("/generate", &body).await;
        cached.push(answer["meta_info"]["cached_tokens"].as_u64().unwrap());
        assert_eq!(answer["meta_info"]["dp_rank"], json!(group.min(1)), "rank 3 is in group 1");
        answers.push(answer["output_ids"].clone());
        if cached.len() == 2 {
            assert_eq!(steps("0").await, before[0], "group 0 has nothing to do");
            assert!(steps("2").await > before[1]);
        }
    }
    assert_eq!(cached, [0, 192, 0, 192]);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let loads = unit.get("/v1/loads").await;
    assert_eq!(loads["loads"].as_array().unwrap().len(), 2, "{loads}");
    // Both groups' prefixes are known to all ranks.
    switch(&unit, "tp").await;
    let again = unit.ok("/generate", &greedy(&json!(prompt), 8)).await;
    assert_eq!(again["meta_info"]["cached_tokens"], json!(192));
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_switched_says_so() {
    let unit = start(TransportChoice::Auto, true);
    let refused = async |body: Value, status: u16, words: &str| {
        let (found, _, answer) = unit.ask("/switch", &body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(found == status && message.contains(words), "{body}: {found} {message}");
    };
    assert_eq!(unit.get("/server_info").await["layouts"], json!(["ep", "tp", "dp-tp", "tp-ep", GROUPS]));
    for to in ["tp:4x1", "tp:1x4", "tp:3x2", "tp:2x", "tp:"] {
        refused(json!({"to": to}), 400, "only to one of ep, tp, dp-tp, tp-ep, tp:2x2").await;
    }
    refused(json!({"to": GROUPS, "kv_step_bytes": 1}), 422, "leave kv_step_bytes out").await;
    unit.ok("/switch", &json!({"to": GROUPS, "action": "prepare"})).await;
    refused(json!({"to": "tp"}), 409, "is in progress").await;
    unit.ok("/switch", &json!({"action": "commit"})).await;
    refused(json!({"to": {"tables": "other.tables"}}), 400, "runs in groups (tp:2x2)").await;
    refused(json!({"to": "ep", "kv_step_bytes": 1}), 422, "leave kv_step_bytes out").await;
    refused(json!({"to": "ep", "if_epoch": 0}), 409, "at epoch 1").await;
    let prompt = &golden()[0];
    assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
    unit.end();
    // Without attention tp over all ranks there is none to go to.
    let unit = start(TransportChoice::Auto, false);
    for _ in 0..2 {
        assert_eq!(unit.get("/server_info").await["layouts"], json!(["ep", "dp-tp", GROUPS]));
        switch(&unit, GROUPS).await;
    }
    unit.stop(0);
}

#[test]
fn groups_that_cannot_be_are_refused_in_a_sentence() {
    let refused = |adjust: &dyn Fn(&mut WorkerConfig)| {
        support::refused(WORLD, |config| {
            able(config);
            adjust(config);
        })
    };
    for groups in [0, 1, 3, 4, 8] {
        assert_eq!(
            refused(&|config| config.switch_groups = vec![groups]),
            format!("--switch-groups {groups}: a world of 4 does not divide into equal groups of two or more")
        );
    }
    assert_eq!(refused(&|config| config.switch_groups = vec![2, 2]), "--switch-groups 2: given twice");
    type Adjust = fn(&mut WorkerConfig);
    let others: [(&str, Adjust); 4] = [
        ("attention tp alone: start with dp, or with both", |config| {
            (config.attention, config.both_attentions) = (Attention::Tp, false);
        }),
        ("experts hybrid", |config| config.experts = "hybrid:2x2".parse::<ExpertLayout>().unwrap()),
        ("expert domains", |config| config.domains = "2".parse().unwrap()),
        ("streamed experts", |config| {
            (config.both_attentions, config.expert_memory) = (false, Some(1 << 30));
        }),
    ];
    for (other, adjust) in others {
        assert_eq!(refused(&adjust), format!("--switch-groups 2: cannot be combined with {other}"));
    }
}
