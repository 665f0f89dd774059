//! Checks that routes do not depend on the batch: one prompt is sent alone before the recording, and must have the same
//! routes when it is sent with the others.
//!
//! Engines that mix up the rows of a batch, or report physical slots instead of experts, clearly fail this check. Some
//! difference is normal, as a different summation order resolves near-ties differently: with bf16 and 8 experts per
//! token, a tenth of the tokens may swap one expert in a layer, about 1% of the activations. A fraction of [`WARN`] or
//! more is reported; above [`REFUSE`] the recording ends.

use serde::Serialize;

use crate::answer::Routed;

/// A warning is printed if at least this fraction of activations differs.
pub(crate) const WARN: f64 = 0.01;
/// A larger fraction cannot be due to rounding.
pub(crate) const REFUSE: f64 = 0.05;
/// Minimum number of activations for ending the recording.
const FEWEST: u64 = 200;

/// Comparison of one prompt sent alone and sent with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SelfCheck {
    /// Number of activations compared: prompt tokens x MoE layers x experts per token.
    pub activations: u64,
    /// Number of experts chosen in only one of the two responses.
    pub differing: u64,
}

impl SelfCheck {
    /// Compares the routes of the prompt tokens, which do not depend on the generated tokens. `None` if the prompts
    /// differ.
    pub(crate) fn of(alone: &Routed, among: &Routed, top_k: u16) -> Option<Self> {
        let tokens = alone.token_ids.get(..alone.prompt_len as usize)?;
        if tokens.is_empty() || among.token_ids.get(..among.prompt_len as usize)? != tokens {
            return None;
        }
        let row = alone.experts.len() / alone.token_ids.len();
        let (a, b) = (&alone.experts[..tokens.len() * row], &among.experts[..tokens.len() * row]);
        let k = usize::from(top_k);
        let missing = |(a, b): (&[u16], &[u16])| a.iter().filter(|expert| !b.contains(expert)).count() as u64;
        let differing = a.chunks_exact(k).zip(b.chunks_exact(k)).map(missing).sum();
        Some(SelfCheck { activations: a.len() as u64, differing })
    }

    /// Fraction of differing activations, 0..1.
    pub fn share(&self) -> f64 {
        self.differing as f64 / self.activations.max(1) as f64
    }

    /// Whether the difference warrants a warning.
    pub fn is_suspicious(&self) -> bool {
        self.share() >= WARN
    }

    pub(crate) fn is_wrong(&self) -> bool {
        self.activations >= FEWEST && self.share() > REFUSE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(tokens: &[u32], prompt_len: u32, experts: &[u16]) -> Routed {
        Routed { token_ids: tokens.to_vec(), prompt_len, experts: experts.to_vec() }
    }

    #[test]
    fn experts_are_compared_as_sets_and_only_those_of_the_prompt() {
        // Two tokens, two layers, two experts each; then a generated token.
        let alone = routed(&[5, 6], 2, &[0, 1, 2, 3, 4, 5, 6, 7]);
        let same = routed(&[5, 6, 9], 2, &[1, 0, 3, 2, 5, 4, 7, 6, 0, 1, 0, 1]);
        assert_eq!(SelfCheck::of(&alone, &same, 2), Some(SelfCheck { activations: 8, differing: 0 }));
        let other = routed(&[5, 6], 2, &[1, 0, 3, 4, 5, 4, 0, 1]);
        let found = SelfCheck::of(&alone, &other, 2).unwrap();
        assert_eq!((found.activations, found.differing), (8, 3));
        assert!(found.is_suspicious() && !found.is_wrong(), "too few to refuse");
        assert!(SelfCheck { activations: 200, differing: 11 }.is_wrong());
        assert!(!SelfCheck { activations: 200, differing: 10 }.is_wrong());
        assert_eq!(SelfCheck::of(&alone, &routed(&[5, 7], 2, &[0; 8]), 2), None);
        assert_eq!(SelfCheck::of(&routed(&[], 0, &[]), &alone, 2), None);
    }
}
