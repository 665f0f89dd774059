//! Priorities: waiting requests run in order of due times in every layout, also after a switch, and a priority that
//! would have no effect is refused.

use crate::support::{Unit, greedy};
use semmoe_engines::http::HttpClient;
use serde_json::{Value, json};
use tokio::task::JoinSet;

const WORLD: u16 = 4;
/// No two requests arrive that far apart.
const LONG_SECONDS: f64 = 3600.0;

/// A unit that runs one request at a time on a rank, or a group.
fn start(priority_seconds: f64) -> Unit {
    Unit::start_with(WORLD, |config| {
        (config.both_attentions, config.switch_groups) = (true, vec![2]);
        (config.limits.running, config.limits.priority_seconds) = (1, priority_seconds);
    })
}

/// A request of these for rank 0 that runs until its client leaves.
fn endless(priority: i64) -> Value {
    let mut body = greedy(&json!([557, 1712, 298]), 2000);
    (body["stream"], body["routed_dp_rank"], body["priority"]) = (json!(true), json!(0), json!(priority));
    body
}

/// The order in which requests of these priorities run. One runs already when the others arrive, in this order; they
/// wait while the unit switches to `layout`.
async fn order(unit: &Unit, layout: Option<&str>, priorities: &[i64]) -> Vec<usize> {
    let client: &HttpClient = &unit.client;
    let send = |priority| client.send(unit.post("/generate", endless(priority).to_string().as_bytes()));
    let mut running = send(0).await.unwrap();
    let mut tasks = JoinSet::new();
    for (number, &priority) in priorities.iter().enumerate() {
        let (client, request) = (client.clone(), unit.post("/generate", endless(priority).to_string().as_bytes()));
        tasks.spawn(async move { (number, client.send(request).await.unwrap()) });
        while unit.metrics().await.sum("semmoe_requests_in_flight", &[]) < number as u64 + 2 {
            tokio::task::yield_now().await;
        }
    }
    if let Some(layout) = layout {
        unit.ok("/switch", &json!({"to": layout})).await;
    }
    let mut order = Vec::new();
    while !tasks.is_empty() {
        // The head of the next answer arrives once the one before it has left.
        drop(running);
        let (number, answer) = tasks.join_next().await.unwrap().unwrap();
        (running, _) = (answer, order.push(number));
    }
    drop(running);
    unit.quiet().await;
    order
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_run_by_due_time_in_every_layout_and_through_switches() {
    let unit = start(LONG_SECONDS);
    assert_eq!(unit.get("/server_info").await["priority_seconds"], json!(LONG_SECONDS));
    // Switches that leave all requests together.
    let groups = "tp:2x2";
    for (from, to) in [("ep", "tp"), ("ep", groups), (groups, "tp"), ("ep", "dp-tp")] {
        for layout in [None, Some(to)] {
            unit.ok("/switch", &json!({"to": from})).await;
            let found = order(&unit, layout, &[0, 2, 1, 2, -1, 0]).await;
            assert_eq!(found, [1, 3, 2, 0, 5, 4], "{from}, then {layout:?}");
        }
    }
    unit.ok("/switch", &json!({"to": "tp"})).await;
    assert_eq!(order(&unit, None, &[0, 2, 1, 2, -1, 0]).await, [1, 3, 2, 0, 5, 4]);
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn negative_seconds_put_lower_numbers_first() {
    let unit = start(-LONG_SECONDS);
    assert_eq!(order(&unit, None, &[0, 2, 1, -3, 0]).await, [3, 0, 4, 2, 1]);
    unit.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_without_effect_or_bound_are_refused() {
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    let routes = [
        ("/generate", json!({"text": "a", "sampling_params": {"max_new_tokens": 1}})),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 1})),
        ("/v1/chat/completions", chat),
    ];
    let without = "has no effect without --priority-seconds, expected 0";
    let cases = [
        (0.0, json!(0), None),
        (0.0, json!(1), Some(without)),
        (0.0, json!(-256), Some(without)),
        (5.0, json!(255), None),
        (5.0, json!(-255), None),
        (5.0, json!(256), Some("priority must be from -255 to 255, found 256")),
        (5.0, json!(i64::MIN), Some("priority must be from -255 to 255")),
        (5.0, json!("1"), Some("a field has the wrong type")),
        (5.0, json!(1.5), Some("a field has the wrong type")),
    ];
    for seconds in [0.0, 5.0] {
        let unit = Unit::start_with(1, |config| config.limits.priority_seconds = seconds);
        for (_, priority, refused) in cases.iter().filter(|case| case.0 == seconds) {
            for (path, body) in &routes {
                let mut body = body.clone();
                body["priority"] = priority.clone();
                let (status, _, answer) = unit.ask(path, &body).await;
                assert_eq!(status, if refused.is_some() { 400 } else { 200 }, "{path} {priority}: {answer}");
                let message = answer["error"]["message"].as_str().unwrap_or_default();
                assert!(message.contains(refused.unwrap_or_default()), "{path} {priority}: {message}");
            }
        }
        unit.stop(0);
    }
}
