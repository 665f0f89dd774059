//! Contract of the adapters: mocks that read pins as the engines of several versions do, errors included.

#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use semmoe_engines::pin::{self, Stripped};
use semmoe_engines::probe::{Probe, Target, probe};
use semmoe_engines::{Engine, RankBase, Route};
use semmoe_tables::RankId;
use serde_json::{Value, json};

/// A mock: its report, and its pin on each route.
#[derive(Clone, Copy, Debug)]
struct Mock {
    engine: Engine,
    version: &'static str,
    /// Where it answers server information.
    info: &'static str,
    /// Reads the header on these routes.
    header_on: &'static [&'static str],
    /// Reads this body field on these routes.
    field: &'static str,
    field_on: &'static [&'static str],
    /// Ranks in its metrics, and the pins that it takes.
    engines: (u32, u32),
    /// Ranks in its loads.
    loads: u32,
    pins: (u32, u32),
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const GENERATE: &str = "/generate";

const SGLANG_0_5_23: Mock = Mock {
    engine: Engine::Sglang,
    version: "0.5.23",
    info: "/server_info",
    header_on: &[CHAT, COMPLETIONS, RESPONSES, MESSAGES],
    field: "routed_dp_rank",
    field_on: &[CHAT, COMPLETIONS, RESPONSES, GENERATE],
    engines: (0, 4),
    loads: 4,
    pins: (0, 4),
};
const SGLANG_0_5_10: Mock = Mock {
    version: "0.5.10",
    header_on: &[CHAT, COMPLETIONS],
    field_on: &[CHAT, COMPLETIONS, GENERATE],
    ..SGLANG_0_5_23
};
const SGLANG_0_5_8: Mock = Mock { version: "0.5.8", header_on: &[], field: "data_parallel_rank", ..SGLANG_0_5_10 };
const SGLANG_0_4_7: Mock = Mock { version: "0.4.7", info: "/get_server_info", field_on: &[GENERATE], ..SGLANG_0_5_8 };
const VLLM: Mock = Mock {
    engine: Engine::Vllm,
    version: "0.33.0",
    info: "",
    header_on: &[CHAT, COMPLETIONS, MESSAGES],
    field: "",
    field_on: &[],
    engines: (0, 4),
    loads: 0,
    pins: (0, 4),
};
/// Ranks 4 to 7 behind the Python front end with hybrid load balancing, and behind the Rust front end.
const VLLM_LOCAL: Mock = Mock { engines: (4, 4), ..VLLM };
const VLLM_GLOBAL: Mock = Mock { engines: (4, 4), pins: (4, 4), ..VLLM };

async fn serve(mock: Mock) -> BaseUrl {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(answer).with_state(mock);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address.into()
}

fn error(message: String) -> Response {
    let body = json!({ "object": "error", "message": message, "type": "BadRequestError", "code": 400 });
    (StatusCode::BAD_REQUEST, Json(body)).into_response()
}

