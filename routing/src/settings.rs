//! The numbers that steer policies and accounts.

use serde::{Deserialize, Serialize};

/// Settings of the policies and of [`Accounts`](crate::Accounts). The defaults were chosen on recorded routing of the
/// bundled model, on the profiling half only (solver/README.md has the table and its command).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Share that a rank loses in the comparison for each mean-sized request in flight on it.
    pub backlog_weight: f64,
    /// Hard cap: a rank whose recent tokens exceed the mean of the available ranks by more than this fraction of it and
    /// `load_slack` is not taken, unless every rank is over it.
    pub load_margin: f64,
    /// Room above the hard cap for chance, in mean-sized requests times the square root of the recent requests per rank
    /// (what an even but random split would miss by).
    pub load_slack: f64,
    /// Memory of "recent": tokens count half after this many mean-sized requests per available rank.
    pub half_life_requests: f64,
    /// How far a price moves, in units of share, for one mean-sized request above or below the even split.
    pub price_step: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            backlog_weight: 0.001,
            load_margin: 0.05,
            load_slack: 0.6,
            half_life_requests: 128.0,
            price_step: 0.003,
        }
    }
}

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

impl Settings {
    /// Checks every field against its range.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let fields = [
            ("backlog_weight", self.backlog_weight, 0.0, 1.0),
            ("load_margin", self.load_margin, 0.0, 10.0),
            ("load_slack", self.load_slack, 0.0, 1e3),
            ("half_life_requests", self.half_life_requests, 1.0, 1e9),
            ("price_step", self.price_step, 0.0, 1.0),
        ];
        for (name, value, least, most) in fields {
            if !(least..=most).contains(&value) {
                return Err(SettingsError { name, value, least, most });
            }
        }
        Ok(())
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
        let wrong = Settings { half_life_requests: 0.0, ..Settings::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("`half_life_requests` is 0"));
    }
}
