//! The simulator against hand-computed cases, invariants on random loads, and the bars that are quick to check.

use proptest::prelude::*;
use semmoe_planner::policy::{
    Adaptive, ByLayout, Decision, Event, Fixed, Layout, Point, Settings, StepCurve, SwitchPolicy, UnitView,
};

use crate::contest::{Cell, Results, Slo, compete};
use crate::engines::{self, CHUNK_TOKENS, Engine, MAX_SEQUENCES, Rates, room_tokens, switch_cost};
use crate::report::{Label, Line, margin};
use crate::traces::{Kind, Part, Request, crossing};
use crate::unit::{Outcome, Setup, run};

const EQUAL: Rates = ByLayout { tp: 28e3, ep: 28e3 };
const FASTER_EP: Rates = ByLayout { tp: 28e3, ep: 45e3 };
const RIGHT: ByLayout<f64> = ByLayout { tp: 1.0, ep: 1.0 };

fn engine(name: &str) -> Engine {
    engines::published().unwrap().into_iter().find(|engine| engine.name == name).unwrap()
}

fn request(at: f64, prompt_tokens: u32, output_tokens: u32) -> Request {
    Request { at, prompt_tokens, output_tokens, priority: 0 }
}

/// The bursty load on TensorRT-LLM's curve, with this head start for priority 1.
fn by_class(priority_seconds: f64) -> Results {
    let slo = Slo { ttft_seconds: 2.0, tpot_seconds: 0.08 };
    let trtllm = engine("trtllm");
    let part = Part::Judge;
    let cell =
        Cell { engine: &trtllm, rates: EQUAL, kind: Kind::Bursty, seed: 1, part, slo, priority_seconds, wrong: RIGHT };
    compete(cell, &Settings::default(), false).unwrap()
}

#[test]
fn the_class_order_lets_urgent_requests_pass_at_the_same_throughput() {
    let (arrival, class) = (by_class(0.0).fixed.ep, by_class(60.0).fixed.ep);
    assert!(arrival.urgent_ttft_seconds > 0.9 * arrival.ttft_seconds, "{arrival:?}");
    assert!(class.urgent_ttft_seconds < 0.1 * class.ttft_seconds, "{class:?}");
    assert!((class.tokens_per_second / arrival.tokens_per_second - 1.0).abs() < 0.01);
}

/// Two waiting classes, a head start of 1 s.
#[test]
fn a_head_start_is_all_that_a_priority_gives() {
    let urgent = |at| Request { priority: 1, ..request(at, 8192, 1) };
    // The first one's prompt runs while the others arrive.
    let requests =
        [request(0.0, 16_384, 1), request(0.01, 8192, 1), urgent(0.02), request(0.03, 8192, 1), urgent(1.02)];
    let vllm = engine("vllm");
    let setup = Setup {
        engine: &vllm,
        rates: EQUAL,
        cost: &switch_cost(),
        room_tokens: room_tokens(),
        requests: &requests,
        priority_seconds: 1.0,
        seed: 3,
    };
    let served = run(setup, Layout::Tp, &mut Fixed { layout: Layout::Tp }).served;
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by(|a, b| served[*a].first.total_cmp(&served[*b].first));
    assert_eq!(order, [0, 2, 1, 4, 3], "{served:?}");
}

fn play(engine: &Engine, rates: Rates, requests: &[Request], policy: &mut dyn SwitchPolicy) -> Outcome {
    let setup = Setup {
        engine,
        rates,
        cost: &switch_cost(),
        room_tokens: room_tokens(),
        requests,
        priority_seconds: 0.0,
        seed: 3,
    };
    run(setup, Layout::Tp, policy)
}

fn adaptive(engine: &Engine, rates: Rates) -> Adaptive {
    let settings = Settings { chunk_tokens: CHUNK_TOKENS, max_sequences: MAX_SEQUENCES, ..Settings::default() };
    Adaptive::new(settings, engine.prior(rates, RIGHT).unwrap(), switch_cost(), room_tokens()).unwrap()
}

fn results(engine: &Engine, rates: Rates, kind: Kind, wrong: ByLayout<f64>) -> Results {
    let slo = Slo { ttft_seconds: 2.0, tpot_seconds: 0.08 };
    let cell = Cell { engine, rates, kind, seed: 1, part: Part::Judge, slo, priority_seconds: 0.0, wrong };
    compete(cell, &Settings::default(), false).unwrap()
}

#[test]
fn one_request_alone_takes_its_own_time() {
    let engine = engine("vllm");
    let outcome = play(&engine, EQUAL, &[request(1.0, 14_000, 101)], &mut Fixed { layout: Layout::Tp });
    let served = outcome.served[0];
    assert!((served.first - 1.5).abs() < 0.06, "half a second of prefill: {served:?}");
    assert!((served.last - served.first - 1.22).abs() < 0.05, "100 steps of 12.2 ms: {served:?}");
}

