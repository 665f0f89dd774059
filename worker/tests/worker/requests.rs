//! Requests that are invalid, too large, too many, or whose client leaves.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::support::{CONTEXT, Unit, golden, greedy};
use serde_json::{Value, json};

/// A route, a body, and text that the error must contain.
type Case = (&'static str, Value, &'static str);

fn with(mut body: Value, extra: &Value) -> Value {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn wrong_generate_requests() -> Vec<Case> {
    let ids = |count: usize| json!(vec![5; count]);
    let generate = |extra: Value| with(json!({"text": "a"}), &extra);
    vec![
        ("/generate", json!([]), "must be a JSON object"),
        ("/generate", json!({}), "text or input_ids must be given"),
        ("/generate", json!({"text": ""}), "the prompt is empty"),
        ("/generate", json!({"input_ids": []}), "found an empty list"),
        ("/generate", json!({"input_ids": [10240]}), "token id 10240 is not below the vocabulary size 10240"),
        ("/generate", json!({"input_ids": [-1]}), "input_ids[0] must be a token id"),
        (
            "/generate",
            json!({"input_ids": ids(CONTEXT)}),
            "2048 tokens, which leaves no room in the model's context of 2048",
        ),
        (
            "/generate",
            json!({"input_ids": ids(2040), "sampling_params": {"max_new_tokens": 9}}),
            "2040 tokens and 9 new tokens",
        ),
        ("/generate", generate(json!({"sampling_params": {"max_new_tokens": 0}})), "at least one new token"),
        ("/generate", generate(json!({"sampling_params": {"max_new_tokens": "x"}})), "wrong type"),
        ("/generate", generate(json!({"sampling_params": {"temperature": -1}})), "temperature must be from 0 to 100"),
        ("/generate", generate(json!({"sampling_params": {"top_p": 0}})), "top_p must be above 0"),
        ("/generate", generate(json!({"sampling_params": {"top_k": -2}})), "top_k must be"),
        ("/generate", generate(json!({"sampling_params": {"n": 2}})), "n 2 is not supported"),
        ("/generate", generate(json!({"sampling_params": {"regex": "a+"}})), "regex \"a+\" is not supported"),
        (
            "/generate",
            generate(json!({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}})),
            "contradict each other",
        ),
        ("/generate", generate(json!({"sampling_params": {"stop": vec!["x"; 33]}})), "33 texts, at most 32"),
        ("/generate", generate(json!({"sampling_params": {"stop": ["x".repeat(1025)]}})), "1025 bytes"),
        ("/generate", generate(json!({"stream": "yes"})), "wrong type"),
        (
            "/generate",
            generate(json!({"return_logprob": true, "top_logprobs_num": 21})),
            "top_logprobs_num must be from 0 to 20",
        ),
        (
            "/generate",
            generate(json!({"return_logprob": true, "logprob_start_len": 0})),
            "logprob_start_len 0 is not supported",
        ),
        ("/generate", generate(json!({"temperature": 0})), "temperature is not a parameter of this route"),
        ("/generate", generate(json!({"sampling_params": {"made_up": 0}})), "made_up is not a parameter"),
        ("/generate", generate(json!({"routed_dp_rank": 2})), "must be below 2, found 2"),
        ("/generate", generate(json!({"routed_dp_rank": -1})), "'-1' is not a valid rank"),
        ("/generate", generate(json!({"routed_dp_rank": 1.5})), "'1.5' is not a valid rank"),
        ("/generate", generate(json!({"routed_dp_rank": "1"})), "is not a valid rank"),
        ("/generate", generate(json!({"data_parallel_rank": 7})), "found 7"),
    ]
}

