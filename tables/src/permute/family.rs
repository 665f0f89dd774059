//! Tensor names of experts and routers in each model family.

/// The names that a family uses below `model.layers.{l}.` and in `config.json`.
#[derive(Debug)]
pub(super) struct Family {
    /// Architecture names in `config.json`.
    pub(super) architectures: &'static [&'static str],
    /// The key of N in `config.json`.
    pub(super) experts_key: &'static str,
    /// Prefix of an expert's tensor names.
    experts_prefix: &'static str,
    /// Prefix of the router's tensor names; dimension 0 is the expert.
    router_prefix: &'static str,
    /// Required router tensors.
    pub(super) router: &'static [&'static str],
    pub(super) experts: Experts,
}

/// How a family stores experts.
#[derive(Debug)]
pub(super) enum Experts {
    /// One tensor per expert, `{prefix}{e}.{projection}.{leaf}`, with any leaf (`weight`, `weight_scale_inv`, ...). The
    /// projections are gate, up and down.
    Each(&'static [&'static str]),
    /// All experts stacked along dimension 0: `{prefix}{projection}{ending}`, with one of the sets of endings.
    Stacked { projections: &'static [&'static str], endings: &'static [&'static [&'static str]] },
}

/// The role of a tensor in a layer.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Part<'n> {
    /// Belongs to one expert; `leaf` is the name after the expert's number.
    Expert { expert: u16, leaf: &'n str },
    /// Dimension 0 is the expert.
    Rows,
    /// Under the experts' prefix, but not a name of this family.
    Unknown,
    /// Attention, norms, dense and shared experts.
    Other,
}

const GATED: &[&str] = &["gate_proj", "up_proj", "down_proj"];

/// The usual names; families override the architectures and the key.
const MLP_EXPERTS: Family = Family {
    architectures: &[],
    experts_key: "",
    experts_prefix: "mlp.experts.",
    router_prefix: "mlp.gate.",
    router: &["weight"],
    experts: Experts::Each(GATED),
};

/// The known families.
pub(super) const FAMILIES: &[Family] = &[
    Family { architectures: &["DeepseekV2ForCausalLM"], experts_key: "n_routed_experts", ..MLP_EXPERTS },
    Family {
        architectures: &["DeepseekV3ForCausalLM"],
        experts_key: "n_routed_experts",
        router: &["weight", "e_score_correction_bias"],
        ..MLP_EXPERTS
    },
    Family {
        architectures: &["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM"],
        experts_key: "num_experts",
        ..MLP_EXPERTS
    },
    Family {
        architectures: &["MixtralForCausalLM"],
        experts_key: "num_local_experts",
        experts_prefix: "block_sparse_moe.experts.",
        router_prefix: "block_sparse_moe.gate.",
        router: &["weight"],
        experts: Experts::Each(&["w1", "w3", "w2"]),
    },
    Family {
        architectures: &["GptOssForCausalLM"],
        experts_key: "num_local_experts",
        experts_prefix: "mlp.experts.",
        router_prefix: "mlp.router.",
        router: &["weight", "bias"],
        experts: Experts::Stacked {
            projections: &["gate_up_proj", "down_proj"],
            endings: &[&["_blocks", "_scales", "_bias"], &["", "_bias"]],
        },
    },
];

/// Lists the known architectures for a message.
pub(super) fn known_architectures() -> String {
    let names: Vec<&str> = FAMILIES.iter().flat_map(|family| family.architectures).copied().collect();
    names.join(", ")
}

/// Splits `model.layers.{l}.{rest}` into l and the rest.
pub(super) fn split_layer(name: &str) -> Option<(u16, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((canonical(layer)?, rest))
}

