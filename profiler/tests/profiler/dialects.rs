//! Recording from SGLang and vLLM in the dialects of their versions: every route and spelling, their errors, and
//! engines that die.

use crate::common::{self, Bench};
use semmoe_mock_engine::{Dialect, Fault, SEMMOE, SGLANG_0_5_10, SGLANG_0_5_16, SGLANG_0_5_23, VLLM_0_32};
use semmoe_profiler::{ProfilerError, PromptFormat, RecordOptions};
use semmoe_tables::ModelInfo;

const ALL: [Dialect; 3] = [SGLANG_0_5_23, SGLANG_0_5_10, VLLM_0_32];

/// The second layer is dense.
fn model(num_experts: u16) -> ModelInfo {
    common::model(num_experts, 3, 1000, &[0, 2, 3])
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[tokio::test]
async fn every_version_route_and_kind_of_prompt() {
    let lines = concat!(
        r#"{"input_ids": [7, 8, 9]}"#,
        "\n",
        r#"{"prompt": "hello"}"#,
        "\n",
        r#"{"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "x"}]}"#,
        "\n"
    );
    // Above 256 experts vLLM's ids are words.
    for (dialect, num_experts) in ALL.into_iter().flat_map(|dialect| [(dialect, 8), (dialect, 300)]) {
        for (openai_routes, max_tokens) in [(false, 1), (true, 1), (false, 5), (true, 5)] {
            let bench = Bench::start(dialect, model(num_experts));
            let options = RecordOptions { openai_routes, max_tokens, ..bench.options("p.jsonl", lines.as_bytes()) };
            let report = bench.record(options).await.unwrap();
            let trace = bench.trace();
            assert_eq!((report.requests, report.prompt_tokens, report.bad.len()), (3, 3 + 5 + 6, 0));
            assert_eq!((trace.model(), trace.digest()), (&bench.engine.model, report.digest));
            for (request, prompt) in trace.iter().zip([vec![7, 8, 9], bytes("hello"), bytes("what|x")]) {
                bench.check(request, &prompt, max_tokens);
            }
            assert!(!bench.partial().exists());
        }
    }
}

/// SGLang 0.5.16 reports ids on `/generate` and of a chat's prompt, and nowhere else.
#[tokio::test]
async fn sglang_0_5_16_records_what_it_reports_ids_of() {
    let ids = r#"{"input_ids": [7, 8, 9]}"#;
    let chat = r#"{"messages": [{"role": "user", "content": "what"}]}"#;
    let text = r#"{"prompt": "hello"}"#;
    let no_prompt = "the response lacks the prompt's token ids: send ids, with --tokenizer";
    let no_output = "the response lacks the ids of the generated tokens: record with --max-tokens 1, or";
    for (line, prompt, openai_routes, max_tokens, reason) in [
        (ids, vec![7, 8, 9], false, 5, None),
        (text, bytes("hello"), false, 5, None),
        (chat, bytes("what"), false, 1, None),
        (ids, vec![7, 8, 9], true, 1, None),
        (text, bytes("hello"), true, 1, Some(no_prompt)),
        (chat, bytes("what"), false, 5, Some(no_output)),
        (ids, vec![7, 8, 9], true, 5, Some(no_output)),
    ] {
        let bench = Bench::start(SGLANG_0_5_16, model(8));
        let options = RecordOptions { openai_routes, max_tokens, ..bench.options("p.jsonl", line.as_bytes()) };
        match (bench.record(options).await, reason) {
            (Ok(_), None) => bench.check(bench.trace().request(0), &prompt, max_tokens),
            (Err(error), Some(reason)) => assert!(error.to_string().contains(reason), "{line}: {error}"),
            (found, _) => panic!("{line} {openai_routes} {max_tokens}: {found:?}"),
        }
    }
}

#[tokio::test]
async fn routes_that_depend_on_the_batch_are_reported_or_refused() {
    let ids: Vec<u32> = (0..100).collect();
    let lines = format!("{{\"input_ids\": [1, 2]}}\n{{\"input_ids\": {ids:?}}}\n");
    for dialect in [SGLANG_0_5_23, SGLANG_0_5_10, VLLM_0_32] {
        for (unsteady_tokens, differing) in [(0, Some(0)), (2, Some(2 * 9)), (5, Some(5 * 9)), (6, None)] {
            let bench = Bench::start(dialect, model(8));
            bench.engine.settings().unsteady_tokens = unsteady_tokens;
            match (bench.record(bench.options("p.jsonl", lines.as_bytes())).await, differing) {
                (Ok(report), Some(differing)) => {
                    let check = report.self_check.expect("the longest prompt was asked twice");
                    assert_eq!((check.activations, check.differing), (900, differing));
                    assert_eq!(check.is_suspicious(), unsteady_tokens > 0);
                }
                (Err(error), None) => {
                    let part = "54 of its 900 activations differ (6.0%) when it is sent with others, more than rounding explains";
                    assert!(error.to_string().contains(part), "{error}");
                }
                (found, _) => panic!("{dialect:?} {unsteady_tokens}: {found:?}"),
            }
        }
    }
}

/// SGLang 0.5.8 and 0.5.9 report slots under a placement.
#[tokio::test]
async fn physical_ids_are_refused() {
    for (version, location, refused) in [
        ("0.5.8", "trivial", false),
        ("0.5.8", "experts.json", true),
        ("0.5.9.post1", "experts.json", true),
        ("0.5.10", "experts.json", false),
    ] {
        let bench = Bench::start(SGLANG_0_5_10, model(8));
        (bench.engine.settings().version, bench.engine.settings().init_expert_location) =
            (version.to_owned(), location.to_owned());
        let recorded = bench.record(bench.options("p.jsonl", b"{\"input_ids\": [1, 2, 3]}\n")).await;
        assert_eq!(recorded.is_err(), refused, "{version} {location}");
        if let Err(error) = recorded {
            let text = error.to_string();
            assert!(text.contains("--init-expert-location experts.json reports physical slots"), "{text}");
            assert!(!error.is_input() && bench.engine.ran().is_empty());
        }
    }
}

/// The faults of a dialect's answers, and the resulting messages.
fn lies(dialect: Dialect) -> Vec<(Fault, &'static str)> {
    let vllm = dialect.is_vllm();
    let rows = if vllm {
        ["shape [11, 4, 3], expected [12, 4 or 3, 3]", "shape [13, 4, 3]"]
    } else {
        ["have 132 values, expected 12 rows", "have 156 values, expected 12 rows"]
    };
    let mut lies = vec![
        (Fault::FewerRows, rows[0]),
        (Fault::MoreRows, rows[1]),
        (Fault::ForeignExpert, "token 0 is routed to expert 8 in layer 0, expected ids below 8"),
        (Fault::SameExpertTwice, "distinct experts per token"),
        (Fault::Truncated, "routed experts"),
        (Fault::NoRoutes, "the response has no routed_experts"),
        (Fault::OtherPrompt, "saw a different prompt: 13 tokens instead of 12, first difference at 12"),
        (
            Fault::TooLong,
            "answered 400: {\"object\":\"error\",\"message\":\"This model's maximum context length is 4096 tokens",
        ),
        (Fault::Plain("503".into()), "answered 503: upstream connect error"),
        (Fault::Status(500), "answered 500: {\"error\":{\"message\":\"the engine's own words\"}}"),
        (Fault::NotJson, "unexpected response"),
    ];
    if vllm {
        lies.push((Fault::WrongShape, "shape [12, 3, 4]"));
    }
    if dialect == SEMMOE {
        lies.extend([
            (Fault::NoExpert, "token 0 has no expert in MoE layer 0, expected 3"),
            (Fault::Aborted, "aborted the request: no memory"),
            (Fault::NothingGenerated, "no token was generated"),
            (Fault::OtherPromptCount, "prompt_tokens is 102, but the prompt has 12 tokens"),
        ]);
    } else {
        lies.push((Fault::AllAlike, "every token has the same experts in every layer"));
    }
    lies
}

#[tokio::test]
async fn lies_are_named_and_left_out_in_every_dialect() {
    let ids: Vec<u32> = (0..12).collect();
    let lines = format!("{{\"input_ids\": [5, 6]}}\n{{\"input_ids\": {ids:?}}}\n{{\"input_ids\": [7]}}\n");
    for dialect in ALL.into_iter().chain([SEMMOE]) {
        let routes: &[bool] = if dialect == SEMMOE { &[false] } else { &[false, true] };
        for ((fault, reason), openai_routes) in
            lies(dialect).into_iter().flat_map(|lie| routes.iter().map(move |route| (lie.clone(), *route)))
        {
            let case = format!("{} {} {fault:?} {openai_routes}", dialect.engine, dialect.version);
            let bench = Bench::start(dialect, model(8));
            bench.fault(0, fault);
            let options = RecordOptions { openai_routes, max_bad: 0.34, ..bench.options("p.jsonl", lines.as_bytes()) };
            let report = bench.record(options.clone()).await.unwrap();
            assert_eq!((report.requests, report.bad.len()), (2, 1), "{case}");
            let reported = report.bad[0].to_string();
            assert!(reported.contains("p.jsonl line 2: ") && reported.contains(reason), "{case}: {reported}");
            bench.check(bench.trace().request(0), &[5, 6], 1);
            bench.check(bench.trace().request(1), &[7], 1);

            if report.refused > 0 {
                continue;
            }
            std::fs::remove_file(bench.out()).unwrap();
            let error = bench.record(RecordOptions { max_bad: 0.33, ..options }).await.unwrap_err();
            assert!(matches!(&error, ProfilerError::TooManyBad { bad: 1, allowed: 0, .. }), "{case}: {error}");
            let text = error.to_string();
            assert!(text.contains("p.jsonl line 2: ") && text.contains(reason), "{case}: {text}");
            assert!(!bench.out().exists());
        }
    }
}

#[tokio::test]
async fn an_engine_that_dies_half_way_is_gone_on_with() {
    for dialect in ALL {
        let bench = Bench::start(dialect, model(8));
        // Two of each, as equal prompts are different records.
        let lines: String = (0..20).map(|i| format!("{{\"input_ids\": [{}, 3]}}\n", i / 2)).collect();
        // The first request detects dense layers.
        bench.engine.settings().lives_for = 1 + 8;
        let options = RecordOptions { concurrency: 1, ..bench.options("p.jsonl", lines.as_bytes()) };
        let error = bench.record(options.clone()).await.unwrap_err();
        assert!(matches!(&error, ProfilerError::TooManyBad { bad: 1, of: 9, allowed: 0, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("8 good responses are kept in ") && text.contains("line 9: "), "{text}");
        assert!(bench.partial().exists() && !bench.path("out.trace.safetensors").exists());

        bench.engine.settings().lives_for = u64::MAX;
        bench.engine.ran();
        let report = bench.record(options).await.unwrap();
        assert_eq!((report.requests, report.resumed, report.bad.len()), (20, 8, 0));
        let trace = bench.trace();
        for (i, request) in trace.iter().enumerate() {
            bench.check(request, &[i as u32 / 2, 3], 1);
        }
        // The remaining ones, and the one that detects dense layers.
        assert_eq!(bench.engine.ran().len(), 12 + 1);
        assert!(!bench.partial().exists());
    }
}

#[tokio::test]
async fn dense_layers_that_the_configuration_does_not_tell_are_found() {
    for dialect in ALL {
        let bench = Bench::start(dialect, model(8));
        // The longest prompt is sent first; if it is too long, that hides nothing.
        bench.fault(9, Fault::TooLong);
        let lines = b"{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [9, 9, 9, 9]}\n";
        let mut options = bench.options("p.jsonl", lines);
        options.model.as_mut().unwrap().layer_ids = vec![0, 1, 2, 3];
        let report = bench.record(options).await.unwrap();
        assert_eq!((report.dense_layers, report.model), (vec![1], bench.engine.model.clone()));
        bench.check(bench.trace().request(0), &[1, 2, 3], 1);
    }
}

#[tokio::test]
async fn the_folder_that_a_local_engine_names_is_read() {
    for dialect in ALL {
        let folder = tempfile::tempdir().unwrap();
        let config = serde_json::json!({
            "num_experts": 8, "num_experts_per_tok": 3, "vocab_size": 1000, "num_hidden_layers": 4, "mlp_only_layers": [1],
        });
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let bench = Bench::start(dialect, model(8));
        bench.engine.settings().model_path = folder.path().to_str().unwrap().to_owned();
        let options = RecordOptions { model: None, ..bench.options("p.jsonl", b"{\"prompt\": \"ab\"}\n") };
        assert_eq!(bench.record(options.clone()).await.unwrap().model, bench.engine.model);
        std::fs::remove_file(folder.path().join("config.json")).unwrap();
        let error = bench.record(options).await.unwrap_err().to_string();
        assert!(error.starts_with("the engine does not report num_experts"), "{error}");
    }
}

#[tokio::test]
async fn files_of_every_form_and_what_is_wrong_in_them() {
    let bench = Bench::start(VLLM_0_32, model(8));
    let sharegpt = br#"[{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "x"}]},
        {"conversations": [{"from": "dog", "value": "w"}]}, {"conversations": [{"from": "human", "value": "you"}]}]"#;
    let text = b"first\n\nsec\xffond\nthird\n";
    let jsonl = b"{\"prompt\": \"a\"}\nnonsense\n{\"prompt\": \"b\\ud800\"}\n{\"prompt\": \"c\xff\"}\n{\"input_ids\": [1000]}\n{\"prompt\": \"z\"}\n";
    type Case<'a> = (&'a str, &'a [u8], &'a [&'a str], &'a [&'a str]);
    let cases: [Case<'_>; 3] = [
        ("p.json", sharegpt, &["hi", "you"], &["p.json conversation 1: turn 0 is from \"dog\""]),
        ("p.txt", text, &["first", "third"], &["p.txt line 3: not UTF-8"]),
        (
            "p.jsonl",
            jsonl,
            &["a", "z"],
            &["p.jsonl line 2: not JSON", "line 3: not JSON", "line 4: not JSON", "line 5: token id 1000 is not below"],
        ),
    ];
    for (name, content, prompts, reasons) in cases {
        let options = RecordOptions { max_bad: 0.7, ..bench.options(name, content) };
        let report = bench.record(options.clone()).await.unwrap();
        let reported: Vec<String> = report.bad.iter().map(ToString::to_string).collect();
        assert_eq!((report.requests, reported.len()), (prompts.len(), reasons.len()), "{reported:?}");
        assert!(reported.iter().zip(reasons).all(|(reported, reason)| reported.contains(reason)), "{reported:?}");
        for (request, prompt) in bench.trace().iter().zip(prompts) {
            bench.check(request, &bytes(prompt), 1);
        }
        let error = bench.record(RecordOptions { max_bad: 0.1, ..options }).await.unwrap_err().to_string();
        assert!(error.contains(reasons[0]) && error.contains("nothing was written"), "{error}");
    }
    let options = RecordOptions { format: PromptFormat::Text, ..bench.options("p.jsonl", b"as it is\n") };
    assert_eq!(bench.record(options).await.unwrap().prompt_tokens, 8);
}

#[tokio::test]
async fn a_partial_recording_of_something_else_is_not_mixed_in() {
    let bench = Bench::start(VLLM_0_32, model(8));
    bench.engine.settings().lives_for = 3;
    let lines = b"{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\"}\n";
    let options = RecordOptions { concurrency: 1, ..bench.options("p.jsonl", lines) };
    bench.record(options.clone()).await.unwrap_err();
    bench.engine.settings().lives_for = u64::MAX;
    let longer = RecordOptions { max_tokens: 4, ..options };
    let error = bench.record(longer.clone()).await.unwrap_err();
    assert!(error.is_input() && error.to_string().contains("max_tokens was 1 and is 4 now"), "{error}");
    let report = bench.record(RecordOptions { fresh: true, ..longer }).await.unwrap();
    assert_eq!((report.resumed, report.requests, report.tokens), (0, 3, 3 + 9));
}

/// Requests start at intervals given by the rate.
#[tokio::test]
async fn a_rate_bounds_what_is_begun() {
    let bench = Bench::start(VLLM_0_32, model(8));
    let lines: String = (0..6).map(|i| format!("{{\"input_ids\": [{i}]}}\n")).collect();
    let options = RecordOptions { rate: Some(100.0), ..bench.options("p.jsonl", lines.as_bytes()) };
    let report = bench.record(options.clone()).await.unwrap();
    assert!(report.seconds >= 0.05, "five gaps of 10 ms: {}", report.seconds);
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = bench.record(RecordOptions { rate: Some(rate), ..options.clone() }).await.unwrap_err();
        assert!(matches!(error, ProfilerError::Option { option: "rate", .. }));
    }
}
