//! `semmoe serve` in front of ranks that were started by hand: an operator's tasks, and refusals at startup.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, request};
use serde_json::{Value, json};

use crate::support::{MODEL, Ranks, describe, model_dir, repository, run, semmoe, signal};

/// Tables for two ranks, solved from the reference routing with a seed.
fn tables(folder: &Path) -> PathBuf {
    let trace = repository("tests/data/reference.trace.safetensors");
    let (profile, out) = (folder.join("p.profile.safetensors"), folder.join("t.tables.safetensors"));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let built = run(&["profile", "build", &text(&trace), "--out", &text(&profile)]);
    assert!(built.status.success(), "{}", describe(&built));
    let (profile, trace, out_text) = (text(&profile), text(&trace), text(&out));
    let solved = run(&["solve", "--profile", &profile, "--trace", &trace, "--groups", "2", "--out", &out_text]);
    assert!(solved.status.success(), "{}", describe(&solved));
    out
}

/// Writes a configuration in `folder`; its relative paths resolve there.
fn configuration(folder: &Path, engine_url: &str, policy: &str, more: &str) -> PathBuf {
    let tokenizer = model_dir().join("tokenizer.json");
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\n[[models]]\nname = \"{MODEL}\"\n\
         aliases = [\"tiny\"]\ntokenizer = {tokenizer:?}\npolicy = \"{policy}\"\n\n[[models.backends]]\nname = \"pod-a\"\n\
         engine = \"semmoe\"\nurl = \"{engine_url}\"\n{more}\n"
    );
    let path = folder.join("semmoe.toml");
    std::fs::write(&path, text).expect("written");
    path
}

struct Served {
    child: Child,
    url: BaseUrl,
}

impl Served {
    fn start(config: &Path) -> Self {
        Self::start_with(config, &[])
    }

    fn start_with(config: &Path, more: &[&str]) -> Self {
        let mut child =
            semmoe(&["serve", "--config"]).arg(config).args(more).stdout(Stdio::piped()).spawn().expect("starts");
        let mut line = String::new();
        // The reader leaves after the first line: the gateway must keep serving when its parent has gone.
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let url = line.trim().strip_prefix("ready: ").unwrap_or_else(|| panic!("{line:?}")).parse().expect("a URL");
        Self { child, url }
    }

    /// Sends SIGTERM; the exit code must be 0.
    fn stop(mut self) {
        signal("-TERM", self.child.id());
        let status = self.child.wait().expect("a child of ours");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Rank and policy of one request, from the response headers.
async fn routed(url: &BaseUrl, path: &str, body: Value) -> (String, String) {
    let bytes = serde_json::to_vec(&body).expect("JSON").into();
    let request = request(http::Method::POST, url, path, Some(bytes)).expect("request");
    let answer = HttpClient::default().send(request).await.expect("an answer");
    assert!(answer.status().is_success(), "{path}: {}", answer.status());
    let header = |name: &str| answer.headers()[name].to_str().expect("text").to_owned();
    // The engine reports the rank that ran it: the pin took effect.
    assert_eq!(header("x-semmoe-rank"), header("x-data-parallel-rank"), "{path}");
    (header("x-semmoe-rank"), header("x-semmoe-policy"))
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime").block_on(work)
}

#[test]
fn tables_steer_every_route_and_the_pin_takes_effect() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = tables(folder.path());
    let ranks = Ranks::start(2, Some(&tables));
    let config = configuration(folder.path(), &ranks.url, "affinity", "tables = \"t.tables.safetensors\"");
    let checked = semmoe(&["serve", "--check", "--config"]).arg(&config).output().expect("runs");
    assert!(checked.status.success(), "{}", describe(&checked));
    let served = Served::start(&config);
    block_on(async {
        for (path, body) in [
            (
                "/v1/chat/completions",
                json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "One."}]}),
            ),
            ("/v1/completions", json!({"model": MODEL, "max_tokens": 1, "prompt": "One two three"})),
            ("/generate", json!({"text": "One two three", "sampling_params": {"max_new_tokens": 1}})),
        ] {
            let (_, policy) = routed(&served.url, path, body).await;
            assert_eq!(policy, "affinity", "{path}");
        }
        let models: Value =
            HttpClient::default().get_json(&served.url, "/v1/models", &AnswerLimits::default()).await.expect("models");
        assert_eq!(models["data"][0]["id"], MODEL, "{models}");
    });
    served.stop();
    ranks.stop();
}

