//! Tables are swapped under load, or refused with a reason.

use half::f16;
use http::Method;
use semmoe_gateway::Running;
use semmoe_tables::{Placement, Provenance, TablesBuilder};
use serde_json::{Value, json};

use crate::support::files::reload;
use crate::support::{
    Answer, Client, Fixture, Mock, TEXTS, canned, canned_as, metric, reloadable, shown, start_bare, until_shown,
};

async fn gateway(mock: &Mock, fixture: &Fixture) -> Running {
    reloadable(mock, fixture, "").await
}

async fn load(gateway: &Running, path: &str) -> Answer {
    Client::admin(gateway).post("/admin/tables", json!({ "backend": "pod-a", "path": path }).to_string()).await
}

async fn upload(gateway: &Running, backend: &str, bytes: Vec<u8>) -> Answer {
    let headers = [("content-type", "application/octet-stream")];
    Client::admin(gateway).call(Method::POST, &format!("/admin/tables?backend={backend}"), &headers, bytes).await
}

async fn rank_of(gateway: &Running, text: &str) -> String {
    let body = json!({ "text": text }).to_string();
    Client::data(gateway).post("/generate", body).await.header("x-semmoe-rank").to_owned()
}

#[tokio::test]
async fn files_and_uploads_are_swapped_in() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = gateway(&mock, &fixture).await;
    assert_eq!((rank_of(&gateway, TEXTS[0]).await, rank_of(&gateway, TEXTS[1]).await), ("0".into(), "1".into()));
    let shown = Client::admin(&gateway).get("/admin/tables").await.json();
    assert_eq!((&shown["generation"], &shown["tables"][0]["generation"]), (&json!(1), &json!(1)));
    assert_eq!(shown["tables"][0]["placement_digest"], fixture.placement_digest());

    fixture.write("turned", &TEXTS, 1);
    let answer = load(&gateway, "turned").await;
    assert_eq!((answer.status, &answer.json()["generation"]), (200, &json!(2)), "{answer:?}");
    assert_eq!((rank_of(&gateway, TEXTS[0]).await, rank_of(&gateway, TEXTS[1]).await), ("1".into(), "0".into()));
    let shown = Client::admin(&gateway).get("/admin/tables").await.json();
    assert!(shown["tables"][0]["path"].as_str().unwrap().ends_with("turned"));

    let answer = upload(&gateway, "pod-a", fixture.builder(&TEXTS, 0).to_bytes().unwrap()).await;
    assert_eq!((answer.status, &answer.json()["generation"]), (200, &json!(3)), "{answer:?}");
    assert_eq!(rank_of(&gateway, TEXTS[0]).await, "0");
    let shown = Client::admin(&gateway).get("/admin/tables").await.json();
    assert!(shown["tables"][0]["path"].is_null());
    // The content type that `curl -d` sends.
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let command = json!({ "backend": "pod-a", "path": "turned" }).to_string();
    let answer = Client::admin(&gateway).call(Method::POST, "/admin/tables", &form, command).await;
    assert_eq!((answer.status, &answer.json()["generation"]), (200, &json!(4)), "{answer:?}");
    assert_eq!(metric(&gateway, "semmoe_tables_generation").await, 4.0);
    assert_eq!(metric(&gateway, "semmoe_table_reloads_total{outcome=\"ok\"}").await, 3.0);
}

/// The fixture's tables with `change` applied to the model, over a placement of `groups` groups.
fn other(fixture: &Fixture, groups: u16, swap: bool, change: impl Fn(&mut semmoe_tables::ModelInfo)) -> Vec<u8> {
    let mut model = fixture.model.clone();
    change(&mut model);
    let layers = model.layers();
    let mut experts: Vec<Vec<u16>> = (0..layers)
        .map(|_| (0..model.num_experts).map(|expert| expert * groups / model.num_experts).collect())
        .collect();
    if swap {
        let last = experts[0].len() - 1;
        experts[0].swap(0, last);
    }
    let placement = Placement::new(groups, experts).unwrap();
    let provenance = Provenance { source: "test".to_owned(), created: "2026-01-01T00:00:00Z".to_owned() };
    let t = vec![f16::from_f32(0.125); model.vocab_size as usize * usize::from(groups)];
    TablesBuilder::dp(model, provenance, placement, t, vec![0.0; usize::from(groups)]).to_bytes().unwrap()
}

