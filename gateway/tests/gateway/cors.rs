//! Web pages of other origins on the data plane: none by default, otherwise the configured ones.

use http::Method;

use crate::support::{Answer, Client, Fleet, Mock, alone, canned, plain_model, start_bare};

const CHAT: &str = "/v1/chat/completions";
const APP: &str = "https://app.example";

async fn preflight(client: &Client, origin: &str) -> Answer {
    let headers = [
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    client.call(Method::OPTIONS, CHAT, &headers, "").await
}

fn with(origins: &str, mock: &Mock) -> String {
    format!("[server]\ncors_origins = [{origins}]\n{}", plain_model(mock, 1))
}

async fn serve(toml: &str) -> semmoe_gateway::Running {
    let gateway = start_bare(&format!("{}\n", toml.replace("[server]\n", ""))).await;
    gateway.wait_ready().await;
    gateway
}

#[tokio::test]
async fn no_page_may_by_default() {
    let Fleet { mocks: [_mock], gateway: _gateway, client } = alone(1, "").await;
    let answer = preflight(&client, APP).await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (405, ""));
    for headers in [&[("origin", APP)][..], &[("origin", APP), ("x-mock", "every-origin")]] {
        let answer = client.call(Method::POST, CHAT, headers, "{}").await;
        let said = (answer.header("access-control-allow-origin"), answer.header("access-control-allow-credentials"));
        assert_eq!((answer.status, said, answer.header("vary")), (200, ("", ""), ""));
    }
}

#[tokio::test]
async fn configured_origins_may_and_others_may_not() {
    let mut mock = canned(1);
    let gateway = serve(&with(&format!("\"{APP}\", \"http://localhost:3000\""), &mock)).await;
    let client = Client::data(&gateway);
    let asked = preflight(&client, APP).await;
    assert_eq!((asked.status, asked.header("access-control-allow-origin")), (204, APP));
    assert_eq!(asked.header("access-control-allow-headers"), "authorization,content-type");
    assert_eq!((asked.header("access-control-allow-methods"), asked.header("vary")), ("GET,POST", "Origin"));
    assert!(mock.seen.try_recv().is_err(), "no engine is asked");
    let answer = client.call(Method::POST, CHAT, &[("origin", APP)], "{}").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, APP));
    assert!(answer.header("access-control-expose-headers").contains("x-semmoe-rank"));
    let engines = client.call(Method::POST, CHAT, &[("origin", APP), ("x-mock", "every-origin")], "{}").await;
    assert_eq!(
        (engines.header("access-control-allow-origin"), engines.header("access-control-allow-credentials")),
        (APP, "")
    );
    // The page can also read refusals and the list of models.
    for (method, path, status) in
        [(Method::POST, "/nothing", 404), (Method::GET, "/v1/models", 200), (Method::GET, CHAT, 405)]
    {
        let answer = client.call(method, path, &[("origin", APP)], "").await;
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (status, APP), "{path}");
    }
    for foreign in ["https://evil.example", "https://app.example.evil", "null", "http://app.example"] {
        let asked = preflight(&client, foreign).await;
        assert_eq!((asked.status, asked.header("access-control-allow-origin")), (405, ""), "{foreign}");
        let answer = client.call(Method::POST, CHAT, &[("origin", foreign)], "{}").await;
        assert_eq!((answer.header("access-control-allow-origin"), answer.header("vary")), ("", "Origin"), "{foreign}");
    }
    // An OPTIONS that is not a preflight is still a wrong method.
    assert_eq!(client.call(Method::OPTIONS, CHAT, &[("origin", APP)], "").await.status, 405);
}

#[tokio::test]
async fn a_star_is_for_every_page() {
    let mock = canned(1);
    let gateway = serve(&with("\"*\"", &mock)).await;
    let answer = preflight(&Client::data(&gateway), "https://any.example").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, "https://any.example"));
}

#[test]
fn an_origin_that_is_none_is_refused() {
    let toml = "[server]\ncors_origins = [\"https://a.example\", \"https://b.example/\"]\n[[models]]\nname = \"m\"\n";
    let error = semmoe_gateway::Config::from_toml(&format!("{toml}policy = \"round_robin\"\n[[models.backends]]\nname = \"b\"\nengine = \"vllm\"\nurl = \"http://h:1\"\n"), std::path::Path::new("")).unwrap_err().to_string();
    assert!(error.contains("server.cors_origins[1]") && error.contains("https://b.example/"), "{error}");
}
