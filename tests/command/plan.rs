//! `semmoe plan` as a user runs it.

use std::path::{Path, PathBuf};

use crate::support::{describe, json_of, model_dir, run};

const CLUSTER: &str = "gpu = \"H100\"\nusd_per_gpu_hour = 2\n[[levels]]\nname = \"nvlink\"\ncount = 4\n\
    bandwidth_gb_per_second = 450\nlatency_us = 3\n";

/// Writes `text` to a file in `folder`.
fn file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("written");
    path
}

#[test]
fn a_plan_is_printed_written_and_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = file(folder.path(), "cluster.toml", CLUSTER);
    let evaluation = file(folder.path(), "evaluation.json", r#"{"lar": 0.4, "lar_random": 0.25}"#);
    let page = folder.path().join("plan.html");
    let model = model_dir();
    let (model, cluster) = (model.to_str().expect("UTF-8"), cluster.to_str().expect("UTF-8"));
    let base = ["plan", "--model", model, "--cluster", cluster, "--affinity", evaluation.to_str().expect("UTF-8")];

    let document = json_of(&run(&[&base[..], &["--json", "--html", page.to_str().expect("UTF-8")]].concat()));
    // Units of 1, 2 and 4 GPUs.
    assert_eq!(document["plan"]["strategies"], 1 + 5 + 14);
    assert_eq!(document["accuracy"], "uncalibrated");
    let groups = &document["extras"]["groups"];
    assert_eq!(
        (&groups[0]["groups"], &groups[0]["group_gpus"], &groups[1]),
        (&2.into(), &2.into(), &serde_json::Value::Null)
    );
    assert!(document["affinity"][1]["gain"]["bytes_ratio"].as_f64().is_some_and(|ratio| (ratio - 0.8).abs() < 1e-9));
    assert!(document["plan"]["ranked"][0]["at_load"]["usd_per_million_tokens"].as_f64().is_some_and(|usd| usd > 0.0));
    let html = std::fs::read_to_string(page).expect("the page");
    assert!(html.contains("<svg") && html.contains("Plan for Qwen3MoeForCausalLM"));

    // A gateway's metrics: based on all sampled activations, not on requests.
    let sampled =
        |place, count| format!("semmoe_sampled_activations_total{{backend=\"a\",place=\"{place}\"}} {count}\n");
    let by_request = "semmoe_observed_lar_sum{backend=\"a\"} 1.8\nsemmoe_observed_lar_count{backend=\"a\"} 2\n";
    let text = format!("{}{}{by_request}", sampled("local", 40), sampled("remote", 60));
    let metrics = file(folder.path(), "metrics.txt", &text);
    let gains = |rate: &str| json_of(&run(&[&base[..5], &["--affinity", rate, "--json"]].concat()))["affinity"].clone();
    assert_eq!(gains(metrics.to_str().expect("UTF-8")), gains("0.4"));

    let explained = run(&[&base[..], &["--explain"]].concat());
    let text = String::from_utf8_lossy(&explained.stdout).into_owned();
    for part in
        ["modelled, uncalibrated", "affinity, prefill of", "switching 4 GPUs", "2 groups of 2", "each rank loads"]
    {
        assert!(text.contains(part), "{}\nlacks: {part}", describe(&explained));
    }
}

#[test]
fn what_is_wrong_is_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = file(folder.path(), "good.toml", CLUSTER);
    let bad = file(folder.path(), "bad.toml", &CLUSTER.replace("450", "nan"));
    let flood = "requests_per_second = 1e11\ninput_tokens = 1024\noutput_tokens = 256\n";
    let flood = file(folder.path(), "flood.toml", flood);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (model, good, bad, flood) = (text(&model_dir()), text(&good), text(&bad), text(&flood));
    let cases: [(&[&str], i32, &str); 6] = [
        (&["--model", &model, "--cluster", &bad], 2, "`levels[0].bandwidth_gb_per_second` is null, NaN or infinite"),
        (&["--model", &good, "--cluster", &good], 2, "good.toml is not valid JSON"),
        (&["--model", &model, "--cluster", "absent.toml"], 2, "cannot read the file absent.toml"),
        (&["--model", &model, "--cluster", &good, "--weights", "int3"], 2, "expected one of f32, bf16"),
        (&["--model", &model, "--cluster", &good, "--affinity", "1.5"], 2, "a local rate is 1.5"),
        (&["--model", &model, "--cluster", &good, "--workload", &flood], 1, "no strategy serves the load"),
    ];
    for (args, code, message) in cases {
        let output = run(&[&["plan"], args].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{}", describe(&output));
        assert!(said.contains(message), "{}\nlacks: {message}", describe(&output));
    }
}

