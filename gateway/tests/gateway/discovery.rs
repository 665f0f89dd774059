//! Backends found by name: they join, leave and stay as the answers say, and nothing is lost meanwhile.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use semmoe_gateway::{Config, Gateway, Resolve, Resolved, Running};
use serde_json::json;

use crate::support::certs::Authority;
use crate::support::files::{File, reload};
use crate::support::{
    Client, Fixture, Mock, PATIENCE, TEXTS, canned, eventually, metric, metrics, settled, shown, until_shown,
};

/// Gives the answers that the test sets.
#[derive(Default)]
pub(crate) struct Names(Mutex<Option<Vec<SocketAddr>>>);

impl Names {
    pub(crate) fn new(mocks: &[&Mock]) -> Arc<Self> {
        let names = Arc::new(Self::default());
        names.set(mocks);
        names
    }

    pub(crate) fn set(&self, mocks: &[&Mock]) {
        self.set_addresses(mocks.iter().map(|mock| mock.address).collect());
    }

    fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        *self.0.lock().unwrap() = Some(addresses);
    }

    fn fail(&self) {
        *self.0.lock().unwrap() = None;
    }
}

impl Resolve for Names {
    fn resolve(&self, name: String) -> Resolved<'_> {
        assert_eq!(name, "engines.example:30000");
        let answer = self.0.lock().unwrap().clone();
        Box::pin(async move { answer.ok_or_else(|| io::Error::other("no such name")) })
    }
}

/// Digest of "k2".
const K2: &str = "015f7e6bc5aeaf483724089e9252cc13b50951a6b69412522765cff4d780306e";
pub(crate) const SOURCE: &str = "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.discovery]]\nname = \"pods\"\n\
                      dns = \"engines.example:30000\"\nengine = \"sglang\"\nranks = 1\ninterval_seconds = 0.01\n";

pub(crate) async fn start(file: &File, names: &Arc<Names>) -> Running {
    let names: Arc<dyn Resolve> = Arc::<Names>::clone(names);
    Gateway::start_with(Config::load(&file.path()).unwrap(), names).await.unwrap()
}

/// Waits until a metric has a value.
pub(crate) async fn until(gateway: &Running, line: &str, wanted: impl Fn(f64) -> bool) {
    eventually(line, async || wanted(metric(gateway, line).await)).await;
}

pub(crate) const FOUND: &str = r#"semmoe_discovery_backends{source="pods"}"#;

/// Waits for `more` further answers with this outcome.
pub(crate) async fn answers(gateway: &Running, outcome: &str, more: f64) {
    let line = format!("semmoe_discovery_answers_total{{source=\"pods\",outcome=\"{outcome}\"}}");
    let before = metric(gateway, &line).await;
    until(gateway, &line, |now| now >= before + more).await;
}

pub(crate) async fn backends(gateway: &Running) -> Vec<String> {
    let list = Client::admin(gateway).get("/admin/backends").await.json();
    list["backends"].as_array().unwrap().iter().map(|backend| backend["name"].as_str().unwrap().to_owned()).collect()
}

pub(crate) fn named(mocks: &[&Mock]) -> Vec<String> {
    let mut addresses: Vec<SocketAddr> = mocks.iter().map(|mock| mock.address).collect();
    addresses.sort();
    addresses.iter().map(|address| format!("pods-{address}")).collect()
}

