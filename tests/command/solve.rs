//! `solve` as an operator runs it: held-out requests, and solves that stop early.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;

use semmoe_tables::{ExpertId, LayerIdx, ModelInfo, Phase, ProfileBuilder, Tables, Trace, TraceBuilder};
use serde_json::Value;

use crate::support::{describe, json_of, repository, run, semmoe, signal};

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

fn reference() -> String {
    text(&repository("tests/data/reference.trace.safetensors"))
}

/// Solves with four groups; returns the output and the report.
fn solve(folder: &Path, profile: &str, more: &[&str]) -> (String, Value) {
    let (tables, report) = (text(&folder.join("t.tables")), text(&folder.join("r.json")));
    let outputs = ["solve", "--verbose", "--groups", "4", "--profile", profile, "--out", &tables, "--report", &report];
    let output = run(&[&outputs, more].concat());
    assert!(output.status.success(), "{}", describe(&output));
    let report = serde_json::from_slice(&std::fs::read(report).expect("a report")).expect("JSON");
    (String::from_utf8(output.stdout).expect("UTF-8"), report)
}

/// A trace for the reference's model with `tokens` tokens of one request.
fn few(folder: &Path, tokens: usize) -> String {
    let reference = Trace::open(Path::new(&reference())).expect("the reference");
    let (model, provenance) = (reference.model().clone(), reference.provenance().clone());
    let request = reference.request(0);
    let rows = (0..tokens).flat_map(|at| (0..model.layers()).map(move |layer| (at, LayerIdx::new(layer as u16))));
    let routes = rows.flat_map(|(at, layer)| request.route(at, layer).expect("a known route").experts());
    let routes: Vec<u16> = routes.map(ExpertId::get).collect();
    let mut builder = TraceBuilder::new(model.clone(), provenance).expect("a trace");
    builder.push(&request.token_ids()[..tokens], tokens as u32, &routes, None).expect("a request");
    let path = folder.join(format!("{tokens}.trace.safetensors"));
    builder.write(&path).expect("written");
    let profile = text(&folder.join(format!("{tokens}.profile.safetensors")));
    let built = run(&["profile", "build", &text(&path), "--out", &profile]);
    assert!(built.status.success(), "{}", describe(&built));
    profile
}

#[test]
fn a_profile_of_few_tokens_is_warned_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let solve = |tokens| {
        let (profile, out) = (few(folder.path(), tokens), text(&folder.path().join("few.tables.safetensors")));
        run(&["solve", "--groups", "4", "--profile", &profile, "--out", &out])
    };
    for (tokens, counted) in [(1, "counts 1 token,"), (8, "counts 8 tokens,")] {
        let warned = solve(tokens);
        let said = String::from_utf8_lossy(&warned.stderr);
        assert!(warned.status.success() && said.contains("warning: ") && said.contains(counted), "{said}");
    }
    let profile = text(&folder.path().join("p.profile"));
    assert!(run(&["profile", "build", &reference(), "--out", &profile]).status.success());
    let out = text(&folder.path().join("t.tables.safetensors"));
    let enough = run(&["solve", "--solver", "paper", "--groups", "4", "--profile", &profile, "--out", &out]);
    assert!(!String::from_utf8_lossy(&enough.stderr).contains("warning"), "{}", describe(&enough));
}

