//! Engines that are killed, frozen, restarted, slow, or lie, under load and with clients that leave at random.
//!
//! The law: a request fails only if bytes of its answer were relayed already; then it is cut off, or an event states
//! the cause. No client receives another's bytes. Afterwards all counters are zero, and nothing hangs.

mod child;
mod engine;

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use semmoe_gateway::Running;
use serde_json::{Value, json};

use crate::support::{Client, PATIENCE, metric, settled, until_shown};
use child::Engine;
use engine::Mode;

const CHAT: &str = "/v1/chat/completions";
/// Requests during one fault of one backend.
const BATCH: usize = 16;

/// A good engine's answer to a request.
fn document(id: &Value) -> String {
    json!({ "id": id, "text": format!("{id} ").repeat(50) }).to_string()
}

/// A good engine's answer to a streaming request, as events.
fn events(id: &Value) -> Vec<String> {
    let events = (0..6).map(|at| format!("data: {}\n\n", json!({ "id": id, "at": at })));
    events.chain(["data: [DONE]\n\n".to_owned()]).collect()
}

/// The faults of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Mode(Mode),
    Kill,
    Freeze,
    Restart,
}

/// A seeded generator: a seed reproduces its clients.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

/// The outcome of a request.
#[derive(Debug)]
enum End {
    Whole,
    /// The client left.
    Left,
    /// Bytes of this backend's answer arrived before it ended; for streams with a cause.
    Broken {
        backend: String,
    },
    /// The document is shorter than it should be, but matches its declared length.
    Cheated {
        backend: String,
    },
}

/// One request: read to its end, or abandoned after `leave` chunks.
async fn ask(client: Client, id: u64, streams: bool, leave: Option<u64>) -> End {
    let id = json!(format!("request-{id}"));
    let body = json!({ "id": id, "stream": streams }).to_string();
    let open = client.open(Method::POST, CHAT, &[("content-type", "application/json")], body);
    let answer = match leave {
        // Before an answer arrives, or a moment later.
        Some(0) => match tokio::time::timeout(Duration::from_millis(1), open).await {
            Err(_) => return End::Left,
            Ok(answer) => answer,
        },
        _ => tokio::time::timeout(PATIENCE, open).await.unwrap_or_else(|_| panic!("{id} hangs before its answer")),
    };
    let (head, mut body) = answer.into_parts();
    let backend = head.headers.get("x-semmoe-backend").map_or("", |name| name.to_str().unwrap()).to_owned();
    let (mut text, mut pieces, mut clean) = (Vec::new(), 0, true);
    loop {
        if leave == Some(pieces) {
            return End::Left;
        }
        let next = tokio::time::timeout(PATIENCE, body.frame()).await;
        match next.unwrap_or_else(|_| panic!("{id} hangs after {text:?}")) {
            None => break,
            Some(Err(_)) => {
                clean = false;
                break;
            }
            Some(Ok(frame)) => text.extend_from_slice(&frame.into_data().unwrap()),
        }
        pieces += 1;
    }
    let text = String::from_utf8(text).unwrap();
    assert_eq!(head.status, 200, "{id} failed though nothing of an answer was relayed: {text}");
    let expected = if streams { events(&id).concat() } else { document(&id) };
    if clean && text == expected {
        return End::Whole;
    }
    if !streams {
        assert!(expected.starts_with(&text), "{id} got another one's bytes: {text}");
        return if clean { End::Cheated { backend } } else { End::Broken { backend } };
    }
    let (events, error) = text.rsplit_once("data: {\"error\":").unwrap_or_else(|| panic!("{id} has no cause: {text}"));
    assert!(clean && expected.starts_with(events) && (events.is_empty() || events.ends_with("\n\n")), "{id}: {text}");
    assert!(error.contains("broke off: "), "{id}: {error}");
    End::Broken { backend }
}

