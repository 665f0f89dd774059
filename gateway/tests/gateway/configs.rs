//! Reloads of the configuration: changes take effect, the rest continues undisturbed, and an invalid file changes
//! nothing.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use http::Method;
use semmoe_gateway::{Config, Gateway, ReloadError, Running};
use serde_json::{Value, json};

use crate::support::files::{File, model, reload};
use crate::support::{Client, Fixture, Mock, canned, canned_as, in_flight, metric, metrics, rest_of, settled, shown};

fn names(answer: &Value, field: &str) -> Vec<String> {
    answer[field].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

async fn models(gateway: &Running) -> Vec<String> {
    let list = Client::data(gateway).get("/v1/models").await.json();
    list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
}

async fn backend_of(gateway: &Running, model: &str) -> String {
    let body = json!({ "model": model, "prompt": "x" }).to_string();
    let answer = Client::data(gateway).post("/v1/completions", body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-semmoe-backend").to_owned()
}

/// In-flight requests of each backend's ranks, by name and rank.
async fn loads(gateway: &Running) -> Vec<(String, Vec<u64>)> {
    let backends = Client::admin(gateway).get("/admin/backends").await.json();
    let load = |backend: &Value| {
        let ranks = backend["ranks"].as_array().unwrap();
        let loads = ranks.iter().map(|rank| rank["in_flight_requests"].as_u64().unwrap()).collect();
        (backend["name"].as_str().unwrap().to_owned(), loads)
    };
    backends["backends"].as_array().unwrap().iter().map(load).collect()
}

#[tokio::test]
async fn what_changed_counts_and_what_runs_ends_where_it_began() {
    let (mut a, mut b, c) = (canned(2), canned(1), canned(1));
    let file = File::new("", &model("tiny", "", &[("pod-a", &a.url(), 2), ("pod-b", &b.url(), 1)]));
    let gateway = file.start().await;
    let client = Client::data(&gateway);
    let body = r#"{"model":"tiny","stream":true}"#;
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(client.open(Method::POST, "/v1/completions", &[("x-mock", "stream")], body).await);
    }
    a.next().await;
    a.next().await;
    b.next().await;
    assert_eq!(loads(&gateway).await, [("pod-a".to_owned(), vec![1, 1]), ("pod-b".to_owned(), vec![1])]);

    let two = model("tiny", "aliases = [\"small\"]\n", &[("pod-c", &c.url(), 1), ("pod-a", &a.url(), 2)]);
    file.write("", &format!("{two}{}", model("other", "", &[("pod-d", &b.url(), 1)])));
    let answer = reload(&gateway).await;
    let reported = answer.json();
    assert_eq!((answer.status, &reported["generation"]), (200, &json!(2)), "{answer:?}");
    assert_eq!(names(&reported, "models_added"), ["other"]);
    assert_eq!(names(&reported, "backends_added"), ["pod-c", "pod-d"]);
    assert_eq!(names(&reported, "backends_removed"), ["pod-b"]);
    assert_eq!(reported["needs_restart"], json!([]));
    assert_eq!(models(&gateway).await, ["tiny", "small", "other"]);
    // The new backends were probed before they received requests; those in flight on remaining ranks stay counted.
    let now = loads(&gateway).await;
    assert_eq!(now[0], ("pod-c".to_owned(), vec![0]));
    assert_eq!(now[1], ("pod-a".to_owned(), vec![1, 1]));
    let used: HashSet<String> = HashSet::from([
        backend_of(&gateway, "small").await,
        backend_of(&gateway, "tiny").await,
        backend_of(&gateway, "tiny").await,
    ]);
    assert_eq!(used, HashSet::from(["pod-a".to_owned(), "pod-c".to_owned()]));
    assert_eq!(backend_of(&gateway, "other").await, "pod-d");
    // The removed backend is counted until its request has ended, which it does there.
    assert_eq!(metric(&gateway, r#"semmoe_rank_inflight{backend="pod-b",rank="0"}"#).await, 1.0);
    assert_eq!(in_flight(&gateway).await, (2, 3.0));
    a.release(6);
    b.release(3);
    for mut stream in streams {
        let last = rest_of(&mut stream).await;
        assert!(last.ends_with("data: [DONE]\n\n"), "{last:?}");
    }
    settled(&gateway).await;
    let text = metrics(&gateway).await;
    for line in text.lines().filter(|line| line.contains("pod-b")) {
        assert!(!line.starts_with("semmoe_rank_inflight") && !line.starts_with("semmoe_backend_healthy"), "{line}");
    }
    assert_eq!(metric(&gateway, r#"semmoe_config_reloads_total{outcome="ok"}"#).await, 1.0);
    assert!(gateway.health("pod-b").is_none());
}

const RELOADS: usize = 100;
const REQUESTS: u64 = 1000;

/// Backends, models and policies come and go under load; nothing fails, and nothing goes to another model's backends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reloads_under_load_lose_and_misroute_nothing() {
    let mocks: Vec<Mock> = (0..4).map(|_| canned(2)).collect();
    let url = |at: usize| mocks[at].url();
    let tiny = |backends: &[usize], more: &str| {
        let names: Vec<(String, String)> = backends.iter().map(|at| (format!("tiny-{at}"), url(*at))).collect();
        let backends: Vec<(&str, &str, u16)> =
            names.iter().map(|(name, url)| (name.as_str(), url.as_str(), 2)).collect();
        model("tiny", more, &backends)
    };
    let other = model("other", "", &[("other-3", &url(3), 2)]);
    let states = [
        format!("{}{other}", tiny(&[0, 1], "")),
        format!("{other}{}", tiny(&[1, 2], "")),
        format!("{}{other}", tiny(&[2, 0, 1], "").replace("round_robin", "least_load")),
        format!("{}{other}\n[routing.settings]\nload_margin = 3.0\n", tiny(&[0, 2], "aliases = [\"t\"]\n")),
        format!("{}{other}\n[limits]\nbody_bytes = 4096\n[timeouts]\nidle_seconds = 30.0\n", tiny(&[1], "")),
    ];
    let file = File::new("", &states[0]);
    let gateway = Arc::new(file.start().await);
    let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|number| {
            let (gateway, stop, served) = (Arc::clone(&gateway), Arc::clone(&stop), Arc::clone(&served));
            tokio::spawn(async move {
                let client = Client::data(&gateway);
                let model = ["tiny", "other"][number % 2];
                let mut done = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let body = json!({ "model": model, "prompt": "x" }).to_string();
                    let answer = client.post("/v1/completions", body).await;
                    assert_eq!(answer.status, 200, "{answer:?}");
                    assert!(answer.header("x-semmoe-backend").starts_with(model), "{answer:?}");
                    done += 1;
                    served.fetch_add(1, Ordering::Relaxed);
                }
                done
            })
        })
        .collect();
    for round in 1..=RELOADS {
        file.write("", &states[round % states.len()]);
        let answer = reload(&gateway).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    while served.load(Ordering::Relaxed) < REQUESTS {
        tokio::task::yield_now().await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut done = 0;
    for client in clients {
        done += client.await.unwrap();
    }
    assert!(done >= REQUESTS, "{done}");
    settled(&gateway).await;
    assert_eq!(metric(&gateway, r#"semmoe_config_reloads_total{outcome="ok"}"#).await, RELOADS as f64);
    let mut seen = 0;
    for mut mock in mocks {
        while mock.seen.try_recv().is_ok() {
            seen += 1;
        }
    }
    assert_eq!(seen, done);
}

#[tokio::test]
async fn wrong_configurations_change_nothing_and_are_reported() {
    let fixture = Fixture::new(2);
    let mock = canned_as(fixture.info());
    let tables = fixture.write("t", &["river", "king"], 0);
    let good = fixture.affinity(&mock.url(), &tables);
    let file = File::new("", &good);
    let gateway = file.start().await;
    let mut failures = 0;
    for (case, rest, status, says) in [
        ("syntax", "x = ".to_owned(), 422, "semmoe.toml: line "),
        ("unknown key", format!("{good}colour = 1\n"), 422, "unknown field `colour`"),
        ("value", format!("{good}ranks = 0\n"), 422, "models[0].backends[0].ranks: 0"),
        ("no models", String::new(), 422, "models: empty"),
        ("missing folder", format!("[sampling]\nprofile_dir = \"none\"\n{good}"), 409, "is not a directory"),
    ] {
        file.write("", &rest);
        let answer = reload(&gateway).await;
        assert_eq!(answer.status, status, "{case}: {answer:?}");
        let message = answer.message();
        assert!(
            message.starts_with("the old configuration stays in effect: ") && message.contains(says),
            "{case}: {message}"
        );
        assert!(!message.contains('\n'), "{case}: one sentence");
        failures += 1;
        let shown = Client::admin(&gateway).get("/admin/config").await.json();
        assert_eq!(shown["generation"], 1, "{case}");
        assert!(shown["last_reload"]["error"].as_str().unwrap().contains(says), "{case}: {shown}");
        assert_eq!(Client::data(&gateway).post("/generate", r#"{"text":"a river"}"#).await.status, 200, "{case}");
        assert_eq!(metric(&gateway, "semmoe_config_stale").await, 1.0, "{case}");
    }
    std::fs::remove_file(file.path()).unwrap();
    assert_eq!(reload(&gateway).await.status, 422);
    let counted = metric(&gateway, r#"semmoe_config_reloads_total{outcome="invalid"}"#).await
        + metric(&gateway, r#"semmoe_config_reloads_total{outcome="refused"}"#).await;
    assert_eq!(counted, f64::from(failures + 1));
    // A corrected file takes effect; nothing unchanged is loaded again.
    file.write("", &format!("{good}[timeouts]\nidle_seconds = 7.0\n"));
    let answer = reload(&gateway).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    for field in ["tokenizers_loaded", "tables_loaded", "backends_added", "backends_removed"] {
        assert_eq!(answer.json()[field], json!([]), "{field}");
    }
    assert_eq!(metric(&gateway, "semmoe_config_stale").await, 0.0);
}

#[tokio::test]
async fn what_needs_a_restart_is_named_and_the_rest_counts() {
    let mock = canned(1);
    let rest = model("tiny", "", &[("pod-a", &mock.url(), 1)]);
    let file = File::new("", &rest);
    let gateway = file.start().await;
    file.write_raw(&format!(
        "[server]\nlisten = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:2\"\nmetrics = \"127.0.0.1:3\"\n\
         [limits]\nconnections = 7\nbody_bytes = 10\n[timeouts]\nconnect_seconds = 1.0\n{rest}"
    ));
    let answer = reload(&gateway).await;
    let fixed = ["server.listen", "server.admin", "server.metrics", "limits.connections", "timeouts.connect_seconds"];
    assert_eq!(names(&answer.json(), "needs_restart"), fixed);
    assert_eq!(metric(&gateway, "semmoe_config_needs_restart").await, 5.0);
    let shown = Client::admin(&gateway).get("/admin/config").await.json();
    assert_eq!(names(&shown["last_reload"], "needs_restart"), fixed);
    let answer = Client::data(&gateway).post("/v1/completions", r#"{"model":"tiny"}"#).await;
    assert_eq!(answer.status, 413, "{answer:?}");
    file.write("", &rest);
    assert_eq!(reload(&gateway).await.json()["needs_restart"], json!([]));
    assert_eq!(metric(&gateway, "semmoe_config_needs_restart").await, 0.0);
    assert_eq!(backend_of(&gateway, "tiny").await, "pod-a");
}

#[tokio::test]
async fn secrets_change_and_are_not_shown() {
    const OLD: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"; // of "secret"
    const NEW: &str = "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa"; // of "other"
    let mock = canned(1);
    let rest = model("tiny", "", &[("pod-a", &mock.url(), 1)]);
    let token = |digest: &str| format!("admin_token_sha256 = \"{digest}\"");
    let file = File::new(&token(OLD), &rest);
    let gateway = file.start().await;
    let admin = Client::admin(&gateway);
    let with = async |method: Method, path: &str, token: &str| {
        admin.call(method, path, &[("authorization", &format!("Bearer {token}"))], "").await
    };
    assert_eq!(reload(&gateway).await.status, 401);
    let shown = with(Method::GET, "/admin/config", "secret").await;
    assert_eq!(shown.json()["settings"]["server"]["admin_token_sha256"], "(set)");
    assert!(!String::from_utf8_lossy(&shown.body).contains(OLD), "{shown:?}");
    assert_eq!(shown.json()["settings"]["models"][0]["backends"][0]["url"], mock.url());
    assert_eq!(shown.json()["file"], file.path().to_str().unwrap());
    file.write(&token(NEW), &rest);
    assert_eq!(with(Method::POST, "/admin/reload", "secret").await.status, 200);
    assert_eq!(with(Method::GET, "/admin/config", "secret").await.status, 401);
    assert_eq!(with(Method::GET, "/admin/config", "other").await.status, 200);
}

#[tokio::test]
async fn tables_in_use_stay_unless_another_file_is_configured() {
    const TEXTS: [&str; 2] = ["river water boat fish", "king queen castle sword"];
    let fixture = Fixture::new(2);
    let mock = canned_as(fixture.info());
    let first = fixture.write("first", &TEXTS, 0);
    let file = File::new("", &fixture.affinity(&mock.url(), &first));
    let gateway = file.start().await;
    let rank = async || {
        let body = json!({ "text": TEXTS[0] }).to_string();
        Client::data(&gateway).post("/generate", body).await.header("x-semmoe-rank").to_owned()
    };
    assert_eq!(rank().await, "0");
    let uploaded = fixture.builder(&TEXTS, 1).to_bytes().unwrap();
    let answer = Client::admin(&gateway).call(Method::POST, "/admin/tables?backend=pod-a", &[], uploaded).await;
    assert_eq!((answer.status, rank().await.as_str()), (200, "1"));
    // Nothing about tables changed.
    file.write(
        "",
        &fixture.affinity(&mock.url(), &first).replace("name = \"tiny\"", "name = \"tiny\"\naliases = [\"t\"]"),
    );
    let answer = reload(&gateway).await.json();
    assert_eq!((&answer["tables_loaded"], rank().await.as_str()), (&json!([]), "1"));
    // A different file.
    let second = fixture.write("second", &TEXTS, 0);
    file.write("", &fixture.affinity(&mock.url(), &second));
    let answer = reload(&gateway).await.json();
    assert_eq!((&answer["tables_loaded"], rank().await.as_str()), (&json!(["pod-a"]), "0"));
    let tables = Client::admin(&gateway).get("/admin/tables").await.json();
    assert_eq!(tables["tables"][0]["generation"], answer["generation"]);
    // The file's content changes.
    fixture.write("second", &TEXTS, 1);
    let answer = reload(&gateway).await.json();
    assert_eq!((&answer["tables_loaded"], rank().await.as_str()), (&json!(["pod-a"]), "1"));
    // For a placement that the engine did not report: routed by load, as at start.
    let other = Fixture::new(4);
    let path = other.write("other", &TEXTS, 0);
    file.write("", &fixture.affinity(&mock.url(), &path));
    assert_eq!(reload(&gateway).await.status, 200);
    assert_eq!((rank().await.as_str(), &shown(&gateway, "pod-a").await["by_load"]["reason"]), ("", &json!("ranks")));
}

/// A new backend that does not answer yet is awaited, as at start.
#[tokio::test]
async fn a_new_backend_may_come_later() {
    let (a, mut b) = (canned(1), canned(1));
    b.kill();
    let one = [("pod-a", a.url()), ("pod-b", b.url())];
    let both: Vec<(&str, &str, u16)> = one.iter().map(|(name, url)| (*name, url.as_str(), 1)).collect();
    let file = File::new("", &model("tiny", "", &both[..1]));
    let gateway = file.start().await;
    file.write("", &model("tiny", "", &both));
    assert_eq!(reload(&gateway).await.status, 200);
    for _ in 0..4 {
        assert_eq!(backend_of(&gateway, "tiny").await, "pod-a");
    }
    b.listen();
    gateway.wait_ready().await;
    let used = HashSet::from([backend_of(&gateway, "tiny").await, backend_of(&gateway, "tiny").await]);
    assert_eq!(used.len(), 2);
    // A known name at another address is another backend.
    let c = canned(1);
    file.write("", &model("tiny", "", &[("pod-a", &c.url(), 1)]));
    let reported = reload(&gateway).await.json();
    assert_eq!(
        (names(&reported, "backends_added"), names(&reported, "backends_removed")),
        (vec!["pod-a".to_owned()], vec!["pod-a".to_owned(), "pod-b".to_owned()])
    );
    assert_eq!(backend_of(&gateway, "tiny").await, "pod-a");
    let health = metric(&gateway, r#"semmoe_backend_healthy{backend="pod-a"}"#).await;
    assert_eq!(health, 1.0);
}

#[tokio::test]
async fn a_configuration_without_a_file_cannot_be_read_again() {
    let mock = canned(1);
    let gateway = crate::support::start(&model("tiny", "", &[("pod-a", &mock.url(), 1)])).await;
    assert!(matches!(gateway.reload().await, Err(ReloadError::NoFile)));
    assert_eq!(reload(&gateway).await.status, 409);
    let shown = Client::admin(&gateway).get("/admin/config").await.json();
    assert_eq!((&shown["file"], &shown["last_reload"]["outcome"]), (&Value::Null, &json!("failed")));
}

#[tokio::test]
async fn a_check_tells_what_would_be_served() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &[], 0);
    let text = fixture
        .affinity("http://127.0.0.1:1", &tables)
        .replace("name = \"tiny\"\n", "name = \"tiny\"\naliases = [\"t\"]\n");
    let file = File::new("", &text);
    let checked = Gateway::check(&Config::load(&file.path()).unwrap()).await.unwrap();
    let summary = checked.served.to_string();
    assert!(checked.troubles.is_empty(), "{}", checked.troubles);
    let lines: Vec<&str> = summary.lines().collect();
    assert_eq!(lines.len(), 3, "{summary}");
    assert!(lines[0].starts_with("requests at 127.0.0.1:0, admin plane at 127.0.0.1:0"), "{summary}");
    assert!(lines[1].starts_with("model 'tiny', also as 't', policy affinity, 10240 tokens"), "{summary}");
    let placement = &fixture.placement_digest()[..12];
    assert!(lines[2].starts_with("  backend 'pod-a': semmoe at http://127.0.0.1:1, ranks 2, tables "), "{summary}");
    assert!(lines[2].ends_with(placement), "{summary}");
}