/// Sampling on real ranks: invisible to clients, and the samples can be solved from.
#[test]
fn sampled_requests_become_a_profile_that_solve_reads() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = tables(folder.path());
    std::fs::create_dir(folder.path().join("profiles")).expect("a folder");
    let ranks = Ranks::start(2, Some(&tables));
    let more = "tables = \"t.tables.safetensors\"\n\n[sampling]\nshare = 1.0\nprofile_dir = \"profiles\"";
    let served = Served::start(&configuration(folder.path(), &ranks.url, "affinity", more));
    let mut routed = 0;
    block_on(async {
        for (prompt, stream) in [("One two three", false), ("A river in the north.", true), ("The queen said", false)] {
            let body =
                json!({"text": prompt, "stream": stream, "sampling_params": {"max_new_tokens": 3, "ignore_eos": true}});
            let bytes = serde_json::to_vec(&body).expect("JSON").into();
            let request = request(http::Method::POST, &served.url, "/generate", Some(bytes)).expect("request");
            let (_, answer) = HttpClient::default().whole(request, &AnswerLimits::default()).await.expect("an answer");
            let text = std::str::from_utf8(&answer).expect("UTF-8");
            assert!(!text.contains("routed_experts"), "{text}");
            let last = text
                .split("\n\n")
                .map(|event| event.trim_start_matches("data: "))
                .filter(|event| event.starts_with('{'))
                .last();
            let last: Value = serde_json::from_str(last.expect("an answer")).expect("JSON");
            assert_eq!(last["meta_info"]["completion_tokens"], 3, "{text}");
            // The last generated token has not been through any layer.
            routed += last["meta_info"]["prompt_tokens"].as_u64().expect("a number") + 2;
        }
        // The OpenAI routes do not report the generated ids: only the prompt's tokens are counted.
        for (path, prompt) in [
            ("/v1/chat/completions", json!([{"role": "user", "content": "Who is the queen?"}])),
            ("/v1/completions", json!("Once upon a time")),
        ] {
            let field = if prompt.is_array() { "messages" } else { "prompt" };
            let body = json!({"model": MODEL, field: prompt, "max_tokens": 3});
            let answer: Value = HttpClient::default()
                .post_json(&served.url, path, &body, &AnswerLimits::default())
                .await
                .expect("an answer");
            assert!(answer.get("sglext").is_none(), "{answer}");
            let usage = |field: &str| answer["usage"][field].as_u64().expect("a number");
            routed += usage("prompt_tokens").min(usage("prompt_tokens") + usage("completion_tokens") - 1);
        }
    });
    served.stop();
    ranks.stop();
    let profile = folder.path().join(format!("profiles/{MODEL}.profile.safetensors"));
    let written = semmoe_tables::Profile::open(&profile).expect("a profile");
    assert_eq!(written.total_tokens(), routed);
    let solved = semmoe(&["solve", "--groups", "2", "--profile"])
        .arg(&profile)
        .arg("--warm-start")
        .arg(&tables)
        .arg("--out")
        .arg(folder.path().join("next.tables.safetensors"))
        .output()
        .expect("runs");
    assert!(solved.status.success(), "{}", describe(&solved));
}

