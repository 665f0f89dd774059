//! A layout's decode step time by batch size, interpolated between measured points.

/// Limit on points, far above any table of measurements.
pub const MAX_POINTS: usize = 4096;

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Batch size of the whole unit in sequences, at least 1.
    pub sequences: u32,
    /// Seconds of a step in which each sequence decodes one token.
    pub seconds: f64,
}

/// The reason why points do not form a curve.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CurveError {
    /// No points, or too many.
    #[error("{found} points, expected 1 to {MAX_POINTS}")]
    Count {
        /// The number of points.
        found: usize,
    },
    /// Batch sizes are not in ascending order.
    #[error("a batch of {sequences} follows a batch of {before}, expected ascending batches from 1")]
    Order {
        /// The batch.
        sequences: u32,
        /// The preceding batch size, or 0.
        before: u32,
    },
    /// A step time is not a positive number.
    #[error("a step of {sequences} sequences takes {seconds} s, expected a positive number")]
    Seconds {
        /// The batch.
        sequences: u32,
        /// The time.
        seconds: f64,
    },
}

/// Decode step time by batch size: linear in log2 of the batch size between points, constant below the first point,
/// unknown above the last.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCurve {
    points: Vec<Point>,
}

impl StepCurve {
    /// Creates a curve through `points`, which must be in ascending order of batch size.
    pub fn new(points: Vec<Point>) -> Result<Self, CurveError> {
        if points.is_empty() || points.len() > MAX_POINTS {
            return Err(CurveError::Count { found: points.len() });
        }
        let mut before = 0;
        for &Point { sequences, seconds } in &points {
            if sequences <= before {
                return Err(CurveError::Order { sequences, before });
            }
            if !(seconds.is_finite() && seconds > 0.0) {
                return Err(CurveError::Seconds { sequences, seconds });
            }
            before = sequences;
        }
        Ok(StepCurve { points })
    }

    /// Returns the seconds of a step with `sequences` sequences; `None` above the last point.
    pub fn seconds(&self, sequences: u32) -> Option<f64> {
        let above = self.points.partition_point(|point| point.sequences < sequences);
        let high = self.points.get(above)?;
        let Some(low) = above.checked_sub(1).map(|below| self.points[below]) else { return Some(high.seconds) };
        let log = |batch: u32| f64::from(batch).log2();
        let share = (log(sequences) - log(low.sequences)) / (log(high.sequences) - log(low.sequences));
        Some(low.seconds + (high.seconds - low.seconds) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u32, f64)]) -> Result<StepCurve, CurveError> {
        StepCurve::new(points.iter().map(|&(sequences, seconds)| Point { sequences, seconds }).collect())
    }

    #[test]
    fn between_points_below_and_above_them() {
        let curve = curve(&[(8, 1.0), (32, 3.0), (64, 3.5)]).unwrap();
        for (sequences, expected) in [(1, 1.0), (8, 1.0), (16, 2.0), (32, 3.0), (64, 3.5)] {
            assert_eq!(curve.seconds(sequences), Some(expected), "{sequences}");
        }
        assert_eq!(curve.seconds(65), None);
    }

    #[test]
    fn points_that_are_no_curve() {
        assert_eq!(curve(&[]), Err(CurveError::Count { found: 0 }));
        assert_eq!(curve(&[(0, 1.0)]), Err(CurveError::Order { sequences: 0, before: 0 }));
        assert_eq!(curve(&[(4, 1.0), (4, 1.0)]), Err(CurveError::Order { sequences: 4, before: 4 }));
        for wrong in [0.0, -1.0, f64::INFINITY] {
            assert_eq!(curve(&[(4, wrong)]), Err(CurveError::Seconds { sequences: 4, seconds: wrong }));
        }
        assert!(curve(&[(4, f64::NAN)]).is_err());
    }
}
