//! Follows docs/operating.md literally: every command and configuration of its two ways, from the current deployment to
//! affinity and back, against mock engines started as the document says, and SGLang's way against rank processes.

mod document;
mod engine;
mod operator;

#[allow(dead_code, reason = "the command's tests use the rest")]
#[path = "../command/support.rs"]
mod support;

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use document::Document;
use engine::Kind;
use operator::{Asked, Operator, Restarts};
use semmoe_mock_engine::{SGLANG_0_5_23, VLLM_0_32};
use semmoe_tables::Tables;
use serde_json::json;

/// Enough prompts for a solve to find more than chance.
const PROMPTS: usize = 240;

/// The local activation rate without knowledge: one of eight ranks.
const RANDOM: f64 = 0.125;

/// One unit of eight rank processes at a time.
static ONE_UNIT: Mutex<()> = Mutex::new(());

/// Number of answers with this `x-semmoe-policy`.
fn placed_by(answers: &[Asked], policy: &str) -> usize {
    answers.iter().filter(|answer| answer.header("x-semmoe-policy") == policy).count()
}

#[test]
fn an_sglang_operator_gets_from_today_to_affinity_and_back() {
    sglang(Operator::new(Kind::Mock(SGLANG_0_5_23), Restarts::Plain, PROMPTS));
}

/// Runs the document's commands and configurations with rank processes, which report their placement themselves.
#[test]
fn the_steps_of_sglang_hold_for_real_ranks_that_restart_quickly() {
    let _one = ONE_UNIT.lock().unwrap_or_else(PoisonError::into_inner);
    sglang(Operator::new(Kind::Ranks, Restarts::Quick, PROMPTS));
}

#[test]
fn the_steps_of_sglang_hold_for_real_ranks_that_restart_slowly() {
    let _one = ONE_UNIT.lock().unwrap_or_else(PoisonError::into_inner);
    sglang(Operator::new(Kind::Ranks, Restarts::Slow, PROMPTS));
}

fn sglang(mut operator: Operator) {
    let document = Document::read("SGLang");
    operator.shell(&document.next("", "sh"));
    let by_load = by_load(&document, &mut operator);
    recorded_and_solved(&document, &mut operator);
    let shadow = looked_at_first(&document, &mut operator);
    let placed = placed(&document, &mut operator, &shadow);
    let back = by_affinity(&document, &mut operator, &placed);
    new_tables(&mut operator);

    // The ways back, in reverse order.
    operator.configure(&back);
    assert_eq!(placed_by(&operator.ask(10), "least_load"), 10);
    operator.admin_post("/admin/backends/pod-a/drain");
    operator.shell("python -m sglang.launch_server --dp-size 8 --enable-return-routed-experts");
    operator.configure(&shadow);
    operator.admin_post("/admin/backends/pod-a/undrain");
    assert_eq!(placed_by(&operator.ask(10), "least_load"), 10);
    operator.configure(&by_load);
    assert_eq!(placed_by(&operator.ask(10), "least_load"), 10);
    document.all_was_done();
    operator.leave();
}

/// 1. The gateway, by load. Returns the configuration.
fn by_load(document: &Document, operator: &mut Operator) -> String {
    let by_load = document.next("1.", "toml");
    operator.configure(&by_load);
    let asked = operator.shell(&document.next("1.", "sh"));
    assert_eq!(asked[0].header("x-semmoe-backend"), "pod-a");
    assert_eq!(asked[0].header("x-semmoe-policy"), "least_load");
    assert!(asked[0].header("x-semmoe-rank").parse::<u16>().is_ok_and(|rank| rank < 8));
    // semmoe's ranks report their rank in every answer, and need no probes.
    if operator.engine.kind != Kind::Ranks {
        assert_eq!(asked[1].json()["backends"][0]["pins"]["state"], "honoured", "probed before the first request");
    }
    operator.until_pins_are_honoured();
    by_load
}

/// 2. Recorded, on an engine that is drained and restarted. 3. Solved, and judged on other traffic.
fn recorded_and_solved(document: &Document, operator: &mut Operator) {
    let record = document.next("2.", "sh");
    let asked = operator.shell(&record);
    assert_eq!((&asked[0].json()["draining"], &asked[1].json()["draining"]), (&json!(true), &json!(false)));
    let other = record.lines().skip_while(|line| !line.starts_with("semmoe")).take(2).collect::<Vec<_>>().join("\n");
    let other = other.replace(" prompts.jsonl", " other.jsonl").replace("run.trace", "other.trace");
    operator.shell(&other);
    operator.shell(&document.next("3.", "sh"));
    let tables = operator.tables("qwen3");
    let judged = operator.semmoe(&["evaluate", "--json", "--tables", &tables, "--trace", "other.trace.safetensors"]);
    let expected = judged["lar"].as_f64().expect("a rate");
    assert!(expected > 1.2 * RANDOM, "{judged}");
}

