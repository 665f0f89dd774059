//! Where a decode step's time goes, measured by a probe that reads the clock.

use std::time::Instant;

use semmoe_tables::LayerIdx;
use semmoe_worker::model::Probe;

/// The parts of a step, in order; the first three of all layers together.
pub(crate) const PARTS: [&str; 5] = [
    "norms, projections, attention, router",
    "choice and weights of experts",
    "experts, dispatch and combine",
    "output matrix",
    "choice of tokens",
];

/// Seconds of each part, summed over steps.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) seconds: [f64; PARTS.len()],
    pub(crate) steps: usize,
    last: Option<Instant>,
}

impl Parts {
    pub(crate) fn begin(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Attributes the time since the previous call to `part`.
    pub(crate) fn ends(&mut self, part: usize) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            self.seconds[part] += (now - last).as_secs_f64();
        }
    }
}

impl Probe for Parts {
    fn residual(&mut self, layers: usize, _rows: &[f32]) {
        // After the embedding, or after the previous layer's experts.
        self.ends(if layers == 0 { 0 } else { 2 });
    }

    fn router_logits(&mut self, _layer: LayerIdx, _logits: &[f32]) {
        self.ends(0);
    }

    fn routes(&mut self, _layer: LayerIdx, _experts: &[u16], _weights: &[f32]) {
        self.ends(1);
    }
}
