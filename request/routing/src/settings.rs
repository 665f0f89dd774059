//! The numbers that control policies and accounts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accounts::MAX_WINDOW;

/// Settings of the policies and of [`Accounts`](crate::Accounts). The defaults were chosen on recorded routing of the
/// bundled model, using only the profiling half (solver/README.md has the table and its command).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// gamma: extra cost of a token whose activations are all remote, relative to the work of computing it. It equals
    /// the fraction of a prefill step spent on communication, over the fraction of remote activations in that step.
    pub communication: f64,
    /// Cost to a new request of a token in flight, of a prompt or an answer, relative to the work of computing it:
    /// every step reads its keys and values.
    pub in_flight_weight: f64,
    /// Number of pending prompt tokens on a rank that cost a new request half of the work of computing them; fewer cost
    /// less, as they are computed in the same step as the request. Half of the usual `chunked_prefill_size` of 8,192.
    pub backlog_tokens: u32,
    /// Price of a sequence on a rank with one more in flight than the mean, in units of share of a mean-sized request:
    /// attention waits for the fullest rank in every step.
    pub sequence_weight: f64,
    /// Hard cap: excludes a rank whose recent tokens exceed the mean of the available ranks by more than this fraction
    /// plus the slack below, unless it holds more of the prompt than another rank.
    pub load_margin: f64,
    /// Allowance for chance above the cap on recent tokens, in mean-sized requests times the square root of the recent
    /// requests per rank (the deviation of an even but random split).
    pub load_slack: f64,
    /// Requests per rank that count as recent.
    pub memory: u32,
    /// How far the price of tokens moves, in units of share, per mean-sized request above or below the even split.
    pub price_step: f64,
    /// How far the price of sequences moves, in units of share of a mean-sized request, per sequence above or below the
    /// even split.
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

/// A setting out of range.
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
    /// `SettingsError` names the first setting out of range.
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

    /// Requests that count as recent with this many ranks; 65,535 at most.
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
