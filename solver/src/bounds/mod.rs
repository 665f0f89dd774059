#![doc = include_str!("README.md")]

mod frame;
mod sdp;
#[cfg(test)]
mod tests;
mod units;

use semmoe_tables::{Profile, Trace, in_parallel};
use serde::Serialize;

use crate::input::{BoundOptions, Problem, SolveError, SolveOptions, check_input, problems};
use crate::step::mass_capacity;
use frame::Frame;
use units::Units;

/// The scope of a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundScope {
    /// The whole problem: a single layer per problem, or all layers together if they share labels.
    Full,
    /// Layers share labels, but there are too many for a joint B2: the joint B1 and each layer's own bounds are used.
    JointSpectral,
    /// Layers share labels, but there are too many for any joint bound: the sum of the per-layer bounds is used.
    PerLayer,
}

impl BoundScope {
    /// Returns the reason why the bounds are weaker than possible, if they are.
    pub(crate) fn note(self) -> Option<&'static str> {
        match self {
            BoundScope::Full => None,
            BoundScope::JointSpectral => Some(
                "too many layers and experts for a joint B2 over all layers, so only the joint B1 and each layer's own B2 are used",
            ),
            BoundScope::PerLayer => {
                Some("too many layers and experts for a joint bound, so each layer is bounded separately")
            }
        }
    }
}

/// Upper bounds on the local activation rate of any placement with N/E experts of each layer per group and any
/// assignment of the units within the token cap. They remain valid under limits on expert load, but do not cover
/// replicas.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// B1, as a rate.
    pub spectral: f64,
    /// B2, as a rate: the minimum over all iterates.
    pub sdp: f64,
    /// The part of the problem that the bounds cover.
    pub scope: BoundScope,
    /// Bounds of each layer by itself; their mean, weighted by activations, bounds all layers.
    pub layers: Vec<LayerBounds>,
}

impl Bounds {
    /// Returns the smaller of the two bounds.
    pub fn best(&self) -> f64 {
        self.spectral.min(self.sdp)
    }
}

/// Bounds of one layer, as rates of the layer's activations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerBounds {
    /// Activations of the layer.
    pub activations: u64,
    /// B1
    pub spectral: f64,
    /// B2
    pub sdp: f64,
}

/// Computes upper bounds on the rate that [`solve`](crate::solve) can reach on this input with any placement.
///
/// With attention dp the units are the requests of `trace`, or the profile's tokens without a trace; with attention tp
/// they are the profile's tokens, layer by layer. Uses the groups, attention, token margin, threads and bounds in
/// `options` (default work limits if bounds are off).
///
/// # Errors
/// Returns a [`SolveError`] if the input has no known route, the groups do not divide the experts, an option is out of
/// range, trace and profile belong to different models, or counts exceed 2^50.
pub fn bounds(profile: &Profile, trace: Option<&Trace>, options: &SolveOptions) -> Result<Bounds, SolveError> {
    options.validate()?;
    check_input(profile, trace, options.groups)?;
    let (_, problems) = problems(profile, trace, options.attention)?;
    Ok(problem_bounds(&problems, options, &mut || true).expect("nothing ends it early"))
}

/// Computes the bounds of one problem with all layers, or of one problem per layer.
pub(crate) fn problem_bounds(
    problems: &[Problem],
    options: &SolveOptions,
    go_on: &mut dyn FnMut() -> bool,
) -> Option<Bounds> {
    let (groups, work) = (usize::from(options.groups), options.bounds.unwrap_or_default());
    let scope = scope(problems, &work);
    let mut jobs: Vec<(&Problem, Option<usize>)> = Vec::new();
    if problems[0].layers > 1 && scope != BoundScope::PerLayer {
        jobs.push((&problems[0], None));
    }
    jobs.extend(problems.iter().flat_map(|problem| (0..problem.layers).map(move |layer| (problem, Some(layer)))));
    let run = |(problem, layer): (&Problem, Option<usize>)| {
        let units = Units::of_layers(problem, layer.map_or(0..problem.layers, |layer| layer..layer + 1));
        let capacity = mass_capacity(problem.total_mass(), groups, options.token_margin)[0];
        let rounds = if layer.is_none() && scope != BoundScope::Full { 0 } else { work.iterations };
        part_bounds(&units, groups, capacity as f64, rounds)
    };
    let (mut parts, threads) = (Vec::new(), options.threads.max(1));
    for chunk in jobs.chunks(threads) {
        if !go_on() {
            return None;
        }
        parts.append(&mut in_parallel(chunk, threads, run));
    }
    let all = jobs[0].1.is_none().then(|| parts.remove(0));
    let total = parts.iter().map(|part| part.activations as f64).sum::<f64>();
    let mean = |rate: fn(&LayerBounds) -> f64| {
        parts.iter().map(|part| rate(part) * (part.activations as f64 / total)).sum::<f64>() * (1.0 + 1e-12)
    };
    let of_all = |rate: fn(&LayerBounds) -> f64| all.as_ref().map_or(1.0, rate);
    Some(Bounds {
        spectral: mean(|part| part.spectral).min(of_all(|all| all.spectral)),
        sdp: mean(|part| part.sdp).min(of_all(|all| all.sdp)),
        scope,
        layers: parts,
    })
}

/// Returns the widest scope within the work limits; problems of one layer are always bounded in full.
fn scope(problems: &[Problem], work: &BoundOptions) -> BoundScope {
    let joint = problems.iter().filter(|problem| problem.layers > 1);
    match joint.map(|problem| problem.layers * problem.experts).max().unwrap_or(0) {
        columns if columns <= work.joint_columns => BoundScope::Full,
        columns if columns <= work.joint_spectral_columns => BoundScope::JointSpectral,
        _ => BoundScope::PerLayer,
    }
}

/// Computes the bounds of the units over all their columns jointly.
fn part_bounds(units: &Units, groups: usize, capacity: f64, iterations: u32) -> LayerBounds {
    let total = units.activations();
    let mut bounds = LayerBounds { activations: total as u64, spectral: 1.0, sdp: 1.0 };
    if groups > 1 && total > 0.0 {
        let frame = Frame::new(units, groups, capacity);
        // f64::min discards a NaN, which is not a bound. The last factor covers the rounding of the solver's
        // fixed-point values.
        let rate = |value: f64| (value / total * (1.0 + 1e-9)).min(1.0);
        bounds.spectral = rate(frame.spectral());
        bounds.sdp = rate(sdp::sdp(&frame, iterations, &mut |_| ()));
    }
    bounds
}
