//! The three element types of a row, and their conversions to f32 and back.
//!
//! Both directions use branch-free integer and float arithmetic, so that loops vectorise, and match a GPU bit for bit:
//! they round to nearest, ties to even, keep subnormals, and turn every NaN into the one with all bits but the sign
//! set.

use half::{bf16, f16};

/// Element type of a row; the numeric values match the C ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u32)]
pub enum Dtype {
    /// IEEE single precision.
    F32 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// The upper half of single precision.
    Bf16 = 2,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the type with this number in the C ABI.
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            2 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Returns the type's usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// An element of a row: f32, f16 or bf16.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug + sealed::Sealed {
    /// The element type.
    const DTYPE: Dtype;

    /// Converts to f32 exactly.
    fn widen(self) -> f32;

    /// Rounds to nearest, ties to even; a NaN becomes the one with all bits but the sign set.
    fn round(value: f32) -> Self;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        if value.is_nan() { f32::from_bits(0x7fff_ffff) } else { value }
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let even = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + even) >> 16;
        Self::from_bits(if value.is_nan() { 0x7fff } else { rounded as u16 })
    }
}

/// f16's maximum exponent, in its position in f16.
const F16_SPECIAL: u32 = 0x7c00;
const F32_SPECIAL: u32 = 0x7f80_0000;
/// 65536, the first power of two beyond f16's finite range; numbers of at least 65520 round to it.
const F16_OVERFLOW: u32 = (127 + 16) << 23;
/// 2^-14, f16's smallest normal number.
const F16_NORMAL: u32 = (127 - 14) << 23;
/// 0.5: its unit in the last place equals that of f16's subnormals, so adding 0.5 rounds to a subnormal.
const F16_SUBNORMAL_MAGIC: u32 = (127 - 1) << 23;

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let (sign, magnitude) = ((bits & 0x8000) << 16, bits & 0x7fff);
        // Interpreted as f32, the exponent is 112 too small, for subnormals too.
        let scaled = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
        let special = (magnitude << 13) | F32_SPECIAL;
        f32::from_bits(sign | if magnitude >= F16_SPECIAL { special } else { scaled })
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let magic = f32::from_bits(F16_SUBNORMAL_MAGIC);
        let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(F16_SUBNORMAL_MAGIC);
        let finite = if magnitude < F16_NORMAL { subnormal } else { normal };
        let rounded = if magnitude >= F16_OVERFLOW { F16_SPECIAL } else { finite };
        Self::from_bits(if value.is_nan() { 0x7fff } else { (sign | rounded) as u16 })
    }
}
