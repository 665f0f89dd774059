//! Element types of weights and caches.

use serde::Serialize;

/// An element type; bytes include scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// bfloat16 or float16: 2 bytes.
    Bf16,
    /// 8-bit floats, one f32 scale for each 128 x 128 block.
    Fp8,
    /// 4-bit integers, one f16 scale for each 128.
    Int4,
    /// OCP microscaling FP4: an 8-bit scale for each 32.
    Mxfp4,
    /// NVIDIA's FP4: an 8-bit scale for each 16.
    Nvfp4,
}

impl Dtype {
    /// All types, with the names accepted on the command line.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("f32", Self::F32),
        ("bf16", Self::Bf16),
        ("fp8", Self::Fp8),
        ("int4", Self::Int4),
        ("mxfp4", Self::Mxfp4),
        ("nvfp4", Self::Nvfp4),
    ];

    /// Bytes of an element, with its part of the scales.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Fp8 => 1.0 + 4.0 / 16384.0,
            Self::Int4 => 0.5 + 2.0 / 128.0,
            Self::Mxfp4 => 0.5 + 1.0 / 32.0,
            Self::Nvfp4 => 0.5 + 1.0 / 16.0,
        }
    }

    /// Rows and columns that must stay together when a matrix is divided; 1 if any division works.
    pub fn block(self) -> u64 {
        match self {
            Self::F32 | Self::Bf16 => 1,
            Self::Fp8 | Self::Int4 => 128,
            Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// The type of this name, as in [`Dtype::NAMES`].
    pub fn of(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
    }

    /// The name of this type.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, dtype)| *dtype == self).map_or("", |(name, _)| name)
    }
}

/// Element types of the parts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Routed experts.
    pub experts: Dtype,
    /// Attention projections, shared experts, dense layers.
    pub dense: Dtype,
    /// Embedding, output projection, routers, norms.
    pub other: Dtype,
    /// Cached keys and values.
    pub cache: Dtype,
}

impl Precision {
    /// Everything in one type, except the embedding, which keeps at least 2 bytes, and the cache, which stays bfloat16.
    pub fn uniform(dtype: Dtype) -> Self {
        let other = if dtype == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 };
        Self { experts: dtype, dense: dtype, other, cache: Dtype::Bf16 }
    }
}
