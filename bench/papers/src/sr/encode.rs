//! SREncode: the greatest residuals, found by counting in place of sorting.

use half::f16;
use semmoe_kernels::Element;

use super::{BLOCK, MAGIC, SharedExpert, SrError, SrIndex, VERSION, check_len};

/// Compresses experts; its scratch of 4 bytes a weight is reused.
#[derive(Debug, Default)]
pub struct SrEncoder {
    /// `[n]`
    residuals: Vec<f32>,
    /// Residuals by 16 bits of their magnitude.
    bins: Vec<u32>,
}

/// Which residuals are kept.
#[derive(Clone, Copy, Debug)]
struct Threshold {
    /// Every magnitude above.
    above: u32,
    /// Of exactly this magnitude, this many of the lowest indices.
    equal: usize,
}

/// The bits of a magnitude: of finite numbers they ascend as the magnitudes do.
fn magnitude(residual: f32) -> u32 {
    residual.to_bits() & 0x7fff_ffff
}

impl SrEncoder {
    /// Appends an expert's message to `out`.
    ///
    /// # Errors
    /// A ratio outside of [`SR_RATIOS`](super::SR_RATIOS), another length than the shared expert's, a residual that is
    /// not finite in f16; `out` is then as it was.
    pub fn encode(
        &mut self,
        expert: &[f16],
        shared: &SharedExpert,
        ratio: u32,
        index: SrIndex,
        out: &mut Vec<u8>,
    ) -> Result<(), SrError> {
        check_len("the expert", expert.len(), shared.weights.len())?;
        let kept = index.kept(expert.len(), ratio)?;
        self.residuals.clear();
        self.residuals.extend(expert.iter().zip(&shared.weights).map(|(weight, mean)| weight.widen() - mean.widen()));
        if let Some(index) = self.residuals.iter().position(|&residual| !f16::round(residual).is_finite()) {
            return Err(SrError::NotFinite { what: "residual", index });
        }
        let threshold = self.threshold(kept);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(bytemuck::cast_slice(&[VERSION, index.bytes() as u16]));
        out.extend_from_slice(&(kept as u32).to_le_bytes());
        out.extend_from_slice(bytemuck::cast_slice(&[expert.len() as u64, shared.epoch]));
        match index {
            SrIndex::InBlock => {
                let counts = out.len();
                out.resize(counts + expert.len().div_ceil(BLOCK) * size_of::<u32>(), 0);
                self.keep(threshold, |weight| {
                    let at = counts + weight / BLOCK * size_of::<u32>();
                    let count: u32 = bytemuck::pod_read_unaligned(&out[at..at + size_of::<u32>()]);
                    out[at..at + size_of::<u32>()].copy_from_slice(&(count + 1).to_le_bytes());
                    out.extend_from_slice(&((weight % BLOCK) as u16).to_le_bytes());
                });
            }
            SrIndex::InExpert => {
                self.keep(threshold, |weight| out.extend_from_slice(&(weight as u32).to_le_bytes()));
            }
        }
        self.keep(threshold, |weight| {
            out.extend_from_slice(&f16::round(self.residuals[weight]).to_bits().to_le_bytes());
        });
        Ok(())
    }

    /// The threshold that the k greatest magnitudes reach.
    fn threshold(&mut self, kept: usize) -> Threshold {
        if kept == 0 {
            return Threshold { above: u32::MAX, equal: 0 };
        }
        let upper = self.split(kept, |bits| Some(bits >> 16));
        let lower = self.split(upper.equal, |bits| (bits >> 16 == upper.above).then_some(bits & 0xffff));
        Threshold { above: upper.above << 16 | lower.above, equal: lower.equal }
    }

    /// Where the greatest `kept` keys end, of the residuals that have one; there are as many.
    fn split(&mut self, kept: usize, key: impl Fn(u32) -> Option<u32>) -> Threshold {
        self.bins.clear();
        self.bins.resize(1 << 16, 0);
        for key in self.residuals.iter().filter_map(|&residual| key(magnitude(residual))) {
            self.bins[key as usize] += 1;
        }
        let mut equal = kept;
        let bin = self.bins.iter().rposition(|&count| {
            let ends = equal <= count as usize;
            equal -= if ends { 0 } else { count as usize };
            ends
        });
        Threshold { above: bin.unwrap_or_default() as u32, equal }
    }

    /// Every weight that is kept, ascending.
    fn keep(&self, threshold: Threshold, mut keep: impl FnMut(usize)) {
        let mut equal = threshold.equal;
        for (weight, &residual) in self.residuals.iter().enumerate() {
            let bits = magnitude(residual);
            if bits > threshold.above {
                keep(weight);
            } else if bits == threshold.above && equal > 0 {
                equal -= 1;
                keep(weight);
            }
        }
    }
}
