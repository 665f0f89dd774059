//! Load counters of one rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::recent::{Recent, RecentWork};
use super::{Even, Work};
use crate::policy::RankLoad;

/// In-flight load of one rank, on its own cache lines. All accounts of the rank share it, so a request added or removed
/// through one counts for all.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Flight {
    tokens: AtomicU64,
    requests: AtomicU64,
    sequences: AtomicU64,
    pending: AtomicU64,
    /// This rank's portion of the tokens of requests for which the engine chooses the rank.
    parts: AtomicU64,
}

/// Tokens or sequences assigned to a rank; only differences between ranks matter. While the rank is unavailable: its
/// surplus over the unit's mean at the time it became unavailable.
#[derive(Debug, Default)]
pub(super) struct Assigned(AtomicU64);

impl Assigned {
    pub(super) fn get(&self) -> f64 {
        get(&self.0)
    }

    pub(super) fn set(&self, value: f64) {
        set(&self.0, value);
    }

    pub(super) fn add(&self, amount: f64) {
        let more = |count: u64| Some((f64::from_bits(count) + amount).to_bits());
        let _ = self.0.fetch_update(Relaxed, Relaxed, more);
    }

    /// Clamps the count to within `distance` of `even`, writing only if that changes it. An infinite distance imposes
    /// no limit.
    pub(super) fn keep_near(&self, even: f64, distance: f64) {
        let (least, most) = (even - distance, even + distance);
        let kept = |count: u64| {
            let count = f64::from_bits(count);
            (count < least || count > most).then(|| count.clamp(least, most).to_bits())
        };
        let _ = self.0.fetch_update(Relaxed, Relaxed, kept);
    }
}

/// The accounts of one rank, on its own cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Cell {
    flight: Arc<Flight>,
    /// The rank's unit; see [`RankLoad::unit`].
    pub(super) unit: u16,
    /// The rank's recent assignments.
    pub(super) recent: Recent,
    pub(super) assigned_requests: AtomicU64,
    pub(super) assigned_tokens: Assigned,
    pub(super) assigned_sequences: Assigned,
    /// Token price from the tables, as f64 bits.
    pub(super) table_price: AtomicU64,
    /// Sequence price from the tables, as f64 bits.
    pub(super) table_sequence_price: AtomicU64,
    away: AtomicBool,
    unknown: AtomicBool,
}

pub(super) fn get(number: &AtomicU64) -> f64 {
    f64::from_bits(number.load(Relaxed))
}

pub(super) fn set(number: &AtomicU64, value: f64) {
    number.store(value.to_bits(), Relaxed);
}

/// Subtracts `amount`, saturating at zero.
pub(super) fn take(number: &AtomicU64, amount: u64) {
    // Cannot fail: the closure always returns `Some`.
    let _ = number.fetch_update(Relaxed, Relaxed, |count| Some(count.saturating_sub(amount)));
}

impl Cell {
    /// Returns the cell for successor accounts: shares the in-flight counts and copies everything else except recent
    /// tokens.
    pub(super) fn heir(&self) -> Self {
        Self { flight: Arc::clone(&self.flight), ..self.idle_copy() }
    }

    /// Returns the cell for independent accounts: starts with nothing in flight and copies everything else except
    /// recent tokens.
    pub(super) fn idle_copy(&self) -> Self {
        let copied = |number: &AtomicU64| AtomicU64::new(number.load(Relaxed));
        let flag = |flag: &AtomicBool| AtomicBool::new(flag.load(Relaxed));
        Self {
            assigned_requests: copied(&self.assigned_requests),
            assigned_tokens: Assigned(copied(&self.assigned_tokens.0)),
            assigned_sequences: Assigned(copied(&self.assigned_sequences.0)),
            away: flag(&self.away),
            unknown: flag(&self.unknown),
            ..Self::default()
        }
    }

    /// Returns the cell of a new rank, which is unavailable until it is marked available.
    pub(super) fn newcomer() -> Self {
        Self { away: AtomicBool::new(true), ..Self::default() }
    }

    /// Returns the load with assigned counts in place of prices, since prices depend on the other ranks.
    pub(super) fn load(&self, recent: RecentWork) -> RankLoad {
        RankLoad {
            in_flight_tokens: self.flight.tokens.load(Relaxed) + self.parts(),
            in_flight_requests: u32::try_from(self.flight.requests.load(Relaxed)).unwrap_or(u32::MAX),
            in_flight_sequences: self.flight.sequences.load(Relaxed),
            pending_tokens: self.flight.pending.load(Relaxed),
            recent_tokens: recent.tokens,
            recent_requests: recent.requests,
            assigned_requests: self.assigned_requests.load(Relaxed),
            price: self.assigned_tokens.get(),
            sequence_price: self.assigned_sequences.get(),
            unit: self.unit,
            available: self.is_available(),
            known: !self.unknown.load(Relaxed),
        }
    }

    pub(super) fn count_in(&self, work: Work) {
        self.flight.tokens.fetch_add(work.held_tokens(), Relaxed);
        self.flight.requests.fetch_add(1, Relaxed);
        self.flight.sequences.fetch_add(work.counted_sequences(), Relaxed);
        self.assigned_requests.fetch_add(1, Relaxed);
        if work.counted_pending() > 0 {
            self.flight.pending.fetch_add(work.counted_pending(), Relaxed);
        }
    }

    pub(super) fn hold_more(&self, tokens: u64) {
        self.flight.tokens.fetch_add(tokens, Relaxed);
    }

    pub(super) fn assigned(&self) -> Even {
        Even { tokens: self.assigned_tokens.get(), sequences: self.assigned_sequences.get() }
    }

    pub(super) fn parts(&self) -> u64 {
        self.flight.parts.load(Relaxed)
    }

    pub(super) fn count_part_in(&self, tokens: u64) {
        self.flight.parts.fetch_add(tokens, Relaxed);
    }

    pub(super) fn count_part_out(&self, tokens: u64) {
        take(&self.flight.parts, tokens);
    }

    pub(super) fn computed(&self, pending: u64) {
        if pending > 0 {
            take(&self.flight.pending, pending);
        }
    }

    pub(super) fn count_out(&self, work: Work) {
        take(&self.flight.tokens, work.held_tokens());
        take(&self.flight.requests, 1);
        take(&self.flight.sequences, work.counted_sequences());
        self.computed(work.counted_pending());
    }

    pub(super) fn is_available(&self) -> bool {
        !self.away.load(Relaxed)
    }

    pub(super) fn set_known(&self) {
        // Most calls change nothing, so avoid writing to the cache line.
        if self.unknown.load(Relaxed) {
            self.unknown.store(false, Relaxed);
        }
    }

    /// Marks the rank unavailable and replaces its assigned counts by their surplus over `even`.
    pub(super) fn leave(&self, even: Even) {
        self.away.store(true, Relaxed);
        self.assigned_tokens.add(-even.tokens);
        self.assigned_sequences.add(-even.sequences);
    }

    pub(super) fn come_back(&self, even: Even, fewest: Option<u64>) {
        if let Some(fewest) = fewest {
            self.assigned_requests.store(fewest, Relaxed);
        }
        self.assigned_tokens.add(even.tokens);
        self.assigned_sequences.add(even.sequences);
        self.unknown.store(true, Relaxed);
        self.away.store(false, Relaxed);
    }
}
