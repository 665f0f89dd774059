//! A unit's counters, read from its `/metrics` and summed over ranks and phases: what lies between two readings.

use std::collections::BTreeMap;

use semmoe_engines::metrics::Sample;
use serde::Serialize;

/// Sums over ranks and phases between two readings. Times are those of ranks: R ranks that wait a second wait R
/// seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counters {
    /// By layer number.
    pub layers: BTreeMap<u16, LayerCounters>,
    /// Tokens that went through the model on their rank.
    pub tokens: f64,
    /// The same by rank; with attention tp rank 0 counts them all.
    pub tokens_by_rank: BTreeMap<u16, f64>,
    /// With attention tp: rows (a token in a layer) of all ranks.
    pub rows: f64,
    /// Rows of the fullest rank of each layer and step, counted by every rank.
    pub fullest_rows: f64,
    /// As they would be if all rows were where tables want them.
    pub fullest_rows_wanted: f64,
    /// Bytes between ranks that attention causes (attention tp).
    pub attention_bytes: f64,
    /// Bytes of dispatch and combine between ranks of a node.
    pub node_bytes: f64,
    /// Bytes of dispatch and combine between nodes.
    pub other_bytes: f64,
    /// Steps of each rank, added up.
    pub steps: f64,
    /// Time of the steps.
    pub step_seconds: f64,
    /// Of the rank processes; not from `/metrics`.
    pub cpu_seconds: f64,
}

/// One MoE layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerCounters {
    /// Pairs of token and expert on the token's rank.
    pub local: f64,
    /// Pairs elsewhere.
    pub remote: f64,
    /// Bytes of dispatch and combine between ranks.
    pub bytes: f64,
    /// From the chosen experts to their sums.
    pub moe_seconds: f64,
    /// Dispatch and combine.
    pub all_to_all_seconds: f64,
    /// All collectives, attention's included.
    pub collective_seconds: f64,
}

/// A unit's page at one time.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// `/metrics`.
    pub page: String,
    /// Of the rank processes.
    pub cpu_seconds: f64,
}

impl Reading {
    /// The counts since `before`; the first line that is no sample is the error. Families that are not known are
    /// passed over.
    ///
    /// # Errors
    /// That line.
    pub fn since(&self, before: &Self) -> Result<Counters, String> {
        let mut counters = Counters { cpu_seconds: self.cpu_seconds - before.cpu_seconds, ..Counters::default() };
        for (page, sign) in [(&self.page, 1.0), (&before.page, -1.0)] {
            for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
                let sample = Sample::parse(line).filter(|sample| sample.value.is_finite());
                sample.and_then(|sample| counters.add(&sample, sign)).ok_or_else(|| line.to_owned())?;
            }
        }
        Ok(counters)
    }
}

impl Counters {
    /// `None`: a label is missing or is no number.
    fn add(&mut self, sample: &Sample<'_>, sign: f64) -> Option<()> {
        let value = sign * sample.value;
        match sample.name {
            "semmoe_activations_total" if sample.label("where")? == "local" => self.layer(sample)?.local += value,
            "semmoe_activations_total" => self.layer(sample)?.remote += value,
            "semmoe_dispatch_bytes_total" if sample.label("where")? == "remote" => self.layer(sample)?.bytes += value,
            "semmoe_level_bytes_total" => match sample.label("level")? {
                "node" => self.node_bytes += value,
                "other" => self.other_bytes += value,
                _ => {}
            },
            "semmoe_attention_bytes_total" => self.attention_bytes += value,
            "semmoe_moe_seconds_total" => self.layer(sample)?.moe_seconds += value,
            "semmoe_collective_seconds_total" => {
                let layer = self.layer(sample)?;
                layer.collective_seconds += value;
                if matches!(sample.label("kind")?, "dispatch" | "combine") {
                    layer.all_to_all_seconds += value;
                }
            }
            "semmoe_attention_rows_total" => self.rows += value,
            "semmoe_attention_fullest_rows_total" if sample.label("split")? == "taken" => self.fullest_rows += value,
            "semmoe_attention_fullest_rows_total" => self.fullest_rows_wanted += value,
            "semmoe_tokens_total" => {
                self.tokens += value;
                *self.tokens_by_rank.entry(sample.label("rank")?.parse().ok()?).or_default() += value;
            }
            "semmoe_steps_total" => self.steps += value,
            "semmoe_step_seconds_total" => self.step_seconds += value,
            _ => {}
        }
        Some(())
    }

