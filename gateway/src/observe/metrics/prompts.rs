//! Metrics of prompts: whether engines tokenize them as the gateway does.

use semmoe_text::Shapes;

use super::labels::{Counter, Family, Gauge};

/// States of a shape.
const STATES: [&str; 3] = ["equal", "differs", "unproven"];

labels!(AgreementLabels { backend: String, agrees: &'static str });
labels!(ShapeLabels { backend: String, shape: &'static str });
labels!(StateLabels { backend: String, state: &'static str });

metrics! {
    pub(crate) struct PromptMetrics {
        counts: Family<AgreementLabels, Counter>,
            "prompt_token_counts",
            "Prompts whose token count the engine also reported, by whether the counts agree";
        shapes: Family<StateLabels, Gauge>,
            "chat_shapes",
            "Chat shapes, by whether the engine tokenizes them as the gateway does: equal, differs or unproven";
        misread: Family<ShapeLabels, Counter>,
            "chats_misread",
            "Chats routed by load because the engine tokenizes them differently, by the first differing shape";
    }
}

impl PromptMetrics {
    /// Counts a prompt whose tokens both sides counted; returns how many of the backend's prompts had the same result.
    pub(crate) fn counted(&self, backend: &str, agree: bool) -> u64 {
        let labels = AgreementLabels { backend: backend.to_owned(), agrees: if agree { "yes" } else { "no" } };
        self.counts.get_or_create(&labels).inc() + 1
    }

    /// Counts a chat of a shape that the engine tokenizes differently.
    pub(crate) fn misread(&self, backend: &str, shape: &'static str) {
        self.misread.get_or_create(&ShapeLabels { backend: backend.to_owned(), shape }).inc();
    }

    /// Sets which shapes are proven to be tokenized equally, and which differently.
    pub(crate) fn shapes(&self, backend: &str, equal: Shapes, differs: Shapes) {
        let unproven = Shapes::ALL.without(equal | differs);
        for (state, shapes) in STATES.into_iter().zip([equal, differs, unproven]) {
            let labels = StateLabels { backend: backend.to_owned(), state };
            self.shapes.get_or_create(&labels).set(i64::from(shapes.count()));
        }
    }

    /// Removes the gauges of a departed backend; its counters remain.
    pub(super) fn forget(&self, backend: &str) {
        for state in STATES {
            self.shapes.remove(&StateLabels { backend: backend.to_owned(), state });
        }
    }
}
