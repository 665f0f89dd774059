//! Mock engines, tables for them, and a client of the gateway.
//!
//! The request header `x-mock`, which the gateway forwards, selects the mock's behaviour.

pub(crate) mod certs;
pub(crate) mod files;
mod ranked;
mod schema;
mod tables;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use semmoe_engines::http::{AnswerBody, BaseUrl, ClientSettings, HttpClient, HttpError};
use semmoe_gateway::{Config, Gateway, Running};
use serde_json::Value;
use tokio::task::JoinHandle;

pub(crate) use ranked::{mock_of, of_clients, ran, ranked, sent_pins, sglang, vllm};
pub(crate) use schema::check as check_schema;
pub(crate) use semmoe_mock_engine::{Mock, Seen, SwitchFault, Worker, canned, canned_as};
pub(crate) use tables::{Fixture, MODEL_DIR, tokenizer};

/// Longer than any test takes; a test that waits for it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Step times in milliseconds of both layouts, also used by the configuration: TP is faster below 16 sequences.
pub(crate) const CURVES: &str = "tp_step_ms = [[1, 1.0], [16, 10.0], [2048, 1000.0]]\n\
                                 ep_step_ms = [[1, 5.0], [16, 10.0], [2048, 100.0]]\n\
                                 tp_prefill_rate = 10000.0\nep_prefill_rate = 10000.0\n";

/// A gateway with two free ports in front of the models of `toml`.
pub(crate) async fn start(toml: &str) -> Running {
    Gateway::start(config(toml)).await.unwrap()
}

pub(crate) fn config(toml: &str) -> Config {
    bare_config(&format!("[health]\ninterval_seconds = 0.02\nunhealthy_after = 1\n{toml}"))
}

/// A gateway with two free ports, and defaults for everything that `rest` does not set.
pub(crate) async fn start_bare(rest: &str) -> Running {
    Gateway::start(bare_config(rest)).await.unwrap()
}

fn bare_config(rest: &str) -> Config {
    let text = format!("[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n{rest}");
    Config::from_toml(&text, Path::new("")).unwrap()
}

/// A gateway in front of mock engines, and a client of it.
pub(crate) struct Fleet<const N: usize> {
    pub(crate) mocks: [Mock; N],
    pub(crate) gateway: Running,
    pub(crate) client: Client,
}

impl<const N: usize> Fleet<N> {
    async fn start(mocks: [Mock; N], toml: &str) -> Self {
        let gateway = start(toml).await;
        Self { mocks, client: Client::data(&gateway), gateway }
    }
}

/// [`several`] backends of two ranks; `rules` precedes their model.
pub(crate) async fn fleet<const N: usize>(rules: &str) -> Fleet<N> {
    let mocks = [(); N].map(|()| canned(2));
    let toml = format!("{rules}{}", several(&mocks.each_ref()));
    Fleet::start(mocks, &toml).await
}

/// A [`plain_model`] of one backend; `rules` precedes it.
pub(crate) async fn alone(ranks: u16, rules: &str) -> Fleet<1> {
    let mock = canned(ranks);
    let toml = format!("{rules}{}", plain_model(&mock, ranks));
    Fleet::start([mock], &toml).await
}

/// A gateway with affinity in front of a mock engine that runs the tables' placement, and a client of it.
pub(crate) struct Affine {
    pub(crate) mock: Mock,
    pub(crate) fixture: Fixture,
    pub(crate) gateway: Running,
    pub(crate) client: Client,
}

/// Text `i` prefers rank `i`; `rules` precedes the model.
pub(crate) async fn affine(ranks: u16, texts: &[&str], rules: &str) -> Affine {
    let fixture = Fixture::new(ranks);
    let mock = canned_as(fixture.info());
    let tables = fixture.write("t", texts, 0);
    let gateway = start(&format!("{rules}{}", fixture.affinity(&mock.url(), &tables))).await;
    Affine { mock, fixture, client: Client::data(&gateway), gateway }
}

