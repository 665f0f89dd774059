//! Small models, traces, profiles and tables for the tests, and a foreign writer: the safetensors crate.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::collections::HashMap;

use half::f16;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use semmoe_tables::*;

pub fn provenance() -> Provenance {
    Provenance { source: "test".into(), created: "2026-01-02T03:04:05Z".into() }
}

pub fn model(num_experts: u16, top_k: u16, vocab_size: u32, layer_ids: &[u16]) -> ModelInfo {
    ModelInfo {
        model: "tiny".into(),
        tokenizer_sha256: None,
        num_experts,
        top_k,
        vocab_size,
        num_hidden_layers: layer_ids.last().map_or(1, |last| last + 1),
        layer_ids: layer_ids.to_vec(),
    }
}

/// Models around the width limit of traces (255 experts).
pub fn any_model() -> impl Strategy<Value = ModelInfo> {
    let experts = prop_oneof![1u16..12, 254u16..258];
    let layers = proptest::collection::btree_set(0u16..9, 1..4);
    (experts, 1u16..5, 1u32..9, layers, proptest::option::of(Just("ab".repeat(32)))).prop_map(
        |(n, k, v, layers, hash)| {
            let layers: Vec<u16> = layers.into_iter().collect();
            ModelInfo { tokenizer_sha256: hash, ..model(n, k.min(n), v, &layers) }
        },
    )
}

/// Arguments of a trace builder.
#[derive(Clone, Debug)]
pub struct RawRequest {
    pub token_ids: Vec<u32>,
    pub prompt_len: u32,
    pub experts: Vec<u16>,
    pub weights: Option<Vec<f16>>,
}

/// Pseudo-random requests of a model: about one route in eight is unknown.
pub fn requests(model: &ModelInfo, count: usize, seed: u64, weights: bool) -> Vec<RawRequest> {
    let mut state = seed | 1;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below.max(1)
    };
    let (n, k) = (usize::from(model.num_experts), usize::from(model.top_k));
    let mut make = || {
        let len = next(6);
        let token_ids: Vec<u32> = (0..len).map(|_| next(model.vocab_size as usize) as u32).collect();
        let mut experts = Vec::new();
        for _ in 0..len * model.layers() {
            let (first, step, known) = (next(n), next(2), next(8) > 0);
            // Neighbours, so distinct, in one of two directions.
            let id = |slot: usize| (if step == 0 { first + slot } else { first + n - slot } % n) as u16;
            experts.extend((0..k).map(|slot| if known { id(slot) % model.num_experts } else { UNKNOWN_EXPERT }));
        }
        let weights = weights.then(|| {
            let weight =
                |&id: &u16| if id == UNKNOWN_EXPERT { f16::ZERO } else { f16::from_f32(next(100) as f32 / 8.0) };
            experts.iter().map(weight).collect()
        });
        RawRequest { prompt_len: next(len + 1) as u32, token_ids, experts, weights }
    };
    (0..count).map(|_| make()).collect()
}

pub fn trace_builder(model: &ModelInfo, requests: &[RawRequest]) -> TraceBuilder {
    let mut builder = TraceBuilder::new(model.clone(), provenance()).unwrap();
    for request in requests {
        builder.push(&request.token_ids, request.prompt_len, &request.experts, request.weights.as_deref()).unwrap();
    }
    builder
}

pub fn trace(model: &ModelInfo, count: usize, seed: u64) -> Trace {
    trace_builder(model, &requests(model, count, seed, false)).finish().unwrap()
}

pub fn profile_builder(model: &ModelInfo, phase: Phase) -> ProfileBuilder {
    ProfileBuilder::new(model.clone(), provenance(), phase).unwrap()
}

/// A profile of a few requests.
pub fn profile(model: &ModelInfo, seed: u64) -> Profile {
    let mut builder = profile_builder(model, Phase::All);
    builder.add_trace(&trace(model, 5, seed)).unwrap();
    builder.finish().unwrap()
}

pub fn dp_tables(model: &ModelInfo, groups: u16) -> TablesBuilder {
    let placement = Placement::contiguous(model.layers(), model.num_experts, groups).unwrap();
    let ranks = usize::from(groups);
    let row = vec![f16::from_f64(1.0 / f64::from(groups)); ranks];
    let t = row.repeat(model.vocab_size as usize);
    let price = (0..groups).map(|g| f32::from(g) / 16.0).collect();
    TablesBuilder::dp(model.clone(), provenance(), placement, t, price).solver("test 1")
}

pub fn tp_tables(model: &ModelInfo, groups: u16) -> TablesBuilder {
    let placement = Placement::contiguous(model.layers(), model.num_experts, groups).unwrap();
    let g = usize::from(groups);
    let (rows, moves) = (model.layers() * model.vocab_size as usize, model.layers() * g * g);
    let labels = |n: usize| -> Vec<u16> {
        (0..n).flat_map(|row| if row % 3 == 0 { [NO_GROUP; 2] } else { [(row % g) as u16, NO_GROUP] }).collect()
    };
    let probs = |n: usize| -> Vec<f16> {
        (0..n).flat_map(|row| if row % 3 == 0 { [f16::ZERO; 2] } else { [f16::from_f64(0.75), f16::ZERO] }).collect()
    };
    let parts = TpParts {
        labels: 2,
        token_group: labels(rows),
        token_prob: probs(rows),
        transition_group: labels(moves),
        transition_prob: probs(moves),
    };
    TablesBuilder::tp(model.clone(), provenance(), placement, parts, vec![0.0; g]).solver("test 2")
}

/// A file taken apart, to be changed and reassembled by the safetensors crate: a foreign reader and writer.
#[derive(Clone)]
pub struct Parts {
    pub metadata: HashMap<String, String>,
    pub tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    pub fn of(file: &[u8]) -> Self {
        let (_, header) = SafeTensors::read_metadata(file).unwrap();
        let tensors = SafeTensors::deserialize(file).unwrap();
        let take = |(name, view): (&str, TensorView<'_>)| {
            (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        Parts { metadata: header.metadata().clone().unwrap(), tensors: tensors.iter().map(take).collect() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let views = self
            .tensors
            .iter()
            .map(|(name, dtype, shape, data)| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
        safetensors::serialize(views, Some(self.metadata.clone())).unwrap()
    }

    pub fn meta(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    pub fn without_meta(mut self, key: &str) -> Self {
        self.metadata.remove(key);
        self
    }

    pub fn without(mut self, tensor: &str) -> Self {
        self.tensors.retain(|(name, ..)| name != tensor);
        self.without_meta("digest")
    }

    /// Overwrites little-endian bytes of a tensor and drops the stated digest.
    pub fn poke(self, tensor: &str, at: usize, bytes: &[u8]) -> Self {
        self.without_meta("digest").damage(tensor, at, bytes)
    }

    /// Overwrites little-endian bytes of a tensor but keeps the stated digest.
    pub fn damage(mut self, tensor: &str, at: usize, bytes: &[u8]) -> Self {
        let found = self.tensors.iter_mut().find(|(name, ..)| name == tensor).unwrap();
        found.3[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Replaces or adds a tensor.
    pub fn put(self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Self {
        let mut parts = self.without(name);
        parts.tensors.push((name.into(), dtype, shape.to_vec(), bytes.to_vec()));
        parts
    }
}
