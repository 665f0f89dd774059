//! Prompt tokens per second that arrive: the greater of a fast and a slow moving average.

/// A moving average with exponential weights.
#[derive(Clone, Copy, Debug)]
struct Average {
    window_seconds: f64,
    tokens: f64,
    at: f64,
}

impl Average {
    fn left(&self, at: f64) -> f64 {
        self.tokens * (-(at - self.at).max(0.0) / self.window_seconds).exp()
    }

    fn add(&mut self, at: f64, tokens: f64) {
        self.tokens = self.left(at) + tokens;
        self.at = self.at.max(at);
    }

    fn rate(&self, at: f64) -> f64 {
        self.left(at) / self.window_seconds
    }
}

/// The arrival rate: a burst shows in the fast average at once, and a pause of a moment does not hide it in the slow one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrivals {
    fast: Average,
    slow: Average,
}

impl Arrivals {
    pub(super) fn new(fast_seconds: f64, slow_seconds: f64) -> Self {
        let average = |window_seconds| Average { window_seconds, tokens: 0.0, at: 0.0 };
        Arrivals { fast: average(fast_seconds), slow: average(slow_seconds) }
    }

    pub(super) fn add(&mut self, at: f64, tokens: u32) {
        self.fast.add(at, tokens.into());
        self.slow.add(at, tokens.into());
    }

    /// Tokens per second.
    pub(super) fn rate(&self, at: f64) -> f64 {
        self.fast.rate(at).max(self.slow.rate(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_a_burst_and_a_pause() {
        let mut arrivals = Arrivals::new(0.5, 3.0);
        (0..4000).for_each(|tick| arrivals.add(f64::from(tick) * 0.01, 50));
        let steady = arrivals.rate(40.0);
        assert!((4900.0..5200.0).contains(&steady), "{steady}");
        (0..50).for_each(|tick| arrivals.add(40.0 + f64::from(tick) * 0.01, 500));
        assert!(arrivals.rate(40.5) > 30_000.0, "the burst shows within half a second");
        assert!(arrivals.rate(42.0) > 5000.0, "and is not forgotten at once");
        assert!(arrivals.rate(70.0) < 10.0);
    }
}