fn configuration(engines: &[Engine], queue: &str) -> String {
    let backend = |(at, engine): (usize, &Engine)| {
        format!(
            "[[models.backends]]\nname = \"pod-{at}\"\nengine = \"sglang\"\nurl = \"http://127.0.0.1:{}\"\nranks = 2\n",
            engine.port
        )
    };
    let backends: String = engines.iter().enumerate().map(backend).collect();
    format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
         [health]\ninterval_seconds = 0.05\ntimeout_seconds = 0.5\nunhealthy_after = 2\nbusy_seconds = 1\n\
         [timeouts]\nidle_seconds = 1\n[retry]\nbudget_per_second = 1000\n\
         [breaker]\nopen_seconds = 0.05\nlongest_seconds = 0.1\n{queue}\
         [[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n{backends}"
    )
}

struct Field {
    engines: Vec<Engine>,
    gateway: Arc<Running>,
    client: Client,
    dice: Dice,
    asked: u64,
}

impl Field {
    async fn new(seed: u64, queue: &str) -> Self {
        let engines: Vec<Engine> = (0..3).map(|_| Engine::start()).collect();
        let config = semmoe_gateway::Config::from_toml(&configuration(&engines, queue), std::path::Path::new(""));
        let gateway = Arc::new(semmoe_gateway::Gateway::start(config.unwrap()).await.unwrap());
        let client = Client::data(&gateway);
        Self { engines, gateway, client, dice: Dice(seed), asked: 0 }
    }

    /// Half of the clients leave, early or late.
    fn send(&mut self) -> tokio::task::JoinHandle<End> {
        self.asked += 1;
        let (streams, leaves, when) = (self.dice.roll(2) == 0, self.dice.roll(2) == 0, self.dice.roll(4));
        tokio::spawn(ask(self.client.clone(), self.asked, streams, leaves.then_some(when)))
    }

    /// A batch of requests with the fault in its middle; afterwards the backend recovers.
    async fn endure(&mut self, at: usize, fault: Fault) {
        let mut calls: Vec<_> = (0..BATCH / 2).map(|_| self.send()).collect();
        match fault {
            Fault::Mode(mode) => self.engines[at].behave(mode),
            Fault::Kill => self.engines[at].kill(),
            Fault::Freeze => self.engines[at].freeze(),
            Fault::Restart => self.engines[at].restart(),
        }
        calls.extend((0..BATCH / 2).map(|_| self.send()));
        let bad = format!("pod-{at}");
        for call in calls {
            match call.await.unwrap() {
                End::Whole | End::Left => {}
                End::Broken { backend } => assert_eq!(backend, bad, "{fault:?} of another one"),
                End::Cheated { backend } => assert_eq!((backend, fault), (bad.clone(), Fault::Mode(Mode::Short))),
            }
        }
        match fault {
            Fault::Mode(_) => self.engines[at].behave(Mode::Good),
            Fault::Kill => self.engines[at].restart(),
            Fault::Freeze => self.engines[at].thaw(),
            Fault::Restart => {}
        }
        // A dead engine may not have been noticed yet.
        let name = bad.as_str();
        until_shown(&self.gateway, name, |pod| pod["healthy"] == true && pod["breaker"]["state"] != "open").await;
    }

    /// Waits until everything is as before the first request.
    async fn at_rest(&self) {
        settled(&self.gateway).await;
        let shown = Client::admin(&self.gateway).get("/admin/backends").await.json();
        for backend in shown["backends"].as_array().unwrap() {
            assert_eq!(backend["in_flight_requests"], 0, "{backend}");
            for rank in backend["ranks"].as_array().unwrap() {
                let counts = [&rank["in_flight_requests"], &rank["in_flight_tokens"], &rank["pending_tokens"]];
                assert_eq!(counts, [&json!(0), &json!(0), &json!(0)], "{backend}");
            }
        }
        assert_eq!(metric(&self.gateway, "semmoe_queue_depth{model=\"tiny\"}").await, 0.0);
    }
}

async fn chaos(seed: u64, queue: &str, faults: &[Fault]) {
    let mut field = Field::new(seed, queue).await;
    for fault in faults {
        for at in 0..field.engines.len() {
            field.endure(at, *fault).await;
        }
    }
    field.at_rest().await;
    // Each backend serves again.
    let mut seen = std::collections::BTreeSet::new();
    let served = async {
        while seen.len() < 3 {
            let answer = field.client.post(CHAT, "{\"id\":\"last\"}").await;
            assert_eq!(answer.status, 200, "{answer:?}");
            seen.insert(answer.header("x-semmoe-backend").to_owned());
        }
    };
    tokio::time::timeout(PATIENCE, served).await.expect("all backends serve again");
    field.at_rest().await;
}

const PROCESSES: [Fault; 3] = [Fault::Kill, Fault::Freeze, Fault::Restart];

fn lies() -> Vec<Fault> {
    Mode::ALL.into_iter().map(Fault::Mode).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_die_freeze_and_return() {
    chaos(1, "", &PROCESSES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_die_while_requests_wait_for_room() {
    chaos(2, "[queue]\nmax_in_flight = 2\n", &PROCESSES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_lie() {
    chaos(3, "", &lies()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_lie_while_requests_wait_for_room() {
    chaos(4, "[queue]\nmax_in_flight = 2\n", &lies()).await;
}
