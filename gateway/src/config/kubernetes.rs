//! `[models.discovery.kubernetes]`: a service whose EndpointSlices list the engines.

use std::path::PathBuf;

use serde::Deserialize;

/// `[models.discovery.kubernetes]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawKubernetes {
    /// Namespace of the service.
    pub namespace: String,
    /// The service in front of the engines, headless or not.
    pub service: String,
    /// Name of the engines' port in the service; absent: the service's only port.
    pub port: Option<String>,
    /// URL of the API server.
    #[serde(default = "default_api_server")]
    pub api_server: String,
    /// File with the bearer token, reread for every request; absent: the pod's service account token, or none if the
    /// connection to the API server does not use TLS.
    pub token_file: Option<PathBuf>,
    /// CA certificates for the API server (PEM); absent: those mounted in the pod.
    pub ca: Option<PathBuf>,
}

fn default_api_server() -> String {
    "https://kubernetes.default.svc".to_owned()
}

#[cfg(feature = "kube")]
pub(crate) use checked::KubernetesConfig;
#[cfg(feature = "kube")]
pub(super) use checked::kubernetes;

#[cfg(not(feature = "kube"))]
pub(super) fn refuse(key: &str) -> super::ConfigError {
    let cause = "this build of semmoe lacks the cargo feature `kube`; rebuild it with --features kube";
    super::ConfigError::value(format!("{key}.kubernetes"), cause)
}

#[cfg(feature = "kube")]
mod checked {
    use std::path::{Path, PathBuf};

    use semmoe_engines::http::BaseUrl;

    use super::super::ConfigError;
    use super::RawKubernetes;

    /// Directory where Kubernetes mounts the service account.
    const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
    /// Maximum length of a DNS label, as used for the names of namespaces, services and ports.
    const MAX_LABEL: usize = 63;

    /// The validated section.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct KubernetesConfig {
        pub(crate) namespace: String,
        pub(crate) service: String,
        pub(crate) port: Option<String>,
        pub(crate) api_server: BaseUrl,
        /// `None` only without TLS: tokens are never sent in plain text.
        pub(crate) token_file: Option<PathBuf>,
        pub(crate) ca: PathBuf,
    }

    pub(in super::super) fn kubernetes(
        key: &str,
        raw: &RawKubernetes,
        base: &Path,
    ) -> Result<KubernetesConfig, ConfigError> {
        for (field, name) in
            [("namespace", Some(&raw.namespace)), ("service", Some(&raw.service)), ("port", raw.port.as_ref())]
        {
            if let Some(name) = name.filter(|name| !is_label(name)) {
                let cause = format!("{name:?} is not a name made of lower-case letters, digits and '-'");
                return Err(ConfigError::value(format!("{key}.{field}"), cause));
            }
        }
        let wrong = |error| ConfigError::value(format!("{key}.api_server"), error);
        let api_server: BaseUrl = raw.api_server.parse().map_err(wrong)?;
        let given = |name: &str| Path::new(ACCOUNT).join(name);
        let token_file = raw.token_file.as_ref().map(|path| base.join(path));
        if token_file.is_some() && !api_server.is_secure() {
            let cause =
                "set, but the API server's URL does not start with https://, and tokens are never sent in plain text";
            return Err(ConfigError::value(format!("{key}.token_file"), cause));
        }
        Ok(KubernetesConfig {
            namespace: raw.namespace.clone(),
            service: raw.service.clone(),
            port: raw.port.clone(),
            token_file: token_file.or_else(|| api_server.is_secure().then(|| given("token"))),
            api_server,
            ca: raw.ca.as_ref().map_or_else(|| given("ca.crt"), |path| base.join(path)),
        })
    }

    fn is_label(name: &str) -> bool {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let outer = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
        let bytes = name.as_bytes();
        bytes.len() <= MAX_LABEL && bytes.iter().copied().all(inner) && outer(bytes.first()) && outer(bytes.last())
    }
}
