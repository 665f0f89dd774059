//! The exact token step alone: the best balanced assignment of a profile's tokens to a placement that is given.

use std::collections::BTreeMap;

use semmoe_tables::{GroupId, LayerIdx, NO_GROUP, Placement, Profile, TokenId};

use crate::error::SolveError;
use crate::options::within;
use crate::problem::Problem;
use crate::unit_step::{mass_capacity, unit_step};

/// Where each token goes, layer by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenPlan {
    layers: Vec<LayerPlan>,
}

#[derive(Clone, Debug, PartialEq)]
struct LayerPlan {
    /// [V], [`NO_GROUP`] for a token that the profile never saw.
    label: Vec<u16>,
    /// Tokens in several groups, with the share of each; about G a layer.
    split: BTreeMap<u32, Vec<(u16, f64)>>,
}

impl TokenPlan {
    /// The groups of a token in a layer with their shares, which add up to one; none for a token never seen.
    pub fn shares(&self, layer: LayerIdx, token: TokenId) -> Vec<(GroupId, f64)> {
        let layer = &self.layers[layer.index()];
        if let Some(parts) = layer.split.get(&token.get()) {
            return parts.iter().map(|&(group, share)| (GroupId::new(group), share)).collect();
        }
        let label = layer.label.get(token.index()).copied().filter(|&label| label != NO_GROUP);
        label.map(|label| (GroupId::new(label), 1.0)).into_iter().collect()
    }
}

/// Assigns the tokens of `profile` to the groups of `placement`, layer by layer, so that the local activations are as
/// many as can be with at most (1 + `token_margin`) of the mean tokens in a group. About G tokens of a layer are split.
///
/// # Errors
/// [`SolveError`]: a placement of another shape, an empty profile, a margin out of range, counts beyond 2^50.
pub fn assign_tokens(profile: &Profile, placement: &Placement, token_margin: f64) -> Result<TokenPlan, SolveError> {
    within("token_margin", token_margin, 0.0, 1000.0, "a number from 0 to 1000")?;
    let model = profile.model();
    if (placement.layers(), placement.experts()) != (model.layers(), model.num_experts) {
        let found = format!("{} layers of {} experts", placement.layers(), placement.experts());
        return Err(SolveError::BadOption { option: "placement", found, expected: "the shape of the profile's model" });
    }
    let seen = || (0u32..).zip(profile.token_counts()).filter(|(_, count)| **count > 0).map(|(token, _)| token);
    let mut layers = Vec::with_capacity(model.layers());
    for layer in 0..model.layers() {
        let problem = Problem::from_profile(profile, layer..layer + 1)?;
        let capacity = mass_capacity(problem.total_mass(), usize::from(placement.groups()), token_margin);
        let (plan, _) = unit_step(&problem, placement.layer(LayerIdx::new(layer as u16)), &capacity, None);
        let tokens: Vec<u32> = seen().collect();
        let mut label = vec![NO_GROUP; model.vocab_size as usize];
        tokens.iter().zip(&plan.label).for_each(|(&token, &group)| label[token as usize] = group);
        let split = plan.splits.iter().map(|split| {
            let mass = problem.mass[split.unit] as f64;
            let shares = split.parts.iter().map(|&(group, part)| (group, part as f64 / mass)).collect();
            (tokens[split.unit], shares)
        });
        layers.push(LayerPlan { label, split: split.collect() });
    }
    Ok(TokenPlan { layers })
}
