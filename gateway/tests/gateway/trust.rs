//! API keys, the engines' own keys and request ids.

use http::Method;
use semmoe_gateway::Gateway;

use crate::support::{Answer, Client, Fleet, Mock, alone, canned, config, metric, plain_model, start};

const CHAT: &str = "/v1/chat/completions";
/// SHA-256 of "key-of-team-a" and "key-of-team-b".
const TEAM_A: &str = "8e47e6cea33e8ed9bbffb56c3b8400e8822a2b2cb9c9e4238f92b80c8721949c";
const TEAM_B: &str = "e40e454a7a747cbb931b4a756b5ffb483327d34dfa387546b5f958043e1abce5";

fn auth(more: &str) -> String {
    format!(
        "[auth]\n{more}\nkeys = [{{ name = \"team-a\", sha256 = \"{TEAM_A}\" }}, \
         {{ name = \"team-b\", sha256 = \"{TEAM_B}\", models = [\"petit\"] }}]\n"
    )
}

/// Two models, each with a backend; team-b may use the second, which the configuration calls by its alias.
fn two_models(mock: &Mock, more: &str) -> String {
    let url = mock.url();
    format!(
        "{}{more}[[models]]\nname = \"other\"\naliases = [\"petit\"]\npolicy = \"round_robin\"\n[[models.backends]]\n\
         name = \"pod-b\"\nengine = \"sglang\"\nurl = \"{url}\"\nranks = 1\n",
        plain_model(mock, 1)
    )
}

async fn chat(client: &Client, headers: &[(&str, &str)], model: &str) -> Answer {
    client.call(Method::POST, CHAT, headers, format!("{{\"model\":\"{model}\"}}")).await
}

#[tokio::test]
async fn requests_need_a_key_and_engines_do_not_see_it() {
    let mut mock = canned(1);
    let gateway = start(&format!("{}{}", auth(""), two_models(&mock, ""))).await;
    let client = Client::data(&gateway);
    for (headers, code) in [
        (vec![], "api_key_missing"),
        (vec![("authorization", "Bearer stranger-1")], "invalid_api_key"),
        (vec![("x-api-key", "stranger-2")], "invalid_api_key"),
    ] {
        for answer in
            [chat(&client, &headers, "tiny").await, client.call(Method::GET, "/v1/models", &headers, "").await]
        {
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, "Bearer"));
            assert_eq!(answer.json()["error"]["code"], code);
            assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
            assert!(!String::from_utf8_lossy(&answer.body).contains("stranger"), "keys are not repeated");
        }
    }
    assert_eq!(metric(&gateway, "semmoe_auth_failures_total{reason=\"missing\"}").await, 2.0);
    assert_eq!(metric(&gateway, "semmoe_auth_failures_total{reason=\"wrong\"}").await, 4.0);
    for header in [("authorization", "Bearer key-of-team-a"), ("x-api-key", "key-of-team-a")] {
        assert_eq!(chat(&client, &[header], "tiny").await.status, 200);
        let seen = mock.next().await;
        assert!(seen.headers.get("authorization").is_none() && seen.headers.get("x-api-key").is_none());
    }
    assert!(mock.seen.try_recv().is_err(), "refused requests reach no engine");
}

#[tokio::test]
async fn a_key_may_be_for_some_models() {
    let mock = canned(1);
    let gateway = start(&format!("{}{}", auth(""), two_models(&mock, ""))).await;
    let client = Client::data(&gateway);
    let of_b = [("authorization", "Bearer key-of-team-b")];
    for (model, status) in [("petit", 200), ("other", 200), ("tiny", 404), ("small", 404), ("no-such", 404)] {
        let answer = chat(&client, &of_b, model).await;
        assert_eq!(answer.status, status, "{model}");
        if status == 404 {
            // A model that the key may not use is indistinguishable from an unknown one.
            assert_eq!(answer.message(), format!("there is no model '{model}' (available: other)"));
            assert_eq!(answer.json()["error"]["code"], "model_not_found");
        }
    }
    assert_eq!(client.call(Method::POST, CHAT, &of_b, "{}").await.json()["error"]["code"], "model_missing");
    assert_eq!(metric(&gateway, "semmoe_auth_failures_total{reason=\"model\"}").await, 3.0);
    let models = client.call(Method::GET, "/v1/models", &of_b, "").await.json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(names, ["other", "petit"]);
    let one = async |id: &str| client.call(Method::GET, &format!("/v1/models/{id}"), &of_b, "").await;
    assert_eq!(one("petit").await.json(), models["data"][1]);
    let refused = one("tiny").await;
    assert_eq!((refused.status, refused.message()), (404, "there is no model 'tiny' (available: other)".to_owned()));
    assert_eq!(client.get("/v1/models/petit").await.status, 401);
}

