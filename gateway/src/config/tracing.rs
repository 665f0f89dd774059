//! `[tracing]`: traces of requests for an OpenTelemetry collector.

use semmoe_engines::http::BaseUrl;

use super::ConfigError;

section! { RawTracing, "`[tracing]`";
    /// Base URL of a collector that takes OTLP over HTTP as JSON, `http://collector:4318`; absent: nothing is traced.
    otlp: Option<String> = None,
    /// Share of the requests, 0 to 1, that are traced where the client's `traceparent` does not decide it.
    ratio: f64 = 0.01,
    /// `service.name` of the spans.
    service_name: String = "semmoe-gateway".to_owned(),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TracingConfig {
    pub(crate) otlp: Option<BaseUrl>,
    pub(crate) ratio: f64,
    pub(crate) service_name: String,
}

pub(super) fn tracing(raw: RawTracing) -> Result<TracingConfig, ConfigError> {
    super::value::within("tracing.ratio", raw.ratio, 0.0..=1.0)?;
    if raw.service_name.is_empty() || raw.service_name.len() > 256 {
        return Err(ConfigError::value("tracing.service_name", "expected 1 to 256 bytes"));
    }
    let parse = |url: String| url.parse().map_err(|error| ConfigError::value("tracing.otlp", error));
    Ok(TracingConfig { otlp: raw.otlp.map(parse).transpose()?, ratio: raw.ratio, service_name: raw.service_name })
}
