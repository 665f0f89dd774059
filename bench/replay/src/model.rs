//! How long a step takes: the only thing about engines that is assumed and not computed.

/// Which of the two models of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Model {
    /// Attention, experts and both ends of the links each wait for the slowest rank, and KV memory is limited.
    Full,
    /// Each rank's own computing and sending, with unlimited memory: the earlier model, to compare with.
    Linear,
}

/// Seconds of a step of one unit. All its ranks step together, as the all-to-all of every layer makes them:
///
/// ```text
/// attention[r] =  dense * p[r]  +  context * (p[r] times the tokens before each)  +  sequence * d[r]  +  held * kv[r]
/// experts[r]   =  expert * hosted[r]  +  transfer * max(sent[r], received[r])
/// full         =  fixed  +  max over ranks of attention  +  max over ranks of experts
/// linear       =  fixed  +  max over ranks of ( (dense + expert) * p[r]  +  sequence * d[r]  +  transfer * sent[r] )
/// ```
///
/// with p prompt tokens computed and d sequences decoding on rank r, whose context is kv tokens. `hosted[r]` are the
/// tokens of all ranks, each times the share of its activations that are on r; `sent[r]` those of r's own tokens that
/// are elsewhere, and `received[r]` those that come to r from elsewhere. Dispatch and combine are one round trip.
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
    /// Prompt tokens computed, each times the tokens before it.
    pub(crate) attended: f64,
    /// Sequences that decode, and the tokens of their contexts.
    pub(crate) decoded: f64,
    pub(crate) held: f64,
    /// Of all of these tokens, the share of activations on this rank, in tokens.
    pub(crate) local: f64,
    /// The same of the other ranks' tokens.
    pub(crate) received: f64,
}

impl StepTime {
    /// A step in which communication takes the share `communication` of a full prefill step's variable time when tokens
    /// are placed at random.
    pub(crate) fn new(model: Model, communication: f64, ranks: u16) -> Self {
        // About what an 8-GPU node does with a 30B MoE: 40,000 prompt tokens a second and rank, half of them in
        // attention and projections, half in experts; 8 ms + 25 us a sequence.
        let prefill = 25e-6;
        let elsewhere = 1.0 - 1.0 / f64::from(ranks.max(2));
        StepTime {
            model,
            fixed: 8e-3,
            dense: prefill / 2.0,
            expert: prefill / 2.0,
            // Qwen3-30B-A3B: 48 layers of 32 heads of 128; 4 operations for each pair of tokens, at 400 TFLOP/s.
            context: 2e-9,
            sequence: 25e-6,
            // 98 kB of keys and values for each token (48 layers, 4 heads of 128, bf16) at 3.35 TB/s.
            held: 29e-9,
            transfer: prefill * communication / (1.0 - communication) / elsewhere,
        }
    }

    /// gamma: a fully remote token's transfer over its computation.
    pub(crate) fn gamma(&self) -> f64 {
        self.transfer / (self.dense + self.expert)
    }

    /// Seconds of a step with these parts, one for each rank.
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

    /// Seconds that a request takes of one rank's variable time, tokens placed at random and nothing cached.
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

    /// The lightest-load latencies: seconds to the first token, and per token after it, on a unit that is idle and
    /// holds nothing.
    pub(crate) fn alone(&self, prompt: u32, chunk: u32, ranks: u16) -> (f64, f64) {
        let chunks = f64::from(prompt.div_ceil(chunk.max(1)));
        let token = self.work(prompt, 1, ranks) - self.work(prompt, 0, ranks);
        (chunks * self.fixed + self.work(prompt, 0, ranks), self.fixed + token)
    }
}
