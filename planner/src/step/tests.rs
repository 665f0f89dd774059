//! Laws of the physical model, and its deviation from a measured table.

use proptest::prelude::*;

use super::*;
use crate::cluster::{Curve, Kernel, MeasuredKernel};
use crate::tests::fixtures::{deepseek_v3, h200, layout, qwen3_235b};

fn decode(layout: Layout, sequences: f64) -> f64 {
    let (shape, cluster, constants) = (qwen3_235b(), h200(layout.gpus() / 8), Constants::uncalibrated());
    let target = Target { shape: &shape, cluster: &cluster, layout, constants: &constants };
    step(&target, &Work { sequences, tokens: 1.0, cached: 1024.0 }).total()
}

/// Uncalibrated, Qwen3-235B on 8 H200 at context 1024 stays within a factor of 2.2 of aiconfigurator's measured tables
/// (SGLang; the worst case is whole experts at 2048 sequences), and slices win at 8 sequences.
#[test]
fn uncalibrated_steps_are_near_measured_ones() {
    let (tp8, ep8) = (layout(1, [8, 1], [8, 1]), layout(1, [1, 8], [1, 8]));
    let measured =
        [(8.0, 11.5, 18.3), (64.0, 21.8, 29.6), (256.0, 31.1, 39.6), (512.0, 39.8, 49.9), (2048.0, 97.2, 106.0)];
    for (sequences, tp, ep) in measured {
        for (layout, expected) in [(tp8, tp), (ep8, ep)] {
            let ratio = decode(layout, sequences) * 1e3 / expected;
            assert!((1.0 / 2.2..2.2).contains(&ratio), "{} at {sequences}: {ratio}", layout.name());
        }
    }
    assert!(decode(tp8, 8.0) < decode(ep8, 8.0));
}

#[test]
fn one_rank_communicates_nothing() {
    let (shape, cluster, constants) = (deepseek_v3(), h200(1), Constants::uncalibrated());
    let target = Target { shape: &shape, cluster: &cluster, layout: layout(1, [1, 1], [1, 1]), constants: &constants };
    let terms = step(&target, &Work { sequences: 4.0, tokens: 1.0, cached: 100.0 });
    assert_eq!(
        terms.exchange() + terms[Part::AttentionReduce] + terms[Part::ExpertShards] + terms[Part::Pipeline],
        0.0
    );
    assert!((256.0 * compute::activated(8.0 / 256.0, 1.0) - 8.0).abs() < 1e-9, "a token activates k experts");
    assert_eq!(target.copies(), 1.0);
}

/// Tables replace the parts that they cover, and each part names its source.
#[test]
fn measured_kernels_count_in_place_of_the_roofline() {
    let (shape, mut cluster, constants) = (qwen3_235b(), h200(1), Constants::uncalibrated());
    let layout = layout(1, [8, 1], [8, 1]);
    let work = Work { sequences: 4.0, tokens: 1.0, cached: 1023.0 };
    let of = |cluster: &Cluster| step(&Target { shape: &shape, cluster, layout, constants: &constants }, &work);
    let modelled = of(&cluster);
    let dtype = crate::shape::Dtype::Bf16;
    let kernel = Kernel::Decode { dtype, heads: 8, kv_heads: 1, head_dim: 128, context: 1024 };
    let points = Curve::new(vec![[1.0, 5e-6], [8.0, 12e-6]]).unwrap();
    cluster.measured.kernels.push(MeasuredKernel { kernel, points });
    let measured = of(&cluster);
    assert!((measured[Part::AttentionCore] - 94.0 * 8e-6).abs() < 1e-12);
    assert_eq!(measured[Part::Experts], modelled[Part::Experts]);
    let source = |terms: &StepTerms, name| terms.terms().into_iter().find(|term| term.name == name).unwrap().source;
    assert_eq!(source(&measured, "attention core"), "measured tables");
    assert!(source(&modelled, "attention core").starts_with("roofline"));
    assert!(source(&measured, "routed experts").starts_with("roofline"));
}

/// The experts that the fullest of 16 groups reads, by simulation: 8 of 256 for each token.
#[test]
fn the_fullest_group_is_that_of_counts() {
    for (groups, deviations) in [(2.0, 0.564), (8.0, 1.424), (16.0, 1.766), (64.0, 2.344), (128.0, 2.594)] {
        let found = compute::fullest(groups, 0.0, 1.0);
        assert!((found - deviations).abs() < 0.08, "{groups} groups: {found}");
    }
    assert_eq!(compute::fullest(1.0, 3.0, 2.0), 3.0);
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 56) as usize
    };
    for tokens in [4, 16, 64] {
        let rounds = 2000;
        let counted: usize = (0..rounds)
            .map(|_| {
                let mut read = [false; 256];
                for _ in 0..tokens {
                    let mut own = std::collections::BTreeSet::new();
                    while own.len() < 8 {
                        own.insert(draw());
                    }
                    own.into_iter().for_each(|expert| read[expert] = true);
                }
                read.chunks(16).map(|group| group.iter().filter(|read| **read).count()).max().unwrap()
            })
            .sum();
        let chosen = compute::activated(8.0 / 256.0, f64::from(tokens));
        let modelled = compute::fullest(16.0, 16.0 * chosen, 16.0 * chosen * (1.0 - chosen));
        let counted = counted as f64 / f64::from(rounds);
        assert!((modelled / counted - 1.0).abs() < 0.06, "{tokens} tokens: {modelled}, counted {counted}");
    }
}

