//! Drained backends that leave and return, or change identity with their settings: they stay drained until an operator
//! says otherwise.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::discovery::{FOUND, Names, SOURCE, named, start, until};
use crate::support::files::{File, model, reload};
use crate::support::{Client, PATIENCE, canned, metric, settled, shown};

async fn absent(client: &Client) -> Vec<Value> {
    let shown = client.get("/admin/backends").await.json();
    shown["drained_absent"].as_array().unwrap().iter().map(|absent| absent["name"].clone()).collect()
}

/// Backends that eight requests went to.
async fn served(client: &Client) -> Vec<String> {
    let mut served = Vec::new();
    for _ in 0..8 {
        let answer = client.post("/v1/completions", r#"{"model":"tiny"}"#).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        served.push(answer.header("x-semmoe-backend").to_owned());
    }
    served.sort();
    served.dedup();
    served
}

#[tokio::test]
async fn a_drained_address_that_goes_and_returns_is_still_drained() {
    let (a, b) = (canned(1), canned(1));
    let names = Names::new(&[&a, &b]);
    let gateway = start(&File::new("", SOURCE), &names).await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    let [drained, other] = [&a, &b].map(|mock| named(&[mock])[0].clone());
    until(&gateway, FOUND, |found| found == 2.0).await;
    assert_eq!(admin.post(&format!("/admin/backends/{drained}/drain"), "").await.status, 200);
    assert!(absent(&admin).await.is_empty());
    names.set(&[&b]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    assert_eq!(absent(&admin).await, [json!(drained)]);
    let gauge = format!("semmoe_backend_draining{{backend=\"{drained}\"}}");
    names.set(&[&a, &b]);
    until(&gateway, FOUND, |found| found == 2.0).await;
    let seen = shown(&gateway, &drained).await;
    assert_eq!((&seen["draining"], &seen["healthy"]), (&json!(true), &json!(true)), "{seen}");
    assert_eq!(metric(&gateway, &gauge).await, 1.0);
    assert_eq!(served(&client).await, [other.as_str()]);
    assert!(absent(&admin).await.is_empty());
    assert_eq!(admin.post(&format!("/admin/backends/{drained}/undrain"), "").await.json()["draining"], false);
    assert_eq!(served(&client).await, named(&[&a, &b]));
    assert_eq!(metric(&gateway, &gauge).await, 0.0);
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn who_is_undrained_while_away_comes_back_for_requests() {
    let (a, b) = (canned(1), canned(1));
    let names = Names::new(&[&a, &b]);
    let gateway = start(&File::new("", SOURCE), &names).await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    let name = named(&[&a])[0].clone();
    until(&gateway, FOUND, |found| found == 2.0).await;
    admin.post(&format!("/admin/backends/{name}/drain"), "").await;
    names.set(&[&b]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    for (path, status) in [("drain", 200), ("undrain", 200), ("undrain", 404), ("drain", 404)] {
        let answer = admin.post(&format!("/admin/backends/{name}/{path}"), "").await;
        assert_eq!(answer.status, status, "{path}: {answer:?}");
    }
    assert!(absent(&admin).await.is_empty());
    names.set(&[&a, &b]);
    until(&gateway, FOUND, |found| found == 2.0).await;
    assert_eq!(served(&client).await, named(&[&a, &b]));
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

/// The engine is drained, started with another placement, and the configuration is changed to match.
#[tokio::test]
async fn a_drained_backend_with_other_settings_is_still_drained() {
    let (a, b) = (canned(1), canned(1));
    let backends = model("tiny", "", &[("pod-a", &a.url(), 1), ("pod-b", &b.url(), 1)]);
    let file = File::new("", &backends);
    let gateway = file.start().await;
    gateway.wait_ready().await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    admin.post("/admin/backends/pod-a/drain", "").await;
    let settings = "name = \"pod-a\"\nserved_name = \"tiny-2\"";
    file.write("", &backends.replace("name = \"pod-a\"", settings));
    let reported = reload(&gateway).await;
    assert_eq!(reported.json()["backends_added"], json!(["pod-a"]), "{reported:?}");
    assert_eq!(served(&client).await, ["pod-b"]);
    // Also one that the file omits for a while.
    file.write("", &model("tiny", "", &[("pod-b", &b.url(), 1)]));
    assert_eq!(reload(&gateway).await.status, 200);
    assert_eq!(absent(&admin).await, [json!("pod-a")]);
    file.write("", &backends);
    assert_eq!(reload(&gateway).await.status, 200);
    assert_eq!(served(&client).await, ["pod-b"]);
    admin.post("/admin/backends/pod-a/undrain", "").await;
    assert_eq!(served(&client).await, ["pod-a", "pod-b"]);
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

/// A backend that was never drained is not drained.
#[tokio::test]
async fn an_address_that_goes_and_returns_is_not_drained_for_that() {
    let (a, b) = (canned(1), canned(1));
    let names: Arc<Names> = Names::new(&[&a, &b]);
    let gateway = start(&File::new("", SOURCE), &names).await;
    until(&gateway, FOUND, |found| found == 2.0).await;
    names.set(&[&b]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    assert!(absent(&Client::admin(&gateway)).await.is_empty());
    names.set(&[&a, &b]);
    until(&gateway, FOUND, |found| found == 2.0).await;
    assert_eq!(served(&Client::data(&gateway)).await, named(&[&a, &b]));
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}
