//! Requests divided in two by their prompts: equal prompts are on one side, whatever file they are in and whatever
//! comes with them.
//!
//! A part that one split leaves may be divided again by another. Every purpose has a salt of its own here, so that each
//! side of one split has both sides of every other.

use crate::{TraceRequest, mix64};

/// A way to divide requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSplit {
    salt: u64,
}

impl PromptSplit {
    /// Requests that are left out of a profile.
    pub const PROFILE: Self = Self { salt: 0 };
    /// Requests that are left out of a solve.
    pub const SOLVE: Self = Self { salt: 0x05ee_d0f7_4e5b_1175 };
    /// Halves of a trace, to predict one from the other.
    pub const STUDY: Self = Self { salt: 0x9a1f_5e05_57d1_b3c7 };
    /// Halves of a trace that is judged, each by what the other has counted.
    pub const EVALUATE: Self = Self { salt: 0x3c6e_f372_fe94_f82b };
    /// All purposes.
    pub const ALL: [Self; 4] = [Self::PROFILE, Self::SOLVE, Self::STUDY, Self::EVALUATE];

    /// The same purpose again, for requests that so many splits for it have divided before.
    #[must_use]
    pub fn after(self, splits: u64) -> Self {
        // mix64(0) is 0: the first split has the salt as it is.
        Self { salt: self.salt ^ mix64(splits) }
    }

    /// Where in 0..1 a request lies, evenly spread over prompts; it depends on every token of the prompt (FNV-1a, then
    /// the finaliser of SplitMix64) and on nothing else.
    pub fn position(self, request: TraceRequest<'_>) -> f64 {
        let prompt = &request.token_ids()[..request.prompt_len()];
        let bytes = prompt.iter().flat_map(|token| token.to_le_bytes());
        let start = 0xcbf2_9ce4_8422_2325_u64 ^ self.salt;
        let fnv = bytes.fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        // The upper 53 bits are exact in an f64.
        (mix64(fnv) >> 11) as f64 / (1u64 << 53) as f64
    }
}
