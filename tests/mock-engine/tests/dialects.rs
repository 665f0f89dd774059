//! Contract of the adapters: engines of several versions read the pins that `semmoe_engines` sends, and report errors
//! in them.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

use bytes::Bytes;
use http::Method;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use semmoe_engines::pin::{self, Stripped};
use semmoe_engines::probe::{Probe, Target, probe};
use semmoe_engines::{Engine as Kind, RankBase, Route};
use semmoe_mock_engine::{
    Dialect, Engine, Mock, SGLANG_0_4_7, SGLANG_0_5_8, SGLANG_0_5_10, SGLANG_0_5_16, SGLANG_0_5_23, Settings, Texts,
    VLLM_0_32,
};
use semmoe_tables::{ModelInfo, RankId};

type Change = fn(&mut Settings);
const ALL: Change = |_| {};
/// Ranks 4 to 7 behind the Python front end with hybrid load balancing, and behind the Rust front end.
const LOCAL: Change = |settings| settings.first_rank = 4;
const GLOBAL: Change = |settings| (settings.first_rank, settings.first_pin) = (4, 4);

/// An engine of four ranks.
fn serve(dialect: Dialect, change: Change) -> Mock {
    let model = ModelInfo {
        model: "tiny".to_owned(),
        tokenizer_sha256: None,
        num_experts: 8,
        top_k: 2,
        vocab_size: 1000,
        num_hidden_layers: 2,
        layer_ids: vec![0, 1],
    };
    let engine = Engine::new(dialect, model, Texts::Bytes).with(|settings| settings.ranks = 4);
    Mock::start(engine.with(change))
}

fn base(mock: &Mock) -> BaseUrl {
    mock.address.into()
}

async fn probed(urls: &[BaseUrl], engine: Kind, rank_base: Option<RankBase>) -> Probe {
    let target = Target { engine, urls, rank_base, names: &[] };
    probe(&HttpClient::default(), &target, &AnswerLimits::default()).await.unwrap()
}

/// Sends a request that a client had pinned to rank 9 in every possible way, now pinned to `rank`.
async fn send(mock: &Mock, found: &Probe, route: Route, rank: u16) -> Result<(), HttpError> {
    let body = Bytes::from_static(
        br#"{"routed_dp_rank":9,"model":"tiny","prompt":"a","text":"a","input":"a","messages":[{"role":"user","content":"a"}],
            "data_parallel_rank":9,"routed\u005fdp_rank":9}"#,
    );
    let body = Stripped::new(&body).unwrap();
    let mut request = request(Method::POST, &base(mock), route.path(), Some(Bytes::new())).unwrap();
    for name in pin::CLIENT_HEADERS {
        request.headers_mut().insert(name, "9".parse().unwrap());
    }
    let pinned = pin::apply(&found.dialect, route, RankId::new(rank), request.headers_mut(), &body).unwrap();
    *request.body_mut() = pinned.into();
    HttpClient::default().whole(request, &AnswerLimits::default()).await.map(|_| ())
}

/// The rank that the last request ran on, if it was pinned.
fn ran_on(mock: &Mock) -> Option<u16> {
    let ran = mock.ran().pop().unwrap();
    ran.pin.map(|_| ran.rank)
}

#[tokio::test]
async fn every_version_runs_a_pinned_request_on_its_rank() {
    for (dialect, change) in [
        (SGLANG_0_5_23, ALL),
        (SGLANG_0_5_16, ALL),
        (SGLANG_0_5_10, ALL),
        (SGLANG_0_5_8, ALL),
        (SGLANG_0_4_7, ALL),
        (VLLM_0_32, ALL),
        (VLLM_0_32, LOCAL),
        (VLLM_0_32, GLOBAL),
    ] {
        let mut mock = serve(dialect, change);
        let found = probed(&[base(&mock)], dialect.engine, None).await;
        let case = format!("{} {} {}", dialect.engine, dialect.version, mock.settings().first_pin);
        assert_eq!((found.version.as_deref(), found.dp_size), (Some(dialect.version), Some(4)), "{case}");
        for route in Route::ALL {
            let reads = dialect.reads_pins_on(route.path()) && (route != Route::Generate || !dialect.is_vllm());
            assert_eq!(found.dialect.reads(route).is_some(), reads, "{case} {route}");
            for rank in (0..4).filter(|_| reads) {
                send(&mock, &found, route, rank).await.unwrap();
                assert_eq!(ran_on(&mock), Some(rank), "{case} {route}");
                let body = mock.next().await.json();
                let members = body.as_object().unwrap().len();
                assert!(members <= 6, "at most the model, the prompt and our pin: {body}");
            }
        }
    }
}