#[test]
fn the_cache_bounds_what_runs() {
    // Each takes 0.4 of TP's cache, so the third waits for the first.
    let requests = [0.0, 0.0, 0.0].map(|at| request(at, 500_000, 10));
    let outcome = play(&engine("vllm"), EQUAL, &requests, &mut Fixed { layout: Layout::Tp });
    let [first, second, third] = [0, 1, 2].map(|at| outcome.served[at]);
    assert!(third.first - first.last > 17.0 && second.first - first.first < 18.5, "{:?}", outcome.served);
}

/// A measured curve that ends early must not make larger batches free.
#[test]
fn no_more_run_at_once_than_the_curves_know() {
    let curve = |last| StepCurve::new([1, last].map(|sequences| Point { sequences, seconds: 0.01 }).to_vec()).unwrap();
    let steps = ByLayout { tp: curve(64), ep: curve(48) };
    let engine = Engine { name: "short".to_owned(), steps, max_sequences: 48 };
    let requests: Vec<Request> = (0..480).map(|_| request(0.0, 10, 101)).collect();
    let outcome = play(&engine, EQUAL, &requests, &mut Fixed { layout: Layout::Tp });
    assert!((9.5..11.5).contains(&outcome.end), "ten batches of 100 steps of 10 ms: {}", outcome.end);
    assert_eq!(crossing(&engine), Some(1));
    let start = Adaptive::start_layout(&engine.prior(EQUAL, RIGHT).unwrap(), 48);
    assert!(start.is_some(), "the prior reaches as far");
}

#[test]
fn the_curves_cross_where_their_figures_say() {
    let at = |name: &str| crossing(&engine(name));
    assert!((50..62).contains(&at("trtllm").unwrap()) && (490..504).contains(&at("vllm").unwrap()));
    assert_eq!(at("sglang"), None);
    assert!(engine("sglang").is_one_sided(EQUAL) && !engine("sglang").is_one_sided(FASTER_EP));
    assert!(!engine("vllm").is_one_sided(EQUAL));
}

