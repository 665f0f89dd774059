//! Simulated engines: live ones are never suspected, killed ones in time.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const RULES: SilenceRules = SilenceRules { stall: Duration::from_secs(2), most: Duration::from_secs(20) };
const TICK: f64 = 0.1;

/// An engine that prefills in chunks before it continues its streams, as SGLang does, and answers probes between two
/// steps.
struct Engine {
    tokens_per_second: f64,
    chunk_tokens: u64,
    decode_seconds: f64,
    /// Remaining tokens of each waiting prompt, and its total.
    waiting: VecDeque<(u64, u64)>,
    /// Remaining chunks of each stream.
    running: Vec<u32>,
    step_ends: f64,
    /// Prompts that the current step finishes.
    finishing: Vec<u64>,
    decoding: bool,
    computed_tokens: u64,
    dead: bool,
}

impl Engine {
    fn new(tokens_per_second: f64, chunk_tokens: u64, decode_seconds: f64) -> Self {
        Self {
            tokens_per_second,
            chunk_tokens,
            decode_seconds,
            waiting: VecDeque::new(),
            running: Vec::new(),
            step_ends: 0.0,
            finishing: Vec::new(),
            decoding: false,
            computed_tokens: 0,
            dead: false,
        }
    }

    fn begin_step(&mut self, noise: f64) {
        let mut room = self.chunk_tokens;
        while let Some((left, all)) = self.waiting.front_mut().filter(|_| room > 0) {
            let now = room.min(*left);
            room -= now;
            *left -= now;
            if *left == 0 {
                self.finishing.push(*all);
                self.waiting.pop_front();
            }
        }
        let tokens = self.chunk_tokens - room;
        self.decoding = tokens == 0 && !self.running.is_empty();
        let prefill = tokens as f64 / self.tokens_per_second * noise;
        self.step_ends += prefill + if self.decoding { self.decode_seconds } else { 0.01 };
    }

    /// Runs until `now`. Returns whether chunks arrived, and whether a step ended, which answers probes.
    fn run(&mut self, now: f64, noise: f64) -> (bool, bool) {
        let (mut moved, mut stepped) = (false, false);
        while !self.dead && self.step_ends <= now {
            stepped = true;
            moved |= self.decoding || !self.finishing.is_empty();
            if self.decoding {
                self.running.iter_mut().for_each(|left| *left -= 1);
                self.running.retain(|left| *left > 0);
            }
            for tokens in self.finishing.drain(..) {
                self.computed_tokens += tokens;
                self.running.push(60);
            }
            self.begin_step(noise);
        }
        (moved, stepped)
    }

    fn reading(&self, moved: bool) -> FlowReading {
        let waiting = self.waiting.iter().map(|(_, all)| *all).chain(self.finishing.iter().copied());
        FlowReading {
            waiting_tokens: waiting.clone().sum(),
            waiting_streams: waiting.count() as u64,
            running_streams: self.running.len() as u64,
            computed_tokens: self.computed_tokens,
            moved,
            ..FlowReading::default()
        }
    }
}

/// An engine and what is known about it.
struct Scene {
    engine: Engine,
    silence: Silence,
    now: f64,
}

impl Scene {
    fn new(engine: Engine) -> Self {
        Self { engine, silence: Silence::default(), now: 0.0 }
    }

    fn tick(&mut self, noise: f64) -> Option<Change> {
        self.now += TICK;
        let (moved, stepped) = self.engine.run(self.now, noise);
        if stepped && self.silence.wants_answer() {
            let recovered = self.silence.alive();
            assert_eq!(recovered, None, "it was suspected before");
        }
        self.silence.observe(&RULES, Duration::from_secs_f64(TICK), &self.engine.reading(moved))
    }

    /// Sends a prompt every third tick, then continues until streams run and none waits. False if the engine was
    /// suspected.
    fn warm_up(&mut self, ticks: u32, tokens: u64) -> bool {
        for tick in 0..ticks {
            if tick % 3 == 0 {
                self.engine.waiting.push_back((tokens, tokens));
            }
            if self.tick(1.0).is_some() {
                return false;
            }
        }
        while self.engine.running.is_empty() || !self.engine.waiting.is_empty() {
            if self.tick(1.0).is_some() {
                return false;
            }
        }
        true
    }

    /// Kills the engine while prompts wait. Returns after how many seconds it is suspected, and how many of them these
    /// prompts explain.
    fn kill(&mut self, tokens: u64, late: usize) -> (f64, f64) {
        self.engine.dead = true;
        self.engine.waiting.extend((0..late).map(|_| (tokens, tokens)));
        let killed = self.now;
        while self.tick(1.0) != Some(Change::Suspected) && self.now - killed < 60.0 {
            if self.now - killed > 0.5 {
                self.engine.waiting.push_back((20_000, 20_000));
            }
        }
        (self.now - killed, self.silence.explained().as_secs_f64())
    }
}

/// Prompts that arrive together: ticks before them, number, tokens of each, and how much slower they are computed.
fn bursts() -> impl Strategy<Value = Vec<(u32, u32, u64, f64)>> {
    let burst = prop_oneof![
        4 => (0u32..30, 1u32..4, 20u64..600),
        1 => (0u32..30, 20u32..120, 20u64..2000),
        1 => (0u32..300, 1u32..3, 5_000u64..20_000),
    ];
    proptest::collection::vec((burst, 0.8f64..1.4).prop_map(|((a, b, c), noise)| (a, b, c, noise)), 1..40)
}