async fn answer(State(mock): State<Mock>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let vllm = mock.engine == Engine::Vllm;
    if request.method() == Method::GET {
        let ranks = mock.engines.0..mock.engines.0 + mock.engines.1;
        return match path.as_str() {
            "/health" => StatusCode::OK.into_response(),
            "/version" if vllm => Json(json!({ "version": mock.version })).into_response(),
            "/v1/models" => Json(json!({ "data": [{ "id": "tiny" }] })).into_response(),
            "/metrics" if vllm => {
                let line = |rank| format!("vllm:prompt_tokens_total{{engine=\"{rank}\",model_name=\"t\"}} 0.0\n");
                ranks.map(line).collect::<String>().into_response()
            }
            "/v1/loads" if mock.version > "0.5" && !vllm => {
                let load = |rank| json!({ "dp_rank": rank, "num_running_reqs": rank, "num_waiting_reqs": 1 });
                Json(json!({ "loads": (0..mock.loads).rev().map(load).collect::<Vec<Value>>() })).into_response()
            }
            path if path == mock.info => {
                let ranks = mock.engines.1;
                let sizes = if mock.version == "0.5.23" { (1, Some(ranks)) } else { (ranks, None) };
                Json(json!({ "version": mock.version, "dp_size": sizes.0, "attn_dp_size": sizes.1, "model_path": "/m/tiny" }))
                    .into_response()
            }
            _ => StatusCode::NOT_FOUND.into_response(),
        };
    }
    let (head, body) = request.into_parts();
    let body: Value = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
    let mut pinned = None;
    if mock.field_on.contains(&path.as_str()) {
        pinned = body.get(mock.field).and_then(Value::as_i64);
    }
    if let Some(value) = head.headers.get("x-data-parallel-rank").filter(|_| mock.header_on.contains(&path.as_str())) {
        match value.to_str().unwrap().parse() {
            Ok(rank) => pinned = Some(rank),
            // vLLM passes over what is no number.
            Err(_) if vllm => {}
            Err(_) => return error("Invalid X-Data-Parallel-Rank header: must be an integer".to_owned()),
        }
    }
    let (first, count) = (i64::from(mock.pins.0), i64::from(mock.pins.1));
    match pinned {
        Some(rank) if !(first..first + count).contains(&rank) && vllm => {
            error(format!("data_parallel_rank {rank} is out of range [0, {}).", first + count))
        }
        Some(rank) if !(first..first + count).contains(&rank) => {
            error(format!("routed_dp_rank={rank} out of range [0, {count})"))
        }
        pinned => Json(json!({ "ran_on": pinned.map(|rank| rank - first), "body": body })).into_response(),
    }
}

async fn probed(mock: Mock, base: &BaseUrl) -> Probe {
    probe(&HttpClient::default(), &Target::new(mock.engine, base), &AnswerLimits::default()).await.unwrap()
}

