//! Interprets a study's figures.

use super::Study;
use crate::verdict::{Grade, Verdict};

/// Affinity works well once a token predicts this fraction of its experts.
const GOOD_PREDICTION: f64 = 0.5;
/// A solve is worthwhile if the prediction is at least this multiple of chance.
const FAIR_OVER_CHANCE: f64 = 2.0;
/// More prompts are recommended if less than this fraction of the traffic consists of known tokens.
const ENOUGH_EVIDENCE: f64 = 0.9;

impl Study {
    /// Fraction of a token's experts that its hottest top-k predict, averaged over occurrences and over the layers with
    /// a result; `None` without any.
    pub fn prediction(&self) -> Option<f64> {
        let judged: Vec<f64> = self.layers.iter().filter_map(|layer| layer.f1_mean).collect();
        (!judged.is_empty()).then(|| judged.iter().sum::<f64>() / judged.len() as f64)
    }

    /// The fraction that chance predicts: k / N.
    pub fn by_chance(&self) -> f64 {
        self.rows.top_k as f64 / self.rows.experts as f64
    }

    /// Judges whether a solve is worthwhile; `file` is the path as the user wrote it.
    pub fn verdict(&self, file: &str) -> Verdict {
        let Some(prediction) = self.prediction() else { return self.nothing_judged() };
        let (chance, evidence) = (self.by_chance(), self.coverage_of_traffic);
        let grade = match prediction {
            _ if prediction < FAIR_OVER_CHANCE * chance => Grade::Poor,
            _ if prediction < GOOD_PREDICTION || evidence < ENOUGH_EVIDENCE => Grade::Fair,
            _ => Grade::Good,
        };
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let mut text = format!(
            "A token by itself predicts {} of the experts that it activates ({} by chance), and {} of the traffic consists of known tokens.",
            percent(prediction),
            percent(chance),
            percent(evidence)
        );
        text.push_str(match grade {
            Grade::Poor => " Token-based routing has little to work with.",
            _ if evidence < ENOUGH_EVIDENCE => " More prompts would help: unseen tokens are routed by load.",
            _ => "",
        });
        let next = if self.summary.kind == "profile" {
            let divides = |groups: &u16| self.summary.model.num_experts.is_multiple_of(*groups);
            let groups = (2..=8).rev().find(divides).map_or("8 --pad".to_owned(), |groups| groups.to_string());
            format!("semmoe solve --profile {file} --groups {groups} --out m.tables.safetensors")
        } else {
            let stem = file.strip_suffix(".trace.safetensors").unwrap_or(file);
            format!("semmoe profile build {file} --out {stem}.profile.safetensors")
        };
        Verdict { grade, text, next }
    }

    /// Returns the verdict if there is too little data for any figure.
    fn nothing_judged(&self) -> Verdict {
        let text = format!(
            "There is too little data to judge this model: of {} tokens, none occurs both in the counted part and often enough in the held-out part. \
             Record more prompts.",
            self.summary.tokens
        );
        let next = "semmoe profile record --engine sglang --url http://127.0.0.1:30000 --model-config DIR --prompts MORE.jsonl --out \
                    more.trace.safetensors";
        Verdict { grade: Grade::Poor, text, next: next.to_owned() }
    }
}
