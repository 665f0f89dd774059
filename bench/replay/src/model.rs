//! Step times: the only assumption about engines; everything else is computed.

/// The model of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Model {
    /// Attention, experts and both ends of the links each wait for the slowest rank; KV memory is limited.
    Full,
    /// Each rank's own computation and sending, with unlimited memory: the earlier model, for comparison.
    Linear,
}

/// Seconds of a step of one unit. All its ranks step together, as every layer's all-to-all forces them to:
///
/// ```text
/// attention[r] =  dense * p[r]  +  context * (p[r] times the tokens before each)  +  sequence * d[r]  +  held * kv[r]
/// experts[r]   =  expert * hosted[r]  +  transfer * max(sent[r], received[r])
/// full         =  fixed  +  max over ranks of attention  +  max over ranks of experts
/// linear       =  fixed  +  max over ranks of ( (dense + expert) * p[r]  +  sequence * d[r]  +  transfer * sent[r] )
/// ```
///
/// with p prompt tokens computed and d sequences decoding on rank r, whose contexts hold kv tokens. Tokens are weighted
/// by the share of their activations: `hosted[r]` are the activations on r of all ranks' tokens, `sent[r]` those of r's
/// tokens on other ranks, and `received[r]` those of other ranks' tokens on r. Dispatch and combine count as one round
/// trip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTime {
    pub(crate) model: Model,
    pub(crate) fixed: f64,
    pub(crate) dense: f64,
    pub(crate) expert: f64,
    pub(crate) context: f64,
    pub(crate) sequence: f64,
    pub(crate) held: f64,
    pub(crate) transfer: f64,
}

/// One rank's part of a step, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    /// Prompt tokens computed.
    pub(crate) prefilled: f64,
    /// Sum over the computed prompt tokens of the tokens before each.
    pub(crate) attended: f64,
    /// Decoding sequences, and the tokens of their contexts.
    pub(crate) decoded: f64,
    pub(crate) held: f64,
    /// Activations of its own tokens on this rank, in tokens.
    pub(crate) local: f64,
    /// Activations of other ranks' tokens on this rank, in tokens.
    pub(crate) received: f64,
}

impl StepTime {
    /// Step times such that communication takes the share `communication` of a full prefill step's variable time with
    /// random placement.
    pub(crate) fn new(model: Model, communication: f64, ranks: u16) -> Self {
        // Roughly an 8-GPU node with a 30B MoE: 40,000 prompt tokens per second and rank, half of the time in attention
        // and projections, half in experts; 8 ms + 25 us per sequence.
        let prefill = 25e-6;
        let elsewhere = 1.0 - 1.0 / f64::from(ranks.max(2));
        StepTime {
            model,
            fixed: 8e-3,
            dense: prefill / 2.0,
            expert: prefill / 2.0,
            // Qwen3-30B-A3B: 48 layers of 32 heads of 128; 4 operations per pair of tokens, at 400 TFLOP/s.
            context: 2e-9,
            sequence: 25e-6,
            // 98 kB of keys and values per token (48 layers, 4 heads of 128, bf16) at 3.35 TB/s.
            held: 29e-9,
            transfer: prefill * communication / (1.0 - communication) / elsewhere,
        }
    }

    /// gamma: transfer time of a fully remote token over its computation.
    pub(crate) fn gamma(&self) -> f64 {
        self.transfer / (self.dense + self.expert)
    }

    /// Seconds of a step with one part per rank.
    pub(crate) fn step(&self, parts: &[Part]) -> f64 {
        let longest = |seconds: &dyn Fn(&Part) -> f64| parts.iter().map(seconds).fold(0.0, f64::max);
        let sent = |part: &Part| part.prefilled + part.decoded - part.local;
        self.fixed
            + match self.model {
                Model::Linear => longest(&|part| {
                    (self.dense + self.expert) * part.prefilled
                        + self.sequence * part.decoded
                        + self.transfer * sent(part)
                }),
                Model::Full => {
                    longest(&|part| {
                        self.dense * part.prefilled
                            + self.context * part.attended
                            + self.sequence * part.decoded
                            + self.held * part.held
                    }) + longest(&|part| {
                        self.expert * (part.local + part.received) + self.transfer * sent(part).max(part.received)
                    })
                }
            }
    }

    /// Seconds of one rank's variable time that a request takes, with random placement and an empty cache.
    pub(crate) fn work(&self, prompt: u32, output: u32, ranks: u16) -> f64 {
        let elsewhere = 1.0 - 1.0 / f64::from(ranks.max(2));
        let (prompt, output) = (f64::from(prompt), f64::from(output));
        let (mut seconds, all) = (self.transfer * elsewhere * (prompt + output), self.dense + self.expert);
        seconds += prompt * all + output * self.sequence;
        if self.model == Model::Full {
            seconds += self.context * prompt * prompt / 2.0 + self.held * output * (prompt + output / 2.0);
            seconds += output * self.expert;
        }
        seconds
    }

    /// Latencies on an idle unit with empty caches: seconds to the first token, and per token after it.
    pub(crate) fn alone(&self, prompt: u32, chunk: u32, ranks: u16) -> (f64, f64) {
        let chunks = f64::from(prompt.div_ceil(chunk.max(1)));
        let token = self.work(prompt, 1, ranks) - self.work(prompt, 0, ranks);
        (chunks * self.fixed + self.work(prompt, 0, ranks), self.fixed + token)
    }
}
