use proptest::prelude::*;

use super::super::{LayoutPrior, NoRoom, Point, StepCurve, TtftTarget};
use super::*;

const ROOM: ByLayout<u64> = ByLayout { tp: 1_000_000, ep: 1_500_000 };
const COST: SwitchCost = SwitchCost {
    ranks: 8,
    weight_bytes: 56_000_000_000,
    token_bytes: ByLayout { tp: 300_000, ep: 150_000 },
    bytes_per_second: 300e9,
    fixed_seconds: 0.04,
};

/// TP's and EP's step at a batch of 1 and of 1,024, in seconds.
fn prior(tp: [f64; 2], ep: [f64; 2], rates: [f64; 2]) -> Prior {
    let layout = |[small, large]: [f64; 2], rate| {
        let points = [(1, small), (1024, large)].map(|(sequences, seconds)| Point { sequences, seconds });
        LayoutPrior { steps: Some(StepCurve::new(points.to_vec()).unwrap()), prefill_tokens_per_second: Some(rate) }
    };
    Prior { tp: layout(tp, rates[0]), ep: layout(ep, rates[1]) }
}

/// Curves that cross at a batch of 32.
fn crossing() -> Prior {
    prior([0.01, 0.05], [0.02, 0.04], [30e3, 30e3])
}

fn settings() -> Settings {
    Settings { max_sequences: 1024, ttft: vec![TtftTarget { priority: 7, seconds: 2.0 }], ..Settings::default() }
}

fn policy(prior: Prior) -> Adaptive {
    Adaptive::new(settings(), prior, COST, ROOM).unwrap()
}

fn view(layout: Layout, running: u32) -> UnitView<'static> {
    UnitView {
        layout,
        running,
        waiting: 0,
        waiting_tokens: 0,
        live_kv_tokens: 1000,
        promised_kv_tokens: 2000,
        blocked: false,
        heads: &[],
    }
}

/// Decodes at a batch for some seconds; returns the first switch decided, and its time.
fn decode(policy: &mut Adaptive, from: f64, seconds: f64, unit: &UnitView<'_>, step: f64) -> Option<(f64, Switch)> {
    let steps = (seconds / step) as u32;
    (0..steps).find_map(|number| {
        let at = from + f64::from(number) * step;
        if let Decision::Switch(switch) = policy.decide(at, unit) {
            return Some((at, switch));
        }
        let ended = Step { layout: unit.layout, sequences: unit.running, prompt_tokens: 0, seconds: step };
        policy.observe(at + step, &Event::Stepped(ended));
        None
    })
}

#[test]
fn a_large_gain_pays_at_once_a_small_one_later_a_loss_never() {
    let at = |batch: u32, step: f64| decode(&mut policy(crossing()), 0.0, 60.0, &view(Layout::Tp, batch), step);
    let (soon, large) = at(1024, 0.05).expect("20% at 1,024");
    assert!(soon < 0.1 && large.to == Layout::Ep, "{soon} {large:?}");
    let (later, small) = at(48, 0.0323).expect("a few percent at 48");
    assert!((1.0..10.0).contains(&later), "{later} {small:?}");
    assert!(matches!(small.cause, Cause::Gain { gain, regret, .. } if gain < 0.05 && regret > 0.0), "{small:?}");
    assert_eq!(at(8, 0.022), None, "TP is the faster one");
}

#[test]
fn a_gain_that_comes_and_goes_is_no_reason() {
    let mut policy = policy(crossing());
    for round in 0..200 {
        let from = f64::from(round) * 0.4;
        assert_eq!(decode(&mut policy, from, 0.2, &view(Layout::Tp, 48), 0.0323), None, "round {round}");
        assert_eq!(decode(&mut policy, from + 0.2, 0.2, &view(Layout::Tp, 16), 0.026), None, "round {round}");
    }
}

#[test]
fn without_a_prior_a_layout_that_was_not_measured_is_not_gone_to() {
    let mut policy = policy(Prior::default());
    let unknown = |layout| Decision::Stay(Stay::Unknown { layout, sequences: 512 });
    assert_eq!(policy.decide(0.0, &view(Layout::Tp, 512)), unknown(Layout::Tp));
    for (layout, seconds) in [(Layout::Tp, 0.05), (Layout::Ep, 0.03)] {
        policy.observe(1.0, &Event::Stepped(Step { layout, sequences: 512, prompt_tokens: 0, seconds }));
        assert!(matches!(policy.decide(1.0, &view(Layout::Tp, 512)), Decision::Stay(Stay::Unknown { .. })));
        let prefill = Step { layout, sequences: 512, prompt_tokens: 3000, seconds: seconds + 0.1 };
        policy.observe(1.0, &Event::Stepped(prefill));
    }
    assert!(matches!(policy.decide(2.0, &view(Layout::Tp, 512)), Decision::Switch(_)), "both are measured now");
    assert_eq!(Adaptive::start_layout(&Prior::default(), 8), None);
    assert_eq!(Adaptive::start_layout(&crossing(), 8), Some(Layout::Tp));
    assert_eq!(Adaptive::start_layout(&crossing(), 800), Some(Layout::Ep));
}

