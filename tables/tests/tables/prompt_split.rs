//! Splits by prompt are independent of one another.

use semmoe_tables::{PromptSplit, Trace, TraceBuilder};

use crate::common::{model, provenance};

const REQUESTS: u32 = 4000;

/// Similar prompts: most of their tokens are equal.
fn trace() -> Trace {
    let mut builder = TraceBuilder::new(model(4, 1, REQUESTS, &[0]), provenance()).unwrap();
    (0..REQUESTS).for_each(|token| builder.push(&[1, 2, token, 3], 4, &[0; 4], None).unwrap());
    builder.finish().unwrap()
}

#[test]
fn each_side_of_a_split_has_both_sides_of_every_other() {
    let trace = trace();
    let splits: Vec<PromptSplit> =
        PromptSplit::ALL.into_iter().flat_map(|split| [0, 1, 2].map(|times| split.after(times))).collect();
    for (at, one) in splits.iter().enumerate() {
        for other in &splits[at + 1..] {
            assert_ne!(one, other);
            for share in [0.05, 0.2, 0.5, 0.8] {
                for (low, high) in [(0.0, share), (share, 1.0)] {
                    let side = trace.iter().filter(|request| (low..high).contains(&one.position(*request)));
                    let positions: Vec<f64> = side.map(|request| other.position(request)).collect();
                    let expected = (high - low) * f64::from(REQUESTS);
                    assert!(
                        (positions.len() as f64 - expected).abs() < 120.0,
                        "{one:?}: {} of {expected}",
                        positions.len()
                    );
                    // Four standard deviations of a share.
                    let error = 4.0 * 0.5 / (positions.len() as f64).sqrt();
                    for part in [0.1, 0.5, 0.9] {
                        let found = positions.iter().filter(|at| **at < part).count() as f64 / positions.len() as f64;
                        assert!((found - part).abs() < error, "{one:?} {other:?} {share}: {found} of {part}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_split_of_a_purpose_is_the_purpose_itself() {
    assert!(PromptSplit::ALL.iter().all(|split| split.after(0) == *split));
}
