//! The SR codec: the reference program's answers, round trips, and messages that are no residuals.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use half::f16;
use proptest::prelude::*;
use semmoe_bench_papers::sr::{BLOCK, SR_RATIOS, SharedExpert, SrEncoder, SrError, SrIndex, SrResidual};

fn encode(expert: &[f16], shared: &SharedExpert, ratio: u32, index: SrIndex) -> Vec<u8> {
    let mut message = Vec::new();
    SrEncoder::default().encode(expert, shared, ratio, index, &mut message).unwrap();
    message
}

fn decode(message: &[u8], shared: &SharedExpert) -> Result<Vec<f16>, SrError> {
    let mut out = vec![f16::ONE; shared.weights().len()];
    SrResidual::parse(message)?.decode(shared, &mut out).map(|()| out)
}

/// The weights of `sr_golden.py`.
fn golden_weights(experts: usize, weights: usize, step: usize) -> Vec<Vec<f16>> {
    let value = |e: usize, i: usize| {
        let count = (i * 7919 + e * 104_729 + i / 13 * e * 31) % step;
        f16::from_f64((count as f64 - (step / 2) as f64) / 512.0)
    };
    (0..experts).map(|e| (0..weights).map(|i| value(e, i)).collect()).collect()
}

#[test]
fn answers_are_those_of_the_reference_program() {
    for line in include_str!("data/sr.golden").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let list = |at: usize| fields[at].split(',').map(|word| word.parse::<u32>().unwrap()).collect::<Vec<_>>();
        let [experts, weights, ratio, bytes, step] = [0, 1, 2, 3, 4].map(|at| fields[at].parse::<usize>().unwrap());
        let all = golden_weights(experts, weights, step);
        let experts: Vec<&[f16]> = all.iter().map(Vec::as_slice).collect();
        let shared = SharedExpert::mean(&experts, 3).unwrap();
        let index = if bytes == 2 { SrIndex::InBlock } else { SrIndex::InExpert };
        let message = encode(experts[1], &shared, ratio as u32, index);
        let residual = SrResidual::parse(&message).unwrap();
        let (indices, values) = (list(5), list(6));
        let found: Vec<(usize, u32)> =
            residual.iter().map(|(weight, value)| (weight, u32::from(value.to_bits()))).collect();
        let expected = indices.iter().map(|&weight| weight as usize).zip(values).collect::<Vec<_>>();
        assert_eq!(found, expected, "{weights} weights, ratio {ratio}");
        assert_eq!((residual.weights(), residual.kept(), residual.epoch()), (weights, indices.len(), 3));
        let mut restored = shared.weights().to_vec();
        for (weight, value) in residual.iter() {
            restored[weight] = f16::from_f32(restored[weight].to_f32() + value.to_f32());
        }
        assert_eq!(decode(&message, &shared).unwrap(), restored);
        if fields.len() > 7 {
            let bits = |values: &[f16]| values.iter().map(|value| u32::from(value.to_bits())).collect::<Vec<_>>();
            assert_eq!(bits(shared.weights()), list(7));
            assert_eq!(bits(&decode(&message, &shared).unwrap()), list(8));
        }
    }
}

#[test]
fn an_expert_of_qwen3_keeps_as_many_values_as_its_bytes_allow() {
    // 3 x 4096 x 1536 weights at a ratio of 50: 754,974 bytes.
    assert_eq!(SrIndex::InExpert.kept(18_874_368, 50), Ok(125_829));
    assert_eq!(SrIndex::InBlock.kept(18_874_368, 50), Ok(188_743));
    for ratio in [0, 1, 51] {
        let error = SrIndex::InBlock.kept(100, ratio).unwrap_err();
        assert_eq!(error.to_string(), format!("a compression of {ratio}, expected 2 to 50"));
    }
    assert!(matches!(SrIndex::InBlock.kept(1 << 40, 2), Err(SrError::TooLong { .. })));
}

