//! LoRA names: `model:adapter` is routed by its model and forwarded unchanged.

use serde_json::{Value, json};

use crate::support::files::model;
use crate::support::{Client, Mock, Seen, canned, settled, start};

async fn send(client: &Client, name: &str) -> (u16, Vec<u8>) {
    let body = format!("{{ \"model\" : {}, \"prompt\":\"x\" }}", json!(name));
    (client.post("/v1/completions", body.clone()).await.status, body.into_bytes())
}

/// The next request that is not a probe.
async fn posted(mock: &mut Mock) -> Seen {
    loop {
        let seen = mock.next().await;
        if !seen.body.is_empty() {
            return seen;
        }
    }
}

#[tokio::test]
async fn adapters_pass_through_unchanged() {
    let (mut open, mut closed) = (canned(1), canned(1));
    let toml = format!(
        "{}{}",
        model("base", "aliases = [\"sql-lora\"]\n", &[("pod-a", &open.url(), 1)]),
        model("base:8b", "adapters = [\"sql\", \"law\"]\n", &[("pod-b", &closed.url(), 1)])
    );
    let gateway = start(&toml).await;
    let client = Client::data(&gateway);
    for name in ["base", "base:anything", "base:a:b", "sql-lora", "sql-lora:x", "base:8x"] {
        let (status, body) = send(&client, name).await;
        assert_eq!(status, 200, "{name}");
        assert_eq!(open.next().await.body, body, "{name}");
    }
    for name in ["base:8b", "base:8b:sql", "base:8b:law"] {
        let (status, body) = send(&client, name).await;
        assert_eq!(status, 200, "{name}");
        assert_eq!(closed.next().await.body, body, "{name}");
    }
    for name in ["base:", "base:8b:other", "base:8b:", "other:sql", ":sql"] {
        let (status, _) = send(&client, name).await;
        assert_eq!(status, 404, "{name}");
    }
    let list = client.get("/v1/models").await.json();
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["base", "sql-lora", "base:8b", "base:8b:sql", "base:8b:law"]);
    assert_eq!((&list["data"][3]["parent"], &list["data"][2]["parent"]), (&json!("base:8b"), &Value::Null));
    for entry in list["data"].as_array().unwrap() {
        let path = format!("/v1/models/{}", entry["id"].as_str().unwrap());
        assert_eq!(client.get(&path).await.json(), *entry, "{path}");
        assert_eq!(client.get(&path.replace(':', "%3A")).await.json(), *entry, "{path}, escaped");
    }
    for unlisted in ["base:8b:other", "base:anything", "other", "base%2F8b", "base/", "%ff"] {
        let answer = client.get(&format!("/v1/models/{unlisted}")).await;
        assert_eq!(answer.status, 404, "{unlisted}");
        assert_eq!(answer.json()["error"]["code"], "model_not_found", "{unlisted}");
    }
    // The engine's refusal of an unknown adapter goes to the client.
    let refused = client.mock("/v1/completions", "400", r#"{"model":"base:unknown"}"#).await;
    assert_eq!((refused.status, refused.message()), (400, "the engine's own words".to_owned()));
    settled(&gateway).await;
}

/// An engine that knows the model by another name receives that, whatever the client calls it; all other bytes are
/// kept.
#[tokio::test]
async fn engines_get_the_name_that_they_know() {
    let (mut sglang, mut vllm) = (canned(1), canned(1));
    let of = |name: &str, engine: &str, mock: &Mock| {
        model(name, &format!("aliases = [\"{name}-old\"]\n"), &[("pod", &mock.url(), 1)])
            .replace("\"sglang\"", &format!("\"{engine}\"\nserved_name = \"org/{name}\""))
            .replace("\"pod\"", &format!("\"pod-{name}\""))
    };
    let file = crate::support::files::File::new(
        "extra_routes = [\"/v1/score\"]",
        &format!("{}{}", of("a", "sglang", &sglang), of("b", "vllm", &vllm)),
    );
    let gateway = file.start().await;
    gateway.wait_ready().await;
    let client = Client::data(&gateway);
    for (name, expected) in [("a", "org/a"), ("a-old", "org/a"), ("a:sql", "org/a:sql"), ("a-old:x:y", "org/a:x:y")] {
        assert_eq!(send(&client, name).await.0, 200, "{name}");
        let body = posted(&mut sglang).await.body;
        assert_eq!(body, format!("{{\"model\":{}, \"prompt\":\"x\" }}", json!(expected)), "{name}");
    }
    for (name, expected) in [("b", "org/b"), ("b-old", "org/b"), ("b:sql", "sql")] {
        assert_eq!(send(&client, name).await.0, 200, "{name}");
        assert_eq!(posted(&mut vllm).await.json()["model"], expected, "{name}");
    }
    // Without a name in the body, and on routes whose bodies only the engine understands.
    let named = [("x-semmoe-model", "b")];
    assert_eq!(client.call(http::Method::POST, "/v1/completions", &named, r#"{"n":1}"#).await.status, 200);
    assert_eq!(posted(&mut vllm).await.body, r#"{"model":"org/b","n":1}"#);
    assert_eq!(client.post("/v1/score", r#"{"model":"a-old","n":1}"#).await.status, 200);
    assert_eq!(posted(&mut sglang).await.body, r#"{"model":"org/a","n":1}"#);
    assert_eq!(client.call(http::Method::POST, "/v1/score", &named, "no JSON").await.status, 200);
    assert_eq!(posted(&mut vllm).await.body, "no JSON");
    settled(&gateway).await;
}
