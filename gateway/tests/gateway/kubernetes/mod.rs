//! Backends found by Kubernetes' API: they join and leave with the endpoints, and no fault of the API loses any.

mod api;

use semmoe_gateway::{Config, Running};
use serde_json::json;

use crate::discovery::{FOUND, answers, backends, named, until};
use crate::support::certs::Authority;
use crate::support::files::{File, reload};
use crate::support::{Client, Mock, PATIENCE, canned, eventually, metric, settled, start};
use api::{Api, ending, ready, unready};

const STALE: &str = r#"semmoe_discovery_stale{source="pods"}"#;
const MODEL: &str = "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.discovery]]\nname = \"pods\"\n\
                     engine = \"sglang\"\nranks = 1\n";
/// Longer than any test: only an event can make a backend join or leave.
const NEVER: &str = "interval_seconds = 3600.0";
const OFTEN: &str = "interval_seconds = 0.01";

fn toml(api: &str, more: &str, timing: &str) -> String {
    format!(
        "{MODEL}{timing}\n[models.discovery.kubernetes]\nnamespace = \"prod\"\nservice = \"engines\"\nport = \"http\"\n\
         api_server = \"{api}\"\n{more}"
    )
}

async fn served_by(gateway: &Running) -> String {
    let answer = Client::data(gateway).post("/v1/completions", r#"{"model":"tiny"}"#).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-semmoe-backend").to_owned()
}

async fn found(gateway: &Running, mocks: &[&Mock]) {
    eventually(&format!("{:?}", named(mocks)), async || backends(gateway).await == named(mocks)).await;
}

#[tokio::test]
async fn backends_join_and_leave_with_the_endpoints() {
    let (a, b, c) = (canned(1), canned(1), canned(1));
    let api = Api::start().await;
    api.set(&[ready(&a), unready(&b)]);
    let gateway = start(&toml(&api.url(), "", NEVER)).await;
    found(&gateway, &[&a]).await;
    // All of several pages, and of several events.
    api.set(&[ready(&a), ready(&b), ready(&c)]);
    found(&gateway, &[&a, &b, &c]).await;
    until(&gateway, FOUND, |found| found == 3.0).await;
    // A terminating endpoint leaves at once; one that is merely not ready may return, and is spared.
    api.set(&[ending(&a), unready(&b), ready(&c)]);
    found(&gateway, &[&b, &c]).await;
    for _ in 0..4 {
        assert_ne!(served_by(&gateway).await, named(&[&a])[0]);
    }
    // No endpoint is ready: the known ones stay.
    api.set(&[ending(&a), unready(&b), unready(&c)]);
    answers(&gateway, "empty", 1.0).await;
    assert_eq!(metric(&gateway, STALE).await, 1.0);
    found(&gateway, &[&b, &c]).await;
    served_by(&gateway).await;
    api.set(&[ready(&b)]);
    until(&gateway, STALE, |stale| stale == 0.0).await;
    assert_eq!(api.lists(), 2, "two pages, once");
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn endpoints_that_vanish_leave_after_some_looks() {
    let (a, b) = (canned(1), canned(1));
    let api = Api::start().await;
    api.set(&[ready(&a), ready(&b)]);
    let file = File::new("", &toml(&api.url(), "", OFTEN));
    let gateway = file.start().await;
    found(&gateway, &[&a, &b]).await;
    assert_eq!(reload(&gateway).await.status, 200);
    assert_eq!(backends(&gateway).await, named(&[&a, &b]));
    api.set(&[ready(&b)]);
    found(&gateway, &[&b]).await;
    // The source is removed with its section.
    file.write("", &crate::support::files::model("tiny", "", &[("pod-c", &a.url(), 1)]));
    assert_eq!(reload(&gateway).await.json()["backends_removed"], json!(named(&[&b])));
    gateway.shutdown(PATIENCE).await;
}

/// 403, 500, an invalid answer, a cut: the last known backends stay, and all of it is counted. Later changes then
/// apply.
#[tokio::test]
async fn an_api_that_fails_loses_nobody() {
    let (a, b) = (canned(1), canned(1));
    let api = Api::start().await;
    let forbidden = json!({ "kind": "Status", "code": 403, "message": "cannot list endpointslices" }).to_string();
    api.fail(403, &forbidden);
    let gateway = start(&toml(&api.url(), "", NEVER)).await;
    answers(&gateway, "failed", 1.0).await;
    let readiness = Client::admin(&gateway).get("/readyz").await;
    assert_eq!(readiness.status, 503);
    api.set(&[ready(&a)]);
    api.recover();
    found(&gateway, &[&a]).await;
    assert_eq!(metric(&gateway, STALE).await, 0.0);
    for (status, body) in [
        (403, forbidden.as_str()),
        (500, "etcd is away"),
        (200, "no JSON"),
        (200, r#"{"metadata":{"resourceVersion":"1"},"items":[{"endpoints":7}]}"#),
        (200, r#"{"items":[]}"#),
        // Once it is a reason to list again; permanently it is a failure.
        (410, "{}"),
    ] {
        api.fail(status, body);
        answers(&gateway, "failed", 1.0).await;
        assert_eq!((metric(&gateway, STALE).await, backends(&gateway).await), (1.0, named(&[&a])), "{status} {body}");
        assert_eq!(served_by(&gateway).await, named(&[&a])[0]);
        api.recover();
        until(&gateway, STALE, |stale| stale == 0.0).await;
        // The watch is restored, and the next fault is a first one.
        api.set(&[ready(&a), ready(&b)]);
        found(&gateway, &[&a, &b]).await;
        api.set(&[ready(&a), ending(&b)]);
        found(&gateway, &[&a]).await;
    }
    api.fail(500, "");
    api.set(&[ready(&b), ending(&a)]);
    answers(&gateway, "failed", 1.0).await;
    assert_eq!(backends(&gateway).await, named(&[&a]));
    api.recover();
    found(&gateway, &[&b]).await;
    gateway.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn watches_that_end_go_on_and_old_ones_are_listed_anew() {
    let (a, b, c) = (canned(1), canned(1), canned(1));
    let api = Api::start().await;
    api.set(&[ready(&a)]);
    let gateway = start(&toml(&api.url(), "", NEVER)).await;
    found(&gateway, &[&a]).await;
    // Ended normally after an event: the next watch resumes from there.
    api.set(&[ready(&a), ready(&b)]);
    found(&gateway, &[&a, &b]).await;
    let (lists, watches) = (api.lists(), api.watches());
    api.end();
    api.set(&[ready(&a), ready(&b), ready(&c)]);
    found(&gateway, &[&a, &b, &c]).await;
    assert_eq!((api.lists(), api.watches()), (lists, watches + 1));
    // 410 to the next watch.
    api.set_silently(&[ready(&a), ready(&b), ending(&c)]);
    api.end();
    found(&gateway, &[&a, &b]).await;
    assert!(api.lists() > lists);
    // 410 in the middle of a watch.
    let reported = r#"{"type":"ERROR","object":{"kind":"Status","code":410}}"#;
    api.set_silently(&[ready(&a), ending(&b)]);
    api.say(reported);
    found(&gateway, &[&a]).await;
    // Neither was a failure; these are: a cut, and an invalid event.
    assert_eq!(metric(&gateway, r#"semmoe_discovery_answers_total{source="pods",outcome="failed"}"#).await, 0.0);
    for fault in [0, 1, 2] {
        api.set_silently(
            if fault % 2 == 0 { vec![ready(&a), ready(&b)] } else { vec![ready(&a), ending(&b)] }.as_slice(),
        );
        match fault {
            0 => api.cut(),
            1 => api.say("what is no event"),
            _ => api.say(r#"{"type":"ERROR","object":{"code":500,"message":"etcd"}}"#),
        }
        let both = [&a, &b];
        found(&gateway, &both[..2 - fault % 2]).await;
    }
    assert_eq!(metric(&gateway, r#"semmoe_discovery_answers_total{source="pods",outcome="failed"}"#).await, 3.0);
    assert_eq!(metric(&gateway, STALE).await, 0.0);
    gateway.shutdown(PATIENCE).await;
}

/// Over TLS, with a token that changes; another gateway terminates TLS for the API server.
#[tokio::test]
async fn tokens_go_over_tls_and_are_read_again() {
    let a = canned(1);
    let api = Api::start().await;
    api.set(&[ready(&a)]);
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1");
    let front = format!(
        "extra_routes = [\"/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices\"]\n{}[[models]]\nname = \"m\"\n\
         policy = \"round_robin\"\n[[models.backends]]\nname = \"api\"\nengine = \"openai\"\nurl = \"{}\"\n",
        authority.section("server.tls", "server"),
        api.url()
    );
    let front = File::new(&front, "").start().await;
    front.wait_ready().await;
    let token = authority.file("token");
    std::fs::write(&token, "first\n").unwrap();
    let more = format!("token_file = {token:?}\nca = {:?}\n", authority.file("ca.pem"));
    let gateway = start(&toml(&front.data_url(), &more, OFTEN)).await;
    found(&gateway, &[&a]).await;
    std::fs::write(&token, "second").unwrap();
    api.cut();
    eventually("the new token", async || api.tokens().last().is_some_and(|token| token == "Bearer second")).await;
    assert!(api.tokens().iter().all(|token| ["Bearer first", "Bearer second"].contains(&token.as_str())));
    // An unknown authority's certificate is rejected.
    let other = Authority::new();
    let more = format!("token_file = {token:?}\nca = {:?}\n", other.file("ca.pem"));
    let misled = start(&toml(&front.data_url(), &more, OFTEN)).await;
    answers(&misled, "failed", 1.0).await;
    assert_eq!(backends(&misled).await, Vec::<String>::new());
    for gateway in [gateway, misled, front] {
        gateway.shutdown(PATIENCE).await;
    }
}

#[test]
fn wrong_sources_name_the_key() {
    let key = "models[0].discovery[0].kubernetes";
    let good = toml("http://127.0.0.1:1", "", OFTEN);
    Config::from_toml(&good, std::path::Path::new("")).unwrap();
    for (from, to, says) in [
        ("\"prod\"", "\"Prod\"", format!("{key}.namespace: \"Prod\" is not a name")),
        ("\"engines\"", "\"a/b\"", format!("{key}.service: ")),
        ("\"engines\"", "\"-a\"", format!("{key}.service: ")),
        ("\"http\"", "\"\"", format!("{key}.port: ")),
        ("http://127.0.0.1:1", "127.0.0.1:1", format!("{key}.api_server: ")),
        ("port = ", "token_file = \"t\"\nport = ", format!("{key}.token_file: set, but the API server's URL")),
        ("port = ", "pot = ", "unknown field `pot`".to_owned()),
        (OFTEN, "dns = \"a:1\"", format!("{key}: `dns` is set too")),
        (OFTEN, "url = \"http://a\"", "models[0].discovery[0].url: set, but these backends' addresses".to_owned()),
        ("namespace = \"prod\"\n", "", "missing field `namespace`".to_owned()),
    ] {
        let error = Config::from_toml(&good.replace(from, to), std::path::Path::new("")).unwrap_err().to_string();
        assert!(error.contains(&says), "expected '{says}' in '{error}'");
    }
}
