//! Ranks that die or hang: the unit reports it, ends running requests, and nothing hangs. Real processes: this test's
//! own executable, started again as a rank.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use rustix::process::{Pid, Signal, kill_process};
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, request};
use semmoe_tables::Attention;
use semmoe_worker::{TransportChoice, WorkerConfig, run};
use serde_json::{Value, json};
use support::{greedy, model_dir};

const RANK: &str = "SEMMOE_TEST_RANK";
/// A timeout for everything that must not hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// Not a test: runs one rank when the tests below start this executable as one.
#[test]
fn rank_process() {
    let Ok(arguments) = std::env::var(RANK) else { return };
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let (rank, world) = (arguments[0].parse().unwrap(), arguments[1].parse().unwrap());
    let mut config = WorkerConfig::new(model_dir(), rank, world, arguments[2].parse().unwrap());
    config.listen = (rank == 0).then(support::loopback);
    config.exit_on_stdin_eof = true;
    config.collective_timeout = Duration::from_millis(arguments[3].parse().unwrap());
    config.transport = arguments[4].parse().unwrap();
    config.attention = arguments[5].parse().unwrap();
    config.exit_after_loss = arguments[6].parse().ok().map(Duration::from_millis);
    config.experts = arguments[7].parse().unwrap();
    config.both_attentions = arguments[8].parse().unwrap();
    config.switch_groups =
        arguments[9].split(',').filter_map(|groups| groups.parse().ok()).filter(|groups| *groups > 0).collect();
    config.switch_hybrid = arguments[10].parse().ok();
    config.announce = Arc::new(|event| eprintln!("event {}", serde_json::to_string(event).unwrap()));
    let code = match run(config) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("error {error}");
            error.exit_code()
        }
    };
    std::io::stderr().flush().unwrap();
    std::process::exit(i32::from(code));
}

/// The options for all ranks of a unit.
#[derive(Clone, Copy)]
struct Started {
    world: u16,
    collective_ms: u32,
    transport: TransportChoice,
    attention: Attention,
    /// Time to exit after a loss; never if absent.
    exit_ms: Option<u64>,
    experts: &'static str,
    /// Allows attention to switch.
    both_attentions: bool,
    /// Groups that the unit can be switched to; none if 0.
    groups: u16,
    /// Whether the unit can be switched to hybrid nodes of two ranks.
    hybrid: bool,
}

/// The transports under test.
const TRANSPORTS: [TransportChoice; 2] = [TransportChoice::Shm, TransportChoice::Tcp];

impl Started {
    fn patient(world: u16, transport: TransportChoice) -> Self {
        let (attention, experts) = (Attention::Dp, "ep");
        let (exit_ms, both_attentions, groups, hybrid) = (None, false, 0, false);
        Self { world, collective_ms: 120_000, transport, attention, exit_ms, experts, both_attentions, groups, hybrid }
    }
}

struct Rank {
    child: Child,
    /// Separate from the child, whose `wait` would close it.
    stdin: Option<ChildStdin>,
    said: BufReader<ChildStderr>,
}

