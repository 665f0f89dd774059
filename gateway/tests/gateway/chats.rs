//! Whether engines tokenize chats as the gateway does: by the built-in chats, and by the counts in answers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use semmoe_gateway::{Gateway, Running};
use semmoe_text::{ChatTemplate, Limits, Preparation, Prompt, PromptEncoder, Route, Tokenizer, prompt_ids};
use serde_json::{Value, json};

use crate::support::files::{File, reload};
use crate::support::{
    Client, Fixture, MODEL_DIR, Mock, TEXTS, canned, canned_as, config, metric, settled, shown, start, tokenizer,
    until_shown,
};

const CHAT: &str = "/v1/chat/completions";
const OTHER: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";

/// An engine's tokenizer and template: the bundled model's, or with another template.
fn reader(other: Option<&str>) -> (Arc<Tokenizer>, ChatTemplate) {
    let template = match other {
        Some(source) => ChatTemplate::from_source(source, &Value::Null, || 0),
        None => ChatTemplate::beside(&Path::new(MODEL_DIR).join("tokenizer.json"), || 0),
    };
    (tokenizer(), template.unwrap())
}

/// The ids of a chat under such a reader.
fn ids((tokenizer, template): &(Arc<Tokenizer>, ChatTemplate), chat: &Value) -> Vec<u32> {
    ids_of(Preparation::OWN, tokenizer, template, chat).unwrap()
}

fn ids_of(
    preparation: &'static Preparation,
    tokenizer: &PromptEncoder,
    template: &ChatTemplate,
    chat: &Value,
) -> Result<Vec<u32>, u16> {
    let route = if chat.get("prompt").is_some() { Route::Completions } else { Route::Chat };
    let prompt = Prompt::read(preparation, route, chat).unwrap();
    prompt_ids(&prompt, tokenizer, Some(template), Limits::default()).map(|ids| ids.concat()).map_err(|_| 400)
}

/// A mock with `/tokenize` that accepts messages; `change` modifies the ids of each chat.
fn engine(fixture: &Fixture, other: Option<&str>, change: impl Fn(&Value, &mut Vec<u32>) + Send + 'static) -> Mock {
    let (mock, reader) = (canned(2), reader(other));
    mock.settings().info = Some(fixture.info());
    mock.render(move |path, chat| {
        let mut ids = ids(&reader, chat);
        change(chat, &mut ids);
        if path == "/tokenize" {
            Ok(json!({ "tokens": ids, "count": ids.len(), "max_model_len": 2048 }))
        } else {
            Err(404)
        }
    });
    mock
}

/// Two ranks with tables; the backend is asked again at once while something is unproven.
fn toml(fixture: &Fixture, mock: &Mock) -> String {
    let tables = fixture.write("t", &TEXTS, 0);
    format!("identity_seconds = 0.05\n{}", fixture.affinity(&mock.url(), &tables))
}

fn plain() -> Value {
    json!({ "messages": [{ "role": "user", "content": TEXTS[0] }] })
}

fn with_tools() -> Value {
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    json!({ "messages": [{ "role": "user", "content": TEXTS[0] }], "tools": tools })
}

