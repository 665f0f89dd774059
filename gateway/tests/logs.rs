//! No log at any level contains a prompt, a key or a query. A single test in its own process, because it listens to all
//! threads.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]
#![allow(dead_code, unused_imports, reason = "the helpers of the other tests")]

#[path = "gateway/support/mod.rs"]
mod support;

use std::io::Write;
use std::sync::{Arc, Mutex};

use http::Method;
use http_body_util::BodyExt;
use semmoe_engines::http::ClientSettings;
use serde_json::Value;
use support::{Client, Fixture, Mock, canned_as, settled, start};

const CHAT: &str = "/v1/chat/completions";
/// All prompts begin with this, and keys do too.
const MARK: &str = "MARKER";

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn listen() -> Self {
        let log = Self::default();
        let writer = log.clone();
        tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .init();
        log
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn access(&self) -> Vec<Value> {
        let events = self.text().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>();
        events.into_iter().filter(|event| event["target"] == "semmoe::access").collect()
    }
}

/// Bodies that succeed, and bodies that fail in every place that reads them.
const BODIES: [(&str, &str); 12] = [
    (CHAT, r#"{"model":"tiny","messages":[{"role":"user","content":"MARKER prompt"}]}"#),
    (CHAT, r#"{"model":"tiny","messages":[{"role":"MARKER","content":"x"}]}"#),
    (CHAT, r#"{"model":"tiny","messages":"MARKER"}"#),
    (CHAT, r#"{"model":"tiny","messages":[{"role":"user","content":[{"type":"MARKER","MARKER":1}]}]}"#),
    (CHAT, r#"{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":[{"MARKER":"x"}]}"#),
    (CHAT, r#"{"model":"tiny","messages":[{"role":"user","content":"MARKER"#),
    (CHAT, r#"{"model":"MARKER"}"#),
    (CHAT, r#"{"model":["MARKER"]}"#),
    ("/v1/completions?query=MARKER", r#"{"model":"tiny","prompt":"MARKER"}"#),
    ("/v1/completions", r#"{"model":"tiny","prompt":{"MARKER":1}}"#),
    ("/generate", r#"{"text":"MARKER","input_embeds":[1]}"#),
    ("/MARKER/path", r"{}"),
];

async fn everything(client: &Client, mock: &Mock) {
    let key = ("authorization", "Bearer MARKER-key-of-a-client");
    for (path, body) in BODIES {
        for behaviour in ["", "500", "400"] {
            let headers = [key, ("x-mock", behaviour), ("cookie", "MARKER=1"), ("x-other", "MARKER")];
            client.call(Method::POST, path, &headers, body).await;
        }
    }
    mock.release(9);
    for behaviour in ["stream", "die-inside", "die-json"] {
        // In HTTP/2 a broken answer may show as a stream reset before its head was read.
        let answer = client.try_open(Method::POST, CHAT, &[key, ("x-mock", behaviour)], BODIES[0].1).await;
        if let Ok(answer) = answer {
            let _ = answer.into_body().collect().await;
        }
        mock.release(4);
    }
    for wrong in [("authorization", "Bearer MARKER-wrong"), ("x-api-key", "MARKER-wrong"), ("authorization", "MARKER")]
    {
        assert_eq!(client.call(Method::POST, CHAT, &[wrong], BODIES[0].1).await.status, 401);
        assert_eq!(client.call(Method::GET, "/v1/models", &[wrong], "").await.status, 401);
    }
    let id = ("x-request-id", "the-one");
    assert_eq!(client.call(Method::POST, CHAT, &[key, id], BODIES[0].1).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_hold_no_prompt_and_no_secret() {
    let log = Log::listen();
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &[], 0);
    let mut mock = canned_as(fixture.info());
    mock.settings().authorization = Some("Bearer MARKER-key-of-the-engine".into());
    let file = fixture.folder.path().join("engine.key");
    std::fs::write(&file, "MARKER-key-of-the-engine").unwrap();
    let digest = "90c98f2543b113736daa1cf937bc4b4cbf2bcdf06d812b8d29c33a53068b1194";
    let toml = format!(
        "[auth]\nkeys = [{{ name = \"team-a\", sha256 = \"{digest}\" }}]\n[log]\naccess = \"all\"\n[timeouts]\n\
         idle_seconds = 0.5\n{}api_key_file = {file:?}\n",
        fixture.affinity(&mock.url(), &tables)
    );
    let gateway = start(&toml).await;
    gateway.wait_ready().await;
    let url = format!("http://{}", gateway.data_addr());
    for http2 in [false, true] {
        let client = Client::with(&ClientSettings { http2, ..ClientSettings::default() }, &url);
        everything(&client, &mock).await;
    }
    // Engines that fail while they have the query.
    let client = Client::data(&gateway);
    let key = ("authorization", "Bearer MARKER-key-of-a-client");
    for behaviour in ["hang", "die-json"] {
        let path = format!("{CHAT}?secret=MARKER");
        let headers = [key, ("x-mock", behaviour)];
        let answer = client.call(Method::POST, &path, &headers, BODIES[0].1);
        let answer = tokio::time::timeout(std::time::Duration::from_secs(1), answer);
        let dying = async {
            mock.next().await;
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            mock.kill();
        };
        let _ = tokio::join!(answer, dying);
        mock.listen();
        gateway.wait_ready().await;
    }
    mock.kill();
    client.call(Method::POST, &format!("{CHAT}?secret=MARKER"), &[key], BODIES[0].1).await;
    settled(&gateway).await;
    gateway.shutdown(support::PATIENCE).await;
    drop(mock);

    let text = log.text();
    assert!(text.contains("\"TRACE\""), "the log is at its lowest level");
    for line in text.lines() {
        assert!(!line.contains(MARK), "{line}");
        assert!(!line.contains(&digest[..16]), "{line}");
    }
    let access = log.access();
    assert!(access.len() > 60, "{} requests", access.len());
    let named: Vec<&Value> = access.iter().filter(|event| event["id"] == "the-one").collect();
    assert_eq!(named.len(), 2, "one for a request");
    for event in named {
        for (field, value) in
            [("key", "team-a"), ("route", CHAT), ("model", "tiny"), ("backend", "pod-a"), ("policy", "affinity")]
        {
            assert_eq!(event[field], value, "{event}");
        }
        assert_eq!(event["status"], 200);
        assert!(event["prompt_tokens"].as_u64() > Some(3) && event["bytes"].as_u64() > Some(10), "{event}");
        assert!(event["stream"] == false && event["first_token_ms"].is_null(), "{event}");
        assert!(event["ms"].as_f64() > Some(0.0) && event["rank"].is_string(), "{event}");
    }
    let of_stream = access.iter().find(|event| event["first_token_ms"].as_f64() > Some(0.0)).unwrap();
    assert!(of_stream["output_tokens"].is_u64() && of_stream["ms"].as_f64() > of_stream["first_token_ms"].as_f64());
    assert!(access.iter().any(|event| event["status"] == 502 || event["status"] == 503), "no engine failed");
    assert!(access.iter().any(|event| event["status"] == 401 && event["key"] == "none"));
}