#[test]
fn no_room_is_a_refusal_until_the_need_has_fallen() {
    let mut policy = policy(crossing());
    let unit = |promised_kv_tokens| UnitView { promised_kv_tokens, ..view(Layout::Ep, 1) };
    let refused = |needed_tokens, room_tokens| {
        Decision::Stay(Stay::NoRoom(NoRoom { to: Layout::Tp, needed_tokens, room_tokens }))
    };
    assert_eq!(policy.decide(0.0, &unit(960_000)), refused(960_000, 850_000));
    assert_eq!(policy.decide(1.0, &unit(900_000)), refused(900_000, 850_000));
    assert!(matches!(policy.decide(2.0, &unit(850_000)), Decision::Switch(Switch { to: Layout::Tp, .. })));
    assert_eq!(policy.state(2.0), State::Switching { to: Layout::Tp });
    assert_eq!(policy.decide(2.5, &unit(0)), Decision::Stay(Stay::Switching { to: Layout::Tp }));
}

#[test]
fn a_switch_is_followed_by_the_dwell_and_a_failure_by_a_longer_one() {
    let mut policy = policy(crossing());
    let dwell = settings().dwell_seconds;
    assert!(matches!(policy.decide(5.0, &view(Layout::Tp, 1024)), Decision::Switch(_)));
    policy.observe(5.3, &Event::Switched { to: Layout::Ep, seconds: 0.3, kv_tokens: 1000 });
    assert_eq!(policy.state(5.3), State::Dwelling { until: 5.3 + dwell });
    assert!(matches!(policy.decide(5.4, &view(Layout::Ep, 1)), Decision::Stay(Stay::Dwell { .. })));
    assert!(
        policy.switch_seconds(Layout::Ep, 1000) > COST.seconds(Layout::Ep, 1000),
        "switches take longer than thought"
    );
    let mut policy = super::tests::policy(crossing());
    let waits = [100.0, 200.0, 300.0].map(|at| {
        assert!(matches!(policy.decide(at, &view(Layout::Tp, 1024)), Decision::Switch(_)));
        policy.observe(at, &Event::Failed { to: Layout::Ep });
        let State::Dwelling { until } = policy.state(at) else { panic!("no wait after a failure") };
        until - at
    });
    assert_eq!(waits, [2.0, 4.0, 8.0]);
}

#[test]
fn a_target_for_the_first_token_overrides_small_gains_only_for_its_priority() {
    // Decode is faster with TP, prefill with EP.
    let prior = prior([0.01, 0.02], [0.02, 0.03], [10e3, 40e3]);
    let urgent = |priority, waited_seconds| {
        let heads = [Head { priority, waited_seconds, tokens_ahead: 30_000 }];
        policy(prior.clone()).decide(0.0, &UnitView { waiting: 1, heads: &heads, ..view(Layout::Tp, 8) })
    };
    let Decision::Switch(Switch { to: Layout::Ep, cause: Cause::Ttft { priority: 7, here_seconds, there_seconds } }) =
        urgent(7, 0.5)
    else {
        panic!("three seconds of prefill miss two seconds");
    };
    assert!(here_seconds > 3.4 && there_seconds < 1.6, "{here_seconds} {there_seconds}");
    assert!(matches!(urgent(6, 0.5), Decision::Stay(_)), "no target for this priority");
    let stuck = UnitView {
        blocked: true,
        waiting: 1,
        heads: &[Head { priority: 7, waited_seconds: 0.0, tokens_ahead: 10 }],
        ..view(Layout::Tp, 8)
    };
    let decision = policy(prior.clone()).decide(0.0, &stuck);
    assert!(matches!(decision, Decision::Switch(Switch { cause: Cause::Ttft { .. }, .. })), "EP has more KV room");
    let no_sooner = policy(prior).decide(0.0, &UnitView { blocked: false, ..stuck });
    assert!(matches!(no_sooner, Decision::Stay(_)), "{no_sooner:?}");
}