async fn policy(gateway: &Running, path: &str, body: &Value) -> String {
    let answer = Client::data(gateway).post(path, body.to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-semmoe-policy").to_owned()
}

fn has(list: &Value, shape: &str) -> bool {
    list.as_array().unwrap().iter().any(|found| found == shape)
}

#[tokio::test]
async fn an_engine_that_reads_chats_alike_is_proven() {
    let fixture = Fixture::new(2);
    let mock = engine(&fixture, None, |_, _| ());
    let gateway = start(&toml(&fixture, &mock)).await;
    let chats = shown(&gateway, "pod-a").await["chats"].take();
    assert_eq!((&chats["state"], &chats["route"]), (&json!("equal"), &json!("/tokenize")), "{chats}");
    assert_eq!((&chats["differs"], &chats["unproven"]), (&json!([]), &json!(["other"])), "{chats}");
    for (state, shapes) in [("equal", 14.0), ("differs", 0.0), ("unproven", 1.0)] {
        let line = format!("semmoe_chat_shapes{{backend=\"pod-a\",state=\"{state}\"}}");
        assert_eq!(metric(&gateway, &line).await, shapes, "{state}");
    }
    for body in [plain(), with_tools()] {
        assert_eq!(policy(&gateway, CHAT, &body).await, "affinity");
    }
    settled(&gateway).await;
    // The output of --check --probe.
    let checked = Gateway::probe(config(&toml(&fixture, &mock))).await.unwrap();
    assert!(checked.troubles.is_empty(), "{}", checked.troubles);
    let served = checked.served.to_string();
    assert!(served.contains(", chats equal; read alike: plain, system, "), "{served}");
    assert!(served.contains("; unproven: other"), "{served}");
}

#[tokio::test]
async fn only_chats_that_the_engine_reads_otherwise_lose_affinity() {
    let fixture = Fixture::new(2);
    let mock = engine(&fixture, None, |chat, ids| ids.extend(chat.get("tools").map(|_| 7)));
    let gateway = start(&toml(&fixture, &mock)).await;
    let chats = shown(&gateway, "pod-a").await["chats"].take();
    assert_eq!((&chats["state"], &chats["differs"]), (&json!("differs"), &json!(["tools", "tool_choice"])), "{chats}");
    assert!(has(&chats["equal"], "plain") && has(&chats["equal"], "tool_results"), "{chats}");
    let detail = chats["detail"].as_str().unwrap();
    assert!(detail.starts_with("the tools chat: ") && detail.contains(" in the engine, differing from "), "{detail}");
    let misread = "semmoe_chats_misread_total{backend=\"pod-a\",shape=\"tools\"}";
    for (body, placed_by, counted) in [(plain(), "affinity", 0.0), (with_tools(), "least_load", 1.0)] {
        assert_eq!(policy(&gateway, CHAT, &body).await, placed_by);
        assert_eq!(metric(&gateway, misread).await, counted);
    }
    let completion = json!({ "prompt": TEXTS[1] });
    assert_eq!(policy(&gateway, "/v1/completions", &completion).await, "affinity");
    let ready = Client::admin(&gateway).get("/readyz").await;
    let said = ready.text();
    let trouble = "backend 'pod-a': it tokenizes these chat shapes differently: tools, tool_choice; the tools chat: ";
    assert!(ready.status == 200 && said.contains(trouble), "{said}");
    let checked = Gateway::probe(config(&toml(&fixture, &mock))).await.unwrap();
    assert!(checked.troubles.to_string().contains(trouble), "{}", checked.troubles);
    settled(&gateway).await;
}

/// A planted deviation: the gateway has another template than the engine.
#[tokio::test]
async fn another_template_is_found_by_the_first_probe_and_trusted_once_it_is_right() {
    let fixture = Fixture::new(2);
    let mock = engine(&fixture, Some(OTHER), |_, _| ());
    let gateway = start(&toml(&fixture, &mock)).await;
    let chats = shown(&gateway, "pod-a").await["chats"].take();
    assert!(chats["state"] == "differs" && has(&chats["differs"], "plain"), "{chats}");
    assert_eq!(policy(&gateway, CHAT, &plain()).await, "least_load");
    assert_eq!(policy(&gateway, "/v1/completions", &json!({ "prompt": TEXTS[0] })).await, "affinity");
    let right = reader(None);
    mock.render(move |_, chat| Ok(json!({ "token_ids": ids(&right, chat) })));
    until_shown(&gateway, "pod-a", |shown| shown["chats"]["state"] == "equal").await;
    assert_eq!(policy(&gateway, CHAT, &plain()).await, "affinity");
    settled(&gateway).await;
}

/// The engine's ids are kept: another template of the gateway is judged by them at once.
#[tokio::test]
async fn a_reload_judges_the_new_template_without_asking() {
    let fixture = Fixture::new(2);
    let asked = Arc::new(AtomicBool::new(false));
    let asked_too = Arc::clone(&asked);
    let mock = engine(&fixture, Some(OTHER), move |_, _| asked_too.store(true, Ordering::SeqCst));
    let path = fixture.folder.path().join("template.jinja");
    std::fs::write(&path, OTHER).unwrap();
    let models = fixture.affinity(&mock.url(), &fixture.write("t", &TEXTS, 0));
    let models = models.replace("[[models.b", &format!("chat_template = \"{}\"\n[[models.b", path.display()));
    let file = File::new("", &models);
    let gateway = file.start().await;
    assert_eq!(shown(&gateway, "pod-a").await["chats"]["state"], "equal");
    asked.store(false, Ordering::SeqCst);
    for (source, state) in [("{{ messages[0].content }}", "differs"), (OTHER, "equal")] {
        std::fs::write(&path, source).unwrap();
        assert_eq!(reload(&gateway).await.status, 200);
        assert_eq!(shown(&gateway, "pod-a").await["chats"]["state"], state);
    }
    assert!(!asked.load(Ordering::SeqCst));
}

#[tokio::test]
async fn what_shows_nothing_is_unproven_and_keeps_affinity() {
    type Answer = fn() -> Result<Value, u16>;
    let shows: [(&str, Answer, &str); 8] = [
        ("no route", || Err(404), "no route of the engine returns token ids: /tokenize answered 404"),
        ("takes no messages", || Err(422), "/tokenize answered 422"),
        ("its key", || Err(401), "returns token ids: /tokenize answered 401"),
        ("no ids", || Ok(json!({ "tokens": ["a"] })), "unexpected response"),
        ("lists", || Ok(json!({ "tokens": [[1]], "count": [1] })), "unexpected response"),
        ("negative", || Ok(json!({ "tokens": [-1] })), "unexpected response"),
        ("huge", || Ok(json!({ "tokens": [u64::MAX] })), "unexpected response"),
        ("too long", || Ok(json!({ "tokens": vec![10_000; 100_000] })), "limit of 262144 bytes"),
    ];
    let fixture = Fixture::new(2);
    for (case, answer, detail) in shows {
        let mock = canned_as(fixture.info());
        mock.render(move |_, _| answer());
        let gateway = start(&toml(&fixture, &mock)).await;
        let chats = shown(&gateway, "pod-a").await["chats"].take();
        assert_eq!((&chats["state"], &chats["equal"]), (&json!("unproven"), &json!([])), "{case}: {chats}");
        assert!(chats["detail"].as_str().unwrap().contains(detail), "{case}: {chats}");
        assert_eq!(policy(&gateway, CHAT, &plain()).await, "affinity", "{case}");
        let checked = Gateway::probe(config(&toml(&fixture, &mock))).await.unwrap();
        assert!(checked.troubles.is_empty(), "{case}: {}", checked.troubles);
        assert!(checked.served.to_string().contains(", chats unproven ("), "{case}: {}", checked.served);
        settled(&gateway).await;
    }
}

/// vLLM's route for whole requests is opt-in, and its `/tokenize` ignores some members.
#[tokio::test]
async fn a_route_proves_what_it_reads() {
    for (renders, route, unproven) in [
        (false, "/tokenize", json!(["tool_choice", "effort", "documents", "other"])),
        (true, "/v1/chat/completions/render", json!(["other"])),
    ] {
        let (mock, fixture, (tokenizer, template)) = (canned(1), Fixture::new(1), reader(None));
        let vllm = Preparation::row(Preparation::row_of("vllm", Some([0, 32, 0])));
        let ids = move |chat: &Value| ids_of(vllm, &tokenizer, &template, chat);
        mock.render(move |path, chat| match path {
            "/tokenize" => Ok(json!({ "count": 1, "max_model_len": 2048, "tokens": ids(chat)?, "token_strs": null })),
            _ if renders => Ok(json!({ "request_id": "a", "token_ids": ids(chat)?, "sampling_params": {} })),
            // Version 0.32 without --enable-scale-out.
            _ => Err(403),
        });
        let tables = fixture.write("t", &TEXTS, 0);
        let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", "\"vllm\"\nranks = 1");
        let gateway = start(&toml).await;
        let chats = shown(&gateway, "pod-a").await["chats"].take();
        assert_eq!((&chats["state"], &chats["route"]), (&json!("equal"), &json!(route)), "{chats}");
        assert_eq!(chats["unproven"], unproven, "{chats}");
    }
}

