//! `semmoe plan` as a user runs it.

mod support;

use std::path::{Path, PathBuf};

use support::{describe, json_of, model_dir, run};

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
    assert!(document["affinity"][1]["gain"]["bytes_ratio"].as_f64().is_some_and(|ratio| (ratio - 0.8).abs() < 1e-9));
    assert!(document["plan"]["ranked"][0]["at_load"]["usd_per_million_tokens"].as_f64().is_some_and(|usd| usd > 0.0));
    let html = std::fs::read_to_string(page).expect("the page");
    assert!(html.contains("<svg") && html.contains("Plan for Qwen3MoeForCausalLM"));

    let explained = run(&[&base[..], &["--explain"]].concat());
    let text = String::from_utf8_lossy(&explained.stdout).into_owned();
    for part in ["modelled, uncalibrated", "affinity, prefill of", "switching 4 GPUs", "each rank loads"] {
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
