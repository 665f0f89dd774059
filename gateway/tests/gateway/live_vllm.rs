//! Sampled requests on vLLM: token ids are requested, routed experts appear if its flag is set.

use semmoe_mock_engine::VLLM_0_30;
use serde_json::{Value, json};

use crate::live::{CHAT, COMPLETIONS, Setup, TEXTS, count, engine};
use crate::support::{Client, Fixture, canned, plain_model, settled, start, tokenizer};

/// How often the body requests token ids.
fn id_questions(body: &[u8]) -> usize {
    count(body, b"\"return_token_ids\"")
}

/// `flag`: it was started with `--enable-return-routed-experts`.
async fn vllm_setup(flag: bool) -> Setup {
    let fixture = Fixture::new(2);
    let engine = engine(&fixture, VLLM_0_30);
    engine.settings().gives_routes = flag;
    let tables = fixture.write("t", &TEXTS, 0);
    let model = fixture.affinity(&engine.url(), &tables).replace("engine = \"semmoe\"", "engine = \"vllm\"\nranks = 2");
    let gateway = start(&format!("[sampling]\nshare = 1.0\n{model}")).await;
    let client = Client::data(&gateway);
    Setup { engine, gateway, client, fixture }
}

/// A body for the route, with further members.
fn vllm_body(path: &str, text: &str, more: &str) -> String {
    let text = json!(text);
    match path {
        CHAT => format!("{{\"messages\":[{{\"role\":\"user\",\"content\":{text}}}]{more}}}"),
        _ => format!("{{\"prompt\":{text}{more}}}"),
    }
}

#[tokio::test]
async fn vllm_is_asked_for_ids_and_the_client_sees_none_of_it() {
    let mut setup = vllm_setup(true).await;
    let tokens = tokenizer().encode(TEXTS[1]).unwrap();
    for (count, path) in [COMPLETIONS, CHAT].into_iter().enumerate() {
        let answer = setup.relayed(path, "local 1", &vllm_body(path, TEXTS[1], "")).await;
        assert!(!answer.header("x-semmoe-rank").is_empty());
        assert_eq!(id_questions(&setup.bodies()[0]), 1);
        setup.wait("observed", count as f64 + 1.0).await;
    }
    // One expert in four is on the pinned rank; on the other rank it would be three.
    assert_eq!(setup.metric("semmoe_observed_lar_sum", "").await, 0.5);
    let remote = setup.metric("semmoe_sampled_activations_total", ",phase=\"prompt\",place=\"remote\"").await;
    assert_eq!(remote, (2 * tokens.len() * 7 * 3) as f64);
    let decode = setup.metric("semmoe_sampled_activations_total", ",phase=\"decode\",place=\"local\"").await;
    assert_eq!(decode, 2.0 * 7.0);
    assert_eq!((setup.shown("observed_lar").await, setup.shown("sampling").await), (json!(0.25), json!("on")));
    settled(&setup.gateway).await;
}

#[tokio::test]
async fn clients_of_vllm_get_what_they_ask_for() {
    let mut setup = vllm_setup(true).await;
    let mut observed = 0.0;
    for path in [COMPLETIONS, CHAT] {
        let answer = setup.relayed(path, "", &vllm_body(path, TEXTS[0], ",\"return_token_ids\":true")).await;
        assert!(answer.text().contains("\"prompt_token_ids\":["), "{answer:?}");
        observed += 1.0;
        setup.wait("observed", observed).await;
        // In this case the gateway computes the prompt's ids.
        setup.relayed(path, "", &vllm_body(path, TEXTS[0], ",\"return_token_ids\":false")).await;
        if path == COMPLETIONS {
            observed += 1.0;
            setup.wait("observed", observed).await;
        }
    }
    // The mock applies no chat template.
    setup.wait("other_prompt", 1.0).await;
    setup.bodies();
    let body = vllm_body(CHAT, TEXTS[0], ",\"routed_experts_prompt_start\":0");
    let answer = setup.client.mock(CHAT, "", body.clone()).await;
    assert!(answer.json()["choices"][0]["routed_experts"].is_string(), "{answer:?}");
    let body = vllm_body(CHAT, TEXTS[0], ",\"stream\":true");
    setup.client.mock(CHAT, "", body).await;
    let asked: Vec<usize> = setup.bodies().iter().map(|body| id_questions(body)).collect();
    assert_eq!(asked, [0, 0]);
    assert_eq!((setup.shown("sampling").await, setup.shown("unfit").await), (json!("on"), json!(2)));
    assert_eq!(setup.outcome("unfit").await, 2.0);
}