/// Sends a request that a client had pinned to rank 9 by every way there is, pinned to `rank`.
async fn send(base: &BaseUrl, found: &Probe, route: Route, rank: u16) -> Result<Value, HttpError> {
    let body =
        Bytes::from_static(br#"{"routed_dp_rank":9,"model":"tiny","data_parallel_rank":9,"routed\u005fdp_rank":9}"#);
    let body = Stripped::new(&body).unwrap();
    let mut request = request(Method::POST, base, route.path(), Some(Bytes::new())).unwrap();
    for name in pin::CLIENT_HEADERS {
        request.headers_mut().insert(name, "9".parse().unwrap());
    }
    let pinned = pin::apply(&found.dialect, route, RankId::new(rank), request.headers_mut(), &body).unwrap();
    *request.body_mut() = pinned.into();
    let (_, answer) = HttpClient::default().whole(request, &AnswerLimits::default()).await?;
    Ok(serde_json::from_slice(&answer).unwrap())
}

#[tokio::test]
async fn every_version_runs_a_pinned_request_on_its_rank() {
    for mock in [SGLANG_0_5_23, SGLANG_0_5_10, SGLANG_0_5_8, SGLANG_0_4_7, VLLM, VLLM_LOCAL, VLLM_GLOBAL] {
        let base = serve(mock).await;
        let found = probed(mock, &base).await;
        let case = format!("{} {} {:?}", mock.engine, mock.version, mock.pins);
        assert_eq!((found.version.as_deref(), found.dp_size), (Some(mock.version), Some(4)), "{case}");
        for route in Route::ALL {
            let reads = mock.header_on.contains(&route.path()) || mock.field_on.contains(&route.path());
            assert_eq!(found.dialect.reads(route).is_some(), reads, "{case} {route}");
            for rank in (0..4).filter(|_| reads) {
                let answer = send(&base, &found, route, rank).await.unwrap();
                assert_eq!(answer["ran_on"], rank, "{case} {route}: {answer}");
                let members = answer["body"].as_object().unwrap().len();
                assert!(members <= 2, "at most the model and our pin: {answer}");
            }
        }
    }
}

/// A rank that is not there is the engine's to refuse, in its own words.
#[tokio::test]
async fn ranks_out_of_range_are_refused_by_the_engine() {
    for (mock, route, says) in [
        (SGLANG_0_5_23, Route::Generate, "routed_dp_rank=4 out of range [0, 4)"),
        (SGLANG_0_5_23, Route::Chat, "routed_dp_rank=4 out of range [0, 4)"),
        (VLLM, Route::Chat, "data_parallel_rank 4 is out of range [0, 4)."),
        (VLLM_LOCAL, Route::Completions, "data_parallel_rank 4 is out of range [0, 4)."),
    ] {
        let base = serve(mock).await;
        let refused = send(&base, &probed(mock, &base).await, route, 4).await.unwrap_err();
        assert_eq!(refused.status(), Some(400));
        assert!(refused.to_string().contains(says), "{refused}");
    }
}

#[tokio::test]
async fn the_rank_base_is_probed_declared_or_unknown() {
    let client = HttpClient::default();
    let limits = AnswerLimits::default();
    for (mock, declared, wire) in [
        (VLLM, None, 0),
        (VLLM_LOCAL, None, 0),
        (VLLM_GLOBAL, None, 4),
        (VLLM_LOCAL, Some(RankBase::Global), 4),
        (VLLM_GLOBAL, Some(RankBase::Local), 0),
    ] {
        let base = serve(mock).await;
        let target = Target { rank_base: declared, ..Target::new(Engine::Vllm, &base) };
        let found = probe(&client, &target, &limits).await.unwrap();
        assert_eq!((found.dialect.wire_rank(RankId::new(0)), found.unknown_rank_base), (wire, false));
    }
}

/// External load balancing: each URL is one rank.
#[tokio::test]
async fn with_a_url_for_each_rank_the_url_is_the_pin() {
    let urls = [serve(Mock { engines: (0, 1), ..VLLM }).await, serve(Mock { engines: (1, 1), ..VLLM }).await];
    let target = Target { engine: Engine::Vllm, urls: &urls, rank_base: None, names: &[] };
    let found = probe(&HttpClient::default(), &target, &AnswerLimits::default()).await.unwrap();
    assert_eq!(found.dp_size, Some(2));
    let answer = send(&urls[1], &found, Route::Chat, 1).await.unwrap();
    assert_eq!(answer, json!({ "ran_on": null, "body": { "model": "tiny" } }));
}

/// Hybrid load balancing: each URL is a node with several ranks, and pins count from 0 or from the node's first rank.
#[tokio::test]
async fn nodes_of_several_ranks_are_pinned_by_url_and_header() {
    let (client, limits) = (HttpClient::default(), AnswerLimits::default());
    for second in [VLLM_LOCAL, VLLM_GLOBAL] {
        let urls = [serve(VLLM).await, serve(second).await];
        let found = probe(&client, &Target { engine: Engine::Vllm, urls: &urls, rank_base: None, names: &[] }, &limits)
            .await
            .unwrap();
        assert_eq!((found.dp_size, found.doubt.clone()), (Some(8), None));
        for rank in 0..8 {
            let url = &urls[found.dialect.url_index(RankId::new(rank))];
            assert_eq!(send(url, &found, Route::Chat, rank).await.unwrap()["ran_on"], rank % 4, "{second:?}");
        }
        let urls = [urls[1].clone(), urls[0].clone()];
        let found = probe(&client, &Target { engine: Engine::Vllm, urls: &urls, rank_base: None, names: &[] }, &limits)
            .await
            .unwrap();
        let doubt = found.doubt.unwrap().to_string();
        assert_eq!(
            doubt,
            "URL 0 serves 4 ranks from rank 4, expected 4 from rank 0: list `urls` in the order of their ranks"
        );
        assert_eq!(found.dp_size, None);
    }
}

#[tokio::test]
async fn routes_that_disagree_about_ranks_are_doubted() {
    let base = serve(Mock { loads: 1, ..SGLANG_0_5_23 }).await;
    let found = probed(Mock { loads: 1, ..SGLANG_0_5_23 }, &base).await;
    let doubt = "/server_info reports 4 attention-DP ranks, but /v1/loads?include=core 1";
    assert_eq!((found.dp_size, found.doubt.unwrap().to_string()), (None, doubt.to_owned()));
}
