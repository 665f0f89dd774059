//! Bad input is refused in one sentence, with the right exit code, before anything is served or written.

use std::path::{Path, PathBuf};

use semmoe_tables::{Phase, Profile, ProfileBuilder, Tables, Trace};

use crate::support::{describe, json_of, model_dir, repository, run, semmoe};

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// Checks the exit code, and that a single line gives the reason and contains `named`.
fn refused(args: &[&str], code: i32, named: &[&str]) {
    let output = run(args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", describe(&output));
    assert!(!said.contains("panicked"), "{args:?}: {said}");
    for name in named {
        assert!(said.contains(name), "{args:?} does not name {name:?}: {said}");
    }
}

/// A copy of the bundled model's directory without the file `missing`; the rest are symbolic links.
fn model_without(folder: &Path, missing: &str) -> PathBuf {
    let copy = folder.join("tiny-qwen3moe-15m");
    std::fs::create_dir(&copy).expect("a folder");
    for entry in std::fs::read_dir(model_dir()).expect("the model") {
        let entry = entry.expect("an entry");
        if entry.file_name() != missing {
            std::os::unix::fs::symlink(entry.path(), copy.join(entry.file_name())).expect("a link");
        }
    }
    copy
}

fn worker<'a>(model: &'a str, tables: &'a [&'a str]) -> Vec<&'a str> {
    let mut args = vec!["worker", "--model", model, "--rank", "0", "--world", "1", "--rendezvous", "127.0.0.1:0"];
    args.extend(["--listen", "127.0.0.1:0"]);
    args.extend(tables);
    args
}

/// The fields that docs/api.md lists for a command; none if it refers to another page.
fn documented(command: &str) -> Vec<String> {
    let text = std::fs::read_to_string(repository("docs/api.md")).expect("the page");
    let (_, text) = text.split_once("## Results as JSON").expect("the section");
    let name = format!("`{command}`");
    let row = text
        .lines()
        .find(|line| line.split('|').nth(1).is_some_and(|cell| cell.split(", ").any(|it| it.trim() == name)));
    let row = row.unwrap_or_else(|| panic!("docs/api.md does not document the JSON of {command}"));
    row.split('|').nth(2).expect("fields").split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_result_is_one_document_with_the_fields_that_are_documented() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| text(&folder.path().join(name));
    let trace = text(&repository("tests/data/reference.trace.safetensors"));
    let (profile, tables, config) = (path("p.profile.safetensors"), path("t.tables.safetensors"), path("semmoe.toml"));
    let backend = "[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"a\"\nengine = \"openai\"\nurl = \"http://127.0.0.1:1\"\n";
    std::fs::write(&config, backend).expect("written");
    let solve = ["solve", "--profile", &profile, "--trace", &trace, "--groups", "4", "--out", &tables];
    let solve = [&solve[..], &["--hold-out", "0.3", "--time-limit", "1"]].concat();
    let mut solved = serde_json::Value::Null;
    for (command, args) in [
        ("profile build", &["profile", "build", &trace, "--out", &profile][..]),
        ("profile merge", &["profile", "merge", &profile, &profile, "--out", &path("m.profile.safetensors")]),
        ("profile show", &["profile", "show", &profile]),
        ("solve", &solve[..]),
        ("evaluate", &["evaluate", "--tables", &tables, "--trace", &trace]),
        ("evaluate", &["evaluate", "--tables", &tables, "--profile", &profile]),
        ("tables show", &["tables", "show", &tables]),
        ("tables verify", &["tables", "verify", &tables]),
        ("tables export", &["tables", "export", "--tables", &tables, "--format", "sglang"]),
        ("tables export", &["tables", "export", "--tables", &tables, "--format", "eplb", "--out", &path("e.json")]),
        ("serve --check", &["serve", "--check", "--config", &config]),
        ("keys new", &["keys", "new", "team-a"]),
        ("template check", &["template", "check", &text(&repository("assets/tiny-qwen3moe-15m"))]),
    ] {
        let document = json_of(&run(&[args, &["--json"]].concat()));
        let fields: Vec<&String> = document.as_object().expect("an object").keys().collect();
        assert_eq!(document["command"], command, "{fields:?}");
        assert_eq!(fields[0], "command");
        if command == "solve" {
            solved.clone_from(&document);
        }
        let known = documented(command);
        let unknown: Vec<_> = fields[1..].iter().filter(|field| !known.contains(field)).collect();
        // The solver's report is long and documented in the solver.
        assert!(
            unknown.is_empty() || command == "solve",
            "{command} prints {unknown:?}, and docs/api.md has {known:?}"
        );
    }
    let shown = json_of(&run(&["tables", "show", "--json", &tables]));
    let promised = shown["promised_lar"].as_f64().expect("requests were held out");
    assert!((solved["held_out"]["figures"]["lar"].as_f64().expect("a rate") - promised).abs() < 1e-4, "{promised}");
    assert_eq!(solved["outcome"]["local_activation_rate"]["expected"], solved["held_out"]["figures"]["lar"]);
}

