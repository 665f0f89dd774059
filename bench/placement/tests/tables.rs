//! The binary prints its tables from a fresh clone, and reports errors in its input.

use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_semmoe-bench-placement")).args(args).output().expect("the binary runs")
}

/// Cells of the row that begins with `name`, in the first table.
fn row(text: &str, name: &str) -> Vec<f64> {
    let line = text.lines().find(|line| line.starts_with(&format!("| {name} |"))).expect(name);
    line.split('|').skip(2).filter_map(|cell| cell.trim().parse().ok()).collect()
}

#[test]
fn synthetic_routing_orders_the_methods() {
    let output = run(&["--groups", "4", "--starts", "2", "--threads", "1", "synthetic", "--requests", "200"]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [chance, random, ours] =
        ["contiguous, random tokens", "random + best T", "semmoe + best T"].map(|n| row(&text, n));
    assert!((chance[0] - 0.25).abs() < 1e-4, "{chance:?}");
    assert!(random[0] > chance[0] + 0.05 && ours[0] > random[0] + 0.05, "{text}");
    assert!(ours[3] <= 1.1, "expert load of the solving data: {ours:?}");
    assert!(text.contains("| Algorithm 1, its own T |"), "{text}");
}

#[test]
fn bad_input_is_reported() {
    let said = |args: &[&str]| {
        let output = run(args);
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    assert!(said(&["domains", "a.profile.safetensors", "b.profile.safetensors"]).contains("a.profile.safetensors"));
    assert!(said(&["--groups", "5", "--starts", "1", "synthetic", "--requests", "20"]).contains("64"));
}