#[test]
fn settings_out_of_range_are_named() {
    let wrong = [
        ("margin", Settings { margin: f64::NAN, ..settings() }),
        ("guard_reopen", Settings { guard_reopen: 0.99, ..settings() }),
        ("chunk_tokens", Settings { chunk_tokens: 0, ..settings() }),
        ("ttft seconds", Settings { ttft: vec![TtftTarget { priority: 1, seconds: 0.0 }], ..settings() }),
        ("priority 7", Settings { ttft: vec![TtftTarget { priority: 7, seconds: 1.0 }; 2], ..settings() }),
    ];
    for (name, settings) in wrong {
        let error = Adaptive::new(settings, crossing(), COST, ROOM).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

/// A moment of a random schedule.
#[derive(Clone, Debug)]
struct Moment {
    wait: f64,
    running: u32,
    waiting: u32,
    promised: u64,
    prompt: u32,
    /// The step's true time over the prior's; may be NaN.
    factor: f64,
    fails: bool,
}

fn moment() -> impl Strategy<Value = Moment> {
    let factor = prop_oneof![20 => 0.3..3.0f64, 1 => Just(f64::NAN), 1 => Just(f64::INFINITY), 1 => Just(0.0)];
    (0.0..2.0f64, 0..1024u32, 0..500u32, 0..1_500_000u64, 0..8192u32, factor, prop::bool::weighted(0.2)).prop_map(
        |(wait, running, waiting, promised, prompt, factor, fails)| Moment {
            wait,
            running,
            waiting,
            promised,
            prompt,
            factor,
            fails,
        },
    )
}

/// Plays a schedule; returns the switches with their times and promised tokens, and all decisions.
fn play(mut policy: Adaptive, moments: &[Moment]) -> (Vec<(f64, Layout, u64)>, Vec<Decision>) {
    let (mut at, mut layout) = (0.0, Layout::Tp);
    let (mut switches, mut decisions) = (Vec::new(), Vec::new());
    for moment in moments {
        at += moment.wait;
        policy.observe(at, &Event::Arrived { prompt_tokens: moment.prompt });
        let heads = [Head { priority: 7, waited_seconds: moment.wait, tokens_ahead: moment.prompt.into() }];
        let unit = UnitView {
            waiting: moment.waiting,
            waiting_tokens: u64::from(moment.waiting) * 300,
            live_kv_tokens: moment.promised / 2,
            promised_kv_tokens: moment.promised,
            heads: &heads,
            ..view(layout, moment.running)
        };
        let decision = policy.decide(at, &unit);
        decisions.push(decision);
        match decision {
            Decision::Switch(switch) if moment.fails => policy.observe(at, &Event::Failed { to: switch.to }),
            Decision::Switch(Switch { to, .. }) => {
                switches.push((at, to, moment.promised));
                layout = to;
                policy.observe(at, &Event::Switched { to, seconds: 0.25 * moment.factor, kv_tokens: moment.promised });
            }
            Decision::Stay(_) => {
                let seconds = moment.factor * (0.03 + f64::from(moment.prompt) / 30e3);
                let step = Step { layout, sequences: moment.running, prompt_tokens: moment.prompt, seconds };
                policy.observe(at, &Event::Stepped(step));
            }
        }
    }
    (switches, decisions)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn dwell_guard_and_determinism_on_any_schedule(moments in prop::collection::vec(moment(), 1..150)) {
        let fresh = || policy(prior([0.01, 0.05], [0.02, 0.04], [28e3, 45e3]));
        let (switches, decisions) = play(fresh(), &moments);
        prop_assert_eq!(&play(fresh(), &moments).1, &decisions);
        for pair in switches.windows(2) {
            prop_assert!(pair[1].0 - pair[0].0 >= settings().dwell_seconds, "{:?}", pair);
            prop_assert_ne!(pair[0].1, pair[1].1);
        }
        for (at, to, promised) in switches {
            prop_assert!(promised as f64 <= ROOM[to] as f64 * settings().guard_close, "{} {:?} {}", at, to, promised);
        }
        // After a refusal none is granted until the need has fallen to the lower limit.
        let mut closed = ByLayout { tp: false, ep: false };
        for (moment, decision) in moments.iter().zip(&decisions) {
            for layout in [Layout::Tp, Layout::Ep] {
                let room = ROOM[layout] as f64;
                let limit = if closed[layout] { settings().guard_reopen } else { settings().guard_close };
                closed[layout] = moment.promised > (room * limit) as u64;
            }
            if let Decision::Switch(switch) = decision {
                prop_assert!(!closed[switch.to]);
            }
        }
    }

    #[test]
    fn curves_that_do_not_cross_give_no_switch(moments in prop::collection::vec(moment(), 1..150)) {
        // Steps take the prior's times, so that nothing else is learned.
        let moments: Vec<Moment> = moments.into_iter().map(|moment| Moment { factor: f64::NAN, ..moment }).collect();
        let (switches, _) = play(policy(prior([0.01, 0.04], [0.015, 0.05], [30e3, 30e3])), &moments);
        prop_assert!(switches.is_empty(), "{:?}", switches);
    }
}
