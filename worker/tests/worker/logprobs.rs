//! Logprobs as clients see them, and the format of errors.

use crate::support::{Unit, golden};
use serde_json::{Value, json};

fn close(found: &Value, expected: f64) {
    let found = found.as_f64().unwrap();
    assert!((found - expected).abs() < 1e-3, "{found}, expected {expected}");
}

/// The tokens and logprobs of a chat's choices, whole or streamed.
fn content(choices: &[&Value]) -> Vec<Value> {
    choices.iter().filter_map(|choice| choice["logprobs"]["content"].as_array()).flatten().cloned().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dialects_tell_the_same_logprobs() {
    let unit = Unit::start(2);
    let prompt = &golden()[0];
    let ids = &prompt["input_ids"];
    let body = json!({
        "input_ids": ids, "return_logprob": true, "top_logprobs_num": 3, "stream": false,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": true},
    });
    let generate = unit.ok("/generate", &body).await["meta_info"].clone();
    let tokens = generate["output_token_logprobs"].as_array().unwrap();
    assert_eq!((tokens.len(), generate["input_token_logprobs"].as_array().unwrap().len()), (8, 0));
    for (index, token) in tokens.iter().enumerate() {
        assert_eq!(token[1], prompt["greedy_16"][index]);
        let top = generate["output_top_logprobs"][index].as_array().unwrap();
        assert_eq!((top.len(), &top[0]), (3, token), "greedy takes the likeliest");
        assert!(top[0][0].as_f64() >= top[1][0].as_f64() && top[1][0].as_f64() >= top[2][0].as_f64());
        assert!(token[0].as_f64().unwrap() < 0.0);
    }

    let completion = json!({
        "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": true, "logprobs": 3,
    });
    let logprobs = &unit.ok("/v1/completions", &completion).await["choices"][0]["logprobs"];
    for (index, token) in tokens.iter().enumerate() {
        close(&logprobs["token_logprobs"][index], token[0].as_f64().unwrap());
        assert_eq!(logprobs["top_logprobs"][index].as_object().unwrap().len(), 3);
    }
    let texts: Vec<&str> = logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    let mut offset = 0;
    for (text, found) in texts.iter().zip(logprobs["text_offset"].as_array().unwrap()) {
        assert_eq!(*found, offset);
        offset += text.chars().count();
    }
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_tells_every_token_once_also_those_held_back() {
    let unit = Unit::start(1);
    let chat = |stream: bool| {
        json!({
            "messages": [{"role": "user", "content": "a"}], "max_tokens": 12, "temperature": 0, "ignore_eos": true,
            "skip_special_tokens": false, "logprobs": true, "top_logprobs": 2, "stop": ["never found in this text"], "stream": stream,
        })
    };
    let whole = unit.ok("/v1/chat/completions", &chat(false)).await;
    let expected = content(&[&whole["choices"][0]]);
    assert_eq!(expected.len(), 12);
    let bytes: Vec<u8> = expected
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8))
        .collect();
    assert_eq!(String::from_utf8_lossy(&bytes), whole["choices"][0]["message"]["content"].as_str().unwrap());
    assert_eq!(expected[0]["top_logprobs"][0]["token"], expected[0]["token"]);

    let events = unit.stream("/v1/chat/completions", &chat(true)).await;
    let events: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let choices: Vec<&Value> = events.iter().map(|event| &event["choices"][0]).collect();
    assert_eq!(content(&choices), expected);
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_their_parameter_and_passing_ones_say_when_to_come_back() {
    let unit = Unit::start_with(1, |config| (config.limits.running, config.limits.waiting) = (1, 0));
    for (body, param) in [
        (json!({"prompt": "a", "made_up": 1}), json!("made_up")),
        (json!({"prompt": "a", "n": 2}), json!("n")),
        (json!({"prompt": "a", "temperature": -1}), json!("temperature")),
        (json!({"prompt": ""}), Value::Null),
    ] {
        let (status, _, answer) = unit.ask("/v1/completions", &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &param), "{answer}");
        let keys: Vec<&String> = answer["error"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
    }
    // One is running, which is the limit.
    let body = json!({"prompt": "a", "max_tokens": 1500, "ignore_eos": true, "stream": true});
    let first = unit.client.send(unit.post("/v1/completions", body.to_string().as_bytes())).await.unwrap();
    let second = unit.client.send(unit.post("/v1/completions", body.to_string().as_bytes())).await.unwrap();
    assert_eq!((first.status(), second.status()), (http::StatusCode::OK, http::StatusCode::SERVICE_UNAVAILABLE));
    assert_eq!(second.headers()["retry-after"], "1");
    drop(first);
    unit.quiet().await;
    unit.stop(0);
}