#[tokio::test]
async fn tables_that_do_not_fit_are_refused_and_the_old_ones_stay() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = gateway(&mock, &fixture).await;
    let good = fixture.builder(&TEXTS, 0).to_bytes().unwrap();
    let mut damaged = good.clone();
    damaged.truncate(good.len() - 1);
    let text = |bytes: &[u8]| bytes.windows(13).position(|part| part == br#""version":"1""#).expect("its version");
    let mut newer = good.clone();
    newer[text(&good) + 11] = b'2';
    for (case, bytes, status, says) in [
        ("damaged", damaged, 422, "container"),
        ("another version", newer, 422, "version"),
        ("empty", Vec::new(), 422, "container"),
        ("other model", other(&fixture, 2, false, |model| model.model = "else".to_owned()), 409, "model"),
        (
            "other tokenizer",
            other(&fixture, 2, false, |model| model.tokenizer_sha256 = Some("0".repeat(64))),
            409,
            "tokenizer",
        ),
        ("larger vocabulary", other(&fixture, 2, false, |model| model.vocab_size += 1), 409, "vocab_size"),
        ("smaller vocabulary", other(&fixture, 2, false, |model| model.vocab_size -= 1), 409, "10239 tokens"),
        ("other experts", other(&fixture, 2, false, |model| model.num_experts = 16), 409, "num_experts"),
        ("other ranks", other(&fixture, 4, false, |_| ()), 409, "ranks"),
        ("other placement", other(&fixture, 2, true, |_| ()), 409, "placement"),
    ] {
        let answer = upload(&gateway, "pod-a", bytes).await;
        assert_eq!(answer.status, status, "{case}: {answer:?}");
        assert!(answer.message().contains(says), "{case}: {}", answer.message());
        assert!(!answer.message().contains('\n'), "{case}: one sentence");
    }
    assert_eq!(upload(&gateway, "pod-z", good).await.status, 404);
    assert_eq!(metric(&gateway, "semmoe_tables_generation").await, 1.0);
    assert_eq!(metric(&gateway, "semmoe_table_reloads_total{outcome=\"refused\"}").await, 7.0);
    assert_eq!(rank_of(&gateway, TEXTS[1]).await, "1");
}

#[tokio::test]
async fn paths_stay_below_the_root() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = gateway(&mock, &fixture).await;
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::os::unix::fs::symlink(outside.path(), fixture.folder.path().join("link")).unwrap();
    std::fs::create_dir(fixture.folder.path().join("folder")).unwrap();
    std::os::unix::fs::symlink("first", fixture.folder.path().join("inside")).unwrap();
    // Valid tables outside, in a folder behind a link: neither they nor their kind is revealed.
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::copy(fixture.folder.path().join("first"), elsewhere.path().join("tables")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), fixture.folder.path().join("out")).unwrap();
    // It has no writer: a reader that opens it blocks.
    let pipe = fixture.folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for (path, status) in [
        ("first", 200),
        (fixture.folder.path().join("first").to_str().unwrap(), 200),
        ("../../../../../../etc/passwd", 403),
        ("/etc/passwd", 403),
        (outside.path().to_str().unwrap(), 403),
        ("link", 403),
        ("out/tables", 403),
        ("out", 403),
        ("/nowhere", 403),
        ("folder/../first", 403),
        ("inside", 200),
        ("missing", 422),
        ("pipe", 422),
        ("folder", 422),
        ("", 422),
    ] {
        assert_eq!(load(&gateway, path).await.status, status, "{path}");
    }
    let admin = Client::admin(&gateway);
    for body in ["", "{}", "[]", r#"{"backend":"pod-a"}"#, r#"{"backend":"pod-a","path":"first","more":1}"#] {
        assert_eq!(admin.post("/admin/tables", body).await.status, 400, "{body}");
    }
    let long = format!("{{\"backend\":\"{}\"}}", "a".repeat(1 << 20));
    assert_eq!(admin.post("/admin/tables", long).await.status, 413);
    assert_eq!(admin.call(Method::POST, "/admin/tables", &[], "x").await.status, 400);
}

