//! Two servers in turn: the same prompts for both, alternating order, ratios of neighbours.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use semmoe_load::{Limit, Pace};

type Log = Arc<Mutex<Vec<(char, String)>>>;

/// A server that logs its name and each prompt; every answer has `tokens` tokens.
fn server(name: char, tokens: u32, log: &Log) -> Mock {
    let log = Arc::clone(log);
    Mock::start(move |seen| {
        log.lock().unwrap().push((name, seen.json()["messages"][0]["content"].as_str().unwrap_or_default().to_owned()));
        let body =
            format!(r#"{{"choices":[{{"message":{{"content":"a"}}}}],"usage":{{"completion_tokens":{tokens}}}}}"#);
        std::future::ready(send(document("", &body)))
    })
}

#[tokio::test]
async fn blocks_alternate_and_share_their_prompts() {
    let log = Log::default();
    let (first, second) = (server('a', 10, &log), server('b', 20, &log));
    let mut options = first.options(Pace::Closed { concurrency: 1 }, Limit::Requests(6));
    options.warmup = 1;
    let url = second.url.parse().unwrap();
    let compared = semmoe_load::compare(options, url, 3, &|_| {}, std::future::pending()).await.unwrap();
    let log = std::mem::take(&mut *log.lock().unwrap());
    let asked: String = log.iter().map(|(name, _)| *name).collect();
    assert_eq!(asked, "aaabbbbbbaaaaaabbb");
    // Three prompts, one for warm-up and two measured in each block: every block sends all three.
    let prompts: Vec<_> = log.iter().map(|(_, prompt)| prompt.as_str()).collect();
    assert!(prompts.chunks(3).all(|block| block == ["one", "two", "three"]), "{prompts:?}");
    assert_eq!((compared.rounds.len(), compared.ok_and_failed()), (3, [(6, 0), (6, 0)]));
    assert!(
        compared
            .rounds
            .iter()
            .all(|round| round.first.output_tokens.told == 20 && round.second.output_tokens.told == 40)
    );
    let ratio = |name| compared.ratios.iter().find(|ratio| ratio.figure == name).unwrap();
    let (requests, tokens) = (ratio("requests/s"), ratio("output tokens/s"));
    assert!((tokens.median / requests.median - 2.0).abs() < 1e-9, "twice the tokens per request: {compared}");
    assert!(requests.least <= requests.median && requests.median <= requests.greatest);
    assert!(compared.ratios.iter().all(|ratio| !ratio.figure.starts_with("first token")), "nothing was streamed");
    let text = compared.to_string();
    assert!(text.contains("3 rounds") && text.contains("end to end, p99 ms") && text.contains(&second.url), "{text}");
}

#[tokio::test]
async fn errors_of_each_server_are_reported() {
    let log = Log::default();
    let first = server('a', 1, &log);
    let busy = Mock::with_bytes("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n");
    let options = first.options(Pace::Closed { concurrency: 1 }, Limit::Requests(4));
    let url = busy.url.parse().unwrap();
    let compared = semmoe_load::compare(options, url, 2, &|_| {}, std::future::pending()).await.unwrap();
    assert_eq!(compared.ok_and_failed(), [(4, 0), (0, 4)]);
    assert!(compared.ratios.is_empty(), "a server without answers has no figures");
    assert!(compared.to_string().contains("           4 x status 503\n"), "{compared}");
}

#[tokio::test]
async fn a_stop_leaves_out_the_round_that_is_not_complete() {
    let log = Log::default();
    let first = server('a', 1, &log);
    let stuck = Mock::start(|_| std::future::ready(vec![Step::Hang]));
    let mut options = first.options(Pace::Closed { concurrency: 1 }, Limit::Requests(4));
    options.grace = Duration::from_millis(10);
    let requests = Arc::clone(&stuck.wire.requests);
    let stop = async move {
        while requests.load(std::sync::atomic::Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    };
    let compared = semmoe_load::compare(options, stuck.url.parse().unwrap(), 2, &|_| {}, stop).await.unwrap();
    assert!(compared.stopped && compared.rounds.is_empty() && compared.ratios.is_empty());
    assert!(compared.to_string().contains("stopped before the first round"));
}

#[tokio::test]
async fn what_cannot_be_compared_is_refused() {
    let mock = Mock::with_bytes(chat(""));
    let recorded = Pace::Recorded { arrivals: mock.file("a.csv", &["0"]), speed: 1.0 };
    for (pace, limit, rounds, cause) in [
        (recorded, Limit::Arrivals, 2, "the pace of a comparison is an arrival file"),
        (Pace::Closed { concurrency: 1 }, Limit::Requests(4), 1, "rounds is 1, expected 2 to 10000"),
    ] {
        let options = mock.options(pace, limit);
        let url = mock.url.parse().unwrap();
        let error = semmoe_load::compare(options, url, rounds, &|_| {}, std::future::pending()).await.unwrap_err();
        assert!(error.to_string().contains(cause), "{error}");
    }
}
