//! A parallel layout, the part of each rank, and whether a shape fits it.

use serde::{Deserialize, Serialize};

use crate::cluster::Group;
use crate::shape::{Attention, ModelShape};

/// Degrees of parallelism of one unit. Ranks of tensor parallelism are neighbours (TP inside, DP and EP outside);
/// within a pipeline stage attention and experts use the same GPUs, so `attention_tp x attention_dp = expert_tp x
/// expert_ep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Pipeline stages (PP).
    pub pipeline: u64,
    /// Ranks that share the heads of a sequence.
    pub attention_tp: u64,
    /// Ranks, or groups of `attention_tp`, with separate sequences.
    pub attention_dp: u64,
    /// Ranks that share an expert's rows.
    pub expert_tp: u64,
    /// Groups with separate experts.
    pub expert_ep: u64,
}

/// Why a layout cannot run a shape.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Infeasible {
    /// A dimension that cannot be divided evenly.
    #[error("{what} ({size}) cannot be divided over {ranks} ranks")]
    Divide {
        /// For example "query heads".
        what: &'static str,
        /// Its size.
        size: u64,
        /// Ranks that would share it.
        ranks: u64,
    },
    /// Rows of an expert that would be cut inside a quantisation block.
    #[error("an expert's {width} rows over {ranks} ranks are {} per rank, not a multiple of the {dtype} block of {block}", width / ranks)]
    Block {
        /// I.
        width: u64,
        /// Ranks that share an expert.
        ranks: u64,
        /// Name of the type.
        dtype: &'static str,
        /// Rows of a block.
        block: u64,
    },
    /// Weights and activations exceed the memory.
    #[error(
        "weights need {weights_gb:.1} GB a GPU and activations {activations_gb:.1} GB, {usable_gb:.1} GB are usable"
    )]
    Memory {
        /// Weights of the fullest rank, GB.
        weights_gb: f64,
        /// Activations of a step, GB.
        activations_gb: f64,
        /// Memory that the engine may use, GB.
        usable_gb: f64,
    },
    /// The cache is too small for one sequence on each attention group.
    #[error("the cache holds {held:.0} tokens a rank, one sequence needs {needed:.0}")]
    Cache {
        /// Tokens of a rank's cache.
        held: f64,
        /// Tokens of one sequence.
        needed: f64,
    },
    /// The load exceeds the layout's capacity.
    #[error("{wanted:.3} requests/s arrive at a unit, which serves at most {served:.3}")]
    Unstable {
        /// Requests a second of one unit.
        wanted: f64,
        /// Its maximum rate.
        served: f64,
    },
}

impl Infeasible {
    /// The kind of reason in a few words.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Divide { .. } => "cannot be divided",
            Self::Block { .. } => "cuts a quantisation block",
            Self::Memory { .. } | Self::Cache { .. } => "out of memory",
            Self::Unstable { .. } => "too slow for the load",
        }
    }
}

impl Layout {
    /// GPUs of a pipeline stage.
    pub fn stage(&self) -> u64 {
        self.attention_tp * self.attention_dp
    }

    /// GPUs of the unit.
    pub fn gpus(&self) -> u64 {
        self.pipeline * self.stage()
    }

    /// The layout in the papers' notation.
    pub fn name(&self) -> String {
        let part = |tp: u64, other: &str, size: u64| match (tp, size) {
            (1, 1) => "TP1".to_owned(),
            (1, _) => format!("{other}{size}"),
            (_, 1) => format!("TP{tp}"),
            _ => format!("TP{tp}+{other}{size}"),
        };
        let pipeline = if self.pipeline > 1 { format!(" PP{}", self.pipeline) } else { String::new() };
        let attention = part(self.attention_tp, "DP", self.attention_dp);
        format!("{attention}, {}{pipeline}", part(self.expert_tp, "EP", self.expert_ep))
    }

    /// Ranks between which tokens are sent to their experts: MixServe's three cases of DP and EP (section III-B3). With
    /// d_DP >= d_EP each group has `d_EP` members, otherwise `d_DP`, each of which drops the tokens that another one
    /// sends.
    pub fn exchange_group(&self) -> Group {
        Group { size: self.attention_dp.min(self.expert_ep), stride: self.attention_tp.max(self.expert_tp) }
    }

    /// Checks that heads, experts, rows and layers can be divided.
    ///
    /// # Errors
    /// The first dimension that cannot be divided.
    pub fn check(&self, shape: &ModelShape) -> Result<(), Infeasible> {
        let divide = |what, size: u64, ranks| match size.is_multiple_of(ranks) {
            true => Ok(()),
            false => Err(Infeasible::Divide { what, size, ranks }),
        };
        divide("query heads", shape.attention.heads(), self.attention_tp)?;
        if let Attention::Grouped { kv_heads, .. } = shape.attention {
            let (size, ranks) = (kv_heads, self.attention_tp);
            if !size.max(ranks).is_multiple_of(size.min(ranks)) {
                return Err(Infeasible::Divide { what: "key and value heads", size, ranks });
            }
        }
        divide("experts", shape.experts, self.expert_ep)?;
        divide("rows of an expert", shape.expert_width, self.expert_tp)?;
        let (dtype, width) = (shape.precision.experts, shape.expert_width);
        if self.expert_tp > 1 && !(width / self.expert_tp).is_multiple_of(dtype.block()) {
            let (ranks, block) = (self.expert_tp, dtype.block());
            return Err(Infeasible::Block { width, ranks, dtype: dtype.name(), block });
        }
        if self.pipeline > shape.layers {
            return Err(Infeasible::Divide { what: "layers", size: shape.layers, ranks: self.pipeline });
        }
        Ok(())
    }

