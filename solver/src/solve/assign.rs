//! Runs only the exact token step: the best balanced T for a given placement.

use std::collections::BTreeMap;

use semmoe_tables::{GroupId, LayerIdx, NO_GROUP, Placement, Profile, TokenId};

use crate::input::{SolveError, SolveOptions};
use crate::prior::TokenPrior;
use crate::prior::evidence::Shrinkage;
use crate::step::{Transport, best_group, mass_capacity, to_profit};
use crate::tables::activation_evidence;

/// The groups assigned to each token, per layer.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenPlan {
    layers: Vec<LayerPlan>,
}

#[derive(Clone, Debug, PartialEq)]
struct LayerPlan {
    /// [V], [`NO_GROUP`] for a token without evidence.
    label: Vec<u16>,
    /// Tokens split over several groups, with each group's share; about G per layer.
    split: BTreeMap<u32, Vec<(u16, f64)>>,
}

impl TokenPlan {
    /// Returns a token's groups in a layer with their shares, which add up to one; empty for a token without evidence.
    pub fn shares(&self, layer: LayerIdx, token: TokenId) -> Vec<(GroupId, f64)> {
        let layer = &self.layers[layer.index()];
        if let Some(parts) = layer.split.get(&token.get()) {
            return parts.iter().map(|&(group, share)| (GroupId::new(group), share)).collect();
        }
        let label = layer.label.get(token.index()).copied().filter(|&label| label != NO_GROUP);
        label.map(|label| (GroupId::new(label), 1.0)).into_iter().collect()
    }
}

/// Assigns tokens to given placements, using the same evidence for each.
#[derive(Debug)]
pub struct TokenAssigner<'a> {
    profile: &'a Profile,
    options: &'a SolveOptions,
    prior: Option<TokenPrior>,
}

impl<'a> TokenAssigner<'a> {
    /// Creates an assigner that uses `token_margin` of `options` and all options that determine how counts become
    /// shares. Token strings are parsed here, once.
    ///
    /// # Errors
    /// Returns a [`SolveError`] if an option is out of range, there are more token strings than tokens in the
    /// vocabulary, or the profile is empty.
    pub fn new(profile: &'a Profile, options: &'a SolveOptions) -> Result<Self, SolveError> {
        options.validate()?;
        if profile.total_tokens() == 0 {
            return Err(SolveError::NoTokens { what: "profile" });
        }
        Ok(TokenAssigner { profile, options, prior: TokenPrior::new(profile, options)? })
    }

    /// Assigns all tokens, layer by layer. Let `s[t,c]` be the share of token t's activations expected on group c
    /// (shrunk towards the token's prior). The assignment maximises the sum of count times share with at most (1 +
    /// `token_margin`) times the mean tokens in each group. About G tokens per layer are split. An unseen token has no
    /// weight in this sum and is assigned to the group with the largest prior minus price. With a margin of 1000, every
    /// token is on its likeliest group.
    ///
    /// # Errors
    /// Returns [`SolveError::BadOption`] if the placement's shape does not match the profile's model.
    pub fn assign(&self, placement: &Placement) -> Result<TokenPlan, SolveError> {
        let model = self.profile.model();
        if (placement.layers(), placement.experts()) != (model.layers(), model.num_experts) {
            let found = format!("{} layers of {} experts", placement.layers(), placement.experts());
            let expected = "the shape of the profile's model";
            return Err(SolveError::BadOption { option: "placement", found, expected });
        }
        Ok(TokenPlan { layers: LayerIdx::all(model.layers()).map(|layer| self.layer(placement, layer)).collect() })
    }

    fn layer(&self, placement: &Placement, layer: LayerIdx) -> LayerPlan {
        let groups = usize::from(placement.groups());
        let evidence = activation_evidence(self.profile, layer, placement);
        let (mut mass, mut profit, mut unseen) = (Vec::new(), Vec::new(), Vec::new());
        let mut tokens = Vec::new();
        let shrunk = Shrinkage { options: self.options, prior: self.prior.as_ref() }.fit(&evidence);
        let mut shares = vec![0.0; groups];
        for (token, &count) in self.profile.token_counts().iter().enumerate() {
            if !shrunk.shares(token, &mut shares) {
                continue;
            }
            let row = shares.iter().map(|&share| to_profit(share));
            if count == 0 {
                unseen.push((token, row.collect::<Vec<i64>>()));
            } else {
                tokens.push(token);
                mass.push(count);
                profit.extend(row);
            }
        }
        let capacity = mass_capacity(mass.iter().sum(), groups, self.options.token_margin);
        let plan = Transport { mass: &mass, profit: &profit, capacity: &capacity }.solve(None);
        let mut label = vec![NO_GROUP; self.profile.token_counts().len()];
        tokens.iter().zip(&plan.label).for_each(|(&token, &group)| label[token] = group);
        for (token, row) in unseen {
            label[token] = best_group(&row, &plan.price) as u16;
        }
        let split = plan.splits.iter().map(|split| {
            let whole = mass[split.unit] as f64;
            let shares = split.parts.iter().map(|&(group, part)| (group, part as f64 / whole)).collect();
            (tokens[split.unit] as u32, shares)
        });
        LayerPlan { label, split: split.collect() }
    }
}
