//! `semmoe solve --embeddings`: the model's own embeddings as prior knowledge in T.

use std::path::Path;

use semmoe_tables::{Phase, ProfileBuilder, Tables, Trace};

use crate::support::{describe, repository, run};

const CHECKPOINT: &str = "assets/tiny-qwen3moe-15m";

/// Exit code 2, and a message that contains all of `named`.
fn refused(args: &[&str], named: &[&str]) {
    let output = run(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    for name in named {
        assert!(said.contains(name) && !said.contains("panicked"), "{args:?} does not name {name:?}: {said}");
    }
}

/// A profile of the bundled model in a folder.
fn profile(folder: &Path) -> String {
    let trace = Trace::open(&repository("tests/data/reference.trace.safetensors")).expect("a valid trace");
    let mut profile =
        ProfileBuilder::new(trace.model().clone(), trace.provenance().clone(), Phase::All).expect("a model");
    profile.add_trace(&trace).expect("counts");
    let path = folder.join("profile.safetensors");
    profile.write(&path).expect("written");
    text(&path)
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// A safetensors file of one F32 tensor.
fn checkpoint(path: &Path, name: &str, shape: [usize; 2], value: f32) -> String {
    let data: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), shape[0] * shape[1]).flatten().collect();
    let header =
        format!(r#"{{"{name}": {{"dtype": "F32", "shape": {shape:?}, "data_offsets": [0, {}]}}}}"#, data.len());
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &data].concat()).expect("written");
    text(path)
}

#[test]
fn embeddings_and_strings_know_more_tokens_and_the_report_says_which_were_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = profile(folder.path());
    let (tables, report) = (text(&folder.path().join("t")), text(&folder.path().join("r")));
    let model = text(&repository(CHECKPOINT));
    // T's prior does not depend on the duration of the search for E.
    let known = |more: &[&str], priors: &[&str]| {
        let solve = [
            "solve",
            "--profile",
            &profile,
            "--groups",
            "4",
            "--out",
            &tables,
            "--report",
            &report,
            "--time-limit",
            "0.2",
        ];
        let solved = run(&[&solve[..], more].concat());
        assert!(solved.status.success(), "{}", describe(&solved));
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&report).expect("a report")).expect("JSON");
        assert_eq!(report["priors"], serde_json::json!(priors));
        let solver = Tables::open(Path::new(&tables)).expect("valid tables").solver().to_owned();
        assert!(priors.iter().all(|prior| solver.contains(&format!("prior={prior}"))), "{solver}");
        report["evidence"]["tokens_without_evidence"].as_u64().expect("a number")
    };
    let nothing = known(&[], &[]);
    let embeddings = known(&["--embeddings", &format!("{model}/model.safetensors")], &["embeddings"]);
    let both = known(&["--embeddings", &model, "--tokenizer", &model], &["embeddings", "strings"]);
    assert!(nothing > 5_000 && embeddings < 100 && both <= embeddings, "{nothing} {embeddings} {both}");
    // Algorithm 1 has its own T.
    known(&["--embeddings", &model, "--solver", "paper"], &[]);
}

#[test]
fn embeddings_that_cannot_be_the_models_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = profile(folder.path());
    let out = text(&folder.path().join("t"));
    let solve = |more: &[&str], named: &[&str]| {
        let solve = ["solve", "--profile", &profile, "--groups", "4", "--out", &out];
        refused(&[&solve[..], more].concat(), named);
        assert!(!Path::new(&out).exists(), "{more:?}");
    };
    let path = |name: &str| folder.path().join(name);
    let small = checkpoint(&path("small"), "model.embed_tokens.weight", [100, 4], 1.0);
    solve(&["--embeddings", &small], &["small", "embeddings for 100 tokens, expected at least the profile's 10240"]);
    let other = checkpoint(&path("other"), "model.norm.weight", [100, 4], 1.0);
    solve(&["--embeddings", &other], &["other", "no such tensor", "embed_tokens.weight"]);
    let infinite = checkpoint(&path("infinite"), "embed", [10_240, 2], f32::INFINITY);
    let named = ["--embeddings", &infinite, "--embeddings-tensor", "embed"];
    solve(&named, &["`embed`", "not finite at row 0, column 0"]);
    solve(&["--embeddings-tensor", "embed"], &["--embeddings"]);
    solve(&["--embeddings", &profile], &["no such tensor"]);
    solve(&["--embeddings", "/nowhere/m"], &["/nowhere/m"]);
    let model = text(&repository(CHECKPOINT).join("model.safetensors"));
    let onto = ["solve", "--profile", &profile, "--groups", "4", "--out", &model, "--embeddings", &model];
    refused(&onto, &["is the input"]);
}
