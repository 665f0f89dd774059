//! Seconds of repeated runs.

use std::time::Instant;

/// Any error ends the program.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of each of `runs` runs of `work`.
pub(crate) fn timed<T>(runs: usize, mut work: impl FnMut() -> Outcome<T>) -> Outcome<Vec<f64>> {
    let one = |_| {
        let began = Instant::now();
        std::hint::black_box(work()?);
        Ok(began.elapsed().as_secs_f64())
    };
    (0..runs).map(one).collect()
}
