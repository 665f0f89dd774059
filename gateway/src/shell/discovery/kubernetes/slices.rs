//! Parses EndpointSlices (`discovery.k8s.io/v1`), as far as they locate engines.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;

use super::api::ApiError;
use crate::shell::discovery::answer::Answer;

/// Maximum number of slices, more than the backends of one source can fill.
const MAX_SLICES: usize = 10_000;

/// One page of the list of slices.
#[derive(Debug, Deserialize)]
pub(super) struct List {
    metadata: ListMeta,
    items: Option<Vec<Slice>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMeta {
    resource_version: String,
    #[serde(rename = "continue")]
    more: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Slice {
    metadata: Meta,
    address_type: String,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<Port>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Meta {
    name: String,
    resource_version: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Endpoint {
    addresses: Vec<String>,
    conditions: Conditions,
}

/// An endpoint's conditions; absent ones count as favourable.
#[derive(Debug, Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
    protocol: Option<String>,
}

/// An event in a watch.
#[derive(Debug)]
pub(super) enum Event {
    /// A new or changed slice.
    Set(Slice),
    /// A deleted slice.
    Gone(Slice),
    /// No change up to this version.
    Bookmark(Slice),
    /// An unknown kind.
    Other,
}

impl Event {
    pub(super) fn parse(line: &[u8]) -> Result<Self, ApiError> {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(rename = "type")]
            kind: String,
            #[serde(borrow)]
            object: &'a serde_json::value::RawValue,
        }
        #[derive(Deserialize)]
        struct Status {
            code: Option<u16>,
            #[serde(default)]
            message: String,
        }
        let wrong = |source| ApiError::Json { expected: "an event of a watch", source };
        let raw: Raw<'_> = serde_json::from_slice(line).map_err(wrong)?;
        let slice = || serde_json::from_str::<Slice>(raw.object.get()).map_err(wrong);
        match raw.kind.as_str() {
            "ADDED" | "MODIFIED" => slice().map(Self::Set),
            "DELETED" => slice().map(Self::Gone),
            "BOOKMARK" => slice().map(Self::Bookmark),
            "ERROR" => {
                let Status { code, message } = serde_json::from_str(raw.object.get()).map_err(wrong)?;
                let printable =
                    || message.chars().take(300).map(|letter| if letter.is_control() { ' ' } else { letter });
                Err(match code {
                    Some(410) => ApiError::Gone,
                    _ => ApiError::Answer(format!("the watch failed: {}", printable().collect::<String>())),
                })
            }
            _ => Ok(Self::Other),
        }
    }
}

/// All of a service's slices, by name.
#[derive(Debug, Default)]
pub(super) struct Slices(BTreeMap<String, Slice>);

impl Slices {
    /// Adds a page; returns its version, and the token for the next page.
    pub(super) fn add(&mut self, list: List) -> Result<(String, Option<String>), ApiError> {
        for slice in list.items.into_iter().flatten() {
            self.set(slice)?;
        }
        Ok((list.metadata.resource_version, list.metadata.more.filter(|more| !more.is_empty())))
    }

    /// Applies an event; returns the version after it.
    pub(super) fn apply(&mut self, event: Event) -> Result<Option<String>, ApiError> {
        let version = |slice: &Slice| Some(slice.metadata.resource_version.clone()).filter(|it| !it.is_empty());
        Ok(match event {
            Event::Set(slice) => {
                let version = version(&slice);
                self.set(slice)?;
                version
            }
            Event::Gone(slice) => {
                self.0.remove(&slice.metadata.name);
                version(&slice)
            }
            Event::Bookmark(slice) => version(&slice),
            Event::Other => None,
        })
    }

    fn set(&mut self, slice: Slice) -> Result<(), ApiError> {
        self.0.insert(slice.metadata.name.clone(), slice);
        if self.0.len() > MAX_SLICES {
            return Err(ApiError::Answer(format!("more than {MAX_SLICES} EndpointSlices")));
        }
        Ok(())
    }

