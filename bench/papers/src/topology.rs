//! Communicating pairs: global indices, locations, and the kind of communication.

use semmoe_planner::PlanError;

use crate::positive;

/// The kind of data that two GPUs exchange at a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Experts: both are in one domain.
    Gather,
    /// Tokens: in different domains, at the same position.
    Data,
}

/// Levels of workers with domains, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    factors: Vec<u64>,
    domains: Vec<u64>,
}

/// Directed pairs that communicate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frequency {
    /// Pairs that exchange tokens.
    pub data: u64,
    /// Pairs that exchange experts.
    pub gather: u64,
}

/// Pairs of one level of `workers` in domains of `size` (Table VII): tokens G (G / S - 1), experts G (S - 1).
pub fn frequency(workers: u64, size: u64) -> Frequency {
    Frequency { data: workers * (workers / size.max(1)).saturating_sub(1), gather: workers * size.saturating_sub(1) }
}

impl Topology {
    /// Levels with `factors` workers in each worker of the next outer level, in domains of `domains` workers.
    ///
    /// # Errors
    /// [`PlanError::Value`] if a domain's size does not divide its level, or the lists differ in length.
    pub fn new(factors: &[u64], domains: &[u64]) -> Result<Self, PlanError> {
        let wrong = |found: u64| PlanError::Value {
            what: "the size of an expert domain",
            found: found as f64,
            expected: "a divisor of its level's workers, one for each level",
        };
        if factors.len() != domains.len() || factors.is_empty() {
            return Err(wrong(domains.len() as u64));
        }
        for (factor, size) in factors.iter().zip(domains) {
            positive("the workers of a level", *factor as f64)?;
            if *size == 0 || !factor.is_multiple_of(*size) {
                return Err(wrong(*size));
            }
        }
        Ok(Self { factors: factors.to_vec(), domains: domains.to_vec() })
    }

    /// Total number of GPUs.
    pub fn gpus(&self) -> u64 {
        self.factors.iter().product()
    }

    /// The worker of GPU `index` at each level (equation 13): `floor(m / prod(SF_j, j > i)) mod SF_i`.
    pub fn location(&self, index: u64) -> Vec<u64> {
        let mut inside = self.gpus();
        let of = |factor: &u64| {
            inside /= factor;
            index / inside % factor
        };
        self.factors.iter().map(of).collect()
    }

    /// The exchange between GPUs `one` and `other` at `level`. The paper's Algorithm 1 compares only the inner levels,
    /// so it also pairs GPUs of different outer workers. Here all other levels must agree.
    pub fn exchange(&self, one: u64, other: u64, level: usize) -> Option<Exchange> {
        let (one, other) = (self.location(one), self.location(other));
        let agree = one.iter().zip(&other).enumerate().all(|(at, (a, b))| (at == level) == (a != b));
        if !agree {
            return None;
        }
        self.kind(one[level], other[level], level)
    }

    fn kind(&self, one: u64, other: u64, level: usize) -> Option<Exchange> {
        let size = self.domains[level];
        match (one / size == other / size, one % size == other % size) {
            (true, false) => Some(Exchange::Gather),
            (false, true) => Some(Exchange::Data),
            _ => None,
        }
    }

    /// Directed pairs at a level, over all GPUs: every GPU has the peers of its own line.
    pub fn frequency(&self, level: usize) -> Frequency {
        let lines = self.gpus() / self.factors[level];
        let line = frequency(self.factors[level], self.domains[level]);
        Frequency { data: lines * line.data, gather: lines * line.gather }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Table VII: tokens and experts for 8, 16 and 32 GPUs and every size of domain.
    #[test]
    fn golden_frequencies_of_table_seven() {
        let rows: [(u64, &[u64], &[u64]); 3] = [
            (8, &[56, 24, 8, 0], &[0, 8, 24, 56]),
            (16, &[240, 112, 48, 16, 0], &[0, 16, 48, 112, 240]),
            (32, &[992, 480, 224, 96, 32, 0], &[0, 32, 96, 224, 480, 992]),
        ];
        for (workers, data, gather) in rows {
            for (at, (data, gather)) in data.iter().zip(gather).enumerate() {
                assert_eq!(frequency(workers, 1 << at), Frequency { data: *data, gather: *gather });
            }
        }
    }

    /// 4 x 4 in domains of 2 and 4: as printed, Algorithm 1 has 192 gathering pairs at level 1.
    #[test]
    fn golden_pairs_of_algorithm_one() {
        let topology = Topology::new(&[4, 4], &[2, 4]).unwrap();
        assert_eq!(topology.frequency(0), Frequency { data: 16, gather: 16 });
        assert_eq!(topology.frequency(1), Frequency { data: 0, gather: 48 });
        let printed = |one: u64, other: u64| {
            let (one, other) = (topology.location(one), topology.location(other));
            topology.kind(one[1], other[1], 1)
        };
        let pairs = (0..16).flat_map(|one| (0..16).map(move |other| (one, other)));
        assert_eq!(pairs.filter(|(one, other)| printed(*one, *other) == Some(Exchange::Gather)).count(), 192);
        assert_eq!(topology.location(7), [1, 3]);
        let error = Topology::new(&[4, 4], &[3, 4]).unwrap_err().to_string();
        assert!(error.contains("the size of an expert domain is 3"), "{error}");
    }

    proptest! {
        #[test]
        fn locations_are_numbers_and_pairs_are_counted(
            levels in prop::collection::vec((1u32..3, 0u32..3), 1..4),
        ) {
            let factors: Vec<u64> = levels.iter().map(|(factor, _)| 1 << factor).collect();
            let domains: Vec<u64> = levels.iter().map(|(factor, size)| 1 << size.min(factor)).collect();
            let topology = Topology::new(&factors, &domains).unwrap();
            // One location per GPU, in the order of indices.
            let all: Vec<Vec<u64>> = (0..topology.gpus()).map(|index| topology.location(index)).collect();
            prop_assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(all.iter().all(|location| location.iter().zip(&factors).all(|(place, factor)| place < factor)));
            for level in 0..factors.len() {
                let mut counted = Frequency::default();
                for one in 0..topology.gpus() {
                    for other in 0..topology.gpus() {
                        match topology.exchange(one, other, level) {
                            Some(Exchange::Gather) => counted.gather += 1,
                            Some(Exchange::Data) => counted.data += 1,
                            None => {}
                        }
                        prop_assert_eq!(topology.exchange(one, other, level), topology.exchange(other, one, level));
                    }
                }
                prop_assert_eq!(counted, topology.frequency(level));
            }
        }
    }
}
