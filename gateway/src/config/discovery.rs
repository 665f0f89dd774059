//! `[[models.discovery]]`: discovered backends, which join and leave while the gateway runs.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use semmoe_engines::http::BaseUrl;
use serde::Deserialize;

use super::value::{at_least, seconds};
use super::{BackendConfig, ConfigError, Found, RawBackend, RawKubernetes, kubernetes};

/// Maximum length of a DNS name in text form.
const MAX_HOST_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

/// Whether this is a valid DNS name: labels of letters, digits, `-` and `_`.
pub(crate) fn is_dns_name(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let is_label = |label: &str| !label.is_empty() && label.len() <= MAX_LABEL_BYTES && label.bytes().all(is_letter);
    name.len() <= MAX_HOST_BYTES && name.split('.').all(is_label)
}

/// Identifies a discovery source across all models.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SourceKey {
    /// The model's name.
    pub(crate) model: String,
    /// The source's name.
    pub(crate) source: String,
}

/// `[[models.discovery]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDiscovery {
    /// `host:port`: every address (A and AAAA) of the host is a backend on that port. Set exactly one of
    /// this, `srv` and `kubernetes`.
    pub dns: Option<String>,
    /// A name with SRV records: every address of each target is a backend on the record's port. Set this, `dns` or
    /// `kubernetes`.
    pub srv: Option<String>,
    /// A service: every ready endpoint is a backend. Set this, `dns` or `srv`.
    pub kubernetes: Option<RawKubernetes>,
    /// Time between two lookups.
    #[serde(default = "default_interval_seconds")]
    pub interval_seconds: f64,
    /// Number of consecutive lookups that must lack an address before its backend is removed.
    #[serde(default = "default_leave_after")]
    pub leave_after: u32,
    /// Settings shared by all backends of this source, with the keys of `[[models.backends]]`. The backends are named
    /// `NAME-ADDRESS:PORT` and have no `url` here. With `tls` the connections use TLS.
    #[serde(flatten)]
    pub backend: RawBackend,
}

fn default_interval_seconds() -> f64 {
    5.0
}

fn default_leave_after() -> u32 {
    3
}

impl RawDiscovery {
    /// Returns a backend of this source at a placeholder address.
    fn template(&self, key: &str, host: String) -> Result<RawBackend, ConfigError> {
        let mut template = self.backend.clone();
        for (field, set) in [("url", !template.url.is_empty()), ("urls", !template.urls.is_empty())] {
            if set {
                let cause = "set, but these backends' addresses come from discovery";
                return Err(ConfigError::value(format!("{key}.{field}"), cause));
            }
        }
        let scheme = if template.tls.is_some() { "https" } else { "http" };
        template.url = format!("{scheme}://127.0.0.1:1");
        // Default to the host name, because certificates seldom contain addresses.
        if let Some(tls) = &mut template.tls {
            tls.server_name.get_or_insert(host);
        }
        Ok(template)
    }

    fn place(&self, key: &str, base: &Path) -> Result<Place, ConfigError> {
        match (&self.dns, &self.srv, &self.kubernetes) {
            (Some(dns), None, None) => Place::dns(&format!("{key}.dns"), dns),
            (None, Some(srv), None) => Place::srv(&format!("{key}.srv"), srv),
            (None, None, Some(raw)) => Place::kubernetes(key, raw, base),
            (None, None, None) => {
                Err(ConfigError::value(key, "none of `dns`, `srv` and `kubernetes` is set, expected one of them"))
            }
            (_, srv, kubernetes) => {
                let last = if kubernetes.is_some() { "kubernetes" } else { "srv" };
                let other = if srv.is_some() && kubernetes.is_some() { "srv" } else { "dns" };
                Err(ConfigError::value(format!("{key}.{last}"), format!("`{other}` is set too, expected one of them")))
            }
        }
    }
}

/// Where a source looks up its addresses.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Place {
    /// The system resolver, for `host:port`.
    Dns(String),
    /// The nameservers, for the SRV records of a name.
    Srv(String),
    /// The API server of a cluster.
    #[cfg(feature = "kube")]
    Kubernetes(kubernetes::KubernetesConfig),
}

