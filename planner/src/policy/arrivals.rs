//! Arrival rate of prompt tokens: the maximum of a slow moving average and of a fast one minus its noise.

/// The fast average counts only where it exceeds the slow average by this many standard deviations.
const DEVIATIONS: f64 = 2.0;

/// A sum whose terms decay exponentially.
#[derive(Clone, Copy, Debug)]
struct Fading {
    window_seconds: f64,
    sum: f64,
    at: f64,
}

impl Fading {
    fn new(window_seconds: f64) -> Self {
        Fading { window_seconds, sum: 0.0, at: 0.0 }
    }

    fn left(&self, at: f64) -> f64 {
        self.sum * (-(at - self.at).max(0.0) / self.window_seconds).exp()
    }

    fn add(&mut self, at: f64, value: f64) {
        self.sum = self.left(at) + value;
        self.at = self.at.max(at);
    }

    /// Returns the moving average per second.
    fn rate(&self, at: f64) -> f64 {
        self.left(at) / self.window_seconds
    }
}

/// Estimates the arrival rate. The fast average reacts to bursts at once, and the slow average bridges short pauses. A
/// few long prompts are not a burst: for Poisson arrivals with sizes x, the variance of an average over the window w is
/// E(x^2) times the arrival rate over 2 w, which the slow window estimates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrivals {
    fast: Fading,
    slow: Fading,
    squares: Fading,
}

impl Arrivals {
    pub(super) fn new(fast_seconds: f64, slow_seconds: f64) -> Self {
        let slow = Fading::new(slow_seconds);
        Arrivals { fast: Fading::new(fast_seconds), slow, squares: slow }
    }

    pub(super) fn add(&mut self, at: f64, tokens: u32) {
        let tokens = f64::from(tokens);
        self.fast.add(at, tokens);
        self.slow.add(at, tokens);
        self.squares.add(at, tokens * tokens);
    }

    /// Returns the arrival rate in tokens per second.
    pub(super) fn rate(&self, at: f64) -> f64 {
        let deviation = (self.squares.rate(at) / (2.0 * self.fast.window_seconds)).sqrt();
        self.slow.rate(at).max(self.fast.rate(at) - DEVIATIONS * deviation)
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
        assert!(arrivals.rate(40.5) > 25_000.0, "the burst shows within half a second");
        assert!(arrivals.rate(42.0) > 5000.0, "and is not forgotten at once");
        assert!(arrivals.rate(70.0) < 10.0);
    }
}
