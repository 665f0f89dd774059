//! Stage times of a rank's MoE layers, for charts and for measuring exchanges without the wait for slow ranks.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use rustix::time::{ClockId, clock_gettime};
use semmoe_kernels::collectives::{Stage, StageObserver};
use semmoe_tables::LayerIdx;
use serde::Serialize;

use crate::threads::lock;

/// Maximum number of layers in the log; the oldest are dropped first.
const MAX_LAYERS: usize = 4096;

/// One MoE layer of one step on one rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct LayerStages {
    /// Index among the model's MoE layers.
    layer: u16,
    /// Tokens of this rank.
    tokens: usize,
    spans: Vec<StageSpan>,
}

/// One stage's start and end, in nanoseconds of the monotonic clock, which all ranks of a host share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct StageSpan {
    stage: &'static str,
    /// Index of the chunk of rows; 0 if rows are not chunked.
    piece: usize,
    began: u64,
    ended: u64,
}

/// One rank's stage log; clones share its contents.
#[derive(Clone, Default, Debug)]
pub struct StageLog {
    layers: Arc<Mutex<VecDeque<LayerStages>>>,
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl StageLog {
    /// Starts a new layer record.
    pub(super) fn begin_layer(&self, layer: LayerIdx, tokens: usize) {
        let mut layers = lock(&self.layers);
        if layers.len() == MAX_LAYERS {
            layers.pop_front();
        }
        layers.push_back(LayerStages { layer: layer.index() as u16, tokens, spans: Vec::new() });
    }

    pub(super) fn begin(&self, stage: &'static str, piece: usize) {
        if let Some(layer) = lock(&self.layers).back_mut() {
            let began = now();
            layer.spans.push(StageSpan { stage, piece, began, ended: began });
        }
    }

    pub(super) fn end(&self, stage: &'static str, piece: usize) {
        let ended = now();
        if let Some(layer) = lock(&self.layers).back_mut() {
            let of = layer.spans.iter_mut().rev().find(|span| span.stage == stage && span.piece == piece);
            of.into_iter().for_each(|span| span.ended = ended);
        }
    }

    /// Writes one JSON line per layer: `{"layer", "tokens", "spans": [{"stage", "piece", "began", "ended"}]}`.
    ///
    /// # Errors
    /// Errors of the writer.
    pub(crate) fn write(&self, mut to: impl Write) -> io::Result<()> {
        for layer in &*lock(&self.layers) {
            serde_json::to_writer(&mut to, layer)?;
            to.write_all(b"\n")?;
        }
        to.flush()
    }
}

impl StageObserver for StageLog {
    fn began(&mut self, stage: Stage) {
        self.begin(stage.name.as_str(), stage.piece);
    }

    fn ended(&mut self, stage: Stage) {
        self.end(stage.name.as_str(), stage.piece);
    }
}

#[cfg(test)]
mod tests {
    use semmoe_kernels::collectives::StageName;

    use super::*;

    #[test]
    fn stages_belong_to_the_layer_that_began_last_and_old_layers_are_dropped() {
        let mut log = StageLog::default();
        for layer in 0..=MAX_LAYERS {
            log.begin_layer(LayerIdx::new(layer as u16), layer);
        }
        let of = |name, piece| Stage { name, piece };
        let stages = [of(StageName::Gather, 1), of(StageName::Dispatch, 1)];
        stages.iter().for_each(|&stage| log.began(stage));
        stages.iter().rev().for_each(|&stage| log.ended(stage));
        let mut text = Vec::new();
        log.write(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(text.lines().count(), MAX_LAYERS);
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!((&last["layer"], &last["tokens"]), (&MAX_LAYERS.into(), &MAX_LAYERS.into()));
        let [gather, dispatch] = [0, 1].map(|at| &last["spans"][at]);
        assert_eq!((&gather["stage"], &dispatch["stage"]), (&"gather".into(), &"dispatch".into()));
        let time = |span: &serde_json::Value, name: &str| span[name].as_u64().unwrap();
        assert!(time(gather, "began") <= time(dispatch, "began") && time(dispatch, "ended") <= time(gather, "ended"));
    }
}
