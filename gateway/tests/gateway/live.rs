//! Sampled requests: what the engine is asked, what the client sees, what is counted and kept.

use http::Method;
use http_body_util::BodyExt;
use semmoe_gateway::Running;
use semmoe_mock_engine::{Dialect, SEMMOE, Texts, generated};
use semmoe_tables::{LayerIdx, Profile, TokenId};
use serde_json::{Value, json};

use crate::support::{Answer, Client, Fixture, Mock, PATIENCE, metric, mock_of, of_clients, settled, start, tokenizer};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const TEXTS: [&str; 2] = ["river water boat fish", "king queen castle sword"];

pub(crate) struct Setup {
    pub(crate) engine: Mock,
    pub(crate) gateway: Running,
    pub(crate) client: Client,
    pub(crate) fixture: Fixture,
}

/// Two ranks, all requests sampled unless `sampling` says otherwise.
async fn setup(sampling: &str) -> Setup {
    let fixture = Fixture::new(2);
    let engine = semmoe(&fixture);
    setup_with(engine, fixture, sampling).await
}

/// An engine that generates two tokens, and whose streams are sent in small chunks.
pub(crate) fn engine(fixture: &Fixture, dialect: Dialect) -> Mock {
    let texts = Texts::Model(tokenizer(), None);
    mock_of(fixture, dialect, texts, |settings| (settings.usual_tokens, settings.piece_bytes) = (Some(2), 97))
}

fn semmoe(fixture: &Fixture) -> Mock {
    let engine = engine(fixture, SEMMOE);
    engine.settings().info = Some(fixture.info());
    engine
}

/// How often the body requests routed experts.
fn questions(body: &[u8]) -> usize {
    count(body, b"\"return_routed_experts\"")
}

pub(crate) fn count(body: &[u8], needle: &[u8]) -> usize {
    body.windows(needle.len()).filter(|window| *window == needle).count()
}

/// The first token that the engine generates.
fn first_generated(fixture: &Fixture, prompt: &[u32]) -> u32 {
    generated(prompt, 1, fixture.model.vocab_size)[0]
}

async fn setup_with(engine: Mock, fixture: Fixture, sampling: &str) -> Setup {
    let tables = fixture.write("t", &TEXTS, 0);
    let share = if sampling.contains("share") { "" } else { "share = 1.0\n" };
    // Most tests pin their requests to rank 0.
    let toml = format!(
        "[routing]\ntrust_client_pins = true\n[sampling]\n{share}{sampling}\n{}",
        fixture.affinity(&engine.url(), &tables)
    );
    let gateway = start(&toml).await;
    let client = Client::data(&gateway);
    Setup { engine, gateway, client, fixture }
}

impl Setup {
    pub(crate) async fn outcome(&self, outcome: &str) -> f64 {
        let line = format!("semmoe_sampled_requests_total{{backend=\"pod-a\",outcome=\"{outcome}\"}}");
        metric(&self.gateway, &line).await
    }

    /// Waits until this many samples had the outcome: they are evaluated behind the data plane.
    pub(crate) async fn wait(&self, outcome: &str, count: f64) {
        let wait = async {
            while self.outcome(outcome).await < count {
                tokio::task::yield_now().await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            panic!("{count} of {outcome}: {}", self.samples().await);
        }
        assert_eq!(self.outcome(outcome).await, count);
    }

    async fn samples(&self) -> String {
        let text = Client::admin(&self.gateway).get("/metrics").await.text();
        text.lines().filter(|line| line.starts_with("semmoe_sampled_requests_total")).collect::<Vec<_>>().join("\n")
    }

    pub(crate) async fn metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.gateway, &format!("{name}{{backend=\"pod-a\"{labels}}}")).await
    }

    async fn ids(&self, fault: &str, ids: &[u32]) -> String {
        self.asked(fault, ids, false).await
    }

    async fn streamed(&self, fault: &str, ids: &[u32]) -> String {
        self.asked(fault, ids, true).await
    }

    async fn asked(&self, fault: &str, ids: &[u32], stream: bool) -> String {
        let answer = self.client.mock("/generate", fault, Self::body(ids, stream)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.text()
    }

    fn body(ids: &[u32], stream: bool) -> String {
        json!({ "input_ids": ids, "routed_dp_rank": 0, "stream": stream }).to_string()
    }

    /// The engine's own answer to a request that does not request routed experts.
    pub(crate) async fn clean(&mut self, path: &str, fault: &str, body: &str) -> String {
        self.bodies();
        let gives_routes = std::mem::replace(&mut self.engine.settings().gives_routes, false);
        let answer = Client::at(self.engine.address).mock(path, fault, body.to_owned()).await;
        self.engine.settings().gives_routes = gives_routes;
        assert_eq!((answer.status, self.bodies().len()), (200, 1), "{answer:?}");
        answer.text()
    }

    /// The answer to a sampled request: the engine's own, without anything that the client did not request.
    pub(crate) async fn relayed(&mut self, path: &str, words: &str, body: &str) -> Answer {
        let clean = self.clean(path, "", body).await;
        let answer = self.client.mock(path, words, body.to_owned()).await;
        assert_eq!(answer.body, clean, "{path}, {words}");
        answer
    }

    /// A field of the backend's sampling, as the admin plane shows it.
    pub(crate) async fn shown(&self, field: &str) -> Value {
        Client::admin(&self.gateway).get("/admin/live").await.json()["backends"][0][field].take()
    }

    /// The bodies of clients' requests since the last call.
    pub(crate) fn bodies(&mut self) -> Vec<bytes::Bytes> {
        of_clients(&mut self.engine).into_iter().map(|seen| seen.body).collect()
    }
}

