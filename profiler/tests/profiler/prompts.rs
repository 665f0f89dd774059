//! The requests for each kind of line; problems in a file are reported before the first request.

use std::path::{Path, PathBuf};

use crate::common::{ids_line, semmoe};
use semmoe_text::{Budget, ChatTemplate, Given, Tokenizer};
use serde_json::json;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m")
}

#[tokio::test]
async fn with_a_tokenizer_ids_are_sent_and_messages_win() {
    let mut mock = semmoe();
    let messages = json!([{"role": "user", "content": "Hello there"}]);
    let lines = [
        json!({"prompt": "the last turn only", "messages": messages, "input_ids": [7]}),
        json!({"prompt": "plain text, somewhat longer"}),
        json!({"prompt": "ignored", "input_ids": [5, 6, 7, 8], "messages": null}),
    ];
    let tokenizer = Tokenizer::from_file(&bundled().join("tokenizer.json")).unwrap();
    let template = ChatTemplate::beside(&bundled().join("tokenizer.json"), || 0).unwrap();
    let chat = tokenizer.encode(&template.render(&messages, Given::default(), Budget::default()).unwrap()).unwrap();
    let plain = tokenizer.encode("plain text, somewhat longer").unwrap();
    for cut in [None, Some(3)] {
        let mut options = mock.lines(&lines.each_ref().map(ToString::to_string));
        options.tokenizer = Some(bundled());
        options.max_prompt_tokens = cut;
        mock.record(options).await.unwrap();
        let trace = mock.trace();
        let most = cut.unwrap_or(usize::MAX);
        for (request, expected) in trace.iter().zip([&chat, &plain, &vec![5, 6, 7, 8]]) {
            assert_eq!(request.token_ids(), &expected[..expected.len().min(most)]);
        }
        assert_eq!(trace.model().tokenizer_sha256.as_deref(), Some(tokenizer.sha256()));
    }
    while let Ok(seen) = mock.engine.seen.try_recv() {
        assert!(seen.json().get("text").is_none());
    }
}

#[tokio::test]
async fn a_tokenizer_that_is_not_the_engines_is_refused() {
    let mock = semmoe();
    let mut options = mock.lines(&[ids_line(&[1])]);
    options.tokenizer = Some(bundled());
    mock.engine.report("tokenizer_sha256", json!("ab".repeat(32)));
    let error = mock.record(options.clone()).await.unwrap_err().to_string();
    assert!(error.contains("is not the engine's: its hash is "), "{error}");
    mock.engine.report("tokenizer_sha256", json!(null));
    mock.engine.report("vocab_size", json!(100));
    let error = mock.record(options).await.unwrap_err().to_string();
    assert!(error.contains("the model's vocabulary size is 100"), "{error}");
}

#[tokio::test]
async fn wrong_lines_are_named() {
    let mock = semmoe();
    let good = ids_line(&[1]);
    for (line, cause) in [
        ("{", "not JSON: "),
        ("[]", "not a JSON object"),
        ("{}", "none of messages, input_ids and prompt"),
        (r#"{"prompt": 5}"#, "prompt is not a string"),
        (r#"{"prompt": ""}"#, "the prompt is empty"),
        (r#"{"input_ids": []}"#, "the prompt is empty"),
        (r#"{"input_ids": [1, -1]}"#, "input_ids is not a list of token ids"),
        (r#"{"input_ids": [4294967296]}"#, "input_ids is not a list of token ids"),
        (r#"{"input_ids": [20000]}"#, "token id 20000 is not below the vocabulary size (20000)"),
        (r#"{"messages": []}"#, "the prompt is empty"),
        (r#"{"messages": "x"}"#, "the prompt is empty"),
    ] {
        let error = mock.record(mock.lines(&[good.clone(), String::new(), line.into()])).await.unwrap_err().to_string();
        assert!(error.contains("prompts.jsonl line 3: ") && error.contains(cause), "{error}");
    }
    let mut options = mock.lines(&[r#"{"prompt": "x"}"#.into()]);
    options.max_prompt_tokens = Some(3);
    let error = mock.record(options).await.unwrap_err().to_string();
    assert!(error.ends_with("line 1: truncating text to a token limit requires a tokenizer"), "{error}");
    let error = mock.record(mock.lines(&[String::new()])).await.unwrap_err().to_string();
    assert!(error.ends_with("prompts.jsonl contains no prompt"), "{error}");
    assert!(mock.engine.ran().is_empty());
}

#[tokio::test]
async fn only_the_first_prompts_are_taken_when_told() {
    let mock = semmoe();
    let mut options = mock.lines(&[ids_line(&[1]), ids_line(&[2]), "not read".into()]);
    options.max_prompts = Some(2);
    assert_eq!(mock.record(options).await.unwrap().requests, 2);
}
