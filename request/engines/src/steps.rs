//! A worker's counts of its steps: their time, and the work in them.

use crate::metrics::Sample;

/// The page with these counters alone: one with those of all layers is long.
pub const PATH: &str = "/metrics?name[]=semmoe_steps_total&name[]=semmoe_step_seconds_total&name[]=semmoe_tokens_total\
    &name[]=semmoe_remote_tokens_total";

/// Counters at one moment, or the difference of two. The ranks of a unit run the same steps, so steps and their time
/// are rank 0's; tokens are those of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCounts {
    /// Steps.
    pub steps: f64,
    /// Their time.
    pub seconds: f64,
    /// Prompt tokens computed.
    pub prefill_tokens: f64,
    /// Tokens that were generated before.
    pub decode_tokens: f64,
    /// Tokens, each by the share of its activations that went to other ranks.
    pub remote_tokens: f64,
}

impl StepCounts {
    /// `None` of an older worker, which has not all of them. Values are as they stand there, numbers or not.
    pub fn parse(page: &str) -> Option<Self> {
        let mut counts = Self::default();
        // Counters without a sample yet have their line of help.
        if !page.contains("semmoe_remote_tokens_total") {
            return None;
        }
        for sample in page.lines().filter_map(Sample::parse) {
            let first = sample.label("rank") == Some("0");
            match (sample.name, sample.label("phase")) {
                ("semmoe_steps_total", _) if first => counts.steps += sample.value,
                ("semmoe_step_seconds_total", _) if first => counts.seconds += sample.value,
                ("semmoe_tokens_total", Some("prefill")) => counts.prefill_tokens += sample.value,
                ("semmoe_tokens_total", Some("decode")) => counts.decode_tokens += sample.value,
                ("semmoe_remote_tokens_total", _) => counts.remote_tokens += sample.value,
                _ => {}
            }
        }
        Some(counts)
    }

    /// The difference to `before`; negative where the counters went back.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            steps: self.steps - before.steps,
            seconds: self.seconds - before.seconds,
            prefill_tokens: self.prefill_tokens - before.prefill_tokens,
            decode_tokens: self.decode_tokens - before.decode_tokens,
            remote_tokens: self.remote_tokens - before.remote_tokens,
        }
    }

    /// The kinds of work: steps, prompt tokens, decoded tokens, remote tokens.
    pub fn work(&self) -> [f64; 4] {
        [self.steps, self.prefill_tokens, self.decode_tokens, self.remote_tokens]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_of_rank_0_and_tokens_of_all() {
        let page = "# HELP semmoe_steps_total Steps.\nsemmoe_steps_total{rank=\"0\"} 4\nsemmoe_steps_total{rank=\"1\"} 9\n\
                    semmoe_step_seconds_total{rank=\"0\"} 0.5\nsemmoe_tokens_total{rank=\"0\",phase=\"prefill\"} 30\n\
                    semmoe_tokens_total{rank=\"1\",phase=\"prefill\"} 20\nsemmoe_tokens_total{rank=\"1\",phase=\"decode\"} 7\n\
                    semmoe_remote_tokens_total{rank=\"0\",phase=\"prefill\"} 12.5\nsemmoe_remote_tokens_total{rank=\"1\",phase=\"decode\"} 2\n";
        let counts = StepCounts::parse(page).unwrap();
        let expected =
            StepCounts { steps: 4.0, seconds: 0.5, prefill_tokens: 50.0, decode_tokens: 7.0, remote_tokens: 14.5 };
        assert_eq!(counts, expected);
        assert_eq!(
            (counts.since(&StepCounts::default()).work(), counts.work()),
            (expected.work(), [4.0, 50.0, 7.0, 14.5])
        );
        assert_eq!(StepCounts::default().since(&counts).steps, -4.0);
        assert_eq!(StepCounts::parse("semmoe_steps_total{rank=\"0\"} 4\n"), None, "an older worker");
    }
}
