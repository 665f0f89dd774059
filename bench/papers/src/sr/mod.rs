//! Experts compressed to a sparse residual on a shared expert (HybridEP, section IV-B: SREncode and SRDecode).
//!
//! The shared expert is the mean of all experts; of what an expert differs from it by, the k weights of the greatest
//! magnitude are kept, as f16. What the paper leaves open:
//!
//! - the mean is summed in f32 in the order of the experts, divided in f32, and rounded to f16;
//! - the residual is f32(w) - f32(S); of equal magnitudes the lowest index is kept; indices ascend;
//! - decoded weights are f16(f32(S) + f32(value)) where a value was kept, and S elsewhere;
//! - k is such that values and indices take at most 1 / ratio of the expert's bytes, header and block counts not
//!   counted;
//! - a residual carries the epoch of the shared expert that it is to be added to.
//!
//! One message, little-endian, b = [`BLOCK`]:
//!
//! | field | type |
//! |---|---|
//! | `"semmoeSR"` | 8 bytes |
//! | version 1; bytes of an index, 2 or 4 | u16, u16 |
//! | k | u32 |
//! | n, epoch | u64, u64 |
//! | with indices of 2 bytes: how many values each block of b weights has | u32 `[ceil(n / b)]` |
//! | indices, ascending: in the block (2 bytes), or in the expert (4 bytes) | u16 or u32 `[k]` |
//! | values | f16 `[k]` |

mod decode;
mod encode;

use half::f16;
use semmoe_kernels::Element;

pub use decode::SrResidual;
pub use encode::SrEncoder;

/// Weights of a block: what an index of 2 bytes can count.
pub const BLOCK: usize = 1 << 16;

/// The least and the greatest ratio.
pub const SR_RATIOS: std::ops::RangeInclusive<u32> = 2..=50;

const MAGIC: [u8; 8] = *b"semmoeSR";
const VERSION: u16 = 1;

/// Why an expert was not compressed, or not restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SrError {
    /// A ratio outside of [`SR_RATIOS`].
    #[error("a compression of {found}, expected {} to {}", SR_RATIOS.start(), SR_RATIOS.end())]
    Ratio {
        /// The ratio asked for.
        found: u32,
    },
    /// Experts of different lengths, or none.
    #[error("{what} has {found} weights, expected {expected}")]
    Length {
        /// Whose weights.
        what: &'static str,
        /// Its weights.
        found: usize,
        /// The shared expert's.
        expected: usize,
    },
    /// More weights than an index can count.
    #[error("{found} weights are more than the {} of an expert", u32::MAX)]
    TooLong {
        /// Weights of the expert.
        found: usize,
    },
    /// No expert to take the mean of.
    #[error("a shared expert of 0 experts, expected at least 1")]
    NoExperts,
    /// A weight, a mean or a residual that is no finite f16.
    #[error("{what} {index} is not finite in f16")]
    NotFinite {
        /// The kind of number.
        what: &'static str,
        /// Where it stands.
        index: usize,
    },
    /// A message that is not in this format.
    #[error("not a compressed expert of version {VERSION}")]
    Format,
    /// A message that is longer or shorter than its header says.
    #[error("a compressed expert of {found} bytes, expected {expected}")]
    Size {
        /// Bytes of the message.
        found: usize,
        /// Bytes by its header.
        expected: u64,
    },
    /// Counts of blocks that do not add up.
    #[error("block counts sum to {found}, expected {expected}")]
    Counts {
        /// Their sum.
        found: u64,
        /// k
        expected: u64,
    },
    /// Indices that do not ascend, or leave the expert.
    #[error("index {index} of a residual is {found}, expected {low} to below {high}")]
    Index {
        /// Which index.
        index: usize,
        /// The weight that it names.
        found: u64,
        /// The least that may stand there.
        low: u64,
        /// The exclusive upper bound.
        high: u64,
    },
    /// A residual on another shared expert.
    #[error("a residual on the shared expert of epoch {found}, expected epoch {expected}")]
    Epoch {
        /// The residual's.
        found: u64,
        /// The shared expert's.
        expected: u64,
    },
}

/// How a message names weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SrIndex {
    /// By their place in a block of [`BLOCK`]: 2 bytes.
    InBlock,
    /// By their place in the expert: 4 bytes.
    InExpert,
}

impl SrIndex {
    /// Bytes of an index.
    pub fn bytes(self) -> usize {
        match self {
            Self::InBlock => size_of::<u16>(),
            Self::InExpert => size_of::<u32>(),
        }
    }

    /// k: values that are kept of n f16 weights.
    ///
    /// # Errors
    /// A ratio outside of [`SR_RATIOS`], an expert that is too long.
    pub fn kept(self, weights: usize, ratio: u32) -> Result<usize, SrError> {
        if !SR_RATIOS.contains(&ratio) {
            return Err(SrError::Ratio { found: ratio });
        }
        if u32::try_from(weights).is_err() {
            return Err(SrError::TooLong { found: weights });
        }
        let kept_bytes = u64::from(ratio) * (size_of::<f16>() + self.bytes()) as u64;
        Ok((weights as u64 * size_of::<f16>() as u64 / kept_bytes) as usize)
    }
}

/// The mean of a layer's experts, which residuals are added to.
#[derive(Clone, PartialEq, Debug)]
pub struct SharedExpert {
    epoch: u64,
    weights: Vec<f16>,
}

impl SharedExpert {
    /// The mean of experts. The epoch is any number that another mean does not have.
    ///
    /// # Errors
    /// No experts, experts of different lengths, a mean that is not finite.
    pub fn mean(experts: &[&[f16]], epoch: u64) -> Result<Self, SrError> {
        let (first, others) = experts.split_first().ok_or(SrError::NoExperts)?;
        let mut sums: Vec<f32> = first.iter().map(|weight| weight.widen()).collect();
        for expert in others {
            check_len("an expert", expert.len(), first.len())?;
            sums.iter_mut().zip(*expert).for_each(|(sum, weight)| *sum += weight.widen());
        }
        let count = experts.len() as f32;
        Self::new(sums.into_iter().map(|sum| f16::round(sum / count)).collect(), epoch)
    }

    /// Weights that came from elsewhere; zeros for residuals that are the experts themselves.
    ///
    /// # Errors
    /// A weight that is not finite.
    pub fn new(weights: Vec<f16>, epoch: u64) -> Result<Self, SrError> {
        match weights.iter().position(|weight| !weight.is_finite()) {
            None => Ok(Self { epoch, weights }),
            Some(index) => Err(SrError::NotFinite { what: "shared weight", index }),
        }
    }

    /// `[n]`
    pub fn weights(&self) -> &[f16] {
        &self.weights
    }

    /// Which mean it is.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

fn check_len(what: &'static str, found: usize, expected: usize) -> Result<(), SrError> {
    if found == expected { Ok(()) } else { Err(SrError::Length { what, found, expected }) }
}