#[test]
fn requests_are_held_out_and_judged() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = text(&folder.path().join("p.profile"));
    assert!(run(&["profile", "build", &reference(), "--out", &profile]).status.success());
    for attention in ["dp", "tp"] {
        let with = ["--trace", &reference(), "--attention", attention, "--hold-out", "0.3"];
        let (said, report) = solve(folder.path(), &profile, &with);
        let held_out = &report["held_out"];
        let requests = |part: &str| held_out[part].as_u64().expect("a number");
        let (choosing, judged) = (requests("requests_choosing"), requests("requests_judged"));
        assert_eq!(requests("requests_solved") + choosing + judged, 96, "{held_out}");
        let line = format!("held out: {} of 96 requests were held out", choosing + judged);
        assert!(
            said.lines().any(|said| said.starts_with(&line) && said.contains("subtracted from the profile")),
            "{said}"
        );
        assert_eq!(held_out["profile"], "taken_out", "{held_out}");
        assert!(held_out["figures"]["lar"].as_f64() > held_out["figures"]["lar_random"].as_f64(), "{held_out}");
        let curve = &held_out["figures"]["calibration"]["tokens"];
        assert!(curve["expected_calibration_error"].is_number() && curve["bins"][0]["count"].is_number(), "{curve}");
        assert!(held_out["prior"]["log_loss_before"].is_number(), "{held_out}");
        let tables = text(&folder.path().join("t.tables"));
        let judged = json_of(&run(&["evaluate", "--tables", &tables, "--trace", &reference(), "--json"]));
        if attention == "tp" {
            assert_eq!(held_out["transitions"].as_array().expect("layers").len(), 7, "{held_out}");
            assert!(held_out["transitions"][2]["lar_t"].is_number() && judged["lar_t_only"].is_number(), "{held_out}");
            assert!(said.contains("held_out.figures.lar_t_only "), "{said}");
        } else {
            assert!(held_out["figures"]["batch_optimum"]["request_lar"].is_number(), "{held_out}");
            assert!(
                judged["lar_t_only"].is_null() && said.contains("held_out.figures.batch_predicted.request_lar "),
                "{said}"
            );
        }
        assert!(judged["calibration"]["tokens"]["count"].as_u64() > Some(9000), "{judged}");
    }
}

#[test]
fn what_is_not_held_out_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = Trace::open(Path::new(&reference())).expect("a valid trace");
    let profile_of = |name: &str, trace: &Trace| {
        let path = folder.path().join(name);
        let mut builder =
            ProfileBuilder::new(trace.model().clone(), trace.provenance().clone(), Phase::All).expect("a model");
        builder.add_trace(trace).expect("counts");
        builder.write(&path).expect("written");
        text(&path)
    };
    let some = TraceBuilder::select(&trace, |number, _| number < 10).expect("a trace");
    let few = text(&folder.path().join("few.trace"));
    some.write(Path::new(&few)).expect("written");
    let (all, part) = (profile_of("all", &trace), profile_of("part", &some));
    for (profile, more, line) in [
        (&all, &["--trace", &reference(), "--hold-out", "0"][..], "held out: no requests were held out"),
        (&all, &[], "held out: nothing was held out: a profile without a trace has no requests"),
        (&all, &["--trace", &few], "held out: nothing was held out: the 10 requests"),
    ] {
        let (said, report) = solve(folder.path(), profile, &[more, &["--solver", "paper"]].concat());
        assert!(said.lines().any(|said| said.starts_with(line)), "{said}");
        assert!(report["held_out"]["figures"].is_null() && report["held_out"]["requests_judged"] == 0, "{report}");
    }
    let (said, report) =
        solve(folder.path(), &part, &["--trace", &reference(), "--hold-out", "0.5", "--solver", "paper"]);
    assert!(said.contains("the profile does not contain their counts, so nothing was subtracted"), "{said}");
    assert_eq!(report["held_out"]["profile"], "not_part");
    for wrong in ["0.6", "-0.1", "all"] {
        let output =
            run(&["solve", "--profile", &all, "--groups", "4", "--out", "/nowhere/t", &format!("--hold-out={wrong}")]);
        assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains("--hold-out"), "{}", describe(&output));
    }
}

/// A profile without structure, on which all starts together take minutes; returns its path and that of its trace.
fn shapeless(folder: &Path, model: ModelInfo, requests: usize) -> (String, String) {
    let reference = Trace::open(Path::new(&reference())).expect("a valid trace");
    let experts = usize::from(model.num_experts);
    let mut random = 1u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let mut trace = TraceBuilder::new(model.clone(), reference.provenance().clone()).expect("a model");
    for _ in 0..requests {
        let ids: Vec<u32> = (0..60).map(|_| next(model.vocab_size as usize) as u32).collect();
        let first: Vec<usize> = (0..60 * model.layers()).map(|_| next(experts)).collect();
        let experts: Vec<u16> =
            first.iter().flat_map(|first| (0..4).map(move |e| ((first + 7 * e) % experts) as u16)).collect();
        trace.push(&ids, 60, &experts, None).expect("a request");
    }
    let (trace_path, profile) = (folder.join("shapeless.trace"), folder.join("shapeless.profile"));
    trace.write(&trace_path).expect("written");
    let built = run(&["profile", "build", &text(&trace_path), "--out", &text(&profile)]);
    assert!(built.status.success(), "{}", describe(&built));
    (text(&profile), text(&trace_path))
}

