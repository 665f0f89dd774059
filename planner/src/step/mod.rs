//! The physical model: seconds of one step of a layout, and TTFT and TPOT from it.
//!
//! | module | what |
//! |---|---|
//! | `constants` | how far engines stay below the data sheet |
//! | `terms` | the parts of a step, with the source of each formula |
//! | `compute` | kernels: measured, or else by roofline |
//! | `parts` | the kernels and collectives of a step |
//!
//! Kernels and collectives take their measured times. If no table fits, products take the maximum of computing and
//! reading (roofline), and collectives a latency plus bytes over bandwidth on every level that they cross. [`predict`]
//! is the only entry point: everything above it (search, affinity, switching) calls it or [`step`].

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

/// A shape on a cluster in a layout.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// GPUs and links.
    pub cluster: &'a Cluster,
    /// The unit's degrees.
    pub layout: Layout,
    /// The engine's constants.
    pub constants: &'a Constants,
}

/// The work of one step of the whole unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Sequences, of all attention-DP groups together, above 0.
    pub sequences: f64,
    /// Tokens that each of them adds: 1 in decoding, the prompt in prefill.
    pub tokens: f64,
    /// Tokens that each already has in the cache.
    pub cached: f64,
}

/// A load with a constant number of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Requests in flight, of the whole unit, above 0.
    pub concurrency: f64,
    /// Tokens of a prompt, mean.
    pub input_tokens: f64,
    /// Tokens of an answer, mean.
    pub output_tokens: f64,
}

/// The prediction for a [`Load`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Seconds from a request's arrival to its first token, with only the requests in flight present.
    pub ttft: f64,
    /// Mean seconds between tokens, including prefills in between.
    pub tpot: f64,
    /// The parts of a prefill of one prompt.
    pub prefill: StepTerms,
    /// The parts of a step of decoding.
    pub decode: StepTerms,
}

/// TTFT and TPOT of a target under a load.
///
/// TTFT is the prefill of one prompt, the engine's time before it, and its wait: decoding steps, and prompts that
/// arrived with it (`admission_steps`, `burst_share`; zero if it is alone). TPOT is a decoding step of all requests in
/// flight, halfway through their answers, plus the part of new requests' prefills that delays it: with C requests in
/// flight of N output tokens each, C / N prompts arrive per step.
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

/// Decoding of `sequences` halfway through their answers.
pub fn decoding(sequences: f64, load: &Load) -> Work {
    Work { sequences, tokens: 1.0, cached: load.input_tokens + load.output_tokens / 2.0 }
}

/// Prefill of `sequences` prompts at once.
pub fn prompts(sequences: f64, load: &Load) -> Work {
    Work { sequences, tokens: load.input_tokens.max(1.0), cached: 0.0 }
}

/// Seconds of a unit's time per prompt. The attention-DP groups step together, as do the micro-batches in a pipeline,
/// so a prompt of one of them holds up all. Only prompts that arrive for the same step share its time.
pub fn prefill_occupancy(target: &Target<'_>, load: &Load) -> f64 {
    let groups = target.layout.attention_dp as f64;
    let most = groups * target.layout.pipeline as f64;
    let together = if target.constants.slowest_group { most.min(prompts_together(load)) } else { most };
    step(target, &prompts(together.min(groups), load)).total() / together
}

/// Mean prompts in a step that has any. With C requests in flight of N output tokens each, C / N arrive per step, at
/// random (Poisson).
fn prompts_together(load: &Load) -> f64 {
    let arriving = load.concurrency / load.output_tokens.max(1.0);
    (arriving / -(-arriving).exp_m1()).max(1.0)
}

/// The parts of one step through all layers. With stages, `work` is split into one micro-batch per stage, and a token
/// passes through all of them.
pub fn step(target: &Target<'_>, work: &Work) -> StepTerms {
    let layout = &target.layout;
    // A prompt is not split over stages; decoding sequences are.
    let batches = if work.tokens > 1.0 { 1.0 } else { layout.pipeline as f64 };
    let all = (work.sequences / batches).max(1.0);
    let rank = (all / layout.attention_dp as f64).ceil().max(1.0);
    let in_flight = batches.min(work.sequences).max(1.0);
    let batch = Batch { sequences: rank, tokens: rank * work.tokens, unit_tokens: all * work.tokens, in_flight };
    let mut terms = StepTerms::default();
    target.attention(work, batch, &mut terms);
    target.experts(batch, &mut terms);
    target.ends(batch, &mut terms);
    // Ranks that share processors compute more slowly; links were measured with all of them.
    terms.scale(target.cluster.gpu.slowdown(target.cluster.gpus()));
    target.communication(batch, &mut terms);
    terms
}

/// One micro-batch.
#[derive(Clone, Copy)]
struct Batch {
    /// Sequences of the fullest attention group.
    sequences: f64,
    /// Tokens of the fullest attention group.
    tokens: f64,
    /// Tokens of all groups.
    unit_tokens: f64,
    /// Micro-batches in the pipeline, this one included.
    in_flight: f64,
}
