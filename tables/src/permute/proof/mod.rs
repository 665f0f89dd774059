//! The numeric half of the self-check: every permuted layer, computed on random hidden states, gives what the original
//! gives.
//!
//! The comparison of bytes shows that tensors moved as planned; this shows that the plan was right. Each checkpoint is
//! computed from its own files, in its own numbering, by the gating of its family: nothing here knows how tensors
//! moved, but that new expert p is old expert pi(p). Both sides do the same operations in the same order, so results
//! are compared bit by bit: router logits, the scores that experts are chosen by, the experts chosen, and the output y
//! = sum of `w_i` f_i(h) over them, strongest first. Weights are normalised over the chosen experts; a model that does
//! not do so, or scales its output, differs by one factor on both sides.
//!
//! | module | what |
//! |---|---|
//! | `matrix` | rows of stored matrices as f32: plain, FP8 with block scales, MXFP4 |
//! | `layer` | router and experts of one layer |
//! | `gating` | which experts a token gets |

mod gating;
mod layer;
mod matrix;

use std::path::Path;

use serde::Serialize;

use super::PermuteError;
use super::config::Config;
use super::permutation::LayerPermutation;
use super::source::Source;
use crate::{Tables, mix64};
use gating::{Choice, Gating};
use layer::MoeLayer;

/// Hidden states per layer.
const STATES: u64 = 2;

/// The parts that were computed and found equal.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Proof {
    /// Vectors of router logits compared: layers x states.
    pub logits: u64,
    /// Outputs of layers compared.
    pub outputs: u64,
    /// Hidden states on which experts tie exactly. Engines give a tie to the lower number, which a permutation changes;
    /// outputs are not compared there.
    pub ties: u64,
    /// Why some logits or outputs were not computed: a form of weights that is not known here. Their bytes were
    /// compared.
    pub not_computed: Option<String>,
}

/// Computes both checkpoints' MoE layers on the same random hidden states and compares them; `permuted` needs no
/// `config.json`.
///
/// # Errors
/// [`PermuteError::Computes`] when a layer computes something else; otherwise as [`super::permute`] for what cannot be
/// read.
pub fn prove(tables: &Tables, source: &Path, permuted: &Path) -> Result<Proof, PermuteError> {
    let config = Config::read(source, tables)?;
    compare(&config, tables.model().top_k, &Source::open(source)?, &Source::open(permuted)?)
}

/// The same of checkpoints that are open.
pub(super) fn compare(config: &Config, top_k: u16, source: &Source, permuted: &Source) -> Result<Proof, PermuteError> {
    let permutation = &config.permutation;
    let gating = Gating::new(config, permutation.experts, top_k);
    let mut proof = Proof::default();
    for (&layer, moved) in &permutation.layers {
        let sides = [source, permuted].map(|source| MoeLayer::open(source, config.family, layer));
        let [Ok(old), Ok(new)] = &sides else {
            let reason = sides.into_iter().find_map(Result::err);
            proof.not_computed = proof.not_computed.or(reason);
            continue;
        };
        let differs = |what: String| PermuteError::Computes { path: permuted.dir.clone(), layer, what };
        for state in 0..STATES {
            let hidden = hidden_state(old.router.cols, u64::from(layer) * STATES + state);
            compare_on(&hidden, &gating, moved, old, new, &mut proof).map_err(differs)?;
        }
    }
    Ok(proof)
}

/// One hidden state through one layer of both; says what differs.
fn compare_on(
    hidden: &[f32],
    gating: &Gating,
    moved: &LayerPermutation,
    old: &MoeLayer<'_>,
    new: &MoeLayer<'_>,
    proof: &mut Proof,
) -> Result<(), String> {
    // Without the bias: [N].
    let [old_logits, new_logits] = [old, new].map(|layer| layer.router.times(hidden));
    let choose = |layer: &MoeLayer<'_>, logits: &[f32]| gating.choose(logits, layer.bias.as_deref());
    let (old_choice, new_choice) = (choose(old, &old_logits), choose(new, &new_logits));
    for (slot, &expert) in moved.old.iter().enumerate() {
        let expert = usize::from(expert);
        for (what, ours, theirs) in
            [("logit", &new_logits, &old_logits), ("score", &new_choice.scores, &old_choice.scores)]
        {
            let pair = ours.get(slot).zip(theirs.get(expert));
            if pair.is_none_or(|(ours, theirs)| ours.to_bits() != theirs.to_bits()) {
                return Err(format!(
                    "the router's {what} of expert {slot} is not that of the original's expert {expert}"
                ));
            }
        }
    }
    proof.logits += 1;
    let renumbered: Vec<usize> = new_choice.experts.iter().map(|&slot| usize::from(moved.old[slot])).collect();
    if renumbered != old_choice.experts {
        // Every expert scores as before, so the choice can differ by ties only.
        proof.ties += 1;
        return Ok(());
    }
    match (output(old, &old_choice, hidden), output(new, &new_choice, hidden)) {
        (Ok(theirs), Ok(ours)) => {
            let same = ours.len() == theirs.len() && ours.iter().zip(&theirs).all(|(a, b)| a.to_bits() == b.to_bits());
            if !same {
                return Err(format!("the output of the experts {:?} is not that of the original", new_choice.experts));
            }
            proof.outputs += 1;
        }
        (Err(reason), _) | (_, Err(reason)) => {
            proof.not_computed.get_or_insert(reason);
        }
    }
    Ok(())
}

/// y = sum of `w_i` f_i(h), strongest expert first.
fn output(layer: &MoeLayer<'_>, choice: &Choice, hidden: &[f32]) -> Result<Vec<f32>, String> {
    let mut sum = vec![0.0; hidden.len()];
    for (&expert, &weight) in choice.experts.iter().zip(&choice.weights) {
        let output = layer.expert(expert, hidden)?;
        sum.iter_mut().zip(output).for_each(|(sum, value)| *sum += weight * value);
    }
    Ok(sum)
}

/// Uniform in -1..1, the same for the same number (splitmix64).
fn hidden_state(len: usize, number: u64) -> Vec<f32> {
    let mut state = number.wrapping_mul(0xd6e8_feb8_6659_fd93);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // 24 bits, which an f32 holds exactly.
        (mix64(state) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