#[tokio::test]
async fn a_share_is_asked_and_nobody_sees_it() {
    let mut setup = setup("share = 0.5").await;
    let tokens: Vec<usize> = TEXTS.iter().map(|text| tokenizer().encode(text).unwrap().len()).collect();
    for turn in 0..4 {
        let at = turn % 2;
        let body = json!({ "text": TEXTS[at] }).to_string();
        let pinned = json!({ "routed_dp_rank": at, "text": TEXTS[at] }).to_string();
        let clean = setup.clean("/generate", "", &pinned).await;
        let answer = setup.client.mock("/generate", "local 1", body).await;
        assert_eq!(answer.body, clean, "turn {turn}");
        assert_eq!(answer.header("x-semmoe-rank"), at.to_string());
        let sent = setup.bodies().remove(0);
        assert_eq!(questions(&sent), turn % 2, "turn {turn}: {sent:?}");
        let sent: Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!((&sent["text"], &sent["routed_dp_rank"]), (&json!(TEXTS[at]), &json!(at)));
    }
    // Streams of the OpenAI routes are not sampled.
    for _ in 0..2 {
        setup.client.post("/v1/completions", json!({ "prompt": TEXTS[0], "stream": true }).to_string()).await;
        assert_eq!(questions(&setup.bodies()[0]), 0);
    }
    setup.wait("observed", 2.0).await;
    assert_eq!(setup.outcome("unfit").await, 1.0);
    assert_eq!(setup.samples().await.lines().count(), 2, "{}", setup.samples().await);
    assert_eq!(setup.metric("semmoe_observed_lar_count", "").await, 2.0);
    assert_eq!(setup.metric("semmoe_observed_lar_sum", "").await, 0.5);
    // T predicts 0.6 for the prompt's tokens, and half for the generated ones.
    let predicted = setup.metric("semmoe_sampled_predicted_lar_sum", "").await / 2.0;
    assert!((0.5..0.6).contains(&predicted), "{predicted}");
    let (layers, k) = (7.0, 4.0);
    let prompt = setup.metric("semmoe_sampled_activations_total", ",phase=\"prompt\",place=\"local\"").await;
    assert_eq!(prompt, 2.0 * tokens[1] as f64 * layers);
    let decode = setup.metric("semmoe_sampled_activations_total", ",phase=\"decode\",place=\"remote\"").await;
    assert_eq!(decode, 2.0 * layers * (k - 1.0));
    assert_eq!((setup.shown("observed_lar").await, setup.shown("sampling").await), (json!(0.25), json!("on")));
    settled(&setup.gateway).await;
}

