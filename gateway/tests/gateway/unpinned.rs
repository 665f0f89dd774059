//! Engines with too little known about their ranks: they serve, routed by load, and are asked again.

use semmoe_gateway::{Gateway, Running};
use semmoe_mock_engine::VLLM_0_32;
use serde_json::{Value, json};

use crate::support::{
    Client, Fixture, Mock, PATIENCE, canned, canned_as, config, metric, metrics, plain_model, ranked, settled, sglang,
    start, until_shown,
};

const COMPLETIONS: &str = "/v1/completions";
const UNPINNED: &str = "semmoe_backend_unpinned{backend=\"pod-a\",reason=\"ranks unknown\"}";

async fn pins(gateway: &Running) -> Value {
    Client::admin(gateway).get("/admin/backends").await.json()["backends"][0]["pins"].clone()
}

async fn ask(gateway: &Running) -> (u16, String, String) {
    let answer = Client::data(gateway).post(COMPLETIONS, json!({ "prompt": "river" }).to_string()).await;
    (answer.status, answer.header("x-semmoe-policy").to_owned(), answer.header("x-semmoe-rank").to_owned())
}

/// Waits until the prober has asked again.
async fn until(gateway: &Running, state: &str) {
    let began = std::time::Instant::now();
    while pins(gateway).await["state"] != state {
        assert!(began.elapsed() < PATIENCE, "{}", pins(gateway).await);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn server_information_of_no_known_form_is_routed_by_load_until_it_has_one() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &["river", "king"], 0);
    for (info, says) in [
        (json!({ "version": "9.9.9", "attn_dp_size": "two" }), "does not match any known version"),
        (json!({ "version": "9.9.9", "dp_size": 0 }), "reports 0 attention-DP ranks"),
    ] {
        let mock = canned_as(info);
        let gateway = start(&fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", "\"sglang\"")).await;
        let found = pins(&gateway).await;
        assert_eq!(found["state"], "not pinned", "{found}");
        assert!(found["detail"].as_str().unwrap().contains(says), "{found}");
        assert_eq!(ask(&gateway).await, (200, "least_load".to_owned(), String::new()));
        assert_eq!(metric(&gateway, UNPINNED).await, 1.0);
        let mut info = fixture.info();
        info["version"] = json!("0.5.23");
        mock.settings().info = Some(info);
        until(&gateway, "unverified").await;
        assert_eq!(metric(&gateway, UNPINNED).await, 0.0);
        assert_eq!(ask(&gateway).await.1, "affinity");
    }
}

/// vLLM without metrics and without `ranks` serves as one rank.
#[tokio::test]
async fn an_engine_that_reports_no_ranks_serves_as_one() {
    let mock = ranked(&Fixture::new(2), VLLM_0_32, |settings| settings.ranks = 0);
    let gateway = start(&format!(
        "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"pod-a\"\nengine = \"vllm\"\n\
         url = \"{}\"\n",
        mock.url()
    ))
    .await;
    let found = pins(&gateway).await;
    assert_eq!(found["state"], "not pinned", "{found}");
    assert!(gateway.health("pod-a").unwrap().is_healthy());
}

/// The engine's own number of ranks overrides `ranks` of the configuration.
#[tokio::test]
async fn configured_ranks_are_not_pinned_against_the_engines_word() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &["river", "king"], 0);
    let mut info = fixture.info();
    info["dp_size"] = json!(1);
    let mock = canned_as(info);
    let toml = fixture.affinity(&mock.url(), &tables).replace("tables = ", "ranks = 2\ntables = ");
    let gateway = Gateway::start(config(&toml)).await.unwrap();
    assert_eq!(ask(&gateway).await, (200, "least_load".to_owned(), String::new()));
    let found = pins(&gateway).await;
    assert_eq!(found["state"], "not pinned", "{found}");
    let says = "the backend has 1 attention-DP ranks, but `ranks` is 2";
    assert!(found["detail"].as_str().unwrap().starts_with(says), "{found}");
}

