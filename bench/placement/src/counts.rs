//! Input of the baselines: each expert's load, and how often the same token activates two of them.

use ndarray::Array2;
use semmoe_tables::{LayerIdx, Profile, TokenId};

/// One layer of a profile.
pub struct LayerCounts {
    /// N.
    pub experts: usize,
    /// \[N\] activations.
    pub load: Vec<f64>,
    /// [N, N] `sum over tokens t of w[t,e] w[t,e'] / a[t]`, a = occurrences of t: co-activations expected from the
    /// tokens' own shares. Counts do not say what one occurrence activated together.
    pub together: Array2<f64>,
    /// Occurrences with a known route.
    pub tokens: f64,
}

impl LayerCounts {
    /// Those of every layer.
    pub fn all(profile: &Profile) -> Vec<Self> {
        (0..profile.model().layers()).map(|layer| LayerCounts::new(profile, LayerIdx::new(layer as u16))).collect()
    }

    fn new(profile: &Profile, layer: LayerIdx) -> Self {
        let experts = usize::from(profile.model().num_experts);
        let (load, together) = (vec![0.0; experts], Array2::zeros((experts, experts)));
        let mut counts = LayerCounts { experts, load, together, tokens: profile.total_tokens() as f64 };
        for (token, &occurrences) in (0u32..).zip(profile.token_counts()).filter(|(_, count)| **count > 0) {
            let row = profile.row(layer, TokenId::new(token));
            for (&a, &x) in row.experts.iter().zip(row.counts) {
                counts.load[usize::from(a)] += f64::from(x);
                let weight = f64::from(x) / occurrences as f64;
                for (&b, &y) in row.experts.iter().zip(row.counts) {
                    counts.together[[usize::from(a), usize::from(b)]] += weight * f64::from(y);
                }
            }
        }
        counts
    }

    /// Co-activations beyond those expected from the loads alone.
    pub fn centred(&self, a: usize, b: usize) -> f64 {
        self.together[[a, b]] - self.load[a] * self.load[b] / self.tokens.max(1.0)
    }

    /// Transitions between the experts of each layer but the last and of the next, expected from the tokens' own
    /// shares.
    pub fn transitions(profile: &Profile) -> Vec<Array2<f64>> {
        (1..profile.model().layers()).map(|next| Self::transitions_from(profile, next - 1)).collect()
    }

    fn transitions_from(profile: &Profile, layer: usize) -> Array2<f64> {
        let experts = usize::from(profile.model().num_experts);
        let (here, next) = (LayerIdx::new(layer as u16), LayerIdx::new(layer as u16 + 1));
        let mut sums = Array2::<f64>::zeros((experts, experts));
        for (token, &occurrences) in (0u32..).zip(profile.token_counts()).filter(|(_, count)| **count > 0) {
            let (from, to) = (profile.row(here, TokenId::new(token)), profile.row(next, TokenId::new(token)));
            for (&a, &x) in from.experts.iter().zip(from.counts) {
                let weight = f64::from(x) / occurrences as f64;
                for (&b, &y) in to.experts.iter().zip(to.counts) {
                    sums[[usize::from(a), usize::from(b)]] += weight * f64::from(y);
                }
            }
        }
        sums
    }
}
