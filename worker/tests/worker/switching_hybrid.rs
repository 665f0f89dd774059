//! A unit that switches to hybrid experts and back while it serves: no request is lost or changed, and what cannot
//! switch says so.

use std::path::{Path, PathBuf};

use crate::common::{dp_tables, model_info, shuffled};
use crate::support::{self, Unit, golden, greedy};
use crate::switching_attention::switches_under_load;
use semmoe_tables::Attention;
use semmoe_worker::ep::{ExpertLayout, NodeLayout};
use semmoe_worker::{TransportChoice, WorkerConfig};
use serde_json::{Value, json};

const WORLD: u16 = 4;
const HYBRID: &str = "dp-hybrid";

fn nodes(text: &str) -> NodeLayout {
    text.parse().unwrap()
}

fn start(transport: TransportChoice, hybrid: &str, adjust: impl Fn(&mut WorkerConfig)) -> Unit {
    Unit::start_with(WORLD, |config| {
        (config.transport, config.switch_hybrid) = (transport, Some(nodes(hybrid)));
        config.limits.running = 64;
        adjust(config);
    })
}

/// Tables for this many groups, and their placement's digest.
fn tables(folder: &Path, groups: u16) -> (PathBuf, String) {
    let (path, placement) = (folder.join(format!("{groups}.tables")), shuffled(groups, 1));
    let digest = placement.digest();
    dp_tables(model_info(), placement).write(&path).unwrap();
    (path, digest)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_golden_to_hybrid_and_back() {
    let unit = start(TransportChoice::Auto, "2x2", |config| {
        (config.both_attentions, config.switch_groups) = (true, vec![2]);
    });
    assert_eq!(unit.get("/server_info").await["layouts"], json!(["ep", "tp", "dp-tp", "tp-ep", HYBRID, "tp:2x2"]));
    let targets = [HYBRID, "tp", HYBRID, "ep", HYBRID, "tp:2x2", HYBRID, "dp-tp", HYBRID, "tp-ep", HYBRID, "ep"];
    switches_under_load(&unit, &targets, 24, None).await;
    assert!(unit.metrics().await.sum("semmoe_layout_steps_total", &[("layout", HYBRID)]) > 0);
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_golden_over_tcp_with_both_levels_at_once_from_a_hybrid_start() {
    let unit = start(TransportChoice::Tcp, "2x2:2", |config| {
        config.experts = "hybrid:2x2:2".parse().unwrap();
        config.both_attentions = true;
    });
    let info = unit.get("/server_info").await;
    assert_eq!((&info["layout"], &info["ep_size"]), (&json!(HYBRID), &json!(2)));
    switches_under_load(&unit, &["ep", HYBRID, "tp", HYBRID], 24, Some(1 << 20)).await;
    unit.end();
}

/// Tables are for ranks in any layout: a hybrid unit keeps their placement, and returns to it.
#[tokio::test(flavor = "multi_thread")]
async fn tables_are_those_of_the_ranks_and_stay() {
    let folder = tempfile::tempdir().unwrap();
    let ((four, digest), (two, _)) = (tables(folder.path(), 4), tables(folder.path(), 2));
    let unit = start(TransportChoice::Auto, "2x2", |config| config.tables_root = Some(folder.path().to_owned()));
    let switch = async |to: Value, layout: &str| {
        let status = unit.ok("/switch", &json!({"to": to})).await;
        assert_eq!((&status["state"], &status["layout"]), (&json!("stable"), &json!(layout)), "{status}");
        unit.serves_golden().await;
        status["placement_digest"].clone()
    };
    let contiguous = unit.get("/switch").await["placement_digest"].clone();
    assert_eq!(switch(json!(HYBRID), HYBRID).await, contiguous);
    assert_eq!(switch(json!({"tables": four}), "ep").await, json!(digest));
    for (to, layout) in [(HYBRID, HYBRID), ("ep", "ep"), (HYBRID, HYBRID)] {
        assert_eq!(switch(json!(to), layout).await, json!(digest));
    }
    let (status, _, answer) = unit.ask("/switch", &json!({"to": {"tables": two}})).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 422 && message.contains("2 groups, but the unit has 4"), "{status} {message}");
    let metrics = unit.metrics().await;
    assert!(metrics.sum("semmoe_level_bytes_total", &[("level", "node")]) > 0);
    unit.end();
}

/// A unit without the option has no hybrid layout, and one that starts in it stays there.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_option_there_is_no_way_in_or_out() {
    for (experts, layouts, to) in [("ep", json!(["ep", "dp-tp"]), HYBRID), ("hybrid:2x2", json!([HYBRID]), "ep")] {
        let unit = Unit::start_with(WORLD, |config| config.experts = experts.parse().unwrap());
        assert_eq!(unit.get("/server_info").await["layouts"], layouts);
        let (status, _, answer) = unit.ask("/switch", &json!({"to": to})).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains(&format!("cannot be switched to '{to}'")), "{status} {message}");
        unit.end();
    }
}