/// An engine returns with another number of ranks: affinity is lost, the backend is not.
#[tokio::test]
async fn ranks_that_change_while_serving_cost_affinity_and_no_request() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &["river", "king"], 0);
    let mock = canned_as(fixture.info());
    let gateway = start(&fixture.affinity(&mock.url(), &tables)).await;
    assert_eq!(ask(&gateway).await.1, "affinity");
    let mut info = fixture.info();
    info["dp_size"] = json!(4);
    mock.settings().info = Some(info);
    mock.settings().health = 503;
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    mock.settings().health = 200;
    gateway.wait_ready().await;
    let found = pins(&gateway).await;
    assert!(found["detail"].as_str().unwrap().contains("4 attention-DP ranks, but the tables have 2"), "{found}");
    assert_eq!(ask(&gateway).await, (200, "least_load".to_owned(), String::new()));
    mock.settings().info = Some(fixture.info());
    until(&gateway, "unverified").await;
    assert_eq!(ask(&gateway).await.1, "affinity");
}

#[tokio::test]
async fn a_check_with_probes_reports_what_does_not_fit() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &["river", "king"], 0);
    let mock = sglang(&fixture);
    mock.report("moe_a2a_backend", json!("none"));
    let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", "\"sglang\"");
    let found = Gateway::probe(config(&toml)).await.unwrap();
    let served = found.served.to_string();
    assert!(found.troubles.is_empty(), "{}", found.troubles);
    for says in ["version 0.5.23", "pins honoured", "affinity saves no bytes"] {
        assert!(served.contains(says), "{says}: {served}");
    }
    mock.settings().ignores_pins = true;
    let found = Gateway::probe(config(&toml)).await.unwrap();
    assert!(found.troubles.to_string().starts_with("backend 'pod-a': pins are ignored: "), "{}", found.troubles);
    let gone = fixture.affinity("http://127.0.0.1:9", &tables);
    let found = Gateway::probe(config(&gone)).await.unwrap();
    assert!(found.troubles.to_string().contains("cannot connect"), "{}", found.troubles);
}

/// An engine that reports more ranks than `limits.ranks` allows serves as one rank, and delays no other model.
#[tokio::test]
async fn an_engine_with_too_many_ranks_serves_as_one() {
    let (liar, honest) = (canned(65_535), canned(2));
    let model = |name: &str, mock: &Mock| {
        format!(
            "[[models]]\nname = \"{name}\"\npolicy = \"least_load\"\n[[models.backends]]\nname = \"of-{name}\"\n\
             engine = \"sglang\"\nurl = \"{}\"\n",
            mock.url()
        )
    };
    let text = format!("identity_seconds = 0.05\n{}{}", model("liar", &liar), model("tiny", &honest));
    let gateway = start(&text).await;
    let ranks = |wanted: usize| move |shown: &Value| shown["ranks"].as_array().unwrap().len() == wanted;
    let client = Client::data(&gateway);
    // It may also misreport later; as many as are allowed are served.
    for (reported, served) in [(65_535, 1), (2, 2), (65_535, 1), (1024, 1024)] {
        liar.settings().info = Some(json!({ "version": "0.5.23", "dp_size": reported }));
        let shown = until_shown(&gateway, "of-liar", ranks(served)).await;
        let detail = shown["by_load"]["detail"].as_str().unwrap_or_default();
        let says = "65535 attention-DP ranks, but limits.ranks leaves room for only 1024";
        assert_eq!(detail == says, reported == 65_535, "{detail}");
        for model in ["tiny", "liar"] {
            assert_eq!(client.post(COMPLETIONS, format!("{{\"model\":\"{model}\"}}")).await.status, 200, "{model}");
        }
    }
}

/// Ranks that are gone leave the metrics with their last request.
#[tokio::test]
async fn vanished_ranks_leave_the_metrics() {
    let mock = canned(4);
    let toml = plain_model(&mock, 4).replace("ranks = 4\n", "");
    let gateway = start(&format!("identity_seconds = 0.05\n{toml}")).await;
    gateway.wait_ready().await;
    let of_last = "semmoe_rank_inflight{backend=\"pod-a\",rank=\"3\"}";
    assert!(metrics(&gateway).await.contains(of_last));
    mock.settings().info = Some(json!({ "version": "0.5.23", "dp_size": 2 }));
    until_shown(&gateway, "pod-a", |shown| shown["ranks"].as_array().unwrap().len() == 2).await;
    let page = metrics(&gateway).await;
    assert!(!page.contains(of_last) && page.contains("rank=\"1\""), "{page}");
    settled(&gateway).await;
}