/// Two texts whose words prefer different ranks.
pub(crate) const TEXTS: [&str; 2] = ["river water boat fish", "king queen castle sword"];

/// A gateway whose backend `pod-a` runs the tables `first` of the fixture's folder, which is the tables root; text `i`
/// prefers rank `i`. `sections` precedes the models.
pub(crate) async fn reloadable(mock: &Mock, fixture: &Fixture, sections: &str) -> Running {
    mock.settings().info = Some(fixture.info());
    let tables = fixture.write("first", &TEXTS, 0);
    let toml = fixture.affinity(&mock.url(), &tables);
    let root = fixture.folder.path().display();
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntables_root = \"{root}\"\n\
         [health]\ninterval_seconds = 0.02\n{sections}\n{toml}"
    );
    let file = fixture.folder.path().join("semmoe.toml");
    std::fs::write(&file, text).unwrap();
    Gateway::start(Config::load(&file).unwrap()).await.unwrap()
}

/// One model with round robin over one backend.
pub(crate) fn plain_model(backend: &Mock, ranks: u16) -> String {
    format!(
        "[[models]]\nname = \"tiny\"\naliases = [\"small\"]\npolicy = \"round_robin\"\n\
         [[models.backends]]\nname = \"pod-a\"\nengine = \"sglang\"\nurl = \"{}\"\nranks = {ranks}\n",
        backend.url()
    )
}

/// One model with round robin over several backends of two ranks: `pod-a`, `pod-b`, ...
pub(crate) fn several(mocks: &[&Mock]) -> String {
    let backend = |(name, mock): (char, &&Mock)| {
        format!(
            "[[models.backends]]\nname = \"pod-{name}\"\nengine = \"sglang\"\nurl = \"{}\"\nranks = 2\n",
            mock.url()
        )
    };
    let backends: String = ('a'..).zip(mocks).map(backend).collect();
    format!("[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n{backends}")
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    /// `error.message`, for answers in OpenAI's form.
    pub(crate) fn message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_else(|| panic!("no error in {:?}", self.body)).to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// A client of one listener.
#[derive(Clone)]
pub(crate) struct Client {
    http: HttpClient,
    base: BaseUrl,
}

impl Client {
    pub(crate) fn data(gateway: &Running) -> Self {
        Self::at(gateway.data_addr())
    }

    pub(crate) fn admin(gateway: &Running) -> Self {
        Self::at(gateway.admin_addr())
    }

    pub(crate) fn at(address: SocketAddr) -> Self {
        Self { http: HttpClient::default(), base: address.into() }
    }

    /// A client with other connection settings.
    pub(crate) fn with(settings: &ClientSettings, url: &str) -> Self {
        Self { http: HttpClient::new(settings), base: url.parse().unwrap() }
    }

    /// The error when no connection can be made.
    pub(crate) async fn refusal(&self, path: &str) -> String {
        self.try_open(Method::GET, path, &[], "").await.unwrap_err().to_string()
    }

    pub(crate) async fn try_open(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Response<AnswerBody>, HttpError> {
        let mut request = Request::builder().method(method).uri(self.base.join(path).unwrap());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.http.send(request.body(Full::new(body.into())).unwrap()).await
    }

    /// Sends and returns as soon as the response head arrives.
    pub(crate) async fn open(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response<AnswerBody> {
        self.try_open(method, path, headers, body).await.unwrap()
    }

    /// Sends and reads the whole answer.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let (head, body) = self.open(method, path, headers, body).await.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: head.status.as_u16(), headers: head.headers, body }
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        self.call(Method::POST, path, &[("content-type", "application/json")], body).await
    }

    /// This many empty requests, `at_once` at a time.
    pub(crate) async fn post_many(&self, path: &str, requests: usize, at_once: usize) {
        let calls = futures_util::stream::iter(0..requests).map(|_| self.post(path, "{}"));
        calls.buffer_unordered(at_once).for_each(async |_| ()).await;
    }

    pub(crate) async fn mock(&self, path: &str, behaviour: &str, body: impl Into<Bytes>) -> Answer {
        self.call(Method::POST, path, &[("content-type", "application/json"), ("x-mock", behaviour)], body).await
    }

    /// Sends without waiting for the answer.
    pub(crate) fn begin(&self, path: &'static str, body: impl Into<Bytes> + Send + 'static) -> JoinHandle<Answer> {
        let client = self.clone();
        tokio::spawn(async move { client.post(path, body).await })
    }

    pub(crate) fn begin_with(
        &self,
        path: &'static str,
        behaviour: &'static str,
        body: impl Into<Bytes> + Send + 'static,
    ) -> JoinHandle<Answer> {
        let client = self.clone();
        tokio::spawn(async move { client.mock(path, behaviour, body).await })
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, &[], Bytes::new()).await
    }
}

/// Waits for answers, which must be successful.
pub(crate) async fn all_succeed(calls: impl IntoIterator<Item = JoinHandle<Answer>>) {
    for call in calls {
        assert_eq!(call.await.unwrap().status, 200);
    }
}

/// The next frame of data, as text.
pub(crate) async fn next_frame(response: &mut Response<AnswerBody>) -> Option<String> {
    let frame = tokio::time::timeout(PATIENCE, response.frame()).await.expect("a frame in time")?;
    Some(String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap())
}

/// The text of all remaining frames.
pub(crate) async fn rest_of(response: &mut Response<AnswerBody>) -> String {
    let mut rest = String::new();
    while let Some(frame) = next_frame(response).await {
        rest += &frame;
    }
    rest
}

/// The metrics page.
pub(crate) async fn metrics(gateway: &Running) -> String {
    Client::admin(gateway).get("/metrics").await.text()
}

/// Value of a metric line, 0 if absent.
pub(crate) async fn metric(gateway: &Running, line: &str) -> f64 {
    let text = metrics(gateway).await;
    text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok()).unwrap_or(0.0)
}