proptest! {
    /// Prefill steps take up to 6 s here, and longer prompts several of them.
    #[test]
    fn honest_engines_are_never_suspected(
        rate in 300.0f64..30_000.0, step_seconds in 0.1f64..6.0, decode in 0.01f64..0.4, bursts in bursts(),
    ) {
        let chunk = ((rate * step_seconds) as u64).max(16);
        let mut scene = Scene::new(Engine::new(rate, chunk, decode));
        for (ticks, number, tokens, noise) in bursts {
            for _ in 0..ticks {
                let change = scene.tick(noise);
                prop_assert_eq!(change, None, "at {} s: {:?}", scene.now, &scene.silence);
            }
            scene.engine.waiting.extend((0..number).map(|_| (tokens, tokens)));
        }
        for _ in 0..600 {
            let change = scene.tick(1.0);
            prop_assert_eq!(change, None, "at {} s: {:?}", scene.now, &scene.silence);
        }
    }

    /// The engine dies while streams run and a few short prompts wait, which explain little; long ones that arrive
    /// later explain nothing.
    #[test]
    fn killed_engines_are_suspected_when_what_waited_explains_no_more(
        rate in 3_000.0f64..30_000.0, decode in 0.01f64..0.2, warm in 40u32..400, tokens in 50u64..300, late in 0usize..4,
    ) {
        let mut scene = Scene::new(Engine::new(rate, 4096, decode));
        prop_assert!(scene.warm_up(warm, tokens));
        let (seconds, explained) = scene.kill(tokens, late);
        let most = RULES.stall.as_secs_f64() + explained + 3.0 * TICK;
        prop_assert!(seconds <= most, "{} s, {} of them explained: {:?}", seconds, explained, &scene.silence);
    }
}

#[test]
fn an_engine_killed_in_busy_traffic_is_suspected_within_three_seconds() {
    for late in [0, 1] {
        let mut scene = Scene::new(Engine::new(10_000.0, 4096, 0.05));
        assert!(scene.warm_up(400, 100));
        let (seconds, _) = scene.kill(100, late);
        assert!(seconds < 3.0, "{seconds} s with {late} that wait");
    }
}

fn running(moved: bool) -> FlowReading {
    FlowReading { running_streams: 3, moved, ..FlowReading::default() }
}

/// Ticks until it is suspected; at most `most`.
fn ticks_to_suspicion(silence: &mut Silence, seen: FlowReading, most: u32) -> Option<u32> {
    (1..=most).find(|_| silence.observe(&RULES, RULES.tick(), &seen) == Some(Change::Suspected))
}

#[test]
fn silent_streams_alone_are_no_evidence_while_the_scheduler_answers() {
    let mut silence = Silence::default();
    for _ in 0..1000 {
        assert_eq!(silence.observe(&RULES, RULES.tick(), &running(false)), None);
        if silence.wants_answer() {
            silence.alive();
        }
    }
}

#[test]
fn without_running_streams_there_is_no_verdict() {
    let seen = FlowReading { waiting_tokens: 5, waiting_streams: 1, ..FlowReading::default() };
    assert_eq!(ticks_to_suspicion(&mut Silence::default(), seen, 1000), None);
    assert_eq!(ticks_to_suspicion(&mut Silence::default(), FlowReading::default(), 1000), None);
}

#[test]
fn prompts_of_unknown_cost_explain_any_silence() {
    let seen = FlowReading { waiting_tokens: 5, waiting_streams: 1, ..running(false) };
    assert_eq!(ticks_to_suspicion(&mut Silence::default(), seen, 1000), None);
}

#[test]
fn a_false_alarm_doubles_the_patience_and_calm_halves_it() {
    let mut silence = Silence::default();
    let first = ticks_to_suspicion(&mut silence, running(false), 100).unwrap();
    assert_eq!(first, 20);
    assert_eq!(silence.observe(&RULES, RULES.tick(), &running(true)), Some(Change::Recovered));
    assert_eq!(ticks_to_suspicion(&mut silence, running(false), 100), Some(40));
    assert_eq!(silence.alive(), Some(Change::Recovered));
    for _ in 0..10 {
        assert_eq!(ticks_to_suspicion(&mut silence, running(false), 1000).map(|ticks| ticks <= 200), Some(true));
        silence.alive();
    }
    for _ in 0..10 * CALM.as_secs() {
        assert_eq!(silence.observe(&RULES, Duration::from_secs(1), &running(true)), None);
    }
    assert_eq!(ticks_to_suspicion(&mut silence, running(false), 100), Some(20));
}

#[test]
fn a_gateway_that_was_held_up_counts_little_of_it() {
    let mut silence = Silence::default();
    assert_eq!(silence.observe(&RULES, Duration::from_secs(60), &running(false)), None);
    assert_eq!(silence.observe(&RULES, RULES.tick(), &running(false)), None);
    assert!(silence.silent < RULES.stall);
}