#[test]
fn a_time_limit_writes_the_best_so_far() {
    let folder = tempfile::tempdir().expect("a folder");
    let (profile, trace) = shapeless(folder.path(), reference_model(), 600);
    for (attention, limit) in [("dp", "0.1"), ("tp", "100ms")] {
        let more = ["--trace", &trace, "--attention", attention, "--time-limit", limit];
        let (said, report) = solve(folder.path(), &profile, &more);
        assert_eq!(report["stopped"], true, "{report}");
        // Reports are renamed into place when complete: a full disk leaves the previous one intact.
        let (report_path, before) = (folder.path().join("r.json"), folder.path().join("before"));
        std::fs::hard_link(&report_path, &before).expect("a link");
        std::fs::write(&before, "before").expect("written");
        solve(folder.path(), &profile, &more);
        assert_eq!(std::fs::read_to_string(&before).expect("the old file"), "before");
        std::fs::remove_file(before).expect("removed");
        assert!(said.contains("ended early") && report["held_out"]["figures"]["lar"].is_number(), "{said} {report}");
        let tables = Tables::open(&folder.path().join("t.tables")).expect("valid tables");
        assert_eq!((tables.groups(), tables.attention().to_string().as_str()), (4, attention));
    }
    for wrong in ["0", "-1", "soon", "nan"] {
        let output = run(&[
            "solve",
            "--profile",
            &profile,
            "--groups",
            "4",
            "--out",
            "/nowhere/t",
            &format!("--time-limit={wrong}"),
        ]);
        assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains("seconds"), "{}", describe(&output));
    }
}

/// A single step over many experts and groups takes far longer than the limit; the solve must stop within it, with and
/// without replicas.
#[test]
fn a_time_limit_binds_inside_one_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let (profile, _) = shapeless(folder.path(), many_experts(8), 16);
    let tables = text(&folder.path().join("t.tables"));
    for more in [&["--groups", "512"][..], &["--groups", "48", "--redundant", "32"]] {
        let began = std::time::Instant::now();
        let solve = ["solve", "--profile", &profile, "--out", &tables, "--time-limit", "1s"];
        let output = run(&[&solve, more].concat());
        assert!(output.status.success() && began.elapsed().as_secs() < 30, "{more:?}: {}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains("stopped early"), "{}", describe(&output));
        assert!(Tables::open(Path::new(&tables)).is_ok(), "{more:?}");
    }
    // Nor does a small file with many layers use unbounded memory.
    let (profile, _) = shapeless(folder.path(), many_experts(64), 1);
    let output = run(&["solve", "--profile", &profile, "--out", &tables, "--groups", "2048"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("layers x experts x groups, expected at most"), "{said}");
    let output = run(&["solve", "--profile", &profile, "--out", &tables, "--groups", "8", "--solver", "paper"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("layers x experts x experts, expected at most"), "{said}");
}

fn reference_model() -> ModelInfo {
    Trace::open(Path::new(&reference())).expect("a valid trace").model().clone()
}

/// A model with `layers` layers of 4,096 experts.
fn many_experts(layers: u16) -> ModelInfo {
    let (num_hidden_layers, layer_ids) = (layers, (0..layers).collect());
    ModelInfo { num_experts: 4096, num_hidden_layers, layer_ids, ..reference_model() }
}

#[test]
fn ctrl_c_writes_the_best_so_far() {
    let folder = tempfile::tempdir().expect("a folder");
    let (profile, _) = shapeless(folder.path(), reference_model(), 600);
    let tables = folder.path().join("t.tables");
    let arguments = ["solve", "--groups", "8", "--attention", "tp", "--profile", &profile, "--out", &text(&tables)];
    let mut child =
        semmoe(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut said = String::new();
    // Signal handlers are installed before the command prints that it solves.
    while !said.contains("solving ...") {
        assert!(stderr.read_line(&mut said).expect("UTF-8") > 0, "it ended: {said}");
    }
    signal("-INT", child.id());
    stderr.read_to_string(&mut said).expect("UTF-8");
    let status = child.wait().expect("a child of ours");
    assert_eq!(status.code(), Some(0), "as the help says: {said}");
    assert!(said.contains("stopped early, writing the best result so far"), "{said}");
    assert_eq!(Tables::open(&tables).expect("valid tables").groups(), 8);
    assert!(run(&["tables", "verify", &text(&tables)]).status.success());
}
