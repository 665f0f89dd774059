//! `/metrics` as a scraper and a linter see it, and what is counted of answers.

use std::collections::{BTreeMap, BTreeSet};

use http::Method;
use serde_json::json;

use crate::support::{Client, Fixture, Fleet, TEXTS, alone, canned, metric, reloadable, settled};

const CHAT: &str = "/v1/chat/completions";
/// The `Accept` header of Prometheus 3.
const PROMETHEUS: &str = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                          application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";

#[tokio::test]
async fn the_format_is_the_one_that_is_accepted() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "").await;
    let admin = Client::admin(&gateway);
    for (accept, kind) in [
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("text/plain", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
    ] {
        let answer = admin.call(Method::GET, "/metrics", &[("accept", accept)], "").await;
        let text = answer.text();
        let is_open = accept == PROMETHEUS;
        assert_eq!((answer.header("content-type"), answer.header("vary")), (kind, "Accept"));
        assert_eq!(text.ends_with("# EOF\n"), is_open, "{accept}");
        assert_eq!(text.matches("# EOF").count(), usize::from(is_open));
        let name = if is_open { "semmoe_build" } else { "semmoe_build_info" };
        let kind = if is_open { "info" } else { "gauge" };
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{text}");
        let version = format!("semmoe_build_info{{version=\"{}\"", env!("CARGO_PKG_VERSION"));
        assert!(text.contains(&version), "{text}");
    }
    assert_eq!(
        Client::admin(&gateway).get("/metrics").await.header("content-type"),
        "text/plain; version=0.0.4; charset=utf-8"
    );
}

/// The rules of `promtool check metrics`, on a gateway with many metrics.
#[tokio::test]
async fn a_linter_finds_nothing() {
    let mut mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "[sampling]\nshare = 0.5\n[queue]\nmax_queued = 4").await;
    let (admin, data) = (Client::admin(&gateway), Client::data(&gateway));
    for (path, body) in [("/generate", json!({ "text": TEXTS[0] })), ("/v1/completions", json!({ "prompt": TEXTS[1] }))]
    {
        assert_eq!(data.post(path, body.to_string()).await.status, 200);
        mock.next().await;
    }
    data.post("/nothing", "").await;
    admin.post("/admin/reload", "").await;
    settled(&gateway).await;
    let text = String::from_utf8(admin.get("/metrics").await.body.to_vec()).unwrap();
    let (mut kinds, mut helped) = (BTreeMap::new(), BTreeSet::new());
    let mut samples = BTreeSet::new();
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, help] => assert!(!help.is_empty() && helped.insert(name), "{line}"),
            ["#", "TYPE", name, kind] => assert_eq!(kinds.insert(name, kind), None, "{line}"),
            ["#", ..] => panic!("{line}"),
            _ => {
                assert!(samples.insert(line.rsplit_once(' ').unwrap().0), "twice: {line}");
                let value: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
                assert!(value.is_finite(), "{line}");
            }
        }
    }
    assert!(kinds.len() > 30, "{kinds:?}");
    for (name, kind) in &kinds {
        assert!(helped.contains(name), "{name} has no help");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == "counter", "{name} is a {kind}");
        let reserved = ["_count", "_sum", "_bucket", "_gauge", "_counter", "_histogram", "_ms", "_milliseconds"];
        assert!(!reserved.iter().any(|end| name.ends_with(end)), "{name}");
    }
    for sample in samples {
        let name = sample.split('{').next().unwrap();
        let of_histogram = ["_bucket", "_sum", "_count"].iter().filter_map(|end| name.strip_suffix(end));
        let declared =
            kinds.contains_key(name) || of_histogram.clone().any(|name| kinds.get(name) == Some(&"histogram"));
        assert!(declared, "{sample} is declared nowhere");
    }
}

#[tokio::test]
async fn process_figures_are_there() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "").await;
    for (name, least) in [
        ("process_resident_memory_bytes", 1e6),
        ("process_virtual_memory_bytes", 1e6),
        ("process_cpu_seconds_total", 1e-4),
        ("process_open_fds", 3.0),
        ("process_max_fds", 16.0),
        ("process_threads", 1.0),
        ("process_start_time_seconds", 1.7e9),
    ] {
        let value = metric(&gateway, name).await;
        assert!(value >= least, "{name} {value}");
    }
}

#[tokio::test]
async fn streams_tokens_and_their_times_are_counted() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(2, "").await;
    let data = Client::data(&gateway);
    let stream =
        json!({ "model": "tiny", "stream": true, "messages": [{ "role": "user", "content": "x" }] }).to_string();
    let mut answer = data.open(Method::POST, CHAT, &[("x-mock", "stream")], stream).await;
    let streams = |state: &str| format!("semmoe_streams{{backend=\"pod-a\",state=\"{state}\"}}");
    mock.release(1);
    crate::support::next_frame(&mut answer).await;
    assert_eq!(metric(&gateway, &streams("running")).await, 1.0);
    mock.release(2);
    drop(http_body_util::BodyExt::collect(answer).await.unwrap());
    settled(&gateway).await;
    assert_eq!(metric(&gateway, &streams("running")).await, 0.0);
    let labels = format!("backend=\"pod-a\",model=\"tiny\",route=\"{CHAT}\"");
    // Three events and [DONE], one of which counts as the role.
    assert_eq!(metric(&gateway, &format!("semmoe_output_tokens_total{{{labels},counted=\"events\"}}")).await, 2.0);
    for name in ["time_to_first_token_seconds", "inter_token_seconds", "request_seconds"] {
        assert_eq!(metric(&gateway, &format!("semmoe_{name}_count{{{labels}}}")).await, 1.0, "{name}");
    }
    let first = metric(&gateway, &format!("semmoe_time_to_first_token_seconds_sum{{{labels}}}")).await;
    let whole = metric(&gateway, &format!("semmoe_request_seconds_sum{{{labels}}}")).await;
    assert!(first > 0.0 && first < whole, "{first} {whole}");
    assert!(metric(&gateway, &format!("semmoe_prompt_tokens_total{{{labels}}}")).await > 0.0);
    // An unstreamed answer has no first token, and counts by its engine's usage.
    let asked = json!({ "model": "small", "messages": [] }).to_string();
    assert_eq!(data.mock(CHAT, "generated 7", asked).await.status, 200);
    settled(&gateway).await;
    assert_eq!(metric(&gateway, &format!("semmoe_output_tokens_total{{{labels},counted=\"usage\"}}")).await, 7.0);
    assert_eq!(metric(&gateway, &format!("semmoe_time_to_first_token_seconds_count{{{labels}}}")).await, 1.0);
    while mock.seen.try_recv().is_ok() {}
}