/// An abort while experts move to nodes, or back, changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_abort_before_the_move_changes_nothing() {
    let unit = start(TransportChoice::Auto, "2x2", |_| {});
    let prompt = &golden()[0];
    for (epoch, to) in [HYBRID, "ep"].into_iter().enumerate() {
        let before = unit.ok("/switch", &json!({"to": to, "action": "prepare"})).await;
        assert_eq!((&before["to"], &before["epoch"]), (&json!(to), &json!(epoch)));
        let after = unit.ok("/switch", &json!({"action": "abort"})).await;
        assert_eq!((&after["state"], &after["epoch"]), (&json!("stable"), &json!(epoch)));
        let answer = unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await;
        assert_eq!(answer["output_ids"], prompt["greedy_16"]);
        unit.ok("/switch", &json!({"to": to})).await;
    }
    unit.end();
}

#[test]
fn nodes_that_cannot_be_are_refused_in_a_sentence() {
    let refused = |hybrid: &str, adjust: &dyn Fn(&mut WorkerConfig)| {
        support::refused(WORLD, |config| {
            config.switch_hybrid = Some(nodes(hybrid));
            adjust(config);
        })
    };
    for hybrid in ["2x3", "3x1", "4x4:2"] {
        let shape = hybrid.split(':').next().unwrap().split_once('x').unwrap();
        assert_eq!(
            refused(hybrid, &|_| {}),
            format!("--switch-hybrid {hybrid}: {} nodes of {} ranks are not the world of 4", shape.0, shape.1)
        );
    }
    assert_eq!(
        refused("2x2", &|config| config.nodes = Some(4)),
        "4 nodes and experts hybrid:2x2 contradict each other"
    );
    let experts = |experts: &str, attention| {
        refused("2x2", &|config| {
            (config.experts, config.attention) = (experts.parse::<ExpertLayout>().unwrap(), attention);
            config.both_attentions = true;
        })
    };
    assert_eq!(experts("hybrid:4x1", Attention::Dp), "--switch-hybrid 2x2: contradicts experts hybrid:4x1");
    assert_eq!(
        experts("hybrid:2x2", Attention::Tp),
        "--switch-hybrid 2x2: cannot start with attention tp and experts hybrid, which no switch reaches"
    );
    type Adjust = fn(&mut WorkerConfig);
    let others: [(&str, Adjust); 3] = [
        ("attention tp alone: start with dp, or with both", |config| config.attention = Attention::Tp),
        ("expert domains", |config| config.domains = "2".parse().unwrap()),
        ("streamed experts", |config| config.expert_memory = Some(1 << 30)),
    ];
    for (other, adjust) in others {
        assert_eq!(refused("2x2", &adjust), format!("--switch-hybrid 2x2: cannot be combined with {other}"));
    }
    // Tables for nodes, which experts hybrid alone would take.
    let folder = tempfile::tempdir().unwrap();
    let (two, _) = tables(folder.path(), 2);
    assert_eq!(
        refused("2x2", &|config| {
            (config.experts, config.tables) = ("hybrid:2x2".parse().unwrap(), Some(two.clone()));
        }),
        format!("the tables in {} are for 2 groups, but this unit has 4 ranks", two.display())
    );
    // One rank that was started otherwise.
    for (message, code) in support::refused_unit(2, |config| {
        config.switch_hybrid = (config.rank == 0).then(|| nodes("1x2"));
    }) {
        assert!(code == 2 && message.contains("with --switch-hybrid none, rank 0 1x2"), "{message}");
    }
}
