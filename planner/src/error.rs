//! Errors of inputs and questions: one sentence that names the key or the quantity.

use semmoe_tables::ConfigError;

/// An error of the planner.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An input that cannot be parsed.
    #[error("{file} is not valid {format}: {cause}")]
    Syntax {
        /// The input, as the caller names it.
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
        /// The input, as the caller names it.
        file: String,
        /// The key with its path, such as `levels[1].bandwidth_gb_per_second`.
        key: String,
        /// Its value, shortened.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// An argument of a formula outside its domain.
    #[error("{what} is {found}, expected {expected}")]
    Value {
        /// The quantity, with its unit.
        what: &'static str,
        /// Its value.
        found: f64,
        /// The domain.
        expected: &'static str,
    },
    /// More work arrives than can be served, so no mean waiting time exists.
    #[error("the queue is unstable: {arriving} {unit} arrive, at most {served} are served (utilisation {:.3})", arriving / served)]
    Unstable {
        /// Arrival rate, in `unit`.
        arriving: f64,
        /// Service rate, in `unit`.
        served: f64,
        /// For example "tokens/s".
        unit: &'static str,
    },
}

/// A parser's message.
#[derive(Debug, thiserror::Error)]
pub enum SyntaxError {
    /// Of JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Of TOML, without the excerpt that its own message shows.
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
    within(what, value, value >= 0.0, "a finite number of at least 0")
}

/// Returns `value` if it is finite and above 0.
pub(crate) fn positive(what: &'static str, value: f64) -> Result<f64, PlanError> {
    within(what, value, value > 0.0, "a finite number above 0")
}

fn within(what: &'static str, found: f64, good: bool, expected: &'static str) -> Result<f64, PlanError> {
    if good && found.is_finite() { Ok(found) } else { Err(PlanError::Value { what, found, expected }) }
}