#[test]
fn round_robin_needs_no_tables_and_alternates() {
    let folder = tempfile::tempdir().expect("a folder");
    let ranks = Ranks::start(2, None);
    let config = configuration(folder.path(), &ranks.url, "round_robin", "");
    let served = Served::start(&config);
    let seen: Vec<String> = block_on(async {
        let mut seen = Vec::new();
        for _ in 0..4 {
            let body = json!({"text": "One", "sampling_params": {"max_new_tokens": 1}});
            seen.push(routed(&served.url, "/generate", body).await.0);
        }
        seen
    });
    assert_eq!((&seen[0], &seen[1]), (&seen[2], &seen[3]));
    assert_ne!(seen[0], seen[1]);
    served.stop();
    ranks.stop();
}

#[test]
fn a_configuration_that_cannot_be_served_is_refused_and_a_check_reports_what_would_go_by_load() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables_path = tables(folder.path());
    let ends = |options: &[&str], config: &Path, code: i32, named: &[&str]| {
        let output = semmoe(&["serve"]).args(options).arg("--config").arg(config).output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{}", describe(&output));
        for name in named {
            assert!(said.contains(name), "{name:?} in {said}");
        }
    };
    // The engine runs the contiguous placement, but the tables are for another one.
    let ranks = Ranks::start(2, None);
    let with_tables = "tables = \"t.tables.safetensors\"";
    let config = configuration(folder.path(), &ranks.url, "affinity", with_tables);
    ends(&["--check", "--probe"], &config, 1, &["placement", "routed by load"]);
    ends(&["--check"], &config, 0, &[]);
    ranks.stop();
    let nobody = "http://127.0.0.1:1";
    let refused = |config: &Path, named: &[&str]| ends(&[], config, 2, named);
    refused(&configuration(folder.path(), nobody, "affinity", ""), &["affinity", "tables"]);
    refused(&configuration(folder.path(), nobody, "quickest", ""), &["quickest", "affinity", "round_robin"]);
    refused(&configuration(folder.path(), nobody, "round_robin", "colour = 3"), &["colour"]);
    let mut bytes = std::fs::read(&tables_path).expect("the tables");
    bytes.truncate(bytes.len() - 1);
    std::fs::write(&tables_path, bytes).expect("written");
    let config = configuration(folder.path(), nobody, "affinity", with_tables);
    ends(&["--check"], &config, 2, &["t.tables.safetensors", "routed by load"]);
}

/// The models and aliases that the gateway lists.
fn models(url: &BaseUrl) -> Vec<String> {
    let list: Value = block_on(async {
        HttpClient::default().get_json(url, "/v1/models", &AnswerLimits::default()).await.expect("models")
    });
    let names = list["data"].as_array().expect("a list").iter();
    names.map(|model| model["id"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn sighup_reads_the_configuration_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let ranks = Ranks::start(2, None);
    let config = configuration(folder.path(), &ranks.url, "round_robin", "");
    let checked = semmoe(&["serve", "--check", "--config"]).arg(&config).output().expect("runs");
    let reported = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success() && reported.contains("semmoe.toml: ok\n"), "{}", describe(&checked));
    assert!(reported.contains(&format!("model '{MODEL}', also as 'tiny', policy round_robin")), "{reported}");
    let served = Served::start(&config);
    assert_eq!(models(&served.url), [MODEL, "tiny"]);
    let good = std::fs::read_to_string(&config).expect("readable");
    // An invalid file is rejected as a whole, and the old configuration stays.
    std::fs::write(&config, good.replace("\"tiny\"", "\"huge\"") + "colour = 3\n").expect("written");
    let checked = semmoe(&["serve", "--check", "--config"]).arg(&config).output().expect("runs");
    assert_eq!(checked.status.code(), Some(2), "{}", describe(&checked));
    signal("-HUP", served.child.id());
    // A valid file. Signals are handled in order, so its effect shows that the previous signal was handled.
    std::fs::write(&config, good.replace("\"tiny\"", "\"small\"")).expect("written");
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        signal("-HUP", served.child.id());
        let seen = models(&served.url);
        assert!(!seen.contains(&"huge".to_owned()), "{seen:?}");
        if seen == [MODEL, "small"] {
            break;
        }
        assert!(Instant::now() < deadline, "{seen:?}");
    }
    served.stop();
    ranks.stop();
}

