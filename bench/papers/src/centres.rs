//! Data centres with different links: the bytes of every pair, and the slowest centre (equation 9).

use semmoe_planner::PlanError;

use crate::topology::{Exchange, Topology};
use crate::{not_negative, positive};

/// One data centre.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Centre {
    /// Bytes per second of its uplink, and of its downlink.
    pub bytes_per_second: f64,
    /// Seconds of computation before the experts.
    pub before_experts: f64,
    /// Bytes of hidden states.
    pub data_bytes: f64,
}

/// One MoE layer over all centres.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Size of the expert domains.
    pub domain: u64,
    /// Seconds until the last centre has finished, without expert computation.
    pub seconds: f64,
    /// Bytes of experts over all links.
    pub gathered_bytes: f64,
    /// Bytes of hidden states over all links, dispatch and combine.
    pub data_bytes: f64,
}

/// Adds up what each pair of centres exchanges, with domains of `domain` consecutive centres and `expert_bytes` of
/// experts per centre. A centre sends an equal part of its data to every other centre; data for another domain goes
/// through the peer at the same position there. Links are full duplex: the busier direction counts.
///
/// # Errors
/// [`PlanError::Value`] for invalid values, or a domain that does not divide the centres.
pub fn simulate(centres: &[Centre], expert_bytes: f64, domain: u64) -> Result<Outcome, PlanError> {
    let count = centres.len() as u64;
    positive("the bytes of experts", expert_bytes)?;
    let topology = Topology::new(&[count], &[domain])?;
    for centre in centres {
        positive("the bandwidth of a centre in bytes/s", centre.bytes_per_second)?;
        not_negative("the seconds before the experts", centre.before_experts)?;
        not_negative("the bytes of data", centre.data_bytes)?;
    }
    let (mut gathered, mut data) = (0.0, 0.0);
    let mut sent = vec![0.0; centres.len()];
    let mut received = vec![0.0; centres.len()];
    let mut fetched = vec![0.0; centres.len()];
    for (one, centre) in centres.iter().enumerate() {
        for other in 0..centres.len() {
            match topology.exchange(one as u64, other as u64, 0) {
                Some(Exchange::Gather) => {
                    fetched[other] += expert_bytes;
                    gathered += expert_bytes;
                }
                Some(Exchange::Data) => {
                    let bytes = centre.data_bytes * domain as f64 / count as f64;
                    sent[one] += bytes;
                    received[other] += bytes;
                    data += 2.0 * bytes;
                }
                None => {}
            }
        }
    }
    let seconds = centres.iter().enumerate().map(|(at, centre)| {
        let experts = fetched[at] / centre.bytes_per_second;
        let exchange = 2.0 * f64::max(sent[at], received[at]) / centre.bytes_per_second;
        centre.before_experts.max(experts) + exchange
    });
    Ok(Outcome { domain, seconds: seconds.fold(0.0, f64::max), gathered_bytes: gathered, data_bytes: data })
}

#[cfg(test)]
mod tests {
    use semmoe_planner::hybridep::Stream;

    use super::*;

    fn equal(count: usize) -> Vec<Centre> {
        vec![Centre { bytes_per_second: 1.25e9, before_experts: 0.01, data_bytes: 64e6 }; count]
    }

    /// For equal centres the result equals the stream model's, whatever the domain.
    #[test]
    fn equal_centres_are_the_stream_model() {
        for (count, domain) in [(2u64, 1), (2, 2), (12, 3), (60, 60), (60, 1), (60, 10)] {
            let stream = Stream {
                workers: count,
                bytes_per_second: 1.25e9,
                before_experts: 0.01,
                data_bytes: 64e6,
                expert_bytes: 2e6,
            };
            let found = simulate(&equal(count as usize), 2e6, domain).unwrap().seconds;
            let expected = stream.seconds(stream.share_of(domain));
            assert!((found - expected).abs() < 1e-9 * expected, "{count} in {domain}: {found} {expected}");
        }
    }

    #[test]
    fn a_thousand_centres_and_one_slow_one() {
        let mut centres = equal(1000);
        let even = simulate(&centres, 2e5, 10).unwrap();
        assert!(even.gathered_bytes > 0.0 && even.data_bytes > 0.0);
        centres[7].bytes_per_second /= 4.0;
        let slow = simulate(&centres, 2e5, 10).unwrap();
        let exchange = even.seconds - 0.01;
        assert!((slow.seconds - (0.01 + 4.0 * exchange)).abs() < 1e-9);
        assert!(simulate(&centres, 2e5, 7).is_err());
    }
}
