//! `semmoe load` as an operator runs it: report, exit codes, what is refused before anything is sent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Output, Stdio};
use std::sync::mpsc;

use serde_json::Value;

use crate::support::{describe, json_of, run, semmoe, signal};

/// Answers every request with a short stream, or with nothing; ends with the test.
fn mock(answer: Option<&'static str>) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (sender, heads) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, sender) = (stream.expect("a connection"), sender.clone());
            std::thread::spawn(move || connection(stream, answer, &sender));
        }
    });
    (url, heads)
}

fn connection(mut stream: TcpStream, answer: Option<&str>, heads: &mpsc::Sender<String>) {
    let mut reader = BufReader::new(stream.try_clone().expect("cloned"));
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a number");
            }
            if line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        // The test may have heard enough.
        let _ = heads.send(head + &String::from_utf8_lossy(&body));
        if answer.is_some_and(|answer| stream.write_all(answer.as_bytes()).is_err()) {
            return;
        }
    }
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
    let (folder, (url, heads)) = (tempfile::tempdir().expect("a folder"), mock(Some(STREAM)));
    let args = ["load", "--url", &url, "--prompts", &prompts(&folder), "--model", "m", "--stream", "--json"];
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
    let request = heads.recv().expect("a request");
    for part in
        ["POST /v1/chat/completions", "authorization: Bearer s3cret", "x-semmoe-session: s1", "\"temperature\":0"]
    {
        assert!(request.contains(part), "{part} in {request}");
    }
}

#[test]
fn exit_codes_follow_the_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompts = prompts(&folder);
    let (busy, _heads) = mock(Some(BUSY));
    let (good, _heads) = mock(Some(STREAM));
    let pace = ["--rate", "1000", "--requests", "5"];
    let failed = load(&busy, &prompts, &pace);
    assert_eq!(failed.status.code(), Some(1), "{}", describe(&failed));
    assert!(String::from_utf8_lossy(&failed.stdout).contains("5 x status 503"), "{}", describe(&failed));
    let streams = ["--stream", "--rate", "1000", "--requests", "5", "--max-errors", "0"];
    let passed = load(&good, &prompts, &streams);
    assert_eq!(passed.status.code(), Some(0), "{}", describe(&passed));
    assert!(String::from_utf8_lossy(&passed.stdout).contains("latencies from when requests were due"));
    // A stream where none was asked for is no answer.
    let failed = load(&good, &prompts, &["--concurrency", "1", "--requests", "3", "--max-errors", "0.5"]);
    assert_eq!(failed.status.code(), Some(1), "{}", describe(&failed));
}

#[test]
fn what_cannot_be_run_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (prompts, (url, heads)) = (prompts(&folder), mock(Some(STREAM)));
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
        (vec!["--arrivals", arrivals, "--compare", &url], "cannot be used with"),
        (vec!["--concurrency", "1", "--requests", "4", "--compare", &url, "--rounds", "1"], "rounds is 1"),
        (vec!["--arrivals", arrivals], "a.jsonl line 2: invalid type: null"),
        (vec!["--concurrency", "1", "--requests", "1", "--header", "authorization: Bearer k"], "--api-key-env"),
        (vec!["--concurrency", "1", "--requests", "1", "--api-key-env", "SEMMOE_NO_SUCH"], "SEMMOE_NO_SUCH is not set"),
        (vec!["--concurrency", "1", "--requests", "1", "--body", "[]"], "--body is not a JSON object"),
        (vec!["--concurrency", "1", "--requests", "1", "--max-errors", "2"], "expected a share"),
    ] {
        let refused = load(&url, &prompts, &more);
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {}", describe(&refused));
        assert!(String::from_utf8_lossy(&refused.stderr).contains(cause), "{more:?}: {}", describe(&refused));
        assert!(refused.stdout.is_empty());
    }
    assert!(heads.try_recv().is_err(), "nothing was sent");
}

#[test]
fn two_servers_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let (prompts, (one, _heads), (other, _more)) = (prompts(&folder), mock(Some(STREAM)), mock(Some(STREAM)));
    let pace = ["--stream", "--concurrency", "2", "--requests", "20", "--rounds", "4", "--json"];
    let args = [&["--compare", &other][..], &pace].concat();
    let report = json_of(&load(&one, &prompts, &args));
    assert_eq!(report["rounds"].as_array().map(Vec::len), Some(4), "{report}");
    assert_eq!(report["rounds"][3]["second"]["requests"]["ok"], 5, "{report}");
    assert_eq!(report["rounds"][3]["second"]["url"], other, "{report}");
    assert!(report["ratios"][0]["median"].as_f64().is_some_and(|ratio| ratio > 0.0), "{report}");
}

#[test]
fn an_interrupt_ends_with_a_report() {
    let (folder, (url, heads)) = (tempfile::tempdir().expect("a folder"), mock(None));
    let args = ["load", "--url", &url, "--prompts", &prompts(&folder), "--model", "m", "--json"];
    let mut command = semmoe(&args);
    command.args(["--concurrency", "3", "--duration", "1h"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("starts");
    (0..3).for_each(|_| drop(heads.recv().expect("a request")));
    signal("-INT", child.id());
    let output = child.wait_with_output().expect("a child of ours");
    assert_eq!(output.status.code(), Some(130), "{}", describe(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!((&report["stopped"], &report["requests"]["unfinished"]), (&true.into(), &3.into()), "{report}");
}
