//! All parsers of engine answers, run on answers of real engines (`tests/engines/recordings`).
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

#[path = "../../../tests/engines/rust/recordings.rs"]
mod recordings;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use recordings::{Exchange, Recording};
use semmoe_engines::fields::removed_names;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_engines::metrics::Sample;
use semmoe_engines::pin::{self, Stripped};
use semmoe_engines::probe::{Target, probe};
use semmoe_engines::recording::{self, Encoding};
use semmoe_engines::refusal::{self, RankRefusal};
use semmoe_engines::routed::{self, Place};
use semmoe_engines::sse::Events;
use semmoe_engines::{Carrier, Dialect, Engine, Route, Version, pieces, sglang, vllm};
use serde_json::Value;

/// The bundled model: layers, experts per token, experts.
const LAYERS: usize = 7;
const TOP_K: usize = 4;
const EXPERTS: u16 = 32;

fn route(exchange: &Exchange) -> Option<Route> {
    Route::ALL.into_iter().find(|route| route.path() == exchange.request.path)
}

fn asks_to_record(exchange: &Exchange) -> bool {
    let wants = ["everything recorded", "ids in sglext", "routed experts alone"];
    exchange.answer.status == 200 && wants.iter().any(|want| exchange.name.ends_with(want))
}

/// Serves a fresh engine's answers to GET; `after`: those after the last request.
async fn serve(recording: &Recording, after: bool) -> BaseUrl {
    let mut answers = BTreeMap::new();
    for exchange in recording.exchanges.iter().filter(|exchange| exchange.request.method == "GET") {
        if exchange.answer.status != 0 && (after || !answers.contains_key(&exchange.request.path)) {
            answers.insert(exchange.request.path.clone(), (exchange.answer.status, exchange.answer.body.clone()));
        }
    }
    let answer = |State(answers): State<Arc<BTreeMap<String, (u16, String)>>>, request: Request| async move {
        let found = answers.get(request.uri().path()).cloned().unwrap_or((404, String::new()));
        (StatusCode::from_u16(found.0).unwrap(), found.1).into_response() as Response
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(answer).with_state(Arc::new(answers));
    tokio::spawn(async move { axum::serve(listener, router).await });
    address.into()
}

#[test]
fn there_are_recordings_of_these_versions() {
    let found = Recording::names();
    for name in ["sglang-0.5.23", "sglang-0.5.23-dp-attention", "vllm-0.30.0", "vllm-0.32.0"] {
        assert!(found.iter().any(|found| found == name), "{name} is not among {found:?}");
    }
    for recording in Recording::all() {
        let text = serde_json::to_string(&recording.exchanges.iter().map(|e| &e.answer.body).collect::<Vec<_>>());
        assert!(!text.unwrap().contains("/tmp/"), "a path of the machine that recorded {}", recording.version);
    }
}

/// Each was recorded with two ranks: fresh, and after requests.
#[tokio::test]
async fn version_and_ranks_are_probed() {
    for recording in Recording::all() {
        for after in [false, true] {
            let url = serve(&recording, after).await;
            let limits = AnswerLimits::default();
            let client = HttpClient::default();
            let found = probe(&client, &Target::new(recording.engine, &url), &limits).await;
            let what = format!("{} {} after={after}", recording.engine, recording.version);
            if after && recording.exchanges.last().is_some_and(|last| last.answer.status == 0) && found.is_err() {
                continue;
            }
            let found = found.unwrap();
            assert_eq!((found.version.as_deref(), found.dp_size), (Some(&*recording.version), Some(2)), "{what}");
            assert_eq!(found.doubt, None, "{what}");
            if recording.engine == Engine::Vllm {
                let engines = vllm::engines(&client, &url, &limits).await.unwrap();
                assert_eq!(engines.range().map(|range| (range.first, range.count)), Some((0, 2)), "{what}");
                let counts = |route| engines.probe_counts(route).map(|counts| counts.len());
                assert_eq!((counts(Route::Completions), counts(Route::Responses)), (Some(2), Some(2)), "{what}");
            }
        }
    }
}

/// The engine honoured pins sent according to [`Dialect`], and reported those it could not honour.
#[test]
fn pins_are_honoured_where_the_dialect_says() {
    for recording in Recording::all() {
        let dialect = Dialect::of(recording.engine, Version::parse(&recording.version));
        if recording.engine.speaks_sglang() {
            let Some(Carrier::Field(field)) = dialect.carrier(Route::Generate) else {
                panic!("a field pins /generate")
            };
            for rank in [0, 1] {
                let pinned = recording.get(&format!("generate, pinned to {rank}"));
                assert!(pinned.request.body.contains(&format!("\"{field}\":{rank}")), "{}", pinned.request.body);
                assert_eq!(pieces::rank_in_meta(pinned.answer.body.as_bytes()), Some(rank));
            }
        }
        let refused = recording.exchanges.iter().filter(|exchange| exchange.name.ends_with("pin out of range"));
        for exchange in refused {
            assert_eq!(exchange.answer.status, 400, "{}", exchange.name);
            assert!(exchange.answer.body.contains("out of range [0, 2)"), "{}", exchange.answer.body);
            let by_header = exchange.request.headers.contains_key(pin::HEADER.as_str());
            let carrier = dialect.reads(route(exchange).unwrap());
            assert_eq!(by_header, carrier == Some(Carrier::Header), "{}: {carrier:?}", exchange.name);
            let refused = refusal::of_rank(exchange.answer.body.as_bytes());
            assert_eq!(refused, Some(RankRefusal { rank: 7, ranks: Some(2) }), "{}", exchange.name);
        }
    }
}

#[test]
fn routed_experts_and_ids_are_read() {
    let mut read = 0;
    for recording in Recording::all().iter().filter(|recording| recording.gives_routes()) {
        let answers = recording.exchanges.iter().filter(|exchange| asks_to_record(exchange));
        for exchange in answers.filter(|exchange| !exchange.answer.is_stream()) {
            let what = format!("{} {}: {}", recording.engine, recording.version, exchange.name);
            let route = route(exchange).unwrap();
            let reported = recording::read(route, exchange.answer.body.as_bytes())
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let (prompt, output) = (reported.prompt_tokens.unwrap() as usize, reported.output_tokens.unwrap() as usize);
            assert_eq!((output, reported.aborted), (4, None), "{what}");
            check_experts(&what, reported.routed_experts.as_deref(), prompt + output - 1, recording.engine);
            if exchange.name.ends_with("everything recorded") {
                // SGLang 0.5.16 reports ids on `/generate`, and of a chat's prompt.
                let older = recording.version == "0.5.16" && route != Route::Generate;
                let (has_prompt, has_output) = (!older || route == Route::Chat, !older);
                assert_eq!(reported.prompt_ids.map(|ids| ids.len()), has_prompt.then_some(prompt), "{what}");
                assert_eq!(reported.output_ids.map(|ids| ids.len()), has_output.then_some(output), "{what}");
            }
            read += 1;
        }
    }
    assert!(read >= 12, "{read} answers");
}

fn check_experts(what: &str, experts: Option<&str>, rows: usize, engine: Engine) {
    let (encoding, bytes) = recording::decode_bytes(experts.unwrap_or_else(|| panic!("{what}: none"))).unwrap();
    let ids: Vec<u16> = match encoding {
        Encoding::Raw => bytes.chunks_exact(4).map(|id| u16::from_le_bytes([id[0], id[1]])).collect(),
        Encoding::Npy => bytes[bytes.len() - rows * LAYERS * TOP_K..].iter().map(|id| u16::from(*id)).collect(),
    };
    assert_eq!(encoding == Encoding::Npy, engine == Engine::Vllm, "{what}");
    assert_eq!(ids.len(), rows * LAYERS * TOP_K, "{what}");
    for token in ids.chunks_exact(TOP_K) {
        let distinct = (1..TOP_K).all(|i| !token[..i].contains(&token[i]));
        assert!(distinct && token.iter().all(|id| *id < EXPERTS), "{what}: {token:?}");
    }
}

/// Finds `usage.prompt_tokens` or `meta_info.prompt_tokens`, and the rank, in answers as they pass.
#[test]
fn counts_and_ranks_are_found_in_passing() {
    for recording in Recording::all() {
        for exchange in recording.exchanges.iter().filter(|e| e.answer.status == 200 && e.request.method == "POST") {
            let documents = exchange.answer.documents();
            let reported =
                |pointer: &str| documents.iter().rev().find_map(|document| document.pointer(pointer)?.as_u64());
            let counted = reported("/usage/prompt_tokens").or_else(|| reported("/meta_info/prompt_tokens"));
            let found = pieces::prompt_tokens(exchange.answer.body.as_bytes());
            // The answers to several prompts are a list.
            if documents.first().is_some_and(Value::is_object) && !exchange.request.path.ends_with("responses") {
                assert_eq!(found, counted, "{} {}", recording.version, exchange.name);
                let rank = reported("/meta_info/dp_rank").map(|rank| rank as u32);
                assert_eq!(pieces::rank_in_meta(exchange.answer.body.as_bytes()), rank, "{}", exchange.name);
            }
        }
    }
}

/// Only the routed experts are cut out.
#[test]
fn routed_experts_are_cut_out() {
    let mut cuts = 0;
    for recording in Recording::all().iter().filter(|recording| recording.engine.speaks_sglang()) {
        let answers = recording.exchanges.iter().filter(|e| e.answer.body.contains("\"routed_experts\":\""));
        for exchange in answers.filter(|exchange| !exchange.answer.is_stream()) {
            let place = if route(exchange) == Some(Route::Generate) { Place::MetaInfo } else { Place::Sglext };
            let cut = routed::cut(place, exchange.answer.body.as_bytes()).unwrap().unwrap();
            assert!(cut.found, "{}", exchange.name);
            let rest: Value = serde_json::from_slice(&cut.rest).unwrap();
            let mut expected: Value = serde_json::from_str(&exchange.answer.body).unwrap();
            let all = match &mut expected {
                Value::Array(all) => all.iter_mut().collect(),
                one => vec![one],
            };
            for one in all {
                if let Some(meta) = one.get_mut("meta_info") {
                    meta.as_object_mut().unwrap().remove("routed_experts");
                }
                let extension = one.get_mut("sglext").and_then(Value::as_object_mut);
                if extension.is_some_and(|members| members.remove("routed_experts").is_some() && members.is_empty()) {
                    one.as_object_mut().unwrap().remove("sglext");
                }
            }
            assert_eq!(rest, expected, "{}", exchange.name);
            cuts += 1;
        }
    }
    assert!(cuts >= 8, "{cuts} cuts");
}

/// A client of vLLM gets the same answer whether its request was sampled or not, with or without the engine's flag.
#[test]
fn token_ids_that_a_sample_asked_for_are_cut_out() {
    let seen = |body: &str, ids| {
        let cut = routed::cut(Place::Choices { ids }, body.as_bytes()).unwrap();
        assert_eq!(cut.as_ref().is_some_and(|cut| cut.found), body.contains("\"routed_experts\":\""));
        let text = cut.map_or(body.to_owned(), |cut| String::from_utf8(cut.rest.to_vec()).unwrap());
        // The answer's own id and time differ.
        text.split_once(",\"model\":").unwrap().1.to_owned()
    };
    let (mut pairs, mut with_experts) = (0, 0);
    for recording in Recording::all().iter().filter(|recording| recording.engine == Engine::Vllm) {
        for asked in recording.exchanges.iter().filter(|exchange| !exchange.answer.is_stream()) {
            let Some(name) = asked.name.strip_suffix(", everything recorded") else { continue };
            let plain = recording.exchanges.iter().find(|plain| plain.name == name).unwrap();
            let (sampled, unsampled) = (seen(&asked.answer.body, true), seen(&plain.answer.body, false));
            assert_eq!(sampled, unsampled, "{} {name}", recording.version);
            assert!(
                unsampled.contains("\"token_ids\":null") && unsampled.contains("\"routed_experts\":null"),
                "{name}"
            );
            pairs += 1;
            with_experts += usize::from(asked.answer.body.contains("\"routed_experts\":\""));
        }
    }
    assert!(pairs >= 3 && with_experts >= 3, "{pairs} pairs, {with_experts} with routed experts");
}

/// However the stream is cut: each relayed piece ends where an event ends, and together they are the stream.
#[test]
fn streams_are_cut_at_events() {
    let mut streams = 0;
    for recording in Recording::all() {
        for exchange in recording.exchanges.iter().filter(|exchange| exchange.answer.is_stream()) {
            let body = &exchange.answer.body;
            assert!(body.ends_with("data: [DONE]\n\n"), "{}", exchange.name);
            for size in [1, 7, 64, 1000] {
                let mut events = Events::default();
                let mut relayed = Vec::new();
                for piece in body.as_bytes().chunks(size) {
                    let ready = events.push(Bytes::copy_from_slice(piece));
                    assert!(ready.is_empty() || ready.ends_with(b"\n\n"), "{}", exchange.name);
                    relayed.extend_from_slice(&ready);
                }
                relayed.extend_from_slice(&events.rest());
                assert!(relayed == body.as_bytes(), "{}", exchange.name);
            }
            streams += 1;
        }
    }
    assert!(streams >= 15, "{streams} streams");
}

#[test]
fn every_sample_of_the_metrics_is_read() {
    for recording in Recording::all() {
        let metrics = recording.exchanges.iter().filter(|exchange| exchange.request.path == "/metrics");
        for exchange in metrics.filter(|exchange| exchange.answer.status == 200) {
            for line in exchange.answer.body.lines().filter(|line| !line.starts_with('#')) {
                let sample = Sample::parse(line).unwrap_or_else(|| panic!("{line}"));
                if recording.engine == Engine::Vllm {
                    assert!(matches!(sample.label("engine"), Some("0" | "1")), "{line}");
                }
            }
        }
    }
}

/// All original members of a body are unchanged when a pin is inserted.
#[test]
fn bodies_are_pinned() {
    for recording in Recording::all() {
        let dialect = Dialect::of(recording.engine, Version::parse(&recording.version));
        for exchange in recording.exchanges.iter().filter(|exchange| exchange.answer.status == 200) {
            let (Some(route), body) = (route(exchange), Bytes::from(exchange.request.body.clone())) else { continue };
            let Some(Carrier::Field(field)) = dialect.carrier(route) else { continue };
            let stripped = Stripped::new(&body).unwrap();
            let mut expected: Value = serde_json::from_slice(&body).unwrap();
            removed_names().for_each(|name| drop(expected.as_object_mut().unwrap().remove(name)));
            let bare: Value = serde_json::from_slice(stripped.bytes()).unwrap();
            assert_eq!(bare, expected, "{field} on {route}");
        }
    }
}

#[test]
fn server_information_is_read() {
    for recording in Recording::all().iter().filter(|recording| recording.engine == Engine::Sglang) {
        let info: sglang::ServerInfo = serde_json::from_str(&recording.get("server info").answer.body).unwrap();
        assert_eq!(info.model_name(), Some("tiny"), "{}", recording.version);
        assert_eq!((info.tp_size, info.ep_size), (Some(2), Some(2)), "{}", recording.version);
        assert_eq!((info.enable_eplb, info.enable_return_routed_experts), (Some(false), Some(true)));
        let loads: sglang::Loads = serde_json::from_str(&recording.get("fresh loads").answer.body).unwrap();
        assert_eq!(loads.by_rank(2).map(|loads| loads.len()), Ok(2), "{}", recording.version);
    }
}
