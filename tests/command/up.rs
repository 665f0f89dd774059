//! `semmoe up` as a user runs it: the promised gain, requests, Ctrl-C, and failures.

use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use semmoe_tables::{LayerIdx, Placement, Tables, TablesBuilder, TokenId};
use serde_json::{Value, json};

use crate::support::{MODEL, Up, describe, is_alive, json_of, model_dir, run, semmoe, shared_data, signal};

/// One `up` at a time: they share a data folder, which `up` locks, and two cores.
static ONE_UP: Mutex<()> = Mutex::new(());

fn one_up() -> MutexGuard<'static, ()> {
    ONE_UP.lock().unwrap_or_else(PoisonError::into_inner)
}

fn limits() -> AnswerLimits {
    AnswerLimits { timeout: Duration::from_secs(60), max_bytes: 1 << 20 }
}

fn chat(max_tokens: u32) -> Value {
    json!({"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "messages": [{"role": "user", "content": "Name three rivers and the countries they flow through."}]})
}

/// The answer to a chat with `tokens` output tokens.
async fn ask(client: &HttpClient, url: &BaseUrl, tokens: u32) -> Value {
    let answer: Value = client.post_json(url, "/v1/chat/completions", &chat(tokens), &limits()).await.expect("answer");
    assert_eq!(answer["usage"]["completion_tokens"], tokens, "{answer}");
    answer
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime").block_on(work)
}

#[test]
fn check_shows_the_gain_that_evaluate_predicts() {
    let _one = one_up();
    let data = shared_data();
    let output = semmoe(&["up", "--check", "--json", "--data"]).arg(&data).output().expect("runs");
    let report = json_of(&output);
    let number =
        |part: &str, field: &str| report[part][field].as_f64().unwrap_or_else(|| panic!("{part}.{field} in {report}"));
    let (before, after) = (number("baseline", "lar"), number("affinity", "lar"));
    let predicted = report["predicted_lar"].as_f64().expect("a number");
    assert!(after > before + 0.05, "affinity gains little: {report}");
    let whole = report["affinity"]["not_streamed"]["lar"].as_f64().expect("a number");
    assert!((whole - predicted).abs() <= 0.02, "prediction and observation differ: {report}");
    for sums in ["prefill_max_over_mean", "decode_max_over_mean"] {
        assert!((1.0..=1.2).contains(&number("affinity", sums)), "uneven: {report}");
    }
    for (at_a_time, most) in [("running_max_over_mean", 1.6), ("kv_max_over_mean", 2.5)] {
        assert!((1.01..most).contains(&number("affinity", at_a_time)), "uneven, or not checked: {report}");
    }
    assert!(number("affinity", "remote_bytes_per_token") < number("baseline", "remote_bytes_per_token"), "{report}");
    assert!(number("affinity", "tokens_per_second") > 0.0, "{report}");
}

#[test]
fn with_attention_tp_check_shows_what_shuffling_gains() {
    let _one = one_up();
    let args = ["up", "--check", "--json", "--attention", "tp", "--data"];
    let output = semmoe(&args).arg(shared_data()).output().expect("runs");
    let report = json_of(&output);
    let number =
        |part: &str, field: &str| report[part][field].as_f64().unwrap_or_else(|| panic!("{part}.{field} in {report}"));
    let (before, after) = (number("baseline", "lar"), number("affinity", "lar"));
    let predicted = report["predicted_lar"].as_f64().expect("a number");
    assert!(after > before + 0.1, "shuffling gains little: {report}");
    assert!((after - predicted).abs() <= 0.02, "prediction and observation differ: {report}");
    assert_eq!(number("affinity", "tokens"), number("baseline", "tokens"), "{report}");
    assert!(number("affinity", "remote_bytes_per_token") < number("baseline", "remote_bytes_per_token"), "{report}");
}

#[test]
fn serves_requests_and_ctrl_c_stops_everything_it_started() {
    let _one = one_up();
    let up = Up::start(&shared_data(), &[]);
    let ranks = up.ranks();
    assert_eq!(ranks.len(), 4, "{ranks:?}");
    block_on(async {
        let (client, url) = (HttpClient::default(), up.url.parse::<BaseUrl>().expect("a URL"));
        let answer = ask(&client, &url, 8).await;
        let same = ask(&client, &url, 8).await;
        assert_eq!(answer["choices"], same["choices"], "greedy answers repeat");
        let models: Value = client.get_json(&url, "/v1/models", &limits()).await.expect("models");
        assert_eq!(models["data"][0]["id"], MODEL, "{models}");

        let mut body = chat(8);
        body["stream"] = json!(true);
        let bytes = serde_json::to_vec(&body).expect("JSON").into();
        let send = request(http::Method::POST, &url, "/v1/chat/completions", Some(bytes)).expect("request");
        let response = client.send(send).await.expect("stream");
        for header in ["x-semmoe-backend", "x-semmoe-rank", "x-semmoe-policy"] {
            assert!(response.headers().contains_key(header), "{header} in {:?}", response.headers());
        }
        let text = semmoe_engines::http::read_body("stream", response.into_body(), 1 << 20).await.expect("stream");
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
        let streamed: String = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(answer["choices"][0]["message"]["content"], streamed, "streamed and whole answers are one");
        shows_what_tables_promise_and_ranks_did(&client, &up.admin.parse().expect("a URL")).await;
    });
    let said = up.stop();
    let totals = said.lines().find(|line| line.contains("since the start: ")).unwrap_or_else(|| panic!("{said}"));
    let figures: Vec<f64> = totals.split(' ').filter_map(|word| word.trim_matches(',').parse().ok()).collect();
    assert!(figures.len() == 3 && figures.iter().all(|figure| *figure > 0.0), "{totals}");
    assert!(ranks.iter().all(|&pid| !is_alive(pid)), "ranks stay behind");
}

/// The admin page shows the tables' promise and, once a whole answer has been counted, the observed rate beside it.
async fn shows_what_tables_promise_and_ranks_did(client: &HttpClient, admin: &BaseUrl) {
    for _ in 0..600 {
        let seen: Value = client.get_json(admin, "/admin/overview", &limits()).await.expect("an overview");
        assert!(seen["tables"]["tables"][0]["promised_lar"].as_f64().expect("a promise") > 0.25, "{seen}");
        let live = &seen["live"]["backends"][0];
        assert_eq!(live["sampling"], "on", "{live}");
        if live["observed_lar"].as_f64().is_some_and(|observed| observed > 0.0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("nothing was observed");
}

/// Regression: a signal between two parts of the start used to be lost.
#[test]
fn ctrl_c_right_after_the_ready_line_is_not_lost() {
    let _one = one_up();
    for _ in 0..4 {
        Up::start(&shared_data(), &[]).stop();
    }
}

/// The placement with every group moved to the next rank.
fn rotated(tables: &Tables) -> Tables {
    let groups = tables.groups();
    let layers = (0..tables.model().layers()).map(|layer| {
        let of = tables.placement().layer(LayerIdx::new(layer as u16));
        of.iter().map(|group| (group + 1) % groups).collect()
    });
    let placement = Placement::new(groups, layers.collect()).expect("a placement");
    let ranks = usize::from(groups);
    let rows = (0..tables.model().vocab_size).filter_map(|token| tables.token_row(TokenId::new(token)));
    let mut shares: Vec<_> = rows.flatten().copied().collect();
    shares.chunks_exact_mut(ranks).for_each(|row| row.rotate_right(1));
    let mut prices = tables.price().to_vec();
    prices.rotate_right(1);
    let (info, provenance) = (tables.model().clone(), tables.provenance().clone());
    TablesBuilder::dp(info, provenance, placement, shares, prices).finish().expect("tables")
}

/// Traffic, profile, solve, switch: no restart, no lost request, and unchanged answers. Attention switches too, which
/// changes the number of ranks that the gateway sees.
#[test]
fn new_tables_move_the_experts_while_requests_run() {
    let _one = one_up();
    let up = Up::start(&shared_data(), &["--attention", "dp,tp"]);
    block_on(async {
        let (client, url) = (HttpClient::default(), up.url.parse::<BaseUrl>().expect("a URL"));
        let admin: BaseUrl = up.admin.parse().expect("a URL");
        let listed: Value = client.get_json(&admin, "/admin/tables", &limits()).await.expect("tables");
        let (backend, path) = (&listed["tables"][0]["backend"], listed["tables"][0]["path"].as_str().expect("a path"));
        let new = rotated(&Tables::open(Path::new(path)).expect("tables"));
        let folder = Path::new(path).parent().expect("a folder");
        new.write(&folder.join("rotated.tables.safetensors")).expect("written");

        let expected = ask(&client, &url, 24).await;
        let stop = AtomicBool::new(false);
        let asked = async {
            let mut answers = 0;
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(ask(&client, &url, 24).await["choices"], expected["choices"]);
                answers += 1;
            }
            answers
        };
        let switched = async {
            let switch = async |to: Value, epoch: u64| {
                let body = json!({"backend": backend, "to": to, "if_epoch": epoch});
                let done: Value = client.post_json(&admin, "/admin/switch", &body, &limits()).await.expect("switched");
                assert_eq!(done["epoch"], epoch + 1, "{done}");
                done
            };
            let done = switch(json!({"tables": "rotated.tables.safetensors"}), 0).await;
            assert_eq!(done["placement_digest"], new.placement_digest(), "{done}");
            let listed: Value = client.get_json(&admin, "/admin/tables", &limits()).await.expect("tables");
            assert_eq!(listed["tables"][0]["digest"], new.digest(), "{listed}");
            assert_eq!(switch(json!("dp-tp"), 1).await["layout"], "dp-tp");
            assert_eq!(switch(json!("ep"), 2).await["layout"], "ep");
            let done = switch(json!({"tables": path}), 3).await;
            assert_ne!(done["placement_digest"], new.placement_digest(), "{done}");
            for (to, epoch) in [("tp", 4), ("ep", 5), ("tp-ep", 6), ("ep", 7)] {
                assert_eq!(switch(json!(to), epoch).await["layout"], to);
            }
            let listed: Value = client.get_json(&admin, "/admin/switch", &limits()).await.expect("switches");
            assert_eq!(listed["backends"][0]["status"]["epoch"], 8, "{listed}");
            let health: Value = client.get_json(&admin, "/admin/backends", &limits()).await.expect("backends");
            assert_eq!(health["backends"][0]["healthy"], true, "{health}");
            stop.store(true, Ordering::Relaxed);
        };
        let (answers, ()) = tokio::join!(asked, switched);
        assert!(answers > 0);
        std::fs::remove_file(folder.join("rotated.tables.safetensors")).expect("removed");
    });
    up.stop();
}

/// If the first start is stopped while it records, the next one continues without repeating prompts.
#[test]
fn a_recording_that_was_interrupted_goes_on() {
    let _one = one_up();
    let data = tempfile::tempdir().expect("a folder");
    let mut first =
        semmoe(&["up", "--port", "0", "--ranks", "2", "--data"]).arg(data.path()).spawn().expect("it starts");
    // A few hundred of the prompts.
    while partial(data.path()).is_none_or(|bytes| bytes < 500_000) {
        assert!(first.try_wait().expect("our child").is_none(), "it ended before it was interrupted");
        std::thread::sleep(Duration::from_millis(1));
    }
    signal("-INT", first.id());
    assert!(!first.wait().expect("our child").success());
    let left = partial(data.path()).expect("the partial recording stays");
    let said = Up::start(data.path(), &["--ranks", "2"]).stop();
    let (_, recorded) = said.split_once("recording a profile: ").expect("it says what was recorded");
    let before = recorded.split(" of them recorded before)").next().and_then(|text| text.rsplit('(').next());
    let before: u64 = before.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    assert!(before > 0 && left >= 500_000, "{said}");
    assert_eq!(partial(data.path()), None, "nothing of it stays");
}

/// Size in bytes of the partial recording in a data folder.
fn partial(data: &std::path::Path) -> Option<u64> {
    let models = std::fs::read_dir(data).ok()?.flatten();
    let units = models.flat_map(|model| std::fs::read_dir(model.path()).into_iter().flatten().flatten());
    let found = units.map(|unit| unit.path().join("recording.profile.trace.safetensors.partial"));
    found.filter_map(|path| Some(path.metadata().ok()?.len())).next()
}

#[test]
fn experts_in_slices_need_no_tables_and_ranks_exchange_as_told() {
    let _one = one_up();
    let data = tempfile::tempdir().expect("a folder");
    let up = Up::start(data.path(), &["--ranks", "2", "--experts", "tp", "--attention", "tp", "--transport", "tcp"]);
    block_on(async {
        let (client, url) = (HttpClient::default(), up.url.parse::<BaseUrl>().expect("a URL"));
        ask(&client, &url, 4).await;
        let info = engine_info(&client, &up).await;
        assert_eq!(
            (&info["experts"], &info["transport"], &info["attention"]),
            (&"tp".into(), &"tcp".into(), &"tp".into())
        );
    });
    let said = up.stop();
    assert!(!said.contains("recording"), "{said}");
}

/// The server info of the gateway's only engine.
async fn engine_info(client: &HttpClient, up: &Up) -> Value {
    let admin: BaseUrl = up.admin.parse().expect("a URL");
    let backends: Value = client.get_json(&admin, "/admin/backends", &limits()).await.expect("backends");
    let engine: BaseUrl = backends["backends"][0]["url"].as_str().expect("a URL").parse().expect("a URL");
    client.get_json(&engine, "/server_info", &limits()).await.expect("server info")
}

/// Slow links between four ranks: the plan proposes all experts on each. A second plan limits TP to the DP groups.
#[test]
fn what_a_plan_chose_is_started_with_its_domains_and_attention_groups() {
    let _one = one_up();
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let links = "[[levels]]\nname = \"host\"\ncount = 4\nbandwidth_gb_per_second = 1\nlatency_us = 1\n";
    let cluster = file("cluster.toml", &format!("gpu = \"H100\"\n{links}"));
    let workload = file("workload.toml", "requests_per_second = 500\ninput_tokens = 64\noutput_tokens = 64\n");
    let model = model_dir().to_str().expect("UTF-8").to_owned();
    let question = ["plan", "--worker", "--model", &model, "--cluster", &cluster, "--workload", &workload];
    let text = String::from_utf8_lossy(&run(&question).stdout).into_owned();
    assert!(text.contains("expert domains: with 4 (semmoe worker --domains)"), "{text}");
    let plan = json_of(&run(&[&question[..], &["--json"]].concat()));
    let mut grouped = plan.clone();
    (grouped["chosen"]["layout"]["attention_tp"], grouped["chosen"]["layout"]["attention_dp"]) = (2.into(), 2.into());
    grouped["chosen"]["domains"] = "2:1/2".into();
    for (plan, sizes, domains, redundant) in [(plan, [4, 1], "4", 3), (grouped, [2, 2], "2:1/2", 1)] {
        let up = Up::start(folder.path(), &["--plan", &file("plan.json", &plan.to_string())]);
        block_on(async {
            let (client, url) = (HttpClient::default(), up.url.parse::<BaseUrl>().expect("a URL"));
            ask(&client, &url, 4).await;
            let info = engine_info(&client, &up).await;
            assert_eq!(["dp_size", "tp_size"].map(|size| info[size].as_u64()), sizes.map(Some), "{info}");
            assert_eq!(info["ep_num_redundant_experts"], 32 * redundant, "{info}");
            assert!(info["placement_digest"].as_str().expect("text").ends_with(&format!(", domains of {domains}")));
        });
        let said = up.stop();
        assert!(!said.contains("recording"), "{said}");
    }
}

/// Ranks that divide experts and redundant slots; the recording needs no tables and uses fewer ranks.
#[test]
fn five_ranks_take_thirty_two_experts_and_three_slots() {
    let _one = one_up();
    let refused = run(&["up", "--ranks", "5"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("1, 2, 4, 8, 16, 32, or --redundant 3"), "{said}");
    let up = Up::start(&shared_data(), &["--ranks", "5", "--redundant", "3"]);
    block_on(async {
        let (client, url) = (HttpClient::default(), up.url.parse::<BaseUrl>().expect("a URL"));
        ask(&client, &url, 4).await;
    });
    up.stop();
}

#[test]
fn a_killed_rank_is_named_and_nothing_hangs() {
    let _one = one_up();
    let up = Up::start(&shared_data(), &[]);
    let ranks = up.ranks();
    let victim = ranks[2];
    block_on(async {
        let (client, url) = (HttpClient::default(), up.url.parse::<BaseUrl>().expect("a URL"));
        let mut in_flight = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let (client, url) = (client.clone(), url.clone());
            in_flight.spawn(async move {
                client.post_json::<_, Value>(&url, "/v1/chat/completions", &chat(1500), &limits()).await
            });
        }
        wait_until_running(&client, &up.admin.parse().expect("a URL"), 16).await;
        signal("-KILL", victim);
        while let Some(ended) = in_flight.join_next().await {
            match ended.expect("no panic") {
                Err(HttpError::Status { status: 502 | 503, excerpt, .. }) => {
                    assert!(excerpt.contains("rank 2"), "the cause is missing: {excerpt}");
                }
                other => panic!("a request in flight ended with {other:?}"),
            }
        }
        match client.post_json::<_, Value>(&url, "/v1/chat/completions", &chat(1), &limits()).await {
            Err(HttpError::Status { status: 503, excerpt, .. }) => {
                assert!(excerpt.contains("rank 2"), "the cause is missing: {excerpt}");
            }
            other => panic!("after the loss a request ended with {other:?}"),
        }
    });
    let (status, said) = up.wait();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("rank 2") && said.contains(&victim.to_string()) && said.contains("SIGKILL"), "{said}");
    assert!(ranks.iter().all(|&pid| !is_alive(pid)), "ranks stay behind");
}

/// Waits until the gateway counts `requests` requests in flight.
async fn wait_until_running(client: &HttpClient, admin: &BaseUrl, requests: u64) {
    for _ in 0..6000 {
        let metrics = client.get_text(admin, "/metrics", &limits()).await.expect("metrics");
        let running: f64 = metrics
            .lines()
            .filter(|line| line.starts_with("semmoe_rank_inflight{"))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum();
        if running >= requests as f64 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the requests never ran");
}

#[test]
fn a_port_in_use_is_reported_before_any_work() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let data = tempfile::tempdir().expect("a folder");
    let output = semmoe(&["up", "--port", &port, "--data"]).arg(data.path()).output().expect("runs");
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&port) && said.contains("in use"), "{said}");
}