impl Place {
    fn dns(key: &str, dns: &str) -> Result<Self, ConfigError> {
        let wrong = || ConfigError::value(key, format!("'{dns}' is not host:port"));
        let (host, port) = dns.rsplit_once(':').ok_or_else(wrong)?;
        let is_host = !host.is_empty() && host.len() <= MAX_HOST_BYTES && !host.contains(['/', ' ', ':', '@']);
        if !is_host || !port.parse::<u16>().is_ok_and(|port| port > 0) {
            return Err(wrong());
        }
        Ok(Self::Dns(dns.to_owned()))
    }

    fn srv(key: &str, srv: &str) -> Result<Self, ConfigError> {
        let name = srv.strip_suffix('.').unwrap_or(srv);
        let wrong = || ConfigError::value(key, format!("'{srv}' is not a DNS name such as _http._tcp.engines.example"));
        if is_dns_name(name) { Ok(Self::Srv(name.to_owned())) } else { Err(wrong()) }
    }

    #[cfg(feature = "kube")]
    fn kubernetes(key: &str, raw: &RawKubernetes, base: &Path) -> Result<Self, ConfigError> {
        kubernetes::kubernetes(&format!("{key}.kubernetes"), raw, base).map(Self::Kubernetes)
    }

    #[cfg(not(feature = "kube"))]
    fn kubernetes(key: &str, _: &RawKubernetes, _: &Path) -> Result<Self, ConfigError> {
        Err(kubernetes::refuse(key))
    }

    /// The host name that the engines' certificates are expected to contain.
    fn host(&self) -> String {
        match self {
            Self::Dns(dns) => dns.rsplit_once(':').map_or(dns.as_str(), |(host, _)| host).to_owned(),
            // Use the configured domain: the targets come from outside.
            Self::Srv(srv) => srv.split('.').skip_while(|label| label.starts_with('_')).collect::<Vec<_>>().join("."),
            #[cfg(feature = "kube")]
            Self::Kubernetes(kubernetes) => format!("{}.{}.svc", kubernetes.service, kubernetes.namespace),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(dns) => write!(f, "DNS name {dns}"),
            Self::Srv(srv) => write!(f, "SRV records of {srv}"),
            #[cfg(feature = "kube")]
            Self::Kubernetes(kubernetes) => {
                write!(f, "Kubernetes service {}/{}", kubernetes.namespace, kubernetes.service)
            }
        }
    }
}

/// A validated discovery source.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DiscoveryConfig {
    pub(crate) name: String,
    pub(crate) place: Place,
    pub(crate) interval: Duration,
    pub(crate) leave_after: u32,
    pub(super) template: BackendConfig,
}

impl DiscoveryConfig {
    /// Returns the backend at an address.
    pub(crate) fn backend(&self, address: SocketAddr) -> BackendConfig {
        BackendConfig {
            name: format!("{}-{address}", self.name),
            urls: vec![self.url(address)],
            found: Some(Found { source: self.name.clone(), address }),
            ..self.template.clone()
        }
    }

    fn url(&self, address: SocketAddr) -> BaseUrl {
        let plain = BaseUrl::from(address);
        if self.template.tls.is_none() {
            return plain;
        }
        let secure = format!("https://{}", plain.authority());
        secure.parse().expect("a valid http URL is also valid as https")
    }
}

/// Validates a source. `backend` validates the settings that all of its backends share.
pub(super) fn discovery(
    key: &str,
    raw: &RawDiscovery,
    base: &Path,
    backend: impl FnOnce(RawBackend) -> Result<BackendConfig, ConfigError>,
) -> Result<DiscoveryConfig, ConfigError> {
    let place = raw.place(key, base)?;
    at_least(&format!("{key}.leave_after"), raw.leave_after, 1)?;
    Ok(DiscoveryConfig {
        name: raw.backend.name.clone(),
        interval: seconds(&format!("{key}.interval_seconds"), raw.interval_seconds)?,
        leave_after: raw.leave_after,
        template: backend(raw.template(key, place.host())?)?,
        place,
    })
}