#[test]
fn solve_and_evaluate_end_with_an_outcome_and_the_next_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = text(&crate::support::solved_tables(folder.path()));
    let trace = text(&repository("tests/data/reference.trace.safetensors"));
    let pages = [folder.path().join("tables.html"), folder.path().join("evaluation.html")];
    let [of_tables, of_evaluation] = pages.each_ref().map(|page| text(page));
    assert!(run(&["tables", "show", &tables, "--html", &of_tables]).status.success());
    let evaluate = ["evaluate", "--tables", &tables, "--trace", &trace];
    let output = run(&[&evaluate[..], &["--html", &of_evaluation]].concat());
    assert!(output.status.success(), "{}", describe(&output));
    let short = String::from_utf8(output.stdout).expect("UTF-8");
    let [before_last, last] = [1, 0].map(|back| short.lines().rev().nth(back).expect("a line"));
    assert!(before_last.contains(". On this file, ") && before_last.contains("bytes between ranks"), "{short}");
    assert!(last.starts_with("next:    semmoe "), "{short}");
    let row = short.lines().find(|line| line.starts_with("local activation rate")).expect("the rate");
    let figures: Vec<f64> = row.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(figures[0] < figures[1] && (figures[0] - 0.25).abs() < 0.02, "{row}");
    assert!(before_last.starts_with("verdict: "), "{short}");
    assert!(short.lines().all(|line| line.len() <= 400) && short.lines().count() < 15, "{short}");
    let verbose = String::from_utf8(run(&[&evaluate[..], &["--verbose"]].concat()).stdout).expect("UTF-8");
    assert!(verbose.contains("\npolicies.round_robin.request_lar ") && verbose.contains(last), "{verbose}");
    for page in pages {
        let page = std::fs::read_to_string(page).expect("a page");
        assert!(
            page.matches("<svg").count() >= 3 && !page.contains("<script") && !page.contains("NaN"),
            "{}",
            &page[..200]
        );
    }
    // A profile can only judge tokens; the output must say so.
    let profile = text(&folder.path().join("p.profile.safetensors"));
    let judged =
        String::from_utf8(run(&["evaluate", "--tables", &tables, "--profile", &profile]).stdout).expect("UTF-8");
    assert!(judged.contains("tokens from the file, each on its most likely rank"), "{judged}");
    // Its counts do not reveal to how many ranks a token goes, either.
    assert!(judged.contains("activations between ranks") && !judged.contains("bytes between ranks"), "{judged}");
}

#[test]
fn wrong_arguments_exit_with_2() {
    refused(&["up", "--json"], 2, &["--check"]);
    refused(&["up", "--ranks", "0"], 2, &["0"]);
    refused(&["solve", "--groups", "4"], 2, &["--profile"]);
    refused(&["nonsense"], 2, &["nonsense"]);
    let off =
        ["worker", "--model", ".", "--rank", "0", "--world", "1", "--rendezvous", "127.0.0.1:0", "--shuffle", "off"];
    refused(&off, 2, &["--shuffle requires --attention tp"]);
    refused(&["up", "--shuffle", "auto"], 2, &["--shuffle requires --attention tp"]);
    refused(&["up", "--experts", "tp", "--check"], 2, &["--check compares expert placements", "--experts tp"]);
    refused(&["up", "--transport", "pigeons"], 2, &["pigeons"]);
    refused(&["worker", "--model", ".", "--rank", "4", "--world", "4", "--rendezvous", "127.0.0.1:0"], 2, &["4"]);
}

#[test]
fn missing_files_are_named() {
    refused(&["tables", "show", "/nowhere/x.safetensors"], 2, &["/nowhere/x.safetensors"]);
    refused(&["profile", "show", "/nowhere/x.safetensors"], 2, &["/nowhere/x.safetensors"]);
    refused(&["serve", "--config", "/nowhere/x.toml"], 2, &["/nowhere/x.toml"]);
    refused(&["solve", "--profile", "/nowhere/p", "--groups", "4", "--out", "/nowhere/o"], 2, &["/nowhere/p"]);
    refused(&["up", "--model", "/nowhere/model", "--port", "0"], 2, &["/nowhere/model"]);
}

#[test]
fn an_incomplete_model_directory_is_reported_before_serving() {
    for missing in ["config.json", "model.safetensors", "tokenizer.json"] {
        let folder = tempfile::tempdir().expect("a folder");
        let model = text(&model_without(folder.path(), missing));
        refused(&worker(&model, &[]), 2, &[missing]);
    }
}

