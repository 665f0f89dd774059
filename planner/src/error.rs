//! Errors about inputs and planning questions. Every message is a single sentence that names the key or the quantity.

use semmoe_tables::ConfigError;

/// The planner's error type.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An input that cannot be parsed.
    #[error("{file} is not valid {format}: {cause}")]
    Syntax {
        /// The caller's name for the input.
        file: String,
        /// JSON or TOML.
        format: &'static str,
        /// The parser's message.
        #[source]
        cause: SyntaxError,
    },
    /// A `config.json` that cannot be read.
    #[error(transparent)]
    Config(ConfigError),
    /// A key whose value is missing, of the wrong type or out of range, or an unknown key.
    #[error("{file}: `{key}` is {found}, expected {expected}")]
    Key {
        /// The caller's name for the input.
        file: String,
        /// The key with its path, such as `levels[1].bandwidth_gb_per_second`.
        key: String,
        /// The value found, truncated.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// An argument of a formula outside its domain.
    #[error("{what} is {found}, expected {expected}")]
    Value {
        /// The quantity and its unit.
        what: &'static str,
        /// Its value.
        found: f64,
        /// The domain of the argument.
        expected: &'static str,
    },
    /// Work arrives faster than it can be served, so the mean waiting time is unbounded.
    #[error("the queue is unstable: {arriving} {unit} arrive, but at most {served} can be served (utilisation {:.3})", arriving / served)]
    Unstable {
        /// Arrival rate, in `unit`.
        arriving: f64,
        /// Service rate, in `unit`.
        served: f64,
        /// The unit of both rates, such as "tokens/s".
        unit: &'static str,
    },
}

/// A JSON or TOML parser's message.
#[derive(Debug, thiserror::Error)]
pub enum SyntaxError {
    /// Of JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A TOML parser's message, without the source excerpt that it normally shows.
    #[error("{}", .0.message())]
    Toml(#[from] Box<toml::de::Error>),
}

impl From<ConfigError> for PlanError {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Key { path, key, found, expected } => {
                Self::Key { file: path.display().to_string(), key, found, expected }
            }
            other => Self::Config(other),
        }
    }
}

/// Returns `value` if it is finite and at least 0.
pub(crate) fn not_negative(what: &'static str, value: f64) -> Result<f64, PlanError> {
    within(what, value, value >= 0.0, "a finite non-negative number")
}

/// Returns `value` if it is finite and above 0.
pub(crate) fn positive(what: &'static str, value: f64) -> Result<f64, PlanError> {
    within(what, value, value > 0.0, "a finite number above 0")
}

fn within(what: &'static str, found: f64, good: bool, expected: &'static str) -> Result<f64, PlanError> {
    if good && found.is_finite() { Ok(found) } else { Err(PlanError::Value { what, found, expected }) }
}
