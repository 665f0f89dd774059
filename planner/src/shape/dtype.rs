//! Element types of weights and caches.

use serde::Serialize;

/// An element type, including its quantisation scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// bfloat16 or float16: 2 bytes.
    Bf16,
    /// 8-bit floats with one f32 scale per 128 x 128 block.
    Fp8,
    /// 4-bit integers with one f16 scale per 128 elements.
    Int4,
    /// OCP microscaling FP4, with an 8-bit scale per 32 elements.
    Mxfp4,
    /// NVIDIA's FP4, with an 8-bit scale per 16 elements.
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

    /// Bytes per element, including its share of the scales.
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

    /// Number of rows and columns that must stay together when a matrix is divided; 1 if there is no restriction.
    pub fn block(self) -> u64 {
        match self {
            Self::F32 | Self::Bf16 => 1,
            Self::Fp8 | Self::Int4 => 128,
            Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Returns the type with this name, as in [`Dtype::NAMES`].
    pub fn of(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
    }

    /// The name of this type.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, dtype)| *dtype == self).map_or("", |(name, _)| name)
    }
}

/// Element types of a model's parts.
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
    /// Uses one type for everything, except that the embedding has at least 2 bytes and the cache stays bfloat16.
    pub fn uniform(dtype: Dtype) -> Self {
        let other = if dtype == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 };
        Self { experts: dtype, dense: dtype, other, cache: Dtype::Bf16 }
    }
}
