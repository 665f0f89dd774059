//! The stream model: computation and communication in an MoE layer overlap where possible.

use serde::Serialize;

use crate::PlanError;
use crate::error::{not_negative, positive};

/// A single level of equal workers, each with its own set of experts (Table I).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stream {
    /// G: number of workers, at least 2.
    pub workers: u64,
    /// B: bytes per second of one worker.
    pub bytes_per_second: f64,
    /// Lat_PE: seconds of computation before the experts, which can hide expert transfers.
    pub before_experts: f64,
    /// D: bytes of one worker's hidden states.
    pub data_bytes: f64,
    /// P_E: bytes of one worker's experts.
    pub expert_bytes: f64,
}

impl Stream {
    /// Checks all values.
    ///
    /// # Errors
    /// [`PlanError::Value`] for the first invalid value.
    pub fn check(&self) -> Result<(), PlanError> {
        positive("the workers less one", self.workers as f64 - 1.0)?;
        positive("the bandwidth in bytes/s", self.bytes_per_second)?;
        not_negative("the seconds before the experts", self.before_experts)?;
        not_negative("the bytes of data", self.data_bytes)?;
        positive("the bytes of experts", self.expert_bytes).map(drop)
    }

    /// Seconds of a layer if a fraction `p` of the transfers are data rather than experts (equation 10): `max(PE, (1 -
    /// p) P_E (G - 1) / B) + 2 p D (G - 1) / (G B)`. Expert computation is hidden and not counted.
    pub fn seconds(&self, p: f64) -> f64 {
        let (workers, others) = (self.workers as f64, self.workers as f64 - 1.0);
        let experts = (1.0 - p) * self.expert_bytes * others / self.bytes_per_second;
        let data = 2.0 * p * self.data_bytes * others / (workers * self.bytes_per_second);
        self.before_experts.max(experts) + data
    }

    /// Returns p for expert domains of `size` workers: (G - S) / (G - 1).
    pub fn share_of(&self, size: u64) -> f64 {
        (self.workers - size.clamp(1, self.workers)) as f64 / (self.workers as f64 - 1.0)
    }

    /// Bytes that one worker receives in a layer with domains of `size`: `P_E (S - 1)` for experts, and `2 D (1 - S /
    /// G)` for tokens in dispatch and combine. With a single domain the total does not depend on the tokens (Figure
    /// 16).
    pub fn traffic(&self, size: u64) -> [f64; 2] {
        let size = size.clamp(1, self.workers) as f64;
        [self.expert_bytes * (size - 1.0), 2.0 * self.data_bytes * (1.0 - size / self.workers as f64)]
    }
}

/// A level in a hierarchy of workers, listed outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HybridLevel {
    /// SF: number of workers inside one worker of the next outer level.
    pub workers: u64,
    /// Bytes per second of one GPU over these links.
    pub bytes_per_second: f64,
}

/// How serving uses gathered experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Use {
    /// Gathered once and kept, within `memory` bytes per GPU for all `layers` MoE layers.
    Resident {
        /// Bytes for experts on a GPU, including its own experts.
        memory: f64,
        /// MoE layers.
        layers: u64,
    },
    /// Gathered again in every step of every layer, as in training.
    Streamed,
}

/// Domain sizes and the resulting time of a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Domain size S of each level, outermost first.
    pub domains: Vec<u64>,
    /// Seconds of a layer, without expert computation.
    pub seconds: f64,
    /// Seconds of a layer without domains: expert parallelism over all workers.
    pub ep_seconds: f64,
    /// Bytes of experts per GPU and layer.
    pub expert_bytes: f64,
}

/// Returns the fastest of [`domain_choices`].
///
/// # Errors
/// [`PlanError::Value`] if a value of `stream` or of a level is invalid.
pub fn best_domains(stream: &Stream, levels: &[HybridLevel], used: Use) -> Result<Choice, PlanError> {
    let mut choices = domain_choices(stream, levels, used)?;
    choices.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    // Never empty, as using no domains is always a choice.
    Ok(choices.swap_remove(0))
}

