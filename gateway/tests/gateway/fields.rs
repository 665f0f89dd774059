//! Members and headers that are not forwarded, those that choose an adapter, and Anthropic's routes.

use http::Method;
use serde_json::{Value, json};

use crate::support::files::{File, model};
use crate::support::{Answer, Client, Fixture, Fleet, alone, canned, canned_as, plain_model, settled, start};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn what_routers_and_engines_tell_each_other_stays_behind() {
    let mut mock = canned(1);
    let file = File::new("extra_routes = [\"/v1/score\"]", &plain_model(&mock, 1));
    let gateway = file.start().await;
    gateway.wait_ready().await;
    let client = Client::data(&gateway);
    let sent = json!({
        "encoder_urls": ["http://10.0.0.1"], "kv_router_hint": {"a": [1]}, "http_worker_ipc": "ipc:///tmp/x",
        "bootstrap_pair_key": "x", "kv_hints": {}, "ec_transfer_params": {"a": 1}, "mm_hashes": ["x"], "n": 1,
    });
    for path in [CHAT, COMPLETIONS, "/generate", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/score"] {
        let escaped = sent.to_string().replace("encoder_urls", "encoder\\u005furls");
        for body in [sent.to_string(), escaped] {
            assert_eq!(client.post(path, body).await.status, 200, "{path}");
            assert_eq!(mock.next().await.json(), json!({"n": 1}), "{path}");
        }
    }
    for (path, body, message) in [
        (
            CHAT,
            r#"{"vllm_xargs":{"kv_transfer_params":"x"}}"#,
            "vllm_xargs.kv_transfer_params is not accepted from clients",
        ),
        ("/generate", r#"{"text":"a","lora_id":"x"}"#, "lora_id is not accepted from clients"),
        (
            "/v1/score",
            r#"{"parameters":{"routed_dp_rank":1}}"#,
            "parameters.routed_dp_rank is not accepted from clients",
        ),
    ] {
        let answer = client.post(path, body).await;
        assert_eq!((answer.status, answer.message()), (400, message.to_owned()), "{path}");
    }
    assert!(mock.seen.try_recv().is_err());
    settled(&gateway).await;
}

#[tokio::test]
async fn no_adapter_goes_round_the_models_own() {
    let (mut closed, mut open) = (canned(1), canned(1));
    let toml = format!(
        "{}{}",
        model("base", "adapters = [\"sql\"]\n", &[("pod-a", &closed.url(), 1)]),
        model("open", "", &[("pod-b", &open.url(), 1)])
    );
    let gateway = start(&toml).await;
    let client = Client::data(&gateway);
    let named = [("x-semmoe-model", "base")];
    for path in [CHAT, COMPLETIONS, "/generate", "/v1/embeddings"] {
        for bad in [json!("law"), json!(["sql", "law"]), json!(["sql", null, ""]), json!("")] {
            let body = json!({ "model": "base", "lora_path": bad }).to_string();
            let answer = client.call(Method::POST, path, &named, body).await;
            assert_eq!(
                (answer.status, answer.json()["error"]["code"].as_str()),
                (404, Some("model_not_found")),
                "{bad}"
            );
            assert!(answer.message().ends_with("(available: base, base:sql)"), "{}", answer.message());
        }
        for wrong in [json!(5), json!({"a": "sql"}), json!([["sql"]])] {
            let body = json!({ "model": "base", "lora_path": wrong }).to_string();
            assert_eq!(client.call(Method::POST, path, &named, body).await.status, 400, "{wrong}");
        }
        assert!(closed.seen.try_recv().is_err());
        for good in [json!("sql"), json!(["sql", null]), json!(null)] {
            let body = json!({ "model": "base", "lora_path": good }).to_string();
            assert_eq!(client.call(Method::POST, path, &named, body.clone()).await.status, 200, "{good}");
            assert_eq!(closed.next().await.body, body);
        }
    }
    let body = json!({ "model": "open", "lora_path": "law" }).to_string();
    assert_eq!(client.post(CHAT, body.clone()).await.status, 200);
    assert_eq!(open.next().await.body, body);
    settled(&gateway).await;
}

/// A chat under an adapter is cached separately from the chat without it.
#[tokio::test]
async fn prompts_under_adapters_have_blocks_of_their_own() {
    let fixture = Fixture::new(2);
    let mock = canned_as(fixture.info());
    let tables = fixture.write("t", &[], 0);
    let prefix = "[routing.prefix]\nblock_tokens = 1\n";
    let gateway = start(&format!("{prefix}{}", fixture.balanced(&mock.url(), &tables))).await;
    let client = Client::data(&gateway);
    let rank = async |adapter: Option<&str>| {
        let body = json!({ "model": "tiny", "prompt": "alpha beta gamma delta", "lora_path": adapter });
        client.post(COMPLETIONS, body.to_string()).await.header("x-semmoe-rank").to_owned()
    };
    let first = rank(None).await;
    assert_eq!(rank(None).await, first);
    assert_ne!(rank(Some("sql")).await, first);
    assert_eq!(rank(None).await, first);
}

#[tokio::test]
async fn cookies_and_addresses_stay_on_their_side() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "").await;
    let headers = [("cookie", "session=secret"), ("cookie2", "x"), ("x-other", "y"), ("x-mock", "redirects")];
    let answer = client.call(Method::POST, CHAT, &headers, "{}").await;
    let seen = mock.next().await.headers;
    assert_eq!((seen.get("cookie"), seen.get("cookie2")), (None, None));
    assert_eq!(seen["x-other"], "y");
    assert_eq!(answer.status, 307);
    for name in ["location", "content-location", "refresh", "alt-svc", "set-cookie", "set-cookie2"] {
        assert_eq!(answer.header(name), "", "{name}");
    }
    assert_eq!(answer.header("x-upstream"), "yes");
    settled(&gateway).await;
}