/// All ranks wait for a prompt that arrives alone; simultaneous prompts of all ranks share the time. A single group
/// shares nothing.
#[test]
fn prompts_that_come_alone_cost_all_ranks() {
    let (shape, cluster, constants) = (qwen3_235b(), h200(1), Constants::uncalibrated());
    let seconds = |layout, concurrency| {
        let target = Target { shape: &shape, cluster: &cluster, layout, constants: &constants };
        let load = Load { concurrency, input_tokens: 2048.0, output_tokens: 1000.0 };
        let of = |prompts_at_once| step(&target, &prompts(prompts_at_once, &load)).total();
        (prefill_occupancy(&target, &load), of(1.0), of(8.0) / 8.0)
    };
    let (ep8, tp8) = (layout(1, [1, 8], [1, 8]), layout(1, [8, 1], [8, 1]));
    let (few, alone, _) = seconds(ep8, 1.0);
    assert!((few / alone - 1.0).abs() < 0.01, "{few} {alone}");
    let (many, _, shared) = seconds(ep8, 100_000.0);
    assert!((many / shared - 1.0).abs() < 1e-9 && many < few / 2.0, "{many} {shared} {few}");
    assert_eq!(seconds(tp8, 1.0).0, seconds(tp8, 100_000.0).0);
}

/// Two micro-batches of 8 sequences: each waits for both at the end of the last stage.
#[test]
fn micro_batches_wait_at_the_last_stage() {
    let (shape, cluster, constants) = (qwen3_235b(), h200(2), Constants::uncalibrated());
    let terms = |pipeline, sequences| {
        let layout = layout(pipeline, [8, 1], [8, 1]);
        let target = Target { shape: &shape, cluster: &cluster, layout, constants: &constants };
        step(&target, &Work { sequences, tokens: 1.0, cached: 100.0 })
    };
    let (two, one) = (terms(2, 16.0), terms(1, 8.0));
    assert_eq!(two[Part::Output], 2.0 * one[Part::Output]);
    assert!((two[Part::Overhead] - one[Part::Overhead] - constants.step_seconds).abs() < 1e-12);
    assert_eq!(two[Part::Experts], one[Part::Experts]);
    assert_eq!(terms(2, 1.0)[Part::Output], terms(1, 1.0)[Part::Output], "a lone sequence waits for no group");
}

/// MixServe's equations 12 and 13 choose sliced experts on nodes whose links are equal inside and between, and so does
/// the model at its 16 requests; slices are feasible everywhere.
#[test]
fn slices_win_on_equal_links_as_in_mixserve() {
    let (shape, mut cluster, constants) = (deepseek_v3(), h200(2), Constants::uncalibrated());
    cluster.levels[1] = crate::cluster::Level { name: "network".into(), count: 2, ..cluster.levels[0].clone() };
    let span = |size, stride| cluster.span(crate::cluster::Group { size, stride });
    let (inside, between) = (span(8, 1), span(2, 8));
    let (whole, routed) = (16.0 * 7168.0 * 2.0, 8.0 * 16.0 * 7168.0 * 2.0);
    let printed_ep = inside.all_reduce(whole) + 2.0 * between.all_to_all(routed);
    let printed_hybrid =
        inside.all_reduce(whole) + inside.scatter(routed / 8.0) + 2.0 * between.all_to_all(routed / 8.0);
    assert!(printed_hybrid < printed_ep);
    let load = Load { concurrency: 16.0, input_tokens: 220.0, output_tokens: 200.0 };
    let tpot =
        |layout| predict(&Target { shape: &shape, cluster: &cluster, layout, constants: &constants }, &load).tpot;
    assert!(tpot(layout(1, [8, 2], [8, 2])) < tpot(layout(1, [8, 2], [1, 16])));
}

proptest! {
    /// More sequences, a longer context or a longer prompt never make a step shorter; times are finite and positive.
    #[test]
    fn steps_grow_with_their_work(tp in 0u32..4, cut in 0u32..4, sequences in 1.0f64..4000.0, cached in 0.0f64..1e5) {
        let (stage, shape, cluster) = (8u64, qwen3_235b(), h200(1));
        let (tp, cut) = (1 << tp, 1 << cut);
        let layout = layout(1, [tp, stage / tp], [cut, stage / cut]);
        let constants = Constants::uncalibrated();
        let target = Target { shape: &shape, cluster: &cluster, layout, constants: &constants };
        let seconds = |sequences, tokens, cached| step(&target, &Work { sequences, tokens, cached }).total();
        let base = seconds(sequences, 1.0, cached);
        prop_assert!(base.is_finite() && base > 0.0);
        prop_assert!(seconds(sequences * 2.0, 1.0, cached) >= base);
        prop_assert!(seconds(sequences, 1.0, cached + 1000.0) >= base);
        prop_assert!(seconds(1.0, 512.0, 0.0) <= seconds(1.0, 1024.0, 0.0));
    }

    /// Faster links or more memory bandwidth never make a prediction worse.
    #[test]
    fn better_machines_are_not_slower(concurrency in 1.0f64..512.0, input in 1.0f64..8192.0, output in 1.0f64..2048.0) {
        let (shape, slow, constants) = (qwen3_235b(), h200(2), Constants::uncalibrated());
        let mut fast = slow.clone();
        fast.levels[1].bytes_per_second *= 2.0;
        fast.gpu.hbm *= 1.5;
        let load = Load { concurrency, input_tokens: input, output_tokens: output };
        let of = |cluster| {
            predict(&Target { shape: &shape, cluster, layout: layout(1, [4, 4], [1, 16]), constants: &constants }, &load)
        };
        let (slow, fast) = (of(&slow), of(&fast));
        prop_assert!(fast.ttft <= slow.ttft && fast.tpot <= slow.tpot);
    }
}
