//! Settings of a run, checked before anything is sent.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use semmoe_engines::http::BaseUrl;
use semmoe_engines::tls::ClientFiles;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::{Api, LoadError};

/// Maximum number of clients; no machine has enough ports for more.
pub const MAX_CONCURRENCY: usize = 50_000;

/// Headers with secret values, which do not belong on a command line that every user of the machine can see.
const SECRETS: &[&str] = &["authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"];
/// Headers that the client sets itself.
const FRAMING: &[&str] =
    &["host", "content-length", "content-type", "transfer-encoding", "connection", "te", "upgrade"];

/// When requests are sent.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Pace {
    /// Closed loop: each client sends its next request when the last one has ended.
    Closed {
        /// Number of clients, at least 1.
        concurrency: usize,
    },
    /// Open loop: requests follow a Poisson process, independent of the server.
    Poisson {
        /// Mean requests per second, above 0.
        per_second: f64,
        /// Random seed.
        seed: u64,
    },
    /// Open loop: requests follow the times in an arrival file.
    Recorded {
        /// The file.
        #[serde(serialize_with = "displayed")]
        arrivals: PathBuf,
        /// The factor that times are divided by, above 0.
        speed: f64,
    },
}

fn displayed<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// The condition that ends a run; warm-up requests do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Stop after this many requests.
    Requests(u64),
    /// Stop after this time, and wait for the requests then in flight.
    Duration(Duration),
    /// Stop at the end of the arrival file.
    Arrivals,
}

/// Service levels. A request is good if it meets all of the given ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Slo {
    /// Maximum time to the first content, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Maximum mean gap between the content events of the request, in milliseconds.
    pub itl_ms: Option<f64>,
    /// Maximum time to the end of the response, in milliseconds.
    pub e2e_ms: Option<f64>,
}

impl Slo {
    /// Whether any is given.
    pub fn is_given(&self) -> bool {
        self.ttft_ms.is_some() || self.itl_ms.is_some() || self.e2e_ms.is_some()
    }
}

/// Settings of one run.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The server.
    pub url: BaseUrl,
    /// Trusted authorities for an https server, and the client's certificate.
    pub tls: ClientFiles,
    /// The route.
    pub api: Api,
    /// Whether responses are streamed.
    pub stream: bool,
    /// The model; `None` queries the server for the only one it serves.
    pub model: Option<String>,
    /// The prompts file: a `.txt` file contains one prompt per line; any other file is JSON Lines.
    pub prompts: PathBuf,
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
    /// Fields that override those in every request body.
    pub extra: Map<String, Value>,
    /// Headers sent with every request.
    pub headers: HeaderMap,
    /// When requests are sent.
    pub pace: Pace,
    /// When the run ends.
    pub limit: Limit,
    /// Number of warm-up requests, which are sent first and not measured.
    pub warmup: u64,
    /// Time limit for one request, measured from when it is sent.
    pub timeout: Duration,
    /// Service levels.
    pub slo: Slo,
    /// Number of sending threads; `None` means one per core, but at most one per client.
    pub threads: Option<usize>,
    /// Maximum number of open-loop requests in flight. Further requests wait, and are measured from their due times.
    pub max_in_flight: usize,
    /// How long requests in flight may continue after the caller stops the run.
    pub grace: Duration,
}

impl LoadOptions {
    /// Creates options for non-streaming chats that cycle through the file's prompts until `limit`.
    pub fn new(url: BaseUrl, prompts: PathBuf, pace: Pace, limit: Limit) -> Self {
        Self {
            url,
            tls: ClientFiles::default(),
            api: Api::Chat,
            stream: false,
            model: None,
            prompts,
            max_tokens: 128,
            extra: Map::new(),
            headers: HeaderMap::new(),
            pace,
            limit,
            warmup: 0,
            timeout: Duration::from_secs(600),
            slo: Slo::default(),
            threads: None,
            max_in_flight: 10_000,
            grace: Duration::from_secs(5),
        }
    }

    pub(crate) fn check(&self) -> Result<(), LoadError> {
        let bad = |option, found: String, expected| Err(LoadError::option(option, found, expected));
        match &self.pace {
            Pace::Closed { concurrency } if !(1..=MAX_CONCURRENCY).contains(concurrency) => {
                return bad("concurrency", concurrency.to_string(), "1 to 50000");
            }
            Pace::Poisson { per_second, .. } if !(1e-6..=1e6).contains(per_second) => {
                return bad("rate", per_second.to_string(), "0.000001 to 1000000 requests per second");
            }
            Pace::Recorded { speed, .. } if !(1e-6..=1e6).contains(speed) => {
                return bad("speed", speed.to_string(), "0.000001 to 1000000");
            }
            _ => {}
        }
        match self.limit {
            Limit::Requests(0) => return bad("requests", "0".into(), "at least 1"),
            Limit::Duration(time) if time.is_zero() || time > crate::schedule::LONGEST => {
                return bad("duration", format!("{time:?}"), "above 0 and at most a year");
            }
            Limit::Arrivals if !matches!(self.pace, Pace::Recorded { .. }) => {
                return bad("the end of the run", "the end of an arrival file".into(), "a pace from such a file");
            }
            _ => {}
        }
        if self.timeout.is_zero() {
            return bad("timeout", format!("{:?}", self.timeout), "above 0");
        }
        if !(1..=MAX_CONCURRENCY).contains(&self.max_in_flight) {
            return bad("max in flight", self.max_in_flight.to_string(), "1 to 50000");
        }
        if self.threads.is_some_and(|threads| !(1..=1024).contains(&threads)) {
            return bad("threads", format!("{:?}", self.threads), "1 to 1024");
        }
        self.check_slo()
    }

