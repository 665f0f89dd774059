//! Backends that die, return, misreport themselves, or are several.

use serde_json::json;

use crate::support::{Client, Fleet, alone, canned, metric, plain_model, settled, several, start, start_bare};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_dead_backend_is_reported_with_its_cause_and_comes_back() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "").await;
    let admin = Client::admin(&gateway);
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
    assert_eq!((admin.get("/readyz").await.status, admin.get("/healthz").await.status), (200, 200));

    mock.kill();
    let answer = client.post(CHAT, "{}").await;
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.message().contains("pod-a"), "{}", answer.message());
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    let answer = client.post(CHAT, "{}").await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, "1"));
    let message = answer.message();
    assert!(message.starts_with("no backend of model 'tiny' can serve: backend 'pod-a': cannot connect"), "{message}");
    let ready = admin.get("/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(String::from_utf8_lossy(&ready.body).contains("backend 'pod-a': cannot connect"));
    assert_eq!(client.get("/v1/models").await.json()["data"], json!([]));
    assert_eq!(client.get("/v1/models/tiny").await.status, 404, "as it is not in the list");

    mock.listen();
    gateway.wait_ready().await;
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
    assert_eq!(client.get("/v1/models").await.json()["data"][1]["id"], "small");
    assert_eq!(client.get("/v1/models/tiny").await.status, 200);
    settled(&gateway).await;
}

#[tokio::test]
async fn an_unhealthy_answer_evicts_and_a_healthy_one_readmits() {
    let Fleet { mocks: [mock], gateway, client } = alone(2, "").await;
    mock.settings().health = 503;
    let health = gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    assert!(format!("{health:?}").contains("answered 503"), "{health:?}");
    assert_eq!(client.post(CHAT, "{}").await.status, 503);
    assert_eq!(metric(&gateway, "semmoe_backend_healthy{backend=\"pod-a\"}").await, 0.0);
    mock.settings().health = 200;
    gateway.wait_ready().await;
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
}

/// A request that could not connect goes to another backend, once, and the counters are right.
#[tokio::test]
async fn a_refused_connection_is_retried_elsewhere() {
    let (mut a, mut b) = (canned(2), canned(2));
    // The prober must not be faster than the requests.
    let toml = several(&[&a, &b]);
    let gateway = start_bare(&format!("[health]\ninterval_seconds = 3600\n{toml}")).await;
    let client = Client::data(&gateway);
    a.kill();
    for _ in 0..8 {
        let answer = client.post(CHAT, "{}").await;
        assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-b"));
        b.next().await;
    }
    assert!(metric(&gateway, r#"semmoe_retries_total{cause="connect",outcome="answered"}"#).await >= 1.0);
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    b.kill();
    let answer = client.post(CHAT, "{}").await;
    assert_eq!(answer.status, 503);
    assert!(answer.message().contains("'pod-b' could not be reached"), "{}", answer.message());
    settled(&gateway).await;
    assert!(a.seen.try_recv().is_err());
}

#[tokio::test]
async fn ranks_are_probed_when_absent_also_later() {
    let mut mock = canned(3);
    mock.kill();
    let toml = plain_model(&mock, 1).replace("ranks = 1\n", "");
    let gateway = start(&toml).await;
    let client = Client::data(&gateway);
    assert_eq!(client.post(CHAT, "{}").await.status, 503);
    mock.listen();
    gateway.wait_ready().await;
    let mut seen = Vec::new();
    for _ in 0..6 {
        client.post(CHAT, "{}").await;
        seen.push(mock.next().await.header_pin().unwrap());
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 0, 1, 1, 2, 2]);
    settled(&gateway).await;
}

/// With one rank there is nothing to pin, and plain OpenAI servers receive what the client sent.
#[tokio::test]
async fn a_plain_openai_server_is_one_rank_without_pins() {
    let mut mock = canned(1);
    let toml = plain_model(&mock, 1).replace("sglang", "openai");
    let gateway = start(&toml).await;
    let answer = Client::data(&gateway).post(CHAT, r#"{"model":"small"}"#).await;
    assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, "0"));
    let seen = mock.next().await;
    assert_eq!((seen.header_pin(), &seen.body[..]), (None, &br#"{"model":"small"}"#[..]));
}

#[tokio::test]
async fn the_admin_plane_shows_backends_and_refuses_foreign_hosts() {
    let Fleet { mocks: [_mock], gateway, client } = alone(2, "").await;
    let admin = Client::admin(&gateway);
    let shown = admin.get("/admin/backends").await.json();
    assert_eq!(shown["backends"][0]["name"], "pod-a");
    assert_eq!(shown["backends"][0]["healthy"], true);
    assert_eq!(shown["backends"][0]["ranks"].as_array().unwrap().len(), 2);
    assert!(admin.get("/").await.json()["routes"].is_object());
    let answer = admin.call(http::Method::GET, "/admin/backends", &[("host", "evil.example")], "").await;
    assert_eq!(answer.status, 403);
    assert_eq!(client.get("/admin/backends").await.status, 404);
    assert_eq!(admin.get("/nothing").await.status, 404);
}

#[tokio::test]
async fn the_metrics_listener_has_status_only() {
    let mock = canned(1);
    let gateway = start_bare(&format!("metrics = \"127.0.0.1:0\"\n{}", plain_model(&mock, 1))).await;
    let metrics = Client::at(gateway.metrics_addr().unwrap());
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/admin/tables", 404), ("/", 404)] {
        assert_eq!(metrics.get(path).await.status, status, "{path}");
    }
}

/// With the default interval of 5 s between probes, an engine that returns is found at once.
#[tokio::test]
async fn a_quick_restart_of_the_only_backend_costs_no_interval() {
    let mut mock = canned(1);
    let gateway = start_bare(&plain_model(&mock, 1)).await;
    let client = Client::data(&gateway);
    assert_eq!(client.post("/v1/completions", "{}").await.status, 200);
    mock.kill();
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    // Longer than requests wait for a backend.
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    mock.listen();
    let back = std::time::Instant::now();
    assert_eq!(client.post("/v1/completions", "{}").await.status, 200, "it waits for the next look");
    assert!(back.elapsed() < std::time::Duration::from_secs(2), "{:?}", back.elapsed());
}