/// The engine refuses a nonexistent rank, with its own error.
#[tokio::test]
async fn ranks_out_of_range_are_refused_by_the_engine() {
    for (dialect, change, route, says) in [
        (SGLANG_0_5_23, ALL, Route::Generate, "routed_dp_rank=4 out of range [0, 4)"),
        (SGLANG_0_5_23, ALL, Route::Chat, "routed_dp_rank=4 out of range [0, 4)"),
        (VLLM_0_32, ALL, Route::Chat, "data_parallel_rank 4 is out of range [0, 4)."),
        (VLLM_0_32, LOCAL, Route::Completions, "data_parallel_rank 4 is out of range [0, 4)."),
    ] {
        let mock = serve(dialect, change);
        let found = probed(&[base(&mock)], dialect.engine, None).await;
        let refused = send(&mock, &found, route, 4).await.unwrap_err();
        assert_eq!(refused.status(), Some(400));
        assert!(refused.to_string().contains(says), "{refused}");
    }
}

#[tokio::test]
async fn the_rank_base_is_probed_declared_or_unknown() {
    for (change, declared, wire) in [
        (ALL, None, 0),
        (LOCAL, None, 0),
        (GLOBAL, None, 4),
        (LOCAL, Some(RankBase::Global), 4),
        (GLOBAL, Some(RankBase::Local), 0),
    ] {
        let mock = serve(VLLM_0_32, change);
        let found = probed(&[base(&mock)], Kind::Vllm, declared).await;
        assert_eq!((found.dialect.wire_rank(RankId::new(0)), found.unknown_rank_base), (wire, false));
    }
}

/// External load balancing: each URL is one rank.
#[tokio::test]
async fn with_a_url_for_each_rank_the_url_is_the_pin() {
    let mocks = [0, 1].map(|_| serve(VLLM_0_32, |settings| settings.ranks = 1));
    mocks[1].settings().first_rank = 1;
    let found = probed(&mocks.each_ref().map(base), Kind::Vllm, None).await;
    assert_eq!(found.dp_size, Some(2));
    let [_, mut second] = mocks;
    send(&second, &found, Route::Chat, 1).await.unwrap();
    assert_eq!(ran_on(&second), None);
    let body = second.next().await.json();
    assert!(!body.as_object().unwrap().keys().any(|member| member.contains("rank")), "{body}");
}

/// Hybrid load balancing: each URL is a node with several ranks, and pins count from 0 or from the node's first rank.
#[tokio::test]
async fn nodes_of_several_ranks_are_pinned_by_url_and_header() {
    for change in [LOCAL, GLOBAL] {
        let mocks = [serve(VLLM_0_32, ALL), serve(VLLM_0_32, change)];
        let urls = mocks.each_ref().map(base);
        let found = probed(&urls, Kind::Vllm, None).await;
        assert_eq!((found.dp_size, found.doubt.clone()), (Some(8), None));
        for rank in 0..8 {
            let mock = &mocks[found.dialect.url_index(RankId::new(rank))];
            send(mock, &found, Route::Chat, rank).await.unwrap();
            assert_eq!(ran_on(mock), Some(rank % 4));
        }
        let [first, second] = urls;
        let found = probed(&[second, first], Kind::Vllm, None).await;
        let doubt = found.doubt.unwrap().to_string();
        assert_eq!(doubt, "URL 0 serves 4 ranks from rank 4, expected 4 from rank 0: list `urls` in rank order");
        assert_eq!(found.dp_size, None);
    }
}

#[tokio::test]
async fn routes_that_disagree_about_ranks_are_doubted() {
    let mock = serve(SGLANG_0_5_23, |settings| settings.ranks_in_loads = Some(1));
    let found = probed(&[base(&mock)], Kind::Sglang, None).await;
    let doubt = "/server_info reports 4 attention-DP ranks, but /v1/loads?include=core reports 1";
    assert_eq!((found.dp_size, found.doubt.unwrap().to_string()), (None, doubt.to_owned()));
}
