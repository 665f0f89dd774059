//! One verdict: whatever does not match costs affinity and names the reason, identically at start, by a reload, by a
//! probe and after a restart of the engine.

use std::collections::HashSet;
use std::path::Path;

use semmoe_gateway::{Gateway, Health, Running};
use serde_json::{Value, json};

use crate::support::files::{File, reload};
use crate::support::{
    Client, Fixture, MODEL_DIR, Mock, TEXTS, canned, canned_as, config, eventually, in_flight, metric, metrics, shown,
    start, start_bare, until_shown,
};

/// Number of requests, over all backends of a gateway.
const REQUESTS: usize = 150;
const MODEL: &str = r#"{"model":"tiny","text":"river water boat fish"}"#;

/// An engine and the expected verdict: `Ok` with the reason for being routed by load, if any, or `Err` with a part of
/// the reason for being closed.
struct Case {
    name: &'static str,
    engine: &'static str,
    info: Value,
    /// The name of the model that it serves.
    serves: &'static str,
    verdict: Result<Option<&'static str>, &'static str>,
}

fn cases(fixture: &Fixture) -> Vec<Case> {
    let with = |field: &str, value: Value| {
        let mut info = fixture.info();
        info[field] = value;
        info
    };
    let case = |name, info, reason| Case { name, engine: "semmoe", info, serves: "tiny", verdict: Ok(reason) };
    let sglang = |name, location: Value, reason| {
        let info = json!({ "version": "0.5.23", "dp_size": 2, "ep_size": 2, "init_expert_location": location });
        Case { engine: "sglang", ..case(name, info, reason) }
    };
    let other_model = |serves, verdict| Case { serves, verdict, ..case(serves, fixture.info(), None) };
    vec![
        case("fits", fixture.info(), None),
        case("other ranks", with("dp_size", json!(4)), Some("ranks")),
        case("more ranks than may be", with("dp_size", json!(65_535)), Some("ranks")),
        case("no ranks", with("dp_size", json!(0)), Some("ranks unknown")),
        case("another placement", with("placement_digest", json!("beef")), Some("placement")),
        case("other groups", with("ep_size", json!(4)), Some("placement")),
        case("it moves experts", with("enable_eplb", json!(true)), Some("placement")),
        case("another tokenizer", with("tokenizer_sha256", json!("beef")), Some("tokenizer")),
        case("other experts", with("num_experts", json!(64)), Some("tables")),
        sglang("experts in order", json!("trivial"), None),
        sglang("experts by a file that is not here", json!("/maps/e.json"), Some("placement unproven")),
        sglang("experts by counts", json!("{\"logical_count\": [[1]]}"), Some("placement unproven")),
        sglang("nothing about experts", Value::Null, Some("placement unproven")),
        Case {
            verdict: Err("it runs with --force-local-rate 0.4"),
            ..case("a measurement", with("force_local_rate", json!(0.4)), None)
        },
        other_model("other", Err("it serves a different model, 'other'")),
    ]
}

/// Prompts of different lengths, which prefer no rank.
fn generate(number: usize) -> String {
    json!({ "model": "tiny", "text": TEXTS.join(" ").repeat(number + 1) }).to_string()
}

/// When an engine is judged.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Start,
    Reload,
    Probe,
    Restart,
}

fn backend(name: &str, engine: &str, mock: &Mock, tables: &Path) -> String {
    let (url, tables) = (mock.url(), tables.display());
    format!("[[models.backends]]\nname = \"{name}\"\nengine = \"{engine}\"\nurl = \"{url}\"\ntables = \"{tables}\"\n")
}

fn become_case(mock: &Mock, case: &Case) {
    mock.settings().info = Some(case.info.clone());
    mock.lists(case.serves);
}

/// Name of the backend of a case.
fn pod(case: usize) -> String {
    format!("pod-{case}")
}

/// A gateway in front of a good engine, `pod-a`, and one backend per case, [`pod`], judged at this moment.
async fn judged_at(moment: Moment, cases: &[Case], fixture: &Fixture, tables: &Path) -> (Running, Vec<Mock>) {
    let good = canned_as(fixture.info());
    let mut mocks: Vec<Mock> = cases.iter().map(|_| canned_as(fixture.info())).collect();
    let alone = fixture.affinity(&good.url(), tables);
    let pods = cases.iter().zip(&mocks).enumerate();
    let pods: String = pods.map(|(at, (case, mock))| backend(&pod(at), case.engine, mock, tables)).collect();
    let all = format!("{alone}{pods}");
    let file = File::new("", if matches!(moment, Moment::Reload) { &alone } else { &all });
    for (case, mock) in cases.iter().zip(&mut mocks) {
        match moment {
            Moment::Probe => mock.kill(),
            Moment::Restart if case.engine == "sglang" => {
                mock.settings().info = Some(json!({
                    "version": "0.5.23", "dp_size": 2, "ep_size": 2, "init_expert_location": "trivial", "random_seed": 1,
                }))
            }
            Moment::Restart => {}
            Moment::Start | Moment::Reload => become_case(mock, case),
        }
    }
    let gateway = file.start().await;
    if matches!(moment, Moment::Reload) {
        file.write("", &all);
        assert_eq!(reload(&gateway).await.status, 200);
    }
    for (at, (case, mock)) in cases.iter().zip(&mut mocks).enumerate() {
        if matches!(moment, Moment::Restart) {
            gateway.wait_health(&pod(at), Health::is_healthy).await.unwrap();
            mock.kill();
        }
        if matches!(moment, Moment::Probe | Moment::Restart) {
            gateway.wait_health(&pod(at), |health| matches!(health, Health::Unhealthy { .. })).await.unwrap();
            become_case(mock, case);
            mock.listen();
        }
    }
    mocks.push(good);
    (gateway, mocks)
}

