//! LoRA names: `model:adapter` is routed by its model and goes to the engine as it was written.

use serde_json::{Value, json};

use crate::support::files::model;
use crate::support::{Client, Mock, settled, start};

async fn send(client: &Client, name: &str) -> (u16, Vec<u8>) {
    let body = format!("{{ \"model\" : {}, \"prompt\":\"x\" }}", json!(name));
    (client.post("/v1/completions", body.clone()).await.status, body.into_bytes())
}

#[tokio::test]
async fn adapters_pass_through_unchanged() {
    let (mut open, mut closed) = (Mock::start(1), Mock::start(1));
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
    // The engine's refusal of an adapter that it does not have is the client's answer.
    let refused = client.mock("/v1/completions", "400", r#"{"model":"base:unknown"}"#).await;
    assert_eq!((refused.status, refused.message()), (400, "the engine's own words".to_owned()));
    settled(&gateway).await;
}
