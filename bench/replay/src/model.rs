//! How long a step takes: the only thing about engines that is assumed and not computed.

/// Seconds of a step of one unit (all ranks of it step together, as the all-to-all of every layer makes them):
///
/// ```text
/// step  =  fixed  +  max over ranks of ( prefill * p[r]  +  decode * d[r]  +  transfer * remote[r] )
/// ```
///
/// with p prompt tokens computed and d sequences decoding on rank r, and remote tokens: each of the p + d tokens times
/// its activations on other ranks over all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTime {
    pub(crate) fixed: f64,
    pub(crate) prefill: f64,
    pub(crate) decode: f64,
    pub(crate) transfer: f64,
}

impl StepTime {
    /// A step in which communication takes the share `communication` of a full prefill step's variable time when tokens
    /// are placed at random.
    pub(crate) fn new(communication: f64, ranks: u16) -> Self {
        // About what an 8-GPU node does with a 30B MoE: 40,000 prompt tokens a second and rank, 8 ms + 25 us a
        // sequence.
        let prefill = 25e-6;
        let elsewhere = 1.0 - 1.0 / f64::from(ranks.max(2));
        StepTime {
            fixed: 8e-3,
            prefill,
            decode: 25e-6,
            transfer: prefill * communication / (1.0 - communication) / elsewhere,
        }
    }

    /// gamma: a fully remote token's transfer over its computation.
    pub(crate) fn gamma(&self) -> f64 {
        self.transfer / self.prefill
    }

    /// Seconds that a request takes of one rank's variable time, tokens placed at random and nothing cached.
    pub(crate) fn work(&self, prompt: u32, output: u32, ranks: u16) -> f64 {
        let elsewhere = 1.0 - 1.0 / f64::from(ranks.max(2));
        let (prompt, output) = (f64::from(prompt), f64::from(output));
        prompt * (self.prefill + self.transfer * elsewhere) + output * (self.decode + self.transfer * elsewhere)
    }

    /// The lightest-load latencies: seconds to the first token, and per token after it, on a unit that is idle and
    /// holds nothing.
    pub(crate) fn alone(&self, prompt: u32, chunk: u32, ranks: u16) -> (f64, f64) {
        let chunks = f64::from(prompt.div_ceil(chunk.max(1)));
        (chunks * self.fixed + self.work(prompt, 0, ranks), self.fixed + self.work(0, 1, ranks))
    }
}