#[test]
fn curves_from_a_file_are_checked() {
    let path = std::env::temp_dir().join(format!("semmoe-curves-{}.json", std::process::id()));
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let found = engines::read(&path);
        std::fs::remove_file(&path).unwrap();
        found
    };
    let engines = read(r#"[{"name": "own", "tp": [[1, 2.0], [64, 9.0]], "ep": [[1, 3.0], [64, 4.0]]}]"#).unwrap();
    assert_eq!((engines[0].steps[Layout::Ep].seconds(64), engines[0].max_sequences), (Some(0.004), 64));
    for (wrong, named) in [
        (r#"[{"name": "own", "tp": [[4, 2.0], [2, 9.0]], "ep": [[1, 3.0]]}]"#, "own, tp"),
        (r#"[{"name": "own", "tp": [[1, 2.0]], "ep": []}]"#, "own, ep"),
        (r#"[{"name": "own", "tp": [[1, 2.0]], "ep": [[1, 3.0]], "dp": []}]"#, "dp"),
    ] {
        let error = read(wrong).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn no_switch_where_the_curves_do_not_cross() {
    for kind in [Kind::Bursty, Kind::Oscillating, Kind::Rollout, Kind::AzureCode] {
        let results = results(&engine("sglang"), EQUAL, kind, RIGHT);
        assert_eq!(results.adaptive.switches, 0.0, "{kind:?}");
        assert!(results.adaptive == results.fixed.tp, "{kind:?}: the same as static TP");
    }
}

#[test]
fn few_switches_where_the_threshold_policy_makes_many() {
    for (name, rates) in [("trtllm", EQUAL), ("trtllm", FASTER_EP), ("vllm", EQUAL), ("vllm", FASTER_EP)] {
        let results = results(&engine(name), rates, Kind::Oscillating, RIGHT);
        let ours = margin(&results.adaptive, &results.fixed);
        assert!(ours.switches <= 3.0 && ours.goodput_percent > -0.5 && ours.tpot_percent > -0.5, "{name}: {ours:?}");
        assert!(results.moebius.switches > ours.switches, "{name}: {}", results.moebius.switches);
    }
}

#[test]
fn gains_where_load_crosses() {
    for (name, rates, kind, least) in [
        ("trtllm", EQUAL, Kind::Rollout, 1.0),
        ("trtllm", FASTER_EP, Kind::Rollout, 2.0),
        ("vllm", FASTER_EP, Kind::Bursty, 2.0),
        ("sglang", FASTER_EP, Kind::AzureConv2, 2.0),
    ] {
        let results = results(&engine(name), rates, kind, RIGHT);
        let ours = margin(&results.adaptive, &results.fixed);
        assert!(ours.goodput_percent.max(ours.tpot_percent) >= least, "{name} {kind:?}: {ours:?}");
    }
}

#[test]
fn a_wrong_prior_costs_a_few_switches_until_it_is_corrected() {
    // Believes that EP is faster from a batch of 50 on; in fact it never is.
    let wrong = ByLayout { tp: 1.0, ep: 0.7 };
    let results = results(&engine("sglang"), EQUAL, Kind::Bursty, wrong);
    let ours = margin(&results.adaptive, &results.fixed);
    assert!((1.0..=4.0).contains(&ours.switches), "{ours:?}");
    assert!(results.adaptive.tpot_seconds < 0.97 * results.fixed.ep.tpot_seconds, "it went back: {ours:?}");
}

#[test]
fn a_missed_bar_is_named() {
    let label = || Label { one_sided: false, trace: "bursty", engine: "own".to_owned(), prefill: "28/45".to_owned() };
    let engine = engine("vllm");
    let mut results = results(&engine, FASTER_EP, Kind::Bursty, RIGHT);
    results.adaptive = results.fixed.tp;
    results.adaptive.goodput *= 0.5;
    let missed = Line::new(label(), &[results]).missed();
    assert!(missed.contains(&"goodput below a static") && missed.contains(&"gain too small"), "{missed:?}");
}

/// A switch that the policy requested.
struct Made {
    at: f64,
    to: Layout,
    promised_tokens: u64,
    end: f64,
}

/// Wraps a policy and records its switches.
struct Recorded {
    policy: Adaptive,
    switches: Vec<Made>,
}

impl SwitchPolicy for Recorded {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn observe(&mut self, at: f64, event: &Event) {
        if let (Event::Switched { .. }, Some(last)) = (event, self.switches.last_mut()) {
            last.end = at;
        }
        self.policy.observe(at, event);
    }

    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision {
        let decision = self.policy.decide(at, unit);
        if let Decision::Switch(switch) = decision {
            self.switches.push(Made { at, to: switch.to, promised_tokens: unit.promised_kv_tokens, end: at });
        }
        decision
    }
}

fn recorded(engine: &Engine, rates: Rates, requests: &[Request]) -> (Outcome, Vec<Made>) {
    let mut policy = Recorded { policy: adaptive(engine, rates), switches: Vec::new() };
    (play(engine, rates, requests, &mut policy), policy.switches)
}

fn load() -> impl Strategy<Value = Vec<Request>> {
    let one = (0.0..0.3f64, 1..6000u32, 1..400u32, 0..2u8);
    prop::collection::vec(one, 1..250).prop_map(|all| {
        let mut at = 0.0;
        let next = |(wait, prompt_tokens, output_tokens, priority): (f64, u32, u32, u8)| {
            // Calm and crowded stretches.
            at += if prompt_tokens % 7 == 0 { wait * 20.0 } else { wait };
            Request { at, prompt_tokens, output_tokens, priority }
        };
        all.into_iter().map(next).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn laws_of_the_loop_on_any_load(requests in load()) {
        let (trtllm, settings, room) = (engine("trtllm"), Settings::default(), room_tokens());
        let (outcome, switches) = recorded(&trtllm, FASTER_EP, &requests);
        let again = recorded(&trtllm, FASTER_EP, &requests).0;
        prop_assert_eq!((outcome.end, outcome.switches), (again.end, again.switches));
        for (request, served) in requests.iter().zip(&outcome.served) {
            prop_assert!(request.at < served.first && served.first <= served.last && served.last <= outcome.end);
        }
        for pair in switches.windows(2) {
            prop_assert!(pair[1].at - pair[0].end >= settings.dwell_seconds);
            prop_assert_ne!(pair[0].to, pair[1].to);
        }
        for switch in &switches {
            prop_assert!(switch.promised_tokens as f64 <= room[switch.to] as f64 * settings.guard_close);
        }
        let sglang = engine("sglang");
        let steady = play(&sglang, EQUAL, &requests, &mut adaptive(&sglang, EQUAL));
        prop_assert_eq!(steady.switches, 0);
    }
}

#[test]
fn the_caches_are_those_of_the_page_on_switching() {
    let room = room_tokens();
    assert!(room.tp.abs_diff(1_269_000) < 1000 && room.ep.abs_diff(1_961_000) < 1000, "{room:?}");
    let moved = switch_cost().token_bytes;
    assert_eq!((moved.tp, moved.ep), (336_896, 144_384));
}
