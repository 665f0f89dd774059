//! Waiting times.

use crate::PlanError;
use crate::error::{not_negative, positive};

/// Mean waiting time before service in an M/M/1 queue (equation 7): `arriving / (served (served - arriving))`. In
/// seconds if both rates count the same unit per second; `served` must not count steps.
///
/// # Errors
/// [`PlanError::Unstable`] if the arrival rate is not below the service rate, [`PlanError::Value`] if a rate is
/// invalid.
pub fn waiting(arriving: f64, served: f64, unit: &'static str) -> Result<f64, PlanError> {
    not_negative("the arrival rate", arriving)?;
    positive("the service rate", served)?;
    if arriving >= served {
        return Err(PlanError::Unstable { arriving, served, unit });
    }
    Ok(arriving / (served * (served - arriving)))
}

/// Mean waiting times per class in a non-preemptive priority M/M/1 queue (Cobham), given each class's share of the
/// arrivals, highest priority first: `rho / (mu (1 - s_before) (1 - s_with))`, where s is the utilisation by all higher
/// classes, without and with this class.
///
/// # Errors
/// [`PlanError::Unstable`] if the total arrival rate is not below the service rate, [`PlanError::Value`] if a rate is
/// invalid.
pub fn class_waits(arriving: f64, served: f64, shares: &[f64], unit: &'static str) -> Result<Vec<f64>, PlanError> {
    waiting(arriving, served, unit)?;
    let load = arriving / served;
    let mut before = 0.0;
    let wait = |share: &f64| {
        let with = before + load * share;
        let seconds = load / served / ((1.0 - before) * (1.0 - with));
        before = with;
        seconds
    };
    Ok(shares.iter().map(wait).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_waits() {
        for (arriving, wait) in [(8.0, 0.4), (5.0, 0.1), (9.9, 9.9)] {
            assert!((waiting(arriving, 10.0, "tokens/s").unwrap() - wait).abs() < 1e-9);
        }
        let error = waiting(10.0, 10.0, "tokens/s").unwrap_err().to_string();
        assert_eq!(
            error,
            "the queue is unstable: 10 tokens/s arrive, but at most 10 can be served (utilisation 1.000)"
        );
        assert!(waiting(f64::NAN, 10.0, "tokens/s").is_err() && waiting(1.0, 0.0, "tokens/s").is_err());
    }

    proptest! {
        /// For any order, waits weighted by arrivals add up to the wait without classes (Kleinrock's conservation law).
        #[test]
        fn classes_share_one_wait(served in 0.1f64..1e3, load in 0.0f64..0.99, cuts in prop::collection::vec(0.1f64..1.0, 1..5)) {
            let sum: f64 = cuts.iter().sum();
            let shares: Vec<f64> = cuts.iter().map(|cut| cut / sum).collect();
            let waits = class_waits(load * served, served, &shares, "requests/s").unwrap();
            let mean: f64 = waits.iter().zip(&shares).map(|(wait, share)| wait * share).sum();
            let whole = waiting(load * served, served, "requests/s").unwrap();
            prop_assert!((mean - whole).abs() <= 1e-9 * whole.max(1e-9));
            prop_assert!(waits.windows(2).all(|pair| pair[0] <= pair[1]));
        }

        #[test]
        fn waits_grow_with_the_load(served in 0.1f64..1e6, low in 0.0f64..0.99, more in 0.001f64..0.009) {
            let of = |share: f64| waiting(share * served, served, "requests/s").unwrap();
            prop_assert!(of(low) < of(low + more) && of(low) >= 0.0);
        }
    }
}
