//! One layer's worth of evidence that stands for all layers.

use crate::evidence::LayerEvidence;

/// Sums over layers of what each token's shares are above its layer's.
#[derive(Debug)]
pub(crate) struct MeanEvidence {
    groups: usize,
    /// [V, G]
    residual: Vec<f64>,
    /// [V] layers in which a token was seen.
    layers_seen: Vec<u32>,
    /// [V]
    seen: Vec<f64>,
    /// [G]
    layer_share: Vec<f64>,
}

impl MeanEvidence {
    pub(crate) fn new(vocabulary: usize, groups: usize) -> Self {
        let (residual, layer_share) = (vec![0.0; vocabulary * groups], vec![0.0; groups]);
        MeanEvidence { groups, residual, layers_seen: vec![0; vocabulary], seen: vec![0.0; vocabulary], layer_share }
    }

    pub(crate) fn add(&mut self, evidence: &LayerEvidence) {
        self.layer_share.iter_mut().zip(&evidence.layer_share).for_each(|(sum, share)| *sum += share);
        for (token, residual) in self.residual.chunks_exact_mut(self.groups).enumerate() {
            let seen = evidence.seen[token];
            if seen > 0.0 {
                self.layers_seen[token] += 1;
                self.seen[token] += seen;
                let shares = evidence.row(token).iter().zip(&evidence.layer_share);
                residual.iter_mut().zip(shares).for_each(|(sum, (count, share))| *sum += count / seen - share);
            }
        }
    }

    /// Means over the `layers` added: shares of the layers, and of each token over those in which it was seen.
    pub(crate) fn finish(self, layers: usize) -> LayerEvidence {
        let MeanEvidence { groups, mut residual, layers_seen, mut seen, mut layer_share } = self;
        layer_share.iter_mut().for_each(|share| *share /= layers as f64);
        for (token, row) in residual.chunks_exact_mut(groups).enumerate() {
            let times = f64::from(layers_seen[token]);
            if times > 0.0 {
                seen[token] /= times;
                let occurrences = |(sum, share): (&f64, &f64)| seen[token] * (sum / times + share);
                let mean: Vec<f64> = row.iter().zip(&layer_share).map(occurrences).collect();
                row.copy_from_slice(&mean);
            }
        }
        LayerEvidence { groups, on_group: residual, seen, layer_share }
    }
}