/// Only the prompt's tokens, because the generated ones are not reported.
#[tokio::test]
async fn completions_are_asked_too() {
    let mut setup = setup("").await;
    let ids = tokenizer().encode(TEXTS[1]).unwrap();
    let body = json!({ "prompt": ids }).to_string();
    let clean = setup.clean(COMPLETIONS, "", &body).await;
    for _ in 0..2 {
        let answer = setup.client.mock(COMPLETIONS, "local 1", body.clone()).await;
        assert_eq!(answer.body, clean);
        assert_eq!(answer.header("x-semmoe-rank"), "1");
        assert_eq!(questions(&setup.bodies()[0]), 1);
    }
    setup.wait("observed", 2.0).await;
    assert_eq!(setup.metric("semmoe_observed_lar_sum", "").await, 0.5);
    let remote = setup.metric("semmoe_sampled_activations_total", ",phase=\"prompt\",place=\"remote\"").await;
    assert_eq!(remote, (2 * ids.len() * 7 * 3) as f64);
    assert_eq!(setup.metric("semmoe_sampled_activations_total", ",phase=\"decode\",place=\"remote\"").await, 0.0);
    for (fault, outcome) in [("more-rows", "wrong_rows"), ("no-routes", "missing")] {
        let before = setup.outcome(outcome).await;
        let answer = setup.client.mock(COMPLETIONS, fault, body.clone()).await;
        assert_eq!(answer.body, clean, "{fault}");
        setup.wait(outcome, before + 1.0).await;
    }
}

#[tokio::test]
async fn streams_are_edited_on_their_way() {
    let mut setup = setup("\n[timeouts]\nidle_seconds = 2").await;
    let clean = setup.clean("/generate", "", &Setup::body(&[1, 2, 3], true)).await;
    assert_eq!(setup.streamed("local 2", &[1, 2, 3]).await, clean);
    setup.wait("observed", 1.0).await;
    assert_eq!(setup.metric("semmoe_observed_lar_sum", "").await, 0.5);
    // The engine falls silent before the end: an error event, and no sample.
    let cut = setup.streamed("falls-silent", &[1, 2, 3]).await;
    assert!(!cut.contains(",\"routed_experts\"") && cut.contains("broke off"), "{cut}");
    setup.wait("unfinished", 1.0).await;
    // The client leaves.
    let body = Setup::body(&[1, 2, 3], true);
    drop(setup.client.open(Method::POST, "/generate", &[("content-type", "application/json")], body).await);
    settled(&setup.gateway).await;
    // The report may have arrived too late to matter.
    let wait = async { while setup.outcome("unfinished").await + setup.outcome("observed").await < 3.0 {} };
    tokio::time::timeout(PATIENCE, wait).await.expect("the third sample is counted");
}

#[tokio::test]
async fn who_asks_gets_what_the_engine_says() {
    let mut setup = setup("").await;
    for question in ["true", "false", "null"] {
        let body = format!("{{\"input_ids\":[1,2],\"return_routed_experts\":{question}}}");
        let answer = setup.client.mock("/generate", "local 3", body.clone()).await;
        let text = answer.text();
        assert_eq!(text.contains(",\"routed_experts\":\""), question == "true", "{text}");
        assert!(answer.headers.contains_key("content-length"), "it was not touched");
        let sent = setup.bodies().remove(0);
        assert_eq!(questions(&sent), 1);
        assert!(sent.ends_with(&body.as_bytes()[1..]), "{sent:?}");
    }
    setup.ids("", &[1]).await;
    setup.wait("observed", 1.0).await;
    assert_eq!(setup.outcome("unfit").await, 3.0);
    assert_eq!(setup.samples().await.lines().count(), 2);
}

#[tokio::test]
async fn engines_that_lie_are_not_believed() {
    let mut setup = setup("max_answer_bytes = 20000").await;
    let many: Vec<u32> = (0..200).collect();
    for (fault, outcome) in [
        ("more-rows", "wrong_rows"),
        ("foreign-expert", "bad_experts"),
        ("same-expert-twice", "bad_experts"),
        ("not-base64", "wrong_rows"),
        ("no-routes", "missing"),
    ] {
        for stream in [false, true] {
            let before = setup.outcome(outcome).await;
            let clean = setup.clean("/generate", "", &Setup::body(&[1, 2, 3], stream)).await;
            assert_eq!(setup.asked(fault, &[1, 2, 3], stream).await, clean, "{fault} {stream}");
            setup.wait(outcome, before + 1.0).await;
        }
    }
    let clean = setup.clean("/generate", "other-prompt", &Setup::body(&[1, 2, 3], false)).await;
    assert_eq!(setup.ids("other-prompt", &[1, 2, 3]).await, clean);
    setup.wait("other_prompt", 1.0).await;
    // In doubt, everything is relayed as received.
    let answer = setup.ids("malformed", &[1, 2, 3]).await;
    assert!(answer.contains(",\"routed_experts\":\"AAAA\",,"), "{answer}");
    setup.wait("malformed", 1.0).await;
    let answer = setup.ids("", &many).await;
    assert!(answer.len() > 20_000 && answer.contains(",\"routed_experts\":\""));
    let answer = setup.streamed("", &many).await;
    assert!(answer.len() > 20_000 && answer.ends_with("data: [DONE]\n\n"));
    setup.wait("too_long", 2.0).await;
    assert_eq!(setup.metric("semmoe_observed_lar_count", "").await, 0.0);
}

