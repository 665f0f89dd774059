//! Experts compressed to residuals.

use half::f16;
use semmoe_kernels::sr::{SharedExpert, SrEncoder, SrIndex, SrResidual};

/// Larger experts are not decoded: a header alone may name any length.
const MAX_WEIGHTS: usize = 1 << 18;

/// Any bytes are refused with a reason, or change just the weights that they name; and bytes as weights, if they can be
/// compressed, come back as a residual of as many values as the ratio allows.
pub fn sr(data: &[u8]) {
    if let Ok(residual) = SrResidual::parse(data)
        && residual.weights() <= MAX_WEIGHTS
    {
        check_decoded(residual);
    }
    let weights: Vec<f16> = data.chunks_exact(2).map(|bits| f16::from_le_bytes([bits[0], bits[1]])).collect();
    let (expert, mean) = weights.split_at(weights.len() / 2);
    let Ok(shared) = SharedExpert::new(mean[..expert.len()].to_vec(), 7) else { return };
    for (ratio, index) in [(2, SrIndex::InBlock), (3, SrIndex::InExpert)] {
        let mut message = Vec::new();
        if SrEncoder::default().encode(expert, &shared, ratio, index, &mut message).is_ok() {
            let residual = SrResidual::parse(&message).unwrap_or_else(|error| panic!("what was encoded: {error}"));
            assert_eq!(Ok(residual.kept()), index.kept(expert.len(), ratio));
            check_decoded(residual);
        }
    }
}

fn check_decoded(residual: SrResidual<'_>) {
    let shared = SharedExpert::new(vec![f16::ZERO; residual.weights()], residual.epoch())
        .unwrap_or_else(|error| panic!("zeros are weights: {error}"));
    let mut out = vec![f16::ONE; residual.weights()];
    residual.decode(&shared, &mut out).unwrap_or_else(|error| panic!("a residual that was checked: {error}"));
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
