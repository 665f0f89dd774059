//! A unit that switches while it serves: no request is lost or changed, and impossible switches are refused with the
//! reason.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::common::{dp_tables, model_info};
use crate::support::{EXPERTS, LAYERS, TOP_K, Unit, golden, greedy, model_dir};
use futures_util::future::join_all;
use semmoe_tables::{Attention, Placement, Replicas, Tables};
use serde_json::{Value, json};

/// Tables that give each group every G-th expert, beginning with `first`, and `extra` more.
fn tables(folder: &Path, groups: u16, first: u16, extra: u16) -> (PathBuf, Tables) {
    let path = folder.join(format!("{groups}-{first}-{extra}.tables.safetensors"));
    let layer: Vec<u16> = (0..EXPERTS).map(|expert| (expert + first) % groups).collect();
    let placement = Placement::new(groups, vec![layer; LAYERS]).unwrap();
    let builder = dp_tables(model_info(), placement);
    let builder = match extra {
        0 => builder,
        _ => {
            let group = |group: u16| {
                let held = |expert: &u16| (expert + first) % groups == group || (expert + first + 1) % groups == group;
                let all = (0..EXPERTS).filter(held).take(usize::from(EXPERTS / groups + extra));
                let own = (0..EXPERTS).filter(|expert| (expert + first) % groups == group);
                let more = all.filter(|expert| (expert + first) % groups != group);
                let mut slots: Vec<i32> = own.chain(more).map(i32::from).collect();
                slots.truncate(usize::from(EXPERTS / groups + extra));
                slots.resize(usize::from(EXPERTS / groups + extra), -1);
                slots.sort_by_key(|slot| (*slot < 0, *slot));
                slots
            };
            let layer: Vec<i32> = (0..groups).flat_map(group).collect();
            let slots = layer.len();
            builder.replicas(Replicas::new(&model_info(), groups, slots, layer.repeat(LAYERS)).unwrap())
        }
    };
    let tables = builder.finish().unwrap();
    tables.write(&path).unwrap();
    (path.clone(), Tables::open(&path).unwrap())
}

/// All of the unit's counts are exact: each token went to top-k experts in every layer.
async fn check_counts(unit: &Unit) {
    let metrics = unit.metrics().await;
    let activations = metrics.sum("semmoe_activations_total", &[]);
    assert_eq!(activations, metrics.sum("semmoe_tokens_total", &[]) * (LAYERS * TOP_K) as u64);
}

/// Sends golden prompts one after the other until `stop`, checks the golden answers, and returns their number. A third
/// of the clients pin their requests if `pins` is set.
pub(crate) async fn keep_asking(unit: &Unit, client: usize, pins: bool, stop: &AtomicBool, answered: &AtomicUsize) {
    let golden = golden();
    let mut at = client;
    while !stop.load(Ordering::Relaxed) {
        let prompt = &golden[at % golden.len()];
        let mut body = greedy(&prompt["input_ids"], 16);
        body["stream"] = json!(client.is_multiple_of(2));
        if pins && client.is_multiple_of(3) {
            body["routed_dp_rank"] = json!(client % 2);
        }
        let tokens = if client.is_multiple_of(2) {
            let events = unit.stream("/generate", &body).await;
            serde_json::from_str::<Value>(&events[events.len() - 2]).unwrap()["output_ids"].clone()
        } else {
            unit.ok("/generate", &body).await["output_ids"].clone()
        };
        assert_eq!(tokens, prompt["greedy_16"], "client {client}");
        answered.fetch_add(1, Ordering::Relaxed);
        at += 1;
    }
}

