//! Instrumentation for measuring gamma: routes activations to the token's own rank at a given rate, regardless of the
//! router's choice. Rows are really sent and computed, so step times are representative of that rate; the generated
//! text is wrong by design.

use semmoe_kernels::mix;
use semmoe_tables::{LayerIdx, mix64};

use super::hosts::{LayerHosts, NOT_HERE};

/// The fraction of activations routed to the token's own rank.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ForcedRate(f64);

impl ForcedRate {
    /// Returns `None` unless the rate is in [0, 1].
    pub fn new(rate: f64) -> Option<Self> {
        (0.0..=1.0).contains(&rate).then_some(Self(rate))
    }

    /// The rate.
    pub fn get(self) -> f64 {
        self.0
    }

    /// Returns a key for a token at a position. The key determines which experts are drawn, independently of the rest
    /// of the batch.
    pub(crate) fn key(token: u32, position: usize) -> u64 {
        mix(mix(0, token.into()), position as u64)
    }

    /// Redraws a layer's `experts`, `[n, k]`, for the tokens with these `keys`, `[n]`. With the rate as probability, an
    /// expert is drawn from this rank's experts, otherwise from the other ranks' experts, without repetition within a
    /// token.
    pub(super) fn redraw(self, layer: LayerIdx, hosts: &LayerHosts, keys: &[u64], experts: &mut [u16]) {
        let top_k = experts.len().checked_div(keys.len()).unwrap_or(0).max(1);
        let count = hosts.slot_of.len();
        let here = hosts.slot_of.iter().filter(|slot| **slot != NOT_HERE).count();
        for (key, chosen) in keys.iter().zip(experts.chunks_exact_mut(top_k)) {
            for slot in 0..top_k {
                let draw = mix64(mix(mix(*key, layer.index() as u64), slot as u64));
                let local = ((draw >> 11) as f64) < self.0 * (1u64 << 53) as f64;
                let wanted = || (0..count).filter(|expert| (hosts.slot_of[*expert] != NOT_HERE) == local);
                let candidates = if local { here } else { count - here };
                let first = mix64(draw) as usize % candidates.max(1);
                let is_new = |expert: &usize| !chosen[..slot].contains(&(*expert as u16));
                let found = wanted().skip(first).chain(wanted()).find(is_new);
                // Startup checks that this rank has at least k experts, and that the other ranks together also do.
                chosen[slot] = found.unwrap_or(first) as u16;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use semmoe_tables::{ExpertCopies, Placement, RankId};

    use super::super::placement::ExpertPlacement;
    use super::*;
    use crate::ep::ExpertLayout;

    /// Counts stay within 5 binomial standard deviations; experts are used evenly; a token's experts are distinct, and
    /// do not depend on the batch.
    #[test]
    fn the_rate_is_held_and_tokens_keep_their_experts() {
        let replicas = ExpertCopies::from(&Placement::contiguous(3, 32, 4).unwrap());
        let hosts = LayerHosts::of_placement(&ExpertPlacement { layout: ExpertLayout::Ep, replicas }, RankId::new(2));
        let keys: Vec<u64> = (0..4000).map(|at| ForcedRate::key(at % 50, at as usize)).collect();
        for rate in [0.0, 0.1, 0.4, 0.7, 1.0] {
            let (forced, mut experts) = (ForcedRate::new(rate).unwrap(), vec![0; keys.len() * 4]);
            let layer = LayerIdx::new(1);
            forced.redraw(layer, &hosts[1], &keys, &mut experts);
            let local = experts.iter().filter(|expert| (16..24).contains(*expert)).count() as f64;
            let (pairs, found) = (experts.len() as f64, local / experts.len() as f64);
            assert!((found - rate).abs() <= 5.0 * (rate * (1.0 - rate) / pairs).sqrt(), "{rate}: {found}");
            for chosen in experts.chunks(4) {
                let mut distinct = chosen.to_vec();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!(distinct.len(), 4, "{chosen:?}");
            }
            if rate < 1.0 {
                let uses = |expert: u16| experts.iter().filter(|used| **used == expert).count() as f64;
                let even = pairs * (1.0 - rate) / 24.0;
                assert!((0..16).all(|expert| (uses(expert) - even).abs() < 0.2 * even), "{rate}");
            }
            let mut alone = vec![0; 4];
            forced.redraw(layer, &hosts[1], &keys[70..71], &mut alone);
            assert_eq!(alone, experts[280..284]);
        }
        assert_eq!([-0.1, 1.1, f64::NAN].map(ForcedRate::new), [None; 3]);
    }
}