fn finite(values: Vec<i16>) -> Vec<f16> {
    // Half of f16's range: residuals of two such weights are finite.
    values.into_iter().map(|value| f16::from_f32(f32::from(value) * 0.99)).collect()
}

fn an_index() -> impl Strategy<Value = SrIndex> {
    prop::sample::select(vec![SrIndex::InBlock, SrIndex::InExpert])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn the_greatest_residuals_are_kept_and_nothing_else_changes(
        weights in prop::collection::vec((any::<i16>(), any::<i16>()), 0..400), ratio in SR_RATIOS, index in an_index(),
    ) {
        let (expert, mean): (Vec<i16>, Vec<i16>) = weights.into_iter().unzip();
        let (expert, shared) = (finite(expert), SharedExpert::new(finite(mean), 9).unwrap());
        let residual = |at: usize| expert[at].to_f32() - shared.weights()[at].to_f32();
        let mut order: Vec<usize> = (0..expert.len()).collect();
        order.sort_by(|&a, &b| residual(b).abs().total_cmp(&residual(a).abs()));
        order.truncate(index.kept(expert.len(), ratio).unwrap());
        order.sort_unstable();
        let message = encode(&expert, &shared, ratio, index);
        let parsed = SrResidual::parse(&message).unwrap();
        let expected: Vec<_> = order.iter().map(|&at| (at, f16::from_f32(residual(at)))).collect();
        prop_assert_eq!(parsed.iter().collect::<Vec<_>>(), expected.clone());
        let mut restored = shared.weights().to_vec();
        for (at, value) in expected {
            restored[at] = f16::from_f32(restored[at].to_f32() + value.to_f32());
        }
        prop_assert_eq!(decode(&message, &shared).unwrap(), restored);
    }

    #[test]
    fn any_bytes_are_refused_or_decoded(
        change in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), cut in 0usize..40, index in an_index(),
    ) {
        let shared = SharedExpert::new(finite((0..300).collect()), 1).unwrap();
        let mut message = encode(&finite((0..300).map(|at| at * 91 % 1000).collect()), &shared, 4, index);
        message.truncate(message.len() - cut.saturating_sub(30));
        for (at, byte) in change {
            let at = at.index(message.len());
            message[at] = byte;
        }
        decoded_as_named(&message);
    }

    #[test]
    fn bytes_from_outside_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        decoded_as_named(&bytes);
    }
}

/// Bytes are refused, or change just the weights that they name.
fn decoded_as_named(message: &[u8]) {
    // A header alone may name any length.
    let Some(residual) = SrResidual::parse(message).ok().filter(|residual| residual.weights() <= 1 << 18) else {
        return;
    };
    let shared = SharedExpert::new(vec![f16::ZERO; residual.weights()], residual.epoch()).unwrap();
    let mut out = vec![f16::ONE; residual.weights()];
    residual.decode(&shared, &mut out).unwrap();
    let mut expected = vec![f16::ZERO; residual.weights()];
    let mut named = 0;
    for (weight, value) in residual.iter() {
        // Zero and minus zero add up to zero.
        expected[weight] = f16::ZERO + value;
        named += 1;
    }
    assert_eq!(named, residual.kept());
    assert!(out == expected, "another expert than the residual");
}

/// A message of three values in two blocks.
fn two_blocks() -> Vec<u8> {
    let mut expert = vec![f16::ZERO; BLOCK + 10];
    for at in [7, 9, BLOCK + 2] {
        expert[at] = f16::ONE;
    }
    let shared = SharedExpert::new(vec![f16::ZERO; expert.len()], 5).unwrap();
    let whole = encode(&expert, &shared, 50, SrIndex::InBlock);
    // Beside the three, zeros are kept; a message built by hand has the three alone.
    let mut message = whole[..32].to_vec();
    message[12..16].copy_from_slice(&3u32.to_le_bytes());
    for count in [2u32, 1] {
        message.extend(count.to_le_bytes());
    }
    for at in [7u16, 9, 2] {
        message.extend(at.to_le_bytes());
    }
    for _ in 0..3 {
        message.extend(f16::ONE.to_bits().to_le_bytes());
    }
    assert_eq!(decode(&message, &shared).unwrap(), expert);
    message
}

