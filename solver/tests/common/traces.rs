//! A small model, its origin, and profiles of its traces, for unit and integration tests.

use std::path::Path;

use semmoe_tables::{ModelInfo, Phase, Profile, ProfileBuilder, Provenance, Trace};

pub(crate) fn provenance() -> Provenance {
    Provenance { source: "test".into(), created: "2026-01-01T00:00:00Z".into() }
}

pub(crate) fn model(layers: u16, experts: u16, top_k: u16, vocabulary: u32) -> ModelInfo {
    ModelInfo {
        model: "planted".into(),
        tokenizer_sha256: None,
        num_experts: experts,
        top_k,
        vocab_size: vocabulary,
        num_hidden_layers: layers,
        layer_ids: (0..layers).collect(),
    }
}

pub(crate) fn profile_of(trace: &Trace) -> Profile {
    let mut builder = ProfileBuilder::new(trace.model().clone(), provenance(), Phase::All).unwrap();
    builder.add_trace(trace).unwrap();
    builder.finish().unwrap()
}

/// Recorded routing of the bundled model.
pub(crate) fn recorded(name: &str) -> Trace {
    Trace::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap()
}
