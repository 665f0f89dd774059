//! Splits requests in two by their prompts: equal prompts are always on the same side, regardless of the file that
//! contains them and of the tokens that follow.
//!
//! Either side of one split may be split again by another. Every purpose has its own salt, so that the splits are
//! independent.

use crate::{TraceRequest, mix64};

/// A way to split requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSplit {
    salt: u64,
}

impl PromptSplit {
    /// Requests held out of a profile.
    pub const PROFILE: Self = Self { salt: 0 };
    /// Requests held out of a solve.
    pub const SOLVE: Self = Self { salt: 0x05ee_d0f7_4e5b_1175 };
    /// Halves of a trace; one predicts the other.
    pub const STUDY: Self = Self { salt: 0x9a1f_5e05_57d1_b3c7 };
    /// Halves of a trace under evaluation; each half is judged by the counts of the other.
    pub const EVALUATE: Self = Self { salt: 0x3c6e_f372_fe94_f82b };
    /// The splits of all purposes.
    pub const ALL: [Self; 4] = [Self::PROFILE, Self::SOLVE, Self::STUDY, Self::EVALUATE];

    /// Returns a further split for the same purpose, for requests already split `splits` times.
    #[must_use]
    pub fn after(self, splits: u64) -> Self {
        // mix64(0) is 0, so the first split keeps its salt.
        Self { salt: self.salt ^ mix64(splits) }
    }

    /// Returns a position in [0, 1), uniform over prompts. Depends only on the tokens of the prompt (FNV-1a, then the
    /// finaliser of SplitMix64).
    pub fn position(self, request: TraceRequest<'_>) -> f64 {
        let prompt = &request.token_ids()[..request.prompt_len()];
        let bytes = prompt.iter().flat_map(|token| token.to_le_bytes());
        let start = 0xcbf2_9ce4_8422_2325_u64 ^ self.salt;
        let fnv = bytes.fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        // The upper 53 bits are exact in an f64.
        (mix64(fnv) >> 11) as f64 / (1u64 << 53) as f64
    }
}