/// Returns all combinations of domain sizes that fit in memory, including no domains. A GPU gathers from the outermost
/// level inwards: at level l it receives the experts that its peers gathered at outer levels, `(S_l - 1) x P_E x
/// prod(S_j, j < l)` bytes, and sends `D (1 - S_l / SF_l)` of its data, twice. `stream` provides everything except
/// workers and bandwidth.
///
/// # Errors
/// [`PlanError::Value`] if a value of `stream` or of a level is invalid.
pub fn domain_choices(stream: &Stream, levels: &[HybridLevel], used: Use) -> Result<Vec<Choice>, PlanError> {
    let workers: u64 = levels.iter().map(|level| level.workers).product();
    Stream { workers, bytes_per_second: 1.0, ..*stream }.check()?;
    for level in levels {
        positive("the bandwidth of a level in bytes/s", level.bytes_per_second)?;
    }
    let ep_seconds = layer_seconds(stream, levels, &vec![1; levels.len()], used);
    let choice = |domains: Vec<u64>| {
        let expert_bytes = stream.expert_bytes * domains.iter().product::<u64>() as f64;
        Choice { seconds: layer_seconds(stream, levels, &domains, used), domains, ep_seconds, expert_bytes }
    };
    let fits = |choice: &Choice| match used {
        Use::Resident { memory, layers } => choice.expert_bytes * layers as f64 <= memory,
        Use::Streamed => true,
    };
    let is_none = |choice: &Choice| choice.domains.iter().all(|size| *size == 1);
    Ok(combinations(levels).into_iter().map(choice).filter(|choice| is_none(choice) || fits(choice)).collect())
}

fn layer_seconds(stream: &Stream, levels: &[HybridLevel], domains: &[u64], used: Use) -> f64 {
    let (mut gathered, mut experts, mut data) = (stream.expert_bytes, 0.0, 0.0);
    for (level, size) in levels.iter().zip(domains) {
        experts += gathered * (size - 1) as f64 / level.bytes_per_second;
        gathered *= *size as f64;
        data += 2.0 * stream.data_bytes * (1.0 - *size as f64 / level.workers as f64) / level.bytes_per_second;
    }
    match used {
        Use::Resident { .. } => stream.before_experts + data,
        Use::Streamed => stream.before_experts.max(experts) + data,
    }
}

/// Returns every combination of one divisor per level.
fn combinations(levels: &[HybridLevel]) -> Vec<Vec<u64>> {
    levels.iter().fold(vec![Vec::new()], |all, level| {
        let longer = |begun: &Vec<u64>| {
            divisors(level.workers).into_iter().map(|size| begun.iter().copied().chain([size]).collect()).collect()
        };
        all.iter().flat_map(|begun| -> Vec<Vec<u64>> { longer(begun) }).collect()
    })
}

