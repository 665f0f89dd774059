//! Units of unequal speed behind one model get what they get done.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use semmoe_routing::{PrefixSettings, Prompt, Router, Scratch, Settings, Work, policy};

/// Ranks that each compute, per step, 100 tokens of every waiting prompt and one of every answer; steps take longer
/// with more sequences.
struct Ranks {
    router: Router,
    speeds: [f64; 4],
    running: Vec<Running>,
}

struct Running {
    rank: usize,
    work: Work,
    prompt_left: f64,
    answer_left: f64,
}

impl Ranks {
    fn of(units: &[u16], speeds: [f64; 4]) -> Self {
        let router = Router::new(4, &[], &Settings::default(), &PrefixSettings::default()).in_units(units);
        Self { router, speeds, running: Vec::new() }
    }

    /// Returns how many requests ended.
    fn step(&mut self) -> usize {
        let of = |rank: usize| self.running.iter().filter(|one| one.rank == rank).count() as f64;
        let steps = [0, 1, 2, 3].map(|rank| self.speeds[rank] / (10.0 + of(rank)));
        let accounts = self.router.accounts();
        for one in &mut self.running {
            if one.prompt_left > 0.0 {
                one.prompt_left -= 100.0 * steps[one.rank];
            } else {
                accounts.computed(one.rank as u16, &mut one.work);
                one.answer_left -= steps[one.rank];
            }
        }
        let before = self.running.len();
        for done in self.running.extract_if(.., |one| one.answer_left <= 0.0) {
            accounts.release(done.rank as u16, done.work);
            accounts.generated(60);
        }
        before - self.running.len()
    }

    /// Throughput of a policy in requests per unit of time with `in_flight` requests, and their mean local share.
    fn serve(mut self, name: &str, in_flight: usize) -> (f64, f64) {
        let (policy, mut scratch, mut random) = (policy(name).unwrap(), Scratch::default(), random());
        let (mut time, mut sent, mut done, mut local) = (0.0, 0, 0, 0.0);
        while done < 3000 {
            while self.running.len() < in_flight {
                let share = [(); 4].map(|()| 0.15 + 0.2 * random());
                let tokens = 50 + (300.0 * random()) as u64;
                let prompt = Prompt { tokens, share: Some(&share), reports: true, ..Prompt::default() };
                let decision = self.router.decide(policy.as_ref(), &prompt, sent, None, &mut scratch).unwrap();
                self.router.assign(&decision, &[], false);
                let rank = usize::from(decision.choice.rank);
                let (work, prompt_left, answer_left) = (decision.work, tokens as f64, 20.0 + 80.0 * random());
                self.running.push(Running { rank, work, prompt_left, answer_left });
                (sent, local) = (sent + 1, local + share[rank]);
            }
            time += 1.0;
            done += self.step();
        }
        (done as f64 / time, local / sent as f64)
    }
}

/// Uniform in 0..1.
fn random() -> impl FnMut() -> f64 {
    let mut state = 1u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1u32 << 31)
    }
}

#[test]
fn a_slow_unit_slows_no_other() {
    for slow in [1.0, 0.5, 0.25] {
        for in_flight in [32, 128] {
            let serve = |units: &[u16], name| Ranks::of(units, [1.0, 1.0, slow, slow]).serve(name, in_flight);
            let (by_load, _) = serve(&[2, 2], "least_load");
            let (requests, local) = serve(&[2, 2], "affinity");
            assert!(requests > 0.98 * by_load, "{slow}, {in_flight} in flight: {requests} of {by_load}");
            assert!(local > 0.26, "{slow}, {in_flight} in flight: {local}");
            // As one unit they would be kept even, and the slow ones set the pace.
            let (even, _) = serve(&[4], "affinity");
            assert!(slow == 1.0 || even < 0.9 * by_load, "{slow}, {in_flight} in flight: {even} of {by_load}");
        }
    }
}