    /// Layers of the fullest stage.
    pub fn stage_layers(&self, shape: &ModelShape) -> u64 {
        shape.layers.div_ceil(self.pipeline)
    }
}

/// The part of the model that one rank of a unit loads (MixServe, section III-C). Ranges are half open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPart {
    /// The rank, from 0; stages outermost, then DP or EP, then TP.
    pub rank: u64,
    /// Layers of its stage.
    pub layers: [u64; 2],
    /// Its attention-DP group, which determines its sequences.
    pub dp_group: u64,
    /// Query heads.
    pub heads: [u64; 2],
    /// Experts in the model's order; a placement may replace them.
    pub experts: [u64; 2],
    /// Rows of each of its experts' gate projections.
    pub expert_rows: [u64; 2],
}

impl Layout {
    /// The part of each rank, in rank order.
    ///
    /// # Errors
    /// If the shape does not fit the layout.
    pub fn partition(&self, shape: &ModelShape) -> Result<Vec<RankPart>, Infeasible> {
        self.check(shape)?;
        let cut = |size: u64, parts: u64, part: u64| [size * part / parts, size * (part + 1) / parts];
        let part = |rank: u64| {
            let (stage, local) = (rank / self.stage(), rank % self.stage());
            RankPart {
                rank,
                layers: cut(shape.layers, self.pipeline, stage),
                dp_group: local / self.attention_tp,
                heads: cut(shape.attention.heads(), self.attention_tp, local % self.attention_tp),
                experts: cut(shape.experts, self.expert_ep, local / self.expert_tp),
                expert_rows: cut(shape.expert_width, self.expert_tp, local % self.expert_tp),
            }
        };
        Ok((0..self.gpus()).map(part).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tests::fixtures::{deepseek_v3, layout, qwen3_235b};

    #[test]
    fn what_does_not_divide_is_named() {
        let qwen = qwen3_235b();
        let fp8 = ModelShape { precision: crate::shape::Precision::uniform(crate::shape::Dtype::Fp8), ..qwen.clone() };
        let cases = [
            (&qwen, layout(1, [128, 1], [1, 128]), "query heads (64) cannot be divided over 128 ranks"),
            (&qwen, layout(1, [1, 256], [1, 256]), "experts (128) cannot be divided over 256 ranks"),
            (
                &fp8,
                layout(1, [8, 1], [8, 1]),
                "1536 rows over 8 ranks are 192 per rank, not a multiple of the fp8 block of 128",
            ),
            (&qwen, layout(128, [1, 1], [1, 1]), "layers (94) cannot be divided over 128 ranks"),
        ];
        for (shape, layout, message) in cases {
            let error = layout.check(shape).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
        assert_eq!(layout(1, [8, 1], [8, 1]).check(&qwen), Ok(()));
        assert_eq!(layout(1, [8, 4], [1, 32]).name(), "TP8+DP4, EP32");
        assert_eq!(layout(2, [8, 1], [8, 1]).name(), "TP8, TP8 PP2");
    }

    /// MixServe's equation 5: `b / max(d_DP, d_EP) k (d - 1) / d` copies leave a rank in a dispatch, where d is the
    /// number of members of a group; b 16, k 8.
    #[test]
    fn golden_copies() {
        for (dp, ep, copies) in [(4u64, 4u64, 24.0), (8, 4, 12.0), (4, 8, 12.0)] {
            let (stage, most) = (8, dp.max(ep) as f64);
            let members = layout(1, [stage / dp, dp], [stage / ep, ep]).exchange_group().size as f64;
            assert_eq!(16.0 / most * 8.0 * (members - 1.0) / members, copies);
        }
    }

    proptest! {
        /// Every head, expert row and layer is loaded by exactly as many ranks as replicate it.
        #[test]
        fn the_ranks_together_load_the_model(stages in 0u32..2, tp in 0u32..4, dp in 0u32..4, cut in 0u32..4) {
            let stage = 1u64 << (tp + dp);
            let expert_tp = (1 << cut).min(stage);
            let layout = layout(1 << stages, [1 << tp, 1 << dp], [expert_tp, stage / expert_tp]);
            let shape = deepseek_v3();
            prop_assume!(layout.check(&shape).is_ok());
            let parts = layout.partition(&shape).unwrap();
            let length = |range: [u64; 2]| range[1] - range[0];
            let rows: u64 = parts.iter().map(|p| length(p.layers) * length(p.experts) * length(p.expert_rows)).sum();
            prop_assert_eq!(rows, shape.layers * shape.experts * shape.expert_width);
            let heads: u64 = parts.iter().map(|p| length(p.layers) * length(p.heads)).sum();
            prop_assert_eq!(heads, shape.layers * shape.attention.heads() * layout.attention_dp);
        }
    }
}