/// A backend that returns with another placement is routed by load until its tables are loaded.
#[tokio::test]
async fn a_backend_with_a_new_placement_is_routed_by_load_until_its_tables_are_loaded() {
    let mut mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = gateway(&mock, &fixture).await;
    assert_eq!(rank_of(&gateway, TEXTS[0]).await, "0");
    let next = other(&fixture, 2, true, |_| ());
    let digest = semmoe_tables::Tables::from_bytes(next.clone()).unwrap().placement_digest().to_owned();
    mock.kill();
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    let mut info = fixture.info();
    info["placement_digest"] = json!(digest);
    mock.settings().info = Some(info);
    mock.listen();
    until_shown(&gateway, "pod-a", runs_another).await;
    let policy = async || {
        let answer = Client::data(&gateway).post("/generate", r#"{"text":"a"}"#).await;
        (answer.status, answer.header("x-semmoe-policy").to_owned())
    };
    assert_eq!(policy().await, (200, "least_load".to_owned()));
    assert_eq!(upload(&gateway, "pod-a", next).await.status, 200);
    assert_eq!(policy().await, (200, "affinity".to_owned()));
}

/// An engine that restarts between two probes looks healthy all the time: it is asked before its tables change.
#[tokio::test]
async fn a_quick_restart_with_a_new_placement_is_seen() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "").await;
    let next = other(&fixture, 2, true, |_| ());
    let old = fixture.builder(&TEXTS, 0).to_bytes().unwrap();
    assert_eq!(upload(&gateway, "pod-a", next.clone()).await.status, 409);
    let digest = semmoe_tables::Tables::from_bytes(next.clone()).unwrap().placement_digest().to_owned();
    let mut info = fixture.info();
    info["placement_digest"] = json!(digest);
    mock.settings().info = Some(info);
    assert_eq!(upload(&gateway, "pod-a", old).await.status, 409);
    until_shown(&gateway, "pod-a", runs_another).await;
    assert_eq!(upload(&gateway, "pod-a", next).await.status, 200);
    assert!(shown(&gateway, "pod-a").await["by_load"].is_null());
    assert_eq!(Client::data(&gateway).post("/generate", r#"{"text":"a"}"#).await.status, 200);
    mock.settings().info = Some(fixture.info());
    let undrain = Client::admin(&gateway).post("/admin/backends/pod-a/undrain", "").await;
    assert_eq!(undrain.status, 200);
    until_shown(&gateway, "pod-a", runs_another).await;
}

/// Whether the admin plane shows that a backend's placement differs from its tables'.
fn runs_another(shown: &Value) -> bool {
    let reason = &shown["by_load"];
    reason["reason"] == "placement" && reason["detail"].as_str().unwrap().contains("runs placement")
}

/// Drained, restarted with another E before a probe fails, and reconfigured: the reload compares the tables with what
/// runs now, and the backend serves again once undrained.
#[tokio::test]
async fn a_reload_asks_a_restarted_backend_what_it_runs() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "identity_seconds = 3600").await;
    let admin = Client::admin(&gateway);
    assert_eq!(admin.post("/admin/backends/pod-a/drain", "").await.status, 200);
    let next = other(&fixture, 2, true, |_| ());
    mock.settings().info = Some(info_of(&fixture, &next));
    std::fs::write(fixture.folder.path().join("next"), next).unwrap();
    let file = fixture.folder.path().join("semmoe.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("/first\"", "/next\"")).unwrap();
    let answer = reload(&gateway).await;
    assert_eq!((answer.status, &answer.json()["tables_loaded"]), (200, &json!(["pod-a"])), "{answer:?}");
    assert_eq!(admin.post("/admin/backends/pod-a/undrain", "").await.status, 200);
    gateway.wait_ready().await;
    assert_eq!(Client::data(&gateway).post("/generate", r#"{"text":"a"}"#).await.status, 200);
}

/// The report of a backend that runs the placement of these tables.
fn info_of(fixture: &Fixture, tables: &[u8]) -> serde_json::Value {
    let tables = semmoe_tables::Tables::from_bytes(tables.to_vec()).unwrap();
    let mut info = fixture.info();
    info["placement_digest"] = json!(tables.placement_digest());
    info
}

/// Nothing else triggers a question: no probe failed, and no tables changed.
#[tokio::test]
async fn another_placement_is_found_now_and_then_and_after_a_broken_connection() {
    for (health, restarts) in [("identity_seconds = 0.05", false), ("identity_seconds = 3600", true)] {
        let fixture = Fixture::new(2);
        let mut mock = canned_as(fixture.info());
        let tables = fixture.write("first", &TEXTS, 0);
        // Too seldom to notice the moment in which the engine is away.
        let health = format!("[health]\ninterval_seconds = 1\n{health}");
        let gateway = start_bare(&format!("{health}\n{}", fixture.affinity(&mock.url(), &tables))).await;
        gateway.wait_ready().await;
        mock.settings().info = Some(info_of(&fixture, &other(&fixture, 2, true, |_| ())));
        if restarts {
            mock.kill();
            mock.listen();
        }
        until_shown(&gateway, "pod-a", runs_another).await;
    }
}
