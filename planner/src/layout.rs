//! Parallel layouts: each rank's part of the model, and whether a model's shape fits.

use serde::{Deserialize, Serialize};

use crate::cluster::Group;
use crate::shape::{Attention, ModelShape};

/// A unit's degrees of parallelism. Tensor-parallel ranks are neighbours (TP inside, DP and EP outside). In a pipeline
/// stage, attention and experts use the same GPUs, so `attention_tp x attention_dp = expert_tp x expert_ep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Number of pipeline stages (PP).
    pub pipeline: u64,
    /// Number of ranks that share a sequence's heads.
    pub attention_tp: u64,
    /// Number of ranks, or groups of `attention_tp` ranks, with separate sequences.
    pub attention_dp: u64,
    /// Number of ranks that share an expert's rows.
    pub expert_tp: u64,
    /// Number of groups with separate experts.
    pub expert_ep: u64,
}

/// The reason why a layout cannot run a model.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Infeasible {
    /// A dimension cannot be divided evenly.
    #[error("{what} ({size}) cannot be divided over {ranks} ranks")]
    Divide {
        /// The dimension, such as "query heads".
        what: &'static str,
        /// Size of the dimension.
        size: u64,
        /// Number of ranks that would share the dimension.
        ranks: u64,
    },
    /// An expert's rows would be split inside a quantisation block.
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
        "weights need {weights_gb:.1} GB per GPU and activations {activations_gb:.1} GB, but only {usable_gb:.1} GB are usable"
    )]
    Memory {
        /// Weights on the fullest rank, in GB.
        weights_gb: f64,
        /// Activations of a step, in GB.
        activations_gb: f64,
        /// Memory that the engine may use, in GB.
        usable_gb: f64,
    },
    /// The KV cache is too small for one sequence per attention group.
    #[error("the KV cache has room for {held:.0} tokens per rank, but one sequence needs {needed:.0}")]
    Cache {
        /// Token capacity of a rank's cache.
        held: f64,
        /// Tokens of one sequence.
        needed: f64,
    },
    /// The load exceeds the layout's capacity.
    #[error("{wanted:.3} requests/s arrive at a unit, which serves at most {served:.3}")]
    Unstable {
        /// Requests per second that arrive at one unit.
        wanted: f64,
        /// Maximum rate of the unit.
        served: f64,
    },
}

impl Infeasible {
    /// Returns the kind of reason in a few words.
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
    /// Number of GPUs per pipeline stage.
    pub fn stage(&self) -> u64 {
        self.attention_tp * self.attention_dp
    }

    /// Number of GPUs in the unit.
    pub fn gpus(&self) -> u64 {
        self.pipeline * self.stage()
    }

    /// Formats the layout in the papers' notation.
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

    /// Returns the group of ranks that exchange tokens with experts: MixServe's three cases of DP and EP (section
    /// III-B3). With d_DP >= d_EP a group has `d_EP` members. Otherwise it has `d_DP`, each of which drops the tokens
    /// that another member sends.
    pub fn exchange_group(&self) -> Group {
        Group { size: self.attention_dp.min(self.expert_ep), stride: self.attention_tp.max(self.expert_tp) }
    }

    /// Checks that heads, experts, rows and layers divide evenly.
    ///
    /// # Errors
    /// The first dimension that does not divide evenly.
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

    /// Number of layers in the fullest stage.
    pub fn stage_layers(&self, shape: &ModelShape) -> u64 {
        shape.layers.div_ceil(self.pipeline)
    }
}

/// The part of the model that one rank loads (MixServe, section III-C). Ranges are half-open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPart {
    /// The rank, from 0, ordered by stage, then by DP or EP, then by TP.
    pub rank: u64,
    /// Layers of the rank's stage.
    pub layers: [u64; 2],
    /// The rank's attention-DP group, which determines its sequences.
    pub dp_group: u64,
    /// Query heads.
    pub heads: [u64; 2],
    /// Experts in model order; a placement may override them.
    pub experts: [u64; 2],
    /// Rows of the gate projection of each of these experts.
    pub expert_rows: [u64; 2],
}

impl Layout {
    /// Returns every rank's part of the model, in rank order.
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
