//! Tiny runs over loopback with this build's programs. Skipped if the semmoe program is missing.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const BENCH: &str = env!("CARGO_BIN_EXE_semmoe-bench-e2e");

/// The semmoe program beside this one, if it was built.
fn semmoe() -> Option<PathBuf> {
    let path = Path::new(BENCH).with_file_name("semmoe");
    if !path.exists() {
        eprintln!("skipped: {} is not built", path.display());
        return None;
    }
    Some(path)
}

fn tiny(semmoe: &Path, folder: &Path, prompts: u32) -> Command {
    let mut command = Command::new(BENCH);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    // The ranks get a path inside this folder as an argument, by which the test finds them.
    command.env("TMPDIR", folder).arg("--semmoe").arg(semmoe).arg("--out").arg(folder.join("out"));
    command.args(["--loopback", "--attention", "dp", "--ranks", "2", "--rounds", "1", "--open-rounds", "1"]);
    command.args(["--loads", "0.5", "--clients", "4", "--max-tokens", "4"]);
    command.args(["--limit", &prompts.to_string()]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Processes that have a path of this folder in their arguments.
fn processes_of(folder: &Path) -> Vec<u32> {
    let of_folder = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&*folder.to_string_lossy()))
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(of_folder).collect()
}

#[test]
fn a_tiny_run_judges_bytes_and_draws() {
    let Some(semmoe) = semmoe() else { return };
    let folder = tempfile::tempdir().unwrap();
    let done = tiny(&semmoe, folder.path(), 40).args(["--seconds", "1"]).output().unwrap();
    let (text, words) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{words}");
    assert!(
        text.contains("| remote dispatch bytes fall as predicted, within 10% | dp |") && text.contains("Goodput:"),
        "{text}"
    );
    let out = folder.path().join("out");
    let json: Value = serde_json::from_slice(&std::fs::read(out.join("results.json")).unwrap()).unwrap();
    let bytes = &json["summaries"][0]["bytes"];
    assert!(bytes["predicted"].as_f64().unwrap() > 0.05 && bytes["measured"].as_f64().unwrap() > 0.05, "{bytes}");
    let blocks = json["contests"][0]["blocks"].as_array().unwrap();
    // One block at saturation and one at half load, for each configuration.
    assert_eq!(blocks.len(), 4);
    assert!(blocks.iter().all(|block| block["counters"]["tokens"].as_f64().unwrap() > 0.0));
    for name in ["figure4-latency-throughput", "figure5a-moe-latency-lar", "figure6d-all-to-all-local-share"] {
        let picture = std::fs::read_to_string(out.join(format!("{name}.svg"))).unwrap();
        assert!(picture.contains("dp, E, affinity") || picture.contains("not limited"), "{name}: {picture}");
    }
    assert!(processes_of(folder.path()).is_empty());
}

#[test]
fn an_interrupted_run_leaves_no_process() {
    let Some(semmoe) = semmoe() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = tiny(&semmoe, folder.path(), 8).args(["--seconds", "600"]).spawn().unwrap();
    let mut words = BufReader::new(run.stderr.take().unwrap());
    let mut line = String::new();
    // Both units are running by now; the recording unit has exited.
    while !line.contains("starting: dp, E") {
        line.clear();
        assert!(words.read_line(&mut line).unwrap() > 0, "the run ended early");
    }
    let killed = Command::new("kill").args(["-INT", &run.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let mut rest = String::new();
    words.read_to_string(&mut rest).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("bench/e2e: interrupted"), "{rest}");
    // A killed process takes a moment to disappear.
    let began = Instant::now();
    while !processes_of(folder.path()).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20), "ranks are left: {:?}", processes_of(folder.path()));
        std::thread::yield_now();
    }
}

#[test]
fn wrong_arguments_are_reported_in_one_sentence() {
    for (arguments, cause) in [
        (&["--loopback", "--semmoe", "/no/such/program"][..], "/no/such/program: "),
        (&["--loopback", "--shares", "2"], "expected a number from 0.05 to 0.9"),
        (&["--rates", "0"], "expected a number from 1 to 1000000"),
        (&["--loopback", "--rates", "500"], "cannot be used with"),
        (&["--loopback", "--ranks", "1"], "1 is not in 2..=64"),
        (&["--loopback", "--attention", "pp"], "invalid value 'pp'"),
    ] {
        let done = Command::new(BENCH).args(arguments).output().unwrap();
        let words = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(2) && words.contains(cause), "{arguments:?}: {words}");
    }
}
