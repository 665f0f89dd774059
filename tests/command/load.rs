//! `semmoe load` as an operator runs it: report, exit codes, and refusals before anything is sent.

use std::process::{Output, Stdio};
use std::sync::mpsc;

use semmoe_mock_engine::{Step, Wire, send};
use serde_json::Value;

use crate::support::{describe, json_of, run, semmoe, signal};

/// A server that answers every request with these bytes, or not at all.
struct Mock {
    url: String,
    requests: mpsc::Receiver<String>,
    _wire: Wire,
}

fn mock(answer: Option<&'static str>) -> Mock {
    let (sender, requests) = mpsc::channel();
    let wire = Wire::start(move |request| {
        // The test may have stopped receiving.
        let _ = sender.send(request.head + &String::from_utf8_lossy(&request.body));
        std::future::ready(answer.map_or_else(|| vec![Step::Hang], send))
    });
    Mock { url: wire.url(), requests, _wire: wire }
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
    2f\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
const BUSY: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";

fn prompts(folder: &tempfile::TempDir) -> String {
    let path = folder.path().join("prompts.txt");
    std::fs::write(&path, "one\ntwo\n").expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

fn load(url: &str, prompts: &str, more: &[&str]) -> Output {
    let mut args = vec!["load", "--url", url, "--prompts", prompts, "--model", "m"];
    args.extend(more);
    run(&args)
}

#[test]
fn a_run_reports_and_keeps_the_key_to_itself() {
    let (folder, mock) = (tempfile::tempdir().expect("a folder"), mock(Some(STREAM)));
    let args = ["load", "--url", &mock.url, "--prompts", &prompts(&folder), "--model", "m", "--stream", "--json"];
    let levels = ["--slo-ttft-ms", "60000", "--header", "X-Semmoe-Session: s1", "--api-key-env", "LOAD_TEST_KEY"];
    let pace = ["--concurrency", "2", "--requests", "20", "--body", "{\"temperature\": 0}"];
    let mut command = semmoe(&args);
    let output = command.args(levels).args(pace).env("LOAD_TEST_KEY", "s3cret").output().expect("starts");
    let report = json_of(&output);
    assert_eq!(report["requests"]["ok"], 20, "{report}");
    assert_eq!(report["goodput"]["share"], 1.0, "{report}");
    assert_eq!(report["loop"]["concurrency"], 2, "{report}");
    for name in ["ttft_ms", "e2e_ms"] {
        assert!(report[name]["p99.9"].as_f64().is_some_and(|value| value > 0.0), "{report}");
    }
    assert!(!describe(&output).contains("s3cret"));
    let request = mock.requests.recv().expect("a request");
    for part in
        ["post /v1/chat/completions", "authorization: bearer s3cret", "x-semmoe-session: s1", "\"temperature\":0"]
    {
        assert!(request.contains(part), "{part} in {request}");
    }
}

#[test]
fn exit_codes_follow_the_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompts = prompts(&folder);
    let busy = mock(Some(BUSY));
    let good = mock(Some(STREAM));
    let pace = ["--rate", "1000", "--requests", "5"];
    let failed = load(&busy.url, &prompts, &pace);
    assert_eq!(failed.status.code(), Some(1), "{}", describe(&failed));
    assert!(String::from_utf8_lossy(&failed.stdout).contains("5 x status 503"), "{}", describe(&failed));
    let streams = ["--stream", "--rate", "1000", "--requests", "5", "--max-errors", "0"];
    let passed = load(&good.url, &prompts, &streams);
    assert_eq!(passed.status.code(), Some(0), "{}", describe(&passed));
    assert!(String::from_utf8_lossy(&passed.stdout).contains("latencies measured from due times"));
    // A stream is not a valid answer to a request without `stream`.
    let failed = load(&good.url, &prompts, &["--concurrency", "1", "--requests", "3", "--max-errors", "0.5"]);
    assert_eq!(failed.status.code(), Some(1), "{}", describe(&failed));
}

#[test]
fn what_cannot_be_run_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (prompts, mock) = (prompts(&folder), mock(Some(STREAM)));
    let arrivals = folder.path().join("a.jsonl");
    std::fs::write(&arrivals, "{\"timestamp\": 0}\n{\"timestamp\": null}\n").expect("written");
    let arrivals = arrivals.to_str().expect("UTF-8");
    for (more, cause) in [
        (vec!["--requests", "1"], "--concurrency"),
        (vec!["--concurrency", "1"], "--requests"),
        (vec!["--concurrency", "1", "--rate", "1", "--requests", "1"], "cannot be used with"),
        (vec!["--concurrency", "1", "--requests", "1", "--duration", "1s"], "cannot be used with"),
        (vec!["--concurrency", "1", "--requests", "1", "--slo-ttft-ms", "5"], "--stream"),
        (vec!["--concurrency", "0", "--requests", "1"], "concurrency is 0"),
        (vec!["--concurrency", "1", "--duration", "soon"], "--duration"),
        (vec!["--concurrency", "1", "--requests", "1", "--cert", "a.pem"], "--key"),
        (vec!["--concurrency", "1", "--requests", "4", "--rounds", "4"], "--compare"),
        (vec!["--arrivals", arrivals, "--compare", &mock.url], "cannot be used with"),
        (vec!["--concurrency", "1", "--requests", "4", "--compare", &mock.url, "--rounds", "1"], "rounds is 1"),
        (vec!["--arrivals", arrivals], "a.jsonl line 2: invalid type: null"),
        (vec!["--concurrency", "1", "--requests", "1", "--header", "authorization: Bearer k"], "--api-key-env"),
        (vec!["--concurrency", "1", "--requests", "1", "--api-key-env", "SEMMOE_NO_SUCH"], "SEMMOE_NO_SUCH is not set"),
        (vec!["--concurrency", "1", "--requests", "1", "--body", "[]"], "--body is not a JSON object"),
        (vec!["--concurrency", "1", "--requests", "1", "--max-errors", "2"], "expected a fraction"),
    ] {
        let refused = load(&mock.url, &prompts, &more);
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {}", describe(&refused));
        assert!(String::from_utf8_lossy(&refused.stderr).contains(cause), "{more:?}: {}", describe(&refused));
        assert!(refused.stdout.is_empty());
    }
    assert!(mock.requests.try_recv().is_err(), "nothing was sent");
}