    /// The layer that a sample is of.
    fn layer(&mut self, sample: &Sample<'_>) -> Option<&mut LayerCounters> {
        Some(self.layers.entry(sample.label("layer")?.parse().ok()?).or_default())
    }

    fn sum(&self, of: impl Fn(&LayerCounters) -> f64) -> f64 {
        self.layers.values().map(of).sum()
    }

    /// Local activation rate.
    #[must_use]
    pub fn lar(&self) -> f64 {
        ratio(self.sum(|layer| layer.local), self.sum(|layer| layer.local + layer.remote))
    }

    /// The fullest rank, for which collectives wait, over the mean. With attention tp its rows, of each layer and step
    /// by itself; else its tokens in the whole time.
    #[must_use]
    pub fn fullest(&self) -> f64 {
        if self.rows > 0.0 {
            return ratio(self.fullest_rows, self.rows);
        }
        let work = &self.tokens_by_rank;
        let sum: f64 = work.values().sum();
        ratio(work.values().copied().fold(0.0, f64::max) * work.len() as f64, sum)
    }

    /// The same with attention tp if all rows were where tables want them.
    #[must_use]
    pub fn fullest_wanted(&self) -> Option<f64> {
        (self.rows > 0.0).then(|| ratio(self.fullest_rows_wanted, self.rows))
    }

    /// Dispatch and combine between ranks, bytes per token.
    #[must_use]
    pub fn dispatch_bytes(&self) -> f64 {
        ratio(self.sum(|layer| layer.bytes), self.tokens)
    }

    /// Everything between ranks, bytes per token.
    #[must_use]
    pub fn all_bytes(&self) -> f64 {
        self.dispatch_bytes() + ratio(self.attention_bytes, self.tokens)
    }

    /// Seconds of a rank in collectives, per token.
    #[must_use]
    pub fn collective_time(&self) -> f64 {
        ratio(self.sum(|layer| layer.collective_seconds), self.tokens)
    }

    /// Seconds of a rank in steps, per token.
    #[must_use]
    pub fn step_time(&self) -> f64 {
        ratio(self.step_seconds, self.tokens)
    }

    /// Seconds of a rank in MoE layers, per layer and step.
    #[must_use]
    pub fn moe_time(&self) -> f64 {
        ratio(self.sum(|layer| layer.moe_seconds), self.steps * self.layers.len() as f64)
    }

    /// Processor seconds per token.
    #[must_use]
    pub fn cpu_time(&self) -> f64 {
        ratio(self.cpu_seconds, self.tokens)
    }
}

impl LayerCounters {
    /// Local activation rate.
    #[must_use]
    pub fn lar(&self) -> f64 {
        ratio(self.local, self.local + self.remote)
    }
}

