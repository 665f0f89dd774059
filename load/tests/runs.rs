//! Runs against well-behaved servers: what is sent, when, and the report.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use semmoe_load::{Api, Limit, Pace, bearer};
use serde_json::{Value, json};
use tokio::sync::{Barrier, Notify};

/// Every answer waits until there are as many requests as clients: fewer would wait forever, more would be noticed.
#[tokio::test]
async fn a_closed_loop_keeps_exactly_so_many_in_flight() {
    const CLIENTS: usize = 6;
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (inner_most, barrier) = (Arc::clone(&most), Arc::new(Barrier::new(CLIENTS)));
    let mock = Mock::start(move |_| {
        let (now, most, barrier) = (Arc::clone(&now), Arc::clone(&inner_most), Arc::clone(&barrier));
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            barrier.wait().await;
            now.fetch_sub(1, Ordering::SeqCst);
            send(chat(""))
        }
    });
    let mut options = mock.options(Pace::Closed { concurrency: CLIENTS }, Limit::Requests(60));
    options.threads = Some(4);
    let report = run(options).await;
    assert_eq!((report.requests.ok, report.generator.most_in_flight), (60, CLIENTS));
    assert!(most.load(Ordering::SeqCst) <= CLIENTS);
    // One more to see that somebody is there.
    assert_eq!(mock.wire.connections.load(Ordering::SeqCst), CLIENTS + 1, "connections are used again");
    assert_eq!(report.generator.connections, CLIENTS as u64);
}

/// No answer before all requests have arrived: only a generator that does not wait for answers gets through.
#[tokio::test]
async fn an_open_loop_does_not_wait_for_answers() {
    for recorded in [false, true] {
        let barrier = Arc::new(Barrier::new(40));
        let mock = Mock::start(move |_| {
            let barrier = Arc::clone(&barrier);
            async move {
                barrier.wait().await;
                send(chat(""))
            }
        });
        let (pace, limit) = if recorded {
            let lines: Vec<String> = (0..40).map(|at| format!("{{\"timestamp\": {}}}", at * 100)).collect();
            let arrivals = mock.file("a.jsonl", &lines.iter().map(String::as_str).collect::<Vec<_>>());
            (Pace::Recorded { arrivals, speed: 100.0 }, Limit::Arrivals)
        } else {
            (Pace::Poisson { per_second: 2000.0, seed: 0 }, Limit::Requests(40))
        };
        let report = run(mock.options(pace, limit)).await;
        assert_eq!((report.requests.sent, report.requests.ok, report.generator.most_in_flight), (40, 40, 40));
        let (late, e2e) = (report.send_lateness_ms.unwrap(), report.e2e_ms.unwrap());
        assert_eq!((late.count, e2e.count), (40, 40));
    }
}

/// With one in flight at a time the others wait, and their latency includes at least their delay.
#[tokio::test]
async fn latencies_of_an_open_loop_count_from_when_requests_were_due() {
    let mock = Mock::with_bytes(chat(""));
    let arrivals = mock.file("a.csv", &["0"; 300]);
    let mut options = mock.options(Pace::Recorded { arrivals, speed: 1.0 }, Limit::Arrivals);
    (options.max_in_flight, options.threads) = (1, Some(1));
    let report = run(options).await;
    let (late, e2e) = (report.send_lateness_ms.unwrap(), report.e2e_ms.unwrap());
    assert_eq!((late.count, report.generator.most_in_flight), (300, 1));
    assert!(
        report.generator.held_back > 0 && report.warnings.iter().any(|note| note.contains("waited because 1 were"))
    );
    assert!(e2e.max > late.max && e2e.mean > late.mean, "{report}");
}

