//! The physical model: predicts the time of a step in a layout, and derives TTFT and TPOT from it.
//!
//! | module | contents |
//! |---|---|
//! | `constants` | an engine's performance relative to the data sheet |
//! | `terms` | the parts of a step, with the source of each formula |
//! | `compute` | kernel times: measured, otherwise from the roofline model |
//! | `parts` | the kernels and collectives in a step |
//!
//! Kernels and collectives use measured times. If no table fits, products take the maximum of compute time and read
//! time (roofline), and collectives take a latency plus bytes over bandwidth on every level that they cross. All
//! callers (search, affinity, switching) use [`predict`] or [`step`].

mod compute;
mod constants;
mod parts;
mod terms;
#[cfg(test)]
mod tests;

pub use constants::Constants;
use serde::Serialize;
pub use terms::{Part, StepTerms, Term, Timed};

use crate::cluster::Cluster;
use crate::layout::Layout;
use crate::shape::ModelShape;

/// A model on a cluster in a layout.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// GPUs and links.
    pub cluster: &'a Cluster,
    /// The unit's layout.
    pub layout: Layout,
    /// The engine's constants.
    pub constants: &'a Constants,
}

/// The work that the whole unit does in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Number of sequences over all attention-DP groups, above 0.
    pub sequences: f64,
    /// New tokens per sequence: 1 in decoding, the prompt in prefill.
    pub tokens: f64,
    /// Cached tokens per sequence.
    pub cached: f64,
}

/// A load with a constant number of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Requests in flight in the whole unit, above 0.
    pub concurrency: f64,
    /// Mean tokens per prompt.
    pub input_tokens: f64,
    /// Mean tokens per response.
    pub output_tokens: f64,
}

/// The prediction for a [`Load`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Seconds from a request's arrival to its first token, with no queue other than the requests in flight.
    pub ttft: f64,
    /// Mean seconds between tokens, including prefills in between.
    pub tpot: f64,
    /// The parts of one prompt's prefill.
    pub prefill: StepTerms,
    /// The parts of a decoding step.
    pub decode: StepTerms,
}

/// Predicts TTFT and TPOT of a target under a load.
///
/// TTFT is the sum of one prompt's prefill, the engine's time before it, and its wait for decoding steps and for
/// prompts that arrived with it (`admission_steps`, `burst_share`; zero for a single request). TPOT is a decoding step
/// of all requests in flight, halfway through their responses, plus the part of new requests' prefills that delays it:
/// with C requests in flight of N output tokens each, C / N prompts arrive per step.
pub fn predict(target: &Target<'_>, load: &Load) -> Prediction {
    let constants = target.constants;
    let decode = step(target, &decoding(load.concurrency, load));
    let prefill = step(target, &prompts(1.0, load));
    let occupancy = prefill_occupancy(target, load);
    let arrivals = load.concurrency / load.output_tokens.max(1.0);
    let others = (load.concurrency - 1.0).max(0.0);
    let wait = constants.admission_steps * decode.total() * others / (others + 1.0)
        + constants.burst_share * others / 2.0 * occupancy;
    Prediction {
        ttft: constants.request_seconds + prefill.total() + wait,
        tpot: decode.total() + constants.prefill_interference * arrivals * occupancy,
        prefill,
        decode,
    }
}

/// Returns the work of decoding `sequences` sequences halfway through their responses.
pub fn decoding(sequences: f64, load: &Load) -> Work {
    Work { sequences, tokens: 1.0, cached: load.input_tokens + load.output_tokens / 2.0 }
}

/// Returns the work of prefilling `sequences` prompts at once.
pub fn prompts(sequences: f64, load: &Load) -> Work {
    Work { sequences, tokens: load.input_tokens.max(1.0), cached: 0.0 }
}

/// Returns the seconds of a unit's time that each prompt takes. Attention-DP groups step together, as do the
/// micro-batches in a pipeline, so a prompt in one of them delays all. Only prompts that arrive for the same step share
/// its time.
pub fn prefill_occupancy(target: &Target<'_>, load: &Load) -> f64 {
    let groups = target.layout.attention_dp as f64;
    let most = groups * target.layout.pipeline as f64;
    let together = if target.constants.slowest_group { most.min(prompts_together(load)) } else { most };
    step(target, &prompts(together.min(groups), load)).total() / together
}

/// Returns the mean number of prompts in a step that has any. With C requests in flight of N output tokens each, C / N
/// prompts arrive per step, Poisson distributed.
fn prompts_together(load: &Load) -> f64 {
    let arriving = load.concurrency / load.output_tokens.max(1.0);
    (arriving / -(-arriving).exp_m1()).max(1.0)
}

/// Predicts the parts of one step through all layers. With pipeline stages, `work` is split into one micro-batch per
/// stage, and a token passes through all stages.
pub fn step(target: &Target<'_>, work: &Work) -> StepTerms {
    let layout = &target.layout;
    // Decoding sequences are split into micro-batches; a prompt is not.
    let batches = if work.tokens > 1.0 { 1.0 } else { layout.pipeline as f64 };
    let all = (work.sequences / batches).max(1.0);
    let rank = (all / layout.attention_dp as f64).ceil().max(1.0);
    let in_flight = batches.min(work.sequences).max(1.0);
    let batch = Batch { sequences: rank, tokens: rank * work.tokens, unit_tokens: all * work.tokens, in_flight };
    let mut terms = StepTerms::default();
    target.attention(work, batch, &mut terms);
    target.experts(batch, &mut terms);
    target.ends(batch, &mut terms);
    // Ranks that share processors compute more slowly. Links were already measured with all ranks active.
    terms.scale(target.cluster.gpu.slowdown(target.cluster.gpus()));
    target.communication(batch, &mut terms);
    terms
}

/// A micro-batch in the pipeline.
#[derive(Clone, Copy)]
struct Batch {
    /// Number of sequences in the fullest attention group.
    sequences: f64,
    /// Number of tokens in the fullest attention group.
    tokens: f64,
    /// Number of tokens in all groups.
    unit_tokens: f64,
    /// Number of micro-batches in the pipeline, including this one.
    in_flight: f64,
}
