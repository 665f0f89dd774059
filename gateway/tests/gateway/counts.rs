//! Prompt tokens counted by the gateway and by the engine, and chats whose earlier turns are not encoded again.

use serde_json::json;

use crate::support::{Affine, Client, Fixture, affine, canned_as, metric, settled, start, tokenizer};

const AGREED: &str = r#"semmoe_prompt_token_counts_total{backend="pod-a",agrees="yes"}"#;
const DIFFERED: &str = r#"semmoe_prompt_token_counts_total{backend="pod-a",agrees="no"}"#;

#[tokio::test]
async fn counts_are_compared_with_the_engines() {
    let Affine { mut mock, gateway, client, fixture: _fixture, .. } =
        affine(2, &["river boat", "king queen"], "").await;
    let text = "a river boat";
    let right = tokenizer().encode(text).unwrap().len();
    let completion = json!({ "prompt": text }).to_string();
    let part = |kind: &str| json!([{ "type": "text", "text": text }, { "type": kind, kind: text }]);
    let chat = |content| json!({ "messages": [{ "role": "user", "content": content }] }).to_string();
    for (path, body, answer) in [
        ("/v1/completions", completion.clone(), format!("usage {right}")),
        ("/v1/completions", completion.clone(), format!("usage-events {right}")),
        ("/v1/completions", completion.clone(), format!("usage {}", right + 1)),
        ("/v1/chat/completions", chat(part("text")), format!("usage-events {}", right + 1000)),
        // These prove nothing: an engine without usage, two prompts, an image, a prompt that was not read.
        ("/v1/completions", completion, String::new()),
        ("/v1/completions", json!({ "prompt": [text, text] }).to_string(), format!("usage {right}")),
        ("/v1/chat/completions", chat(part("image_url")), format!("usage {right}")),
        ("/v1/embeddings", json!({ "input": text }).to_string(), format!("usage {right}")),
    ] {
        let answer = client.call(http::Method::POST, path, &[("x-mock", answer.as_str())], body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        mock.next().await;
    }
    assert_eq!((metric(&gateway, AGREED).await, metric(&gateway, DIFFERED).await), (2.0, 2.0));
    settled(&gateway).await;
}

#[tokio::test]
async fn earlier_turns_are_not_encoded_again() {
    let Affine { mock: _mock, gateway, client, fixture: _fixture, .. } =
        affine(2, &["river boat", "king queen"], "").await;
    let mut messages = Vec::new();
    let mut missed = 0.0;
    for turn in 0..8 {
        for role in ["user", "assistant"] {
            messages.push(json!({ "role": role, "content": format!("{role} in turn {turn}, of a river") }));
        }
        client.post("/v1/chat/completions", json!({ "messages": messages }).to_string()).await;
        let misses = metric(&gateway, r#"semmoe_segment_cache_misses_total{model="tiny"}"#).await;
        // The two new messages, and once the text between messages and the opened turn.
        assert!(misses - missed <= if turn == 0 { 4.0 } else { 2.0 }, "turn {turn}: {missed}, {misses}");
        missed = misses;
    }
    assert!(metric(&gateway, r#"semmoe_segment_cache_hits_total{model="tiny"}"#).await >= 60.0);
    let bytes = metric(&gateway, r#"semmoe_segment_cache_bytes{model="tiny"}"#).await;
    assert!((100.0..20_000.0).contains(&bytes), "{bytes}");
    settled(&gateway).await;
}

/// Texts that the fast library leaves to the slow one, which is not loaded: it is loaded off the network threads, and
/// the request waits for that and is scored.
#[tokio::test]
async fn a_prompt_that_needs_the_slow_library_is_scored_all_the_same() {
    let fixture = Fixture::new(2);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &["river boat", "king queen"], 0);
    // Loading the library may take longer than a request waits.
    let patient = format!("[routing]\nscore_limit_seconds = 600\n{}", fixture.affinity(&mock.url(), &tables));
    let gateway = start(&patient).await;
    let client = Client::data(&gateway);
    let text = "a river'\u{17f}'se boat";
    let usage = format!("usage {}", tokenizer().encode(text).unwrap().len());
    for _ in 0..2 {
        let body = json!({ "prompt": text }).to_string();
        let answer = client.call(http::Method::POST, "/v1/completions", &[("x-mock", usage.as_str())], body).await;
        assert_eq!((answer.status, answer.header("x-semmoe-policy")), (200, "affinity"), "{answer:?}");
        mock.next().await;
    }
    assert_eq!(metric(&gateway, AGREED).await, 2.0);
    assert_eq!(metric(&gateway, r#"semmoe_predicted_lar_count{policy="affinity"}"#).await, 2.0);
    settled(&gateway).await;
}
