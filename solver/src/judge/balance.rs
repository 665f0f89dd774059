//! Measures of load imbalance.

/// Two measures of load imbalance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) max_over_mean: f64,
    /// The paper's measure. The median of an even number of loads is the mean of the middle two.
    pub(crate) max_over_median: f64,
}

/// Returns the imbalance of loads, or `None` if all are zero. A zero median is replaced by the smallest nonzero load.
pub(crate) fn spread(loads: &[u64]) -> Option<Spread> {
    let as_numbers: Vec<f64> = loads.iter().map(|&load| load as f64).collect();
    spread_of(&as_numbers)
}

/// Returns the imbalance of fractional loads, or `None` if all are zero.
pub(crate) fn spread_of(loads: &[f64]) -> Option<Spread> {
    let mut sorted = loads.to_vec();
    sorted.sort_by(f64::total_cmp);
    let most = sorted.last().copied().filter(|most| *most > 0.0)?;
    let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
    let middle = sorted.len() / 2;
    let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
    let least = sorted.iter().copied().find(|load| *load > 0.0)?;
    Some(Spread { max_over_mean: most / mean, max_over_median: most / if median > 0.0 { median } else { least } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(spread(&[3, 1, 2]), Some(Spread { max_over_mean: 1.5, max_over_median: 1.5 }));
        assert_eq!(spread(&[4, 0, 2, 2]), Some(Spread { max_over_mean: 2.0, max_over_median: 2.0 }));
        assert_eq!(spread(&[0, 0, 5]), Some(Spread { max_over_mean: 3.0, max_over_median: 1.0 }));
        assert_eq!(spread(&[0, 0]), None);
        assert_eq!(spread(&[]), None);
    }
}