/// A backend as the admin plane shows it.
pub(crate) async fn shown(gateway: &Running, backend: &str) -> Value {
    let shown = Client::admin(gateway).get("/admin/backends").await.json();
    let found = shown["backends"].as_array().unwrap().iter().find(|found| found["name"] == backend);
    found.unwrap_or_else(|| panic!("no {backend} in {shown}")).clone()
}

/// Waits until the admin plane shows the wanted state of a backend.
pub(crate) async fn until_shown(gateway: &Running, backend: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let wait = async {
        loop {
            let shown = shown(gateway, backend).await;
            if wanted(&shown) {
                return shown;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the backend is shown as wanted")
}

/// Requests in flight on every rank, by the accounts and by the gauges.
pub(crate) async fn in_flight(gateway: &Running) -> (u64, f64) {
    let backends = Client::admin(gateway).get("/admin/backends").await.json();
    let ranks =
        backends["backends"].as_array().unwrap().iter().flat_map(|backend| backend["ranks"].as_array().unwrap());
    let accounts = ranks.map(|rank| {
        let tokens = rank["in_flight_tokens"].as_u64().unwrap();
        let requests = rank["in_flight_requests"].as_u64().unwrap();
        assert_eq!(tokens == 0, requests == 0, "{rank}");
        requests
    });
    let accounts = accounts.sum();
    let text = metrics(gateway).await;
    let gauges = text.lines().filter(|line| line.starts_with("semmoe_rank_inflight{"));
    (accounts, gauges.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum())
}

/// Waits until nothing is in flight: a gateway notices a disconnect a moment after the client caused it.
pub(crate) async fn settled(gateway: &Running) {
    eventually("in-flight counts return to zero", async || in_flight(gateway).await == (0, 0.0)).await;
}

/// Waits until `is_so`; on a time-out the panic names `what`.
pub(crate) async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let wait = async {
        while !is_so().await {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

/// A client that leaves once its request is at the engine, which then notices it.
pub(crate) async fn leave_before_the_answer(client: &Client, mock: &mut Mock, path: &'static str) {
    let call = client.begin_with(path, "hang", "{}");
    mock.next().await;
    call.abort();
    mock.next_gone().await;
}
