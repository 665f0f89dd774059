//! Rates of the SR codec beside a copy of as many bytes.

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::f16;
use semmoe_bench_papers::sr::{SharedExpert, SrEncoder, SrIndex, SrResidual};

use crate::Outcome;

/// The least of several runs.
fn least(runs: usize, mut work: impl FnMut()) -> Duration {
    let time = |_| {
        let began = Instant::now();
        work();
        began.elapsed()
    };
    (0..runs).map(time).min().unwrap_or_default()
}

/// Around zero, without two that are alike nearby.
fn values(count: usize, seed: u64, scale: f32) -> Vec<f16> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f16::from_f32(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale)
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Prints both directions for an expert of `count` weights.
pub(crate) fn print(count: usize) -> Outcome<()> {
    let shared = SharedExpert::new(values(count, 1, 0.05), 1)?;
    let expert: Vec<f16> =
        shared.weights().iter().zip(values(count, 2, 0.0025)).map(|(mean, own)| mean + own).collect();
    let mut out = vec![f16::ZERO; count];
    let copy = least(9, || black_box(&mut out).copy_from_slice(black_box(shared.weights())));
    println!("{count} weights; a copy of {} bytes takes {copy:?}", 2 * count);
    println!("| ratio | index | bytes | encode | decode | rate of decode over that of the copy |");
    println!("|---|---|---|---|---|---|");
    let mut encoder = SrEncoder::default();
    for ratio in [2, 5, 10, 50] {
        for index in [SrIndex::InBlock, SrIndex::InExpert] {
            let mut message = Vec::new();
            let mut failed = None;
            let encode = least(3, || {
                message.clear();
                failed = encoder.encode(&expert, &shared, ratio, index, &mut message).err();
            });
            if let Some(error) = failed {
                return Err(error.into());
            }
            let residual = SrResidual::parse(&message)?;
            let decode = least(9, || black_box(residual.decode(&shared, black_box(&mut out))).unwrap_or_default());
            let share = copy.as_secs_f64() / decode.as_secs_f64();
            println!("| {ratio} | {} | {} | {encode:.1?} | {decode:.1?} | {share:.2} |", index.bytes(), message.len());
        }
    }
    Ok(())
}