/// Checks whether a backend serves, why its requests are routed by load, and what the gateway reports about it.
async fn check_verdict(gateway: &Running, name: &str, case: &Case, context: &str) {
    let ready = async || Client::admin(gateway).get("/readyz").await;
    match case.verdict {
        Ok(reason) => {
            let found = until_shown(gateway, name, |found| found["healthy"] == true).await;
            assert_eq!(found["by_load"]["reason"].as_str(), reason, "{context}: {found}");
            let detail = found["by_load"]["detail"].as_str().unwrap_or("ready");
            let (status, body) = (ready().await.status, ready().await.text());
            assert!(status == 200 && body.starts_with("ready\n") && body.contains(detail), "{context}: {body}");
            let gauge = format!("semmoe_backend_unpinned{{backend=\"{name}\"");
            let wanted = reason.map(|reason| format!("{gauge},reason=\"{reason}\"}} 1"));
            let found = metrics(gateway).await.lines().find(|line| line.starts_with(&gauge)).map(str::to_owned);
            assert_eq!(found, wanted, "{context}");
        }
        Err(says) => {
            let closed = |health: &Health| format!("{health:?}").contains(says);
            gateway.wait_health(name, closed).await.unwrap();
            assert_eq!(shown(gateway, name).await["by_load"], Value::Null, "{context}");
            assert_eq!(ready().await.status, 200, "{context}: the others serve");
        }
    }
}

#[tokio::test]
async fn one_verdict_at_start_by_reload_by_probe_and_after_a_restart() {
    let fixture = Fixture::new(2);
    let (tables, cases) = (fixture.write("t", &TEXTS, 0), cases(&fixture));
    for moment in [Moment::Start, Moment::Reload, Moment::Probe, Moment::Restart] {
        let (gateway, mocks) = judged_at(moment, &cases, &fixture, &tables).await;
        for (at, case) in cases.iter().enumerate() {
            check_verdict(&gateway, &pod(at), case, &format!("{}, {moment:?}", case.name)).await;
        }
        let client = Client::data(&gateway);
        // Held, so that each serving backend receives a share of them.
        mocks.iter().for_each(|mock| mock.behave("late"));
        let asked: Vec<_> = (0..REQUESTS).map(|number| client.begin("/generate", generate(number % 24))).collect();
        eventually("all are placed", async || in_flight(&gateway).await.1 == REQUESTS as f64).await;
        mocks.iter().for_each(|mock| mock.release(REQUESTS));
        let mut by = HashSet::new();
        for answer in asked {
            let answer = answer.await.unwrap();
            assert_eq!(answer.status, 200, "{moment:?}: {answer:?}");
            let [backend, rank, policy] =
                ["x-semmoe-backend", "x-semmoe-rank", "x-semmoe-policy"].map(|name| answer.header(name));
            let placed_by = if rank.is_empty() { "least_load" } else { "affinity" };
            assert_eq!(policy, placed_by, "{moment:?}: on {backend}, rank '{rank}'");
            by.insert(backend.to_owned());
        }
        for (at, case) in cases.iter().enumerate() {
            assert_eq!(by.contains(&pod(at)), case.verdict.is_ok(), "{}, {moment:?}: {by:?}", case.name);
        }
        assert!(by.contains("pod-a"), "{moment:?}: {by:?}");
    }
}