impl Family {
    /// Returns the role of the tensor `model.layers.{l}.{rest}`.
    pub(super) fn part<'n>(&self, rest: &'n str) -> Part<'n> {
        if rest.strip_prefix(self.router_prefix).is_some() {
            return Part::Rows;
        }
        let Some(name) = rest.strip_prefix(self.experts_prefix) else { return Part::Other };
        match self.experts {
            Experts::Each(projections) => {
                let Some((expert, leaf)) = name.split_once('.') else { return Part::Unknown };
                let known = leaf.split_once('.').is_some_and(|(projection, _)| projections.contains(&projection));
                match canonical(expert) {
                    Some(expert) if known => Part::Expert { expert, leaf },
                    _ => Part::Unknown,
                }
            }
            Experts::Stacked { projections, endings } => {
                let ending = projections.iter().find_map(|projection| name.strip_prefix(projection));
                match ending {
                    Some(ending) if endings.iter().any(|set| set.contains(&ending)) => Part::Rows,
                    _ => Part::Unknown,
                }
            }
        }
    }

    /// Returns the full name of a router's tensor.
    pub(super) fn router_name(&self, layer: u16, leaf: &str) -> String {
        format!("model.layers.{layer}.{}{leaf}", self.router_prefix)
    }

    /// Returns the full name of an expert's tensor; a stacked one has no expert number.
    pub(super) fn expert_name(&self, layer: u16, expert: u16, leaf: &str) -> String {
        match self.experts {
            Experts::Each(_) => format!("model.layers.{layer}.{}{expert}.{leaf}", self.experts_prefix),
            Experts::Stacked { .. } => format!("model.layers.{layer}.{}{leaf}", self.experts_prefix),
        }
    }
}

/// Parses a number written without a sign or leading zeros.
fn canonical(digits: &str) -> Option<u16> {
    let number: u16 = digits.parse().ok()?;
    (number.to_string() == digits).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part<'n>(architecture: &str, name: &'n str) -> Part<'n> {
        let family = FAMILIES.iter().find(|family| family.architectures.contains(&architecture)).unwrap();
        family.part(split_layer(name).unwrap().1)
    }

    #[test]
    fn names_are_distinguished() {
        let (deepseek, mixtral, gpt) = ("DeepseekV3ForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM");
        for (architecture, name, expected) in [
            (deepseek, "mlp.experts.10.up_proj.weight", Part::Expert { expert: 10, leaf: "up_proj.weight" }),
            (
                deepseek,
                "mlp.experts.0.down_proj.weight_scale_inv",
                Part::Expert { expert: 0, leaf: "down_proj.weight_scale_inv" },
            ),
            (deepseek, "mlp.experts.010.up_proj.weight", Part::Unknown),
            (deepseek, "mlp.experts.+1.up_proj.weight", Part::Unknown),
            (deepseek, "mlp.experts.1.w1.weight", Part::Unknown),
            (deepseek, "mlp.experts.gate_up_proj", Part::Unknown),
            (deepseek, "mlp.gate.e_score_correction_bias", Part::Rows),
            (deepseek, "mlp.gate_proj.weight", Part::Other),
            (deepseek, "mlp.shared_experts.up_proj.weight", Part::Other),
            (deepseek, "self_attn.o_proj.weight", Part::Other),
            ("Qwen2MoeForCausalLM", "mlp.shared_expert.up_proj.weight", Part::Other),
            ("Qwen2MoeForCausalLM", "mlp.shared_expert_gate.weight", Part::Other),
            ("Qwen2MoeForCausalLM", "mlp.gate.weight", Part::Rows),
            (mixtral, "block_sparse_moe.experts.7.w2.weight", Part::Expert { expert: 7, leaf: "w2.weight" }),
            (mixtral, "block_sparse_moe.gate.weight", Part::Rows),
            (gpt, "mlp.experts.gate_up_proj_blocks", Part::Rows),
            (gpt, "mlp.experts.down_proj", Part::Rows),
            (gpt, "mlp.experts.down_proj_zeros", Part::Unknown),
            (gpt, "mlp.experts.3.down_proj.weight", Part::Unknown),
            (gpt, "mlp.router.bias", Part::Rows),
        ] {
            assert_eq!(part(architecture, &format!("model.layers.12.{name}")), expected, "{name}");
        }
    }

    #[test]
    fn names_outside_layers_are_not_taken_apart() {
        for name in ["lm_head.weight", "model.norm.weight", "model.layers.x.mlp.gate.weight", "model.layers.1", ""] {
            assert_eq!(split_layer(name), None, "{name}");
        }
    }
}
