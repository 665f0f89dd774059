//! Recording from a correct engine, and from a faulty one.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{ids_line, semmoe};
use semmoe_engines::Engine;
use semmoe_mock_engine::Fault;
use semmoe_profiler::{NoProgress, ProfilerError, Progress, RecordOptions, record};
use semmoe_tables::ModelInfo;
use serde_json::{Value, json};

#[tokio::test]
async fn routes_are_recorded_and_dense_layers_left_out() {
    let mock = semmoe();
    let prompts = [vec![1], vec![2, 3, 4], vec![5, 5]];
    for max_tokens in [1, 4] {
        let mut options = mock.lines(&prompts.each_ref().map(|ids| ids_line(ids)));
        options.max_tokens = max_tokens;
        let report = mock.record(options).await.unwrap();
        let trace = mock.trace();
        assert_eq!(trace.model(), &mock.engine.model);
        assert_eq!(trace.provenance().created, "2026-01-02T03:04:05Z");
        assert_eq!(trace.provenance().source, format!("recorded from semmoe at {}", mock.url));
        for (request, prompt) in trace.iter().zip(&prompts) {
            mock.check(request, prompt, max_tokens);
        }
        let tokens = 6 + 3 * u64::from(max_tokens - 1);
        assert_eq!((report.requests, report.tokens, report.prompt_tokens), (3, tokens, 6));
        assert_eq!((report.bad.len(), report.retries, report.digest), (0, 0, trace.digest()));
    }
}

#[tokio::test]
async fn the_trace_has_the_order_of_the_file() {
    let mock = semmoe();
    mock.fault(120, Fault::Waits);
    mock.fault(121, Fault::Releases);
    let prompts = [vec![120, 1], vec![2], vec![121], vec![3]];
    let mut options = mock.lines(&prompts.each_ref().map(|ids| ids_line(ids)));
    options.concurrency = 2;
    mock.record(options).await.unwrap();
    let trace = mock.trace();
    let recorded: Vec<Vec<u32>> = trace.iter().map(|request| request.token_ids().to_vec()).collect();
    assert_eq!(recorded, prompts);
}

