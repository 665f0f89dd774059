//! Time of one decision over 4 to 64 ranks, by policy, against `round_robin`.
//!
//! The prompt has 1,000 tokens and is already scored; a third of the ranks hold its 15 blocks of 64 tokens. A decision
//! reads loads and prices, looks up the blocks if the policy needs them, and chooses. Adding and removing it from the
//! counts is shown beside it. The last lines are for several threads on the same ranks.

use std::time::Instant;

use semmoe_routing::{NAMES, Policy, PrefixSettings, Prompt, Router, Scratch, Settings, block_hashes, policy};

use crate::measure::Outcome;

/// Batches per measurement; the fastest counts, which excludes other work on the machine.
const BATCHES: u64 = 20;

/// Nanoseconds of one decision, and of one decision that is also added to the counts and removed.
fn measure(router: &Router, policy: &dyn Policy, prompt: &Prompt<'_>, decisions: u64) -> Option<(f64, f64)> {
    let mut scratch = Scratch::default();
    let (mut decide, mut count) = (f64::INFINITY, f64::INFINITY);
    let batch = (decisions / BATCHES).max(1);
    let each = |begin: Instant| begin.elapsed().as_secs_f64() * 1e9 / batch as f64;
    for _ in 0..BATCHES {
        let begin = Instant::now();
        for sequence in 0..batch {
            std::hint::black_box(router.decide(policy, prompt, sequence, None, &mut scratch)?);
        }
        decide = decide.min(each(begin));
        let begin = Instant::now();
        for sequence in 0..batch {
            let decision = router.decide(policy, prompt, sequence, None, &mut scratch)?;
            router.assign(&decision, prompt.blocks, true);
            router.accounts().release(decision.choice.rank, decision.work);
        }
        count = count.min(each(begin));
    }
    Some((decide, count))
}

/// All policies over 4, 8 and 64 ranks, then `affinity` on several threads.
pub(crate) fn run(decisions: u64) -> Outcome<()> {
    let ids: Vec<u32> = (0..1000).map(|id| id * 7 % 997).collect();
    let settings = Settings::default();

    let mut blocks = Vec::with_capacity(16);
    let mut naming = f64::INFINITY;
    for _ in 0..BATCHES {
        let begin = Instant::now();
        for _ in 0..500 {
            blocks.clear();
            block_hashes(std::hint::black_box(&ids), 64, &mut blocks);
        }
        naming = naming.min(begin.elapsed().as_secs_f64() * 1e9 / 500.0);
    }
    println!("naming the blocks of 1,000 tokens: {naming:.0} ns");

    println!("ranks policy | ns to decide | with updates of the counts");
    for ranks in [4u16, 8, 64] {
        let share: Vec<f64> = (0..ranks).map(|rank| 0.1 + f64::from(rank * 7 % 13) / 40.0).collect();
        let prompt = Prompt { tokens: 1000, share: Some(&share), blocks: &blocks, key: Some(9), ..Prompt::default() };
        for policy in NAMES.map(policy) {
            let policy = policy?;
            let router = Router::new(ranks, &[], &settings, &PrefixSettings::default());
            if let Some(prefixes) = router.prefixes() {
                (0..ranks).filter(|rank| rank % 3 == 0).for_each(|rank| {
                    prefixes.record(rank, &blocks);
                });
            }
            let (decide, count) = measure(&router, policy.as_ref(), &prompt, decisions).ok_or("no rank")?;
            println!("{ranks} {} | {decide:.0} | {count:.0}", policy.name());
        }
    }
    let share = [0.25; 64];
    let affinity = policy("affinity")?;
    for threads in [1, 2] {
        let router = Router::new(64, &[], &settings, &PrefixSettings::default());
        let prompt = Prompt { tokens: 1000, share: Some(&share), blocks: &blocks, ..Prompt::default() };
        let each: Vec<Option<(f64, f64)>> = std::thread::scope(|scope| {
            let work = || measure(&router, affinity.as_ref(), &prompt, decisions / 4);
            let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            running.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
        });
        let slowest = each.iter().flatten().map(|(_, count)| *count).fold(0.0, f64::max);
        println!("64 ranks, affinity, {threads} threads: {slowest:.0} ns with updates of the counts");
    }
    Ok(())
}