#[tokio::test]
async fn streams_are_timed_event_by_event_and_spread_is_reported() {
    let mock = Mock::start(|seen| {
        let usage = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":9}}\n\n";
        let role = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        let two = format!("{CONTENT}{CONTENT}");
        let text = String::from_utf8(stream(&[role, CONTENT, ": ping\n\n", &two, usage, DONE], LAST)).unwrap();
        let rank = if seen.number % 4 == 0 { "0" } else { "1" };
        let told = text.replacen("\r\n", &format!("\r\nx-semmoe-backend: pod\r\nx-semmoe-rank: {rank}\r\n"), 1);
        std::future::ready(send(told.into_bytes()))
    });
    let mut options = mock.options(Pace::Closed { concurrency: 1 }, Limit::Requests(8));
    options.stream = true;
    (options.slo.ttft_ms, options.slo.itl_ms) = (Some(60_000.0), Some(60_000.0));
    let report = run(options).await;
    assert_eq!(report.requests.ok, 8, "{report}");
    assert_eq!(report.inter_token_ms.unwrap().count, 2 * 8);
    assert_eq!((report.ttft_ms.unwrap().count, report.longest_gap_ms.unwrap().count), (8, 8));
    assert!(report.ttft_ms.unwrap().mean <= report.e2e_ms.unwrap().mean);
    assert_eq!((report.output_tokens.told, report.output_tokens.events), (72, 0));
    assert_eq!(report.ranks.requests, [("pod/0".to_owned(), 2), ("pod/1".to_owned(), 6)]);
    assert_eq!((report.ranks.max_over_mean, report.backends.max_over_mean), (Some(1.5), Some(1.0)));
    assert_eq!(report.goodput.unwrap().share, 1.0);
    let text = report.to_string();
    for part in
        ["first token", "100.0% held, first token <= 60000 ms", "ranks: 2 seen, max/mean 1.500: pod/0 2, pod/1 6"]
    {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test]
async fn tokens_that_nobody_told_are_events() {
    let mock = Mock::with_bytes(stream(&[CONTENT, CONTENT, DONE], LAST));
    let report = mock.closed(true, 5).await;
    assert_eq!((report.output_tokens.told, report.output_tokens.events), (0, 10));
    assert!(report.to_string().contains("ranks: not reported"), "{report}");
    assert!(report.warnings.iter().any(|note| note.starts_with("5 responses did not report token counts")));
}

/// Bodies, headers and the order of prompts; warm-up requests are sent and not measured; no key in the report.
#[tokio::test]
async fn what_is_sent() {
    let seen = Arc::new(Mutex::new(Vec::<(String, Value)>::new()));
    let kept = Arc::clone(&seen);
    let mock = Mock::start(move |request| {
        kept.lock().unwrap().push((request.head.clone(), request.json()));
        std::future::ready(send(document("", "{\"text\":\"a\",\"meta_info\":{\"completion_tokens\":2}}")))
    });
    let mut options = mock.options(Pace::Closed { concurrency: 1 }, Limit::Requests(4));
    (options.api, options.warmup, options.max_tokens) = (Api::Generate, 2, 5);
    options.headers.extend([bearer("s3cret").unwrap()]);
    options.extra = json!({"rid": "x"}).as_object().unwrap().clone();
    let report = run(options).await;
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let texts: Vec<_> = seen.iter().map(|(_, body)| body["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["one", "two", "three", "one", "two", "three"]);
    assert_eq!(seen[0].1, json!({"text": "one", "sampling_params": {"max_new_tokens": 5}, "rid": "x"}));
    let head = &seen[0].0;
    let authority = mock.url.strip_prefix("http://").unwrap();
    for line in
        ["post /generate http/1.1", "authorization: bearer s3cret", "x-semmoe-model: m", &format!("host: {authority}")]
    {
        assert!(head.lines().any(|found| found == line), "{line} in {head}");
    }
    assert_eq!(
        (report.requests.warmup, report.requests.sent, report.requests.ok, report.output_tokens.told),
        (2, 4, 4, 8)
    );
    let told = format!("{report}{}", serde_json::to_string(&report).unwrap());
    assert!(!told.contains("s3cret"));
    assert!(report.warnings.iter().any(|note| note.starts_with("6 requests from 3 prompts")), "{told}");
}

#[tokio::test]
async fn the_only_model_is_asked_for() {
    for (list, expected) in [
        (r#"{"data":[{"id":"solo"}]}"#, Ok("solo")),
        (r#"{"data":[{"id":"a"},{"id":"b"}]}"#, Err("serves 2 models")),
        ("{}", Err("unexpected response")),
    ] {
        let mock = Mock::start(move |seen| {
            let bytes = if seen.head.starts_with("get /v1/models") { document("", list) } else { chat("") };
            std::future::ready(send(bytes))
        });
        let mut options = mock.options(Pace::Closed { concurrency: 1 }, Limit::Requests(1));
        options.model = None;
        let report = semmoe_load::run(options, &|_| {}, std::future::pending()).await;
        match (report, expected) {
            (Ok(report), Ok(model)) => assert_eq!(report.model.as_deref(), Some(model)),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (report, _) => panic!("{list}: {report:?}"),
        }
    }
}

#[tokio::test]
async fn a_stop_ends_the_run_with_what_was_measured() {
    for open in [false, true] {
        let stuck = Arc::new(Notify::new());
        let told = Arc::clone(&stuck);
        let mock = Mock::start(move |seen| {
            let told = Arc::clone(&told);
            async move {
                if seen.number < 5 {
                    return send(chat(""));
                }
                told.notify_one();
                vec![Step::Hang]
            }
        });
        let pace = if open { Pace::Poisson { per_second: 500.0, seed: 0 } } else { Pace::Closed { concurrency: 3 } };
        let mut options = mock.options(pace, Limit::Requests(1_000_000));
        // For the first five answers, which are written but possibly not read yet.
        options.grace = Duration::from_secs(3);
        let report = semmoe_load::run(options, &|_| {}, stuck.notified()).await.unwrap();
        assert!(report.stopped && report.requests.unfinished > 0, "{report}");
        assert_eq!((report.requests.ok, report.requests.failed), (5, 0));
        assert_eq!(report.requests.sent, report.requests.unfinished + 5);
    }
}

#[tokio::test]
async fn a_duration_ends_the_run_and_is_what_rates_are_over() {
    let mock = Mock::with_bytes(chat(""));
    for pace in [Pace::Closed { concurrency: 2 }, Pace::Poisson { per_second: 500.0, seed: 0 }] {
        let mut options = mock.options(pace, Limit::Duration(Duration::from_secs(1)));
        options.warmup = 3;
        let report = run(options).await;
        assert_eq!(report.seconds, 1.0);
        assert!(report.requests.ok > 0 && report.requests.failed == 0, "{report}");
        assert!(report.requests_per_second <= (report.requests.ok + 3) as f64 + 0.5);
    }
}

/// Arrivals beyond the duration are not awaited, and rates cover only the period with requests.
#[tokio::test]
async fn a_duration_cuts_an_arrival_file_short() {
    let mock = Mock::with_bytes(chat(""));
    for (name, last, limit_ms, requests) in [("sparse.csv", "3600", 500, 2), ("short.csv", "0.1", 60_000, 3)] {
        let arrivals = mock.file(name, &["0", "0.05", last]);
        let limit = Limit::Duration(Duration::from_millis(limit_ms));
        let pace = Pace::Recorded { arrivals, speed: 1.0 };
        let report = tokio::time::timeout(Duration::from_secs(50), run(mock.options(pace, limit))).await;
        let report = report.expect("an end before the last arrival or the duration");
        assert_eq!(report.requests.ok, requests, "{report}");
        let over = if requests == 2 { 0.5..=0.5 } else { 0.1..=30.0 };
        assert!(over.contains(&report.seconds), "{name}: {} s", report.seconds);
    }
}

#[tokio::test]
async fn prompts_that_a_route_cannot_carry_are_left_out_and_told() {
    let mock = Mock::with_bytes(document("", "{\"choices\":[{\"text\":\"a\"}]}"));
    let lines = ["{\"messages\": []}", "{\"input_ids\": [1, 2]}"];
    let mut options = mock.options(Pace::Closed { concurrency: 1 }, Limit::Requests(1));
    (options.api, options.prompts) = (Api::Completions, mock.file("mixed.jsonl", &lines));
    let report = run(options.clone()).await;
    assert!(report.warnings.iter().any(|note| note.starts_with("1 prompts in the file were skipped")), "{report}");
    options.prompts = mock.file("none.jsonl", &lines[..1]);
    let error = semmoe_load::run(options, &|_| {}, std::future::pending()).await.unwrap_err().to_string();
    assert!(error.contains("contains no prompts for /v1/completions (1 of a different kind)"), "{error}");
}
