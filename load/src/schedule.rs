//! When requests are sent: as soon as others end (closed loop), or at given times independent of the server (open
//! loop).

use std::sync::Arc;
use std::time::Duration;

/// Maximum gap or time. A larger number must be a mistake, and the limit keeps sums exact.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// Send times of an open loop, non-decreasing and relative to the start of the run.
#[derive(Clone, Debug)]
pub(crate) enum Schedule {
    /// A Poisson process; `now` is the last time, in seconds.
    Poisson {
        per_second: f64,
        random: fastrand::Rng,
        now: f64,
    },
    Recorded {
        times: Arc<[Duration]>,
        speed: f64,
        next: usize,
    },
}

impl Schedule {
    /// Creates an endless sequence of exponential gaps with a mean of `1 / per_second` seconds (finite, above 0),
    /// determined by the seed.
    pub(crate) fn poisson(per_second: f64, seed: u64) -> Self {
        Self::Poisson { per_second, random: fastrand::Rng::with_seed(seed), now: 0.0 }
    }

    /// Creates a schedule from recorded times, in order, each divided by `speed` (finite, above 0).
    pub(crate) fn recorded(times: Arc<[Duration]>, speed: f64) -> Self {
        Self::Recorded { times, speed, next: 0 }
    }
}

impl Iterator for Schedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let seconds = match self {
            Self::Poisson { per_second, random, now } => {
                // 1 - f64() is in (0, 1], so the logarithm is finite.
                *now += -(1.0 - random.f64()).ln() / *per_second;
                *now
            }
            Self::Recorded { times, speed, next } => {
                let time = times.get(*next)?.as_secs_f64();
                *next += 1;
                time / *speed
            }
        };
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The mean of n exponential gaps has a standard deviation of mean / sqrt(n): within 5 of them for all these seeds.
    #[test]
    fn poisson_gaps_have_the_mean_and_spread_of_an_exponential() {
        for (seed, per_second) in [(1, 50.0), (2, 0.5), (3, 20_000.0)] {
            let n = 20_000;
            let times: Vec<f64> = Schedule::poisson(per_second, seed).take(n).map(|time| time.as_secs_f64()).collect();
            let mean = times[n - 1] / n as f64;
            let tolerance = 5.0 / (n as f64).sqrt();
            assert!((mean * per_second - 1.0).abs() < tolerance, "{mean} at {per_second}");
            let over_mean = times.windows(2).filter(|pair| pair[1] - pair[0] > mean).count() as f64 / n as f64;
            assert!((over_mean - (-1.0f64).exp()).abs() < tolerance, "{over_mean} of the gaps are above the mean");
        }
    }

    #[test]
    fn seeds_decide_the_times() {
        let times = |seed| Schedule::poisson(10.0, seed).take(100).collect::<Vec<_>>();
        assert_eq!(times(7), times(7));
        assert_ne!(times(7), times(8));
    }

    #[test]
    fn recorded_times_are_scaled_and_end() {
        let times: Arc<[Duration]> = [0, 100, 100, 400].map(Duration::from_millis).into();
        let scaled: Vec<_> = Schedule::recorded(times, 4.0).collect();
        assert_eq!(scaled, [0, 25, 25, 100].map(Duration::from_millis));
    }

    proptest! {
        #[test]
        fn times_never_fall_or_overflow(rate in 1e-300f64..1e300, speed in 1e-300f64..1e300, seed: u64) {
            let random: Vec<_> = Schedule::poisson(rate, seed).take(50).collect();
            let scaled: Vec<_> = Schedule::recorded(random.clone().into(), speed).collect();
            for times in [random, scaled] {
                prop_assert!(times.is_sorted());
                prop_assert!(times.iter().all(|time| *time <= LONGEST));
            }
        }
    }
}