    /// Returns the engines that accept requests, and those that are terminating. `port`: the port's name; `None`
    /// requires a single port.
    pub(super) fn answer(&self, port: Option<&str>) -> Result<Answer, ApiError> {
        let mut answer = Answer::default();
        let mut problem = None;
        for slice in self.0.values() {
            let endpoints = slice.endpoints.as_deref().unwrap_or_default();
            if endpoints.is_empty() || !matches!(slice.address_type.as_str(), "IPv4" | "IPv6") {
                continue;
            }
            let port = match slice.port(port) {
                Ok(port) => port,
                Err(cause) => {
                    problem = Some(cause);
                    continue;
                }
            };
            for endpoint in endpoints {
                // Additional addresses are alternatives for the same endpoint.
                let Some(ip) = endpoint.addresses.first().and_then(|ip| ip.parse::<IpAddr>().ok()) else { continue };
                let Conditions { ready, serving, terminating } = endpoint.conditions;
                let address = SocketAddr::new(ip, port);
                if terminating == Some(true) {
                    answer.leaving.insert(address);
                } else if ready != Some(false) && serving != Some(false) {
                    answer.addresses.insert(address);
                }
            }
        }
        // While a slice is being replaced, an endpoint may appear in both slices.
        let Answer { addresses, leaving, .. } = &mut answer;
        leaving.retain(|address| !addresses.contains(address));
        match problem {
            Some(cause) if answer == Answer::default() => Err(cause),
            _ => Ok(answer),
        }
    }
}

impl Slice {
    /// Returns the engines' port, or an error that lists the existing ports.
    fn port(&self, wanted: Option<&str>) -> Result<u16, ApiError> {
        let ports = self.ports.as_deref().unwrap_or_default();
        let tcp = |port: &&Port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP");
        let ports = ports.iter().filter(tcp).filter_map(|port| Some((port.name.as_deref().unwrap_or(""), port.port?)));
        let ports: BTreeSet<(&str, u16)> = ports.filter(|(_, port)| *port > 0).collect();
        let named = ports.iter().filter(|(name, _)| wanted.is_none_or(|wanted| wanted == *name));
        match named.map(|(_, port)| *port).collect::<Vec<_>>().as_slice() {
            [only] => Ok(*only),
            _ => {
                let known =
                    crate::backends::error::listed(ports.iter().map(|(name, port)| format!("'{name}' ({port})")));
                let wanted = wanted.map_or_else(|| "just one, or `port` set".to_owned(), |name| format!("'{name}'"));
                Err(ApiError::Port { known, wanted })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn endpoint(ip: &str, ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>) -> Value {
        json!({
            "addresses": [ip, "10.9.9.9"], "nodeName": "n",
            "conditions": { "ready": ready, "serving": serving, "terminating": terminating },
        })
    }

    fn slice(name: &str, ports: Value, endpoints: Vec<Value>) -> Value {
        json!({
            "metadata": { "name": name, "resourceVersion": "7" }, "addressType": "IPv4", "ports": ports,
            "endpoints": endpoints,
        })
    }

    fn slices(items: Vec<Value>) -> Slices {
        let mut slices = Slices::default();
        let list = json!({ "kind": "EndpointSliceList", "metadata": { "resourceVersion": "5" }, "items": items });
        assert_eq!(slices.add(serde_json::from_value(list).unwrap()).unwrap(), ("5".to_owned(), None));
        slices
    }

    fn ips(addresses: &BTreeSet<SocketAddr>) -> Vec<String> {
        addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn conditions_decide() {
        let (yes, no) = (Some(true), Some(false));
        let http = json!([{ "name": "http", "port": 30000, "protocol": "TCP" }]);
        let endpoints = vec![
            endpoint("10.0.0.1", yes, yes, no),
            endpoint("10.0.0.2", None, None, None),
            endpoint("10.0.0.3", no, no, no),
            endpoint("10.0.0.4", no, yes, yes),
            // publishNotReadyAddresses sets these conditions.
            endpoint("10.0.0.5", yes, no, no),
            endpoint("10.0.0.6", yes, yes, yes),
            endpoint("no address", yes, yes, no),
            json!({ "addresses": [] }),
            json!({ "addresses": ["10.0.0.7"] }),
        ];
        let known = slices(vec![slice("a", http.clone(), endpoints)]);
        let answer = known.answer(Some("http")).unwrap();
        assert_eq!(ips(&answer.addresses), ["10.0.0.1:30000", "10.0.0.2:30000", "10.0.0.7:30000"]);
        assert_eq!(ips(&answer.leaving), ["10.0.0.4:30000", "10.0.0.6:30000"]);
        assert_eq!(known.answer(None).unwrap(), answer);
        // An endpoint that serves in either of two slices serves.
        let both = slices(vec![
            slice("a", http.clone(), vec![endpoint("10.0.0.1", no, yes, yes)]),
            slice("b", http, vec![endpoint("10.0.0.1", yes, yes, no)]),
        ]);
        let answer = both.answer(None).unwrap();
        assert_eq!((ips(&answer.addresses), answer.leaving.len()), (vec!["10.0.0.1:30000".to_owned()], 0));
    }

    #[test]
    fn ports_are_found_by_name_or_are_the_only_one() {
        let one = |ports: Value| slices(vec![slice("a", ports, vec![endpoint("10.0.0.1", None, None, None)])]);
        let two = json!([{ "name": "http", "port": 1 }, { "name": "metrics", "port": 2 }]);
        assert_eq!(ips(&one(two.clone()).answer(Some("metrics")).unwrap().addresses), ["10.0.0.1:2"]);
        let refusal = one(two.clone()).answer(None).unwrap_err().to_string();
        assert_eq!(
            refusal,
            "the service's endpoints have ports 'http' (1), 'metrics' (2), expected just one, or `port` set"
        );
        let refusal = one(two).answer(Some("grpc")).unwrap_err().to_string();
        assert!(refusal.ends_with("expected 'grpc'"), "{refusal}");
        assert_eq!(ips(&one(json!([{ "name": "", "port": 8 }])).answer(None).unwrap().addresses), ["10.0.0.1:8"]);
        let udp = json!([{ "name": "http", "port": 1, "protocol": "UDP" }, { "port": null }]);
        assert!(one(udp).answer(None).unwrap_err().to_string().contains("have ports none"));
        assert!(one(Value::Null).answer(None).is_err());
        // An empty set is not an error.
        assert_eq!(slices(vec![slice("a", Value::Null, Vec::new())]).answer(None).unwrap(), Answer::default());
        let mut names = slice("a", json!([{ "port": 1 }]), vec![endpoint("a.example", None, None, None)]);
        names["addressType"] = json!("FQDN");
        assert_eq!(slices(vec![names]).answer(None).unwrap(), Answer::default());
    }

    #[test]
    fn events_change_what_is_known() {
        let http = json!([{ "port": 1 }]);
        let mut known = slices(vec![slice("a", http.clone(), vec![endpoint("10.0.0.1", None, None, None)])]);
        let mut apply = |kind: &str, object: Value| {
            let line = json!({ "type": kind, "object": object }).to_string();
            let version = Event::parse(line.as_bytes()).and_then(|event| known.apply(event));
            version.map(|version| (version, ips(&known.answer(None).unwrap().addresses)))
        };
        let more = slice("b", http.clone(), vec![endpoint("10.0.0.2", None, None, None)]);
        let both = vec!["10.0.0.1:1".to_owned(), "10.0.0.2:1".to_owned()];
        assert_eq!(apply("ADDED", more.clone()).unwrap(), (Some("7".to_owned()), both.clone()));
        assert_eq!(apply("MODIFIED", more.clone()).unwrap().1, both);
        let bookmark = json!({ "metadata": { "resourceVersion": "9" } });
        assert_eq!(apply("BOOKMARK", bookmark).unwrap(), (Some("9".to_owned()), both.clone()));
        assert_eq!(apply("PATCHED", json!({ "any": 1 })).unwrap(), (None, both));
        assert_eq!(apply("DELETED", more).unwrap().1, ["10.0.0.1:1"]);
        assert!(matches!(apply("ERROR", json!({ "code": 410 })), Err(ApiError::Gone)));
        let refusal = apply("ERROR", json!({ "code": 500, "message": "etcd\nis away" })).unwrap_err().to_string();
        assert_eq!(refusal, "the watch failed: etcd is away");
        for line in ["", "x", "{}", r#"{"type":"ADDED"}"#, r#"{"type":"ADDED","object":{"endpoints":7}}"#] {
            assert!(matches!(Event::parse(line.as_bytes()), Err(ApiError::Json { .. })), "{line}");
        }
    }
}