fn wrong_openai_requests() -> Vec<Case> {
    let chat = |extra: Value| with(json!({"messages": [{"role": "user", "content": "a"}]}), &extra);
    vec![
        ("/v1/completions", json!({"prompt": 3}), "prompt must be a string"),
        ("/v1/completions", json!({"prompt": vec!["a"; 65]}), "65 prompts, more than the 64"),
        ("/v1/completions", json!({"prompt": ["a", "b"], "return_routed_experts": true}), "single prompt, found 2"),
        ("/v1/completions", json!({"prompt": "a", "echo": true}), "echo true is not supported"),
        ("/v1/completions", json!({"prompt": "a", "logprobs": 21}), "logprobs must be from 0 to 20, found 21"),
        ("/v1/completions", json!({"prompt": "a", "logprobs": true}), "logprobs must be a number"),
        ("/v1/chat/completions", chat(json!({"logprobs": 3})), "logprobs must be true or false"),
        ("/v1/chat/completions", chat(json!({"top_logprobs": 3})), "requires logprobs to be true"),
        ("/v1/chat/completions", chat(json!({"guided_json": {}})), "guided_json is not a parameter"),
        ("/v1/completions", json!({"prompt": "a", "routed_dp_rank": 9}), "must be below 2, found 9"),
        ("/v1/chat/completions", json!({"messages": []}), "found an empty list"),
        ("/v1/chat/completions", json!({"messages": [{"content": "a"}]}), "messages[0].role must be a string"),
        ("/v1/chat/completions", chat(json!({"n": 3})), "n 3 is not supported"),
        ("/v1/chat/completions", chat(json!({"prompt": "a"})), "prompt is not a parameter"),
        ("/v1/chat/completions", chat(json!({"response_format": {"type": "json_object"}})), "json_object"),
        ("/v1/chat/completions", chat(json!({"max_tokens": 3000})), "exceed the model's context of 2048"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
            ]}]}),
            "messages[0].content[1] is image_url, which is not supported",
        ),
        (
            "/tokenize",
            json!({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
            "messages[0].content[0] is input_audio",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"stream_options": {"include_it": true}})),
            "include_it is not a parameter",
        ),
        ("/tokenize", json!({"prompt": {}}), "prompt must be a string"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_requests_are_reported_what_is_wrong() {
    let unit = Unit::start(2);
    for (path, body, expected) in wrong_generate_requests().into_iter().chain(wrong_openai_requests()) {
        let (status, _, answer) = unit.ask(path, &body).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(expected), "{path} {body}: {status} {answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        assert_eq!(answer["error"]["code"], 400);
    }
    let body = json!({"prompt": "a"});
    for pin in ["x", "1.0", "-1", "2", ""] {
        assert_eq!(unit.ask_pinned("/v1/completions", &body, Some(pin)).await.0, 400, "pin {pin:?}");
    }
    let deep = "[".repeat(100_000);
    for raw in ["{", "", "\u{0}", "{\"text\": \"\\ud800\"}", &deep, &format!("{{\"text\": {deep}")] {
        let response = unit.client.send(unit.post("/generate", raw.as_bytes())).await.unwrap();
        assert_eq!(response.status(), 400, "{raw:.20}");
    }
    let response = unit.client.send(unit.post("/generate", b"{\"text\": \"\xff\"}")).await.unwrap();
    assert_eq!(response.status(), 400);
    let response = unit.client.send(unit.post("/generate", &vec![b' '; (4 << 20) + 1])).await.unwrap();
    assert_eq!(response.status(), 413);
    assert_eq!(unit.ask("/update_weights", &json!({})).await.0, 404);
    assert_eq!(unit.ask("/health", &json!({})).await.0, 405);
    // The worker is unharmed, and null equals absence.
    let prompt = &golden()[0];
    let body = with(greedy(&prompt["input_ids"], 16), &json!({"made_up": null}));
    assert_eq!(unit.ok("/generate", &body).await["output_ids"], prompt["greedy_16"]);
    unit.stop(0);
}

/// A request for each place of the table in worker/FIELDS.md, and the path of that place's fields.
fn places() -> [(&'static str, &'static str, Value, &'static str); 6] {
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    [
        ("chat", "/v1/chat/completions", chat.clone(), ""),
        ("completions", "/v1/completions", json!({"prompt": "a", "max_tokens": 1}), ""),
        ("generate", "/generate", json!({"text": "a", "sampling_params": {"max_new_tokens": 1}}), ""),
        (
            "sampling_params",
            "/generate",
            json!({"text": "a", "sampling_params": {"max_new_tokens": 1}}),
            "/sampling_params",
        ),
        ("tokenize", "/tokenize", json!({"prompt": "a"}), ""),
        (
            "stream_options",
            "/v1/chat/completions",
            with(chat, &json!({"stream": true, "stream_options": {}})),
            "/stream_options",
        ),
    ]
}

/// The values that a cell of the table lists, and one that it does not.
fn values(cell: &str) -> (Vec<Value>, Option<Value>) {
    match cell {
        "as asked" => (vec![], None),
        "any, without effect" => (vec![json!("x"), json!(7)], None),
        "`\"\", [] or {}`" => (vec![json!(""), json!([]), json!({})], Some(json!({"a": 1}))),
        cell => {
            let values = cell.trim_matches('`').split(" or ").map(|text| serde_json::from_str(text).unwrap());
            let values: Vec<Value> = values.collect();
            let other = match &values[0] {
                Value::Bool(value) => json!(!value),
                Value::Number(number) => json!(number.as_f64().unwrap() + 1.0),
                Value::Object(_) => json!({"type": "json_object"}),
                _ => json!(["other"]),
            };
            (values, Some(other))
        }
    }
}

/// The table in worker/FIELDS.md matches the worker, as a test beside it ensures: every field is sent as null, with
/// every value without effect, and with another one.
#[tokio::test(flavor = "multi_thread")]
async fn every_field_of_the_table_is_taken_or_refused_as_it_says() {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/FIELDS.md")).unwrap();
    let (_, table) = document.split_once("| taken | in requests of | fields |\n| --- | --- | --- |\n").unwrap();
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let unit = Unit::start(1);
    let (places, mut taken, mut refused) = (places(), 0, 0);
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [cell, named, fields] = cells[..] else { panic!("{row}") };
        let (good, other) = values(cell);
        for (name, field) in named.split(", ").flat_map(|name| fields.split(", ").map(move |field| (name, field))) {
            let (_, path, body, at) = places.iter().find(|(place, ..)| *place == name).unwrap();
            let send = async |value: &Value| {
                let mut body = body.clone();
                body.pointer_mut(at).unwrap()[field.trim_matches('`')] = value.clone();
                (unit.ask(path, &body).await, body)
            };
            // Some fields are required.
            let nulls = if cell == "as asked" { vec![] } else { vec![Value::Null] };
            for value in nulls.iter().chain(&good) {
                let ((status, _, answer), body) = send(value).await;
                assert_eq!(status, 200, "{path} {body}: {answer}");
                taken += 1;
            }
            if let Some(other) = &other {
                let ((status, _, answer), body) = send(other).await;
                let field = field.trim_matches('`');
                let message = answer["error"]["message"].as_str().unwrap_or_default();
                let named = answer["error"]["param"] == field && message.starts_with(&format!("{field} "));
                assert!(
                    status == 400 && named && message.contains("is not supported by this worker, only "),
                    "{body}: {answer}"
                );
                refused += 1;
            }
        }
    }
    assert!(taken > 400 && refused > 150, "{taken} taken, {refused} refused");
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_sequence() {
    let unit = Unit::start(2);
    for (stream, rank) in [(false, 0), (false, 1), (true, 1)] {
        let mut body = greedy(&json!([557, 1712, 298]), 2000);
        body["stream"] = json!(stream);
        body["routed_dp_rank"] = json!(rank);
        let before = unit.metrics().await.sum("semmoe_tokens_total", &[]);
        let mut client = TcpStream::connect(unit.url.authority()).unwrap();
        let body = body.to_string();
        write!(client, "POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        if stream {
            client.read_exact(&mut [0; 16]).unwrap();
        }
        let name = rank.to_string();
        while unit.metrics().await.sum("semmoe_requests_in_flight", &[("rank", &name)]) == 0 {
            tokio::task::yield_now().await;
        }
        drop(client);
        unit.quiet().await;
        let ran = unit.metrics().await.sum("semmoe_tokens_total", &[]) - before;
        assert!(ran < 2000, "stream {stream}, rank {rank}: the sequence ran to its end");
        let loads = unit.get("/v1/loads").await;
        assert_eq!(loads["loads"][rank]["num_used_tokens"], 0);
        assert_eq!(loads["loads"][rank]["num_running_reqs"], 0);
    }
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_rank_refuses_and_another_still_serves() {
    let unit = Unit::start_with(2, |config| {
        config.limits.running = 1;
        config.limits.waiting = 2;
    });
    let mut body = greedy(&json!([557, 1712, 298]), 1500);
    body["stream"] = json!(true);
    body["routed_dp_rank"] = json!(1);
    let mut streams = Vec::new();
    let first = unit.client.send(unit.post("/generate", body.to_string().as_bytes())).await.unwrap();
    streams.push(first);
    // Queued requests have no token yet, so their heads do not arrive: they wait in tasks.
    let mut waiting = Vec::new();
    for _ in 0..2 {
        let (client, request) = (unit.client.clone(), unit.post("/generate", body.to_string().as_bytes()));
        waiting.push(tokio::spawn(async move { client.send(request).await }));
    }
    while unit.metrics().await.sum("semmoe_requests_in_flight", &[("rank", "1")]) < 3 {
        tokio::task::yield_now().await;
    }
    let loads = unit.get("/v1/loads").await;
    assert_eq!(loads["loads"][1]["num_running_reqs"], 1);
    assert_eq!(loads["loads"][1]["num_waiting_reqs"], 2);
    assert_eq!(loads["loads"][1]["num_waiting_uncached_tokens"], 6);
    body["stream"] = json!(false);
    let (status, _, answer) = unit.ask("/generate", &body).await;
    assert_eq!(status, 503);
    assert!(answer["error"]["message"].as_str().unwrap().contains("rank 1 already has 3 running"), "{answer}");
    body["routed_dp_rank"] = json!(0);
    body["sampling_params"]["max_new_tokens"] = json!(4);
    unit.ok("/generate", &body).await;
    drop(streams);
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    unit.quiet().await;
    unit.stop(0);
}