/// A small calibration of this machine, and errors in such a file.
#[test]
fn a_machine_is_calibrated_and_planned_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, out) = (model_dir(), folder.path().join("here"));
    let (model, out) = (model.to_str().expect("UTF-8"), out.to_str().expect("UTF-8"));
    let calibrate = ["plan", "calibrate", "--model", model, "--out", out, "--ranks", "1,2", "--seconds", "1", "--json"];
    let found = json_of(&run(&calibrate));
    // Four layouts of two ranks and one of one, six steps each.
    assert_eq!(found["held_out"].as_array().map(Vec::len), Some(5 * 6));
    assert!(found["held_out"].as_array().into_iter().flatten().all(|row| row["predicted_ms"].as_f64() > Some(0.0)));
    assert!(found["calibration"]["links"]["rows"].as_u64() > Some(0));

    let file_of = |name: &str| Path::new(out).join(name);
    let (cluster, calibration) = (file_of("cluster.toml"), file_of("calibration.json"));
    let (cluster, calibration) = (cluster.to_str().expect("UTF-8"), calibration.to_str().expect("UTF-8"));
    // The machine serves with other work running.
    let load = "requests_per_second = 0.001\ninput_tokens = 64\noutput_tokens = 8\n";
    let load = file(folder.path(), "load.toml", load);
    let load = load.to_str().expect("UTF-8");
    let question = ["plan", "--model", model, "--cluster", cluster, "--workload", load, "--calibration", calibration];
    let planned = json_of(&run(&[&question[..], &["--json"]].concat()));
    assert!(planned["accuracy"]["calibrated"]["tpot"]["rows"].as_u64() > Some(0), "{}", planned["accuracy"]);

    let good = std::fs::read_to_string(calibration).expect("written");
    let cases = [
        ("other", good.replace("processors", "GPUs"), "the calibration was fitted on"),
        ("nan", good.replacen("\"rows\": ", "\"rows\": NaN", 1), "is not valid JSON"),
        ("empty", String::new(), "is not valid JSON"),
        ("cut", good[..good.len() / 2].to_owned(), "is not valid JSON"),
        ("huge", " ".repeat(5 << 20), "more than 4194304 bytes long"),
        ("negative", good.replace("\"memory_share\": ", "\"memory_share\": -"), "memory_share is -"),
    ];
    for (name, text, message) in cases {
        let path = file(folder.path(), name, &text);
        let path = path.to_str().expect("UTF-8");
        let output = run(&["plan", "--model", model, "--cluster", cluster, "--calibration", path]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(message), "{name}: {}", describe(&output));
    }
    let blocked = file(folder.path(), "file", "");
    let output = run(&["plan", "calibrate", "--model", model, "--out", blocked.to_str().expect("UTF-8")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("cannot write"), "{}", describe(&output));
}

#[test]
fn a_plan_is_loaded_by_the_worker_or_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = file(folder.path(), "cluster.toml", CLUSTER);
    let (model, cluster) = (model_dir(), cluster.to_str().expect("UTF-8").to_owned());
    let model = model.to_str().expect("UTF-8");
    let plan = json_of(&run(&["plan", "--model", model, "--cluster", &cluster, "--json"]));
    assert_eq!(plan["chosen"]["version"], env!("CARGO_PKG_VERSION"));
    let good = plan.to_string();
    let layout = |tp: u64, dp: u64, cut: u64, whole: u64| {
        let mut plan = plan.clone();
        plan["chosen"]["layout"] = serde_json::json!({
            "pipeline": 1, "attention_tp": tp, "attention_dp": dp, "expert_tp": cut, "expert_ep": whole,
        });
        plan.to_string()
    };
    let domains = |text: &str| {
        let mut plan: serde_json::Value = serde_json::from_str(&layout(1, 2, 1, 2)).expect("JSON");
        plan["chosen"]["domains"] = text.into();
        plan.to_string()
    };
    let cases = [
        ("world", layout(1, 4, 1, 4), "is for 4 ranks, --world is 2"),
        ("domains", domains("3"), "the worker does not run DP2, EP2: its expert domains of 3 do not divide 2 ranks"),
        ("levels", domains("2:1"), "expected N, or sizes of up to 8 levels"),
        ("nested", layout(2, 2, 1, 4), "is for 4 ranks, --world is 2"),
        (
            "stages",
            layout(1, 2, 1, 2).replace("\"pipeline\":1", "\"pipeline\":2"),
            "the worker does not run DP2, EP2 PP2: it has no pipeline stages",
        ),
        (
            "version",
            good.replace(&format!("\"version\":\"{}", env!("CARGO_PKG_VERSION")), "\"version\":\"9"),
            "plan again",
        ),
        ("model", good.replace("\"experts\":32", "\"experts\":64"), "it is for another model: its experts is 64"),
        ("none", "{}".to_owned(), "`chosen` is missing"),
        ("cut", good[..good.len() / 2].to_owned(), "expected the output of `semmoe plan --json`"),
        ("huge", layout(u64::MAX, u64::MAX, 1, 1), "a degree outside 1 to 1024"),
    ];
    for (name, text, message) in cases {
        let path = file(folder.path(), name, &text);
        let path = path.to_str().expect("UTF-8");
        let rank =
            ["worker", "--model", model, "--rank", "1", "--world", "2", "--rendezvous", "127.0.0.1:1", "--plan", path];
        let output = run(&rank);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(message), "{name}: {}", describe(&output));
    }
    let mut several = plan.clone();
    several["chosen"]["units"] = serde_json::json!(7);
    let units = file(folder.path(), "units", &several.to_string());
    let output = run(&["up", "--port", "0", "--plan", units.to_str().expect("UTF-8")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("units side by side"), "{}", describe(&output));
}

