//! The switch time model, and a guard that rejects layouts without room for the KV cache.

use super::{ByLayout, Layout};

/// Switch time model: `T = ((P - 1) / P * W + KV bytes into a rank) / B + fixed`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwitchCost {
    /// P: number of ranks in the unit, at least 1.
    pub ranks: u32,
    /// W: bytes of expert weights on each rank.
    pub weight_bytes: u64,
    /// Bytes per KV token that cross ranks, by target layout.
    pub token_bytes: ByLayout<u64>,
    /// B: bytes per second into each rank.
    pub bytes_per_second: f64,
    /// Fixed overhead in seconds: the vote, the barriers and the first step.
    pub fixed_seconds: f64,
}

impl SwitchCost {
    /// Returns the seconds of a switch to `to` with `live_tokens` in the cache, evenly spread over ranks.
    pub fn seconds(&self, to: Layout, live_tokens: u64) -> f64 {
        let ranks = f64::from(self.ranks.max(1));
        let weights = self.weight_bytes as f64 * (ranks - 1.0) / ranks;
        let cache = live_tokens as f64 * self.token_bytes[to] as f64 / ranks;
        (weights + cache) / self.bytes_per_second + self.fixed_seconds
    }
}

/// The new layout's KV cache is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a switch requires at most {room_tokens} tokens in the KV cache of {}, but {needed_tokens} are reserved", to.name())]
pub struct NoRoom {
    /// The layout.
    pub to: Layout,
    /// Tokens reserved for admitted requests.
    pub needed_tokens: u64,
    /// The applicable limit: the closing limit, or the reopening limit while closed.
    pub room_tokens: u64,
}

/// Rejects a layout whose KV cache would exceed a limit, until the need falls to a lower limit.
#[derive(Clone, Debug)]
pub struct Guard {
    close: ByLayout<u64>,
    reopen: ByLayout<u64>,
    closed: ByLayout<bool>,
}

impl Guard {
    /// Creates a guard for caches of `room_tokens` that closes above the fraction `close` and reopens at `reopen`.
    /// Fractions are clamped to `0 <= reopen <= close <= 1`.
    pub fn new(room_tokens: ByLayout<u64>, close: f64, reopen: f64) -> Self {
        let close = close.clamp(0.0, 1.0);
        let reopen = reopen.clamp(0.0, close);
        let of = |room: u64, share: f64| (room as f64 * share) as u64;
        let limit = |share| ByLayout { tp: of(room_tokens.tp, share), ep: of(room_tokens.ep, share) };
        Guard { close: limit(close), reopen: limit(reopen), closed: ByLayout::default() }
    }

    /// Updates the guard with the needed tokens. Must be called at every decision, so that the guard closes in time.
    pub fn update(&mut self, needed_tokens: u64) {
        for layout in [Layout::Tp, Layout::Ep] {
            self.closed[layout] = needed_tokens > self.limit(layout);
        }
    }

    /// Checks that the KV cache of `to` has room for `needed_tokens`.
    pub fn check(&self, to: Layout, needed_tokens: u64) -> Result<(), NoRoom> {
        let room_tokens = self.limit(to);
        if needed_tokens > room_tokens { Err(NoRoom { to, needed_tokens, room_tokens }) } else { Ok(()) }
    }

    fn limit(&self, layout: Layout) -> u64 {
        if self.closed[layout] { self.reopen[layout] } else { self.close[layout] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-235B-A22B in bf16 on 8 x H200: the figures of docs/switching.md.
    #[test]
    fn weights_take_the_times_that_the_bandwidth_gives() {
        for (gigabytes_per_second, milliseconds) in [(280.0, 177.4), (315.0, 157.7), (450.0, 110.4)] {
            let cost = SwitchCost {
                ranks: 8,
                weight_bytes: 56_774_098_944,
                token_bytes: ByLayout { tp: 336_896, ep: 144_384 },
                bytes_per_second: gigabytes_per_second * 1e9,
                fixed_seconds: 0.0,
            };
            let seconds = cost.seconds(Layout::Tp, 0);
            assert!((seconds * 1e3 - milliseconds).abs() < 0.06, "{seconds}");
            let cache = cost.seconds(Layout::Tp, 8000) - seconds;
            assert!((cache - 336_896e3 / (gigabytes_per_second * 1e9)).abs() < 1e-9);
        }
    }

    #[test]
    fn the_guard_opens_later_than_it_closes() {
        let mut guard = Guard::new(ByLayout { tp: 1000, ep: 2000 }, 0.9, 0.7);
        for (needed, open) in [(900, true), (901, false), (800, false), (700, true), (900, true)] {
            guard.update(needed);
            assert_eq!(guard.check(Layout::Tp, needed).is_ok(), open, "{needed}");
            assert!(guard.check(Layout::Ep, needed).is_ok());
        }
        guard.update(1900);
        let refused = guard.check(Layout::Ep, 1900).unwrap_err();
        assert_eq!(refused, NoRoom { to: Layout::Ep, needed_tokens: 1900, room_tokens: 1400 });
        assert!(refused.to_string().contains("at most 1400 tokens in the KV cache of ep"));
    }
}