/// A ConfigMap's folder: the file links into a folder behind another link, which Kubernetes replaces atomically.
fn publish(folder: &Path, version: &str, text: &str) {
    std::fs::create_dir(folder.join(version)).expect("a folder");
    std::fs::write(folder.join(version).join("semmoe.toml"), text).expect("written");
    std::os::unix::fs::symlink(version, folder.join("..next")).expect("a link");
    std::fs::rename(folder.join("..next"), folder.join("..data")).expect("renamed");
}

#[test]
fn a_watched_configuration_is_read_when_it_changes_and_drains_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let admin_address = free_address();
    let config = configuration(folder.path(), "http://127.0.0.1:1", "least_load", "");
    let text = std::fs::read_to_string(&config).expect("readable");
    let text = text.replace("admin = \"127.0.0.1:0\"", &format!("admin = \"{admin_address}\""));
    std::fs::remove_file(&config).expect("removed");
    publish(folder.path(), "..1", &text);
    std::os::unix::fs::symlink("..data/semmoe.toml", &config).expect("a link");
    let served = Served::start_with(&config, &["--watch"]);
    let admin: BaseUrl = format!("http://{admin_address}").parse().expect("a URL");
    let ask = |path: &str| -> Value {
        block_on(async { HttpClient::default().get_json(&admin, path, &AnswerLimits::default()).await.expect(path) })
    };
    let until = |what: &str, seen: &dyn Fn() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !seen() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let drained: Value = block_on(async {
        let (path, limits) = ("/admin/backends/pod-a/drain", AnswerLimits::default());
        HttpClient::default().post_json(&admin, path, &json!({}), &limits).await.expect("drained")
    });
    assert_eq!(drained["draining"], true, "{drained}");
    let alias = || ask("/admin/config")["settings"]["models"][0]["aliases"][0].clone();
    publish(folder.path(), "..2", &text.replace("\"tiny\"", "\"small\""));
    until("the new alias", &|| alias() == "small");
    assert_eq!(ask("/admin/backends")["backends"][0]["draining"], true);
    // An invalid file changes nothing.
    publish(folder.path(), "..3", &format!("{text}colour = 3\n"));
    until("a refusal", &|| ask("/admin/config")["last_reload"]["outcome"] == "invalid");
    assert_eq!(alias(), "small");
    publish(folder.path(), "..4", &text);
    until("the old alias", &|| alias() == "tiny");
    served.stop();
}

/// A rank dies while every rank of two units runs a request: the unit's other rank reports it, and the gateway has both
/// requests answered by the other unit.
#[test]
fn a_lost_rank_costs_no_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let units = [Ranks::start(2, None), Ranks::start(2, None)];
    let second = format!("[[models.backends]]\nname = \"pod-b\"\nengine = \"semmoe\"\nurl = \"{}\"\n", units[1].url);
    let config = configuration(folder.path(), &units[0].url, "round_robin", &second);
    let served = Served::start(&config);
    let client = HttpClient::default();
    block_on(async {
        let body = json!({"model": MODEL, "prompt": "One two three", "max_tokens": 1200, "ignore_eos": true});
        let ask = || {
            let bytes = serde_json::to_vec(&body).expect("JSON").into();
            let request = request(http::Method::POST, &served.url, "/v1/completions", Some(bytes)).expect("request");
            let client = client.clone();
            tokio::spawn(async move { client.send(request).await.expect("an answer") })
        };
        let requests: Vec<_> = (0..4).map(|_| ask()).collect();
        let lost: BaseUrl = units[0].url.parse().expect("a URL");
        let running = async {
            loop {
                let page = client.get_text(&lost, "/metrics", &AnswerLimits::default()).await.expect("metrics");
                let busy = |rank| page.contains(&format!("semmoe_requests_in_flight{{rank=\"{rank}\"}} 1\n"));
                if busy(0) && busy(1) {
                    break;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), running).await.expect("both ranks have a request");
        signal("-KILL", units[0].pid(1));
        for request in requests {
            let answer = request.await.expect("no panic");
            assert_eq!(answer.status(), 200);
        }
        client.get_text(&lost, "/health", &AnswerLimits::default()).await.expect_err("the unit is dead");
    });
    served.stop();
    let [mut dead, living] = units;
    assert_eq!(dead.wait(0), Some(3), "rank 0 of the dead unit exits on its own, so that its supervisor restarts it");
    living.stop();
}

