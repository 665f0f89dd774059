//! `[tracing]`: request traces for an OpenTelemetry collector.

use semmoe_engines::http::BaseUrl;

use super::ConfigError;
use super::value::share;

section! { RawTracing => TracingConfig, "tracing", "`[tracing]`";
    /// Base URL of a collector that accepts OTLP over HTTP as JSON, such as `http://collector:4318`; absent: no
    /// tracing.
    otlp: Option<String> = None => otlp: Option<BaseUrl> = url,
    /// Fraction of requests, 0 to 1, that are traced if the client's `traceparent` does not decide.
    ratio: f64 = 0.01 => ratio: f64 = share,
    /// The `service.name` attribute of the spans.
    service_name: String = "semmoe-gateway".to_owned() => service_name: String = name,
}

fn url(key: &str, url: Option<String>) -> Result<Option<BaseUrl>, ConfigError> {
    url.map(|url| url.parse()).transpose().map_err(|error| ConfigError::value(key, error))
}

fn name(key: &str, name: String) -> Result<String, ConfigError> {
    if (1..=256).contains(&name.len()) { Ok(name) } else { Err(ConfigError::value(key, "expected 1 to 256 bytes")) }
}