#[test]
fn hostile_messages_are_refused_with_a_reason() {
    let good = two_blocks();
    let spoilt = |at: usize, bytes: &[u8]| {
        let mut message = good.clone();
        message[at..at + bytes.len()].copy_from_slice(bytes);
        SrResidual::parse(&message).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let format = "not a compressed expert of version 1";
    assert_eq!(spoilt(0, b"S"), format);
    assert_eq!(spoilt(8, &[2]), format);
    assert_eq!(spoilt(10, &[3]), format);
    assert_eq!(spoilt(12, &[4]), "a compressed expert of 52 bytes, expected 56");
    assert_eq!(
        spoilt(12, &[0xff; 4]),
        format!("a compressed expert of 52 bytes, expected {}", 40 + 4 * u64::from(u32::MAX))
    );
    assert_eq!(spoilt(16, &[0xff; 8]), format!("{} weights are more than the 4294967295 of an expert", u64::MAX));
    assert_eq!(spoilt(32, &[1]), "block counts sum to 2, expected 3");
    assert_eq!(spoilt(32, &[3, 0, 0, 0, 0]), "index 2 of a residual is 2, expected 10 to below 65536");
    assert_eq!(spoilt(42, &[7]), "index 1 of a residual is 7, expected 8 to below 65536");
    assert_eq!(spoilt(44, &[10]), "index 2 of a residual is 65546, expected 65536 to below 65546");
    assert_eq!(spoilt(46, &f16::NAN.to_bits().to_le_bytes()), "value 0 is not finite in f16");
    for cut in 0..good.len() {
        assert!(SrResidual::parse(&good[..cut]).is_err(), "{cut}");
    }
    let residual = SrResidual::parse(&good).unwrap();
    let error = |weights: usize, epoch: u64, out: usize| {
        let shared = SharedExpert::new(vec![f16::ZERO; weights], epoch).unwrap();
        residual.decode(&shared, &mut vec![f16::ZERO; out]).unwrap_err().to_string()
    };
    let weights = BLOCK + 10;
    assert_eq!(error(weights, 6, weights), "a residual on the shared expert of epoch 5, expected epoch 6");
    assert_eq!(error(3, 5, 3), "the residual has 65546 weights, expected 3");
    assert_eq!(error(weights, 5, 3), "out has 3 weights, expected 65546");
}

#[test]
fn experts_that_cannot_be_compressed_are_refused_and_nothing_is_written() {
    let shared = SharedExpert::new(vec![f16::MAX, f16::ZERO], 0).unwrap();
    let refused = |expert: &[f16], ratio: u32| {
        let mut out = vec![1, 2];
        let error = SrEncoder::default().encode(expert, &shared, ratio, SrIndex::InBlock, &mut out).unwrap_err();
        assert_eq!(out, [1, 2]);
        error.to_string()
    };
    assert_eq!(refused(&[f16::ZERO], 2), "the expert has 1 weights, expected 2");
    assert_eq!(refused(&[f16::MIN, f16::ZERO], 2), "residual 0 is not finite in f16");
    assert_eq!(refused(&[f16::ONE, f16::NAN], 2), "residual 1 is not finite in f16");
    assert_eq!(refused(&[f16::ONE, f16::ONE], 51), "a compression of 51, expected 2 to 50");
    assert_eq!(SharedExpert::mean(&[], 0), Err(SrError::NoExperts));
    let error = SharedExpert::mean(&[&[f16::ONE], &[f16::ONE; 2]], 0).unwrap_err();
    assert_eq!(error.to_string(), "an expert has 2 weights, expected 1");
    let error = SharedExpert::mean(&[&[f16::INFINITY]], 0).unwrap_err();
    assert_eq!(error.to_string(), "shared weight 0 is not finite in f16");
}