/// 4. A preview of affinity. Returns the configuration.
fn looked_at_first(document: &Document, operator: &mut Operator) -> String {
    operator.shell(&document.next("4.", "sh"));
    let shadow = document.next("4.", "toml");
    operator.configure(&shadow);
    assert_eq!(placed_by(&operator.ask(40), "least_load"), 40);
    let seen = operator.admin("/admin/routing")["models"][0]["shadow"].clone();
    assert_eq!((&seen["acting"], &seen["watched"]), (&json!("least_load"), &json!("affinity")), "{seen}");
    let report = &seen["report"];
    assert_eq!((&report["requests"], &report["tokens"]), (&json!(40), &report["scored_tokens"]), "{seen}");
    let metrics = operator.metrics();
    assert!(!metrics.contains("semmoe_score_failures_total{"), "{metrics}");
    assert!(!metrics.contains("agrees=\"no\""), "{metrics}");
    shadow
}

/// 5. The placement; the wrong order is refused. Returns the configuration.
fn placed(document: &Document, operator: &mut Operator, shadow: &str) -> String {
    let tables = operator.tables("qwen3");
    let refused = operator.load_tables("qwen3.tables.safetensors");
    assert_eq!((refused.status, refused.code().as_str()), (409, "tables_refused"), "{refused:?}");
    operator.shell(&document.next("5.", "sh"));
    let arguments = document.next("5.", "");
    assert_eq!(operator.printed().trim(), arguments.trim(), "what `tables export` prints");
    operator.shell(&format!("semmoe tables show {tables}"));
    let digest = Tables::open(Path::new(&tables)).expect("tables").placement_digest().to_owned();
    assert!(operator.printed().contains(&digest), "{}", operator.printed());
    let key = document.next("5.", "toml").replace("...", &digest);
    let steps = document.next("5.", "sh");
    let (before, after) = steps.split_once("python -m sglang.launch_server ...").expect("the engine's line");
    let (_, after) = after.split_once("# with the arguments above\n").expect("lines behind it");
    operator.shell(before);
    operator.shell(&format!("{} --enable-return-routed-experts", arguments.trim()));
    // semmoe's ranks report their placement, as SGLang does for an inline map, so the key is not needed.
    let reports_placement = operator.engine.kind == Kind::Ranks;
    let placed = shadow.replace("/linear.tables", "/qwen3.tables") + if reports_placement { "" } else { &key };
    operator.write(&placed);
    let asked = operator.shell(after);
    assert!(asked.len() == 2, "a reload and the end of the drain");
    if !reports_placement {
        assert_eq!(asked[0].json()["backends_added"], json!(["pod-a"]));
    }
    let in_use = operator.admin("/admin/tables");
    let found = &in_use["tables"][0];
    assert_eq!(found["digest"], json!(Tables::open(Path::new(&tables)).expect("tables").digest()), "{in_use}");
    let refused = operator.load_tables("linear.tables.safetensors");
    assert_eq!((refused.status, refused.code().as_str()), (409, "tables_refused"), "{refused:?}");
    placed
}

/// 6. A canary, then everything, and observed figures match the expected ones. Returns the configuration of the way
///    back.
fn by_affinity(document: &Document, operator: &mut Operator, placed: &str) -> String {
    let lines = document.next("6.", "toml");
    let policies = "policy = \"shadow\"                     # scores, reports, routes by the baseline\nbaseline = \"least_load\"\n";
    assert!(placed.contains(policies));
    operator.configure(&placed.replace(policies, &lines));
    let answers = operator.ask(100);
    assert_eq!((placed_by(&answers, "affinity"), placed_by(&answers, "least_load")), (10, 90));
    let affinity = placed.replace(policies, "policy = \"affinity\"\n") + "[sampling]\nshare = 1.0\n";
    operator.configure(&affinity);
    assert_eq!(placed_by(&operator.ask_sampled(200), "affinity"), 200);
    let metrics = operator.metrics();
    assert!(
        metrics.contains("semmoe_sampled_requests_total{backend=\"pod-a\",outcome=\"observed\"} 200\n"),
        "{metrics}"
    );
    let live = operator.live();
    assert!(live["compared"].as_u64() >= Some(150), "{live}");
    let (observed, predicted) = (live["mean_observed"].as_f64(), live["mean_predicted"].as_f64());
    let (observed, predicted) = observed.zip(predicted).expect("both");
    assert!(observed > 1.1 * RANDOM && (observed - predicted).abs() < 0.1, "{live}");
    placed.replace(policies, &lines.replace("canary = 10", "canary = 0"))
}