/// If everything is streamed nothing is sampled, and the admin plane reports that.
#[tokio::test]
async fn an_operator_sees_that_streams_of_vllm_are_not_sampled() {
    let setup = vllm_setup(true).await;
    setup.client.mock(CHAT, "", vllm_body(CHAT, TEXTS[0], ",\"stream\":true")).await;
    assert_eq!((setup.shown("sampling").await, setup.shown("unfit").await), (json!("none fit"), json!(1)));
}

#[tokio::test]
async fn what_vllm_gets_wrong_is_not_believed() {
    let mut setup = vllm_setup(true).await;
    let body = vllm_body(COMPLETIONS, TEXTS[0], "");
    let clean = setup.clean(COMPLETIONS, "", &body).await;
    for (fault, outcome) in [
        ("", "observed"),
        ("more-rows", "wrong_rows"),
        ("foreign-expert", "bad_experts"),
        ("no-routes", "missing"),
        ("", "observed"),
    ] {
        let before = setup.outcome(outcome).await;
        let answer = setup.client.mock(COMPLETIONS, fault, body.clone()).await;
        assert_eq!(answer.body, clean, "{fault}");
        setup.wait(outcome, before + 1.0).await;
    }
    // Other answers show that its flag is set.
    assert_eq!(setup.metric("semmoe_sampling_refused", "").await, 0.0);
}

#[tokio::test]
async fn a_vllm_without_its_flag_is_asked_once() {
    let mut setup = vllm_setup(false).await;
    let body = vllm_body(COMPLETIONS, TEXTS[0], "");
    let clean = setup.clean(COMPLETIONS, "", &body).await;
    for _ in 0..3 {
        assert_eq!(setup.client.mock(COMPLETIONS, "", body.clone()).await.body, clean);
    }
    let asked: Vec<usize> = setup.bodies().iter().map(|body| id_questions(body)).collect();
    assert_eq!(asked, [1, 0, 0]);
    setup.wait("missing", 1.0).await;
    assert_eq!(setup.metric("semmoe_sampling_refused", "").await, 1.0);
    assert_eq!(setup.shown("sampling").await, "refused");
    settled(&setup.gateway).await;
}

/// An engine's first answer may lack them for unrelated reasons.
#[tokio::test]
async fn a_vllm_is_asked_again_when_its_answers_show_the_flag() {
    let mut setup = vllm_setup(true).await;
    for (words, asked) in [("no-routes", 1), ("", 0), ("", 1)] {
        setup.client.mock(COMPLETIONS, words, vllm_body(COMPLETIONS, TEXTS[0], "")).await;
        assert_eq!(id_questions(&setup.bodies()[0]), asked, "{words}");
        settled(&setup.gateway).await;
    }
    setup.wait("missing", 1.0).await;
    setup.wait("observed", 1.0).await;
    assert_eq!(setup.metric("semmoe_sampling_refused", "").await, 0.0);
}

/// vLLM's flag concerns the whole server: its answers carry routed experts, and clients receive them only on request.
#[tokio::test]
async fn what_vllm_tells_unasked_is_cut() {
    let mock = canned(2);
    let gateway = start(&plain_model(&mock, 2).replace("sglang", "vllm")).await;
    let client = Client::data(&gateway);
    for bytes in [3, 100_000] {
        mock.behave(&format!("experts {bytes}"));
        let answer = client.post("/v1/completions", r#"{"prompt":"a"}"#).await;
        let choice = answer.json()["choices"][0].clone();
        assert_eq!(choice["text"].as_str().unwrap().len(), bytes);
        assert_eq!((choice.get("routed_experts"), choice.get("token_ids")), (Some(&Value::Null), Some(&Value::Null)));
    }
    let answer = client.post("/v1/completions", r#"{"prompt":"a","routed_experts_prompt_start":0}"#).await;
    assert_eq!(answer.json()["choices"][0]["routed_experts"], "k05VTVBZ");
    settled(&gateway).await;
}