    fn check_slo(&self) -> Result<(), LoadError> {
        let Slo { ttft_ms, itl_ms, e2e_ms } = self.slo;
        for (option, value) in [("slo ttft", ttft_ms), ("slo itl", itl_ms), ("slo e2e", e2e_ms)] {
            if value.is_some_and(|value| !(value.is_finite() && value > 0.0)) {
                return Err(LoadError::option(option, format!("{value:?} ms"), "above 0"));
            }
        }
        if !self.stream && (ttft_ms.is_some() || itl_ms.is_some()) {
            let (option, found) =
                ("a service level for the first token or the gaps", "set for responses that are not streamed");
            return Err(LoadError::option(option, found, "streamed responses"));
        }
        Ok(())
    }
}

/// Parses a header `name: value` for every request; rejects secrets and headers that the client sets itself.
///
/// # Errors
/// A `LoadError` if the text is not a header.
pub fn parse_header(text: &str) -> Result<(HeaderName, HeaderValue), LoadError> {
    let bad = |found: &str, expected| LoadError::option("a header", found, expected);
    // Errors never show a header's value, because it may be secret.
    let Some((name, value)) = text.split_once(':') else { return Err(bad("without a colon", "name: value")) };
    let name: HeaderName = name.trim().parse().map_err(|_| bad("with an invalid name", "letters, digits and '-'"))?;
    if SECRETS.contains(&name.as_str()) {
        return Err(bad(name.as_str(), "secrets to come from the environment (--api-key-env)"));
    }
    if FRAMING.contains(&name.as_str()) {
        return Err(bad(name.as_str(), "a header that the client does not set itself"));
    }
    let value = value.trim().parse().map_err(|_| bad("with an invalid value", "visible ASCII"))?;
    Ok((name, value))
}

/// Builds `Authorization: Bearer KEY`, which is hidden in `Debug` output.
///
/// # Errors
/// A `LoadError` if the key contains characters that a header cannot.
pub fn bearer(key: &str) -> Result<(HeaderName, HeaderValue), LoadError> {
    let wrong = |_| LoadError::option("the API key", "not fit for a header", "visible ASCII on one line");
    let mut value: HeaderValue = format!("Bearer {}", key.trim()).parse().map_err(wrong)?;
    value.set_sensitive(true);
    Ok((header::AUTHORIZATION, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers() {
        let (name, value) = parse_header("X-Semmoe-Session:  a:b ").unwrap();
        assert_eq!((name.as_str(), value.to_str().unwrap()), ("x-semmoe-session", "a:b"));
        for text in [
            "Authorization: Bearer s3cret",
            "x-API-key:s3cret",
            "Host: s3cret",
            "s3cret",
            "a b: s3cret",
            "a: s3cret\u{7f}",
        ] {
            let error = parse_header(text).map(|_| ()).unwrap_err().to_string();
            assert!(!error.contains("s3cret"), "{error}");
        }
        let (_, value) = bearer("s3cret\n").unwrap();
        assert_eq!(value, "Bearer s3cret");
        assert!(!format!("{value:?}").contains("s3cret"));
        assert!(!bearer("s3cret\nx").unwrap_err().to_string().contains("s3cret"));
    }

    #[test]
    fn options_that_cannot_be_used_are_refused() {
        let closed = Pace::Closed { concurrency: 1 };
        let base = LoadOptions::new("http://a".parse().unwrap(), "p".into(), closed, Limit::Requests(1));
        assert!(base.check().is_ok());
        type Change = fn(&mut LoadOptions);
        let changes: [Change; 11] = [
            |o| o.pace = Pace::Closed { concurrency: 0 },
            |o| o.pace = Pace::Poisson { per_second: f64::NAN, seed: 0 },
            |o| o.pace = Pace::Poisson { per_second: 0.0, seed: 0 },
            |o| o.pace = Pace::Recorded { arrivals: "a".into(), speed: -1.0 },
            |o| o.limit = Limit::Requests(0),
            |o| o.limit = Limit::Duration(Duration::ZERO),
            |o| o.limit = Limit::Arrivals,
            |o| o.timeout = Duration::ZERO,
            |o| o.max_in_flight = 0,
            |o| o.slo.ttft_ms = Some(1.0),
            |o| (o.stream, o.slo.itl_ms) = (true, Some(f64::INFINITY)),
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut options = base.clone();
            change(&mut options);
            assert!(options.check().is_err(), "change {index}");
        }
    }
}