#[tokio::test]
async fn keys_pass_where_the_configuration_says_so() {
    let mut mock = canned(1);
    for (toml, passes) in [
        (format!("{}{}", auth("forward = \"pass\""), two_models(&mock, "")), true),
        (plain_model(&mock, 1), true),
        (format!("[auth]\nforward = \"strip\"\n{}", plain_model(&mock, 1)), false),
    ] {
        let gateway = start(&toml).await;
        let headers = [("authorization", "Bearer key-of-team-a")];
        assert_eq!(chat(&Client::data(&gateway), &headers, "tiny").await.status, 200, "{toml}");
        assert_eq!(mock.next().await.headers.contains_key("authorization"), passes, "{toml}");
    }
}

/// Its probes carry the key too, or the backend would not be healthy.
#[tokio::test]
async fn an_engine_gets_its_own_key() {
    let mut mock = canned(1);
    mock.settings().authorization = Some("Bearer key-of-the-engine".into());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "key-of-the-engine\n").unwrap();
    let with_key = format!("api_key_file = {file:?}\n");
    let gateway = start(&format!("{}{}", auth("forward = \"pass\""), two_models(&mock, &with_key))).await;
    assert!(gateway.health("pod-a").unwrap().is_healthy());
    let answer = chat(&Client::data(&gateway), &[("authorization", "Bearer key-of-team-a")], "tiny").await;
    assert_eq!(answer.status, 200);
    assert_eq!(mock.next().await.headers["authorization"], "Bearer key-of-the-engine");

    for (content, says) in
        [("", "expected one line"), ("two words", "expected one line"), ("\u{e9}", "expected one line")]
    {
        std::fs::write(&file, content).unwrap();
        let config = config(&format!("{}{with_key}", plain_model(&mock, 1)));
        let error = Gateway::check(&config).await.unwrap_err().to_string();
        assert!(error.starts_with("backend 'pod-a': cannot use the key in ") && error.contains(says), "{error}");
    }
    std::fs::remove_file(&file).unwrap();
    let config = config(&format!("{}{with_key}", plain_model(&mock, 1)));
    assert!(Gateway::check(&config).await.unwrap_err().to_string().contains("No such file"));
}

#[tokio::test]
async fn a_request_has_one_id_everywhere() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(1, "").await;
    let answer = chat(&client, &[("x-request-id", "client-7")], "tiny").await;
    let seen = mock.next().await.headers["x-request-id"].to_str().unwrap().to_owned();
    // The id for the engine has a suffix that no client can predict, because engines key running requests by it.
    assert_eq!((answer.header("x-request-id"), seen.len()), ("client-7", "client-7".len() + 17));
    assert!(seen.starts_with("client-7-"), "{seen}");
    let (first, second) = (chat(&client, &[], "tiny").await, chat(&client, &[("x-request-id", "a b")], "tiny").await);
    assert_eq!(mock.next().await.headers["x-request-id"], first.header("x-request-id"));
    assert_eq!(mock.next().await.headers["x-request-id"], second.header("x-request-id"));
    assert_ne!(first.header("x-request-id"), second.header("x-request-id"));
    for (method, path, model) in
        [(Method::POST, CHAT, "none"), (Method::GET, CHAT, ""), (Method::GET, "/flush_cache", "")]
    {
        let answer =
            client.call(method, path, &[("x-request-id", "client-8")], format!("{{\"model\":\"{model}\"}}")).await;
        assert!(answer.status >= 400);
        assert_eq!(
            (answer.header("x-request-id"), answer.json()["error"]["request_id"].as_str()),
            ("client-8", Some("client-8"))
        );
    }
}
