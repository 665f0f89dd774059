//! A discovery source's answer: current addresses, and engines that are terminating.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::srv;
use crate::config::Place;

/// Maximum wait for the resolver.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of backends per source, because a resolver's answers come from outside.
pub(super) const MAX_FOUND: usize = 1024;

/// Resolves names to addresses.
pub trait Resolve: Send + Sync {
    /// Returns all addresses of `host:port`.
    fn resolve(&self, name: String) -> Resolved<'_>;

    /// Returns the nameservers for SRV records.
    ///
    /// # Errors
    /// The operating system's error if the nameservers cannot be determined.
    fn nameservers(&self) -> io::Result<Vec<SocketAddr>> {
        srv::configured_nameservers()
    }
}

/// The addresses, or an error.
pub type Resolved<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// The operating system's resolver: A and AAAA records, and `/etc/hosts`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: String) -> Resolved<'_> {
        Box::pin(async move { Ok(tokio::net::lookup_host(name).await?.collect()) })
    }
}

/// Engine addresses that a source reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) addresses: BTreeSet<SocketAddr>,
    /// Engines that are known to be terminating and must not be used.
    pub(super) leaving: BTreeSet<SocketAddr>,
    /// Why addresses may be missing from this answer; missing backends then stay.
    pub(super) gaps: Option<String>,
    /// Describes entries that were omitted on purpose.
    pub(super) note: Option<String>,
}

/// Why a source has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum LookupError {
    #[error(transparent)]
    Resolver(#[from] io::Error),
    #[error(transparent)]
    Srv(#[from] srv::SrvError),
    #[error("no answer within {ANSWER_TIMEOUT:?}")]
    Late,
    #[cfg(feature = "kube")]
    #[error(transparent)]
    Kubernetes(#[from] Arc<super::kubernetes::ApiError>),
}

/// How a source obtains its answers.
pub(super) enum Lookup {
    /// The source is queried at every poll.
    EachTime,
    /// A task follows the source.
    #[cfg(feature = "kube")]
    Followed(super::kubernetes::Followed),
}

impl Lookup {
    /// Starts following the source, if it supports that. `wake` is notified when a followed source's answer changes.
    #[cfg_attr(not(feature = "kube"), allow(unused_variables, reason = "nothing changes by itself then"))]
    pub(super) fn new(place: &Place, wake: &Arc<Notify>) -> Self {
        match place {
            Place::Dns(_) | Place::Srv(_) => Self::EachTime,
            #[cfg(feature = "kube")]
            Place::Kubernetes(config) => {
                Self::Followed(super::kubernetes::Followed::start(config.clone(), Arc::clone(wake)))
            }
        }
    }

    /// Whether a followed source's answer has changed since the last call.
    pub(super) fn changed(&self) -> bool {
        match self {
            Self::EachTime => false,
            #[cfg(feature = "kube")]
            Self::Followed(followed) => followed.changed(),
        }
    }

    /// Returns the answer; `None` while the first one is pending.
    pub(super) async fn answer(&self, resolver: &dyn Resolve, place: &Place) -> Option<Result<Answer, LookupError>> {
        match (self, place) {
            (Self::EachTime, Place::Dns(dns)) => {
                let answer = tokio::time::timeout(ANSWER_TIMEOUT, resolver.resolve(dns.clone())).await;
                let addresses = answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
                let answer = |addresses: Vec<SocketAddr>| Answer {
                    addresses: addresses.into_iter().collect(),
                    ..Answer::default()
                };
                Some(addresses.map(answer).map_err(LookupError::from))
            }
            (Self::EachTime, Place::Srv(name)) => {
                let answer = tokio::time::timeout(ANSWER_TIMEOUT, srv::query(resolver, name)).await;
                Some(answer.map_or(Err(LookupError::Late), |answer| answer.map_err(LookupError::from)))
            }
            #[cfg(feature = "kube")]
            (Self::Followed(followed), _) => Some(followed.answer()?.map_err(LookupError::from)),
            #[cfg(feature = "kube")]
            (Self::EachTime, Place::Kubernetes(_)) => None,
        }
    }
}