impl Rank {
    fn start(rank: u16, unit: Started, rendezvous: SocketAddr) -> Self {
        let Started { world, collective_ms, transport, attention, exit_ms, experts, both_attentions, groups, hybrid } =
            unit;
        let exit = exit_ms.map_or_else(|| "never".to_owned(), |after| after.to_string());
        let nodes = if hybrid { format!("{}x2", world / 2) } else { "none".to_owned() };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["rank_process", "--exact", "--nocapture"])
            .env(RANK, format!("{rank} {world} {rendezvous} {collective_ms} {transport} {attention} {exit} {experts} {both_attentions} {groups} {nodes}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stderr.take().unwrap());
        Self { stdin: child.stdin.take(), child, said }
    }

    /// The next line that begins with `word`.
    fn says(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "the rank ended without saying {word}");
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn event(&mut self) -> Value {
        serde_json::from_str(&self.says("event ")).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The exit code, `None` if a signal killed it.
    fn ends(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

/// Kills processes left behind by a failed test.
impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Processes {
    ranks: Vec<Rank>,
    url: BaseUrl,
    client: HttpClient,
}

impl Processes {
    fn start(unit: Started) -> Self {
        let mut first = Rank::start(0, unit, support::loopback());
        let rendezvous = first.event()["rendezvous"].as_str().unwrap().parse().unwrap();
        let mut ranks = vec![first];
        ranks.extend((1..unit.world).map(|rank| Rank::start(rank, unit, rendezvous)));
        let http: SocketAddr = ranks[0].event()["http"].as_str().unwrap().parse().unwrap();
        Self { ranks, url: http.into(), client: HttpClient::default() }
    }

    async fn post(&self, body: &Value) -> (u16, String) {
        let json = Some(body.to_string().into());
        let request = request(http::Method::POST, &self.url, "/generate", json).unwrap();
        let response = self.client.send(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let request = request(http::Method::GET, &self.url, path, None).unwrap();
        let response = self.client.send(request).await.unwrap();
        let status = response.status().as_u16();
        (status, String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    async fn in_flight(&self) -> u64 {
        let limits = AnswerLimits::default();
        support::Metrics(self.client.get_text(&self.url, "/metrics", &limits).await.unwrap())
            .sum("semmoe_requests_in_flight", &[])
    }
}

fn long(rank: usize, stream: bool) -> Value {
    let mut body = greedy(&json!([557, 1712, 298]), 2000);
    body["routed_dp_rank"] = json!(rank);
    body["stream"] = json!(stream);
    body
}

/// Four ranks under load; `strike` makes rank 2 fail. Everything running must end with an error that contains all of
/// `causes`.
async fn under_load(unit: Started, strike: Signal, causes: &[&str]) -> Processes {
    let reported = |text: &str| causes.iter().all(|cause| text.contains(cause));
    // With attention tp there is only one rank to address.
    let long = |rank, stream| long(if unit.attention == Attention::Dp { rank } else { 0 }, stream);
    let unit = Processes::start(unit);
    let (plain, streams) = {
        let bodies = [long(0, false), long(1, true), long(2, true), long(3, true)];
        let requests = futures_util::future::join_all(bodies.iter().map(|body| unit.post(body)));
        let struck = async {
            while unit.in_flight().await < 4 {
                tokio::task::yield_now().await;
            }
            // Wait until streams have begun: then their last event has the cause, not their status.
            while unit.get("/v1/loads").await.1.matches("\"num_used_tokens\":0").count() > 0 {
                tokio::task::yield_now().await;
            }
            unit.ranks[2].signal(strike);
        };
        let both = async { tokio::join!(requests, struck).0 };
        let mut answers = tokio::time::timeout(PATIENCE, both).await.expect("it hangs");
        (answers.remove(0), answers)
    };
    assert!(plain.0 == 503 && reported(&plain.1), "{plain:?}");
    for (status, text) in streams {
        // A stream without a first token gets the status instead.
        let last = if status == 200 { support::events(&text).pop().unwrap() } else { text };
        let last: Value = serde_json::from_str(&last).unwrap();
        assert!(reported(last["error"]["message"].as_str().unwrap()), "{last}");
        assert_eq!(last["error"]["code"], 503);
    }
    for answer in [unit.post(&long(0, false)).await, unit.get("/health").await, unit.get("/v1/loads").await] {
        assert!(answer.0 == 503 && reported(&answer.1), "{answer:?}");
    }
    assert_eq!(unit.in_flight().await, 0);
    assert!(unit.get("/metrics").await.1.contains("semmoe_unit_up 0"));
    unit
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_rank_ends_every_request_with_its_name() {
    for (transport, attention, experts) in [
        (TransportChoice::Shm, Attention::Dp, "ep"),
        (TransportChoice::Tcp, Attention::Tp, "ep"),
        (TransportChoice::Tcp, Attention::Dp, "hybrid:2x2"),
        (TransportChoice::Shm, Attention::Dp, "hybrid:2x2:2"),
    ] {
        let started = Started { attention, experts, ..Started::patient(4, transport) };
        let mut unit = under_load(started, Signal::KILL, &["rank 2 was lost"]).await;
        assert_eq!(unit.ranks[2].ends(), None);
        assert!(unit.ranks[1].says("error ").contains("rank 2 was lost"));
        assert_eq!(unit.ranks[1].ends(), Some(3));
        // Configured to stay, rank 0 answers until it is asked to stop.
        drop(unit.ranks[0].stdin.take());
        assert_eq!(unit.ranks[0].ends(), Some(3));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_hangs_is_lost_after_the_time_limit() {
    // A rank that is one collective ahead may time out on another one that itself waits for rank 2, so the name is
    // uncertain. The time limit exceeds any delay of a busy machine.
    for (transport, experts) in
        [(TransportChoice::Shm, "ep"), (TransportChoice::Tcp, "ep"), (TransportChoice::Tcp, "hybrid:2x2:2")]
    {
        let started = Started { collective_ms: 3000, experts, ..Started::patient(4, transport) };
        let mut unit = under_load(started, Signal::STOP, &["rank ", "did not answer within 3000 ms"]).await;
        assert_eq!(unit.ranks[1].ends(), Some(3));
        unit.ranks[0].signal(Signal::TERM);
        assert_eq!(unit.ranks[0].ends(), Some(3));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_killed_in_silence_is_noticed_without_a_request() {
    for transport in TRANSPORTS {
        let mut unit = Processes::start(Started::patient(2, transport));
        unit.ranks[1].signal(Signal::KILL);
        let noticed = async {
            while unit.get("/health").await.0 == 200 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, noticed).await.expect("the rank did not report the loss");
        assert!(unit.get("/health").await.1.contains("rank 1 was lost"));
        unit.ranks[0].signal(Signal::INT);
        assert_eq!(unit.ranks[0].ends(), Some(3));
    }
}

/// Switches from whole experts and attention dp to another layout and back, without a pause, until the unit fails.
async fn switch_to_and_fro(unit: &Processes, there: &str) -> String {
    for at in 0.. {
        let body = json!({"to": if at % 2 == 0 { there } else { "ep" }}).to_string();
        let request = request(http::Method::POST, &unit.url, "/switch", Some(body.into())).unwrap();
        let response = unit.client.send(request).await.unwrap();
        let status = response.status();
        let answer = response.into_body().collect().await.unwrap().to_bytes();
        if status != 200 {
            assert_eq!(status, 503, "{answer:?}");
            return String::from_utf8(answer.to_vec()).unwrap();
        }
    }
    unreachable!("it continues until it fails")
}

/// A kill and a stall at various moments of a switch, alternating over both transports: the unit ends, names the rank,
/// and nothing hangs. Every third unit has four ranks, as has each that becomes groups.
async fn lost_while_switching(there: &str, moments_ms: &[u64]) {
    let strikes = [(Signal::KILL, "rank 1 was lost"), (Signal::STOP, "did not answer within 2")];
    for case in 0..2 * moments_ms.len() {
        let (strike, cause) = strikes[case % 2];
        let transport = TRANSPORTS[case / 2 % 2];
        let after_ms = moments_ms[case / 2];
        let in_groups = there.starts_with("tp:");
        let world = if case % 3 == 0 || in_groups { 4 } else { 2 };
        let groups = if in_groups { 2 } else { 0 };
        let patient = Started::patient(world, transport);
        let hybrid = there == "dp-hybrid";
        let started = Started { collective_ms: 2000, both_attentions: true, groups, hybrid, ..patient };
        let mut unit = Processes::start(started);
        let bodies: Vec<Value> = (0..world).map(|rank| long(rank.into(), false)).collect();
        let requests = futures_util::future::join_all(bodies.iter().map(|body| unit.post(body)));
        let struck = async {
            while unit.in_flight().await < u64::from(world) {
                tokio::task::yield_now().await;
            }
            let strike = async {
                tokio::time::sleep(Duration::from_millis(after_ms)).await;
                unit.ranks[1].signal(strike);
            };
            tokio::join!(switch_to_and_fro(&unit, there), strike).0
        };
        let both = async { tokio::join!(requests, struck) };
        let (answers, switch) = tokio::time::timeout(PATIENCE, both).await.expect("it hangs");
        for text in answers.iter().map(|(_, text)| text).chain([&switch]) {
            assert!(text.contains(cause), "case {case}: {text}");
        }
        assert!(answers.iter().all(|(status, _)| *status == 503), "case {case}: {answers:?}");
        if let Some(other) = unit.ranks.get_mut(2) {
            assert_eq!(other.ends(), Some(3), "case {case}");
        }
        unit.ranks[0].signal(Signal::TERM);
        assert_eq!(unit.ranks[0].ends(), Some(3), "case {case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_lost_while_experts_move_ends_the_unit_with_its_name() {
    lost_while_switching("dp-tp", &[0, 1, 2, 3, 5, 7, 9, 11, 14, 17, 20, 24]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_lost_while_keys_and_values_move_ends_the_unit_with_its_name() {
    lost_while_switching("tp-ep", &[0, 2, 5, 9, 14, 24]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_lost_while_a_unit_becomes_groups_ends_the_unit_with_its_name() {
    lost_while_switching("tp:2x2", &[0, 3, 9, 17, 30]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_lost_while_experts_move_to_nodes_ends_the_unit_with_its_name() {
    lost_while_switching("dp-hybrid", &[0, 2, 5, 9, 14, 24]).await;
}

/// Exits so that a supervisor restarts it. Requests in flight are answered first, and the exit reports its cause.
#[tokio::test(flavor = "multi_thread")]
async fn rank_0_exits_after_a_loss_by_itself() {
    let started = Started { exit_ms: Some(3000), ..Started::patient(2, TransportChoice::Auto) };
    let mut unit = Processes::start(started);
    let bodies = [long(0, false), long(1, false)];
    let requests = futures_util::future::join_all(bodies.iter().map(|body| unit.post(body)));
    let struck = async {
        while unit.in_flight().await < 2 {
            tokio::task::yield_now().await;
        }
        unit.ranks[1].signal(Signal::KILL);
    };
    let both = async { tokio::join!(requests, struck).0 };
    for (status, text) in tokio::time::timeout(PATIENCE, both).await.expect("it hangs") {
        assert!(status == 503 && text.contains("rank 1 was lost"), "{status} {text}");
    }
    assert!(unit.ranks[0].says("error ").contains("rank 1 was lost"));
    assert_eq!(unit.ranks[0].ends(), Some(3));
}

#[test]
fn by_default_rank_0_does_not_stay_after_a_loss() {
    let config = WorkerConfig::new(model_dir(), 0, 2, support::loopback());
    assert_eq!(config.exit_after_loss, Some(Duration::from_secs(5)));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rank_0_the_others_leave() {
    for transport in TRANSPORTS {
        let mut unit = Processes::start(Started::patient(4, transport));
        unit.ranks[0].signal(Signal::KILL);
        for rank in [1, 2, 3] {
            assert!(unit.ranks[rank].says("error ").contains("rank 0 was lost"));
            assert_eq!(unit.ranks[rank].ends(), Some(3));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_ways_to_ask_for_an_end_are_graceful() {
    type Ask = fn(&mut Processes);
    let asks: [Ask; 4] = [
        |unit| unit.ranks[1].signal(Signal::TERM),
        |unit| unit.ranks[0].signal(Signal::INT),
        |unit| unit.ranks.iter_mut().for_each(|rank| drop(rank.stdin.take())),
        |unit| unit.ranks.iter().for_each(|rank| rank.signal(Signal::INT)),
    ];
    for (index, ask) in asks.iter().enumerate() {
        // In both directions, over both transports.
        let attention = if index < 2 { Attention::Tp } else { Attention::Dp };
        let mut unit = Processes::start(Started { attention, ..Started::patient(4, TRANSPORTS[index % 2]) });
        ask(&mut unit);
        for rank in &mut unit.ranks {
            assert_eq!(rank.ends(), Some(0), "way {index}");
        }
    }
}

/// The unnamed shared-memory files that a process maps.
fn shared_maps(pid: u32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("/memfd:semmoe-worker")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_memory_has_no_name_that_could_stay_behind() {
    let unit = Processes::start(Started::patient(4, TransportChoice::Auto));
    for rank in &unit.ranks {
        let maps = shared_maps(rank.child.id());
        assert_eq!(maps.len(), 1);
        assert!(maps[0].contains(" rw-s "), "{maps:?}");
        // Its file is closed: only processes that mapped it can reach it. (That of the experts stays open, because
        // peers map it at the first switch.)
        let open = std::fs::read_dir(format!("/proc/{}/fd", rank.child.id())).unwrap();
        let targets = open.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        assert_eq!(targets.filter(|target| target.to_string_lossy().contains("memfd:semmoe-worker")).count(), 0);
    }
    assert!(unit.get("/server_info").await.1.contains("\"transport\":\"shm\""));
    let unit = Processes::start(Started::patient(2, TransportChoice::Tcp));
    assert_eq!(shared_maps(unit.ranks[1].child.id()).len(), 0);
    assert!(unit.get("/server_info").await.1.contains("\"transport\":\"tcp\""));
}
