//! Communicating pairs, and the similarity of experts.

use std::hint::black_box;
use std::time::Instant;

use half::f16;
use semmoe_bench_papers::sr;
use semmoe_bench_papers::topology::{Frequency, Topology, frequency};

use crate::Outcome;
use crate::papers::Verdict::{Corrected, NeedsGpu, Refuted, Reproduced};
use crate::papers::{Found, Size, Verdict};
use crate::perplexity::{bundled_experts, rises};

/// Table VII: EP size, pairs of A2A and of AG for domains of 1, 2, 4, ...
const TABLE_7: [(u64, &[u64], &[u64]); 3] = [
    (8, &[56, 24, 8, 0], &[0, 8, 24, 56]),
    (16, &[240, 112, 48, 16, 0], &[0, 16, 48, 112, 240]),
    (32, &[992, 480, 224, 96, 32, 0], &[0, 32, 96, 224, 480, 992]),
];

pub(super) fn table_7() -> Outcome<Found> {
    let (mut right, mut all) = (0, 0);
    for (workers, data, gather) in TABLE_7 {
        for (at, (data, gather)) in data.iter().zip(gather).enumerate() {
            all += 2;
            let found: Frequency = frequency(workers, 1 << at);
            right += usize::from(found.data == *data) + usize::from(found.gather == *gather);
        }
    }
    Ok(Found::new(Verdict::of(right == all, Corrected), format!("{right} of {all} figures")))
}

/// 4 x 4 GPUs in domains of 2 and 4, the figure's example: pairs that gather at the inner level.
pub(super) fn figure_8() -> Outcome<Found> {
    let topology = Topology::new(&[4, 4], &[2, 4])?;
    let locations: Vec<Vec<u64>> = (0..topology.gpus()).map(|gpu| topology.location(gpu)).collect();
    // As printed, only the inner levels are compared, and there are none: the GPUs share a domain but not a position.
    let printed = |one: &Vec<u64>, other: &Vec<u64>| one[1] / 4 == other[1] / 4 && one[1] % 4 != other[1] % 4;
    let pairs = locations.iter().map(|one| locations.iter().filter(|other| printed(one, other)).count()).sum::<usize>();
    let right = topology.frequency(1).gather;
    let verdict = Verdict::of(pairs as u64 == right, Corrected);
    Ok(Found::new(
        verdict,
        format!(
            "4 x 4 GPUs, domains of 2 and 4: {pairs} gathering pairs inside as printed, {right} where outer levels agree"
        ),
    ))
}

/// Standard deviation.
fn deviation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count().max(1) as f64;
    let mean = values.clone().sum::<f64>() / count;
    (values.map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt()
}

pub(super) fn figure_9() -> Outcome<Found> {
    let layers = bundled_experts()?;
    let mut ratios = Vec::new();
    for experts in &layers {
        let slices: Vec<_> = experts.iter().map(Vec::as_slice).collect();
        let shared = sr::mean(&slices);
        let weights = slices.iter().flat_map(|expert| expert.iter().map(|weight| weight.to_f64()));
        let residuals = slices
            .iter()
            .flat_map(|expert| expert.iter().zip(&shared).map(|(weight, shared)| weight.to_f64() - shared.to_f64()));
        ratios.push(deviation(residuals) / deviation(weights));
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    let experts = layers.first().map_or(1, Vec::len) as f64;
    let independent = (1.0 - 1.0 / experts).sqrt();
    let ours = format!(
        "bundled model: {:.1}% of the weights' deviation left, {:.1}% if experts had nothing in common",
        mean * 1e2,
        independent * 1e2
    );
    // Half would already halve the weights that top-k has to keep.
    Ok(Found::new(if mean < 0.5 { Reproduced } else { Refuted }, ours))
}

pub(super) fn figure_14(size: Size) -> Outcome<Found> {
    let texts = if size == Size::Full { 96 } else { 24 };
    let [with, without] = rises(50, texts)?;
    let ours =
        format!("bundled model: perplexity {:+.0}% with the shared expert, {:+.0}% without", with * 1e2, without * 1e2);
    Ok(Found::new(if with < 0.01 { Reproduced } else { Refuted }, ours))
}

/// Seconds of the fastest of five runs.
fn fastest<T>(of: impl Fn() -> T) -> f64 {
    let seconds = |_| {
        let began = Instant::now();
        black_box(of());
        began.elapsed().as_secs_f64()
    };
    (0..5).map(seconds).fold(f64::INFINITY, f64::min)
}

/// An expert of Qwen3-235B (a sixteenth of one, small), random weights, a ratio of 50.
pub(super) fn figure_15(size: Size) -> Outcome<Found> {
    let weights = 3 * 4096 * 1536 / if size == Size::Full { 1 } else { 16 };
    let mut random = fastrand::Rng::with_seed(1);
    let mut expert = || (0..weights).map(|_| f16::from_f32(random.f32() - 0.5)).collect::<Vec<_>>();
    let experts = [expert(), expert()];
    let shared = sr::mean(&[&experts[0], &experts[1]]);
    let kept = sr::kept(weights, 50, sr::INDEX_BYTES[0]);
    let residual = sr::encode(&experts[0], &shared, kept);
    let decode = fastest(|| sr::decode(&residual, &shared));
    let copy = fastest(|| shared.clone());
    let ours = format!("CPU: an expert of Qwen3-235B at 50 decoded at {:.2} of a copy's rate", copy / decode);
    Ok(Found::new(NeedsGpu, ours))
}
