//! Tables with replicas, for attention dp: T where an activation can be local on several ranks.

use half::f16;
use semmoe_tables::{LayerIdx, Profile, Replicas, TablesBuilder, TokenId};

use crate::evidence::{LayerEvidence, Shrinkage};
use crate::held::Held;
use crate::options::SolveOptions;
use crate::token_table::shares_by;

/// The parts of the tables but for the price, which depends on T: slots and T.
pub(crate) fn replica_tables(
    profile: &Profile,
    options: &SolveOptions,
    held: &Held,
    slots: Replicas,
    shrinkage: &Shrinkage<'_>,
    price: impl FnOnce(&[f16]) -> Vec<f32>,
) -> TablesBuilder {
    let mut shares = shares_by(profile, held.groups, shrinkage, |layer| layer_evidence(profile, layer, held));
    // Sums of rounded shares may miss one by a little where every group holds every expert.
    shares.iter_mut().for_each(|share| *share = share.min(f16::ONE));
    let price = price(&shares);
    // Stands for the number of groups only: the slots take its place.
    let placement = slots.primary();
    let builder = TablesBuilder::dp(profile.model().clone(), options.provenance.clone(), placement, shares, price);
    builder.replicas(slots)
}

/// Occurrences of every token in a layer by group: an activation counts on every group that holds its expert, so that a
/// row adds up to more than the token was seen.
fn layer_evidence(profile: &Profile, layer: LayerIdx, held: &Held) -> LayerEvidence {
    let (groups, holders) = (held.groups, held.layer(layer.index()));
    let top_k = f64::from(profile.model().top_k);
    let vocabulary = profile.model().vocab_size;
    let mut on_group = vec![0.0; vocabulary as usize * groups];
    let mut seen = Vec::with_capacity(vocabulary as usize);
    let mut total = vec![0.0; groups];
    for (token, counts) in (0..vocabulary).zip(on_group.chunks_exact_mut(groups)) {
        let row = profile.row(layer, TokenId::new(token));
        for (expert, count) in row.iter() {
            for &group in &holders[usize::from(expert)] {
                counts[usize::from(group)] += f64::from(count) / top_k;
            }
        }
        total.iter_mut().zip(&*counts).for_each(|(total, count)| *total += count);
        seen.push(row.activations() as f64 / top_k);
    }
    let all: f64 = seen.iter().sum();
    let layer_share = total.iter().map(|total| if all > 0.0 { total / all } else { 1.0 / groups as f64 });
    LayerEvidence { groups, on_group, seen, layer_share: layer_share.collect() }
}
