//! `[switch]`: the policy drives workers, webhooks and pools, and no failure of a switch leaves a backend closed.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::StatusCode;
use semmoe_gateway::{Config, Running};
use serde_json::{Value, json};

use crate::support::{
    CURVES, Client, Fixture, Mock, PATIENCE, SwitchFault, TEXTS, Worker, canned, metric, metrics, shown, start,
    start_bare,
};

/// `[switch]` with short times.
fn rules(mode: &str, more: &str) -> String {
    format!(
        "[switch]\nmode = \"{mode}\"\ninterval_seconds = 0.01\ndwell_seconds = 0.01\nswitch_seconds = 0.01\n\
         prepare_seconds = 0.3\ncommit_seconds = 0.3\n{CURVES}{more}\n"
    )
}

fn workers(workers: &[&Worker]) -> String {
    let backend = |(name, worker): (char, &&Worker)| {
        format!("[[models.backends]]\nname = \"unit-{name}\"\nengine = \"semmoe\"\nurl = \"{}\"\n", worker.url())
    };
    let backends: String = ('a'..).zip(workers).map(backend).collect();
    format!("[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n{backends}")
}

/// Waits until the admin plane shows the wanted state of the unit, and returns it.
async fn until(gateway: &Running, unit: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let client = Client::admin(gateway);
    let last = Arc::new(Mutex::new(Value::Null));
    let wait = async {
        loop {
            let shown = client.get("/admin/switch").await.json();
            let found = shown["units"].as_array().unwrap().iter().find(|found| found["unit"] == unit).cloned();
            if let Some(found) = found.clone().filter(|found| wanted(found)) {
                return found;
            }
            *last.lock().unwrap() = shown;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, wait).await;
    found.unwrap_or_else(|_| panic!("{unit} was never as wanted: {}", last.lock().unwrap()))
}

fn ended(unit: &Value) -> bool {
    unit["decisions"].as_array().is_some_and(|all| !all.is_empty())
}

async fn complete(gateway: &Running) -> String {
    let answer = Client::data(gateway).post("/v1/completions", r#"{"model":"tiny","prompt":"x"}"#).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-semmoe-backend").to_owned()
}

#[tokio::test]
async fn a_worker_is_switched_both_ways_and_stays_in_service() {
    let worker = Worker::start("tp", 64);
    let gateway = start(&format!("{}{}", rules("drive", ""), workers(&[&worker]))).await;
    let unit = until(&gateway, "unit-a", |unit| unit["layout"] == "ep" && unit["switching_to"].is_null()).await;
    let decision = &unit["decisions"][0];
    assert_eq!((&decision["to"], &decision["outcome"]), (&json!("ep"), &json!("committed")), "{unit}");
    assert_eq!(decision["seconds"], 0.002, "as the worker measured it");
    assert!(decision["reason"].as_str().unwrap().contains("shorter there"), "{unit}");
    assert_eq!(
        worker.script().asked[..2],
        [json!({ "to": "ep", "if_epoch": 3, "action": "prepare" }), json!({ "if_epoch": 3, "action": "commit" }),]
    );
    // It has two ranks now, and was never closed for that.
    let backend =
        crate::support::until_shown(&gateway, "unit-a", |shown| shown["ranks"].as_array().unwrap().len() == 2).await;
    assert_eq!(backend["healthy"], true, "{backend}");
    complete(&gateway).await;

    worker.script().running = 1;
    let unit = until(&gateway, "unit-a", |unit| unit["layout"] == "tp" && unit["switching_to"].is_null()).await;
    assert_eq!(unit["decisions"][0]["to"], "tp", "{unit}");
    crate::support::until_shown(&gateway, "unit-a", |shown| shown["ranks"].as_array().unwrap().len() == 1).await;
    complete(&gateway).await;
    // The next poll of the worker shows it.
    let shown = async {
        while metric(&gateway, r#"semmoe_switch_layout{unit="unit-a"}"#).await != 0.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, shown).await.expect("the layout in the metrics");
    for to in ["tp", "ep"] {
        let line = format!(r#"semmoe_switch_decisions_total{{unit="unit-a",to="{to}",outcome="committed"}}"#);
        assert!(metric(&gateway, &line).await >= 1.0, "{}", metrics(&gateway).await);
    }
    assert!(metric(&gateway, r#"semmoe_switch_seconds_count{unit="unit-a"}"#).await >= 2.0);
}

async fn contradictions(gateway: &Running) -> f64 {
    metric(gateway, r#"semmoe_pin_ignored_total{backend="unit-a"}"#).await
}

#[tokio::test]
async fn after_an_operators_switch_requests_are_pinned_to_the_ranks_that_are_left() {
    let worker = Worker::start("ep", 0);
    let gateway = start(&workers(&[&worker])).await;
    let ranks = async || shown(&gateway, "unit-a").await["ranks"].as_array().unwrap().len();
    assert_eq!(ranks().await, 2);
    for (to, left) in [("tp", 1), ("ep", 2)] {
        let command = json!({ "backend": "unit-a", "to": to }).to_string();
        let switched = Client::admin(&gateway).post("/admin/switch", command).await;
        assert_eq!(switched.status, 200);
        assert_eq!(ranks().await, left, "{to}: known when the switch is answered");
        for _ in 0..32 {
            complete(&gateway).await;
        }
    }
    assert_eq!(contradictions(&gateway).await, 0.0);
}

/// The configuration declares the backend's placement, so tables for another one are refused before experts move.
#[tokio::test]
async fn no_expert_moves_for_tables_that_would_be_refused() {
    let (worker, fixture) = (Worker::start("ep", 0), Fixture::new(2));
    fixture.write("next", &TEXTS, 0);
    let toml = format!(
        "tables_root = \"{}\"\n{}placement_digest = \"{}\"\n",
        fixture.folder.path().display(),
        workers(&[&worker]),
        "0".repeat(64)
    );
    let gateway = start_bare(&toml).await;
    gateway.wait_ready().await;
    let command = json!({ "backend": "unit-a", "to": { "tables": "next" } }).to_string();
    let refused = Client::admin(&gateway).post("/admin/switch", command).await;
    assert_eq!(refused.status, 409, "{refused:?}");
    assert!(refused.message().contains("`placement_digest` says that the backend runs 0000"), "{refused:?}");
    let command = json!({ "backend": "unit-a", "to": { "experts": "tp" } }).to_string();
    let refused = Client::admin(&gateway).post("/admin/switch", command).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    let message = "`to` is neither a layout name nor {\"tables\": PATH}";
    assert!(refused.message().starts_with(message), "{refused:?}");
    assert_eq!(worker.actions(), Vec::<String>::new());
    complete(&gateway).await;
}

/// The gateway learns of the switch from answers of a rank other than the pinned one.
#[tokio::test]
async fn a_worker_that_was_switched_by_others_does_not_count_as_one_that_ignores_pins() {
    let worker = Worker::start("ep", 0);
    let config = format!("identity_seconds = 3600.0\n{}", workers(&[&worker]));
    let gateway = start(&config).await;
    worker.script().layout = "tp".to_owned();
    for _ in 0..64 {
        complete(&gateway).await;
    }
    crate::support::until_shown(&gateway, "unit-a", |shown| shown["ranks"].as_array().unwrap().len() == 1).await;
    assert_eq!(contradictions(&gateway).await, 0.0);
    assert_ne!(shown(&gateway, "unit-a").await["pins"]["state"], "pin ignored");
}

#[tokio::test]
async fn a_worker_that_could_switch_and_did_not_is_found_out_if_it_ignores_pins() {
    let worker = Worker::start("ep", 0);
    let gateway = start(&workers(&[&worker])).await;
    worker.script().ignores_pins = true;
    let wait = async {
        while shown(&gateway, "unit-a").await["pins"]["state"] != "pin ignored" {
            complete(&gateway).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("a verdict");
    assert!(contradictions(&gateway).await >= 2.0);
}

#[tokio::test]
async fn advice_is_shown_and_nothing_is_done() {
    let worker = Worker::start("tp", 64);
    let gateway = start(&format!("{}{}", rules("advise", ""), workers(&[&worker]))).await;
    let unit = until(&gateway, "unit-a", ended).await;
    assert_eq!((&unit["decisions"][0]["outcome"], &unit["layout"]), (&json!("advised"), &json!("tp")), "{unit}");
    assert!(worker.actions().is_empty());
}

#[tokio::test]
async fn where_it_does_not_pay_nothing_is_switched() {
    let worker = Worker::start("tp", 2);
    let gateway = start(&format!("{}{}", rules("drive", ""), workers(&[&worker]))).await;
    let unit = until(&gateway, "unit-a", |unit| !unit["gain"].is_null()).await;
    assert!(unit["gain"].as_f64().unwrap() < 0.0 && !ended(&unit), "{unit}");
    assert!(worker.actions().is_empty());
}

/// A fault, the outcome of the switch, what the cause says, and what the worker was asked.
struct Case {
    fault: SwitchFault,
    outcome: &'static str,
    says: &'static str,
    asked: &'static [&'static str],
}

#[tokio::test]
async fn whatever_goes_wrong_the_old_layout_or_the_new_one_serves() {
    let case = |fault, outcome, says, asked| Case { fault, outcome, says, asked };
    for Case { fault, outcome, says, asked } in [
        case(SwitchFault::RefusePrepare, "refused", "no room", &["prepare"]),
        case(SwitchFault::HangPrepare, "lost", "no response to the prepare", &["prepare", "abort"]),
        case(SwitchFault::WrongEpoch, "refused", "at epoch 10, expected 3", &["prepare", "abort"]),
        case(SwitchFault::RefuseCommit, "rolled_back", "a checksum differs", &["prepare", "commit"]),
        case(
            SwitchFault::LoseCommitBefore,
            "rolled_back",
            "the commit was not delivered",
            &["prepare", "commit", "abort"],
        ),
        case(SwitchFault::LoseCommitAfter, "committed", "", &["prepare", "commit"]),
        case(SwitchFault::HangCommit, "lost", "not finished within 0.3 s", &["prepare", "commit", "abort"]),
    ] {
        let worker = Worker::start("tp", 64);
        worker.script().fault = fault;
        let gateway = start(&format!("{}{}", rules("drive", ""), workers(&[&worker]))).await;
        let unit = until(&gateway, "unit-a", ended).await;
        let decision = &unit["decisions"][0];
        assert_eq!(decision["outcome"], outcome, "{fault:?}: {unit}");
        assert!(decision["cause"].as_str().unwrap_or("").contains(says), "{fault:?}: {unit}");
        assert_eq!(worker.actions(), asked, "{fault:?}");
        assert_eq!(shown(&gateway, "unit-a").await["healthy"], true, "{fault:?}");
        complete(&gateway).await;
        // After a failure the policy waits.
        let later = until(&gateway, "unit-a", |unit| !unit["reason"].is_null()).await;
        assert_eq!(later["decisions"].as_array().unwrap().len(), 1, "{fault:?}: {later}");
    }
}

#[tokio::test]
async fn a_worker_that_dies_in_mid_switch_is_named_and_its_like_serves() {
    let (mut worker, other) = (Worker::start("tp", 64), Worker::start("tp", 1));
    worker.script().fault = SwitchFault::HangCommit;
    let gateway = start(&format!(
        "{}{}",
        rules("drive", "commit_seconds = 30.0").replace("commit_seconds = 0.3\n", ""),
        workers(&[&worker, &other])
    ))
    .await;
    until(&gateway, "unit-a", |unit| unit["switching_to"] == "ep").await;
    while worker.actions().len() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    worker.kill();
    let unit = until(&gateway, "unit-a", ended).await;
    assert_eq!(unit["decisions"][0]["outcome"], "lost", "{unit}");
    gateway.wait_health("unit-a", |health| !health.is_healthy()).await.unwrap();
    assert_eq!(complete(&gateway).await, "unit-b");
}

#[tokio::test]
async fn requests_go_elsewhere_while_a_worker_switches_and_come_back() {
    let (worker, other) = (Worker::start("tp", 64), Worker::start("tp", 1));
    worker.script().fault = SwitchFault::HangCommit;
    let gateway =
        start(&format!("{}{}", rules("drive", "meanwhile = \"redirect\"\n"), workers(&[&worker, &other]))).await;
    while worker.actions().len() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for _ in 0..4 {
        assert_eq!(complete(&gateway).await, "unit-b");
    }
    until(&gateway, "unit-a", ended).await;
    let used = [complete(&gateway).await, complete(&gateway).await];
    assert!(used.contains(&"unit-a".to_owned()), "{used:?}");
}

#[tokio::test]
async fn the_gateway_ends_while_a_switch_is_under_way() {
    for (fault, asked) in
        [(SwitchFault::HangPrepare, ["prepare", "abort"]), (SwitchFault::HangCommit, ["prepare", "commit"])]
    {
        let worker = Worker::start("tp", 64);
        worker.script().fault = fault;
        let text = rules("drive", "")
            .replace("prepare_seconds = 0.3\ncommit_seconds = 0.3", "prepare_seconds = 30.0\ncommit_seconds = 30.0");
        let gateway = start(&format!("{text}{}", workers(&[&worker]))).await;
        let begun = if fault == SwitchFault::HangPrepare { 1 } else { 2 };
        while worker.actions().len() < begun {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::timeout(Duration::from_secs(20), gateway.shutdown(Duration::ZERO)).await.expect("it ends at once");
        assert_eq!(worker.actions(), asked, "{fault:?}: a switch that has begun to move is the worker's to end");
    }
}

/// An operator's service that gives these answers in turn, repeating the last one.
struct Service {
    url: String,
    asked: Arc<Mutex<Vec<Value>>>,
}

#[derive(Clone)]
struct Answers {
    answers: Arc<Vec<(StatusCode, Value)>>,
    turn: Arc<AtomicUsize>,
    asked: Arc<Mutex<Vec<Value>>>,
}

async fn serve_hook(State(state): State<Answers>, Json(body): Json<Value>) -> Response {
    state.asked.lock().unwrap().push(body);
    let turn = state.turn.fetch_add(1, Ordering::SeqCst).min(state.answers.len() - 1);
    let (status, answer) = state.answers[turn].clone();
    (status, Json(answer)).into_response()
}

async fn service(answers: Vec<(StatusCode, Value)>) -> Service {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let state = Answers { answers: Arc::new(answers), turn: Arc::default(), asked: Arc::clone(&asked) };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/ops/switch", listener.local_addr().unwrap());
    let router = Router::new().route("/ops/switch", axum::routing::post(serve_hook)).with_state(state);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Service { url, asked }
}

fn labelled(backends: &[(&Mock, &str)]) -> String {
    let backend = |(name, (mock, layout)): (char, &(&Mock, &str))| {
        format!(
            "[[models.backends]]\nname = \"pod-{name}\"\nengine = \"sglang\"\nurl = \"{}\"\nranks = 2\nlayout = \"{layout}\"\n",
            mock.url()
        )
    };
    let backends: String = ('a'..).zip(backends).map(backend).collect();
    format!("[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n{backends}")
}

/// This many requests that do not end.
fn load(gateway: &Running, requests: usize) -> Vec<tokio::task::JoinHandle<()>> {
    let one = |_| {
        let client = Client::data(gateway);
        tokio::spawn(async move {
            client.mock("/v1/completions", "hang", r#"{"model":"tiny","prompt":"x"}"#).await;
        })
    };
    (0..requests).map(one).collect()
}

/// TP up to two requests, EP above.
fn small(mode: &str, more: &str) -> String {
    let text = rules(mode, &format!("max_sequences = 64\n{more}"));
    text.replace(
        CURVES,
        "tp_step_ms = [[2, 1.0], [3, 50.0], [64, 80.0]]\nep_step_ms = [[2, 5.0], [3, 6.0], [64, 9.0]]\n\
         tp_prefill_rate = 10000.0\nep_prefill_rate = 10000.0\n",
    )
}

#[tokio::test]
async fn a_webhook_is_asked_again_after_a_failure_and_believed_only_by_its_answer() {
    let mock = canned(2);
    let hook = service(vec![
        (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": "not now" })),
        (StatusCode::OK, json!({ "layout": "tp" })),
        (StatusCode::OK, json!({ "layout": "ep" })),
    ])
    .await;
    let webhook = format!("webhook = \"{}\"", hook.url);
    let gateway = start(&format!("{}{}", small("drive", &webhook), labelled(&[(&mock, "tp")]))).await;
    let running = load(&gateway, 8);
    let unit = until(&gateway, "pod-a", |unit| unit["layout"] == "ep" && ended(unit)).await;
    let outcomes: Vec<&Value> = unit["decisions"].as_array().unwrap().iter().map(|past| &past["outcome"]).collect();
    assert_eq!(outcomes, ["committed", "refused", "refused"], "{unit}");
    assert!(unit["decisions"][1]["cause"].as_str().unwrap().contains("reports that tp is running"), "{unit}");
    let asked = json!({ "backend": "pod-a", "from": "tp", "to": "ep" });
    assert_eq!(*hook.asked.lock().unwrap(), [asked.clone(), asked.clone(), asked]);
    running.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_stream_that_would_miss_its_target_switches_a_backend_that_would_stay_otherwise() {
    let mock = canned(2);
    let hook = service(vec![(StatusCode::OK, json!({ "layout": "ep" }))]).await;
    // One request decodes faster with TP, but its prompt takes a second for ten tokens there.
    let rules = small("drive", &format!("webhook = \"{}\"\nttft_ms = [[7, 1.0]]", hook.url));
    let rules = rules.replace("tp_prefill_rate = 10000.0", "tp_prefill_rate = 10.0");
    let gateway = start(&format!("{rules}{}", labelled(&[(&mock, "tp")]))).await;
    until(&gateway, "pod-a", |unit| unit["layout"] == "tp").await;
    let client = Client::data(&gateway);
    let body = r#"{"model":"tiny","prompt":"a prompt of some tokens","stream":true,"priority":7}"#;
    let waiting = client.begin_with("/v1/completions", "hang", body);
    let unit = until(&gateway, "pod-a", |unit| unit["layout"] == "ep" && ended(unit)).await;
    let reason = unit["decisions"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("a request of priority 7 gets its first token after "), "{unit}");
    waiting.abort();
}

#[tokio::test]
async fn new_traffic_moves_between_pools_and_back_to_one_that_serves() {
    let (mut tp, ep) = (canned(2), canned(2));
    let gateway = start(&format!("{}{}", small("drive", ""), labelled(&[(&tp, "tp"), (&ep, "ep")]))).await;
    until(&gateway, "pools of tiny", |unit| unit["layout"] == "tp").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    for _ in 0..4 {
        assert_eq!(complete(&gateway).await, "pod-a");
        tp.next().await;
    }
    let running = load(&gateway, 8);
    until(&gateway, "pools of tiny", |unit| unit["layout"] == "ep" && ended(unit)).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    for _ in 0..4 {
        assert_eq!(complete(&gateway).await, "pod-b");
    }
    // The pool in use is gone: the other one is better than none.
    ep.settings().health = 500;
    gateway.wait_health("pod-b", |health| !health.is_healthy()).await.unwrap();
    assert_eq!(complete(&gateway).await, "pod-a");
    running.iter().for_each(tokio::task::JoinHandle::abort);
}

#[test]
fn what_cannot_be_driven_is_a_configuration_error() {
    let config = |switch: &str, backends: &str| {
        let text = format!("[switch]\n{switch}\n[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n{backends}");
        Config::from_toml(&text, Path::new("")).map(|_| ()).map_err(|error| error.to_string())
    };
    let backend = |name: &str, engine: &str, more: &str| {
        format!("[[models.backends]]\nname = \"{name}\"\nengine = \"{engine}\"\nurl = \"http://127.0.0.1:1\"\n{more}\n")
    };
    let worker = backend("a", "semmoe", "");
    let drive = format!("mode = \"drive\"\n{CURVES}");
    let pool = |layout: &str| backend(layout, "sglang", &format!("layout = \"{layout}\""));
    for (switch, backends) in [
        (drive.clone(), &worker),
        (format!("{drive}ttft_ms = [[0, 500.0], [1, 200.0]]"), &worker),
        (drive.clone(), &format!("{}{}", pool("tp"), pool("ep"))),
        (format!("{drive}webhook = \"http://ops:9000/x\""), &pool("tp")),
        (String::new(), &backend("a", "vllm", "")),
        ("mode = \"off\"".to_owned(), &pool("tp")),
    ] {
        assert_eq!(config(&switch, backends), Ok(()), "{switch}\n{backends}");
    }
    for (switch, backends, says) in [
        (drive.clone(), &backend("a", "sglang", ""), "models[0].backends[0].layout: must be set"),
        (drive.clone(), &format!("{worker}{}", backend("b", "vllm", "")), "models[0].backends[1].layout: must be set"),
        (drive.clone(), &pool("tp"), "no backend of model 'm' has 'ep' and there is no switch.webhook"),
        (drive.clone(), &backend("a", "semmoe", "layout = \"tp\""), "reports its layout itself"),
        ("mode = \"drive\"".to_owned(), &worker, "switch.tp_step_ms: must be set"),
        ("mode = \"auto\"".to_owned(), &worker, "unknown variant `auto`"),
        (drive.replace("tp_prefill_rate = 10000.0", ""), &worker, "switch.tp_prefill_rate: must be set"),
        (drive.replace("ep_prefill_rate = 10000.0", "ep_prefill_rate = nan"), &worker, "switch.ep_prefill_rate: NaN"),
        (format!("{drive}max_sequences = 4096"), &worker, "ends at a batch of 2048, but switch.max_sequences is 4096"),
        (
            drive.replace("[16, 10.0], [2048, 100.0]", "[2, 1.0], [1, 100.0]"),
            &worker,
            "switch.ep_step_ms: a batch of 1 follows",
        ),
        (format!("{drive}margin = -1.0"), &worker, "switch: margin is -1"),
        (format!("{drive}ttft_ms = [[1, 0.0]]"), &worker, "switch.ttft_ms: 0 for priority 1, expected more than 0"),
        (format!("{drive}ttft_ms = [[1, 5.0], [1, 6.0]]"), &worker, "priority 1"),
        (format!("{drive}ttft_ms = [[256, 5.0]]"), &worker, "256"),
        (format!("{drive}switch_seconds = 0.0"), &worker, "switch.switch_seconds: 0"),
        (format!("{drive}interval_seconds = 0.0"), &worker, "switch.interval_seconds: 0"),
        (format!("{drive}tp_layout = \"ep\""), &worker, "'ep', expected a layout other than ep_layout"),
        (format!("{drive}webhook = \"ops\""), &worker, "switch.webhook: "),
        (format!("{drive}hook = \"ops\""), &worker, "unknown field `hook`"),
    ] {
        let error = config(&switch, backends).unwrap_err();
        assert!(error.contains(says), "{says}: {error}");
    }
}
