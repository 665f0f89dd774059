//! Recent assignments: one ring buffer for all ranks, and each rank's sums over it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::cell::{get, set};

/// Maximum window, in requests: the request count must fit in 16 bits.
pub(crate) const MAX_WINDOW: u32 = u16::MAX as u32;

/// Number of latest assignments to search for one to reverse, which is always a recent one.
const LOOKED_BACK: u64 = 4096;

/// Tokens and requests are packed into one word so that they change atomically; requests occupy the low bits.
const REQUEST_BITS: u32 = 16;

/// Ring buffer of the latest assignments to any rank.
#[derive(Debug)]
pub(super) struct Window {
    /// Rank in the upper 32 bits, tokens in the lower; 0 marks an empty slot, since no assignment has 0 tokens.
    places: Box<[AtomicU64]>,
    /// Assignments so far.
    count: AtomicU64,
}

impl Window {
    pub(super) fn new(requests: u32) -> Self {
        let places = requests.clamp(1, MAX_WINDOW);
        Window { places: (0..places).map(|_| AtomicU64::new(0)).collect(), count: AtomicU64::new(0) }
    }

    /// Records an assignment (`tokens` from 1 to 2^31), and returns the rank and tokens of the assignment that it
    /// overwrites.
    pub(super) fn push(&self, rank: u16, tokens: u64) -> Option<(u16, u64)> {
        let at = self.count.fetch_add(1, Relaxed) % self.places.len() as u64;
        let old = self.places[at as usize].swap((u64::from(rank) << 32) | tokens, Relaxed);
        (old != 0).then_some(((old >> 32) as u16, old & 0xffff_ffff))
    }

    /// Clears the newest matching assignment among the last [`LOOKED_BACK`]; returns whether one was found.
    pub(super) fn take_back(&self, rank: u16, tokens: u64) -> bool {
        let (now, places) = (self.now(), self.places.len() as u64);
        let sought = (u64::from(rank) << 32) | tokens;
        (now.saturating_sub(places.min(LOOKED_BACK))..now).rev().any(|at| {
            let place = &self.places[(at % places) as usize];
            place.compare_exchange(sought, 0, Relaxed, Relaxed).is_ok()
        })
    }

    /// Iterates over the stored assignments as `(rank, tokens)` pairs, oldest first. May miss concurrent writes.
    pub(super) fn held(&self) -> impl Iterator<Item = (u16, u64)> {
        let (now, places) = (self.now(), self.places.len() as u64);
        let held = (now.saturating_sub(places)..now).map(move |at| self.places[(at % places) as usize].load(Relaxed));
        held.filter(|place| *place != 0).map(|place| ((place >> 32) as u16, place & 0xffff_ffff))
    }

    /// Assignments so far.
    pub(super) fn now(&self) -> u64 {
        self.count.load(Relaxed)
    }
}

/// One rank's sums over the window.
#[derive(Debug, Default)]
pub(super) struct Recent {
    packed: AtomicU64,
    /// [`Window::now`] when the rank last became available again, plus one; 0 if it was never unavailable.
    since: AtomicU64,
    /// Tokens credited to the rank when it became available again, as f64 bits. They fade linearly over one window, as
    /// do `given_requests`.
    given_tokens: AtomicU64,
    given_requests: AtomicU64,
}

/// A rank's work within the window.
#[derive(Clone, Copy)]
pub(super) struct RecentWork {
    pub(super) tokens: f64,
    pub(super) requests: f64,
}

impl Recent {
    /// Must be called before the assignment enters the window, so that its later removal cannot underflow.
    pub(super) fn add(&self, tokens: u64) {
        self.packed.fetch_add((tokens << REQUEST_BITS) | 1, Relaxed);
    }

    pub(super) fn remove(&self, tokens: u64) {
        self.packed.fetch_sub((tokens << REQUEST_BITS) | 1, Relaxed);
    }

    fn own(&self) -> RecentWork {
        let packed = self.packed.load(Relaxed);
        let (tokens, requests) = (packed >> REQUEST_BITS, packed & ((1 << REQUEST_BITS) - 1));
        RecentWork { tokens: tokens as f64, requests: requests as f64 }
    }

    pub(super) fn read(&self, window: &Window) -> RecentWork {
        let own = self.own();
        let since = self.since.load(Relaxed);
        if since == 0 {
            return own;
        }
        let passed = window.now().saturating_sub(since - 1) as f64 / window.places.len() as f64;
        let left = (1.0 - passed).max(0.0);
        let (tokens, requests) = (left * get(&self.given_tokens), left * get(&self.given_requests));
        RecentWork { tokens: own.tokens + tokens, requests: own.requests + requests }
    }

    /// Credits a rank that becomes available again with at least `least` recent work.
    pub(super) fn come_back(&self, window: &Window, least: RecentWork) {
        let own = self.own();
        set(&self.given_tokens, (least.tokens - own.tokens).max(0.0));
        set(&self.given_requests, (least.requests - own.requests).max(0.0));
        self.since.store(window.now().saturating_add(1), Relaxed);
    }
}