#[tokio::test]
async fn texts_are_sent_as_they_are_without_a_tokenizer() {
    let mock = semmoe();
    mock.record(mock.lines(&[r#"{"prompt": "ab"}"#.into(), String::new(), r#"{"prompt": "c"}"#.into()])).await.unwrap();
    let trace = mock.trace();
    mock.check(trace.request(0), &[97, 98], 1);
    mock.check(trace.request(1), &[99], 1);
}

/// One prompt that is too long says nothing about the engine or the others, whatever its share of the file.
#[tokio::test]
async fn prompts_that_the_engine_refuses_end_nothing() {
    let mock = semmoe();
    mock.fault(100, Fault::TooLong);
    let mut options = mock.lines(&[ids_line(&[100, 9]), ids_line(&[1]), ids_line(&[2])]);
    options.max_bad = 0.0;
    let report = mock.record(options.clone()).await.unwrap();
    assert_eq!((report.bad.len(), report.refused, report.requests, &*report.bad[0].record), (1, 1, 2, "line 1"));
    assert!(report.bad[0].reason.contains("maximum context length is 4096 tokens"), "{}", report.bad[0].reason);
    mock.check(mock.trace().request(1), &[2], 1);

    // If all are too long it is an error, reported early for a long file.
    for (prompts, asked) in [(3, 3), (1000, 101)] {
        std::fs::remove_file(mock.out()).ok();
        let mut options = mock.lines(&vec![ids_line(&[100, 9]); prompts]);
        options.concurrency = 1;
        let error = mock.record(options).await.unwrap_err();
        assert!(matches!(error, ProfilerError::TooManyBad { bad, of, .. } if (bad, of) == (asked, asked)), "{error}");
    }
}

#[tokio::test]
async fn an_answer_without_any_good_one_is_no_trace() {
    let mock = semmoe();
    mock.fault(100, Fault::NoRoutes);
    let mut options = mock.lines(&[ids_line(&[100])]);
    options.max_bad = 1.0;
    let error = mock.record(options).await.unwrap_err().to_string();
    assert!(error.starts_with("1 of 1 records were bad") && mock.left_nothing(), "{error}");
}

#[tokio::test]
async fn errors_of_the_server_are_tried_again_and_others_are_not() {
    let mock = semmoe();
    let faults = [Fault::BusyTwice, Fault::Status(500), Fault::Status(400)];
    for (first, fault) in (100..).zip(faults) {
        mock.fault(first, fault);
    }
    let mut options = mock.lines(&[100, 101, 102].map(|first| ids_line(&[first])));
    options.max_bad = 0.7;
    let report = mock.record(options).await.unwrap();
    assert_eq!((report.requests, report.bad.len(), report.retries), (1, 2, 4));
    assert_eq!([100, 101, 102].map(|first| mock.engine.attempts(first)), [3, 3, 1]);
}

#[tokio::test]
async fn an_engine_that_is_gone_ends_the_run_early() {
    let mut mock = semmoe();
    mock.fault(100, Fault::Status(500));
    let lines: Vec<String> = (0..50).map(|_| ids_line(&[100])).collect();
    let mut options = mock.lines(&lines);
    options.concurrency = 1;
    options.max_bad = 0.05;
    let error = mock.record(options).await.unwrap_err();
    assert!(matches!(error, ProfilerError::TooManyBad { bad: 3, of: 3, allowed: 2, .. }), "{error}");

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    mock.url = listener.local_addr().unwrap().into();
    drop(listener);
    let error = mock.record(mock.lines(&[ids_line(&[1])])).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot connect to http://127.0.0.1:"), "{error}");
}

#[tokio::test]
async fn cancelling_drops_what_is_in_flight_and_keeps_what_is_there() {
    let mut mock = semmoe();
    mock.fault(100, Fault::Hang);
    let mut options = mock.lines(&[ids_line(&[100])]);
    let error = record(options.clone(), &NoProgress, mock.engine.hanging.notified()).await.unwrap_err();
    assert_eq!(error.to_string(), "cancelled: nothing was written");
    assert!(mock.left_nothing());
    mock.engine.next_gone().await;

    options = RecordOptions { concurrency: 1, ..mock.lines(&[ids_line(&[1]), ids_line(&[100])]) };
    let error = record(options, &NoProgress, mock.engine.hanging.notified()).await.unwrap_err();
    assert!(matches!(&error, ProfilerError::Cancelled(kept) if kept.contains("to resume")), "{error}");
    assert!(mock.partial().exists() && !mock.out().exists());
    mock.engine.next_gone().await;
    let report = mock.record(mock.lines(&[ids_line(&[3]), ids_line(&[1])])).await.unwrap();
    assert_eq!((report.requests, report.resumed), (2, 1));
    let trace = mock.trace();
    mock.check(trace.request(1), &[1], 1);
    assert_eq!(mock.engine.attempts(1), 1);
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_bad_and_not_repeated() {
    let mut mock = semmoe();
    mock.fault(100, Fault::Hang);
    let mut options = mock.lines(&[ids_line(&[100])]);
    options.request_timeout = std::time::Duration::from_secs(2);
    let error = mock.record(options).await.unwrap_err().to_string();
    assert!(error.contains("did not send the whole response within 2s"), "{error}");
    mock.engine.next_gone().await;
    assert_eq!(mock.engine.attempts(100), 1);
}

#[tokio::test]
async fn an_engine_with_a_key_gets_it_from_its_file_and_nobody_else_does() {
    let mock = semmoe();
    mock.engine.settings().authorization = Some("Bearer sk-of-the-engine".into());
    let without = mock.record(mock.lines(&[ids_line(&[1])])).await.unwrap_err().to_string();
    assert!(without.contains("401"), "{without}");
    let keys = tempfile::tempdir().unwrap();
    let file = keys.path().join("engine.key");
    let with = |text: &str| {
        std::fs::write(&file, text).unwrap();
        RecordOptions { api_key_file: Some(file.clone()), ..mock.lines(&[ids_line(&[1])]) }
    };
    let error = mock.record(with("sk-of another")).await.unwrap_err();
    assert!(error.is_input() && error.to_string().contains("engine.key: expected one line"), "{error}");
    assert!(!error.to_string().contains("sk-of") && mock.engine.ran().is_empty());
    let error = mock.record(with("sk-of-another\n")).await.unwrap_err().to_string();
    assert!(error.contains("401") && !error.contains("sk-of"), "{error}");

    let heard = Heard::default();
    let options = with("sk-of-the-engine\n");
    assert!(!format!("{options:?}").contains("sk-of"));
    let report = record(options, &heard, std::future::pending()).await.unwrap();
    assert_eq!(report.requests, 1);
    let trace = std::fs::read(mock.out()).unwrap();
    assert!(!trace.windows(5).any(|bytes| bytes == b"sk-of") && !format!("{report:?}").contains("sk-of"));
    assert!(heard.messages.lock().unwrap().iter().all(|message| !message.contains("sk-of")));
}

/// Stores the messages it receives.
#[derive(Default)]
struct Heard {
    total: AtomicU64,
    done: AtomicU64,
    messages: Mutex<Vec<String>>,
}

impl Progress for Heard {
    fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }
    fn advance(&self, by: u64) {
        self.done.fetch_add(by, Ordering::Relaxed);
    }
    fn message(&self, text: &str) {
        self.messages.lock().unwrap().push(text.to_owned());
    }
}

#[tokio::test]
async fn progress_counts_every_answer() {
    let mock = semmoe();
    let heard = Heard::default();
    let lines: Vec<String> = (0..20).map(|id| ids_line(&[id])).collect();
    record(mock.lines(&lines), &heard, std::future::pending()).await.unwrap();
    assert_eq!((heard.total.into_inner(), heard.done.into_inner()), (20, 20));
    let last = heard.messages.into_inner().unwrap().pop().unwrap();
    assert!(last.starts_with("20 tokens, ") && last.ends_with(" tokens/s, 0 s left"), "{last}");
}

#[tokio::test]
async fn what_the_engine_does_not_tell_the_caller_must() {
    let mock = semmoe();
    let lines = [ids_line(&[1])];
    mock.engine.report("top_k", Value::Null);
    let error = mock.record(mock.lines(&lines)).await.unwrap_err().to_string();
    assert_eq!(error, "the engine does not report top_k, which a trace requires; pass the model's shape");
    let mut options = mock.lines(&lines);
    let model = mock.engine.model.clone();
    options.model = Some(model.clone());
    mock.record(options.clone()).await.unwrap();
    // A checkpoint's configuration has no name, so the engine's is used.
    options.model = Some(ModelInfo { model: String::new(), ..model.clone() });
    assert_eq!(mock.record(options.clone()).await.unwrap().model, model);

    mock.engine.report("top_k", json!(3));
    let error = mock.record(options).await.unwrap_err().to_string();
    assert_eq!(error, "different models: `top_k` is 2 in one and 3 in the other");
    mock.engine.report("enable_return_routed_experts", json!(false));
    let error = mock.record(mock.lines(&lines)).await.unwrap_err();
    assert!(matches!(error, ProfilerError::NoRoutedExperts));
}

#[tokio::test]
async fn wrong_options_are_reported_before_the_first_request() {
    let mock = semmoe();
    let good = mock.lines(&[ids_line(&[1])]);
    type Change = fn(&mut semmoe_profiler::RecordOptions);
    let cases: [(Change, &str); 8] = [
        (|o| o.engine = Engine::Openai, "openai does not report routed experts (sglang, vllm and semmoe do)"),
        (|o| o.max_tokens = 0, "max_tokens is 0, expected at least 1"),
        (|o| o.concurrency = 0, "concurrency is 0, expected at least 1"),
        (|o| o.max_prompt_tokens = Some(0), "max_prompt_tokens is 0"),
        (|o| o.max_bad = 1.5, "max_bad is 1.5, expected a fraction between 0 and 1"),
        (|o| o.max_bad = f64::NAN, "max_bad is NaN"),
        (|o| o.temperature = -1.0, "temperature is -1"),
        (|o| o.out = "/nonexistent/dir/out".into(), "cannot write /nonexistent/dir/out: "),
    ];
    for (change, expected) in cases {
        let mut options = good.clone();
        change(&mut options);
        let error = mock.record(options).await.unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    assert!(mock.engine.ran().is_empty());
}
