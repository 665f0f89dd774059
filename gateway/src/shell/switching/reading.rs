//! A worker's step counters and loads at one moment, and the work between two readings.
//!
//! Ranks run steps in lockstep, so rank 0's step count and step time are those of the unit, and a step's batch is the
//! sum over the ranks. Groups of ranks (`tp:NxP`) step independently: their steps are the average over the groups'
//! first ranks. Which ranks' batches coincided in a step is not recorded: all steps of an interval are assumed to be
//! alike.

use std::collections::BTreeMap;

use semmoe_engines::metrics::Sample;
use semmoe_engines::sglang::Loads;

/// One reading of the worker's counters.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Reading {
    /// The unit's steps, by layout name.
    steps: BTreeMap<String, Steps>,
    /// Number of tokens through the model, across all ranks.
    decode_tokens: f64,
    prefill_tokens: f64,
    pub(super) load: Load,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Steps {
    count: f64,
    seconds: f64,
}

/// The requests and tokens in a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) running: u32,
    pub(super) waiting: u32,
    /// Prompt tokens of waiting requests.
    pub(super) waiting_tokens: u64,
    pub(super) live_kv_tokens: u64,
    pub(super) promised_kv_tokens: u64,
}

/// The work done between two readings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Interval {
    /// Steps of one layout; `None` if no step ran, or if several layouts were active.
    pub(super) steps: Option<MeanStep>,
    /// Prompt tokens of arriving requests.
    pub(super) arrived_tokens: u64,
}

/// The steps of an interval, assumed to be alike.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MeanStep {
    /// The worker's name for the layout.
    pub(super) layout: String,
    pub(super) steps: u32,
    pub(super) sequences: u32,
    pub(super) prompt_tokens: u32,
    pub(super) seconds: f64,
}

/// The parts of a unit that step independently.
struct Groups {
    count: f64,
    /// Ranks per group; `None`: all ranks form one group.
    ranks: Option<u32>,
}

impl Groups {
    /// Returns the groups of the layout that the worker names `tp:NxP`; other layouts have one group.
    fn of(layout: &str) -> Self {
        let groups = layout.strip_prefix("tp:").and_then(|groups| groups.split_once('x'));
        match groups.map(|(count, ranks)| (count.parse::<u32>(), ranks.parse())) {
            Some((Ok(count @ 1..), Ok(ranks @ 1..))) => Self { count: count.into(), ranks: Some(ranks) },
            _ => Self { count: 1.0, ranks: None },
        }
    }

    /// Whether this is the first rank of a group.
    fn are_led_by(&self, rank: Option<&str>) -> bool {
        match self.ranks {
            None => rank == Some("0"),
            Some(ranks) => rank.and_then(|rank| rank.parse().ok()).is_some_and(|rank: u32| rank.is_multiple_of(ranks)),
        }
    }
}

/// A required value is missing from the worker's reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("/metrics lacks {name}: is the worker an older version?")]
pub(super) struct Missing {
    name: &'static str,
}

const STEPS: &str = "semmoe_layout_steps_total";
const SECONDS: &str = "semmoe_layout_step_seconds_total";
const TOKENS: &str = "semmoe_tokens_total";

impl Reading {
    /// Parses the worker's metrics and its loads.
    pub(super) fn parse(metrics: &str, loads: &Loads) -> Result<Self, Missing> {
        // Counters without a sample yet still have a help line.
        if let Some(name) = [STEPS, SECONDS, TOKENS].into_iter().find(|name| !metrics.contains(name)) {
            return Err(Missing { name });
        }
        let mut reading = Self { load: Load::of(loads), ..Self::default() };
        for sample in metrics.lines().filter_map(Sample::parse).filter(|sample| sample.value.is_finite()) {
            match (sample.name, sample.label("phase")) {
                (TOKENS, Some("decode")) => reading.decode_tokens += sample.value,
                (TOKENS, Some("prefill")) => reading.prefill_tokens += sample.value,
                (STEPS | SECONDS, _) => {
                    let layout = sample.label("layout").unwrap_or_default();
                    let groups = Groups::of(layout);
                    if groups.are_led_by(sample.label("rank")) {
                        let steps = reading.steps.entry(layout.to_owned()).or_default();
                        let value = sample.value / groups.count;
                        *(if sample.name == STEPS { &mut steps.count } else { &mut steps.seconds }) += value;
                    }
                }
                _ => {}
            }
        }
        Ok(reading)
    }