/// A chat that the engine would reject anyway proves nothing.
#[tokio::test]
async fn a_chat_that_the_engine_refuses_is_unproven() {
    let (mock, fixture, reader) = (canned(2), Fixture::new(2), reader(None));
    mock.settings().info = Some(fixture.info());
    mock.render(move |_, chat| {
        if chat["messages"][0]["role"] == "system" { Err(500) } else { Ok(json!({ "tokens": ids(&reader, chat) })) }
    });
    let gateway = start(&toml(&fixture, &mock)).await;
    let chats = shown(&gateway, "pod-a").await["chats"].take();
    assert_eq!((&chats["state"], &chats["unproven"]), (&json!("equal"), &json!(["system", "other"])), "{chats}");
    assert_eq!(chats["detail"], "the engine returned 500 for the system chat");
}

#[tokio::test]
async fn several_other_counts_in_answers_cost_affinity_until_they_agree_again() {
    let fixture = Fixture::new(2);
    let mock = canned_as(fixture.info());
    let gateway = start(&toml(&fixture, &mock)).await;
    let client = Client::data(&gateway);
    let right = ids(&reader(None), &plain()).len();
    let send = async |usage: usize, body: Value| {
        let usage = format!("usage {usage}");
        let answer = client.call(http::Method::POST, CHAT, &[("x-mock", usage.as_str())], body.to_string()).await;
        answer.header("x-semmoe-policy").to_owned()
    };
    for (usage, body, placed_by) in [
        (right, plain(), "affinity"),
        (right + 9, with_tools(), "affinity"),
        (right + 9, with_tools(), "affinity"),
        (right + 9, with_tools(), "affinity"),
        (right + 9, with_tools(), "least_load"),
        (right, plain(), "affinity"),
    ] {
        assert_eq!(send(usage, body.clone()).await, placed_by, "{usage} {body}");
        settled(&gateway).await;
    }
    let chats = shown(&gateway, "pod-a").await["chats"].take();
    assert_eq!((&chats["differs"], &chats["counted_alike"]), (&json!(["tools"]), &json!(["plain"])), "{chats}");
    assert_eq!(chats["detail"], "the engine's token counts differ for chats of shape tools");
    assert_eq!(send(right, with_tools()).await, "least_load");
    settled(&gateway).await;
    assert_eq!(send(right, with_tools()).await, "affinity");
    assert_eq!(shown(&gateway, "pod-a").await["chats"]["state"], "unproven");
    settled(&gateway).await;
}

#[tokio::test]
async fn the_zone_of_the_engines_is_utc_or_an_offset() {
    let fixture = Fixture::new(2);
    let mock = engine(&fixture, None, |_, _| ());
    let toml = toml(&fixture, &mock);
    for (zone, is_one) in [
        ("UTC", true),
        ("+14:00", true),
        ("-09:30", true),
        ("Z", false),
        ("", false),
        ("+2:00", false),
        ("+15:00", false),
        ("+02:60", false),
        ("++2:00", false),
        ("é2:00", false),
        ("Europe/Berlin", false),
    ] {
        let toml = toml.replace("[[models.b", &format!("template_timezone = \"{zone}\"\n[[models.b"));
        let text = format!("[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[health]\n{toml}");
        let parsed = semmoe_gateway::Config::from_toml(&text, Path::new(""));
        assert_eq!(parsed.is_ok(), is_one, "{zone}");
        if let Err(error) = parsed {
            let cause =
                format!("models[0].template_timezone: '{zone}', expected UTC or an offset from it such as +02:00");
            assert!(error.to_string().contains(&cause), "{error}");
        }
    }
}
