//! Rollbacks, and files that are modified while in use.

use http::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Client, Fixture, TEXTS, canned, metric, reloadable};

async fn load(client: &Client, path: &str) -> Answer {
    client.post("/admin/tables", json!({ "backend": "pod-a", "path": path }).to_string()).await
}

async fn back(client: &Client, command: Value) -> Answer {
    client.post("/admin/tables/rollback", command.to_string()).await
}

async fn rank_of(client: &Client, text: &str) -> String {
    let answer = client.post("/generate", json!({ "text": text }).to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-semmoe-rank").to_owned()
}

/// Generations of the earlier tables.
async fn earlier(client: &Client) -> Vec<u64> {
    let shown = client.get("/admin/tables").await.json();
    let earlier = shown["tables"][0]["earlier"].as_array().unwrap();
    earlier.iter().map(|earlier| earlier["generation"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn earlier_tables_can_be_gone_back_to() {
    let mock = canned(4);
    let fixture = Fixture::new(4);
    let gateway = reloadable(&mock, &fixture, "[tables]\nhistory = 2").await;
    let (data, admin) = (Client::data(&gateway), Client::admin(&gateway));
    let answer = back(&admin, json!({ "backend": "pod-a" })).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (409, Some("no_earlier_tables")));
    for shift in 1..=3 {
        fixture.write(&format!("shift-{shift}"), &TEXTS, shift);
        assert_eq!(load(&admin, &format!("shift-{shift}")).await.status, 200);
    }
    // Generations 1 to 4 have shifts 0 to 3; the first one was dropped.
    assert_eq!((rank_of(&data, TEXTS[0]).await.as_str(), earlier(&admin).await), ("3", vec![3, 2]));
    let answer = back(&admin, json!({ "backend": "pod-a" })).await;
    assert_eq!((answer.status, &answer.json()["generation"]), (200, &json!(5)), "{answer:?}");
    assert_eq!((rank_of(&data, TEXTS[0]).await.as_str(), earlier(&admin).await), ("2", vec![4, 2]));
    // The replaced tables can be restored, and any of them by generation.
    assert_eq!(back(&admin, json!({ "backend": "pod-a" })).await.status, 200);
    assert_eq!((rank_of(&data, TEXTS[0]).await.as_str(), earlier(&admin).await), ("3", vec![5, 2]));
    assert_eq!(back(&admin, json!({ "backend": "pod-a", "generation": 2 })).await.status, 200);
    assert_eq!((rank_of(&data, TEXTS[0]).await.as_str(), earlier(&admin).await), ("1", vec![6, 5]));
    let answer = back(&admin, json!({ "backend": "pod-a", "generation": 1 })).await;
    assert_eq!(answer.status, 409);
    assert!(answer.message().contains("generation 1") && answer.message().contains("6, 5"), "{}", answer.message());
    assert_eq!(back(&admin, json!({ "backend": "pod-z" })).await.status, 404);
    for wrong in [json!({}), json!([]), json!({ "backend": "pod-a", "to": 1 }), json!({ "backend": 1 })] {
        assert_eq!(back(&admin, wrong.clone()).await.status, 400, "{wrong}");
    }
    assert_eq!(metric(&gateway, "semmoe_tables_generation").await, 7.0);
}

#[tokio::test]
async fn no_history_means_no_way_back() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "[tables]\nhistory = 0").await;
    let admin = Client::admin(&gateway);
    assert_eq!(load(&admin, "first").await.status, 200);
    assert_eq!(back(&admin, json!({ "backend": "pod-a" })).await.status, 409);
}

/// A map of a file that is then truncated kills the process that reads it.
#[tokio::test]
async fn files_that_are_cut_in_use_do_no_harm() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "").await;
    let (data, admin) = (Client::data(&gateway), Client::admin(&gateway));
    fixture.write("second", &TEXTS, 1);
    assert_eq!(load(&admin, "second").await.status, 200);
    for name in ["first", "second"] {
        let file = std::fs::OpenOptions::new().write(true).open(fixture.folder.path().join(name)).unwrap();
        file.set_len(0).unwrap();
    }
    assert_eq!(rank_of(&data, TEXTS[0]).await, "1");
    // The rollback reads all of the tables that the gateway started with, and their prices.
    assert_eq!(back(&admin, json!({ "backend": "pod-a" })).await.status, 200);
    assert_eq!(rank_of(&data, TEXTS[0]).await, "0");
    assert_eq!(load(&admin, "second").await.status, 422);
    let shown = admin.get("/admin/tables").await.json();
    assert_eq!((&shown["errors"][0]["backend"], &shown["errors"][0]["by"]), (&json!("pod-a"), &json!("file")));
    assert_eq!(back(&admin, json!({ "backend": "pod-a" })).await.status, 200);
    assert_eq!(admin.get("/admin/tables").await.json()["errors"], json!([]));
}

#[tokio::test]
async fn uploads_have_limits_and_need_room() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let spool = fixture.folder.path().join("spool");
    std::fs::create_dir(&spool).unwrap();
    let good = fixture.builder(&TEXTS, 1).to_bytes().unwrap();
    let limits = format!("[limits]\ntable_bytes = {}\n[tables]\nspool_dir = \"{}\"", good.len(), spool.display());
    let gateway = reloadable(&mock, &fixture, &limits).await;
    let admin = Client::admin(&gateway);
    let upload = async |bytes: Vec<u8>| {
        admin.call(Method::POST, "/admin/tables?backend=pod-a", &[("content-type", "x/y")], bytes).await
    };
    assert_eq!(upload(good.clone()).await.status, 200);
    assert_eq!(std::fs::read_dir(&spool).unwrap().count(), 0, "copies have no names");
    let mut long = good.clone();
    long.push(0);
    assert_eq!(upload(long.clone()).await.status, 413);
    std::fs::write(fixture.folder.path().join("long"), long).unwrap();
    let answer = load(&admin, "long").await;
    assert_eq!(answer.status, 422);
    assert!(answer.message().contains("table_bytes"), "{}", answer.message());
    std::fs::remove_dir(&spool).unwrap();
    for answer in [upload(good).await, load(&admin, "first").await] {
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (507, Some("tables_not_stored")));
        assert!(answer.message().contains("spool"), "{}", answer.message());
    }
    let shown = admin.get("/admin/tables").await.json();
    assert_eq!((&shown["generation"], &shown["errors"][0]["by"]), (&json!(2), &json!("file")));
    assert_eq!(metric(&gateway, "semmoe_table_reloads_total{outcome=\"failed\"}").await, 3.0);
}