#[test]
fn a_running_deployment_and_a_trace_are_judged() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let metrics = "semmoe_steps_total{rank=\"0\"} 10\nsemmoe_steps_total{rank=\"1\"} 10\n\
        semmoe_step_seconds_total{rank=\"0\"} 1.0\nsemmoe_step_seconds_total{rank=\"1\"} 1.0\n\
        semmoe_collective_seconds_total{rank=\"0\",layer=\"0\",kind=\"dispatch\"} 0.8\n\
        semmoe_activations_total{rank=\"0\",layer=\"0\",phase=\"decode\",where=\"local\"} 25\n\
        semmoe_activations_total{rank=\"0\",layer=\"0\",phase=\"decode\",where=\"remote\"} 75\n";
    let metrics = text(&file(folder.path(), "metrics.txt", metrics));
    let found = json_of(&run(&["plan", "--deployment", &metrics, "--affinity", "0.5", "--json"]));
    // 40% of a step shrink to two thirds.
    let gain = &found["affinity"][0]["gain"];
    let near =
        |value: &serde_json::Value, expected: f64| value.as_f64().is_some_and(|found| (found - expected).abs() < 1e-9);
    assert!(near(&gain["range"][1], 1.0 / (1.0 - 0.4 / 3.0) - 1.0), "{gain}");
    let links = "compute_ms = 36\nexpert_mb = 4\nremote_ranks = 2.0\nlinks = [{ mbit_per_second = 1000 }]\n";
    let links = text(&file(folder.path(), "links.toml", links));
    let evaluation = r#"{"lar": 0.3, "policies": {"affinity": {"request_lar": 0.4, "remote_ranks_per_token": 1.5}}}"#;
    let evaluation = text(&file(folder.path(), "evaluation.json", evaluation));
    let found = json_of(&run(&["plan", "--deployment", &links, "--affinity", &evaluation, "--json"]));
    assert!(near(&found["affinity"][0]["gain"]["bytes_ratio"], 0.75), "{found}");

    let cluster = text(&file(folder.path(), "cluster.toml", &CLUSTER.replace("count = 4", "count = 2")));
    let two = format!(
        "{}[[levels]]\nname = \"ib\"\ncount = 2\nbandwidth_gb_per_second = 50\nlatency_us = 12\n",
        CLUSTER.replace("count = 4", "count = 2")
    );
    let two = text(&file(folder.path(), "two.toml", &two));
    let lines: String = (0..50)
        .map(|at| format!("{{\"timestamp\": {}, \"input_length\": 100, \"output_length\": 20}}\n", at * 10))
        .collect();
    let trace = text(&file(folder.path(), "trace.jsonl", &lines));
    let model = text(&model_dir());
    let found = json_of(&run(&["plan", "--model", &model, "--cluster", &two, "--lengths", &trace, "--json"]));
    let units = &found["extras"]["units"];
    assert_eq!((&units["units"], &units["requests"]), (&serde_json::json!(2), &serde_json::json!(50)));

    let bad = text(&file(folder.path(), "bad.jsonl", "{\"input_length\": 99999999999, \"output_length\": 1}\n"));
    let empty = text(&file(folder.path(), "empty", ""));
    let cases: [(&[&str], &str); 4] = [
        (&["--deployment", &empty, "--affinity", "0.5"], "has no semmoe_steps_total"),
        (&["--deployment", &links, "--affinity", "0.5", "--lar-before", "1"], "a local rate is 1"),
        (&["--model", &model, "--cluster", &cluster, "--lengths", &bad], "expected at most 1048576"),
        (&["--cluster", &cluster], "--model <PATH>"),
    ];
    for (args, message) in cases {
        let output = run(&[&["plan"], args].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(message), "{}\nlacks: {message}", describe(&output));
    }
}