    /// Returns the work done since `before`; empty if counters decreased, because another process is answering.
    pub(super) fn since(&self, before: &Self) -> Interval {
        let nothing = Interval { steps: None, arrived_tokens: 0 };
        let (decode, prefill) =
            (self.decode_tokens - before.decode_tokens, self.prefill_tokens - before.prefill_tokens);
        if decode < 0.0 || prefill < 0.0 {
            return nothing;
        }
        let arrived = prefill + self.load.waiting_tokens as f64 - before.load.waiting_tokens as f64;
        let mut ran = self.steps.iter().filter_map(|(layout, now)| {
            let then = before.steps.get(layout).copied().unwrap_or_default();
            let steps = Steps { count: now.count - then.count, seconds: now.seconds - then.seconds };
            (steps.count > 0.0).then_some((layout, steps))
        });
        let steps = match (ran.next(), ran.next()) {
            (Some((layout, Steps { count, seconds })), None) => Some(MeanStep {
                layout: layout.clone(),
                steps: count as u32,
                sequences: (decode / count).round() as u32,
                prompt_tokens: (prefill / count).round() as u32,
                seconds: seconds / count,
            }),
            _ => None,
        };
        Interval { steps, arrived_tokens: arrived.max(0.0) as u64 }
    }
}

impl Load {
    fn of(loads: &Loads) -> Self {
        let sum = |of: fn(&semmoe_engines::sglang::RankLoads) -> Option<u64>| -> u64 {
            loads.loads.iter().filter_map(of).fold(0, u64::saturating_add)
        };
        let count = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let live_kv_tokens = sum(|load| load.num_used_tokens);
        Self {
            running: count(sum(|load| load.num_running_reqs)),
            waiting: count(sum(|load| load.num_waiting_reqs)),
            waiting_tokens: sum(|load| load.num_waiting_uncached_tokens),
            live_kv_tokens,
            promised_kv_tokens: live_kv_tokens.max(sum(|load| load.num_total_tokens)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn loads(running: u64, waiting_tokens: u64) -> Loads {
        let of = |rank: u32| {
            json!({"dp_rank": rank, "num_running_reqs": running, "num_waiting_reqs": 1, "num_used_tokens": 100,
                "num_waiting_uncached_tokens": waiting_tokens, "num_total_tokens": 150})
        };
        serde_json::from_value(json!({"loads": [of(0), of(1)]})).unwrap()
    }

    fn page(ep: [f64; 2], tp: [f64; 2], tokens: [f64; 2]) -> String {
        let ([ep_steps, ep_seconds], [tp_steps, tp_seconds], [decode, prefill]) = (ep, tp, tokens);
        format!(
            "# HELP semmoe_layout_steps_total x\n\
             semmoe_layout_steps_total{{rank=\"0\",layout=\"ep\",phase=\"decode\",batch=\"4\"}} {ep_steps}\n\
             semmoe_layout_steps_total{{rank=\"0\",layout=\"ep\",phase=\"prefill\",batch=\"4\"}} {ep_steps}\n\
             semmoe_layout_steps_total{{rank=\"1\",layout=\"ep\",phase=\"decode\",batch=\"4\"}} 999\n\
             semmoe_layout_steps_total{{rank=\"0\",layout=\"tp\",phase=\"decode\",batch=\"4\"}} {tp_steps}\n\
             semmoe_layout_step_seconds_total{{rank=\"0\",layout=\"ep\",phase=\"decode\",batch=\"4\"}} {ep_seconds}\n\
             semmoe_layout_step_seconds_total{{rank=\"0\",layout=\"tp\",phase=\"decode\",batch=\"4\"}} {tp_seconds}\n\
             semmoe_tokens_total{{rank=\"0\",phase=\"decode\"}} {decode}\n\
             semmoe_tokens_total{{rank=\"1\",phase=\"decode\"}} {decode}\n\
             semmoe_tokens_total{{rank=\"0\",phase=\"prefill\"}} {prefill}\n"
        )
    }

    #[test]
    fn the_steps_between_two_readings() {
        let read = |page: &str, waiting| Reading::parse(page, &loads(3, waiting)).unwrap();
        let first = read(&page([10.0, 1.0], [5.0, 1.0], [100.0, 1000.0]), 50);
        let second = read(&page([15.0, 1.5], [5.0, 1.0], [180.0, 1500.0]), 150);
        let steps = MeanStep { layout: "ep".to_owned(), steps: 10, sequences: 16, prompt_tokens: 50, seconds: 0.05 };
        assert_eq!(second.since(&first), Interval { steps: Some(steps), arrived_tokens: 700 });
        assert_eq!(second.load.running, 6);
        assert_eq!((second.load.live_kv_tokens, second.load.promised_kv_tokens), (200, 300));
        let both = read(&page([16.0, 1.6], [6.0, 1.1], [190.0, 1500.0]), 150);
        assert_eq!(both.since(&second).steps, None, "which tokens were whose is not known");
        let idle = Interval { steps: None, arrived_tokens: 0 };
        assert_eq!(first.since(&second), idle, "another process");
        assert_eq!(second.since(&second), idle);
    }

    /// Two groups of two: one made 8 steps of 10 ms, the other 4 of 40 ms.
    #[test]
    fn steps_of_groups_are_those_of_their_first_ranks() {
        let page = |ended: f64| {
            let mut page = format!("semmoe_tokens_total{{rank=\"0\",phase=\"decode\"}} {}\n", 36.0 * ended);
            for (rank, count, seconds) in [(0, 8.0, 0.08), (1, 8.0, 9.0), (2, 4.0, 0.16), (3, 4.0, 9.0)] {
                let labels = format!("{{rank=\"{rank}\",layout=\"tp:2x2\",phase=\"decode\",batch=\"4\"}}");
                page += &format!("semmoe_layout_steps_total{labels} {}\n", count * ended);
                page += &format!("semmoe_layout_step_seconds_total{labels} {}\n", seconds * ended);
            }
            Reading::parse(&page, &loads(3, 0)).unwrap()
        };
        let steps = page(1.0).since(&page(0.0)).steps.unwrap();
        assert_eq!((steps.layout.as_str(), steps.steps, steps.sequences), ("tp:2x2", 6, 6), "the whole unit's batch");
        assert!((steps.seconds - 0.02).abs() < 1e-9, "{steps:?}");
    }

    #[test]
    fn a_page_without_the_counters_is_named() {
        let error = Reading::parse("semmoe_tokens_total{} 1", &loads(0, 0)).unwrap_err();
        assert!(error.to_string().contains(STEPS), "{error}");
    }

    proptest! {
        /// No input panics, and a mean step consists of numbers.
        #[test]
        fn any_page_is_read(values in prop::collection::vec(any::<f64>(), 12)) {
            let three = |at: usize| [values[at], values[at + 1]];
            let read = |at| Reading::parse(&page(three(at), three(at + 2), three(at + 4)), &loads(u64::MAX, u64::MAX)).unwrap();
            if let Some(step) = read(6).since(&read(0)).steps {
                prop_assert!(!step.seconds.is_nan());
            }
        }
    }
}
