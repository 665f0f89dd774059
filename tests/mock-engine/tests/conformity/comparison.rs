//! Sends a mock the requests that a real engine got, and compares the answers: status, content type, framing of
//! streams, and the types of values at every path that semmoe reads.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use semmoe_engines::Engine;
use semmoe_engines::http::{BaseUrl, HttpClient};
use semmoe_engines::metrics::Sample;
use serde_json::Value;

use super::recordings::{Answer, Exchange, Recording};

/// The fields read from any answer: errors, in the shapes of both engines.
const ERRORS: &[&str] =
    &["error", "error.message", "error.type", "error.code", "object", "message", "type", "code", "detail"];
/// The fields read from an answer of chat or completions, and from each event of their streams.
const OPENAI: &[&str] = &[
    "model",
    "choices",
    "choices.finish_reason",
    "choices.message.role",
    "choices.message.content",
    "choices.delta.role",
    "choices.delta.content",
    "choices.text",
    "choices.token_ids",
    "choices.prompt_token_ids",
    "choices.response_token_ids",
    "choices.routed_experts",
    "choices.sgl_ext",
    "prompt_token_ids",
    "sglext",
    "sglext.routed_experts",
    "sglext.input_ids",
    "sglext.output_ids",
    "usage",
    "usage.prompt_tokens",
    "usage.completion_tokens",
];
/// The fields read from an answer of `/generate`, and from each event of its streams.
const GENERATE: &[&str] = &[
    "text",
    "output_ids",
    "prompt_token_ids",
    "meta_info.id",
    "meta_info.finish_reason",
    "meta_info.finish_reason.type",
    "meta_info.finish_reason.message",
    "meta_info.prompt_tokens",
    "meta_info.completion_tokens",
    "meta_info.cached_tokens",
    "meta_info.dp_rank",
    "meta_info.prompt_token_ids",
    "meta_info.routed_experts",
];
/// SGLang's fields of `sglang::ServerInfo`.
const SERVER_INFO: &[&str] = &[
    "model_path",
    "served_model_name",
    "version",
    "dp_size",
    "attn_dp_size",
    "tp_size",
    "ep_size",
    "enable_dp_attention",
    "moe_a2a_backend",
    "enable_eplb",
    "disable_radix_cache",
    "init_expert_location",
    "enable_return_routed_experts",
];
/// The fields of `sglang::Loads`.
const LOADS: &[&str] = &[
    "timestamp",
    "version",
    "loads.timestamp",
    "loads.dp_rank",
    "loads.num_running_reqs",
    "loads.num_waiting_reqs",
    "loads.num_waiting_uncached_tokens",
    "loads.num_used_tokens",
    "loads.num_total_tokens",
    "loads.max_total_num_tokens",
    "loads.max_running_requests",
    "loads.token_usage",
    "loads.gen_throughput",
    "loads.cache_hit_rate",
    "loads.utilization",
];
const MODELS: &[&str] = &["data.id", "data.root", "data.max_model_len"];
/// Paths whose values must be equal, too.
const SAME_VALUES: &[&str] = &[
    "version",
    "dp_size",
    "attn_dp_size",
    "tp_size",
    "ep_size",
    "enable_dp_attention",
    "moe_a2a_backend",
    "enable_eplb",
    "init_expert_location",
    "enable_return_routed_experts",
    "data.id",
    "data.max_model_len",
    "loads.dp_rank",
    "prompt_token_ids",
    "choices.prompt_token_ids",
    "choices.finish_reason",
    "sglext.input_ids",
    "usage.prompt_tokens",
    "usage.completion_tokens",
    "meta_info.prompt_tokens",
    "meta_info.completion_tokens",
    "meta_info.finish_reason.type",
    "error.code",
    "error.type",
    "code",
    "object",
    "type",
];
/// The vLLM metrics that semmoe reads; whether a family has samples does not change after the start.
const METRICS: &[&str] = &[
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
];

fn read_paths(path: &str) -> Vec<&'static str> {
    let of_route = match path {
        "/v1/chat/completions" | "/v1/completions" => OPENAI,
        "/generate" => GENERATE,
        "/server_info" | "/get_server_info" => SERVER_INFO,
        "/v1/loads" => LOADS,
        "/v1/models" => MODELS,
        "/version" => &["version"],
        _ => &[],
    };
    [of_route, ERRORS].concat()
}

/// Exchanges that are skipped, by the prefix of their names, and why.
pub(crate) type LeftOut = (&'static str, &'static str);

/// Every difference, one sentence each.
pub(crate) async fn differences(recording: &Recording, mock: &BaseUrl, left_out: &[LeftOut]) -> Vec<String> {
    let client = HttpClient::default();
    let mut found = Vec::new();
    for exchange in recording.exchanges.iter().filter(|exchange| exchange.answer.status != 0) {
        // In recorded order, because a fresh engine answers differently from one that has served.
        if left_out.iter().any(|(name, _)| exchange.name.starts_with(name)) {
            continue;
        }
        let answer = ask(&client, mock, exchange).await;
        let mut say = |difference: String| found.push(format!("{}: {difference}", exchange.name));
        compare(recording.engine, exchange, &answer, &mut say);
    }
    found
}

/// Entries of `left_out` that match no exchange of any recording, and are obsolete.
pub(crate) fn without_exchange(left_out: &[LeftOut]) -> Vec<&'static str> {
    let all = Recording::all();
    let has = |name: &str| all.iter().flat_map(|recording| &recording.exchanges).any(|e| e.name.starts_with(name));
    left_out.iter().map(|(name, _)| *name).filter(|name| !has(name)).collect()
}