/// A model whose only backend is closed reports why.
#[tokio::test]
async fn an_engine_that_serves_another_model_is_not_ready() {
    for engine in ["semmoe", "sglang", "openai"] {
        let mock = canned(1);
        mock.lists("other");
        let toml = format!(
            "[[models]]\nname = \"tiny\"\naliases = [\"small\"]\npolicy = \"round_robin\"\n[[models.backends]]\n\
             name = \"pod-a\"\nengine = \"{engine}\"\nurl = \"{}\"\n",
            mock.url()
        );
        let gateway = start(&format!("identity_seconds = 0.05\n{toml}")).await;
        let ready = Client::admin(&gateway).get("/readyz").await;
        let says = ready.text();
        assert!(ready.status == 503 && says.contains("a different model, 'other'"), "{engine}: {says}");
        // By an alias, by the configured name, or by any name.
        for serves in ["small", "tiny", "any"] {
            mock.lists(serves);
            gateway.wait_ready().await;
            assert_eq!(Client::admin(&gateway).get("/readyz").await.status, 200, "{engine}");
            mock.lists("other");
            gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
        }
        mock.lists("any");
        let named = start(&format!("identity_seconds = 0.05\n{toml}served_name = \"other\"\n")).await;
        assert_eq!(Client::admin(&named).get("/readyz").await.status, 200, "{engine}");
    }
}

/// vLLM requires its key only on request routes.
#[tokio::test]
async fn an_engine_that_refuses_the_key_is_not_ready() {
    let mock = canned(1);
    mock.settings().health = 200;
    mock.settings().models_authorization = Some("Bearer right".into());
    let toml = format!(
        "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"pod-a\"\n\
         engine = \"vllm\"\nranks = 1\nurl = \"{}\"\n",
        mock.url()
    );
    let gateway = start(&toml).await;
    let health = gateway.health("pod-a").unwrap();
    assert!(format!("{health:?}").contains("401"), "{health:?}");
}

/// An unreadable file of one model costs that model its affinity, at start and by a reload.
#[tokio::test]
async fn a_file_that_cannot_be_read_costs_one_model_its_affinity() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &TEXTS, 0);
    let (mock, other) = (canned_as(fixture.info()), canned_as(fixture.info()));
    mock.lists("any");
    let good = fixture.affinity(&mock.url(), &tables);
    let models = &good[good.find("[[models]]").unwrap()..];
    let second = models.replace("\"tiny\"", "\"second\"").replace("pod-a", "pod-b").replace(&mock.url(), &other.url());
    let in_tables = |path: &str| good.replace(&tables.display().to_string(), path);
    for (toml, says) in [
        (in_tables("/no/such"), "tables: cannot open /no/such"),
        (in_tables(&format!("{MODEL_DIR}/config.json")), "tables: "),
        (good.replace("tokenizer.json", "none.json"), "cannot read"),
        (good.replace("tokenizer.json", "config.json"), "config.json: "),
        (format!("{good}ranks = 3\n"), "the tables have 2 attention-DP ranks, but `ranks` is 3"),
        (format!("{good}placement_digest = \"{}\"\n", "0".repeat(64)), "`placement_digest` says"),
    ] {
        let both = format!("{toml}{second}");
        let checked = Gateway::check(&config(&both)).await.unwrap().troubles.to_string();
        assert!(checked.contains(says) && !checked.contains('\n'), "{says}: {checked}");
        let file = File::new("", &both);
        let gateway = file.start().await;
        // A reload with a new backend has this outcome, too.
        let later = File::new("", &second);
        let reloaded = later.start().await;
        later.write("", &both);
        assert_eq!(reload(&reloaded).await.status, 200, "{says}");
        for gateway in [gateway, reloaded] {
            let found = shown(&gateway, "pod-a").await;
            assert!(found["healthy"] == true && !found["by_load"].is_null(), "{says}: {found}");
            let ready = Client::admin(&gateway).get("/readyz").await;
            let body = ready.text();
            assert!(ready.status == 200 && body.contains(says), "{says}: {body}");
            for (model, policy) in [("tiny", "least_load"), ("second", "affinity")] {
                let body = json!({ "model": model, "prompt": TEXTS[0] }).to_string();
                let answer = Client::data(&gateway).post("/v1/completions", body).await;
                assert_eq!((answer.status, answer.header("x-semmoe-policy")), (200, policy), "{says}: {answer:?}");
            }
        }
    }
}

/// A running model keeps what it has read while the file is bad, and reports it until the file is good again.
#[tokio::test]
async fn a_reload_with_a_file_that_cannot_be_read_keeps_what_is_in_use() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &TEXTS, 0);
    let mock = canned_as(fixture.info());
    let good = fixture.affinity(&mock.url(), &tables);
    let file = File::new("", &good);
    let gateway = file.start().await;
    let ask = async || Client::data(&gateway).post("/generate", MODEL).await.header("x-semmoe-policy").to_owned();
    let said = async || Client::admin(&gateway).get("/readyz").await.text();
    for (toml, says) in [
        (good.replace(&tables.display().to_string(), "/no/such"), "the earlier tables stay in use"),
        (good.replace("tokenizer.json", "none.json"), "the earlier one stays in use"),
    ] {
        file.write("", &toml);
        assert_eq!(reload(&gateway).await.status, 200, "{says}");
        assert_eq!(ask().await, "affinity", "{says}");
        assert!(said().await.contains(says), "{}", said().await);
        file.write("", &good);
        assert_eq!(reload(&gateway).await.status, 200, "{says}");
        assert_eq!((ask().await.as_str(), said().await.as_str()), ("affinity", "ready\n"));
    }
}