#[tokio::test]
async fn an_engine_that_refuses_is_asked_once() {
    let mut setup = setup("").await;
    // It refuses either form: the client's fault, reported in the engine's words.
    let answer = setup.client.mock("/generate", "400", "{\"input_ids\":[1]}").await;
    assert_eq!((answer.status, answer.message().as_str()), (400, "the engine's own words"));
    setup.wait("failed", 1.0).await;
    assert_eq!(setup.bodies().len(), 2);
    assert_eq!(setup.metric("semmoe_sampling_refused", "").await, 0.0);
    let body = Setup::body(&[1, 2], false);
    let clean = setup.clean("/generate", "", &body).await;
    for _ in 0..3 {
        assert_eq!(setup.ids("refuses-routes", &[1, 2]).await, clean);
    }
    let asked: Vec<usize> = setup.bodies().iter().map(|body| questions(body)).collect();
    assert_eq!(asked, [1, 0, 0, 0]);
    setup.wait("refused", 1.0).await;
    assert_eq!(setup.metric("semmoe_sampling_refused", "").await, 1.0);
    assert_eq!(setup.shown("sampling").await, "refused");
    settled(&setup.gateway).await;
}

#[tokio::test]
async fn engines_that_cannot_are_not_asked() {
    for (field, value, asked) in [
        ("enable_return_routed_experts", json!(false), 0),
        ("enable_return_routed_experts", json!(true), 1),
        ("enable_return_routed_experts", Value::Null, 1),
    ] {
        let fixture = Fixture::new(2);
        let engine = semmoe(&fixture);
        engine.report(field, value);
        let mut setup = setup_with(engine, fixture, "").await;
        setup.ids("", &[1]).await;
        assert_eq!(questions(&setup.bodies()[0]), asked);
        let state = if asked == 1 { "on" } else { "cannot be asked" };
        assert_eq!(setup.shown("sampling").await, state);
    }
}

/// Short requests run far below their prediction and long ones a little above it, so that the activations of both
/// together match it.
#[tokio::test]
async fn drift_compares_activations_and_not_requests() {
    let setup = setup("drift_samples = 3").await;
    let short = tokenizer().encode(TEXTS[0]).unwrap();
    let long = short.repeat(8);
    let mut count = 0.0;
    for _ in 0..4 {
        for (words, ids) in [("local 3", &long), ("local 0", &short), ("local 0", &short)] {
            setup.ids(words, ids).await;
            count += 1.0;
            setup.wait("observed", count).await;
            assert_eq!(setup.metric("semmoe_lar_drift", "").await, 0.0, "after {count} requests");
        }
    }
    let predicted = setup.metric("semmoe_sampled_predicted_lar_sum", "").await / count;
    let observed = setup.metric("semmoe_observed_lar_sum", "").await / count;
    assert!(predicted - observed > 0.2, "by requests: {predicted} predicted, {observed} observed");
    let mean = async |side: &str| setup.shown(side).await.as_f64().unwrap();
    let (predicted, observed) = (mean("mean_predicted").await, mean("mean_observed").await);
    assert!((predicted - observed).abs() < 0.05, "by activations: {predicted} predicted, {observed} observed");
}

