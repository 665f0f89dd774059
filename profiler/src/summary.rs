//! Short summaries of traces and profiles.

use std::fmt;

use semmoe_tables::{ExpertId, LayerIdx, ModelInfo, Profile, Provenance, Trace};
use serde::Serialize;

use crate::ProfilerError;

/// A summary of a trace or profile; its text form is for humans.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// "trace" or "profile".
    pub kind: &'static str,
    /// The model.
    pub model: ModelInfo,
    /// Origin of the data.
    pub provenance: Provenance,
    /// The phase whose tokens are counted below; `None` for traces, where all are.
    pub phase: Option<String>,
    /// Number of requests; `None` for profiles.
    pub requests: Option<usize>,
    /// Number of tokens; for traces, this includes tokens without a route.
    pub tokens: u64,
    /// Number of prompt tokens; `None` for profiles.
    pub prompt_tokens: Option<u64>,
    /// Number of tokens whose route is known in at least one layer.
    pub routed_tokens: u64,
    /// Number of distinct tokens among the routed tokens.
    pub distinct_tokens: u64,
    /// Fraction of the vocabulary that occurred, 0..1.
    pub coverage: f64,
    /// One per MoE layer.
    pub layers: Vec<LayerSummary>,
    /// Digest of the file.
    pub digest: String,
}

/// Load balance of a layer's experts.
#[derive(Clone, Debug, Serialize)]
pub struct LayerSummary {
    /// The model's layer number.
    pub layer_id: u16,
    /// Total activations.
    pub activations: u64,
    /// The busiest expert and its share of the activations, 0..1.
    pub busiest: (ExpertId, f64),
    /// Load of the busiest expert over the mean; 1 if balanced, 0 without activations.
    pub max_over_mean: f64,
    /// Entropy of the loads relative to balanced loads, 0..1.
    pub entropy: f64,
}

impl Summary {
    /// Summarises a trace.
    ///
    /// # Errors
    /// If a count overflows.
    pub fn of_trace(trace: &Trace) -> Result<Self, ProfilerError> {
        Ok(Summary {
            kind: "trace",
            phase: None,
            requests: Some(trace.requests()),
            tokens: trace.tokens() as u64,
            prompt_tokens: Some(trace.iter().map(|request| request.prompt_len() as u64).sum()),
            digest: trace.digest(),
            ..Summary::of_profile(&Profile::of_trace(trace)?)
        })
    }

    /// Summarises a profile.
    pub fn of_profile(profile: &Profile) -> Self {
        let distinct = profile.token_counts().iter().filter(|&&n| n > 0).count() as u64;
        let model = profile.model();
        let layer =
            |(layer, id): (usize, &u16)| LayerSummary::of(*id, &profile.expert_loads(LayerIdx::new(layer as u16)));
        Summary {
            kind: "profile",
            model: model.clone(),
            provenance: profile.provenance().clone(),
            phase: Some(profile.phase().to_string()),
            requests: None,
            tokens: profile.total_tokens(),
            prompt_tokens: None,
            routed_tokens: profile.total_tokens(),
            distinct_tokens: distinct,
            coverage: distinct as f64 / f64::from(model.vocab_size),
            layers: model.layer_ids.iter().enumerate().map(layer).collect(),
            digest: profile.digest().to_owned(),
        }
    }
}

impl LayerSummary {
    /// Computes the summary from expert loads.
    pub(crate) fn of(layer_id: u16, loads: &[u64]) -> Self {
        let activations: u64 = loads.iter().sum();
        // Ties go to the lowest expert id.
        let busiest = (0..loads.len()).rev().max_by_key(|&e| loads[e]).unwrap_or(0);
        let share = |load: u64| if activations == 0 { 0.0 } else { load as f64 / activations as f64 };
        let entropy: f64 = loads.iter().map(|&load| share(load)).filter(|&p| p > 0.0).map(|p| -p * p.ln()).sum();
        let even = (loads.len() as f64).ln();
        let busiest_share = loads.get(busiest).map_or(0.0, |&load| share(load));
        LayerSummary {
            layer_id,
            activations,
            busiest: (ExpertId::new(busiest as u16), busiest_share),
            max_over_mean: busiest_share * loads.len() as f64,
            entropy: if even > 0.0 { entropy / even } else { 1.0 },
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let model = &self.model;
        let (n, k, layers) = (model.num_experts, model.top_k, model.layers());
        writeln!(f, "{} of {}: {layers} MoE layers, {n} experts, top-{k}", self.kind, model.model)?;
        writeln!(f, "source    {} ({})", self.provenance.source, self.provenance.created)?;
        if let Some(phase) = &self.phase {
            writeln!(f, "phase     {phase}")?;
        }
        if let (Some(requests), Some(prompt)) = (self.requests, self.prompt_tokens) {
            writeln!(f, "requests  {requests}")?;
            writeln!(f, "tokens    {}, {prompt} of them prompt, {} with a route", self.tokens, self.routed_tokens)?;
        } else {
            writeln!(f, "tokens    {}", self.tokens)?;
        }
        let percent = self.coverage * 100.0;
        writeln!(f, "coverage  {} of {} token ids ({percent:.1}%)", self.distinct_tokens, model.vocab_size)?;
        writeln!(f, "digest    {}", self.digest)?;
        write!(f, "layer  activations  busiest expert (share)  max/mean  entropy")?;
        for layer in &self.layers {
            let (expert, share) = layer.busiest;
            write!(
                f,
                "\n{:>5}  {:>11}  {:>14} ({:>5.1}%)  {:>8.2}  {:>7.3}",
                layer.layer_id,
                layer.activations,
                expert.get(),
                share * 100.0,
                layer.max_over_mean,
                layer.entropy
            )?;
        }
        Ok(())
    }
}
