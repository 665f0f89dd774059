//! The settings that control policies and accounts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accounts::MAX_WINDOW;

/// Settings of the policies and of [`Accounts`](crate::Accounts). The defaults were tuned on recorded routing of the
/// bundled model, using only the profiling half of the data (solver/README.md has the results and the command).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// gamma: extra cost of a token whose activations are all remote, relative to the work of computing it. It equals
    /// the fraction of a prefill step spent on communication divided by the fraction of remote activations in that
    /// step.
    pub communication: f64,
    /// Cost that each in-flight token of a prompt or an output adds for a new request, relative to the work of
    /// computing the token: every step reads its keys and values.
    pub in_flight_weight: f64,
    /// Number of pending prompt tokens on a rank at which the backlog costs a new request half the work of computing
    /// it. A shorter backlog costs less per token, since it is computed in the same step as the request. Half of the
    /// usual `chunked_prefill_size` of 8,192 by default.
    pub backlog_tokens: u32,
    /// Price of a sequence on a rank with one more in flight than the mean, in units of share of a mean-sized request:
    /// in every step, attention waits for the fullest rank.
    pub sequence_weight: f64,
    /// Hard cap: excludes a rank whose recent tokens exceed the mean over the available ranks by more than this
    /// fraction plus the slack below, unless it has more of the prompt cached than another rank.
    pub load_margin: f64,
    /// Slack for random variation in the cap on recent tokens, in mean-sized requests times the square root of the
    /// number of recent requests per rank (the standard deviation of an even but random split).
    pub load_slack: f64,
    /// Number of requests per rank that count as recent.
    pub memory: u32,
    /// Change of the token price, in units of share, per mean-sized request above or below an even split.
    pub price_step: f64,
    /// Change of the sequence price, in units of share of a mean-sized request, per sequence above or below an even
    /// split.
    pub sequence_price_step: f64,
    /// Name of the policy that `shadow` routes by.
    pub baseline: String,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            communication: 0.5,
            in_flight_weight: 0.0001,
            backlog_tokens: 4096,
            sequence_weight: 0.02,
            load_margin: 0.05,
            load_slack: 1.2,
            memory: 128,
            price_step: 0.002,
            sequence_price_step: 0.004,
            baseline: "least_load".to_owned(),
        }
    }
}

/// A setting is out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("routing setting `{name}` is {value}, expected a number from {least} to {most}")]
pub struct SettingsError {
    /// Field of [`Settings`].
    pub name: &'static str,
    /// Value found.
    pub value: f64,
    /// Minimum allowed.
    pub least: f64,
    /// Maximum allowed.
    pub most: f64,
}

/// Checks `(name, value, least, most)` of every setting.
pub(crate) fn check_ranges<const N: usize>(fields: [(&'static str, f64, f64, f64); N]) -> Result<(), SettingsError> {
    match fields.into_iter().find(|(_, value, least, most)| !(least..=most).contains(&value)) {
        None => Ok(()),
        Some((name, value, least, most)) => Err(SettingsError { name, value, least, most }),
    }
}

impl Settings {
    /// Checks every number against its range; names are checked when the policies are built.
    ///
    /// # Errors
    /// [`SettingsError`], naming the first setting out of range.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let fields = [
            ("communication", self.communication, 0.0, 1e3),
            ("in_flight_weight", self.in_flight_weight, 0.0, 1e3),
            ("backlog_tokens", f64::from(self.backlog_tokens), 0.0, f64::from(u32::MAX)),
            ("sequence_weight", self.sequence_weight, 0.0, 1e3),
            ("load_margin", self.load_margin, 0.0, 10.0),
            ("load_slack", self.load_slack, 0.0, 1e3),
            ("memory", f64::from(self.memory), 1.0, f64::from(MAX_WINDOW)),
            ("price_step", self.price_step, 0.0, 1.0),
            ("sequence_price_step", self.sequence_price_step, 0.0, 1.0),
        ];
        check_ranges(fields)
    }

    /// Returns the number of requests that count as recent with this many ranks, at most 65,535.
    pub fn memory_of(&self, ranks: u16) -> u32 {
        self.memory.saturating_mul(u32::from(ranks)).min(MAX_WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_others_are_named() {
        Settings::default().validate().unwrap();
        let wrong = Settings { price_step: f64::NAN, ..Settings::default() };
        assert_eq!(wrong.validate().unwrap_err().name, "price_step");
        let wrong = Settings { memory: 0, ..Settings::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("`memory` is 0"));
    }
}
