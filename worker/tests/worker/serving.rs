//! The answers of a unit: golden texts, streams, pins, batches, counts.

use crate::support::{EXPERTS, LAYERS, TOP_K, Unit, golden, greedy};
use futures_util::future::join_all;
use semmoe_engines::recording;
use semmoe_tables::ModelInfo;
use serde_json::{Value, json};

/// The experts of `rows` tokens, all of which exist in the model.
fn routed_experts(data: &str, rows: usize) -> Vec<i32> {
    let model = ModelInfo {
        model: String::new(),
        tokenizer_sha256: None,
        num_experts: EXPERTS,
        top_k: TOP_K as u16,
        vocab_size: 0,
        num_hidden_layers: LAYERS as u16,
        layer_ids: (0..LAYERS as u16).collect(),
    };
    let reported = recording::decode(data, rows, &model).unwrap();
    reported.experts(&model).unwrap();
    reported.ids
}

#[tokio::test(flavor = "multi_thread")]
async fn golden_greedy_texts_come_from_one_two_and_four_ranks() {
    for world in [1, 2, 4] {
        let unit = Unit::start(world);
        for prompt in golden() {
            let answer = unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await;
            assert_eq!(answer["output_ids"], prompt["greedy_16"], "{world} ranks, prompt {}", prompt["index"]);
            assert_eq!(answer["text"], prompt["greedy_text"]);
            assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "length", "length": 16}));
            assert_eq!(answer["meta_info"]["prompt_tokens"], prompt["input_ids"].as_array().unwrap().len());
            assert_eq!(answer["meta_info"]["completion_tokens"], 16);
            assert_eq!(answer["meta_info"]["cached_tokens"], 0);
        }
        unit.end();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn routed_experts_are_the_reference_routing() {
    let unit = Unit::start(2);
    let (mut equal, mut all) = (0, 0);
    for prompt in golden() {
        let mut body = greedy(&prompt["input_ids"], 1);
        body["return_routed_experts"] = json!(true);
        body["return_prompt_token_ids"] = json!(true);
        let answer = unit.ok("/generate", &body).await;
        assert_eq!(answer["prompt_token_ids"], prompt["input_ids"]);
        let rows = prompt["input_ids"].as_array().unwrap().len();
        let data = answer["meta_info"]["routed_experts"].as_str().unwrap();
        let ids = routed_experts(data, rows);
        for (position, row) in ids.chunks_exact(LAYERS * TOP_K).enumerate() {
            for (layer, experts) in row.chunks_exact(TOP_K).enumerate() {
                all += 1;
                equal += usize::from(json!(experts) == prompt["router_topk_ids"][layer][position]);
            }
        }
        // From a position on, and with decoded tokens: one row for each but the last.
        let mut body = greedy(&prompt["input_ids"], 5);
        body["return_routed_experts"] = json!(true);
        body["routed_experts_start_len"] = json!(2);
        let answer = unit.ok("/generate", &body).await;
        let tail = answer["meta_info"]["routed_experts"].as_str().unwrap();
        let tail = routed_experts(tail, rows + 4 - 2);
        assert_eq!(tail[..(rows - 2) * LAYERS * TOP_K], ids[2 * LAYERS * TOP_K..]);
    }
    assert!(equal as f64 >= 0.995 * all as f64, "{equal} of {all} (the rest may be near ties)");
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn generate_streams_the_text_so_far() {
    let unit = Unit::start(2);
    let prompt = &golden()[0];
    let mut body = greedy(&prompt["input_ids"], 16);
    body["stream"] = json!(true);
    body["return_routed_experts"] = json!(true);
    let events = unit.stream("/generate", &body).await;
    let (done, events) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    for pair in events.windows(2) {
        assert!(pair[1]["text"].as_str().unwrap().starts_with(pair[0]["text"].as_str().unwrap()));
        assert!(pair[0]["meta_info"]["finish_reason"].is_null());
    }
    let last = events.last().unwrap();
    assert_eq!((&last["text"], &last["output_ids"]), (&prompt["greedy_text"], &prompt["greedy_16"]));
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "length");
    assert!(last["meta_info"]["routed_experts"].is_string());
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_routes_answer_and_stream_alike() {
    let unit = Unit::start(2);
    let prompt = &golden()[2];
    let chat = json!({
        "model": "any", "messages": [{"role": "user", "content": [{"type": "text", "text": prompt["text"]}]}],
        "max_completion_tokens": 16, "temperature": 0, "ignore_eos": true, "skip_special_tokens": false,
        "return_routed_experts": true, "return_input_ids_in_sglext": true, "return_output_ids_in_sglext": true,
    });
    let whole = unit.ok("/v1/chat/completions", &chat).await;
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "any");
    assert_eq!(whole["choices"][0]["message"], json!({"role": "assistant", "content": prompt["greedy_text"]}));
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(
        whole["usage"],
        json!({
            "prompt_tokens": 17, "completion_tokens": 16, "total_tokens": 33, "prompt_tokens_details": {"cached_tokens": 0},
        })
    );
    assert_eq!(whole["sglext"]["input_ids"], prompt["input_ids"]);
    assert_eq!(whole["sglext"]["output_ids"], prompt["greedy_16"]);
    let routes = whole["sglext"]["routed_experts"].as_str().unwrap();
    routed_experts(routes, 32);

    let mut streamed = chat.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = unit.stream("/v1/chat/completions", &streamed).await;
    assert_eq!(events.last().unwrap(), "[DONE]");
    let events: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, prompt["greedy_text"].as_str().unwrap());
    let [.., extension, usage] = &events[..] else { panic!("too few events") };
    assert_eq!(usage["usage"], whole["usage"]);
    assert_eq!(extension["sglext"], whole["sglext"]);

    // The usage so far, in every event about the choice.
    streamed["stream_options"]["continuous_usage_stats"] = json!(true);
    let every = unit.stream("/v1/chat/completions", &streamed).await;
    let every = every[..every.len() - 1].iter().map(|event| serde_json::from_str::<Value>(event).unwrap());
    let every: Vec<Value> = every.filter(|event| event["choices"] != json!([])).collect();
    let tokens: Vec<u64> =
        every.iter().map(|event| event["usage"]["completion_tokens"].as_u64().expect("a usage")).collect();
    assert!(tokens.is_sorted() && tokens.last() == Some(&16), "{tokens:?}");
    assert!(every.iter().all(|event| event["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]));

    let completion = json!({
        "prompt": ["The process of", "def add(a, b):\n    return"], "max_tokens": 16, "temperature": 0,
        "ignore_eos": true, "skip_special_tokens": false,
    });
    let whole = unit.ok("/v1/completions", &completion).await;
    for (index, prompt) in golden()[..2].iter().enumerate() {
        assert_eq!(whole["choices"][index]["text"], prompt["greedy_text"]);
        assert_eq!(whole["choices"][index]["index"], index);
    }
    let mut streamed = completion;
    streamed["stream"] = json!(true);
    let mut texts = [String::new(), String::new()];
    for event in unit.stream("/v1/completions", &streamed).await.iter().filter(|event| *event != "[DONE]") {
        let choice = &serde_json::from_str::<Value>(event).unwrap()["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(json!(texts), json!([golden()[0]["greedy_text"], golden()[1]["greedy_text"]]));
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_are_honoured_and_counts_are_exact() {
    let unit = Unit::start(4);
    let prompt = &golden()[0]["input_ids"];
    let tokens = |answer: &Value| {
        let info = &answer["meta_info"];
        (info["prompt_tokens"].as_u64().unwrap(), info["completion_tokens"].as_u64().unwrap() - 1)
    };
    let mut expected = [(0, 0); 4];
    for rank in [2, 0, 3, 2, 1, 2] {
        let mut body = greedy(prompt, 8);
        body["routed_dp_rank"] = json!(rank);
        let answer = unit.ok("/generate", &body).await;
        assert_eq!(answer["meta_info"]["dp_rank"], rank);
        let (prefill, decode) = tokens(&answer);
        expected[rank].0 += prefill;
        expected[rank].1 += decode;
    }
    let metrics = unit.metrics().await;
    for (rank, (prefill, decode)) in expected.into_iter().enumerate() {
        let rank = rank.to_string();
        let of = |family, label| metrics.sum(family, &[("rank", rank.as_str()), label]);
        assert_eq!(of("semmoe_tokens_total", ("phase", "prefill")), prefill);
        assert_eq!(of("semmoe_tokens_total", ("phase", "decode")), decode);
        for layer in 0..LAYERS {
            let layer = layer.to_string();
            let activations = metrics.sum("semmoe_activations_total", &[("rank", &rank), ("layer", &layer)]);
            assert_eq!(activations, (prefill + decode) * TOP_K as u64, "rank {rank}, layer {layer}");
        }
    }
    assert!(metrics.sum("semmoe_dispatch_bytes_total", &[("where", "remote")]) > 0);
    assert_eq!(metrics.sum("semmoe_requests_in_flight", &[]), 0);

    // The deprecated name; the header on the OpenAI routes, where it takes precedence; not on /generate.
    let mut body = greedy(prompt, 1);
    body["data_parallel_rank"] = json!(3);
    assert_eq!(unit.ok("/generate", &body).await["meta_info"]["dp_rank"], 3);
    let completion = json!({"prompt": "a", "max_tokens": 1, "routed_dp_rank": 1});
    assert_eq!(unit.ask("/v1/completions", &completion).await.1, Some(1));
    assert_eq!(unit.ask_pinned("/v1/completions", &completion, Some("2")).await.1, Some(2));
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    assert_eq!(unit.ask_pinned("/v1/chat/completions", &chat, Some("3")).await.1, Some(3));
    // Unpinned requests go round robin.
    let mut seen: Vec<_> = join_all((0..4).map(|_| async { unit.ask("/generate", &greedy(prompt, 1)).await.1 })).await;
    seen.sort_unstable();
    assert_eq!(seen, [Some(0), Some(1), Some(2), Some(3)]);
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_gives_what_single_requests_give() {
    let unit = Unit::start(2);
    let bodies: Vec<Value> = (0..16)
        .map(|index| {
            let golden = &golden()[index % 5];
            let mut body = greedy(&golden["input_ids"], 12);
            // Half of them sampled, each with its own seed.
            if index % 2 == 1 {
                body["sampling_params"]["temperature"] = json!(0.9);
                body["sampling_params"]["top_p"] = json!(0.9);
                body["sampling_params"]["sampling_seed"] = json!(index);
            }
            body
        })
        .collect();
    let mut single = Vec::new();
    for body in &bodies {
        single.push(unit.ok("/generate", body).await["output_ids"].clone());
    }
    let together = join_all(bodies.iter().map(|body| unit.ok("/generate", body))).await;
    let together: Vec<Value> = together.into_iter().map(|answer| answer["output_ids"].clone()).collect();
    assert_eq!(together, single);
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn long_prompts_are_prefilled_in_chunks() {
    let whole = Unit::start(1);
    let chunked = Unit::start_with(1, |config| {
        config.limits.step_tokens = 64;
        config.limits.running = 2;
    });
    let ids: Vec<u32> = (0..500).map(|i| (i * 37) % 9000 + 10).collect();
    let mut body = greedy(&json!(ids), 6);
    body["return_routed_experts"] = json!(true);
    let (a, b) = (whole.ok("/generate", &body).await, chunked.ok("/generate", &body).await);
    assert_eq!(a["output_ids"], b["output_ids"]);
    assert_eq!(a["meta_info"]["routed_experts"], b["meta_info"]["routed_experts"]);
    whole.stop(0);
    chunked.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_end_where_they_should() {
    let unit = Unit::start(1);
    // " (n + b)<|endoftext|><|im_start|>user..."
    let prompt = &golden()[1];
    let ask = |params: Value| {
        let mut params = params;
        params["temperature"] = json!(0);
        params["max_new_tokens"] = json!(16);
        json!({"input_ids": prompt["input_ids"], "sampling_params": params})
    };
    let answer = unit.ok("/generate", &ask(json!({}))).await;
    assert_eq!(answer["text"], " (n + b)");
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": 10_237}));
    assert_eq!(answer["output_ids"].as_array().unwrap().last().unwrap(), 10_237);

    let answer = unit.ok("/generate", &ask(json!({"stop": [" +", "b"]}))).await;
    assert_eq!(answer["text"], " (n");
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": " +"}));

    let answer = unit.ok("/generate", &ask(json!({"stop_token_ids": [287]}))).await;
    assert_eq!(answer["text"], " (n +");

    let answer = unit.ok("/generate", &ask(json!({"stop": "+", "min_new_tokens": 4}))).await;
    assert!(answer["text"].as_str().unwrap().starts_with(" (n + b)"), "{answer}");

    let mut streamed = ask(json!({"stop": "+ b"}));
    streamed["stream"] = json!(true);
    let events = unit.stream("/generate", &streamed).await;
    let texts: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok()).collect();
    assert!(texts.iter().all(|event| !event["text"].as_str().unwrap().contains('+')), "{events:?}");
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn seeds_repeat() {
    let unit = Unit::start(2);
    let ask =
        |seed: u64| json!({"prompt": "The", "max_tokens": 12, "temperature": 1.0, "seed": seed, "ignore_eos": true});
    let text = |answer: Value| answer["choices"][0]["text"].clone();
    let (a, b) = (unit.ok("/v1/completions", &ask(7)).await, unit.ok("/v1/completions", &ask(7)).await);
    let c = unit.ok("/v1/completions", &ask(8)).await;
    assert_eq!(text(a.clone()), text(b));
    assert_ne!(text(a), text(c));
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_unit_tells_about_itself() {
    let unit = Unit::start(2);
    let info = unit.get("/server_info").await;
    assert_eq!(info, unit.get("/get_server_info").await);
    let instructions = info["compute_instructions"].as_str().unwrap();
    assert!(["avx512", "avx2", "portable"].contains(&instructions), "{instructions}");
    assert_eq!(info["served_model_name"], "tiny-qwen3moe-15m");
    assert_eq!((&info["dp_size"], &info["ep_size"], &info["tp_size"]), (&json!(2), &json!(2), &json!(1)));
    assert_eq!(info["layer_ids"], json!([0, 1, 2, 3, 4, 5, 6]));
    assert_eq!(info["placement_digest"].as_str().unwrap().len(), 64);
    assert_eq!(info["tokenizer_sha256"].as_str().unwrap().len(), 64);
    let models = unit.get("/v1/models").await;
    assert_eq!(models["data"][0]["id"], "tiny-qwen3moe-15m");
    assert_eq!(unit.get("/v1/models/tiny-qwen3moe-15m").await, models["data"][0]);
    for other in ["gpt-5", "org%2Fname", "org/tiny-qwen3moe-15m"] {
        let get = semmoe_engines::http::request(http::Method::GET, &unit.url, &format!("/v1/models/{other}"), None);
        let response = unit.client.send(get.unwrap()).await.unwrap();
        assert_eq!(response.status(), 404, "{other}");
        let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
        let error: Value = serde_json::from_slice(&body).unwrap();
        let asked = other.replace("%2F", "/");
        assert_eq!(error["error"]["message"], format!("there is no model '{asked}' (there is: tiny-qwen3moe-15m)"));
        assert_eq!(error["error"]["code"], "model_not_found");
    }
    assert_eq!(unit.get("/model_info").await["is_generation"], true);
    assert_eq!(unit.get("/health").await["status"], "ok");
    assert_eq!(unit.get("/health_generate").await["status"], "ok");
    let loads = unit.get("/v1/loads?include=core").await;
    assert_eq!(loads["loads"].as_array().unwrap().len(), 2);
    assert_eq!(loads["loads"][1]["dp_rank"], 1);
    assert_eq!(loads["loads"][1]["num_running_reqs"], 0);
    let ids = unit.ok("/tokenize", &json!({"prompt": "The process of"})).await;
    assert_eq!(ids, json!({"tokens": [557, 1712, 298], "count": 3, "max_model_len": 2048}));
    unit.stop(0);
}
