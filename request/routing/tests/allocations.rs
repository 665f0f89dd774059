//! A decision allocates nothing, whatever the policy: counted by this test's own allocator.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use semmoe_routing::{NAMES, PrefixSettings, Prompt, Router, Scratch, Settings, block_hashes, policy};

thread_local! {
    /// Allocations of this thread only, as the test harness has others.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: forwards every call unchanged to the system's allocator; counting touches a thread-local number that needs
// neither allocation nor destruction.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`, and all memory came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn a_decision_allocates_nothing() {
    let before = allocations();
    drop(Box::new(1));
    assert_eq!(allocations(), before + 1, "allocations are counted");

    for ranks in [1u16, 64, 130] {
        let router = Router::new(ranks, &[], &Settings::default(), &PrefixSettings::default());
        let ids: Vec<u32> = (0..1000).collect();
        let share: Vec<f64> = (0..ranks).map(|rank| f64::from(rank % 7) / 10.0).collect();
        let mut blocks = Vec::new();
        block_hashes(&ids, 64, &mut blocks);
        let prompt = Prompt {
            tokens: 1000,
            share: Some(&share),
            blocks: &blocks,
            key: Some(3),
            reports: true,
            ..Prompt::default()
        };
        let admit = |rank: u16| rank.is_multiple_of(2);
        let mut scratch = Scratch::default();
        // Let the scratch and the prefix table of every rank allocate their memory.
        for rank in 0..ranks {
            let mut decision =
                router.decide(policy("affinity").unwrap().as_ref(), &prompt, 0, None, &mut scratch).unwrap();
            decision.choice.rank = rank;
            router.assign(&decision, &blocks, true);
        }
        for policy in NAMES.map(|name| policy(name).unwrap()) {
            let before = allocations();
            for sequence in 0..100 {
                let admit: Option<&dyn Fn(u16) -> bool> = if sequence % 2 == 0 { None } else { Some(&admit) };
                let decision = router.decide(policy.as_ref(), &prompt, sequence, admit, &mut scratch).unwrap();
                router.assign(&decision, &blocks, true);
                router.accounts().release(decision.choice.rank, decision.work);
            }
            assert_eq!(allocations(), before, "{} over {ranks} ranks", policy.name());
        }
    }
}