async fn switches_under_load(attention: Attention, targets: &[(Value, &str)], rounds: usize) {
    let unit = Unit::start_with(4, |config| {
        config.attention = attention;
        config.expert_slots = Some(EXPERTS / 4 + 3);
    });
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let clients = join_all((0..24).map(|client| keep_asking(&unit, client, false, &stop, &answered)));
    let operator = async {
        let mut epoch = 0;
        for _ in 0..rounds {
            for (to, layout) in targets {
                let before = answered.load(Ordering::Relaxed);
                let status = unit.ok("/switch", &json!({"to": to, "if_epoch": epoch})).await;
                epoch += 1;
                assert_eq!((&status["state"], &status["epoch"]), (&json!("stable"), &json!(epoch)), "{status}");
                assert_eq!(status["layout"], *layout);
                // Requests continue in the new layout.
                while answered.load(Ordering::Relaxed) < before + 24 {
                    tokio::task::yield_now().await;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        epoch
    };
    let (_, epoch) = tokio::join!(clients, operator);
    let info = unit.get("/server_info").await;
    assert_eq!((&info["epoch"], &info["layout"]), (&json!(epoch), &json!(targets.last().unwrap().1)));
    let metrics = unit.metrics().await;
    assert_eq!(metrics.sum("semmoe_switch_total", &[("outcome", "committed")]), epoch);
    assert_eq!(metrics.sum("semmoe_layout_epoch", &[]), epoch);
    check_counts(&unit).await;
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_run_on_through_other_placements_and_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let path = |first, extra| json!({"tables": tables(folder.path(), 4, first, extra).0});
    let targets = [
        (path(0, 0), "ep"),
        (json!("dp-tp"), "dp-tp"),
        (json!("ep"), "ep"),
        (path(1, 2), "ep"),
        (json!("dp-tp"), "dp-tp"),
        (path(2, 3), "ep"),
        (path(3, 0), "ep"),
    ];
    switches_under_load(Attention::Dp, &targets, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_attention_tp_all_ranks_switch_between_the_same_two_steps() {
    let folder = tempfile::tempdir().unwrap();
    let path = |first, extra| json!({"tables": tables(folder.path(), 4, first, extra).0});
    let targets = [(path(0, 0), "tp-ep"), (json!("tp"), "tp"), (json!("tp-ep"), "tp-ep"), (path(1, 2), "tp-ep")];
    switches_under_load(Attention::Tp, &targets, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_switch_in_parts_waits_for_its_commit_and_can_be_aborted() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tables) = tables(folder.path(), 2, 1, 0);
    let unit = Unit::start(2);
    let contiguous = unit.get("/switch").await["placement_digest"].clone();
    let prepare = json!({"to": {"tables": path}, "if_epoch": 0, "action": "prepare"});
    let status = unit.ok("/switch", &prepare).await;
    assert_eq!((&status["state"], &status["epoch"], &status["to"]), (&json!("prepared"), &json!(0), &json!("ep")));
    // Requests continue; another switch is refused.
    let prompt = &golden()[0];
    assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
    let (code, _, answer) = unit.ask("/switch", &json!({"to": "dp-tp"})).await;
    assert!(code == 409 && answer["error"]["message"].as_str().unwrap().contains("prepared"), "{code} {answer}");
    let status = unit.ok("/switch", &json!({"action": "abort"})).await;
    assert_eq!((&status["state"], &status["epoch"]), (&json!("stable"), &json!(0)));
    let (code, _, answer) = unit.ask("/switch", &json!({"action": "commit"})).await;
    assert!(code == 409 && answer["error"]["message"].as_str().unwrap().contains("no switch is prepared"), "{answer}");
    assert_eq!(unit.get("/switch").await["placement_digest"], contiguous);

    unit.ok("/switch", &prepare).await;
    let status = unit.ok("/switch", &json!({"action": "commit", "if_epoch": 0})).await;
    assert_eq!((&status["epoch"], &status["placement_digest"]), (&json!(1), &json!(tables.placement_digest())));
    assert_eq!(unit.get("/server_info").await["placement_digest"], tables.placement_digest());
    assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
    // Already in place: nothing to do.
    let status = unit.ok("/switch", &json!({"to": {"tables": path}})).await;
    assert_eq!(status["epoch"], 1);
    let metrics = unit.metrics().await;
    for (outcome, count) in [("committed", 1), ("aborted", 1)] {
        assert_eq!(metrics.sum("semmoe_switch_total", &[("outcome", outcome)]), count, "{outcome}");
    }
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (four, _) = tables(folder.path(), 4, 0, 0);
    let (replicated, _) = tables(folder.path(), 2, 0, 2);
    let text = folder.path().join("text");
    // A container of another kind, whose content must not appear in an answer.
    let header = br#"{"__metadata__":{"format":"hunter2"}}"#;
    std::fs::write(&text, [&(header.len() as u64).to_le_bytes()[..], header].concat()).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(model_dir().join("config.json"), &link).unwrap();
    // The model is outside of it, wherever the repository is.
    let root = folder.path().to_owned();
    let unit = Unit::start_with(2, move |config| config.tables_root = Some(root.clone()));
    let before = unit.get("/switch").await;
    for (body, status, reason) in [
        (json!({"to": "dp-tp", "if_epoch": 7}), 409, "if_epoch is 7, but the unit is at epoch 0"),
        (json!({"to": "tp"}), 400, "cannot be switched to 'tp', only to one of ep, dp-tp"),
        (json!({"to": "sideways"}), 400, "'sideways'"),
        (json!({}), 400, "to is missing"),
        (json!({"to": "ep", "action": "commit"}), 400, "leave it out"),
        (json!({"to": "ep", "when": "now"}), 400, "unknown field `when`"),
        (json!({"action": "perhaps"}), 400, "perhaps"),
        (json!({"to": {"tables": four}}), 422, "4 groups, but the unit has 2"),
        (
            json!({"to": {"tables": replicated}}),
            422,
            "18 experts to a rank, but the ranks were started with 16 expert slots",
        ),
        (json!({"to": {"tables": text}}), 400, "has no usable tables"),
        (json!({"to": {"tables": "/dev/zero"}}), 400, "/dev/zero is not a file below"),
        (json!({"to": {"tables": model_dir().join("config.json")}}), 400, "is not a file below"),
        (json!({"to": {"tables": link}}), 400, "link is not a file below"),
        (json!({"to": {"tables": folder.path()}}), 400, "is not a file below"),
        (json!({"to": {"tables": folder.path().join("absent")}}), 400, "absent is not a file below"),
    ] {
        let (found, _, answer) = unit.ask("/switch", &body).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(found == status && message.contains(reason), "{body}: {found} {message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
    assert_eq!(unit.get("/switch").await, before);
    unit.stop(0);
}

/// A switch that is prepared and never committed expires.
#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_switch_does_not_wait_for_its_commit_for_ever() {
    let unit = Unit::start_with(2, |config| config.prepared_timeout = std::time::Duration::from_millis(200));
    let status = unit.ok("/switch", &json!({"to": "dp-tp", "action": "prepare"})).await;
    assert_eq!(status["state"], "prepared");
    while unit.get("/switch").await["state"] != "stable" {
        tokio::task::yield_now().await;
    }
    let (code, _, answer) = unit.ask("/switch", &json!({"action": "commit"})).await;
    assert!(code == 409 && answer["error"]["message"].as_str().unwrap().contains("no switch is prepared"), "{answer}");
    assert_eq!(unit.metrics().await.sum("semmoe_switch_total", &[("outcome", "aborted")]), 1);
    // The next one is not blocked.
    assert_eq!(unit.ok("/switch", &json!({"to": "dp-tp"})).await["epoch"], 1);
    unit.stop(0);
}

/// An abort while experts move rolls them back; a late one changes nothing. Either way requests continue.
#[tokio::test(flavor = "multi_thread")]
async fn an_abort_while_experts_move_takes_them_back() {
    let unit = Unit::start(2);
    let prompt = &golden()[0];
    let (mut epoch, mut rolled_back) = (0, 0);
    for attempt in 0.. {
        let other = unit.get("/switch").await["layout"] == "ep";
        let body = json!({"to": if other { "dp-tp" } else { "ep" }});
        let over = AtomicBool::new(false);
        let switch = async {
            let answer = unit.ask("/switch", &body).await;
            over.store(true, Ordering::Relaxed);
            answer
        };
        let abort = async {
            while !over.load(Ordering::Relaxed) {
                if unit.get("/switch").await["state"] == "moving" {
                    unit.ask("/switch", &json!({"action": "abort"})).await;
                    break;
                }
            }
        };
        let ((code, _, answer), ()) = tokio::join!(switch, abort);
        match code {
            200 => epoch += 1,
            422 => {
                let message = answer["error"]["message"].as_str().unwrap();
                assert!(message.contains("refused layer") && message.contains("a stop was requested"), "{message}");
                rolled_back += 1;
            }
            _ => panic!("attempt {attempt}: {code} {answer}"),
        }
        assert_eq!(unit.get("/switch").await["epoch"], epoch);
        assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
        if rolled_back == 3 {
            break;
        }
        assert!(attempt < 500, "no abort came while experts moved");
    }
    assert_eq!(unit.metrics().await.sum("semmoe_switch_total", &[("outcome", "rolled_back")]), rolled_back);
    unit.stop(0);
}