async fn ask(client: &HttpClient, mock: &BaseUrl, exchange: &Exchange) -> Answer {
    use http_body_util::BodyExt as _;
    let asked = &exchange.request;
    let mut request = http::Request::builder().method(&*asked.method).uri(mock.join(&asked.path).unwrap());
    for (name, value) in &asked.headers {
        request = request.header(name, value);
    }
    let body = http_body_util::Full::new(Bytes::from(asked.body.clone()));
    let (head, body) = client.send(request.body(body).unwrap()).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let value = |value: &http::HeaderValue| value.to_str().unwrap().to_owned();
    Answer {
        status: head.status.as_u16(),
        headers: head.headers.iter().map(|(name, found)| (name.to_string(), value(found))).collect(),
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

fn compare(engine: Engine, exchange: &Exchange, mock: &Answer, say: &mut impl FnMut(String)) {
    let real = &exchange.answer;
    if mock.status != real.status {
        return say(format!("status {}, the engine's is {}: {}", mock.status, real.status, real.body));
    }
    if mock.content_type() != real.content_type() {
        say(format!("content type {:?}, the engine's is {:?}", mock.content_type(), real.content_type()));
    }
    if exchange.request.path == "/metrics" {
        if engine == Engine::Vllm {
            compare_sets("samples", &samples(&mock.body), &samples(&real.body), say);
        }
        return;
    }
    let (done, real_done) = (mock.body.contains("data: [DONE]"), real.body.contains("data: [DONE]"));
    if done != real_done {
        say(format!("ends with [DONE]: {done}, the engine's: {real_done}"));
    }
    let paths = read_paths(&exchange.request.path);
    let (shapes, real_shapes) = (shapes(mock, &paths), shapes(real, &paths));
    if shapes.len() != real_shapes.len() {
        say(format!(
            "{} kinds of events, the engine's are {}: {shapes:?}, {real_shapes:?}",
            shapes.len(),
            real_shapes.len()
        ));
    }
    for (at, (shape, real_shape)) in shapes.iter().zip(&real_shapes).enumerate() {
        compare_sets(&format!("document {at}"), shape, real_shape, say);
    }
    compare_values(exchange, mock, say);
}

fn compare_sets(what: &str, mock: &BTreeSet<String>, real: &BTreeSet<String>, say: &mut impl FnMut(String)) {
    let too_many: Vec<_> = mock.difference(real).collect();
    let missing: Vec<_> = real.difference(mock).collect();
    if !(too_many.is_empty() && missing.is_empty()) {
        say(format!("{what}: the engine has {missing:?}, the mock {too_many:?}"));
    }
}

/// The metrics' names with their label names, and the engines that report them.
fn samples(text: &str) -> BTreeSet<String> {
    let read = text.lines().filter_map(Sample::parse).filter(|sample| METRICS.contains(&sample.name));
    read.map(|sample| {
        let labels = ["model_name", "finished_reason", "le"].map(|name| (name, sample.label(name).is_some()));
        let labels: Vec<_> = labels.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
        format!("{} of engine {:?} by {labels:?}", sample.name, sample.label("engine"))
    })
    .collect()
}

/// For each document (in a stream, for each run of similar events) the type of the value at each path.
fn shapes(answer: &Answer, paths: &[&str]) -> Vec<BTreeSet<String>> {
    let shape = |document: &Value| {
        let of = |path: &str| at(document, path).into_iter().map(|found| format!("{path}: {}", kind(found))).collect();
        paths.iter().flat_map(|path| -> Vec<String> { of(path) }).collect::<BTreeSet<String>>()
    };
    let mut shapes: Vec<_> = answer.documents().iter().map(shape).collect();
    shapes.dedup();
    shapes
}

/// The values at a path; descends into lists.
fn at<'a>(value: &'a Value, path: &str) -> Vec<&'a Value> {
    if let Value::Array(list) = value {
        return list.iter().flat_map(|one| at(one, path)).collect();
    }
    let (name, rest) = path.split_once('.').unwrap_or((path, ""));
    match value.get(name) {
        Some(found) if rest.is_empty() => vec![found],
        Some(found) => at(found, rest),
        None => Vec::new(),
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Object(_) => "object".to_owned(),
        Value::Array(list) => {
            let kinds: BTreeSet<String> = list.iter().map(kind).collect();
            format!("list of {}", kinds.into_iter().collect::<Vec<_>>().join(" or "))
        }
    }
}

fn compare_values(exchange: &Exchange, mock: &Answer, say: &mut impl FnMut(String)) {
    let real = exchange.answer.documents();
    let mocks = mock.documents();
    let (Some(real), Some(mocks)) = (real.last(), mocks.last()) else { return };
    let paths = read_paths(&exchange.request.path);
    // If the engine honoured the pin; unpinned requests run on arbitrary ranks.
    let pin = exchange.name.split_once("pinned to ").and_then(|(_, rank)| rank.split(' ').next()?.parse::<u64>().ok());
    let pinned = pin.is_some() && real.pointer("/meta_info/dp_rank").and_then(Value::as_u64) == pin;
    let mut values: BTreeMap<&str, (Vec<&Value>, Vec<&Value>)> = BTreeMap::new();
    for path in SAME_VALUES.iter().filter(|path| paths.contains(path)) {
        values.insert(path, (at(mocks, path), at(real, path)));
    }
    if pinned {
        values.insert("meta_info.dp_rank", (at(mocks, "meta_info.dp_rank"), at(real, "meta_info.dp_rank")));
    }
    for (path, (mock, real)) in values {
        if mock != real {
            say(format!("{path} is {mock:?}, the engine's is {real:?}"));
        }
    }
}
