//! Table files that change while the gateway runs.

use semmoe_gateway::Running;
use serde_json::{Value, json};

use crate::support::{Client, Fixture, PATIENCE, TEXTS, canned, metric, reloadable, start_bare};

const WATCH: &str = "[tables]\nwatch = true\nwatch_interval_seconds = 0.01";

/// Waits until `GET /admin/tables` shows the wanted state, and returns it.
async fn shown(gateway: &Running, wanted: impl Fn(&Value) -> bool) -> Value {
    let client = Client::admin(gateway);
    let wait = async {
        loop {
            let shown = client.get("/admin/tables").await.json();
            if wanted(&shown) {
                return shown;
            }
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the file is looked at in time")
}

async fn rank(gateway: &Running) -> String {
    let body = json!({ "text": TEXTS[0] }).to_string();
    Client::data(gateway).post("/generate", body).await.header("x-semmoe-rank").to_owned()
}

fn replace(fixture: &Fixture, shift: u16) {
    fixture.write("first", &TEXTS, shift);
}

#[tokio::test]
async fn a_file_that_changes_is_loaded_and_a_bad_one_is_not() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, WATCH).await;
    let file = fixture.folder.path().join("first");
    assert_eq!(rank(&gateway).await, "0");
    replace(&fixture, 1);
    let now = shown(&gateway, |shown| shown["generation"] == 2).await;
    assert_eq!((&now["watched"], &now["tables"][0]["path"]), (&json!(true), &json!(file)));
    assert_eq!(rank(&gateway).await, "1");
    // Written in place by an unfinished writer: half a file is not valid tables.
    let good = fixture.builder(&TEXTS, 0).to_bytes().unwrap();
    std::fs::write(&file, &good[..good.len() / 2]).unwrap();
    let now = shown(&gateway, |shown| shown["errors"] != json!([])).await;
    assert_eq!((&now["errors"][0]["by"], &now["generation"]), (&json!("watch"), &json!(2)));
    assert_eq!(rank(&gateway).await, "1");
    std::fs::write(&file, &good).unwrap();
    let now = shown(&gateway, |shown| shown["generation"] == 3).await;
    assert_eq!(now["errors"], json!([]));
    assert_eq!(rank(&gateway).await, "0");
    // The file is gone: the tables in use stay, and a later file is loaded.
    std::fs::remove_file(&file).unwrap();
    replace(&fixture, 1);
    shown(&gateway, |shown| shown["generation"] == 4).await;
    // It is counted after it takes effect.
    let counted = async { while metric(&gateway, "semmoe_table_reloads_total{outcome=\"ok\"}").await < 3.0 {} };
    tokio::time::timeout(PATIENCE, counted).await.expect("counted in time");
    assert_eq!(metric(&gateway, "semmoe_table_reloads_total{outcome=\"ok\"}").await, 3.0);
}

/// Rewriting identical bytes is no reason to start over.
#[tokio::test]
async fn equal_tables_are_not_swapped() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, WATCH).await;
    replace(&fixture, 0);
    let wait = async { while metric(&gateway, "semmoe_table_reloads_total{outcome=\"unchanged\"}").await < 1.0 {} };
    tokio::time::timeout(PATIENCE, wait).await.expect("the file is looked at in time");
    assert_eq!(metric(&gateway, "semmoe_tables_generation").await, 1.0);
}

/// Tables loaded or restored by hand stay until the file changes.
#[tokio::test]
async fn the_watcher_does_not_undo_what_was_done_by_hand() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, WATCH).await;
    replace(&fixture, 1);
    shown(&gateway, |shown| shown["generation"] == 2).await;
    let back = Client::admin(&gateway).post("/admin/tables/rollback", r#"{"backend":"pod-a"}"#).await;
    assert_eq!((back.status, &back.json()["generation"]), (200, &json!(3)));
    // A refused change proves that the file has been polled since.
    std::fs::write(fixture.folder.path().join("first"), "no tables").unwrap();
    let now = shown(&gateway, |shown| shown["errors"] != json!([])).await;
    assert_eq!(now["generation"], 3);
    assert_eq!(rank(&gateway).await, "0");
}

/// A ConfigMap: the file is a link into a folder that is itself a link, which a rename redirects.
#[tokio::test]
async fn folders_of_links_are_followed() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let root = fixture.folder.path();
    let version = |name: &str, shift: u16| {
        std::fs::create_dir(root.join(name)).unwrap();
        fixture.write(&format!("{name}/tables"), &TEXTS, shift);
    };
    let turn = |name: &str| {
        let link = root.join("..next");
        std::os::unix::fs::symlink(name, &link).unwrap();
        std::fs::rename(link, root.join("..data")).unwrap();
    };
    version("..1", 0);
    turn("..1");
    std::os::unix::fs::symlink("..data/tables", root.join("link")).unwrap();
    mock.settings().info = Some(fixture.info());
    let toml = fixture.affinity(&mock.url(), &root.join("link"));
    let gateway = start_bare(&format!("{WATCH}\n{toml}")).await;
    gateway.wait_ready().await;
    assert_eq!(rank(&gateway).await, "0");
    version("..2", 1);
    turn("..2");
    shown(&gateway, |shown| shown["generation"] == 2).await;
    assert_eq!(rank(&gateway).await, "1");
}