#[test]
fn a_tokenizer_that_is_not_the_models_is_reported_before_serving() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model_without(folder.path(), "tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model_dir().join("tokenizer.json")).expect("the tokenizer"))
            .expect("JSON");
    let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
    added.push(serde_json::json!({"id": 10240, "content": "<|more|>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}));
    std::fs::write(model.join("tokenizer.json"), tokenizer.to_string()).expect("written");
    refused(&worker(&text(&model), &[]), 2, &["tokenizer", "10240"]);
}

#[test]
fn solve_evaluate_and_refuse() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| text(&folder.path().join(name));
    let trace_path = text(&repository("tests/data/reference.trace.safetensors"));
    let trace = Trace::open(Path::new(&trace_path)).expect("a valid trace");
    let (profile, tables) = (path("p.profile.safetensors"), path("t.tables.safetensors"));
    let mut builder =
        ProfileBuilder::new(trace.model().clone(), trace.provenance().clone(), Phase::All).expect("a model");
    builder.add_trace(&trace).expect("counts");
    builder.write(Path::new(&profile)).expect("written");
    Profile::open(Path::new(&profile)).expect("valid");

    refused(&["solve", "--profile", &profile, "--groups", "5", "--out", &tables], 2, &["5", "32"]);
    assert!(!Path::new(&tables).exists(), "nothing is written after an error");
    refused(&["solve", "--profile", &trace_path, "--groups", "4", "--out", &tables], 2, &["semmoe.trace"]);

    let solve = ["solve", "--profile", &profile, "--trace", &trace_path, "--groups", "4", "--out", &tables];
    let solved = run(&solve);
    assert!(solved.status.success(), "{}", describe(&solved));
    let evaluation = json_of(&run(&["evaluate", "--tables", &tables, "--trace", &trace_path, "--json"]));
    for field in ["lar", "lar_random", "remote_ranks_per_token", "expert_load_imbalance", "token_imbalance"] {
        assert!(evaluation[field].is_number(), "{field} in {evaluation}");
    }
    assert!(evaluation["lar"].as_f64() > evaluation["lar_random"].as_f64(), "{evaluation}");
    // A profile cannot be replayed, so options of the replay are refused.
    for option in ["--in-flight", "--output-tokens", "--prefix-blocks"] {
        let line = ["evaluate", "--tables", &tables, "--profile", &profile, option, "4"];
        refused(&line, 2, &[option, "--profile"]);
    }
    assert!(run(&["tables", "verify", &tables]).status.success());

    let (paper, report) = (path("paper.tables.safetensors"), path("paper.json"));
    let solve = ["solve", "--solver", "paper", "--profile", &profile, "--trace", &trace_path, "--groups", "4"];
    let solved = run(&[&solve[..], &["--out", &paper, "--report", &report]].concat());
    assert!(solved.status.success(), "{}", describe(&solved));
    assert!(Tables::open(Path::new(&paper)).expect("valid").solver().contains("algorithm=paper"));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).expect("a report")).expect("JSON");
    assert_eq!(report["unit"], "request", "{report}");
    refused(&["solve", "--solver", "papers", "--profile", &profile], 2, &["exact", "paper"]);

    // Tables of four groups do not fit a unit of one rank.
    refused(&worker(&text(&model_dir()), &["--tables", &tables]), 2, &["4"]);

    // A damaged file is refused by name, by each command that opens it.
    let mut bytes = std::fs::read(&tables).expect("the tables");
    bytes.truncate(bytes.len() / 2);
    let damaged = path("damaged.tables.safetensors");
    std::fs::write(&damaged, bytes).expect("written");
    refused(&["tables", "verify", &damaged], 2, &[&damaged]);
    refused(&["evaluate", "--tables", &damaged, "--trace", &trace_path], 2, &[&damaged]);
    refused(&worker(&text(&model_dir()), &["--tables", &damaged]), 2, &[&damaged]);
}

/// `semmoe ... | head`: the reader is gone before anything is printed. The command completes without mentioning the
/// pipe.
#[test]
fn a_reader_that_left_is_no_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| text(&folder.path().join(name));
    let trace = text(&repository("tests/data/reference.trace.safetensors"));
    let (profile, tables, config) = (path("p.profile"), path("t.tables"), path("semmoe.toml"));
    std::fs::write(
        &config,
        "[server]\nlisten = \"127.0.0.1:0\"\n[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n\
         [[models.backends]]\nname = \"a\"\nengine = \"openai\"\nurl = \"http://127.0.0.1:1\"\n",
    )
    .expect("written");
    for args in [
        &["--help"][..],
        &["--version"],
        &["solve", "--help"],
        &["profile", "build", &trace, "--out", &profile],
        &["profile", "show", &profile],
        &["profile", "show", "--json", &profile],
        &["profile", "merge", &profile, &profile, "--out", &path("m.profile")],
        &["solve", "--solver", "paper", "--profile", &profile, "--trace", &trace, "--groups", "4", "--out", &tables],
        &["evaluate", "--tables", &tables, "--trace", &trace],
        &["evaluate", "--tables", &tables, "--trace", &trace, "--json"],
        &["tables", "show", &tables],
        &["tables", "verify", &tables],
        &["tables", "export", "--tables", &tables, "--format", "sglang", "--out", &path("e.json")],
        &["keys", "new"],
        &["template", "check", &text(&repository("assets/tiny-qwen3moe-15m"))],
        &["serve", "--config", &config, "--check"],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = semmoe(args).stdout(writer).output().expect("the command starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        assert!(!said.contains("pipe") && !said.contains("panicked"), "{args:?}: {said}");
    }
}
