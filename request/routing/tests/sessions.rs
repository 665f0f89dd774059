//! Sessions keep their ranks: each turn's prompt begins with the turns before it.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::VecDeque;

use semmoe_routing::{Decision, PrefixSettings, Prompt, Router, Scratch, Settings, policy};

const RANKS: u16 = 16;
const BLOCK: u64 = 64;

/// A unit whose requests end once a fixed number of later ones arrived, with prompts computed after a third of that.
struct Unit {
    router: Router,
    policy: &'static str,
    in_flight: usize,
    running: VecDeque<Decision>,
    random: fastrand::Rng,
    sequence: u64,
}

/// One conversation: its turns so far, its rank, and how often that changed.
#[derive(Clone, Default)]
struct Session {
    name: u64,
    tokens: u64,
    share: Vec<f64>,
    rank: Option<u16>,
    moves: u32,
}

impl Session {
    fn new(name: u64, random: &mut fastrand::Rng) -> Self {
        let share = (0..RANKS).map(|_| 0.03 + 0.08 * random.f64() * random.f64()).collect();
        Session { name, share, ..Session::default() }
    }
}

impl Unit {
    fn new(policy: &'static str, in_flight: usize) -> Self {
        Unit {
            router: Router::new(RANKS, &[], &Settings::default(), &PrefixSettings::default()),
            policy,
            in_flight,
            running: VecDeque::new(),
            random: fastrand::Rng::with_seed(5),
            sequence: 0,
        }
    }

    /// Places a prompt; returns the rank, and the tokens it already held.
    fn place(&mut self, prompt: &Prompt<'_>) -> (u16, u64) {
        if self.running.len() >= self.in_flight
            && let Some(done) = self.running.pop_front()
        {
            self.router.accounts().release(done.choice.rank, done.work);
        }
        let computed = self.running.len() * 2 / 3;
        for decision in self.running.iter_mut().take(computed) {
            self.router.accounts().computed(decision.choice.rank, &mut decision.work);
        }
        let policy = policy(self.policy).unwrap();
        let decision =
            self.router.decide(policy.as_ref(), prompt, self.sequence, None, &mut Scratch::default()).unwrap();
        self.sequence += 1;
        self.router.assign(&decision, prompt.blocks, true);
        self.running.push_back(decision);
        (decision.choice.rank, decision.cached.unwrap_or(0))
    }

    /// The session's next turn, which adds `tokens` tokens. Returns the cached tokens and the total.
    fn turn(&mut self, session: &mut Session, tokens: std::ops::Range<u64>) -> [u64; 2] {
        session.tokens += self.random.u64(tokens);
        let blocks: Vec<u64> = (0..session.tokens / BLOCK).map(|block| session.name << 32 | block).collect();
        let share: Vec<f64> = session.share.iter().map(|share| share + 0.01 * self.random.f64()).collect();
        let prompt = Prompt {
            tokens: session.tokens,
            share: Some(&share),
            blocks: &blocks,
            key: Some(session.name),
            reports: true,
            ..Prompt::default()
        };
        let (rank, cached) = self.place(&prompt);
        session.moves += u32::from(session.rank.is_some_and(|before| before != rank));
        session.rank = Some(rank);
        [cached, session.tokens]
    }

    fn stranger(&mut self) {
        let share = Session::new(0, &mut self.random).share;
        let tokens = self.random.u64(20..600);
        self.place(&Prompt { tokens, share: Some(&share), reports: true, ..Prompt::default() });
    }
}

#[test]
fn one_conversation_on_an_idle_unit_never_moves() {
    for policy in ["affinity", "prefix", "sticky"] {
        let mut unit = Unit::new(policy, 1);
        // Answers are long compared with prompts, so shares weigh heavily.
        unit.router.accounts().generated(500);
        let mut session = Session::new(7, &mut unit.random);
        // The first turns have no full block.
        for _ in 0..24 {
            unit.turn(&mut session, 8..60);
        }
        assert_eq!(session.moves, 0, "{policy}");
    }
}

/// Like SGLang's router tests: "hi", which is one token, from users identified by a header.
#[test]
fn the_shortest_prompts_of_a_session_stay_together() {
    for policy in ["affinity", "prefix"] {
        let mut unit = Unit::new(policy, 1);
        let mut seen = Vec::new();
        for user in 0..5 {
            let prompt = Prompt { tokens: 1, key: Some(user), ..Prompt::default() };
            let ranks: Vec<u16> = (0..4).map(|_| unit.place(&prompt).0).collect();
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{policy}: {ranks:?}");
            seen.push(ranks[0]);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 5, "{policy}: idle ranks are taken first");
    }
}

#[test]
fn sessions_under_load_hardly_move_and_find_their_caches() {
    // With 8 requests on each rank, a third of them waiting, a queue may be worth a second move.
    let loads = [("sticky", 32, 1), ("prefix", 32, 1), ("affinity", 32, 1), ("affinity", 64, 1), ("affinity", 128, 2)];
    for (policy, in_flight, most) in loads {
        let mut unit = Unit::new(policy, in_flight);
        (0..200).for_each(|_| unit.stranger());
        let mut sessions: Vec<Session> = (0..20).map(|name| Session::new(name + 1, &mut unit.random)).collect();
        let (mut cached, mut pinned, mut tokens) = (0, 0, 0);
        for _ in 0..24 {
            for session in &mut sessions {
                (0..3).for_each(|_| unit.stranger());
                pinned += session.tokens / BLOCK * BLOCK;
                let [held, all] = unit.turn(session, 100..400);
                (cached, tokens) = (cached + held, tokens + all);
            }
        }
        let moves: Vec<u32> = sessions.iter().map(|session| session.moves).collect();
        assert!(moves.iter().all(|moves| *moves <= most), "{policy}, {in_flight} in flight: {moves:?}");
        // `sticky` reads no caches.
        let missed = (pinned as f64 - cached as f64) / tokens as f64;
        assert!(policy == "sticky" || missed <= 0.02, "{policy}, {in_flight} in flight: {missed}");
    }
}

/// A session leaves a rank whose backlog is longer by more than what another rank would recompute.
#[test]
fn a_session_leaves_a_rank_with_a_long_queue() {
    let mut unit = Unit::new("affinity", usize::MAX);
    let mut session = Session::new(7, &mut unit.random);
    unit.turn(&mut session, 100..400);
    let home = session.rank.unwrap();
    let policy = policy("round_robin").unwrap();
    let long = Prompt { tokens: 20_000, reports: true, ..Prompt::default() };
    let only = |rank: u16| rank == home;
    let decision = unit.router.decide(policy.as_ref(), &long, 0, Some(&only), &mut Scratch::default()).unwrap();
    unit.router.assign(&decision, &[], false);
    unit.turn(&mut session, 100..400);
    assert_ne!(session.rank, Some(home));
}