fn divisors(number: u64) -> Vec<u64> {
    (1..=number).filter(|size| number.is_multiple_of(*size)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table_four(before_ms: f64, data_mb: f64, expert_mb: f64) -> Stream {
        Stream {
            workers: 8,
            bytes_per_second: 16e9,
            before_experts: before_ms * 1e-3,
            data_bytes: data_mb * 1e6,
            expert_bytes: expert_mb * 1e6,
        }
    }

    /// The best p (equations 11 and 12: 0 if data cost at least as much as experts, otherwise the minimum that hides
    /// the experts), found by bisection: seconds first fall and then rise with p.
    fn best_share(stream: &Stream) -> f64 {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..200 {
            let third: f64 = (high - low) / 3.0;
            if stream.seconds(low + third) <= stream.seconds(high - third) { high -= third } else { low += third }
        }
        low
    }

    fn one_level(stream: &Stream) -> Choice {
        let level = HybridLevel { workers: stream.workers, bytes_per_second: stream.bytes_per_second };
        best_domains(stream, &[level], Use::Streamed).unwrap()
    }

    /// Table IV with its PE, which does not reproduce its p, and with ten times that, which does.
    #[test]
    fn golden_shares_of_table_four() {
        let share = |stream: Stream| (best_share(&stream) * 1e3).round() / 1e3;
        assert_eq!([4.7, 2.35].map(|expert| share(table_four(0.049, 8.0, expert))), [0.976, 0.952]);
        assert_eq!([4.7, 2.35].map(|expert| share(table_four(0.49, 8.0, expert))), [0.762, 0.523]);
        for before in [0.099, 0.99] {
            assert_eq!([0.094, 0.047].map(|expert| share(table_four(before, 3.0, expert))), [0.0, 0.0]);
        }
        assert_eq!(
            [1, 2, 4, 8].map(|size| table_four(0.49, 8.0, 4.7).share_of(size)),
            [1.0, 6.0 / 7.0, 4.0 / 7.0, 0.0]
        );
        assert_eq!([4.7, 2.35].map(|expert| one_level(&table_four(0.49, 8.0, expert)).domains), [[2], [4]]);
        assert_eq!(one_level(&table_four(0.099, 3.0, 0.094)).domains, [8]);
    }

    #[test]
    fn traffic_of_one_domain_does_not_depend_on_tokens() {
        let [few, many] = [8.0, 800.0].map(|data| table_four(0.49, data, 4.7));
        assert_eq!(few.traffic(8), many.traffic(8));
        assert_eq!((few.traffic(1)[0], few.traffic(8)[1]), (0.0, 0.0));
        assert!((many.traffic(1)[1] / few.traffic(1)[1] - 100.0).abs() < 1e-9);
        assert!((few.traffic(2)[0] - 4.7e6).abs() < 1e-6 && (few.traffic(2)[1] - 12e6).abs() < 1e-6);
    }

    #[test]
    fn residents_are_bounded_by_memory_and_streams_by_bandwidth() {
        let stream = table_four(0.49, 8.0, 4.7);
        let levels =
            [HybridLevel { workers: 4, bytes_per_second: 1.25e9 }, HybridLevel { workers: 8, bytes_per_second: 16e9 }];
        let of = |used| best_domains(&stream, &levels, used).unwrap();
        let all = of(Use::Resident { memory: 1e12, layers: 12 });
        assert_eq!(all.domains, [4, 8]);
        assert!((all.seconds - stream.before_experts).abs() < 1e-12);
        let some = of(Use::Resident { memory: 8.0 * 12.0 * 4.7e6, layers: 12 });
        assert_eq!(some.domains, [4, 2], "the slow links are left first");
        let none = of(Use::Resident { memory: 0.0, layers: 12 });
        assert_eq!((none.domains, none.seconds), (vec![1, 1], none.ep_seconds));
        let streamed = of(Use::Streamed);
        assert!(streamed.seconds <= streamed.ep_seconds && streamed.seconds >= all.seconds);
        assert!(best_domains(&Stream { expert_bytes: f64::NAN, ..stream }, &levels, Use::Streamed).is_err());
    }

    proptest! {
        /// No share beats the best one, and one level of domains equals the stream model.
        #[test]
        fn the_optimum_is_one(
            workers in 2u64..64, before in 0.0f64..1e-2, data in 1e3f64..1e9, expert in 1e3f64..1e9, p in 0.0f64..1.0,
        ) {
            let stream = Stream {
                workers, bytes_per_second: 1e10, before_experts: before, data_bytes: data, expert_bytes: expert,
            };
            let best = stream.seconds(best_share(&stream));
            prop_assert!(best <= stream.seconds(p) * (1.0 + 1e-12));
            let choice = one_level(&stream);
            let of_domains = |size: u64| stream.seconds(stream.share_of(size));
            let least = divisors(workers).into_iter().map(of_domains).fold(f64::INFINITY, f64::min);
            prop_assert!((choice.seconds - of_domains(choice.domains[0])).abs() <= 1e-9 * choice.seconds);
            prop_assert!(choice.seconds >= best * (1.0 - 1e-12));
            prop_assert!((choice.seconds - least).abs() <= 1e-9 * choice.seconds);
        }
    }
}
