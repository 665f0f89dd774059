//! Traces of requests: what a collector receives, what engines receive, and that neither slows a request.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use semmoe_gateway::Running;
use serde_json::{Value, json};

use crate::support::{Client, Fixture, Mock, PATIENCE, TEXTS, canned, metric, reloadable};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A collector that answers with a status, and keeps what it received.
struct Collector {
    url: String,
    documents: Arc<Mutex<Vec<Bytes>>>,
}

impl Collector {
    async fn start(status: StatusCode) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let documents: Arc<Mutex<Vec<Bytes>>> = Arc::default();
        let take = move |State(documents): State<Arc<Mutex<Vec<Bytes>>>>, headers: HeaderMap, body: Bytes| async move {
            assert_eq!(headers["content-type"], "application/json");
            documents.lock().unwrap().push(body);
            (status, "{}").into_response()
        };
        let router = Router::new().route("/v1/traces", post(take)).with_state(Arc::clone(&documents));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, documents }
    }

    /// All spans so far.
    fn spans(&self) -> Vec<Value> {
        let documents = self.documents.lock().unwrap();
        let documents = documents.iter().map(|body| serde_json::from_slice::<Value>(body).unwrap());
        let spans = documents.flat_map(|document| {
            let resource = &document["resourceSpans"][0];
            let service = json!({ "key": "service.name", "value": { "stringValue": "semmoe-gateway" } });
            assert_eq!(resource["resource"]["attributes"][0], service);
            resource["scopeSpans"][0]["spans"].as_array().unwrap().clone()
        });
        spans.collect()
    }
}

async fn gateway(mock: &Mock, fixture: &Fixture, collector: &str, ratio: f64) -> Running {
    reloadable(mock, fixture, &format!("[tracing]\notlp = \"{collector}\"\nratio = {ratio}")).await
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let attributes = span["attributes"].as_array().unwrap();
    let found = attributes.iter().find(|attribute| attribute["key"] == key);
    &found.unwrap_or_else(|| panic!("no {key} in {span}"))["value"]
}

fn named<'a>(spans: &'a [Value], name: &str) -> &'a Value {
    spans.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("no {name} in {spans:?}"))
}

async fn ask(gateway: &Running, headers: &[(&str, &str)]) -> u16 {
    let body = json!({ "text": TEXTS[0] }).to_string();
    Client::data(gateway).call(Method::POST, "/generate", headers, body).await.status
}

