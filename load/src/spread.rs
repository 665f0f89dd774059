//! How evenly requests are distributed over ranks and backends, according to the labels in responses.

use std::collections::HashMap;

use serde::Serialize;

/// Maximum number of distinct labels; all further labels are counted together.
const MAX_LABELS: usize = 4096;
const MAX_LABEL_BYTES: usize = 128;

/// Requests by label.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spread {
    counts: HashMap<Box<str>, u64>,
    others: u64,
    untold: u64,
}

/// Summary of a spread.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpreadSummary {
    /// Number of responses with a label.
    pub told: u64,
    /// Number of responses without a label.
    pub not_told: u64,
    /// The largest count divided by the mean over the labels seen; ranks without requests are not included.
    pub max_over_mean: Option<f64>,
    /// Number of requests per label, sorted by label.
    pub requests: Vec<(String, u64)>,
    /// Number of requests with labels beyond the first 4096.
    pub others: u64,
}

impl Spread {
    pub(crate) fn count(&mut self, label: Option<&str>) {
        let Some(label) = label.filter(|label| label.len() <= MAX_LABEL_BYTES) else {
            self.untold += 1;
            return;
        };
        self.add(label, 1);
    }

    fn add(&mut self, label: &str, requests: u64) {
        if let Some(count) = self.counts.get_mut(label) {
            *count += requests;
        } else if self.counts.len() < MAX_LABELS {
            self.counts.insert(label.into(), requests);
        } else {
            self.others += requests;
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (label, requests) in &other.counts {
            self.add(label, *requests);
        }
        self.others += other.others;
        self.untold += other.untold;
    }

    pub(crate) fn summary(&self) -> SpreadSummary {
        let mut requests: Vec<(String, u64)> =
            self.counts.iter().map(|(label, count)| (label.to_string(), *count)).collect();
        // 2 before 10.
        requests.sort_by(|(a, _), (b, _)| (a.len(), a).cmp(&(b.len(), b)));
        let told: u64 = requests.iter().map(|(_, count)| count).sum();
        let most = requests.iter().map(|(_, count)| *count).max();
        SpreadSummary {
            told: told + self.others,
            not_told: self.untold,
            max_over_mean: most.map(|most| most as f64 * requests.len() as f64 / told as f64),
            requests,
            others: self.others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_their_ratio() {
        let mut spread = Spread::default();
        for label in [Some("10"), Some("2"), Some("2"), Some("2"), None, Some(&*"x".repeat(500))] {
            spread.count(label);
        }
        let mut twice = spread.clone();
        twice.merge(&spread);
        let summary = twice.summary();
        assert_eq!(summary.requests, [("2".to_owned(), 6), ("10".to_owned(), 2)]);
        assert_eq!((summary.told, summary.not_told, summary.max_over_mean), (8, 4, Some(1.5)));
        assert_eq!(Spread::default().summary().max_over_mean, None);
    }

    #[test]
    fn labels_are_bounded() {
        let mut spread = Spread::default();
        (0..10_000).for_each(|label| spread.count(Some(&label.to_string())));
        let summary = spread.summary();
        assert_eq!((summary.requests.len(), summary.others, summary.told), (4096, 5904, 10_000));
    }
}