/// 0 of nothing is 0.
#[must_use]
pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: &str = "# HELP x y\n\
        semmoe_activations_total{rank=\"0\",layer=\"3\",phase=\"decode\",where=\"local\"} 3\n\
        semmoe_activations_total{rank=\"1\",layer=\"3\",phase=\"decode\",where=\"remote\"} 9\n\
        semmoe_activations_total{rank=\"1\",layer=\"4\",phase=\"decode\",where=\"local\"} 4\n\
        semmoe_dispatch_bytes_total{rank=\"0\",layer=\"3\",where=\"local\"} 7\n\
        semmoe_dispatch_bytes_total{rank=\"0\",layer=\"3\",where=\"remote\"} 80\n\
        semmoe_level_bytes_total{rank=\"0\",level=\"node\"} 30\n\
        semmoe_level_bytes_total{rank=\"0\",level=\"other\"} 50\n\
        semmoe_attention_bytes_total{rank=\"0\",collective=\"srs\"} 20\n\
        semmoe_tokens_total{rank=\"0\",phase=\"prefill\"} 3\n\
        semmoe_tokens_total{rank=\"1\",phase=\"decode\"} 1\n\
        semmoe_attention_rows_total{rank=\"0\",by=\"tables\"} 0\n\
        semmoe_steps_total{rank=\"0\"} 2\n\
        semmoe_step_seconds_total{rank=\"0\"} 8\n\
        semmoe_moe_seconds_total{rank=\"0\",layer=\"3\"} 4.5\n\
        semmoe_moe_seconds_total{rank=\"0\",layer=\"4\"} 1.5\n\
        semmoe_collective_seconds_total{rank=\"0\",layer=\"3\",kind=\"dispatch\"} 0.5\n\
        semmoe_collective_seconds_total{rank=\"0\",layer=\"3\",kind=\"combine\"} 0.25\n\
        semmoe_collective_seconds_total{rank=\"0\",layer=\"3\",kind=\"gather\"} 1.25\n\
        semmoe_unit_up 1\n";

    fn parsed(page: &str) -> Result<Counters, String> {
        Reading { page: page.to_owned(), cpu_seconds: 0.0 }.since(&Reading::default())
    }

    #[test]
    fn a_page_is_summed_as_its_figures_need_it() {
        let counters = parsed(PAGE).unwrap();
        assert_eq!((counters.tokens, counters.steps), (4.0, 2.0));
        assert_eq!(counters.lar(), 7.0 / 16.0);
        assert_eq!(counters.layers[&3].lar(), 0.25);
        assert_eq!((counters.node_bytes, counters.other_bytes), (30.0, 50.0));
        assert_eq!((counters.dispatch_bytes(), counters.all_bytes()), (20.0, 25.0));
        assert_eq!((counters.step_time(), counters.moe_time()), (2.0, 1.5));
        assert_eq!((counters.collective_time(), counters.layers[&3].all_to_all_seconds), (0.5, 0.75));
        assert_eq!(counters.fullest(), 1.5);
        assert_eq!(counters.fullest_wanted(), None);
        // Of 10 rows over two ranks the fullest has 6; without moves 7.
        let rows = "semmoe_attention_rows_total{rank=\"0\",by=\"even\"} 4\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"tables\"} 6\n\
            semmoe_attention_fullest_rows_total{rank=\"0\",split=\"taken\"} 6\n\
            semmoe_attention_fullest_rows_total{rank=\"1\",split=\"taken\"} 6\n\
            semmoe_attention_fullest_rows_total{rank=\"0\",split=\"wanted\"} 7\n\
            semmoe_attention_fullest_rows_total{rank=\"1\",split=\"wanted\"} 7\n";
        let rows = parsed(&format!("{PAGE}{rows}")).unwrap();
        assert_eq!((rows.fullest(), rows.fullest_wanted()), (1.2, Some(1.4)));
        let page = Reading { page: PAGE.to_owned(), cpu_seconds: 1.0 };
        let nothing = page.since(&page).unwrap();
        assert_eq!((nothing.tokens, nothing.lar(), nothing.dispatch_bytes(), nothing.moe_time()), (0.0, 0.0, 0.0, 0.0));
    }

    #[test]
    fn what_is_no_sample_is_named() {
        for line in [
            "semmoe_tokens_total",
            "semmoe_tokens_total x",
            "semmoe_tokens_total NaN",
            "semmoe_moe_seconds_total{rank=\"0\"} 1",
            "semmoe_moe_seconds_total{layer=\"x\"} 1",
            "semmoe_activations_total{layer=\"1\"} 1",
            "semmoe_activations_total{layer=\"1\" 1",
        ] {
            assert_eq!(parsed(&format!("semmoe_unit_up 1\n{line}\n")), Err(line.to_owned()));
        }
    }

    proptest! {
        #[test]
        fn no_page_panics(page in "(semmoe_[a-z_]{1,12}|semmoe_activations_total|[{}=\",. 0-9a-z\n]){0,40}") {
            let _ = parsed(&page);
        }
    }
}
