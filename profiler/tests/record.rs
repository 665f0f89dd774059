//! Recording from an engine that answers correctly, and from one that does not.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use semmoe_engines::Engine;
use semmoe_profiler::{NoProgress, ProfilerError, Progress, RecordOptions, record};
use semmoe_tables::{ExpertId, LayerIdx, ModelInfo, Trace, TraceRequest};

/// Whether the trace says of this request what the formula says.
fn check_request(request: TraceRequest<'_>, prompt: &[u32], max_tokens: u32) {
    let output = generated(prompt, max_tokens);
    let tokens = [prompt, &output[..output.len() - 1]].concat();
    assert_eq!(request.token_ids(), tokens);
    assert_eq!(request.prompt_len(), prompt.len());
    for (position, &token) in tokens.iter().enumerate() {
        for (index, layer) in model().layer_ids.into_iter().enumerate() {
            let route = request.route(position, LayerIdx::new(index as u16)).unwrap();
            let found: Vec<i32> = route.experts().map(|expert: ExpertId| i32::from(expert.get())).collect();
            assert_eq!(found, experts(token, layer));
        }
    }
}

#[tokio::test]
async fn routes_are_recorded_and_dense_layers_left_out() {
    let mock = Mock::start().await;
    let prompts = [vec![1], vec![2, 3, 4], vec![5, 5]];
    for max_tokens in [1, 4] {
        let mut options = mock.options(&prompts.each_ref().map(|ids| ids_line(ids)));
        options.max_tokens = max_tokens;
        let report = mock.record(options).await.unwrap();
        let trace = Trace::open(&mock.out()).unwrap();
        assert_eq!(trace.model(), &model());
        assert_eq!(trace.provenance().created, "2026-01-02T03:04:05Z");
        assert_eq!(trace.provenance().source, format!("recorded from semmoe at {}", mock.url));
        for (request, prompt) in trace.iter().zip(&prompts) {
            check_request(request, prompt, max_tokens);
        }
        let tokens = 6 + 3 * u64::from(max_tokens - 1);
        assert_eq!((report.requests, report.tokens, report.prompt_tokens), (3, tokens, 6));
        assert_eq!((report.bad.len(), report.retries, report.digest), (0, 0, trace.digest()));
    }
}

#[tokio::test]
async fn the_trace_has_the_order_of_the_file() {
    let mock = Mock::start().await;
    let prompts = [vec![first_id::WAITS, 1], vec![2], vec![first_id::RELEASES], vec![3]];
    let mut options = mock.options(&prompts.each_ref().map(|ids| ids_line(ids)));
    options.concurrency = 2;
    mock.record(options).await.unwrap();
    let trace = Trace::open(&mock.out()).unwrap();
    let recorded: Vec<Vec<u32>> = trace.iter().map(|request| request.token_ids().to_vec()).collect();
    assert_eq!(recorded, prompts);
}