/// A new T for the running placement: loaded by path, by upload, and rolled back.
fn new_tables(operator: &mut Operator) {
    let document = Document::read("New tables while everything runs");
    operator.shell(
        "semmoe profile build other.trace.safetensors --out other.profile.safetensors\n\
         semmoe solve --profile other.profile.safetensors --groups 8 --out /etc/semmoe/tables/next.tables.safetensors \
         --placement /etc/semmoe/tables/qwen3.tables.safetensors",
    );
    operator.has_tables_at_hand("next");
    let before = operator.admin("/admin/tables")["tables"][0]["generation"].clone();
    let listed = format!("\"generation\":{before}");
    let asked = operator.shell(&document.next("", "sh").replace("\"generation\":3", &listed));
    let generations: Vec<u64> =
        asked.iter().map(|answer| answer.json()["generation"].as_u64().expect("a number")).collect();
    let digests: Vec<String> = asked.iter().map(|answer| answer.json()["digest"].to_string()).collect();
    assert!(generations[1] > generations[0] && generations[3] > generations[1], "{generations:?}");
    assert_eq!((digests[0] == digests[1], digests[3] == digests[0]), (true, true), "the rollback undoes the upload");
    assert_ne!(digests[4], digests[0], "and the next one goes back to the first");
    assert_eq!(operator.ask(1)[0].header("x-semmoe-generation"), generations[4].to_string());
    document.next("", "toml");
    document.all_was_done();
}

#[test]
fn a_vllm_operator_gets_from_today_to_affinity_and_back() {
    let document = Document::read("vLLM");
    let mut operator = Operator::new(Kind::Mock(VLLM_0_32), Restarts::Plain, PROMPTS);
    operator.shell(&document.next("", "sh"));

    // 1. By load: the configuration below without scoring.
    let shadow = document.next("", "toml");
    let scoring = ["tokenizer = ", "policy = ", "baseline = ", "tables = "];
    let kept = |line: &&str| !scoring.iter().any(|key| line.starts_with(key));
    let by_load = shadow.lines().filter(kept).collect::<Vec<_>>().join("\n");
    let by_load = by_load.replace("\n\n[[models.backends]]", "\npolicy = \"least_load\"\n\n[[models.backends]]");
    operator.configure(&by_load);
    operator.serve();
    assert_eq!(placed_by(&operator.ask(10), "least_load"), 10);
    operator.until_pins_are_honoured();

    // 2. Recorded and solved, with the flag.
    operator.admin_post("/admin/backends/pod-a/drain");
    operator.shell(&document.next("2.", "sh"));
    operator.admin_post("/admin/backends/pod-a/undrain");
    assert!(operator.load_tables("linear.tables.safetensors").status == 403, "no `tables_root` here: uploads only");

    // 3. In shadow mode first, then affinity.
    operator.configure(&shadow);
    assert_eq!(placed_by(&operator.ask(40), "least_load"), 40);
    let seen = operator.admin("/admin/routing")["models"][0]["shadow"].clone();
    assert_eq!((&seen["watched"], &seen["report"]["requests"]), (&json!("affinity"), &json!(40)), "{seen}");
    assert_eq!(seen["report"]["tokens"], seen["report"]["scored_tokens"], "{seen}");
    let affinity = shadow.replace("policy = \"shadow\"\nbaseline = \"least_load\"\n", "policy = \"affinity\"\n");
    operator.configure(&affinity);
    assert_eq!(placed_by(&operator.ask(20), "affinity"), 20);

    // 4. A checkpoint permuted so that linear placement is E; its engine keeps the old name.
    operator.admin_post("/admin/backends/pod-a/drain");
    operator.shell(&document.next("4.", "sh"));
    operator.configure(&affinity.replace("/etc/semmoe/tables/linear.tables", "ep8.tables"));
    operator.admin_post("/admin/backends/pod-a/undrain");
    let answers = operator.ask(20);
    assert_eq!(placed_by(&answers, "affinity"), 20);
    assert!(answers.iter().all(|answer| answer.header("x-semmoe-backend") == "pod-a"));

    // Back.
    operator.admin_post("/admin/backends/pod-a/drain");
    operator.shell("vllm serve MODEL_DIR --served-model-name Qwen/Qwen3-30B-A3B --data-parallel-size 8");
    operator.configure(&affinity);
    operator.admin_post("/admin/backends/pod-a/undrain");
    assert_eq!(placed_by(&operator.ask(10), "affinity"), 10);
    operator.configure(&by_load);
    assert_eq!(placed_by(&operator.ask(10), "least_load"), 10);
    document.all_was_done();
    operator.leave();
}
