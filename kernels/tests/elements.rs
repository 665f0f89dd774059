//! Conversions of elements against the `half` crate, over all f16 and bf16 values and the f32 values around every tie.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use half::{bf16, f16};
use semmoe_kernels::Element;

#[test]
fn widening_is_exact() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (Element::widen(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "f16 {bits:#x}");
        let (ours, theirs) = (Element::widen(bf16::from_bits(bits)), bf16::from_bits(bits).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "bf16 {bits:#x}");
    }
}

/// Every value of either type, the midpoint to the next one, and the adjacent f32 values.
fn hard_values() -> impl Iterator<Item = f32> {
    let middles = (0..=u16::MAX).flat_map(|bits| {
        let f16_step = f16::from_bits(bits).to_f32().to_bits();
        let bf16_step = u32::from(bits) << 16;
        [f16_step, f16_step.wrapping_add(1 << 12), bf16_step, bf16_step.wrapping_add(1 << 15)]
    });
    let subnormal_middles = (0..1u32 << 12).map(|i| ((i as f32 + 0.5) * 2.0f32.powi(-24)).to_bits());
    middles
        .chain(subnormal_middles)
        .flat_map(|bits| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)])
        .map(f32::from_bits)
}

#[test]
fn rounding_is_to_nearest_even_and_nans_are_one() {
    for value in hard_values() {
        let (half, brain, single) =
            (<f16 as Element>::round(value), <bf16 as Element>::round(value), <f32 as Element>::round(value));
        if value.is_nan() {
            assert_eq!((half.to_bits(), brain.to_bits(), single.to_bits()), (0x7fff, 0x7fff, 0x7fff_ffff));
        } else {
            assert_eq!(half.to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(brain.to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(single.to_bits(), value.to_bits());
        }
    }
}