#[tokio::test]
async fn texts_are_sent_as_they_are_without_a_tokenizer() {
    let mock = Mock::start().await;
    mock.record(mock.options(&[r#"{"prompt": "ab"}"#.into(), String::new(), r#"{"prompt": "c"}"#.into()]))
        .await
        .unwrap();
    let trace = Trace::open(&mock.out()).unwrap();
    check_request(trace.request(0), &[97, 98], 1);
    check_request(trace.request(1), &[99], 1);
}

#[tokio::test]
async fn lies_are_named_and_left_out() {
    let mock = Mock::start().await;
    for (id, reason) in [
        (first_id::TOO_MANY_ROWS, "hold 18 values, expected 2 rows x 3 layers x 2 experts"),
        (first_id::TOO_FEW_ROWS, "hold 6 values, expected 2 rows"),
        (first_id::EXPERT_OUT_OF_RANGE, "token 0 names expert 8 in layer 1"),
        (first_id::TRUNCATED_BASE64, "routed experts"),
        (first_id::ALWAYS_500, "answered 500: out of luck"),
        (first_id::SAME_EXPERT_TWICE, "experts distinct within a token"),
        (first_id::NO_EXPERT, "token 0 has no expert in MoE layer 2, expected 2"),
        (first_id::OTHER_PROMPT, "saw another prompt: 3 tokens instead of 2, the first difference at 2"),
        (first_id::NO_ROUTES, "routed_experts is missing"),
        (first_id::ABORTED, "aborted it: no memory"),
        (first_id::NOTHING_GENERATED, "no token was generated"),
        (first_id::OTHER_PROMPT_COUNT, "prompt_tokens is 99, but the prompt has 2 tokens"),
        (first_id::NO_JSON, "not what was expected"),
    ] {
        let mut options = mock.options(&[ids_line(&[1]), String::new(), ids_line(&[id, 9]), ids_line(&[2])]);
        options.max_bad = 0.34;
        let report = mock.record(options.clone()).await.unwrap();
        assert_eq!((report.bad.len(), report.requests, &*report.bad[0].record), (1, 2, "line 3"), "{reason}");
        assert!(report.bad[0].reason.contains(reason), "{} lacks {reason}", report.bad[0].reason);
        let trace = Trace::open(&mock.out()).unwrap();
        check_request(trace.request(0), &[1], 1);
        check_request(trace.request(1), &[2], 1);

        std::fs::remove_file(mock.out()).unwrap();
        options.max_bad = 0.33;
        let error = mock.record(options).await.unwrap_err();
        assert!(matches!(&error, ProfilerError::TooManyBad { bad: 1, allowed: 0, .. }), "{error}");
        assert!(error.to_string().contains("prompts.jsonl line 3: "), "{error}");
        assert!(error.to_string().contains(reason) && !mock.out().exists(), "{error}");
        // The good answers, if any came before.
        let _ = std::fs::remove_file(mock.partial());
    }
}

/// One prompt that is too long says nothing of the engine or of the others, whatever share of the file it is.
#[tokio::test]
async fn prompts_that_the_engine_refuses_end_nothing() {
    let mock = Mock::start().await;
    let mut options = mock.options(&[ids_line(&[first_id::REFUSED_400, 9]), ids_line(&[1]), ids_line(&[2])]);
    options.max_bad = 0.0;
    let report = mock.record(options.clone()).await.unwrap();
    assert_eq!((report.bad.len(), report.refused, report.requests, &*report.bad[0].record), (1, 1, 2, "line 1"));
    assert!(report.bad[0].reason.contains("answered 400: too long"), "{}", report.bad[0].reason);
    check_request(Trace::open(&mock.out()).unwrap().request(1), &[2], 1);

    // All of them are an error, of a long file early.
    for (prompts, asked) in [(3, 3), (1000, 101)] {
        std::fs::remove_file(mock.out()).ok();
        let mut options = mock.options(&vec![ids_line(&[first_id::REFUSED_400, 9]); prompts]);
        options.concurrency = 1;
        let error = mock.record(options).await.unwrap_err();
        assert!(matches!(error, ProfilerError::TooManyBad { bad, of, .. } if (bad, of) == (asked, asked)), "{error}");
    }
}

#[tokio::test]
async fn an_answer_without_any_good_one_is_no_trace() {
    let mock = Mock::start().await;
    let mut options = mock.options(&[ids_line(&[first_id::NO_ROUTES])]);
    options.max_bad = 1.0;
    let error = mock.record(options).await.unwrap_err().to_string();
    assert!(error.starts_with("1 of 1 records were bad") && mock.left_nothing(), "{error}");
}

#[tokio::test]
async fn errors_of_the_server_are_tried_again_and_others_are_not() {
    let mock = Mock::start().await;
    let lines = [&[first_id::TWICE_503], &[first_id::ALWAYS_500], &[first_id::REFUSED_400]].map(|ids| ids_line(ids));
    let mut options = mock.options(&lines);
    options.max_bad = 0.7;
    let report = mock.record(options).await.unwrap();
    assert_eq!((report.requests, report.bad.len(), report.retries), (1, 2, 4));
    let attempts = mock.state.attempts.lock().unwrap().clone();
    let of = |id| attempts[&id];
    assert_eq!((of(first_id::TWICE_503), of(first_id::ALWAYS_500), of(first_id::REFUSED_400)), (3, 3, 1));
}

#[tokio::test]
async fn an_engine_that_is_gone_ends_the_run_early() {
    let mut mock = Mock::start().await;
    let lines: Vec<String> = (0..50).map(|_| ids_line(&[first_id::ALWAYS_500])).collect();
    let mut options = mock.options(&lines);
    options.concurrency = 1;
    options.max_bad = 0.05;
    let error = mock.record(options).await.unwrap_err();
    assert!(matches!(error, ProfilerError::TooManyBad { bad: 3, of: 3, allowed: 2, .. }), "{error}");

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    mock.url = listener.local_addr().unwrap().into();
    drop(listener);
    let error = mock.record(mock.options(&[ids_line(&[1])])).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot connect to http://127.0.0.1:"), "{error}");
}

#[tokio::test]
async fn cancelling_drops_what_is_in_flight_and_keeps_what_is_there() {
    let mut mock = Mock::start().await;
    let mut options = mock.options(&[ids_line(&[first_id::HANGS])]);
    let error = record(options.clone(), &NoProgress, mock.state.hanging.notified()).await.unwrap_err();
    assert_eq!(error.to_string(), "cancelled: nothing was written");
    assert!(mock.left_nothing());
    mock.dropped.recv().await.unwrap();

    options = RecordOptions { concurrency: 1, ..mock.options(&[ids_line(&[1]), ids_line(&[first_id::HANGS])]) };
    let error = record(options, &NoProgress, mock.state.hanging.notified()).await.unwrap_err();
    assert!(matches!(&error, ProfilerError::Cancelled { kept } if kept.contains("goes on from there")), "{error}");
    assert!(mock.partial().exists() && !mock.out().exists());
    mock.dropped.recv().await.unwrap();
    let report = mock.record(mock.options(&[ids_line(&[3]), ids_line(&[1])])).await.unwrap();
    assert_eq!((report.requests, report.resumed), (2, 1));
    let trace = Trace::open(&mock.out()).unwrap();
    check_request(trace.request(1), &[1], 1);
    assert_eq!(mock.state.attempts.lock().unwrap()[&1], 1);
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_bad_and_not_repeated() {
    let mut mock = Mock::start().await;
    let mut options = mock.options(&[ids_line(&[first_id::HANGS])]);
    options.request_timeout = std::time::Duration::from_secs(2);
    let error = mock.record(options).await.unwrap_err().to_string();
    assert!(error.contains("did not send the whole answer within 2s"), "{error}");
    mock.dropped.recv().await.unwrap();
    assert_eq!(mock.state.attempts.lock().unwrap()[&first_id::HANGS], 1);
}

#[tokio::test]
async fn an_engine_with_a_key_gets_it_from_its_file_and_nobody_else_does() {
    let mock = Mock::start().await;
    *mock.state.key.lock().unwrap() = Some("sk-of-the-engine".into());
    let without = mock.record(mock.options(&[ids_line(&[1])])).await.unwrap_err().to_string();
    assert!(without.contains("401"), "{without}");
    let keys = tempfile::tempdir().unwrap();
    let file = keys.path().join("engine.key");
    let with = |text: &str| {
        std::fs::write(&file, text).unwrap();
        RecordOptions { api_key_file: Some(file.clone()), ..mock.options(&[ids_line(&[1])]) }
    };
    let error = mock.record(with("sk-of another")).await.unwrap_err();
    assert!(error.is_input() && error.to_string().contains("engine.key: expected one line"), "{error}");
    assert!(!error.to_string().contains("sk-of") && mock.state.attempts.lock().unwrap().is_empty());
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

/// Keeps what it is given.
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
    let mock = Mock::start().await;
    let heard = Heard::default();
    let lines: Vec<String> = (0..20).map(|id| ids_line(&[id])).collect();
    record(mock.options(&lines), &heard, std::future::pending()).await.unwrap();
    assert_eq!((heard.total.into_inner(), heard.done.into_inner()), (20, 20));
    let last = heard.messages.into_inner().unwrap().pop().unwrap();
    assert!(last.starts_with("20 tokens, ") && last.ends_with(" tokens/s, 0 s left"), "{last}");
}

#[tokio::test]
async fn what_the_engine_does_not_tell_the_caller_must() {
    let mock = Mock::start().await;
    let lines = [ids_line(&[1])];
    mock.state.info.lock().unwrap().top_k = None;
    let error = mock.record(mock.options(&lines)).await.unwrap_err().to_string();
    assert_eq!(error, "the engine does not report top_k, which a trace needs; give the model's shape");
    let mut options = mock.options(&lines);
    options.model = Some(model());
    mock.record(options.clone()).await.unwrap();
    // A checkpoint's configuration has no name: the engine's is taken.
    options.model = Some(ModelInfo { model: String::new(), ..model() });
    assert_eq!(mock.record(options.clone()).await.unwrap().model, model());

    mock.state.info.lock().unwrap().top_k = Some(3);
    let error = mock.record(options).await.unwrap_err().to_string();
    assert_eq!(error, "different models: `top_k` is 2 here and 3 there");
    mock.state.info.lock().unwrap().enable_return_routed_experts = Some(false);
    let error = mock.record(mock.options(&lines)).await.unwrap_err();
    assert!(matches!(error, ProfilerError::NoRoutedExperts));
}

#[tokio::test]
async fn wrong_options_are_reported_before_the_first_request() {
    let mock = Mock::start().await;
    let good = mock.options(&[ids_line(&[1])]);
    type Change = fn(&mut semmoe_profiler::RecordOptions);
    let cases: [(Change, &str); 8] = [
        (|o| o.engine = Engine::Openai, "openai does not report routed experts (sglang, vllm and semmoe do)"),
        (|o| o.max_tokens = 0, "max_tokens is 0, expected at least 1"),
        (|o| o.concurrency = 0, "concurrency is 0, expected at least 1"),
        (|o| o.max_prompt_tokens = Some(0), "max_prompt_tokens is 0"),
        (|o| o.max_bad = 1.5, "max_bad is 1.5, expected a share between 0 and 1"),
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
    assert!(mock.state.seen.lock().unwrap().is_empty());
}