/// In Anthropic's form: its type, the message, and the request's id at the top level.
#[track_caller]
fn check_anthropic(answer: &Answer, status: u16, kind: &str) {
    let document = answer.json();
    assert_eq!((answer.status, &document["type"], &document["error"]["type"]), (status, &json!("error"), &json!(kind)));
    assert!(document["error"]["message"].is_string(), "{document}");
    assert_eq!(document["request_id"], answer.header("x-request-id"));
}

#[tokio::test]
async fn anthropics_clients_get_errors_in_their_form() {
    let mut mock = canned(1);
    let key = "0".repeat(64);
    let limits = "[limits]\nbody_bytes = 1000\n";
    let gateway = start(&format!("{limits}{}", plain_model(&mock, 1))).await;
    let client = Client::data(&gateway);
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        check_anthropic(&client.post(path, "{").await, 400, "invalid_request_error");
        check_anthropic(&client.post(path, r#"{"model":"none"}"#).await, 404, "not_found_error");
        check_anthropic(&client.post(path, "x".repeat(1001)).await, 413, "request_too_large");
        check_anthropic(&client.get(path).await, 405, "invalid_request_error");
    }
    let locked =
        start(&format!("[auth]\nkeys = [{{ name = \"a\", sha256 = \"{key}\" }}]\n{}", plain_model(&mock, 1))).await;
    check_anthropic(&Client::data(&locked).post("/v1/messages", "{}").await, 401, "authentication_error");
    // Midway in a stream it is an event of its kind.
    mock.release(3);
    let cut = client.mock("/v1/messages", "die-between", r#"{"model":"tiny","stream":true}"#).await;
    let text = String::from_utf8_lossy(&cut.body).into_owned();
    let last = text.split("\n\n").filter(|event| !event.is_empty()).last().unwrap();
    let data = last.strip_prefix("event: error\ndata: ").unwrap_or_else(|| panic!("{text}"));
    let document: Value = serde_json::from_str(data).unwrap();
    assert_eq!((&document["type"], &document["error"]["type"]), (&json!("error"), &json!("api_error")));
    mock.next().await;
    // Other routes keep OpenAI's form.
    assert!(client.post("/v1/message", "{}").await.json()["error"]["param"].is_null());
    settled(&gateway).await;
}

/// Any backend can count a chat's tokens.
#[tokio::test]
async fn tokens_of_messages_are_counted() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "").await;
    let body = r#"{"model":"tiny","messages":[{"role":"user","content":"a"}]}"#;
    assert_eq!(client.post("/v1/messages/count_tokens", body).await.status, 200);
    let seen = mock.next().await;
    assert_eq!((seen.path.as_str(), seen.header_pin()), ("/v1/messages/count_tokens", None));
    assert_eq!(seen.body, body);
    settled(&gateway).await;
}