#[tokio::test]
async fn a_request_is_four_spans_and_the_engine_is_reported() {
    let mut mock = canned(2);
    let (fixture, collector) = (Fixture::new(2), Collector::start(StatusCode::OK).await);
    let gateway = gateway(&mock, &fixture, &collector.url, 0.0).await;
    // No client requests a trace, and the share is 0.
    assert_eq!(ask(&gateway, &[]).await, 200);
    assert!(!mock.next().await.headers.contains_key("traceparent"));
    assert_eq!(ask(&gateway, &[("traceparent", PARENT), ("tracestate", "a=b")]).await, 200);
    let reported = mock.next().await.headers;
    gateway.shutdown(PATIENCE).await;
    let spans = collector.spans();
    assert_eq!(spans.len(), 4, "{spans:?}");
    let (request, upstream) = (named(&spans, "request"), named(&spans, "upstream"));
    assert_eq!((&request["parentSpanId"], &request["kind"]), (&json!("00f067aa0ba902b7"), &json!(2)));
    assert_eq!(upstream["kind"], 3);
    for span in &spans {
        assert_eq!(span["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
        let nanos = |field: &str| span[field].as_str().unwrap().parse::<u64>().unwrap();
        assert!(nanos("startTimeUnixNano") <= nanos("endTimeUnixNano"));
        assert_eq!(span["status"], json!({}));
        if span["name"] != "request" {
            assert_eq!(span["parentSpanId"], request["spanId"]);
        }
    }
    let expected = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", upstream["spanId"].as_str().unwrap());
    assert_eq!(
        (reported["traceparent"].to_str().unwrap(), reported["tracestate"].to_str().unwrap()),
        (expected.as_str(), "a=b")
    );
    assert_eq!(attribute(request, "http.route"), &json!({ "stringValue": "/generate" }));
    assert_eq!(attribute(request, "http.response.status_code"), &json!({ "intValue": "200" }));
    assert_eq!(attribute(request, "semmoe.generation"), &json!({ "intValue": "1" }));
    assert_eq!(attribute(request, "gen_ai.operation.name"), &json!({ "stringValue": "text_completion" }));
    assert_eq!(attribute(request, "gen_ai.request.model"), attribute(request, "semmoe.model"));
    let read = &attribute(named(&spans, "score"), "semmoe.prompt_tokens");
    assert_eq!(attribute(request, "gen_ai.usage.input_tokens"), *read);
    assert_eq!(attribute(upstream, "semmoe.rank"), &json!({ "intValue": "0" }));
    assert_eq!(attribute(named(&spans, "route"), "semmoe.policy"), &json!({ "stringValue": "affinity" }));
    assert_eq!(attribute(named(&spans, "score"), "semmoe.scored"), &json!({ "boolValue": true }));
    for document in collector.documents.lock().unwrap().iter() {
        let text = String::from_utf8(document.to_vec()).unwrap();
        assert!(TEXTS[0].split(' ').all(|word| !text.contains(word)), "the prompt is in {text}");
    }
}

/// A decision not to sample a trace holds for every later hop.
#[tokio::test]
async fn what_the_client_does_not_trace_is_passed_on_and_not_traced() {
    let mut mock = canned(2);
    let (fixture, collector) = (Fixture::new(2), Collector::start(StatusCode::OK).await);
    let gateway = gateway(&mock, &fixture, &collector.url, 1.0).await;
    let unsampled = PARENT.replace("-01", "-00");
    assert_eq!(ask(&gateway, &[("traceparent", unsampled.as_str())]).await, 200);
    assert_eq!(mock.next().await.headers["traceparent"], unsampled.as_str());
    // An invalid traceparent begins a new trace, and its tracestate is dropped.
    assert_eq!(ask(&gateway, &[("traceparent", "00-nonsense"), ("tracestate", "a=b")]).await, 200);
    let reported = mock.next().await.headers;
    assert!(!reported.contains_key("tracestate") && reported["traceparent"].to_str().unwrap().ends_with("-01"));
    gateway.shutdown(PATIENCE).await;
    let spans = collector.spans();
    assert_eq!(spans.len(), 4);
    assert_eq!(named(&spans, "request")["parentSpanId"], "");
}

#[tokio::test]
async fn failures_are_marked() {
    let mut mock = canned(2);
    let (fixture, collector) = (Fixture::new(2), Collector::start(StatusCode::OK).await);
    let gateway = gateway(&mock, &fixture, &collector.url, 1.0).await;
    assert_eq!(ask(&gateway, &[("x-mock", "500")]).await, 500);
    mock.kill();
    assert!(ask(&gateway, &[]).await >= 500);
    gateway.shutdown(PATIENCE).await;
    let spans = collector.spans();
    for name in ["request", "upstream"] {
        let failed = spans.iter().filter(|span| span["name"] == name && span["status"]["code"] == 2);
        assert_eq!(failed.count(), 2, "{name}: {spans:?}");
    }
}

/// A collector that is away, or rejects the spans, does not affect requests.
#[tokio::test]
async fn spans_that_nobody_takes_are_counted() {
    let mock = canned(2);
    for (status, outcome) in
        [(Some(StatusCode::BAD_REQUEST), "failed"), (None, "failed"), (Some(StatusCode::OK), "exported")]
    {
        let fixture = Fixture::new(2);
        let collector = match status {
            Some(status) => Collector::start(status).await.url,
            // No process listens there: the port was free a moment ago.
            None => {
                let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
                format!("http://{}", listener.local_addr().unwrap())
            }
        };
        let gateway = gateway(&mock, &fixture, &collector, 1.0).await;
        for _ in 0..3 {
            assert_eq!(ask(&gateway, &[]).await, 200);
        }
        let line = format!("semmoe_spans_total{{outcome=\"{outcome}\"}}");
        let wait = async { while metric(&gateway, &line).await < 12.0 {} };
        tokio::time::timeout(PATIENCE, wait).await.expect("counted in time");
    }
}

/// Without a collector a client's trace context passes through to the engine.
#[tokio::test]
async fn without_a_collector_traces_pass_through() {
    let mut mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "").await;
    assert_eq!(ask(&gateway, &[("traceparent", PARENT), ("tracestate", "a=b")]).await, 200);
    let reported = mock.next().await.headers;
    assert_eq!((reported["traceparent"].to_str().unwrap(), reported["tracestate"].to_str().unwrap()), (PARENT, "a=b"));
}