/// Matching tables restore affinity, by hand or by a reload.
#[tokio::test]
async fn tables_that_fit_bring_affinity_back() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &TEXTS, 0);
    let mut info = fixture.info();
    info["dp_size"] = json!(4);
    info["ep_size"] = json!(4);
    let wide = Fixture::new(4);
    info["placement_digest"] = json!(wide.placement_digest());
    let fitting = wide.write("wide", &["river", "king", "bread", "snow"], 0);
    let mock = canned_as(info);
    let good = fixture.affinity(&mock.url(), &tables);
    let file = File::new("", &good);
    let gateway = file.start().await;
    assert_eq!(shown(&gateway, "pod-a").await["by_load"]["reason"], "ranks");
    let admin = Client::admin(&gateway);
    let upload = admin.call(
        http::Method::POST,
        "/admin/tables?backend=pod-a",
        &[("content-type", "application/octet-stream")],
        std::fs::read(&fitting).unwrap(),
    );
    assert_eq!(upload.await.status, 200);
    let found = shown(&gateway, "pod-a").await;
    assert!(found["by_load"].is_null() && found["ranks"].as_array().unwrap().len() == 4, "{found}");
    assert_eq!(Client::data(&gateway).post("/generate", MODEL).await.header("x-semmoe-policy"), "affinity");
    assert_eq!(metric(&gateway, "semmoe_backend_unpinned{backend=\"pod-a\",reason=\"ranks\"}").await, 0.0);
    let again = File::new("", &good);
    let gateway = again.start().await;
    again.write("", &good.replace(&tables.display().to_string(), &fitting.display().to_string()));
    assert_eq!(reload(&gateway).await.status, 200);
    assert!(shown(&gateway, "pod-a").await["by_load"].is_null());
    assert_eq!(Client::data(&gateway).post("/generate", MODEL).await.header("x-semmoe-policy"), "affinity");
}

/// The file that SGLang names is compared if readable, and what was read for a process stays.
#[tokio::test]
async fn the_map_in_a_file_is_compared() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &TEXTS, 0);
    let loaded = semmoe_tables::Tables::open(&tables).unwrap();
    let same = semmoe_tables::export::sglang(&loaded).unwrap();
    let mut other: Value = serde_json::from_str(&same).unwrap();
    let row = other["physical_to_logical_map"][0].as_array_mut().unwrap();
    row.reverse();
    let map = fixture.folder.path().join("e.json");
    let info = |seed: u64| json!({ "version": "0.5.23", "dp_size": 2, "ep_size": 2, "init_expert_location": map, "random_seed": seed });
    std::fs::write(&map, &same).unwrap();
    let mock = canned_as(info(1));
    let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", "\"sglang\"");
    let gateway = start(&format!("identity_seconds = 0.02\n{toml}")).await;
    let found = shown(&gateway, "pod-a").await;
    assert!(found["by_load"].is_null() && found["placement_by"] == "engine", "{found}");
    // Rewritten beside a running engine: it still runs the old content. A new process reads the new one.
    std::fs::write(&map, other.to_string()).unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert!(shown(&gateway, "pod-a").await["by_load"].is_null());
    mock.settings().info = Some(info(2));
    let found = until_shown(&gateway, "pod-a", |found| found["by_load"]["reason"] == "placement").await;
    assert!(found["by_load"]["detail"].as_str().unwrap().contains("group 0 of layer 0"), "{found}");
    // A file without a map, a pipe and a folder prove nothing, and block nothing.
    for (seed, name) in [(3, "pipe.json"), (4, "folder.json"), (5, "text.json"), (6, "e.pt")] {
        let path = fixture.folder.path().join(name);
        match name {
            "pipe.json" => {
                let kind = rustix::fs::FileType::Fifo;
                rustix::fs::mknodat(rustix::fs::CWD, &path, kind, 0o600.into(), 0).unwrap();
            }
            "folder.json" => std::fs::create_dir(&path).unwrap(),
            _ => std::fs::write(&path, "[1]").unwrap(),
        }
        let mut info = info(seed);
        info["init_expert_location"] = json!(path);
        mock.settings().info = Some(info);
        let unproven = |found: &Value| found["by_load"]["reason"] == "placement unproven";
        until_shown(&gateway, "pod-a", unproven).await;
    }
    let declared = format!("{toml}placement_digest = \"{}\"\n", loaded.placement_digest());
    let gateway = start_bare(&declared).await;
    assert!(shown(&gateway, "pod-a").await["by_load"].is_null());
}