#[test]
fn two_servers_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let (prompts, one, other) = (prompts(&folder), mock(Some(STREAM)), mock(Some(STREAM)));
    let pace = ["--stream", "--concurrency", "2", "--requests", "20", "--rounds", "4", "--json"];
    let args = [&["--compare", &other.url][..], &pace].concat();
    let report = json_of(&load(&one.url, &prompts, &args));
    assert_eq!(report["rounds"].as_array().map(Vec::len), Some(4), "{report}");
    assert_eq!(report["rounds"][3]["second"]["requests"]["ok"], 5, "{report}");
    assert_eq!(report["rounds"][3]["second"]["url"], other.url, "{report}");
    assert!(report["ratios"][0]["median"].as_f64().is_some_and(|ratio| ratio > 0.0), "{report}");
}

#[test]
fn an_interrupt_ends_with_a_report() {
    let (folder, mock) = (tempfile::tempdir().expect("a folder"), mock(None));
    let args = ["load", "--url", &mock.url, "--prompts", &prompts(&folder), "--model", "m", "--json"];
    let mut command = semmoe(&args);
    command.args(["--concurrency", "3", "--duration", "1h"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("starts");
    (0..3).for_each(|_| drop(mock.requests.recv().expect("a request")));
    signal("-INT", child.id());
    let output = child.wait_with_output().expect("a child of ours");
    assert_eq!(output.status.code(), Some(130), "{}", describe(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!((&report["stopped"], &report["requests"]["unfinished"]), (&true.into(), &3.into()), "{report}");
}