/// An address that is currently free.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").to_string()
}

/// The state of the only backend, as the switch policy's actuator reports it.
async fn steered(admin: &BaseUrl) -> Value {
    let shown: Value =
        HttpClient::default().get_json(admin, "/admin/switch", &AnswerLimits::default()).await.expect("switches");
    shown["units"][0].clone()
}

#[test]
fn the_gateway_switches_real_ranks_both_ways_under_requests() {
    switches_both_ways(Ranks::start(2, None), "dp-tp");
}

#[test]
fn the_gateway_switches_real_ranks_to_independent_groups_and_back() {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    switches_both_ways(Ranks::start_with(anywhere, &model_dir(), 4, &["--switch-groups", "2"]), "tp:2x2");
}

#[test]
fn the_gateway_switches_real_ranks_to_hybrid_nodes_and_back() {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let ranks = Ranks::start_with(anywhere, &model_dir(), 4, &["--switch-hybrid", "2x2"]);
    switches_both_ways(ranks, "dp-hybrid");
}

/// With a prior in which TP is free up to four sequences and EP above, real ranks switch to TP under one client and
/// back under sixteen, and every request is answered.
fn switches_both_ways(ranks: Ranks, tp_layout: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let admin = free_address();
    let switch = format!(
        "[switch]\nmode = \"drive\"\ntp_layout = \"{tp_layout}\"\ninterval_seconds = 0.05\nswitch_seconds = 0.05\n\
         tp_step_ms = [[1, 0.001], [4, 0.001], [5, 1000.0], [2048, 1000.0]]\n\
         ep_step_ms = [[1, 1000.0], [4, 1000.0], [5, 0.001], [2048, 0.001]]\n\
         tp_prefill_rate = 10000.0\nep_prefill_rate = 10000.0\n"
    );
    let config = configuration(folder.path(), &ranks.url, "round_robin", &switch);
    let text = std::fs::read_to_string(&config).expect("written before");
    std::fs::write(&config, text.replace("admin = \"127.0.0.1:0\"", &format!("admin = {admin:?}"))).expect("written");
    let served = Served::start(&config);
    let admin: BaseUrl = format!("http://{admin}").parse().expect("a URL");
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime").block_on(async {
        for (clients, layout) in [(1, "tp"), (16, "ep")] {
            let stop = Arc::new(AtomicBool::new(false));
            let mut running = tokio::task::JoinSet::new();
            for _ in 0..clients {
                let (stop, url) = (Arc::clone(&stop), served.url.clone());
                running.spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let body = json!({"model": MODEL, "prompt": "Name three rivers", "max_tokens": 24,
                            "temperature": 0, "ignore_eos": true});
                        let limits = AnswerLimits { timeout: Duration::from_secs(120), ..AnswerLimits::default() };
                        let answer = HttpClient::default().post_json(&url, "/v1/completions", &body, &limits).await;
                        let answer: Value = answer.expect("no request is lost");
                        assert_eq!(answer["usage"]["completion_tokens"], 24, "{answer}");
                    }
                });
            }
            let deadline = Instant::now() + Duration::from_secs(240);
            loop {
                let unit = steered(&admin).await;
                let decided = &unit["decisions"][0];
                if unit["layout"] == layout && decided["to"] == layout {
                    assert_eq!(decided["outcome"], "committed", "{unit}");
                    break;
                }
                assert!(Instant::now() < deadline, "never in {layout}: {unit}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            stop.store(true, Ordering::Relaxed);
            running.join_all().await;
        }
    });
    served.stop();
    ranks.stop();
}
