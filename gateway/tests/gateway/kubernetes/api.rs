//! A Kubernetes API server for EndpointSlices alone: list, watch, expired versions, and faults.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::support::Mock;

type Sender = mpsc::UnboundedSender<Result<Bytes, std::io::Error>>;

#[derive(Default)]
struct Cluster {
    slices: BTreeMap<String, Value>,
    version: u64,
    /// The oldest version that a watch can resume from.
    oldest: u64,
    events: Vec<(u64, String)>,
    watchers: Vec<Sender>,
    /// Replaces every answer.
    fault: Option<(u16, String)>,
    lists: usize,
    watches: usize,
    tokens: Vec<String>,
}

#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    cluster: Arc<Mutex<Cluster>>,
}

/// One endpoint: the engine, and its conditions.
pub(crate) fn endpoint(mock: &Mock, conditions: Value) -> (u16, Value) {
    let ip = mock.address.ip().to_string();
    (mock.address.port(), json!({ "addresses": [ip], "conditions": conditions, "targetRef": { "kind": "Pod" } }))
}

pub(crate) fn ready(mock: &Mock) -> (u16, Value) {
    endpoint(mock, json!({ "ready": true, "serving": true, "terminating": false }))
}

pub(crate) fn unready(mock: &Mock) -> (u16, Value) {
    endpoint(mock, json!({ "ready": false, "serving": false, "terminating": false }))
}

pub(crate) fn ending(mock: &Mock) -> (u16, Value) {
    endpoint(mock, json!({ "ready": false, "serving": true, "terminating": true }))
}

impl Api {
    pub(crate) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = Self { address: listener.local_addr().unwrap(), cluster: Arc::default() };
        api.lock().version = 100;
        let router = Router::new().fallback(answer).with_state(api.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        api
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn lock(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().unwrap()
    }

    /// One slice per engine, because each has its own port here.
    pub(crate) fn set(&self, endpoints: &[(u16, Value)]) {
        let names: Vec<String> = endpoints.iter().map(|(port, _)| format!("engines-{port}")).collect();
        let gone: Vec<String> = self.lock().slices.keys().filter(|name| !names.contains(name)).cloned().collect();
        for name in gone {
            self.lock().change("DELETED", &name, None);
        }
        for ((port, endpoint), name) in endpoints.iter().zip(names) {
            let slice = json!({
                "metadata": { "name": name, "namespace": "prod", "labels": { "kubernetes.io/service-name": "engines" } },
                "addressType": "IPv4", "endpoints": [endpoint],
                "ports": [{ "name": "http", "port": port, "protocol": "TCP" }, { "name": "metrics", "port": 1 }],
            });
            let same = self.lock().slices.get(&name).is_some_and(|known| known["endpoints"] == slice["endpoints"]);
            if !same {
                self.lock().change("MODIFIED", &name, Some(slice));
            }
        }
    }

    /// Answers everything with this, and breaks all watches off.
    pub(crate) fn fail(&self, status: u16, body: &str) {
        let mut cluster = self.lock();
        cluster.fault = Some((status, body.to_owned()));
        cluster.cut();
    }

    pub(crate) fn recover(&self) {
        self.lock().fault = None;
    }

    /// Breaks all watches off.
    pub(crate) fn cut(&self) {
        self.lock().cut();
    }

    /// Ends all watches normally.
    pub(crate) fn end(&self) {
        self.lock().watchers.clear();
    }

    /// Sends this line to all watches.
    pub(crate) fn say(&self, line: &str) {
        self.lock().say(line);
    }

    /// Forgets the history: watches from earlier versions get 410.
    pub(crate) fn compact(&self) {
        let mut cluster = self.lock();
        cluster.version += 1;
        cluster.oldest = cluster.version;
        cluster.events.clear();
    }

    /// A change without an event, which only lists show.
    pub(crate) fn set_silently(&self, endpoints: &[(u16, Value)]) {
        let watchers = std::mem::take(&mut self.lock().watchers);
        self.set(endpoints);
        self.compact();
        self.lock().watchers = watchers;
    }

    pub(crate) fn lists(&self) -> usize {
        self.lock().lists
    }

    pub(crate) fn watches(&self) -> usize {
        self.lock().watches
    }

    /// The bearer tokens received.
    pub(crate) fn tokens(&self) -> Vec<String> {
        self.lock().tokens.clone()
    }
}

impl Cluster {
    fn change(&mut self, kind: &str, name: &str, slice: Option<Value>) {
        self.version += 1;
        let mut object = match slice {
            Some(slice) => slice,
            None => self.slices.remove(name).unwrap(),
        };
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if kind != "DELETED" {
            self.slices.insert(name.to_owned(), object.clone());
        }
        let line = json!({ "type": kind, "object": object }).to_string();
        self.events.push((self.version, line.clone()));
        self.say(&line);
    }

    fn say(&mut self, line: &str) {
        // In two chunks, as may happen on a network.
        let line = format!("{line}\n");
        let (first, second) = line.as_bytes().split_at(line.len() / 2);
        self.watchers.retain(|watcher| {
            watcher.send(Ok(Bytes::copy_from_slice(first))).is_ok()
                && watcher.send(Ok(Bytes::copy_from_slice(second))).is_ok()
        });
    }

    fn cut(&mut self) {
        for watcher in self.watchers.drain(..) {
            let _ = watcher.send(Err(std::io::Error::other("cut")));
        }
    }
}

async fn answer(State(api): State<Api>, request: Request) -> Response {
    if ["/health", "/v1/models"].contains(&request.uri().path()) {
        return Json(json!({})).into_response();
    }
    let mut cluster = api.lock();
    let authorization = request.headers().get("authorization");
    cluster.tokens.extend(authorization.map(|value| value.to_str().unwrap().to_owned()));
    if let Some((status, body)) = &cluster.fault {
        return (StatusCode::from_u16(*status).unwrap(), body.clone()).into_response();
    }
    assert_eq!(request.uri().path(), "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices");
    let query = request.uri().query().unwrap();
    let field = |name: &str| query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    assert_eq!(field("labelSelector"), Some("kubernetes.io%2Fservice-name%3Dengines"));
    if field("watch").is_none() {
        cluster.lists += 1;
        // One page per slice, requested in sequence.
        let at: usize = field("continue").map_or(0, |token| token.strip_prefix("page%3D").unwrap().parse().unwrap());
        let more = if at + 1 < cluster.slices.len() { format!("page={}", at + 1) } else { String::new() };
        let items: Vec<&Value> = cluster.slices.values().skip(at).take(1).collect();
        let metadata = json!({ "resourceVersion": cluster.version.to_string(), "continue": more });
        return Json(json!({ "kind": "EndpointSliceList", "metadata": metadata, "items": items })).into_response();
    }
    cluster.watches += 1;
    let from: u64 = field("resourceVersion").unwrap().parse().unwrap();
    if from < cluster.oldest {
        let status = json!({ "kind": "Status", "code": 410, "reason": "Expired" });
        return (StatusCode::GONE, Json(status)).into_response();
    }
    let (sender, receiver) = mpsc::unbounded_channel();
    for (_, line) in cluster.events.iter().filter(|(version, _)| *version > from) {
        sender.send(Ok(Bytes::from(format!("{line}\n")))).unwrap();
    }
    cluster.watchers.push(sender);
    Body::from_stream(UnboundedReceiverStream::new(receiver)).into_response()
}
