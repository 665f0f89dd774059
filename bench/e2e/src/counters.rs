//! A unit's counters from its `/metrics`, summed over ranks and phases, as differences between two readings.

use std::collections::BTreeMap;

use semmoe_engines::metrics::{Growth, NoSample, max_over_mean};
use serde::Serialize;

/// Differences between two readings, summed over ranks and phases. Times are rank-seconds: R ranks that wait a second
/// count R seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counters {
    /// By layer number.
    pub layers: BTreeMap<u16, LayerCounters>,
    /// Tokens that ranks ran through the model.
    pub tokens: f64,
    /// Tokens that each rank ran through the model; with attention tp rank 0 counts all of them.
    pub tokens_by_rank: BTreeMap<u16, f64>,
    /// With attention tp: rows (a token in a layer) of all ranks.
    pub rows: f64,
    /// Rows on the fullest rank, summed over layers and steps and counted by every rank.
    pub fullest_rows: f64,
    /// Rows on the fullest rank if every row were where the tables want it.
    pub fullest_rows_wanted: f64,
    /// Bytes between ranks caused by attention (attention tp).
    pub attention_bytes: f64,
    /// Bytes of dispatch and combine between ranks of a node.
    pub node_bytes: f64,
    /// Bytes of dispatch and combine between nodes.
    pub other_bytes: f64,
    /// Steps of each rank, added up.
    pub steps: f64,
    /// Time in steps.
    pub step_seconds: f64,
    /// CPU time of the rank processes, which `/metrics` does not report.
    pub cpu_seconds: f64,
}

/// One MoE layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerCounters {
    /// Token-expert pairs on the token's own rank.
    pub local: f64,
    /// Token-expert pairs on other ranks.
    pub remote: f64,
    /// Bytes of dispatch and combine between ranks.
    pub bytes: f64,
    /// Time from routing to the combined outputs.
    pub moe_seconds: f64,
    /// Dispatch and combine.
    pub all_to_all_seconds: f64,
    /// All collectives, attention's included.
    pub collective_seconds: f64,
}

/// A unit's counters at one moment.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// `/metrics`.
    pub page: String,
    /// CPU time of the rank processes.
    pub cpu_seconds: f64,
}

impl Reading {
    /// The counts since `before`. Skips unknown metric families.
    ///
    /// # Errors
    /// The first line that is not a sample.
    pub fn since(&self, before: &Self) -> Result<Counters, NoSample> {
        let growth = Growth::between(before.page.clone(), self.page.clone())?;
        Ok(Counters { cpu_seconds: self.cpu_seconds - before.cpu_seconds, ..Counters::of(&growth)? })
    }
}

impl Counters {
    fn of(growth: &Growth) -> Result<Self, NoSample> {
        let mut layers = BTreeMap::<u16, LayerCounters>::new();
        let mut fill = |name, labels: &[_], field: fn(&mut LayerCounters) -> &mut f64| {
            let values = growth.by("layer", name, labels)?;
            values.into_iter().for_each(|(layer, value)| *field(layers.entry(layer).or_default()) += value);
            Ok::<_, NoSample>(())
        };
        fill("semmoe_activations_total", &[("where", "local")], |layer| &mut layer.local)?;
        fill("semmoe_activations_total", &[("where", "remote")], |layer| &mut layer.remote)?;
        fill("semmoe_dispatch_bytes_total", &[("where", "remote")], |layer| &mut layer.bytes)?;
        fill("semmoe_moe_seconds_total", &[], |layer| &mut layer.moe_seconds)?;
        fill("semmoe_collective_seconds_total", &[], |layer| &mut layer.collective_seconds)?;
        for kind in ["dispatch", "combine"] {
            fill("semmoe_collective_seconds_total", &[("kind", kind)], |layer| &mut layer.all_to_all_seconds)?;
        }
        let tokens_by_rank = growth.by("rank", "semmoe_tokens_total", &[])?;
        let fullest_rows = |split| growth.sum("semmoe_attention_fullest_rows_total", &[("split", split)]);
        Ok(Self {
            layers,
            tokens: tokens_by_rank.values().sum(),
            tokens_by_rank,
            rows: growth.sum("semmoe_attention_rows_total", &[])?,
            fullest_rows: fullest_rows("taken")?,
            fullest_rows_wanted: fullest_rows("wanted")?,
            attention_bytes: growth.sum("semmoe_attention_bytes_total", &[])?,
            node_bytes: growth.sum("semmoe_level_bytes_total", &[("level", "node")])?,
            other_bytes: growth.sum("semmoe_level_bytes_total", &[("level", "other")])?,
            steps: growth.sum("semmoe_steps_total", &[])?,
            step_seconds: growth.sum("semmoe_step_seconds_total", &[])?,
            cpu_seconds: 0.0,
        })
    }

    fn sum(&self, of: impl Fn(&LayerCounters) -> f64) -> f64 {
        self.layers.values().map(of).sum()
    }

    /// Local activation rate.
    #[must_use]
    pub fn lar(&self) -> f64 {
        ratio(self.sum(|layer| layer.local), self.sum(|layer| layer.local + layer.remote))
    }

    /// Load of the fullest rank, which collectives wait for, over the mean. With attention tp rows, layer by layer and
    /// step by step; otherwise tokens over the whole period.
    #[must_use]
    pub fn fullest(&self) -> f64 {
        if self.rows > 0.0 {
            return ratio(self.fullest_rows, self.rows);
        }
        max_over_mean(&self.tokens_by_rank).unwrap_or(0.0)
    }

    /// Load of the fullest rank over the mean with attention tp if every row were where the tables want it.
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

/// 0 / 0 is 0.
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

    fn parsed(page: &str) -> Result<Counters, NoSample> {
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
        // The fullest of two ranks has 6 of 10 rows; without moves it would have 7.
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
            assert_eq!(parsed(&format!("semmoe_unit_up 1\n{line}\n")), Err(NoSample(line.to_owned())));
        }
    }

    proptest! {
        #[test]
        fn no_page_panics(page in "(semmoe_[a-z_]{1,12}|semmoe_activations_total|[{}=\",. 0-9a-z\n]){0,40}") {
            let _ = parsed(&page);
        }
    }
}
