//! Many switches leak nothing: memory, mappings, descriptors, pages, counts. Each test measures its whole process, so
//! they take turns.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that shows its figures")]

mod support;

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::future::join_all;
use semmoe_worker::KvBudget;
use serde_json::{Value, json};
use support::{Metrics, Unit, golden, greedy};
use tokio::sync::Mutex;

static TURN: Mutex<()> = Mutex::const_new(());

/// Resources that this process holds.
#[derive(Debug)]
struct Held {
    mappings: usize,
    descriptors: usize,
    resident_kb: usize,
}

impl Held {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            resident_kb: resident.trim().strip_suffix(" kB").unwrap().parse().unwrap(),
        }
    }

    /// The smallest of each, which stays, whatever a running switch or request holds.
    fn smallest(all: &[Self]) -> Self {
        let smallest = |of: fn(&Self) -> usize| all.iter().map(of).min().unwrap();
        Self {
            mappings: smallest(|held| held.mappings),
            descriptors: smallest(|held| held.descriptors),
            resident_kb: smallest(|held| held.resident_kb),
        }
    }

    /// Threads and connections vary slightly, and so does memory, by `slack_kb`; a leak would add something per switch.
    fn is_flat_since(&self, before: &Self, slack_kb: usize) {
        assert!(self.mappings < before.mappings + 50, "{before:?} {self:?}");
        assert!(self.descriptors < before.descriptors + 20, "{before:?} {self:?}");
        assert!(self.resident_kb < before.resident_kb + slack_kb, "{before:?} {self:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_switches_leave_memory_and_counts_flat() {
    let _turn = TURN.lock().await;
    let unit = Unit::start(2);
    let prompt = &golden()[0];
    let mut before = None;
    for epoch in 1..=220 {
        let to = if epoch % 2 == 1 { "dp-tp" } else { "ep" };
        assert_eq!(unit.ok("/switch", &json!({"to": to, "if_epoch": epoch - 1})).await["epoch"], epoch);
        if epoch % 20 == 0 {
            let body = greedy(&prompt["input_ids"], 16);
            assert_eq!(unit.ok("/generate", &body).await["output_ids"], prompt["greedy_16"]);
        }
        if epoch == 20 {
            before = Some(Held::now());
        }
    }
    Held::now().is_flat_since(&before.unwrap(), 16_384);
    let metrics = unit.metrics().await;
    assert_eq!(metrics.sum("semmoe_switch_total", &[("outcome", "committed")]), 220);
    assert_eq!(metrics.sum("semmoe_requests_in_flight", &[]), 0);
    unit.stop(0);
}

const WORLD: u16 = 4;
const CLIENTS: u64 = 12;
/// Pages of a rank with attention dp, of 64 tokens each: so few that prefixes soon fill them.
const PAGES: u64 = 40;
const MAX_PROMPT_TOKENS: u32 = 100;
const MAX_ANSWER_TOKENS: u32 = 24;
const GROUPS: &str = "tp:2x2";
const HYBRID: &str = "dp-hybrid";
/// Each switch between any two of ep, tp, groups and hybrid nodes, in both directions.
const TOUR: [&str; 12] = ["tp", "ep", GROUPS, "ep", HYBRID, "tp", GROUPS, "tp", HYBRID, GROUPS, HYBRID, "ep"];

/// Requests and tokens of all clients.
#[derive(Default)]
struct Asked {
    stop: AtomicBool,
    requests: AtomicU64,
    prompt_tokens: AtomicU64,
    answer_tokens: AtomicU64,
}

impl Asked {
    fn note(&self, prompt: usize, answer: u32) {
        self.prompt_tokens.fetch_add(prompt as u64, Ordering::Relaxed);
        self.answer_tokens.fetch_add(answer.into(), Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// One client's requests, one after the other: golden prompts, and others with common prefixes.
    async fn keep_asking(&self, unit: &Unit, client: u64) {
        let (golden, mut random) = (golden(), fastrand::Rng::with_seed(client));
        while !self.stop.load(Ordering::Relaxed) {
            let known = &golden[random.usize(..golden.len())];
            let (prompt, new) = match random.bool() {
                true => (known["input_ids"].clone(), 16),
                false => (json!(shared_prefix_prompt(&mut random)), random.u32(1..=MAX_ANSWER_TOKENS)),
            };
            let mut body = greedy(&prompt, new);
            body["stream"] = json!(random.bool());
            if random.u8(..3) == 0 {
                body["routed_dp_rank"] = json!(random.u16(..WORLD));
            }
            let answer = answer(unit, &body).await;
            assert_eq!(answer.as_array().unwrap().len(), new as usize, "client {client}: {answer}");
            if prompt == known["input_ids"] {
                assert_eq!(answer, known["greedy_16"], "client {client}");
            }
            self.note(prompt.as_array().unwrap().len(), new);
        }
    }
}

fn shared_prefix_prompt(random: &mut fastrand::Rng) -> Vec<u32> {
    let (family, length) = (random.u32(..3), random.u32(30..=MAX_PROMPT_TOKENS));
    (0..length).map(|at| if at < 64 { at * 7 % 900 + family } else { random.u32(10..9000) }).collect()
}

/// The tokens of an answer. Each event of a stream continues the one before.
async fn answer(unit: &Unit, body: &Value) -> Value {
    if body["stream"] == json!(false) {
        return unit.ok("/generate", body).await["output_ids"].clone();
    }
    let events = unit.stream("/generate", body).await;
    let (end, events) = events.split_last().unwrap();
    assert_eq!(end, "[DONE]");
    let ids = events.iter().map(|event| serde_json::from_str::<Value>(event).unwrap()["output_ids"].clone());
    let ids: Vec<Value> = ids.collect();
    let continues = |a: &Value, b: &Value| b.as_array().unwrap().starts_with(a.as_array().unwrap());
    assert!(ids.is_sorted_by(continues), "{ids:?}");
    ids.last().unwrap().clone()
}

fn pages(metrics: &Metrics, state: &str) -> u64 {
    metrics.sum("semmoe_kv_pages", &[("state", state)])
}

/// Switches a unit of four ranks under constant load.
async fn tours_leave_nothing_behind(tours: usize) {
    let switches = tours * TOUR.len();
    let _turn = TURN.lock().await;
    let unit = Unit::start_with(WORLD, |config| {
        (config.both_attentions, config.switch_groups) = (true, vec![2]);
        config.switch_hybrid = Some("2x2".parse().unwrap());
        config.limits.kv = KvBudget::Tokens(PAGES as usize * 64);
    });
    let asked = Asked::default();
    let clients = join_all((0..CLIENTS).map(|client| asked.keep_asking(&unit, client)));
    let operator = async {
        let mut held = Vec::new();
        for (done, to) in TOUR.into_iter().cycle().take(switches).enumerate() {
            let answered = asked.requests.load(Ordering::Relaxed);
            let status = unit.ok("/switch", &json!({"to": to, "if_epoch": done})).await;
            assert_eq!((&status["state"], &status["layout"]), (&json!("stable"), &json!(to)), "{status}");
            while asked.requests.load(Ordering::Relaxed) < answered + 4 {
                tokio::task::yield_now().await;
            }
            live_pages_are_those_of_running_requests(&unit.metrics().await);
            held.push(Held::now());
        }
        held.chunks(switches / 6).for_each(|part| println!("{:?}", Held::smallest(part)));
        let [_, middle, last] = [0, 1, 2].map(|third| Held::smallest(&held[third * switches / 3..][..switches / 3]));
        last.is_flat_since(&middle, 65_536);
        asked.stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(clients, operator);
    unit.quiet().await;
    every_token_was_computed_once(&unit.metrics().await, &asked);
    let metrics = unit.metrics().await;
    assert_eq!(metrics.sum("semmoe_switch_total", &[("outcome", "committed")]), switches as u64);
    assert_eq!(metrics.sum("semmoe_switch_total", &[]), switches as u64);
    let states = ["used", "cached", "free"].map(|state| pages(&metrics, state));
    assert_eq!((states[0], states[1] + states[2]), (0, u64::from(WORLD) * PAGES));
    unit.end();
}

/// A page that a switch forgot to free would stay live in each later layout.
fn live_pages_are_those_of_running_requests(metrics: &Metrics) {
    let of_request = u64::from(MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS).div_ceil(64);
    let most = CLIENTS * of_request * u64::from(WORLD);
    assert!(pages(metrics, "used") <= most, "{} pages, {most} at most", pages(metrics, "used"));
}

/// No request was lost, and none was run twice: all prompts were computed or found in the cache, and so was each token
/// but the last of every answer.
fn every_token_was_computed_once(metrics: &Metrics, asked: &Asked) {
    let [requests, prompts, answers] =
        [&asked.requests, &asked.prompt_tokens, &asked.answer_tokens].map(|count| count.load(Ordering::Relaxed));
    let phase = |phase| metrics.sum("semmoe_tokens_total", &[("phase", phase)]);
    let cached = metrics.sum("semmoe_cached_prompt_tokens_total", &[]);
    println!("{requests} requests, {prompts} prompt tokens, {answers} answer tokens");
    assert_eq!((phase("prefill") + cached, phase("decode")), (prompts, answers - requests));
}

#[tokio::test(flavor = "multi_thread")]
async fn switches_between_all_layouts_under_load_leave_nothing_behind() {
    tours_leave_nothing_behind(5).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "three minutes"]
async fn a_thousand_switches_between_all_layouts_under_load_leave_nothing_behind() {
    tours_leave_nothing_behind(84).await;
}
