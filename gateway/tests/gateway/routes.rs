//! Routes: the gateway's own, those added by the configuration, and no others.

use bytes::Bytes;
use http::Method;
use semmoe_gateway::Config;
use serde_json::json;

use crate::support::{Client, Fleet, Mock, alone, canned, metric, plain_model, settled, several, start, start_bare};

/// Routes of engines that clients must not reach.
const DANGEROUS: [&str; 7] = [
    "/flush_cache",
    "/update_weights_from_disk",
    "/v1/load_lora_adapter",
    "/start_profile",
    "/server_info",
    "/metrics",
    "/sleep",
];

fn extra(routes: &str, mock: &Mock) -> String {
    format!("extra_routes = [{routes}]\n{}", plain_model(mock, 2))
}

#[tokio::test]
async fn other_routes_of_engines_are_not_there() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(2, "").await;
    for path in DANGEROUS {
        for method in [Method::GET, Method::POST] {
            let answer = client.call(method, path, &[], "{}").await;
            assert_eq!(
                (answer.status, answer.json()["error"]["code"].as_str()),
                (404, Some("route_not_found")),
                "{path}"
            );
        }
    }
    assert!(mock.seen.try_recv().is_err());
}

#[tokio::test]
async fn listed_routes_pass_and_only_they() {
    let mut mock = canned(2);
    let gateway = start_bare(&extra("\"/v1/score\", \"/flush_cache\"", &mock)).await;
    gateway.wait_ready().await;
    let client = Client::data(&gateway);
    let gzip = Bytes::from_static(b"\x1f\x8b\x00 no JSON at all");
    for (method, path, body) in [
        (Method::POST, "/v1/score?x=1", Bytes::from_static(b"{\"model\":\"small\",\"q\":1}")),
        (Method::POST, "/v1/score", gzip),
        (Method::POST, "/v1/score", Bytes::from_static(b"[1,2]")),
        (Method::GET, "/flush_cache", Bytes::new()),
    ] {
        let answer = client.call(method, path, &[], body.clone()).await;
        assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-a"), "{path}");
        let seen = mock.next().await;
        assert_eq!((seen.path.as_str(), &seen.body), (path, &body));
        assert_eq!(seen.header_pin(), None, "the engine chooses the rank");
    }
    // A client's pin is removed here, too.
    client.post("/v1/score", "{\"routed_dp_rank\":1,\"q\":1}").await;
    assert_eq!(mock.next().await.body, "{\"q\":1}");
    for (path, body) in
        [("/v1/score", "{\"model\":\"none\"}"), ("/v1/scores", "{}"), ("/v1/score/", "{}"), ("/v1//score", "{}")]
    {
        assert_eq!(client.post(path, body).await.status, 404, "{path}");
    }
    for path in &DANGEROUS[1..] {
        assert_eq!(client.post(path, "{}").await.status, 404, "{path}");
    }
    settled(&gateway).await;
    let line =
        "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"any\",policy=\"round_robin\",code=\"200\"}";
    assert_eq!(metric(&gateway, line).await, 5.0);
}