#[tokio::test]
async fn backends_join_and_leave_with_the_answers() {
    let (a, b) = (canned(1), canned(1));
    let names = Names::new(&[]);
    let file = File::new("", SOURCE);
    let gateway = start(&file, &names).await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    answers(&gateway, "empty", 1.0).await;
    let ready = admin.get("/readyz").await;
    assert_eq!((ready.status, &ready.body[..]), (503, &b"model 'tiny': no backend has been discovered yet\n"[..]));
    assert_eq!(client.post("/v1/completions", r#"{"model":"tiny"}"#).await.status, 503);
    names.set(&[&a]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    assert_eq!(admin.get("/readyz").await.status, 200);
    assert_eq!(client.post("/v1/completions", r#"{"model":"tiny"}"#).await.status, 200);
    names.set(&[&b, &a, &b]);
    until(&gateway, FOUND, |found| found == 2.0).await;
    assert_eq!(backends(&gateway).await, named(&[&a, &b]));
    // A failed or an empty answer changes nothing, and neither does a reload.
    names.fail();
    answers(&gateway, "failed", 5.0).await;
    names.set(&[]);
    answers(&gateway, "empty", 5.0).await;
    assert_eq!(reload(&gateway).await.status, 200);
    assert_eq!(backends(&gateway).await, named(&[&a, &b]));
    // A missing backend leaves; requests are served all the time.
    names.set(&[&b]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    assert_eq!(backends(&gateway).await, named(&[&b]));
    for _ in 0..3 {
        let answer = client.post("/v1/completions", r#"{"model":"tiny"}"#).await;
        assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, named(&[&b])[0].as_str()));
    }
    // The source is removed with its section.
    file.write("", &crate::support::files::model("tiny", "", &[("pod-c", &a.url(), 1)]));
    let reported = reload(&gateway).await;
    assert_eq!(reported.json()["backends_removed"], json!(named(&[&b])), "{reported:?}");
    assert_eq!(backends(&gateway).await, ["pod-c"]);
    // Its gauges can no longer alarm.
    eventually("its gauges go", async || !metrics(&gateway).await.contains("discovery_stale{")).await;
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn what_does_not_answer_is_left_out_until_it_does_and_what_does_not_fit_is_routed_by_load() {
    let fixture = Fixture::new(2);
    let (good, foreign, mut dead) = (canned(2), canned(2), canned(2));
    for mock in [&good, &dead] {
        mock.settings().info = Some(fixture.info());
    }
    let mut info = fixture.info();
    info["placement_digest"] = json!("beef");
    foreign.settings().info = Some(info);
    dead.kill();
    let tables = fixture.write("t", &TEXTS, 0);
    let affinity = fixture.affinity("http://127.0.0.1:1", &tables);
    let toml = affinity
        .replace(
            "[[models.backends]]\nname = \"pod-a\"",
            "[[models.discovery]]\nname = \"pods\"\ninterval_seconds = 0.01",
        )
        .replace("url = \"http://127.0.0.1:1\"", "dns = \"engines.example:30000\"");
    let names = Names::new(&[&good, &foreign, &dead]);
    let file = File::new("", &toml);
    let gateway = start(&file, &names).await;
    until(&gateway, FOUND, |found| found == 2.0).await;
    answers(&gateway, "ok", 3.0).await;
    assert_eq!(backends(&gateway).await, named(&[&good, &foreign]));
    let name = &named(&[&foreign])[0];
    assert_eq!(shown(&gateway, name).await["by_load"]["reason"], "placement");
    let body = json!({ "text": TEXTS[1] }).to_string();
    let answer = Client::data(&gateway).post("/generate", body).await;
    assert_eq!((answer.status, answer.header("x-semmoe-policy")), (200, "affinity"));
    // States that were tried but not adopted leave no trace.
    assert_eq!(Client::admin(&gateway).get("/admin/config").await.json()["generation"], 2);
    foreign.settings().info = Some(fixture.info());
    until_shown(&gateway, name, |shown| shown["by_load"].is_null()).await;
    dead.listen();
    until(&gateway, FOUND, |found| found == 3.0).await;
    assert_eq!(backends(&gateway).await, named(&[&good, &foreign, &dead]));
    gateway.shutdown(PATIENCE).await;
}

/// A request that arrived before the first backend is served by it.
#[tokio::test]
async fn who_waits_for_a_backend_gets_the_first_that_is_found() {
    let a = canned(1);
    let names = Names::new(&[]);
    let file = File::new("", &format!("[queue]\nwait_for_backend_seconds = 60.0\n{SOURCE}"));
    let gateway = start(&file, &names).await;
    let client = Client::data(&gateway);
    let waiting = client.begin("/v1/completions", r#"{"model":"tiny"}"#);
    until(&gateway, "semmoe_queue_depth{model=\"tiny\"}", |depth| depth == 1.0).await;
    names.set(&[&a]);
    let answer = tokio::time::timeout(PATIENCE / 2, waiting).await.expect("served before its wait is over").unwrap();
    assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, named(&[&a])[0].as_str()));
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

/// Found backends support TLS, HTTP/2 and a key, like configured ones. The certificate has the name looked up.
#[tokio::test]
async fn found_engines_may_be_spoken_to_over_tls() {
    let authority = Authority::new();
    authority.sign("engine", "engines.example");
    let mock = canned(1);
    mock.settings().authorization = Some("Bearer k1".into());
    let engine = format!(
        "{}[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"e\"\nengine = \"openai\"\n\
         url = \"{}\"\napi_key_file = {:?}\n[auth]\nkeys = [{{ name = \"g\", sha256 = \"{K2}\" }}]\n",
        authority.section("server.tls", "engine"),
        mock.url(),
        authority.file("k1"),
    );
    for key in ["k1", "k2"] {
        std::fs::write(authority.file(key), key).unwrap();
    }
    let engine = crate::support::start(&engine).await;
    engine.wait_ready().await;
    let names = Arc::new(Names::default());
    names.set_addresses(vec![engine.data_addr()]);
    let (key, ca) = (authority.file("k2"), authority.file("ca.pem"));
    let source = SOURCE.replace("engine = \"sglang\"", "engine = \"openai\"");
    let file = File::new("", &format!("{source}http2 = true\napi_key_file = {key:?}\ntls = {{ ca = {ca:?} }}\n"));
    let gateway = start(&file, &names).await;
    until(&gateway, FOUND, |found| found == 1.0).await;
    let shown = Client::admin(&gateway).get("/admin/backends").await.json();
    assert_eq!(shown["backends"][0]["url"], format!("https://{}", engine.data_addr()));
    assert_eq!(Client::data(&gateway).post("/v1/completions", r#"{"model":"tiny"}"#).await.status, 200);
    for gateway in [gateway, engine] {
        gateway.shutdown(PATIENCE).await;
    }
}

#[test]
fn wrong_sources_name_the_key() {
    let key = "models[0].discovery[0]";
    for (from, to, says) in [
        ("engines.example:30000", "engines.example", format!("{key}.dns: 'engines.example' is not host:port")),
        ("engines.example:30000", ":1", format!("{key}.dns: ")),
        ("engines.example:30000", "http://a:1", format!("{key}.dns: ")),
        ("engines.example:30000", "a:0", format!("{key}.dns: ")),
        ("interval_seconds = 0.01", "interval_seconds = 0.0", format!("{key}.interval_seconds: 0")),
        ("ranks = 1", "leave_after = 0", format!("{key}.leave_after: 0")),
        ("ranks = 1", "ranks = 0", format!("{key}.ranks: 0")),
        ("ranks = 1", "rank = 1", "unknown field `rank`".to_owned()),
        ("ranks = 1", "url = \"http://a\"", "models[0].discovery[0].url: set, but".to_owned()),
        ("dns = ", "#", format!("{key}: none of `dns`, `srv` and `kubernetes` is set")),
        #[cfg(not(feature = "kube"))]
        (
            "dns = \"engines.example:30000\"",
            "kubernetes = { namespace = \"prod\", service = \"engines\" }",
            format!("{key}.kubernetes: this semmoe was built without the cargo feature `kube`"),
        ),
        ("round_robin", "affinity", "models[0].tokenizer: must be set".to_owned()),
    ] {
        let error = Config::from_toml(&SOURCE.replace(from, to), std::path::Path::new("")).unwrap_err().to_string();
        assert!(error.contains(&says), "expected '{says}' in '{error}'");
    }
}
