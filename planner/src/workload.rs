//! The workload: request rate, lengths, latency limits, priority classes.

use serde::Serialize;
use serde_json::Value;

use crate::PlanError;
use crate::fields::{Fields, MAX_DIMENSION, toml};
use crate::step::Load;

/// The requests that a deployment receives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Workload {
    /// Requests per second for the whole cluster.
    pub requests_per_second: f64,
    /// Prompt lengths in tokens.
    pub input: Lengths,
    /// Response lengths in tokens.
    pub output: Lengths,
    /// Latency limits for the mean request.
    pub objective: Objective,
    /// Request classes, highest priority first; empty means a single class.
    pub classes: Vec<Class>,
}

/// Latency limits; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Objective {
    /// Seconds to the first token.
    pub ttft: Option<f64>,
    /// Seconds between tokens.
    pub itl: Option<f64>,
}

/// Requests with the same priority.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Class {
    /// The class's name.
    pub name: String,
    /// Fraction of all requests.
    pub share: f64,
    /// The class's latency limits.
    pub objective: Objective,
}

/// A length distribution: ascending values and their fractions, which add up to 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lengths(Vec<(f64, f64)>);

const KEYS: &[&str] = &["requests_per_second", "input_tokens", "output_tokens", "ttft_ms", "itl_ms", "classes"];
const CLASS_KEYS: &[&str] = &["name", "share", "ttft_ms", "itl_ms"];
const LENGTH_KEYS: &[&str] = &["tokens", "share"];

impl Workload {
    /// Reads a workload file; `file` names it in errors.
    ///
    /// ```toml
    /// requests_per_second = 8
    /// input_tokens = 1024                                                   # or a list, as below
    /// output_tokens = [{ tokens = 128, share = 0.7 }, { tokens = 1024, share = 0.3 }]
    /// ttft_ms = 1000                                                        # optional
    /// itl_ms = 50                                                           # optional
    /// [[classes]]                                                           # optional, highest priority first
    /// name = "interactive"
    /// share = 0.3
    /// ttft_ms = 500
    /// ```
    ///
    /// # Errors
    /// [`PlanError::Syntax`] if the text is not TOML, [`PlanError::Key`] if a key is unknown or missing, or a value is
    /// impossible.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, PlanError> {
        toml(file, text, KEYS, Self::read)
    }

    fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        let classes = fields.list("classes", CLASS_KEYS, Class::read)?;
        if !classes.is_empty() && !is_one(classes.iter().map(|class| class.share).sum()) {
            return Err(fields.unexpected("classes", "shares that add up to 1"));
        }
        Ok(Self {
            requests_per_second: fields.positive("requests_per_second")?,
            input: Lengths::read(fields, "input_tokens")?,
            output: Lengths::read(fields, "output_tokens")?,
            objective: Objective::read(fields)?,
            classes,
        })
    }

    /// Returns the load of mean requests with `concurrency` requests in flight.
    pub fn load(&self, concurrency: f64) -> Load {
        Load { concurrency, input_tokens: self.input.mean(), output_tokens: self.output.mean() }
    }
}

impl Objective {
    fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        let seconds = |key: &str| Ok::<_, PlanError>(fields.positive_if(key)?.map(|milliseconds| milliseconds / 1e3));
        Ok(Self { ttft: seconds("ttft_ms")?, itl: seconds("itl_ms")? })
    }

    /// Whether these latencies, in seconds, meet the limits.
    pub fn met(&self, ttft: f64, itl: f64) -> bool {
        self.ttft.is_none_or(|limit| ttft <= limit) && self.itl.is_none_or(|limit| itl <= limit)
    }
}

impl Class {
    fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        let (name, share) = (fields.name("name")?, fields.positive("share")?);
        Ok(Self { name, share, objective: Objective::read(fields)? })
    }
}

impl Lengths {
    fn read(fields: &Fields<'_>, key: &str) -> Result<Self, PlanError> {
        if !matches!(fields.get(key), Some(Value::Array(_))) {
            let tokens = fields.positive(key)?;
            let one = (1.0..=MAX_DIMENSION as f64).contains(&tokens).then(|| Self(vec![(tokens, 1.0)]));
            return one.ok_or_else(|| fields.unexpected(key, format!("1 to {MAX_DIMENSION} tokens")));
        }
        let row = |row: &Fields<'_>| Ok((row.dimension("tokens")? as f64, row.positive("share")?));
        let mut rows = fields.list(key, LENGTH_KEYS, row)?;
        if !is_one(rows.iter().map(|(_, share)| share).sum()) {
            return Err(fields.unexpected(key, "shares that add up to 1"));
        }
        rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(Self(rows))
    }

    /// Returns the distribution of measured lengths; `None` if there are none.
    pub fn of_trace(lengths: &[u64]) -> Option<Self> {
        let mut counts = std::collections::BTreeMap::<u64, u64>::new();
        lengths.iter().for_each(|length| *counts.entry((*length).max(1)).or_default() += 1);
        let share = |count: u64| count as f64 / lengths.len() as f64;
        let rows: Vec<(f64, f64)> = counts.into_iter().map(|(length, count)| (length as f64, share(count))).collect();
        (!rows.is_empty()).then_some(Self(rows))
    }

    /// Mean length in tokens.
    pub fn mean(&self) -> f64 {
        self.0.iter().map(|(tokens, share)| tokens * share).sum()
    }

    /// Returns the length that this fraction of requests does not exceed.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut below = 0.0;
        let found = self.0.iter().find(|(_, part)| {
            below += part;
            below >= share - 1e-9
        });
        found.or(self.0.last()).map_or(0.0, |(tokens, _)| *tokens)
    }
}

fn is_one(sum: f64) -> bool {
    (sum - 1.0).abs() < 1e-6
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "requests_per_second = 8\ninput_tokens = 512\n\
        output_tokens = [{ tokens = 1000, share = 0.25 }, { tokens = 200, share = 0.75 }]\nttft_ms = 500\n\
        [[classes]]\nname = \"chat\"\nshare = 1\nitl_ms = 40\n";

    #[test]
    fn lengths_have_means_and_quantiles() {
        let workload = Workload::from_toml("w", GOOD).unwrap();
        assert_eq!((workload.output.mean(), workload.input.mean()), (400.0, 512.0));
        assert_eq!((workload.output.quantile(0.75), workload.output.quantile(0.76)), (200.0, 1000.0));
        assert_eq!(workload.input, Lengths(vec![(512.0, 1.0)]));
        assert_eq!(workload.output, Lengths(vec![(200.0, 0.75), (1000.0, 0.25)]));
        assert!(workload.objective.met(0.5, 9.0) && !workload.objective.met(0.51, 0.0));
        let trace = Lengths::of_trace(&[200, 1000, 200, 200]).unwrap();
        assert_eq!(trace, workload.output);
        assert_eq!(Lengths::of_trace(&[]), None);
    }

    #[test]
    fn what_is_wrong_is_named_by_its_key() {
        let cases = [
            ("= 8", "= nan", "`requests_per_second` is null, NaN or infinite"),
            ("= 8", "= -8", "`requests_per_second` is -8"),
            ("0.25", "0.5", "`output_tokens` is ["),
            ("tokens = 200", "tokens = 0", "`output_tokens[1].tokens` is 0"),
            ("= 512", "= 1e12", "`input_tokens` is 1000000000000.0"),
            ("share = 1\n", "share = 0.5\n", "shares that add up to 1"),
            ("ttft_ms", "ttft_s", "`ttft_s` is an unknown key"),
        ];
        for (from, to, message) in cases {
            let error = Workload::from_toml("w", &GOOD.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
    }
}