/// Unknown paths share one label, however many there are.
#[tokio::test]
async fn requests_for_other_paths_are_counted() {
    let Fleet { mocks: [_mock], gateway, client } = alone(2, "").await;
    for number in 0..20 {
        assert_eq!(client.get(&format!("/secret/{number}")).await.status, 404);
        assert_eq!(client.get("/v1/chat/completions").await.status, 405);
    }
    client.get("/health").await;
    let text = crate::support::metrics(&gateway).await;
    for line in [
        "semmoe_requests_total{backend=\"none\",model=\"none\",rank=\"none\",policy=\"none\",code=\"404\"} 20",
        "semmoe_requests_total{backend=\"none\",model=\"none\",rank=\"none\",policy=\"none\",code=\"405\"} 20",
        "semmoe_request_seconds_count{backend=\"none\",model=\"none\",route=\"other\"} 40",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn routes_that_are_no_paths_are_refused() {
    for path in
        ["v1/score", "/", "/a/", "/a//b", "/a/../b", "/a?b", "/a b", "/{a}", "/a%2fb", "/v1/models", "/generate"]
    {
        let text = format!("[server]\nextra_routes = [\"{path}\"]\n[[models]]\nname = \"m\"\n");
        let text = format!(
            "{text}policy = \"round_robin\"\n[[models.backends]]\nname = \"a\"\nengine = \"sglang\"\nurl = \"http://a\"\n"
        );
        let error = Config::from_toml(&text, std::path::Path::new("")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("server.extra_routes[0]: '{path}' is ")), "{error}");
    }
}

/// Anthropic's form of a chat goes to a rank by load, and texts of ids to any.
#[tokio::test]
async fn messages_and_detokenize_are_relayed() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "").await;
    let answer = client.post("/v1/messages", r#"{"model":"tiny","messages":[],"max_tokens":1}"#).await;
    assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, "0"), "{answer:?}");
    let seen = mock.next().await;
    assert_eq!((seen.path.as_str(), seen.header_pin()), ("/v1/messages", Some(0)));
    assert_eq!(client.post("/detokenize", r#"{"tokens":[1]}"#).await.status, 200);
    let seen = mock.next().await;
    assert_eq!((seen.path.as_str(), seen.header_pin()), ("/detokenize", None));
    settled(&gateway).await;
}

/// A request that fits the smallest context length can go to any engine.
#[tokio::test]
async fn the_list_of_models_has_the_smallest_context() {
    let (a, b) = (canned(2), canned(2));
    a.settings().context = 4096;
    b.settings().context = 2048;
    let gateway = start(&several(&[&a, &b])).await;
    let list = Client::data(&gateway).get("/v1/models").await.json();
    assert_eq!(list["data"][0]["max_model_len"], 2048, "{list}");
}

/// Load balancers, probes and engine clients ask without a key, and are not told why.
#[tokio::test]
async fn health_says_whether_anything_can_be_served() {
    let mut mock = canned(1);
    let keys = format!("[auth]\nkeys = [{{ name = \"a\", sha256 = \"{}\" }}]\n", "0".repeat(64));
    let gateway = start(&format!("{keys}{}", plain_model(&mock, 1))).await;
    let client = Client::data(&gateway);
    for method in [Method::GET, Method::HEAD] {
        let answer = client.call(method, "/health", &[], "").await;
        assert_eq!((answer.status, answer.body.len()), (200, 0), "{answer:?}");
    }
    let answer = client.post("/health", "").await;
    assert_eq!((answer.status, answer.header("allow")), (405, "GET,HEAD"));
    mock.kill();
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    let answer = client.get("/health").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("not_ready")));
    assert_eq!(answer.message(), "no model has a backend that can serve");
}

/// The gateway does not read the model name in a form, so a restricted key cannot send one.
#[tokio::test]
async fn forms_need_a_key_for_all_models() {
    let mock = canned(1);
    // Of "MARKER-key-of-a-client".
    let digest = "90c98f2543b113736daa1cf937bc4b4cbf2bcdf06d812b8d29c33a53068b1194";
    for (models, form_status) in [("", 200), (", models = [\"tiny\"]", 400)] {
        let keys = format!("[auth]\nkeys = [{{ name = \"a\", sha256 = \"{digest}\"{models} }}]\n");
        let gateway = start_bare(&format!("{}{keys}", extra("\"/v1/audio/transcriptions\"", &mock))).await;
        let client = Client::data(&gateway);
        let key = ("authorization", "Bearer MARKER-key-of-a-client");
        for (kind, status) in [
            ("multipart/form-data; boundary=x", form_status),
            ("application/x-www-form-urlencoded", form_status),
            ("application/json", 200),
        ] {
            let headers = [key, ("content-type", kind)];
            let body = if kind == "application/json" { r#"{"model":"tiny"}"# } else { "model=other" };
            let answer = client.call(Method::POST, "/v1/audio/transcriptions", &headers, body).await;
            assert_eq!(answer.status, status, "{models} {kind}: {answer:?}");
        }
    }
}