#[tokio::test]
async fn drift_is_reported_once_and_cleared() {
    let setup = setup("drift_samples = 3").await;
    let ids = tokenizer().encode(TEXTS[0]).unwrap();
    let mut count = 0.0;
    for (words, samples, raised) in [("local 4", 4, 0.0), ("local 0", 4, 1.0), ("local 4", 12, 0.0)] {
        for _ in 0..samples {
            setup.ids(words, &ids).await;
            count += 1.0;
            setup.wait("observed", count).await;
        }
        assert_eq!(setup.metric("semmoe_lar_drift", "").await, raised, "{words}");
        assert_eq!(setup.shown("drift").await["alarm"], raised == 1.0);
    }
    // New tables reset the alarm.
    for _ in 0..4 {
        setup.ids("local 0", &ids).await;
        count += 1.0;
        setup.wait("observed", count).await;
    }
    assert_eq!(setup.shown("compared").await, 24);
    let other = std::fs::read(setup.fixture.write("u", &TEXTS, 0)).unwrap();
    let loaded = Client::admin(&setup.gateway).call(Method::POST, "/admin/tables?backend=pod-a", &[], other).await;
    assert_eq!(loaded.status, 200, "{loaded:?}");
    assert_eq!(setup.metric("semmoe_lar_drift", "").await, 0.0);
    assert_eq!(setup.shown("compared").await, 0);
}

#[tokio::test]
async fn counts_are_kept_as_a_profile() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let sampling = format!("profile_dir = {:?}", folder.path());
    let file = folder.path().join("tiny.profile.safetensors");
    let counted = |token| {
        let profile = Profile::open(&file).unwrap();
        profile.token_count(TokenId::new(token))
    };
    let first = setup(&sampling).await;
    for _ in 0..2 {
        first.ids("local 1", &[5, 6, 5]).await;
    }
    first.wait("observed", 2.0).await;
    assert!(!file.exists());
    let written = Client::admin(&first.gateway).call(Method::POST, "/admin/live/profiles", &[], "").await.json();
    assert_eq!((&written["profiles"][0]["tokens"], &written["profiles"][0]["error"]), (&json!(8), &Value::Null));
    // The prompt and the first generated token; the last one has no route.
    assert_eq!((counted(5), counted(6), counted(first_generated(&first.fixture, &[5, 6, 5]))), (4, 2, 2));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let profile = Profile::open(&file).unwrap();
    assert_eq!(profile.model(), &first.fixture.model);
    let row = profile.row(LayerIdx::new(6), TokenId::new(5));
    assert_eq!((row.experts.len(), row.counts), (4, &[4, 4, 4, 4][..]));
    drop(profile);

    // Requests running at shutdown are counted too, and the next run continues from there.
    first.ids("local 1", &[6, 9]).await;
    let Setup { gateway, fixture, engine, .. } = first;
    gateway.shutdown(PATIENCE).await;
    assert_eq!((counted(5), counted(6)), (4, 3));
    let second = setup_with(engine, fixture, &sampling).await;
    second.streamed("", &[6, 9]).await;
    second.gateway.shutdown(PATIENCE).await;
    assert_eq!((counted(5), counted(6)), (4, 4));
}

/// Whole requests are kept if configured, in their order, in a few private files.
#[tokio::test]
async fn traces_are_kept_for_those_who_ask() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let setup = setup(&format!("trace_dir = {:?}\ntrace_tokens = 6\ntrace_files = 2", folder.path())).await;
    for (count, token) in [5, 6, 7, 8, 9].into_iter().enumerate() {
        setup.ids("local 1", &[token, token]).await;
        setup.wait("observed", count as f64 + 1.0).await;
    }
    // Two requests fill a trace of six tokens; the fifth waits until the gateway stops.
    assert_eq!(metric(&setup.gateway, "semmoe_sampled_trace_writes_total{outcome=\"ok\"}").await, 2.0);
    setup.gateway.shutdown(PATIENCE).await;
    let mut kept = Vec::new();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let trace = semmoe_tables::Trace::open(&path).unwrap();
        let requests = trace.iter().map(|request| (request.token_ids().to_vec(), request.prompt_len()));
        kept.push(requests.collect::<Vec<_>>());
    }
    kept.sort();
    let request = |token| (vec![token, token, first_generated(&setup.fixture, &[token, token])], 2);
    assert_eq!(kept, [vec![request(7), request(8)], vec![request(9)]]);
}

/// An answer that is held back is still one answer: nothing is sent before it is complete, and then all of it.
#[tokio::test]
async fn the_client_gets_one_clean_end() {
    let mut setup = setup("").await;
    let body = Setup::body(&[1, 2, 3], false);
    let clean = setup.clean("/generate", "", &body).await;
    let headers = [("accept-encoding", "gzip"), ("content-type", "application/json")];
    let answer = setup.client.open(Method::POST, "/generate", &headers, body).await;
    assert!(!answer.headers().contains_key("content-length"));
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, clean);
    settled(&setup.gateway).await;
}
