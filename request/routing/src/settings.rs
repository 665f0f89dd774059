//! The numbers that steer policies and accounts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accounts::MAX_WINDOW;

/// Settings of the policies and of [`Accounts`](crate::Accounts). The defaults were chosen on recorded routing of the
/// bundled model, on the profiling half only (solver/README.md has the table and its command).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// gamma: what a token costs more if all of its activations are remote, over the work of computing it. That is the
    /// share of communication in the time of a prefill step, over the share of remote activations in that step.
    pub communication: f64,
    /// Cost to a new request of a prompt token in flight that is computed, or not known to be pending, over the
    /// work of computing it: it decodes, and so makes every step longer.
    pub in_flight_weight: f64,
    /// Hard cap: a rank whose recent or latest tokens exceed the mean of the available ranks by more than this fraction
    /// of it and the slack below is not taken, unless every rank is over it.
    pub load_margin: f64,
    /// Room above the cap on recent tokens for chance, in mean-sized requests times the square root of the recent
    /// requests per rank (what an even but random split would miss by).
    pub load_slack: f64,
    /// The same for the latest tokens.
    pub burst_slack: f64,
    /// Requests per rank that count as recent.
    pub memory: u32,
    /// Requests of all ranks together that count as latest, or 8 for each rank where that is more.
    pub window: u32,
    /// How far a price moves, in units of share, for one mean-sized request above or below the even split.
    pub price_step: f64,
    /// How much higher a price is, in units of share, on a rank with twice the mean of the latest tokens.
    pub price_pull: f64,
    /// Name of the policy that `shadow` routes by.
    pub baseline: String,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            communication: 0.5,
            in_flight_weight: 0.0001,
            load_margin: 0.05,
            load_slack: 0.8,
            burst_slack: 3.0,
            memory: 128,
            window: 64,
            price_step: 0.002,
            price_pull: 0.03,
            baseline: "least_load".to_owned(),
        }
    }
}

/// Requests for each rank that a window has at least: with fewer, no split of whole requests is even.
const MIN_WINDOW_PER_RANK: u32 = 8;

/// A setting outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("routing setting `{name}` is {value}, expected a number from {least} to {most}")]
pub struct SettingsError {
    /// Field of [`Settings`].
    pub name: &'static str,
    /// Value found.
    pub value: f64,
    /// Least value allowed.
    pub least: f64,
    /// Greatest value allowed.
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
    /// Checks every number against its range; names are checked where the policies are made.
    ///
    /// # Errors
    /// `SettingsError` names the first setting outside its range.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let fields = [
            ("communication", self.communication, 0.0, 1e3),
            ("in_flight_weight", self.in_flight_weight, 0.0, 1e3),
            ("load_margin", self.load_margin, 0.0, 10.0),
            ("load_slack", self.load_slack, 0.0, 1e3),
            ("burst_slack", self.burst_slack, 0.0, 1e3),
            ("memory", f64::from(self.memory), 1.0, f64::from(MAX_WINDOW)),
            ("window", f64::from(self.window), 1.0, f64::from(MAX_WINDOW)),
            ("price_step", self.price_step, 0.0, 1.0),
            ("price_pull", self.price_pull, 0.0, 1.0),
        ];
        check_ranges(fields)
    }

    /// Requests that count as recent with this many ranks; 65,535 at most.
    pub fn memory_of(&self, ranks: u16) -> u32 {
        self.memory.saturating_mul(u32::from(ranks)).min(MAX_WINDOW)
    }

    /// Requests that count as latest with this many ranks; 65,535 at most.
    pub fn window_of(&self, ranks: u16) -> u32 {
        self.window.max(MIN_WINDOW_PER_RANK * u32::from(ranks)).min(MAX_WINDOW)
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
        let wrong = Settings { window: 0, ..Settings::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("`window` is 0"));
    }
}
