//! `canary = 10`: selects the requests to be routed by the candidate policy.

use crate::hash::scramble;

/// The percentage of requests routed by the candidate policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canary {
    percent: u8,
}

/// Step between the positions of consecutive requests. Coprime to 100, so that all 100 positions occur, in an order
/// unlikely to correlate with traffic.
const STRIDE: u64 = 37;

impl Canary {
    /// Creates a canary of 0 to 100 percent; `None` above 100.
    pub fn new(percent: u8) -> Option<Self> {
        (percent <= 100).then_some(Canary { percent })
    }

    /// Percentage of requests.
    pub fn percent(self) -> u8 {
        self.percent
    }

    /// Returns whether request `number` is selected. Of every 100 requests, aligned to multiples of 100, exactly
    /// `percent` are selected, at varying positions.
    pub fn takes(self, number: u64) -> bool {
        let place = (number % 100 * STRIDE + scramble(number / 100) % 100) % 100;
        place < u64::from(self.percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_every_hundred_exactly_so_many_at_changing_places() {
        assert_eq!(Canary::new(101), None);
        for percent in [0, 1, 10, 50, 99, 100] {
            let canary = Canary::new(percent).unwrap();
            let places = |hundred: u64| (0..100).filter(move |at| canary.takes(hundred * 100 + at)).collect::<Vec<_>>();
            for hundred in [0, 1, 2, 77, u64::MAX / 100 - 1] {
                assert_eq!(places(hundred).len(), usize::from(percent), "hundred {hundred}");
            }
            if percent == 10 {
                assert_ne!(places(0), places(1));
            }
        }
    }
}
